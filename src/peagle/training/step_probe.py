"""How many segments a step needs: chosen by running it.

On a GPU a few steps run on the largest batch that the data can give, and torch counts the bytes.
On a CPU, where torch counts none, the estimate of `training.step_estimate` decides.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim import Optimizer

from peagle.data.batches import Batch
from peagle.engine.memory_plan import device_name, free_and_total, size_text
from peagle.errors import UserError
from peagle.models.drafter import Drafter
from peagle.training.config import RunSection
from peagle.training.distributed import ALONE, Processes
from peagle.training.inputs import AHEAD, Inputs
from peagle.training.masters import Masters
from peagle.training.step import TrainingStep
from peagle.training.step_estimate import StepMemory, StepShape, estimate_memory
from peagle.training.tensor_maps import map_tensors

# Numbers of segments that "auto" tries; more are not worth a pass each.
SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Shares of what is free that a run may plan to take.
_GPU_SHARE, _RAM_SHARE = 0.9, 0.5
# A step is not tried if its estimate is that many budgets: the estimate may be so far off.
_HOPELESS = 1.5
_SHORTEST = 64
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory that a process may take for its steps.

    Attributes:
        size: bytes.
        source: where that comes from, for messages.
        is_given: whether the user asked for it.
    """

    size: int
    source: str
    is_given: bool

    @classmethod
    def of(cls, run: RunSection, device: torch.device, gpu_gib: float | None = None) -> Budget:
        """The budget of a run; ask before anything is loaded.

        Args:
            run: `memory_gib`, if it is set.
            device: where it runs.
            gpu_gib: memory of a GPU that is not here, in GiB.
        """
        if run.memory_gib is not None:
            source = f"run.memory_gib is {run.memory_gib:g}"
            return cls(int(run.memory_gib * _GIB), source, True)
        share, own = _GPU_SHARE, 0
        if gpu_gib is not None:
            free, where = int(gpu_gib * _GIB), "of a GPU"
        elif (card := free_and_total(device)) is not None:
            free, where = card[0], f"free on {device_name(device)}"
            own = torch.cuda.memory_allocated(device)
        else:
            free, where, share = available_ram(), "of memory available here", _RAM_SHARE
        size = own + int(free * share)
        return cls(size, f"{share:.0%} of the {size_text(free)} {where}", False)


def available_ram() -> int:
    """Bytes of main memory that programs can still take, about."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        available = sizes["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(available, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return available


def choose_memory(
    shape: StepShape,
    run: RunSection,
    budget: Budget,
    *,
    measure: Callable[[int, bool], int | None] | None = None,
    stored: tuple[int, bool] | None = None,
    processes: Processes = ALONE,
) -> StepMemory:
    """The first way to run a step that fits: few segments before many, recomputed layers last.

    What the configuration fixes stays fixed. If all of it is fixed and the user named no budget,
    nothing is measured. Of several processes all take the way of the one that needs most segments.

    Args:
        shape, run, budget: the step, its options and its limit.
        measure: bytes at the peak of a step with so many segments, with or without recomputation;
            None if they do not fit. Without it the estimate decides.
        stored: the way of the run that this one resumes; no cheaper one is tried.
        processes: the processes of the run.

    Raises:
        UserError: no way fits; it says what would.
    """
    ways = [estimate_memory(shape, *way) for way in step_ways(run, shape.config.method.name)]
    if len(ways) == 1 and not budget.is_given:
        return ways[0]
    first = next((i for i, w in enumerate(ways) if (w.segments, w.recompute) == stored), 0)
    found = len(ways)
    for index in range(first, len(ways)):
        way = ways[index]
        if measure is not None and way.total <= _HOPELESS * budget.size:
            peak = measure(way.segments, way.recompute)
            if peak is None:
                continue
            ways[index] = way = dataclasses.replace(way, total=peak, parts={})
        if way.total <= budget.size:
            found = index
            break
    found = processes.most(found)
    if found == len(ways):
        least = min(ways[first:], key=lambda way: way.total)
        raise UserError(_refusal(shape, run, budget, least))
    return ways[found]


def step_ways(run: RunSection, method: str) -> Iterator[tuple[int, bool]]:
    """Segments and recomputation that the configuration leaves open, cheap ones first."""
    if method == "eagle3":
        yield 1, False
        return
    recompute = run.recompute_layers
    for again in (False, True) if recompute == "auto" else (recompute,):
        for segments in SEGMENTS if run.segments == "auto" else (run.segments,):
            yield segments, again


def _refusal(shape: StepShape, run: RunSection, budget: Budget, least: StepMemory) -> str:
    batch, is_peagle = shape.batch, shape.config.method.name == "peagle"
    how = f" in {least.segments} segment" + "s" * (least.segments > 1) if is_peagle else ""
    again = " with recomputed layers" if least.recompute else ""
    parts = sorted(estimate_memory(shape, least.segments, least.recompute).parts.items())
    parts = sorted(parts, key=lambda part: -part[1])[:4]
    text = (
        f"A step may take {size_text(budget.size)} ({budget.source}); one of {batch.rows} x "
        f"{batch.length:,} positions takes about {size_text(least.total)}{how}{again} "
        f"({', '.join(f'{name} {size_text(size)}' for name, size in parts)})."
    )
    if is_peagle and run.segments != "auto":
        text += ' Set run.segments = "auto".'
    if is_peagle and run.recompute_layers is False:
        text += " Set run.recompute_layers = true."
    for rows, length in _smaller(batch.rows, batch.length):
        anchors = min(length, batch.max_anchors)
        smaller = dataclasses.replace(batch, rows=rows, length=length, max_anchors=anchors)
        other = dataclasses.replace(shape, batch=smaller)
        peak = estimate_memory(other, least.segments, least.recompute).total
        if peak <= budget.size:
            keys = (
                "data.batch_tokens"
                if length == batch.length
                else "data.max_length = data.batch_tokens"
            )
            return f"{text} {keys} = {rows * length} would fit ({size_text(peak)})."
    text += (
        " No shorter batch would fit: take a smaller head (head.num_layers, head.draft_vocab_size) "
        "or allow more memory (run.memory_gib)."
    )
    if not shape.is_stored:
        size = shape.target.num_parameters * shape.target_dtype.itemsize
        text += f" Stored features (`peagle data features`) save the target's {size_text(size)}."
    return text


def _smaller(rows: int, length: int) -> Iterator[tuple[int, int]]:
    """Fewer rows, then shorter ones."""
    while rows > 1:
        rows //= 2
        yield rows, length
    while length >= 2 * _SHORTEST:
        length //= 2
        yield 1, length


class StepProbe:
    """Runs steps of a head and reads what they take; weights and optimizers stay as they are.

    A context manager: inside, the optimizers hold their states, of zeros.

    Args:
        drafter, masters, optimizers: the head and what moves it, before the first step.
        inputs: what the target says about a batch.
        batch: the largest one, on the host.
        build_step: makes a step with so many segments, with or without recomputation, that waits
            for no other process.
    """

    def __init__(
        self,
        drafter: Drafter,
        masters: Masters,
        optimizers: list[Optimizer],
        inputs: Inputs,
        batch: Batch,
        build_step: Callable[[int, bool], TrainingStep],
    ) -> None:
        self._drafter, self._masters, self._optimizers = drafter, masters, optimizers
        self._inputs, self._batch, self._build_step = inputs, batch, build_step

    def __enter__(self) -> StepProbe:
        torch.cuda.reset_peak_memory_stats(self._inputs.device)
        for _, parameter in self._masters.named():
            parameter.grad = torch.zeros_like(parameter)
        # With gradients of 0 and at a rate of 0 a step changes no weight.
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            optimizer.step()
        for _, parameter in self._masters.named():
            parameter.grad = None
        self._optimizer_peak = torch.cuda.max_memory_allocated(self._inputs.device)
        return self

    def __exit__(self, *_: object) -> None:
        for optimizer in self._optimizers:
            optimizer.state.clear()
        torch.cuda.empty_cache()

    def peak(self, segments: int, recompute: bool) -> int | None:
        """Bytes of everything on the GPU at the peak of a step; None where they do not fit."""
        peak = None
        try:
            for _ in range(2):  # The first run compiles.
                peak = self._run(self._build_step(segments, recompute))
        except torch.OutOfMemoryError:
            peak = None
        self._drafter.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return None if peak is None else max(peak, self._optimizer_peak)

    def _run(self, step: TrainingStep) -> int:
        generator = torch.Generator().manual_seed(0)
        laid_out = dataclasses.replace(self._batch, layout=step.lay_out(self._batch, generator))
        torch.cuda.reset_peak_memory_stats(self._inputs.device)
        [(batch, states)] = self._inputs.source(lambda _: laid_out).range(0, 1)
        stored = self._inputs.config.data.features is not None
        # What waits beside the batch at hand.
        waiting = (batch, states) if stored else batch
        ahead = [map_tensors(waiting, torch.clone) for _ in range(AHEAD)]
        step.backward(batch, states, generator)
        del ahead
        self._drafter.zero_grad(set_to_none=True)
        return torch.cuda.max_memory_allocated(self._inputs.device)
