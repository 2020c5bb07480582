"""What a training run will take, before anything runs: data, memory, disk and hours.

Read are the configuration, the data and the target's config.json and tokenizer; no weights.
"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peagle.data.batches import BatchStream
from peagle.data.dataset import ResponseDataset
from peagle.data.feature_format import StoredDtype, StoreFacts, num_graded
from peagle.engine.memory_plan import size_text
from peagle.engine.placement import resolve_device
from peagle.errors import UserError
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import load_tokenizer
from peagle.models.target_shape import TargetShape
from peagle.training.budget import Budget, choose_memory, least_memory
from peagle.training.build import planned_shape
from peagle.training.config import TrainConfig
from peagle.training.memory import StepMemory, step_memory
from peagle.training.step_shape import BatchShape, HeadParameters, StepShape, stored_dtype
from peagle.training.work import MeanRow, StepWork, step_work

# Of an H100-class GPU over a whole step, in bfloat16 (its peak is 989).
GPU_TFLOPS = 450.0
# Of a shorter step the arithmetic says little: launching kernels and reading data decide.
LEAST_STEP_SECONDS = 0.05
SHOWN_SEGMENTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Where:
    """The machine to plan for.

    Attributes:
        gpu_memory_gib: of a GPU that need not be here; None plans for this machine.
        num_gpus: processes that share the run.
        tokens_per_s: as measured, padding left out, of the whole run; None computes it.
    """

    gpu_memory_gib: float | None = None
    num_gpus: int = 1
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes on disk.

    Attributes:
        checkpoint, head: in the output folder.
        store: stored features of the training data, if somebody made them.
        free: where the output folder lies.
    """

    checkpoint: int
    head: int
    store: int
    free: int

    @property
    def needed(self) -> int:
        """What a run writes: the new one appears beside the old."""
        return 2 * (self.checkpoint + self.head)


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a run is.

    Attributes:
        tokens_per_s: without padding, of the whole run.
        hours: of all steps; validation and saving are left out.
        basis: what that rests on.
    """

    tokens_per_s: float
    hours: float
    basis: str


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A run, planned.

    Attributes:
        config: the run.
        shape: a step of one process.
        stream: its batches.
        budget: what a step may take.
        memory: the way to run it, or the one that takes least where none fits.
        by_segments: peaks at some numbers of segments, layers recomputed as chosen.
        work: of a step of one process.
        disk, pace: the latter None where nothing says how fast the machine is: on a CPU, and where
            a GPU's arithmetic takes less than LEAST_STEP_SECONDS a step.
        problem: why it cannot run; "" if it can.
    """

    config: TrainConfig
    shape: StepShape
    stream: BatchStream
    budget: Budget
    memory: StepMemory
    by_segments: tuple[StepMemory, ...]
    work: StepWork
    disk: Disk
    pace: Pace | None
    problem: str

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; sizes in bytes."""
        config, shape, stream = self.config, self.shape, self.stream
        head = dataclasses.asdict(shape.head)
        parameters = {"total": shape.parameters.total, "trained": shape.parameters.trained}
        return {
            "target": {
                "name": shape.target.name,
                "parameters": shape.target.num_parameters,
                "dtype": _name(shape.target_dtype),
            },
            "head": {**head, "parameters": parameters, "dtype": _name(shape.dtype)},
            "data": {
                "sequences": len(stream.dataset),
                "tokens": len(stream.dataset.tokens),
                "longest": stream.dataset.longest,
                "rows": stream.num_rows,
                "row_length": stream.row_length,
                "fill": stream.fill,
                "tokens_per_step": stream.tokens_per_step,
                "steps_per_epoch": stream.steps_per_epoch,
            },
            "steps": config.optimizer.steps,
            "epochs": config.optimizer.steps / stream.steps_per_epoch,
            "processes": shape.world_size,
            "device": shape.device.type,
            "elements": {"computed": self.work.elements, "graded": self.work.graded},
            "memory": {
                "budget": self.budget.size,
                "budget_source": self.budget.source,
                **_memory_json(self.memory),
                "by_segments": [_memory_json(memory) for memory in self.by_segments],
            },
            "disk": dataclasses.asdict(self.disk),
            "flops_per_step": {**self.work.parts, "total": self.work.total},
            "pace": None if self.pace is None else dataclasses.asdict(self.pace),
            "problem": self.problem,
        }


def make_plan(config: TrainConfig, where: Where) -> TrainingPlan:
    """Plan a run.

    Raises:
        UserError: target, data or configuration are not usable. That it does not fit is no error
            here but the plan's `problem`.
    """
    device = _device(config, where)
    target = TargetShape.read(config.target)
    tokenizer = load_tokenizer(config.target)
    data = config.data
    dataset = ResponseDataset.load(data.train, tokenizer, target.vocab_size, data.max_length)
    stream = BatchStream(
        dataset,
        data.batch_tokens,
        data.length_multiple,
        config.run.seed,
        world_size=where.num_gpus,
    )
    head = planned_shape(config, target, tokenizer)
    batch = BatchShape.of(stream)
    shape = StepShape.of(config, head, target, batch, device, world_size=where.num_gpus)
    budget = Budget.of(config.run, device, where.gpu_memory_gib)
    memory, problem = _chosen(shape, config, budget)
    work = step_work(shape, MeanRow.of(stream), memory.segments, memory.recompute)
    disk = _disk(config, shape, dataset)
    if where.gpu_memory_gib is None and disk.needed > disk.free:
        problem += (
            f" A run writes {size_text(disk.needed)} to {str(config.output)!r}, where "
            f"{size_text(disk.free)} are free; name another output, or free some."
        )
    shown = SHOWN_SEGMENTS if config.method.name == "peagle" else (1,)
    return TrainingPlan(
        config=config,
        shape=shape,
        stream=stream,
        budget=budget,
        memory=memory,
        by_segments=tuple(step_memory(shape, count, memory.recompute) for count in shown),
        work=work,
        disk=disk,
        pace=_pace(config, shape, stream, work, where),
        problem=problem.strip(),
    )


def _device(config: TrainConfig, where: Where) -> torch.device:
    name = config.run.device
    if where.gpu_memory_gib is None:
        if name.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(
                f"run.device is {name!r} and there is no GPU here; say how much memory it has, as "
                "in --gpu-memory-gib 80."
            )
        return resolve_device(name)
    if name not in ("auto", "cuda") and not name.startswith("cuda:"):
        raise UserError(
            f"--gpu-memory-gib is {where.gpu_memory_gib:g}, but run.device is {name!r}; leave one "
            "of them out."
        )
    return torch.device("cuda")


def _chosen(shape: StepShape, config: TrainConfig, budget: Budget) -> tuple[StepMemory, str]:
    """The way to run a step, and what is wrong with it."""
    asked = dataclasses.replace(budget, is_given=True)
    try:
        return choose_memory(shape, config.run, asked), ""
    except UserError as error:
        return least_memory(shape, config.run), str(error)


def _disk(config: TrainConfig, shape: StepShape, dataset: ResponseDataset) -> Disk:
    own: HeadParameters = shape.parameters
    frozen = own.total - own.trained
    weights = 4 * own.trained + shape.dtype.itemsize * frozen + own.buffer_bytes
    folder = config.output.absolute()
    while not folder.exists():
        folder = folder.parent
    return Disk(
        checkpoint=weights + shape.optimizer_bytes,
        head=getattr(torch, config.run.save_dtype).itemsize * own.total + own.buffer_bytes,
        store=_store_bytes(dataset, shape, stored_dtype(config.data)),
        free=shutil.disk_usage(folder).free,
    )


def _store_bytes(dataset: ResponseDataset, shape: StepShape, dtype: StoredDtype) -> int:
    """What `peagle data features` writes, but for headers."""
    target = shape.target
    sizes = (target.vocab_size, target.hidden_size, target.num_layers)
    unread = TargetFingerprint(Path(target.name).name, *sizes, None, "")
    facts = StoreFacts(
        dataset_sha256="",
        num_sequences=len(dataset),
        num_tokens=len(dataset.tokens),
        longest=0,
        target=unread,
        target_dtype="bfloat16",
        aux_layer_ids=shape.head.aux_layer_ids,
        dtype=dtype,
    )
    graded = int(num_graded(dataset).sum())
    return facts.num_tokens * facts.position_bytes + graded * facts.graded_bytes


def _pace(
    config: TrainConfig, shape: StepShape, stream: BatchStream, work: StepWork, where: Where
) -> Pace | None:
    if where.tokens_per_s is not None:
        speed, basis = where.tokens_per_s, "as given"
    elif shape.device.type == "cuda":
        seconds = work.total / (GPU_TFLOPS * 1e12)
        if seconds < LEAST_STEP_SECONDS:
            return None
        speed = stream.tokens_per_step / seconds
        basis = f"if an H100-class GPU sustains {GPU_TFLOPS:g} TFLOP/s"
    else:
        return None
    hours = config.optimizer.steps * stream.tokens_per_step / speed / 3600
    return Pace(speed, hours, basis)


def _memory_json(memory: StepMemory) -> dict[str, Any]:
    return {
        "segments": memory.segments,
        "recompute_layers": memory.recompute,
        "peak": memory.total,
        "phase": memory.phase,
        "parts": memory.parts,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
