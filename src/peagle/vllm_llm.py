"""`LLM(engine="vllm")`: the offline facade over vLLM, which may live in another environment."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any

from peagle.backends.vllm.command import VllmLaunch
from peagle.backends.vllm.evidence import DraftCounts
from peagle.backends.vllm.flags import check_flags
from peagle.backends.vllm.installation import find_vllm
from peagle.backends.vllm.offline import VllmChunk, VllmOffline
from peagle.bundled import BUNDLED
from peagle.config import RUNTIME_KEYS, EngineConfig, SamplingParams, SpeculativeConfig
from peagle.engine import EngineStats, SpeculationStats
from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.engine.requests import Prompt, encode_prompt
from peagle.errors import CheckpointError, UserError
from peagle.kernels.logprobs import TokenLogprobs
from peagle.llm import LLM, each, named_target
from peagle.models.generation import read_generation_defaults
from peagle.models.loading import resolve_model
from peagle.models.target import load_tokenizer

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


class VllmLLM(LLM):
    """A target, with or without a draft head, on vLLM.

    Made by `LLM(..., engine="vllm")`. What a step brought is told as with our own engine, but for
    `rejected_token_ids`. `RequestOutput.stats` counts a draft of K tokens a step, of which the last
    one may be cut by the end of the text, and nothing for prompt lookup. `stats.speculation` are
    vLLM's own counters, of everything since it was loaded. vLLM tells no queue times, preemptions
    or KV blocks: they are 0.

    Args:
        target, revision, speculative_config: as in `LLM`; vLLM's own keys of the latter are taken.
        model: the target under vLLM's name for it.
        vllm_python: the python of the environment that has vLLM; None looks for it.
        vllm_options: further arguments of vLLM's `LLM`, by name.
        engine: "vllm".
        **engine_options: fields of EngineConfig that vLLM has, and tensor_parallel_size.

    Raises:
        UserError: as `LLM`; an option has no equal in vLLM; vLLM is missing, or does not draft as
            asked.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        revision: str | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        model: str | Path | None = None,
        vllm_python: str | Path | None = None,
        vllm_options: Mapping[str, Any] | None = None,
        engine: str = "vllm",
        **engine_options: Any,
    ) -> None:
        _check_options(engine_options)
        # A flag of the same name is refused for the same reason.
        flags = [
            f"--{name.replace('_', '-')}={value}" for name, value in (vllm_options or {}).items()
        ]
        for note in check_flags(flags):
            warnings.warn(note, stacklevel=2)
        folder = resolve_model(named_target(target, model) or BUNDLED, revision)
        speculative, runtime = None, dict[str, Any]()
        if speculative_config is not None:
            speculative = SpeculativeConfig.parse(speculative_config)
            runtime = _runtime_options(speculative_config)
        launch = VllmLaunch(
            str(folder),
            speculative,
            speculative_options=runtime,
            keys=(),
            extra=tuple(flags),
            **{name: value for name, value in engine_options.items() if name != "device"},
        )
        self.folder = folder
        self.tokenizer = load_tokenizer(folder)
        self.vllm = VllmOffline(launch, find_vllm(vllm_python), arguments=vllm_options)
        self._counts = _Counts()
        self._is_running = False
        self._request_ids = count()

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[StreamChunk]:
        """Complete prompts, yielding each step's tokens as they come, as `LLM.stream`."""
        listed = self._as_list(prompts)
        params = self.default_params() if params is None else params
        every = each(params, SamplingParams, "sampling params", len(listed))
        if any(each(priority, int, "priorities", len(listed))):
            raise UserError(f"priority is {priority!r}; vLLM serves first come, first served here.")
        if self._is_running:
            raise UserError(
                "This LLM is generating already; finish or close the other stream first, or make "
                "another LLM."
            )
        ids = [encode_prompt(self.tokenizer, prompt) for prompt in listed]
        growing: dict[tuple[int, int], _Growing] = {}
        start, self._is_running = time.perf_counter(), True
        try:
            for chunk in self.vllm.generate(ids, every):
                key = chunk.index, chunk.output_index
                if key not in growing:
                    growing[key] = _Growing(ids[chunk.index], every[chunk.index], start, self._k)
                yield growing[key].add(chunk, self._counts)
        finally:
            self._is_running = False

    @property
    def _k(self) -> int:
        """Tokens of every draft; 0 where that is not known."""
        config = self.vllm.launch.speculative
        if config is None or config.method != "eagle3":
            return 0
        fixed = config.num_speculative_tokens_per_batch_size is None
        return config.num_drafts if fixed else 0

    def default_params(self) -> SamplingParams:
        """How the model asks to be sampled, as `LLM.default_params`."""
        try:
            return SamplingParams(**read_generation_defaults(self.folder))
        except UserError as error:
            path = self.folder / "generation_config.json"
            raise CheckpointError(f"{path}: {error} Mend the file, or give params.") from None

    @property
    def stats(self) -> EngineStats:
        """What was counted since it was loaded; what vLLM does not tell is 0."""
        counts = self.vllm.counts() or DraftCounts()
        counted = self._counts
        speculation = SpeculationStats(
            counts.num_drafts,
            counts.num_draft_tokens,
            counts.num_accepted_tokens,
            list(counts.accepted_per_pos),
        )
        return EngineStats(
            num_waiting=0,
            num_running=0,
            num_kv_blocks=0,
            num_free_kv_blocks=0,
            num_steps=0,
            num_finished=counted.num_finished,
            num_cancelled=0,
            num_preemptions=0,
            num_prompt_tokens=counted.num_prompt_tokens,
            num_cached_tokens=counted.num_cached_tokens,
            num_output_tokens=counted.num_output_tokens,
            speculation=speculation,
            step_times={},
        )

    def close(self) -> None:
        """End vLLM's process; that happens by itself when nobody refers to this object."""
        self.vllm.close()


@dataclass(slots=True)
class _Counts:
    """What went by since the engine was loaded."""

    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(slots=True)
class _Growing:
    """One output while it grows; `k` tokens are drafted a step."""

    prompt: list[int]
    params: SamplingParams
    start: float
    k: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    first_token_s: float | None = None

    def add(self, chunk: VllmChunk, counts: _Counts) -> StreamChunk:
        """Take a step's addition in."""
        new = chunk.token_ids
        # The pass that read the prompt verified no draft.
        drafted = 0 if self.first_token_s is None or not new else self.k
        accepted = len(new) - 1 if drafted else 0
        self.stats.record(drafted, accepted)
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.start
            counts.num_prompt_tokens += len(self.prompt)
            counts.num_cached_tokens += chunk.num_cached_tokens
        self.text += chunk.text
        self.token_ids += new
        counts.num_output_tokens += len(new)
        logprobs = [
            _token_logprobs(token, told, self.params.logprobs or 0)
            for token, told in zip(new, chunk.logprobs)
        ]
        self.logprobs += logprobs
        if chunk.prompt_logprobs and not self.prompt_logprobs:
            pairs = zip(self.prompt[1:], chunk.prompt_logprobs)
            most = self.params.prompt_logprobs or 0
            self.prompt_logprobs = [_token_logprobs(token, told, most) for token, told in pairs]
        output = None
        if chunk.finish_reason is not None:
            counts.num_finished += 1
            output = self._output(chunk)
        return StreamChunk(
            chunk.index,
            chunk.text,
            new,
            accepted,
            drafted,
            output,
            chunk.output_index,
            logprobs,
        )

    def _output(self, chunk: VllmChunk) -> RequestOutput:
        assert chunk.finish_reason is not None
        return RequestOutput(
            text=self.text,
            token_ids=self.token_ids,
            prompt_token_ids=self.prompt,
            finish_reason=chunk.finish_reason,
            stats=self.stats,
            elapsed_s=time.perf_counter() - self.start,
            index=chunk.output_index,
            time_to_first_token_s=self.first_token_s or 0.0,
            num_cached_tokens=chunk.num_cached_tokens,
            logprobs=None if self.params.logprobs is None else self.logprobs,
            prompt_logprobs=(
                None if self.params.prompt_logprobs is None else [None, *self.prompt_logprobs]
            ),
        )


def _token_logprobs(token: int, told: Sequence[tuple[int, float, int]], most: int) -> TokenLogprobs:
    by_id = {one[0]: one for one in told}
    _, logprob, rank = by_id.get(token, (token, float("-inf"), 0))
    top = sorted(told, key=lambda one: (one[2], one[0]))[:most]
    return TokenLogprobs(token, logprob, rank, [(one[0], one[1]) for one in top])


def _check_options(given: Mapping[str, Any]) -> None:
    """Refuse options that are not known, and of the known ones those without an equal."""
    known = sorted({one.name for one in fields(EngineConfig)} | {*_SIZES, "threads"})
    if unknown := sorted(set(given) - set(known)):
        raise UserError(
            f'Unknown engine option {unknown[0]!r}; known with engine="vllm": '
            f"{', '.join(known)}. Arguments of vLLM's own go into vllm_options."
        )
    if given.get("device", "auto") != "auto":
        raise UserError(
            f"device is {given['device']!r}; vLLM runs on what it was built for. Leave it out."
        )
    EngineConfig(**{k: v for k, v in given.items() if k not in (*_SIZES, "threads")})


def _runtime_options(given: SpeculativeConfig | Mapping[str, Any] | str) -> dict[str, Any]:
    """Keys of vLLM's speculative configuration that say how it runs."""
    if isinstance(given, SpeculativeConfig):
        return {}
    if isinstance(given, str):
        import json

        given = json.loads(given)
    assert isinstance(given, Mapping)
    return {key: given[key] for key in RUNTIME_KEYS if given.get(key) is not None}
