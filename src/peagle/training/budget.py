"""How many segments a step needs to fit into the memory there is."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from peagle.engine.memory_plan import device_name, free_and_total, size_text
from peagle.errors import UserError
from peagle.training.config import RunSection
from peagle.training.distributed import Processes
from peagle.training.memory import StepMemory, step_memory
from peagle.training.step_shape import StepShape

# More are not worth a pass each.
MAX_SEGMENTS = 64
# Shares of what is free that a run may plan to take.
_GPU_SHARE, _RAM_SHARE = 0.9, 0.5
_SHORTEST = 64
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Budget:
    """What a step may take.

    Attributes:
        size: bytes.
        source: where that comes from, for messages.
        is_given: whether somebody asked for it; a guess overrules nobody.
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
        share = _GPU_SHARE
        if gpu_gib is not None:
            free, where = int(gpu_gib * _GIB), "of a GPU"
        elif (card := free_and_total(device)) is not None:
            free, where = card[0], f"free on {device_name(device)}"
        else:
            free, where, share = available_ram(), "of memory available here", _RAM_SHARE
        return cls(int(free * share), f"{share:.0%} of the {size_text(free)} {where}", False)

    def shared(self, processes: Processes) -> Budget:
        """The smallest of all processes' budgets, so that all choose alike."""
        return dataclasses.replace(self, size=processes.least(self.size))


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


def choose_memory(shape: StepShape, run: RunSection, budget: Budget) -> StepMemory:
    """The first way to run a step that fits: few segments before many, recomputed layers last.

    What the configuration fixes stays fixed. If all is fixed and nobody named a budget, that is
    taken as it is: the sizes are estimates.

    Raises:
        UserError: none fits; it says what would.
    """
    found = _first_fit(shape, run, budget)
    if found is not None:
        return found
    ways = [step_memory(shape, *way) for way in _ways(shape, run)]
    if len(ways) == 1 and not budget.is_given:
        return ways[0]
    raise UserError(_too_little(shape, run, budget, min(ways, key=lambda way: way.total)))


def segments_text(count: int) -> str:
    """A number of segments in words."""
    return f"{count} segment" + ("s" if count > 1 else "")


def least_memory(shape: StepShape, run: RunSection) -> StepMemory:
    """The way that takes least, whether it fits or not."""
    ways = (step_memory(shape, *way) for way in _ways(shape, run))
    return min(ways, key=lambda way: way.total)


def _ways(shape: StepShape, run: RunSection) -> Iterator[tuple[int, bool]]:
    """Segments and recomputation that the configuration leaves open, cheap ones first."""
    if shape.method.name == "eagle3":
        yield 1, False
        return
    recompute = run.recompute_layers
    for again in (False, True) if recompute == "auto" else (recompute,):
        for segments in range(1, MAX_SEGMENTS + 1) if run.segments == "auto" else (run.segments,):
            yield segments, again


def _first_fit(shape: StepShape, run: RunSection, budget: Budget) -> StepMemory | None:
    ways = (step_memory(shape, *way) for way in _ways(shape, run))
    return next((way for way in ways if way.total <= budget.size), None)


# ---- what to say if nothing fits ------------------------------------------------------------


def _too_little(shape: StepShape, run: RunSection, budget: Budget, least: StepMemory) -> str:
    batch = shape.batch
    how = "" if shape.method.name == "eagle3" else f" in {segments_text(least.segments)}"
    again = " with recomputed layers" if least.recompute else ""
    largest = sorted(least.parts.items(), key=lambda part: -part[1])[:4]
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in largest)
    text = (
        f"A step may take {size_text(budget.size)} ({budget.source}); one of {batch.rows} x "
        f"{batch.length:,} positions takes about {size_text(least.total)}{how}{again} ({parts})."
    )
    fixes = list(_fixes(shape, run, budget))
    if fixes:
        return f"{text} This would fit: {'; '.join(fixes)}."
    advice = "take a smaller head (head.num_layers, head.draft_vocab_size) or allow more memory"
    advice += " (run.memory_gib)"
    if not shape.stored:
        size = shape.target.num_parameters * shape.target_dtype.itemsize
        advice += f"; stored features (`peagle data features`) spare the target's {size_text(size)}"
    return f"{text} No shorter batch would fit: {advice}."


def _fixes(shape: StepShape, run: RunSection, budget: Budget) -> Iterator[str]:
    """Changes that make a step fit, each for itself."""
    if shape.method.name == "peagle":
        yield from _other_ways(shape, run, budget)
    batch = shape.batch
    for rows in _halves(batch.rows, 1):
        text = f"data.batch_tokens = {rows * batch.length}"
        if fixes := list(_fix(shape, run, budget, text, {}, rows=rows)):
            yield from fixes
            return
    for length in _halves(batch.length, _SHORTEST):
        sizes = {"length": length, "max_anchors": min(length, batch.max_anchors)}
        text = f"data.max_length = data.batch_tokens = {length}"
        if fixes := list(_fix(shape, run, budget, text, {}, rows=1, **sizes)):
            yield from fixes
            return


def _other_ways(shape: StepShape, run: RunSection, budget: Budget) -> Iterator[str]:
    """What the run section fixes, let go: one option, or both where one is not enough."""
    changes = {}
    if run.segments != "auto":
        changes['run.segments = "auto"'] = {"segments": "auto"}
    if run.recompute_layers is False:
        changes["run.recompute_layers = true"] = {"recompute_layers": True}
    fixes = [_fix(shape, run, budget, text, update) for text, update in changes.items()]
    found = [text for fix in fixes for text in fix]
    if not found and len(changes) == 2:
        both = {name: value for update in changes.values() for name, value in update.items()}
        found = list(_fix(shape, run, budget, " and ".join(changes), both))
    yield from found


def _fix(
    shape: StepShape, run: RunSection, budget: Budget, text: str, update: dict, **sizes: int
) -> Iterator[str]:
    changed = dataclasses.replace(shape, batch=dataclasses.replace(shape.batch, **sizes))
    found = _first_fit(changed, run.model_copy(update=update), budget)
    if found is not None:
        yield f"{text} ({size_text(found.total)})"


def _halves(size: int, least: int) -> Iterator[int]:
    while (size := size // 2) >= least:
        yield size
