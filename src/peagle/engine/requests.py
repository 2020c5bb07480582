"""Text requests on an engine of tokens: encode prompts, and detokenise outputs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import transformers

from peagle.config import SamplingParams, StructuredOutput
from peagle.config.checks import is_int, require
from peagle.engine.detokenizer import OutputText
from peagle.engine.engine import LLMEngine
from peagle.engine.grammar import GrammarCompiler
from peagle.engine.outputs import RequestOutput, SequenceOutput, StreamChunk
from peagle.engine.sequence import Sequence as EngineSequence
from peagle.errors import UserError, require_characters, short_repr
from peagle.kernels.sampling.random import derive_seed

Prompt = str | Sequence[int] | Mapping[str, Any]


def encode_prompt(tokenizer: transformers.PreTrainedTokenizerBase, prompt: Any) -> list[int]:
    """Return the token ids of a prompt: a text, token ids, or vLLM's mapping with one of the two.

    If a mapping has both `prompt_token_ids` and `prompt`, the ids count.

    Raises:
        UserError: the prompt is none of these, or the text has half of a surrogate pair.
    """
    if isinstance(prompt, Mapping):
        given = {key: value for key, value in prompt.items() if value is not None}
        if further := sorted(set(given) - {"prompt", "prompt_token_ids"}):
            raise UserError(
                f"A prompt has {further[0]!r}; expected prompt, a text, or prompt_token_ids. Leave "
                "it out."
            )
        prompt = given.get("prompt_token_ids", given.get("prompt"))
    if isinstance(prompt, str):
        require_characters("The prompt", prompt)
        return tokenizer.encode(prompt)
    try:
        return list(prompt)
    except TypeError:
        raise UserError(f"A prompt is {short_repr(prompt)}; expected text or token ids.") from None


def word_ids(
    tokenizer: transformers.PreTrainedTokenizerBase, words: Iterable[str | tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Return bad words as token ids, at the start of a text and after a space.

    Raises:
        UserError: a word has no tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            found[word] = None
            continue
        for text in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not ids:
                raise UserError(
                    f"bad_words has {short_repr(word)}, of which the tokenizer leaves nothing; "
                    "expected text that it has tokens for. Leave it out, or give token ids."
                )
            found[ids] = None
    return tuple(found)


@dataclass(slots=True)
class _Output:
    """One output of a request while it grows."""

    index: int
    output_index: int
    sequence: EngineSequence
    leader: EngineSequence
    text: OutputText
    params: SamplingParams
    start: float
    first_token_s: float | None = None
    stop: str | None = None


class Requests:
    """Adds requests to an engine and turns its steps into chunks of text.

    Only `compile_grammar` and `refuse_grammar` may be called from several threads.

    Args:
        tokenizer: tokenizer of the engine's target.
        grammar_budget_s: processor seconds that a request's grammar may take in one step before
            that request ends with an error; None sets no limit.
    """

    def __init__(
        self,
        engine: LLMEngine,
        tokenizer: transformers.PreTrainedTokenizerBase,
        grammar_budget_s: float | None = None,
    ) -> None:
        self._grammar_budget_s = grammar_budget_s
        self.engine = engine
        self.tokenizer = tokenizer
        self._running: dict[int, _Output] = {}
        self._compiler: GrammarCompiler | None = None
        self._making_compiler = threading.Lock()

    @property
    def has_unfinished(self) -> bool:
        """Return whether a step has work to do."""
        return bool(self._running)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, as `encode_prompt`."""
        return encode_prompt(self.tokenizer, prompt)

    def add(
        self,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> list[int]:
        """Queue a prompt, `params.n` times; return the ids of its outputs for `cancel`.

        Args:
            index: number of the request, which every chunk carries.
            prompt: see `encode_prompt`.
            priority: requests with a lower number go first.
            cache_salt: only requests with the same salt share cached KV.

        Raises:
            UserError: as for `LLMEngine.add_request`; the priority is no integer, a bad word has
                no tokens, or the structured output does not compile. Nothing is queued then.
        """
        require(is_int(priority), "priority", priority, "a whole number; lower goes first")
        ids = self.encode(prompt)
        one, words = params, word_ids(self.tokenizer, params.bad_words)
        given = params.prediction
        if isinstance(given, str):
            given = tuple(self.tokenizer.encode(given, add_special_tokens=False))
        # `replace` checks every field: it is slow.
        if (params.n, params.bad_words, params.prediction) != (1, words, given):
            one = replace(params, n=1, bad_words=words, prediction=given)
        start = time.perf_counter()
        structure = params.structured_output
        leader: EngineSequence | None = None
        added: list[int] = []
        try:
            for output_index in range(params.n):
                grammar = None
                if structure is not None:
                    stop = self.engine.stop_token_ids(one)
                    grammar = self._grammars().start(structure, stop)
                if output_index:  # each output has a seed of its own; one scores the prompt
                    seed = None if params.seed is None else derive_seed(params.seed, output_index)
                    one = replace(one, seed=seed, prompt_logprobs=None)
                text = OutputText(self.tokenizer, params.stop, params.marker_token_ids)
                sequence = self.engine.add_request(
                    ids,
                    one,
                    priority=priority,
                    grammar=grammar,
                    leader=leader,
                    cache_salt=cache_salt,
                )
                leader = leader or sequence
                self._running[sequence.seq_id] = _Output(
                    index, output_index, sequence, leader, text, params, start
                )
                added.append(sequence.seq_id)
        except BaseException:
            self.cancel(added)
            raise
        return added

    def step(self) -> list[StreamChunk]:
        """Run one step of the engine; return its addition to each output."""
        return [self._chunk(step) for step in self.engine.step()]

    def cancel(self, seq_ids: Iterable[int]) -> None:
        """Stop outputs and free their memory; finished ones stay unchanged."""
        for seq_id in seq_ids:
            running = self._running.pop(seq_id, None)
            if running is not None:
                self.engine.cancel(running.sequence)

    def cancel_all(self) -> None:
        """Stop all running outputs."""
        self.cancel(list(self._running))

    def compile_grammar(self, params: SamplingParams) -> None:
        """Compile the structure that a request asks for, in any thread, before `add` needs it.

        Raises:
            UserError: it does not compile.
        """
        if params.structured_output is not None:
            self._grammars().compile(params.structured_output)

    def refuse_grammar(self, params: SamplingParams, reason: str) -> None:
        """Refuse the structure of a request from now on, because it takes too long to compile."""
        if params.structured_output is not None:
            self._grammars().refuse(params.structured_output, reason)

    def warm_up_grammars(self) -> None:
        """Compile a first grammar, so that no request pays for the part that all grammars share.

        If structured output cannot be used, nothing is compiled, and requests get the reason.
        """
        with suppress(UserError):
            self._grammars().start(StructuredOutput.json_object())

    def _grammars(self) -> GrammarCompiler:
        with self._making_compiler:
            if self._compiler is None:
                self._compiler = GrammarCompiler(
                    self.tokenizer,
                    self.engine.target.vocab_size,
                    self.engine.eos_token_ids,
                    step_budget_s=self._grammar_budget_s,
                )
            return self._compiler

    def _chunk(self, step: SequenceOutput) -> StreamChunk:
        sequence = step.sequence
        running = self._running[sequence.seq_id]
        if running.first_token_s is None:
            running.first_token_s = time.perf_counter() - running.start
        new = running.text.add(step.new_token_ids, final=sequence.is_finished)
        if new.stop is not None:
            running.stop = new.stop
            self.engine.stop(sequence, len(step.new_token_ids) - new.num_tokens)
        output = None
        if sequence.is_finished:
            del self._running[sequence.seq_id]
            structure = running.params.structured_output
            if structure is not None and sequence.error_code == "grammar_too_slow":
                compiler = self._grammars()
                compiler.refuse(structure, compiler.step_excess)
            output = self._finished(running)
        return StreamChunk(
            running.index,
            new.text,
            step.new_token_ids[: new.num_tokens],
            min(step.num_accepted, new.num_tokens),
            step.num_drafted,
            output,
            running.output_index,
            step.logprobs[: new.num_tokens],
            step.rejected_token_ids,
            step.draft_tree,
            step.text_from,
        )

    def _finished(self, running: _Output) -> RequestOutput:
        sequence, params = running.sequence, running.params
        assert sequence.finish_reason is not None
        last = sequence.token_ids[-1]
        is_asked = last in params.stop_token_ids and (
            params.ignore_eos or last not in self.engine.eos_token_ids
        )
        return RequestOutput(
            text=running.text.text,
            token_ids=sequence.output_token_ids,
            prompt_token_ids=sequence.prompt_token_ids,
            finish_reason=sequence.finish_reason,
            stats=sequence.stats,
            elapsed_s=time.perf_counter() - running.start,
            index=running.output_index,
            time_to_first_token_s=running.first_token_s or 0.0,
            queue_time_s=(sequence.admitted_s or running.start) - running.start,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            num_preemptions=sequence.num_preemptions,
            logprobs=None if params.logprobs is None else list(sequence.logprobs),
            prompt_logprobs=running.leader.prompt_logprobs,
            stop_reason=last if running.stop is None and is_asked else running.stop,
            error=sequence.error,
            error_code=sequence.error_code,
        )
