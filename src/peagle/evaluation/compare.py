"""Engines on one loaded target, and timed runs of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.engine import SpeculationStats
from peagle.engine.memory_plan import free_and_total
from peagle.engine.placement import resolve_device, resolve_dtype
from peagle.evaluation.acceptance import Completion, DecodedStep
from peagle.llm import LLM, StreamChunk
from peagle.models.target import TargetModel

WARM_UP_TOKENS = 16


@dataclass(slots=True)
class Measurement:
    """Outputs of one run and the time they took.

    Attributes:
        completions: one an output, in the order of the prompts, `params.n` of each.
        seconds: of the engine, prompt passes included, whatever the caller does between steps
            left out.
    """

    completions: list[Completion] = field(default_factory=list)
    seconds: float = 0.0

    def extend(self, other: Measurement) -> None:
        """Append another run."""
        self.completions += other.completions
        self.seconds += other.seconds

    @property
    def token_ids(self) -> list[list[int]]:
        """Tokens of each output."""
        return [completion.output.token_ids for completion in self.completions]

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def stats(self) -> SpeculationStats:
        """Pooled counters of the drafts."""
        return SpeculationStats.pooled(one.output.stats for one in self.completions)


def load_target(folder: str | Path, *, dtype: str, device: str) -> TargetModel:
    """Load a target.

    Args:
        folder: in Hugging Face format.
        dtype: as in EngineConfig.
        device: as in EngineConfig.

    Raises:
        UserError: the folder, the type or the device is not usable.
    """
    config = EngineConfig(dtype=dtype, device=device)  # type: ignore[arg-type]
    where = resolve_device(config.device)
    return TargetModel.load(folder, dtype=resolve_dtype(config.dtype, where), device=where)


def measure(
    llm: LLM,
    prompts: Sequence[str],
    params: SamplingParams | Sequence[SamplingParams],
    watch: Callable[[StreamChunk], None] | None = None,
) -> Measurement:
    """Complete `prompts` and time the engine.

    Args:
        llm: what decodes.
        prompts: texts.
        params: for all of them, or one each.
        watch: called with every chunk, outside the time that counts.

    Raises:
        UserError: a prompt is empty or too long.
    """
    steps: dict[tuple[int, int], list[DecodedStep]] = {}
    completions: dict[tuple[int, int], Completion] = {}
    seconds = 0.0
    stream = llm.stream(prompts, params)
    while True:
        start = time.perf_counter()
        chunk = next(stream, None)
        seconds += time.perf_counter() - start
        if chunk is None:
            break
        key = chunk.index, chunk.output_index
        own = steps.setdefault(key, [])
        own.append(DecodedStep(len(chunk.token_ids), chunk.num_drafted, chunk.num_accepted))
        if chunk.output is not None:
            completions[key] = Completion(chunk.output, own)
        if watch is not None:
            watch(chunk)
    return Measurement([completions[key] for key in sorted(completions)], seconds)


def build(
    target: TargetModel,
    configurations: Mapping[str, SpeculativeConfig | None],
    **engine_options: Any,
) -> dict[str, LLM]:
    """One LLM a configuration, all on the same target, without prefix caching unless asked for.

    Repeated runs would else find the KV of their prompts. On a GPU they share what is free.

    Args:
        target: shared by all of them.
        configurations: by name; None decodes plainly.
        **engine_options: fields of EngineConfig.

    Raises:
        UserError: a head does not fit the target, or an option is not usable.
    """
    options = {"enable_prefix_caching": False, **engine_options}
    most = options.get("gpu_memory_utilization", EngineConfig().gpu_memory_utilization)
    llms: dict[str, LLM] = {}
    for name, speculative in configurations.items():
        share = _share(target.device, most, len(configurations) - len(llms))
        llms[name] = LLM(model=target, speculative_config=speculative, **{**options, **share})
    return llms


def _share(device: torch.device, most: float, num_engines: int) -> dict[str, float]:
    """The option that leaves as much memory to each engine still to come; none on a CPU."""
    card = free_and_total(device)
    if card is None:
        return {}
    in_use = 1 - card[0] / card[1]
    return {"gpu_memory_utilization": in_use + max(0.0, most - in_use) / num_engines}


def release(target: TargetModel) -> None:
    """Give back the memory of the engines on a target that nobody holds any more."""
    target.drop_kv_caches()
    gc.collect()  # an engine and its parts know each other
    if target.device.type == "cuda":
        torch.cuda.empty_cache()


def warm_up(llms: Mapping[str, LLM], prompts: Sequence[str]) -> None:
    """Run each a little, so that the first measurement is not slower than the others."""
    for llm in llms.values():
        llm.generate(prompts, SamplingParams(max_tokens=WARM_UP_TOKENS))
