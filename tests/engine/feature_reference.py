"""A language of eight tokens, and what every feature must do in it, by transformers and textbook.

The reference decodes with the transformers model, a full forward pass for every context; logits are
processed by `sampling_reference`, and what ends or constrains an output is said here once more on
plain strings.
"""

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from peagle import LLM, SamplingParams
from peagle.config.structured import StructuredOutput
from peagle.kernels.sampling.logprobs import TokenLogprobs
from peagle.speculation import Drafts, ProposerInput
from peagle.speculation.proposers import DraftConstraint
from tests.conftest import make_target_folder
from tests.engine.engines import replant
from tests.engine.sampling_reference import processed
from tests.speculation.test_verification import probabilities

TOKENS = ("", "[", "]", ",", "1", "2", "2,", "")
VOCAB = len(TOKENS)
EOS = (0, 7)  # by the generation config; the model's config names the first only

REGEX = StructuredOutput.regex(r"[12]{1,4}(,[12]{2}){0,3}")
ITEMS = [1, 2, 12, 221]
JSON = StructuredOutput.json_schema({"type": "array", "items": {"enum": ITEMS}, "maxItems": 5})
PAIRS = tuple(a + b for a in "12" for b in "12")
LANGUAGES: dict[StructuredOutput, frozenset[str]] = {
    REGEX: frozenset(
        ",".join(("".join(first), *rest))
        for n in range(1, 5)
        for first in itertools.product("12", repeat=n)
        for m in range(4)
        for rest in itertools.product(PAIRS, repeat=m)
    ),
    JSON: frozenset(
        json.dumps(items, separators=(",", ":"))
        for n in range(6)
        for items in itertools.product(ITEMS, repeat=n)
    ),
}

Output = tuple[int, ...]


def make_folder(folder: Path) -> Path:
    """A random target with the tokens above; it is fairly certain, so that their order shows."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": 2, "hidden_size": 16}
    make_target_folder(folder, seed=19, **sizes)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)
    model.generation_config.eos_token_id = list(EOS)
    model.save_pretrained(folder)
    ends = {"<|end|>": 0, "<|stop|>": 7}
    vocab = {**ends, **{text: i for i, text in enumerate(TOKENS) if text}}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("2", ",")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(ends))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>").save_pretrained(folder)
    return folder


def text_of(output: Sequence[int]) -> str:
    return "".join(TOKENS[token] for token in output)


@cache
def _beginnings(structure: StructuredOutput) -> frozenset[str]:
    return frozenset(text[:n] for text in LANGUAGES[structure] for n in range(len(text) + 1))


def _permitted(structure: StructuredOutput | None, output: Output) -> set[int]:
    """Tokens that a structure lets follow."""
    if structure is None:
        return set(range(VOCAB))
    text, beginnings = text_of(output), _beginnings(structure)
    tokens = {t for t in range(VOCAB) if TOKENS[t] and text + TOKENS[t] in beginnings}
    return tokens | (set(EOS) if text in LANGUAGES[structure] else set())


def _spelt(word: str | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(TOKENS.index, word)) if isinstance(word, str) else word


@dataclass
class Reference:
    """Plain decoding of one model, by the transformers model in the folder in float64."""

    folder: Path
    _rows: dict[Output, list[float]] = field(default_factory=dict)
    _probs: dict[tuple[str, Output, Output], list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float64)
        self.model = model.eval()

    @torch.no_grad()
    def logits(self, context: Output) -> list[float]:
        """What follows a context, raw."""
        if context not in self._rows:
            self._rows[context] = self.model(torch.tensor([context])).logits[0, -1].tolist()
        return self._rows[context]

    def probs(self, params: SamplingParams, prompt: Output, output: Output) -> list[float]:
        """p(next token) under everything that the request asks for."""
        key = (repr(params), prompt, output)
        if key not in self._probs:
            params = replace(params, bad_words=tuple(map(_spelt, params.bad_words)))
            permitted = _permitted(params.structured_output, output)
            stop = frozenset(_stop_ids(params))
            row = processed(params, prompt, output, stop, self.logits(prompt + output), permitted)
            self._probs[key] = probabilities(row, params.temperature, params.top_k, params.top_p)
        return self._probs[key]

    def likeliest(self, params: SamplingParams, prompt: Output, output: Output) -> int:
        probs = self.probs(params, prompt, output)
        return probs.index(max(probs))

    def greedy(self, params: SamplingParams, prompt: Output) -> Output:
        """The likeliest token, until something ends the output."""
        output: Output = ()
        while not ended(params, output):
            output += (self.likeliest(params, prompt, output),)
        return output

    def logprobs(self, context: Output, token: int, num_top: int) -> TokenLogprobs:
        """What the raw logits say of the token behind a context."""
        row = self.logits(context)
        values = torch.tensor(row, dtype=torch.float64).log_softmax(-1).tolist()
        order = sorted(range(VOCAB), key=lambda t: (-row[t], t))
        top = [(t, values[t]) for t in order[:num_top]]
        return TokenLogprobs(token, values[token], 1 + sum(x > row[token] for x in row), top)

    def joint(self, params: SamplingParams, prompt: Output) -> dict[Output, float]:
        """P(output) of all outputs up to their end."""
        return dict(self._continued(params, prompt, (), 1.0))

    def _continued(
        self, params: SamplingParams, prompt: Output, output: Output, weight: float
    ) -> Iterator[tuple[Output, float]]:
        if ended(params, output):
            yield output, weight
            return
        for token, p in enumerate(self.probs(params, prompt, output)):
            if p > 0:
                yield from self._continued(params, prompt, (*output, token), weight * p)


def _stop_ids(params: SamplingParams) -> set[int]:
    return {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}


def ended(params: SamplingParams, output: Output) -> str | None:
    """Why nothing may follow an output: "stop" or "length"."""
    if output and output[-1] in _stop_ids(params):
        return "stop"
    if any(stop in text_of(output) for stop in params.stop):
        return "stop"
    return "length" if len(output) == params.max_tokens else None


def shown(params: SamplingParams, output: Output) -> str:
    """The text of an output, up to a stop string."""
    text = text_of(output)
    return text[: min((text.find(stop) for stop in params.stop if stop in text), default=None)]


def fit(outcomes: Iterable[Output], expected: Mapping[Output, float]) -> float:
    """P-value of the chi-square test of counts; 0 where the impossible happened."""
    counted = Counter(outcomes)
    if any(expected.get(outcome, 0) == 0 for outcome in counted):
        return 0.0
    total = counted.total()
    cells: list[tuple[float, float]] = [(0.0, 0.0)]  # the first pools all rare outcomes
    for outcome, p in expected.items():
        cells.append((counted[outcome], p * total))
        if p * total < 5:
            seen, awaited = cells.pop()
            cells[0] = (cells[0][0] + seen, cells[0][1] + awaited)
    seen, awaited = zip(*[cell for cell in cells if cell[1] > 0], strict=True)
    return float(stats.chisquare(seen, awaited).pvalue)


# --- drafts that are often right ---

Choose = Callable[[tuple[int, ...]], int | None]
"""The token that is right after some tokens; None where nothing can follow."""


def steer(llm: LLM, choose: Choose, share: float) -> None:
    """Make a share of the drafts right. Trees get random shapes too.

    Which ones depends on the tokens before them alone, so that a request's drafts are the same in
    every batch; q of such a draft is 1.
    """
    drafting: Any = llm.engine.drafting
    proposer = drafting.proposer
    propose, vocab_size = proposer.propose, llm.target.vocab_size
    draftable = proposer.draft_token_ids
    tokens = frozenset(range(vocab_size) if draftable is None else draftable)

    @cache
    def right(context: tuple[int, ...]) -> int | None:
        token = choose(context) if random.Random(repr(context)).random() < share else None
        return token if token in tokens else None

    def steered(step: ProposerInput) -> Drafts:
        if proposer.trees is not None:
            contexts = [tuple(history) for history in step.histories]
            drafts, some = propose(step), sorted(tokens)
            return replant(step, drafts, lambda b, path: right((*contexts[b], *path)), some)
        return propose(replace(step, constraint=_Steered(step, right, vocab_size)))

    proposer.propose = steered


class _Steered:
    """A DraftConstraint that leaves some columns one token, of those that another permits."""

    def __init__(self, step: ProposerInput, right: Choose, vocab_size: int) -> None:
        self._grammar: DraftConstraint | None = step.constraint
        self._contexts = [tuple(history) for history in step.histories]
        self._num_drafts = list(step.num_draft_tokens)
        self._right = right
        self._vocab_size = vocab_size
        self._column = 0

    @property
    def lens(self) -> list[int]:
        return self._num_drafts if self._grammar is None else self._grammar.lens

    def mask(self, device: torch.device) -> Tensor:
        permitted_BV = None if self._grammar is None else self._grammar.mask(device)
        if permitted_BV is None:
            shape = (len(self._contexts), self._vocab_size)
            permitted_BV = torch.ones(shape, dtype=torch.bool, device=device)
        for b, context in enumerate(self._contexts):
            # Shorter than the column: drafting is over there.
            token = self._right(context) if self.lens[b] >= self._column else None
            if token is not None:
                assert permitted_BV[b, token]
                permitted_BV[b] = False
                permitted_BV[b, token] = True
        return permitted_BV

    def advance(self, tokens: Sequence[int]) -> None:
        for b, token in enumerate(tokens):
            self._contexts[b] += (token,)
        self._column += 1
        if self._grammar is not None:
            self._grammar.advance(tokens)
