"""Grammars that constrain outputs: compiled once, then one state a sequence.

xgrammar does the matching. A mask is packed, 32 tokens an int32 word, until `to_bools` makes it
bool on the device. Shapes: V vocabulary, W = ceil(V / 32) words, R rows.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peagle.config.structured import StructuredOutput
from peagle.engine.grammar.budget import GrammarBudget, Spender
from peagle.engine.grammar.ebnf import Rules
from peagle.engine.grammar.json_grammar import json_grammar
from peagle.engine.grammar.regex import translate
from peagle.engine.grammar.schema import prepare_schema
from peagle.engine.grammar.user_ebnf import user_grammar
from peagle.errors import UserError
from peagle.extras import install_extra

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase

# Compilation slows with the square of some sources and cannot be interrupted.
MAX_SOURCE = 64 * 1024
_SHOWN_CHARACTERS = 80
# Seconds beyond which moving past a step's tokens is slow; few grammars take longer.
_LONG_ACCEPT_S = 0.001
# Threads of one compilation.
MAX_THREADS = min(8, os.cpu_count() or 1)
# Compiled grammars that are kept for the next request with the same structure.
_MAX_CACHED_BYTES = 64 << 20
# Structures that are remembered as too slow.
_MAX_SLOW = 256
_PROBE = '{"a": [1, -2.5, "b cd"]}'


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar compiled for one vocabulary; `textless_ids` are special tokens and padding rows."""

    grammar: xgrammar.CompiledGrammar
    vocab_size: int
    textless_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class DraftMasks:
    """The masks that verify the drafts of a sequence.

    Row j has the tokens allowed after the first j drafts, in a tree after the drafts on its path.
    Behind a forbidden draft a chain has no rows, and a tree has rows that allow everything, as
    after a stop id. For a tree `parents` has the row of each draft's parent, and `scores` the score
    of its path if known; both are None for a chain.
    """

    drafts: tuple[int, ...]
    bitmask_RW: Tensor
    parents: tuple[int, ...] | None = None
    scores: tuple[float, ...] | None = None


class GrammarCompiler:
    """Compiles structured outputs for one model, and keeps those used last.

    Args:
        vocab_size: V, rows of the model's output; ids that the tokenizer lacks are never allowed.
        stop_token_ids: the model's end-of-text ids.
        cache_size: compiled grammars kept.
        step_budget_s: processor seconds that a grammar may take in one step; None sets no limit.

    Raises:
        UserError: xgrammar is not installed, there is no end-of-text id, or the tokens of the
            tokenizer do not concatenate to the text that they decode to.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        stop_token_ids: Iterable[int],
        *,
        cache_size: int = 64,
        step_budget_s: float | None = None,
    ) -> None:
        stop = sorted(i for i in set(stop_token_ids) if 0 <= i < vocab_size)
        if not stop:
            raise UserError(
                "structured output needs an end-of-text id, and the model has none; set "
                "eos_token_id in its generation_config.json."
            )
        xgrammar = _import_xgrammar()
        self.vocab_size = vocab_size
        self._stop_token_ids = frozenset(stop)
        info = _tokenizer_info(xgrammar, tokenizer, vocab_size, stop)
        self._textless_ids = frozenset(info.special_token_ids) | self._stop_token_ids
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=MAX_THREADS, cache_enabled=False
        )
        self._cache: OrderedDict[StructuredOutput, CompiledGrammar] = OrderedDict()
        self._cache_size = cache_size
        self._budget = GrammarBudget(step_budget_s)
        self._slow: OrderedDict[StructuredOutput, str] = OrderedDict()
        self._lock = threading.Lock()  # guards the cache: compilations may run side by side

    def compile(self, structure: StructuredOutput) -> CompiledGrammar:
        """Return the compiled grammar of a structured output.

        Raises:
            UserError: it does not compile, is too long, or no text fits it; the message has the
                source, shortened, and the reason.
        """
        with self._lock:
            if structure in self._slow:
                raise UserError(f"{_shown(structure)}: {self._slow[structure]}")
            if structure in self._cache:
                self._cache.move_to_end(structure)
                return self._cache[structure]
        try:
            compiled = CompiledGrammar(
                self._compile(structure), self.vocab_size, self._textless_ids
            )
        except UserError as error:
            raise UserError(f"{_shown(structure)}: {error}") from None
        except (RuntimeError, ValueError, TypeError) as error:
            raise UserError(f"{_shown(structure)} does not compile: {_reason(error)}") from None
        state = GrammarState(compiled, self._stop_token_ids)
        start_s = time.thread_time()
        if state.is_stuck:
            raise UserError(f"{_shown(structure)}: no text of this vocabulary fits it.")
        limit_s = self._budget.seconds
        if limit_s is not None and time.thread_time() - start_s > limit_s:
            self.refuse(structure, self._budget.excess)
            raise UserError(f"{_shown(structure)}: {self._budget.excess}")
        with self._lock:
            self._cache[structure] = compiled
            older = [one.grammar.memory_size_bytes for one in self._cache.values()][:-1]
            while len(older) >= self._cache_size or sum(older) > _MAX_CACHED_BYTES:
                self._cache.popitem(last=False)
                del older[0]
        return compiled

    def start(
        self, structure: StructuredOutput, stop_token_ids: Iterable[int] | None = None
    ) -> GrammarState:
        """Return a state before the first token, with the given stop ids, by default the model's.

        Raises:
            UserError: as for `compile`, or the request has no stop id.
        """
        stop = self._stop_token_ids if stop_token_ids is None else frozenset(stop_token_ids)
        return GrammarState(self.compile(structure), stop, self._budget)

    @property
    def step_excess(self) -> str:
        """Return the message to a user whose grammar exceeded the budget of a step."""
        return self._budget.excess

    def refuse(self, structure: StructuredOutput, reason: str) -> None:
        """Refuse a structure from now on, because it takes too long; users see `reason`."""
        with self._lock:
            self._cache.pop(structure, None)
            self._slow[structure] = reason
            if len(self._slow) > _MAX_SLOW:
                self._slow.popitem(last=False)

    def _compile(self, structure: StructuredOutput) -> xgrammar.CompiledGrammar:
        source = structure.source
        if len(source) > MAX_SOURCE:
            raise UserError(f"it has {len(source)} characters; expected {MAX_SOURCE} at most.")
        rules = Rules()
        if structure.kind == "regex":
            source = rules.grammar({"root": translate(source, rules)})
        elif structure.kind == "ebnf":
            source = self._user_grammar(source)
        else:
            prepared, parts = prepare_schema(source or '{"type": "object"}', rules)
            source = json_grammar(prepared, parts, rules, compact=structure.compact)
        self._budget.wait_for_room()
        return self._compiler.compile_grammar(source)

    def _user_grammar(self, source: str) -> str:
        written = user_grammar(source)
        _import_xgrammar().Grammar.from_ebnf(source)  # its messages name the user's own lines
        if written is None:
            raise UserError(
                "it has more than rules of texts, character classes, names, brackets and repeats; "
                "write it with these."
            )
        return written


class GrammarState(Spender):
    """The position of one sequence in its grammar: between steps, right behind its output tokens.

    A grammar that cannot go on (no token of the vocabulary fits) allows the stop ids, so that the
    output ends there rather than break the grammar.

    Args:
        compiled: the grammar.
        stop_token_ids: the only ids that end the output; none of them is ever text.
        budget: budget of a step, shared by the states of an engine; None sets no limit.

    Attributes:
        prepared: masks from `prepare` for the next verification; None until then.

    Raises:
        UserError: there is no stop id.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        stop_token_ids: Iterable[int],
        budget: GrammarBudget | None = None,
    ) -> None:
        super().__init__()
        self.budget = budget or GrammarBudget()
        self.prepared: DraftMasks | None = None
        self._accept_s = 0.0
        self._compiled = compiled
        self._stop = sorted(i for i in set(stop_token_ids) if 0 <= i < compiled.vocab_size)
        if not self._stop:
            raise UserError(
                "structured output needs an id that ends it; leave ignore_eos off, or give "
                "stop_token_ids."
            )
        self._text_stop = [i for i in self._stop if i not in compiled.textless_ids]
        self._stop_W, self._text_stop_W = (
            to_mask(ids, compiled.vocab_size) for ids in (self._stop, self._text_stop)
        )
        matcher = _import_xgrammar().GrammarMatcher
        self._matcher = matcher(compiled.grammar, override_stop_tokens=self._stop)
        self.vocab_size = compiled.vocab_size
        self.is_finished = False  # whether a stop id was accepted

    @property
    def failure(self) -> tuple[str, str] | None:
        """Return code and text of the error that must end the request; None without one."""
        if self.error is not None:
            what = _reason(self.error) or type(self.error).__name__
            return "grammar_failed", (
                f"The output ended: the matcher of its grammar failed ({what}). This is a fault of "
                "the server, not of the request; another way to write the grammar may avoid it."
            )
        if self.is_over_budget:
            return "grammar_too_slow", f"The output ended: {self.budget.excess}"
        return None

    @property
    def is_complete(self) -> bool:
        """Return whether the text so far fits the whole grammar, so that a stop id may follow."""
        return self._matcher.is_completed()

    @property
    def is_stuck(self) -> bool:
        """Return whether the text so far is incomplete and no token can follow."""
        if self.is_finished or self.is_complete:
            return False
        bitmask = full_bitmask(1, self.vocab_size)
        self._fill(bitmask, 0)
        return not bitmask.any()

    def mask_into(self, bitmask_RW: Tensor, row: int) -> None:
        """Write the tokens allowed next into a row, int32 on the CPU; all tokens once finished."""
        if self.is_finished:
            bitmask_RW[row] = -1
            return
        self._fill(bitmask_RW, row)
        if not self.is_complete and not bitmask_RW[row].any():
            bitmask_RW[row] = self._stop_W

    def try_advance(self, token: int) -> bool:
        """Move past a token and return True if it is allowed; else return False."""
        if self.is_finished:
            return False
        if token in self._stop:
            self.is_finished = self.is_complete or self.is_stuck
            return self.is_finished
        if not 0 <= token < self.vocab_size or token in self._compiled.textless_ids:
            return False
        return self._matcher.accept_token(token)

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""
        if count and self.is_finished:
            self.is_finished = False
            count -= 1
        if count:
            self._matcher.rollback(count)

    def accept(self, tokens: Sequence[int]) -> int:
        """Move past the tokens of a step, which were emitted under this state's masks.

        A long move leaves the state busy. If the matcher refuses a token that a mask allowed, or
        raises an exception, the state has a `failure` afterwards.

        Returns:
            number of tokens that the grammar accepted: all of them, unless it failed.
        """
        self.spent_s, self.prepared = 0.0, None
        num_taken = 0

        def move(_: int, state: GrammarState) -> None:
            nonlocal num_taken
            start_s = time.thread_time()
            for token in tokens:
                if not state.try_advance(token):
                    raise RuntimeError(f"it refuses token {token}, which the mask allowed")
                num_taken += 1
            state._accept_s = time.thread_time() - start_s

        # The time grows slowly from step to step, so the last one predicts this one.
        if self._accept_s > _LONG_ACCEPT_S:
            self.budget.each([self], move)
        else:
            self.attempt(partial(move, 0, self))
        return len(tokens) if self.is_busy else num_taken

    def prepare(self, drafts: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Find the allowed drafts, and the masks of the rows that verify them.

        The state ends at its old position.

        Args:
            parents: for a tree the row of each draft's parent; None for a chain.
        """
        bitmask_RW = full_bitmask(len(drafts) + 1, self.vocab_size)
        children: list[list[int]] = [[] for _ in range(len(drafts) + 1)]
        rows_before = range(len(drafts)) if parents is None else parents
        for node, row_before in enumerate(rows_before[: len(drafts)]):
            children[row_before].append(node)

        def visit(row: int) -> int:
            """Return the last row that a path of allowed drafts reaches from this row."""
            last = row
            self.mask_into(bitmask_RW, row)
            for node in children[row]:
                if self.try_advance(drafts[node]):
                    last = max(last, visit(node + 1))
                    self.rollback(1)
            return last

        last = visit(0)
        if parents is None:
            self.prepared = DraftMasks(tuple(drafts), bitmask_RW[: last + 1])
        else:
            self.prepared = DraftMasks(tuple(drafts), bitmask_RW, tuple(rows_before))

    def is_prepared_for(self, drafts: Sequence[int], parents: Sequence[int] | None = None) -> bool:
        """Return whether the state is free and has the masks of these drafts.

        Args:
            parents: of a tree, the row of each draft's parent, to be compared too; None: they are
                not, or the drafts are a chain.
        """
        prepared = self.prepared
        if not self.is_free or prepared is None:
            return False
        if parents is not None and (prepared.parents or ())[: len(parents)] != tuple(parents):
            return False
        return prepared.drafts[: len(drafts)] == tuple(drafts)

    def allowed(self, drafts: list[int]) -> list[int]:
        """Return the drafts before the first forbidden one; none without their masks."""
        if not self.is_prepared_for(drafts):
            return []
        assert self.prepared is not None
        return drafts[: len(self.prepared.bitmask_RW) - 1]

    def prepared_tree(self) -> tuple[list[int], list[int], list[float]]:
        """Return drafts, parents and scores of the tree that `grow_masked_trees` left.

        They are empty while the growth goes on, and if it failed.
        """
        if not self.is_free or self.prepared is None:
            return [], [], []
        prepared = self.prepared
        return list(prepared.drafts), list(prepared.parents or ()), list(prepared.scores or ())

    def _fill(self, bitmask_RW: Tensor, row: int) -> None:
        self._matcher.fill_next_token_bitmask(bitmask_RW, row)
        # A stop id that is text would end the output in the middle of the structure.
        if self._text_stop and not self.is_complete:
            bitmask_RW[row] &= ~self._text_stop_W


def full_bitmask(rows: int, vocab_size: int) -> Tensor:
    """Return a packed mask that allows everything, int32 [R, W] on the CPU."""
    # Threads outside of inference mode write into the mask.
    with torch.inference_mode(False):
        return torch.full((rows, -(-vocab_size // 32)), -1, dtype=torch.int32)


def to_bools(bitmask_RW: Tensor, vocab_size: int) -> Tensor:
    """Return the packed mask as bool [R, V], on its device."""
    bits = torch.arange(32, dtype=torch.int32, device=bitmask_RW.device)
    unpacked = (bitmask_RW.unsqueeze(-1) >> bits).bitwise_and_(1).bool()
    return unpacked.flatten(-2)[..., :vocab_size]


def to_mask(token_ids: Sequence[int], vocab_size: int) -> Tensor:
    """Return a packed mask that allows only these ids, int32 [W] on the CPU."""
    allowed = torch.zeros(-(-vocab_size // 32) * 32, dtype=torch.int64)
    allowed[list(token_ids)] = 1
    words = (allowed.view(-1, 32) << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _import_xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError:
        raise UserError(
            "structured output needs the package xgrammar, which is not installed; run "
            f"{install_extra('grammar')}"
        ) from None
    return xgrammar


def _tokenizer_info(
    xgrammar: Any, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop: list[int]
) -> xgrammar.TokenizerInfo:
    """Return the bytes of every token in the output, none for special tokens, as TokenizerInfo."""
    try:
        detected = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=stop
        )
    except (RuntimeError, ValueError, AttributeError) as error:
        raise UserError(
            f"structured output cannot use this {type(tokenizer).__name__}: {_reason(error)}"
        ) from None
    token_bytes = detected.decoded_vocab
    added = tokenizer.added_tokens_decoder
    for token_id, token in added.items():
        if token_id < vocab_size:  # xgrammar would read the text of added tokens as encoded bytes
            token_bytes[token_id] = b"" if token.special else token.content.encode()
    for token_id in tokenizer.all_special_ids:
        if token_id < vocab_size:
            token_bytes[token_id] = b""
    _check_bytes(tokenizer, token_bytes)
    return xgrammar.TokenizerInfo(
        token_bytes, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=stop
    )


def _check_bytes(tokenizer: PreTrainedTokenizerBase, token_bytes: Sequence[bytes]) -> None:
    """Refuse tokenizers that add or drop blanks between tokens (WordPiece)."""
    ids = tokenizer.encode(_PROBE, add_special_tokens=False)
    joined = b"".join(token_bytes[i] for i in ids if i < len(token_bytes))
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if joined.strip() != str(text).encode().strip():
        raise UserError(
            f"structured output cannot use this tokenizer: the tokens of {_PROBE!r} decode to "
            f"{text!r} but hold {joined.decode(errors='replace')!r}. Expected a byte-level or "
            "byte-fallback vocabulary."
        )


def _shown(structure: StructuredOutput) -> str:
    source = structure.source
    if len(source) > _SHOWN_CHARACTERS:
        source = f"{source[:_SHOWN_CHARACTERS]}... ({len(structure.source)} characters)"
    return f"{structure.kind} {source!r}" if source else structure.kind


def _reason(error: Exception) -> str:
    """Return xgrammar's message in one short line, without time and place in its source."""
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()
    text = re.sub(r"^Check failed: \(.*?\) is false: ", "", text)
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:300]}..."
