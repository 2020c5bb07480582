"""The needs of a training run, before it starts: data, memory, disk and hours.

On a GPU that is here a few steps run, and the plan reports what they took. Elsewhere the plan is an
estimate from the configuration, the data and the target's config.json and tokenizer.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peagle.data.batches import BatchStream
from peagle.data.dataset import ResponseDataset
from peagle.data.features import StoreFacts
from peagle.disk import free_bytes, size_text
from peagle.engine.placement import resolve_device
from peagle.errors import UserError
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import load_tokenizer
from peagle.models.target_facts import TargetShape
from peagle.training.build import planned_shape
from peagle.training.config import TrainConfig
from peagle.training.overfitting import epochs_warning
from peagle.training.start_checks import missing_room
from peagle.training.step_memory import (
    BatchShape,
    Budget,
    PeakMemory,
    TrainingShape,
    choose_memory,
    estimate_flops,
    estimate_memory,
    step_ways,
    stored_dtype,
)
from peagle.training.trainer import Trainer

# Of an H100-class GPU over a whole step, in bfloat16 (its peak is 989).
GPU_TFLOPS = 450.0
# Of a shorter step the arithmetic says little: launching kernels and reading data decide.
MIN_STEP_SECONDS = 0.05
_SHOWN_SEGMENTS = (1, 2, 4, 8)
# A name with its text, or a heading without one.
Row = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The plan of a training run, made before the run begins.

    Attributes:
        memory: the way to run a step, or the one that takes least where none fits.
        by_segments: estimates at some numbers of segments, layers recomputed as chosen.
        flops: operations of a step of one process, by purpose.
        disk: bytes of the checkpoint, of the head and of the stored features, and those that are
            free where the output folder lies.
        tokens_per_s, basis: speed of the whole run, padding left out, and what that rests on; None
            and "" where the speed is unknown.
        problem: why the run is refused; "" if it is not.
    """

    config: TrainConfig
    shape: TrainingShape
    stream: BatchStream
    budget: Budget
    memory: PeakMemory
    by_segments: tuple[PeakMemory, ...]
    flops: dict[str, int]
    disk: dict[str, int]
    tokens_per_s: float | None
    basis: str
    problem: str

    @property
    def steps(self) -> int | None:
        """Return the steps of the run; None if `run.minutes` plans them at an unknown speed."""
        if self.config.optimizer.steps is not None:
            return self.config.optimizer.steps
        if self.tokens_per_s is None:
            return None
        return self.config.run.steps_within(self.stream.tokens_per_step / self.tokens_per_s)

    @property
    def epochs(self) -> float | None:
        """Return the epochs of the run; None where the steps are unknown."""
        return None if self.steps is None else self.steps / self.stream.steps_per_epoch

    @property
    def hours(self) -> float | None:
        """Return the hours that all steps take, without validation and saving; None if unknown."""
        if self.tokens_per_s is None or self.steps is None:
            return None
        return self.steps * self.stream.tokens_per_step / self.tokens_per_s / 3600

    @property
    def warning(self) -> str:
        """Return a warning of too many epochs; "" if there is none."""
        stream = self.stream
        num_tokens = len(stream.dataset.tokens)
        return epochs_warning(self.steps or 0, stream.steps_per_epoch, num_tokens)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object; sizes in bytes."""
        config, shape, stream = self.config, self.shape, self.stream
        pace = {"tokens_per_s": self.tokens_per_s, "hours": self.hours, "basis": self.basis}
        return {
            "target": {
                "name": shape.target.name,
                "parameters": shape.target.num_parameters,
                "dtype": _name(shape.target_dtype),
            },
            "head": {
                **dataclasses.asdict(shape.head),
                "parameters": {"total": shape.num_parameters, "trained": shape.num_trained},
                "dtype": _name(shape.dtype),
            },
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
            "steps": self.steps,
            "minutes": config.run.minutes,
            "epochs": self.epochs,
            "processes": shape.world_size,
            "device": shape.device.type,
            "memory": {
                "budget": self.budget.size,
                "budget_source": self.budget.source,
                **_memory_json(self.memory),
                "by_segments": [_memory_json(memory) for memory in self.by_segments],
            },
            "disk": self.disk,
            "flops_per_step": {**self.flops, "total": sum(self.flops.values())},
            "pace": None if self.tokens_per_s is None else pace,
            "warning": self.warning,
            "problem": self.problem,
        }

    def __str__(self) -> str:
        source = "estimated" if self.memory.parts else "measured"
        rows = [
            *self._run_rows(),
            (f"memory: {size_text(self.memory.total)} at the peak, {source}", None),
            *self._memory_rows(),
            ("disk", None),
            *self._disk_rows(),
            ("time", None),
            *self._time_rows(),
        ]
        width = max(len(name) for name, text in rows if text is not None)
        lines = [name if text is None else f"  {name:<{width}}  {text}" for name, text in rows]
        title = f"{self.config.method.name} head for {self.shape.target.name}"
        notes = [f"warning: {self.warning}"] if self.warning else []
        return "\n".join([title, *lines, *notes])

    def _run_rows(self) -> list[Row]:
        shape, stream = self.shape, self.stream
        head, dataset, target = shape.head, stream.dataset, shape.target
        stored = ", from stored features" if shape.is_stored else ""
        vocabulary = f"{head.draft_vocab_size:,} of {head.vocab_size:,} tokens"
        frozen = f", {shape.num_frozen / 1e6:,.1f}M of them frozen" if shape.num_frozen else ""
        quantization = shape.config.head.layer_quantization
        rounded = "" if quantization is None else f", layers stored in {quantization}"
        gpus = f" on {shape.world_size} GPUs" if shape.world_size > 1 else ""
        batch = f"{stream.num_rows} x {stream.row_length:,} positions{gpus}, {stream.fill:.0%}"
        return [
            (
                "target",
                f"{_millions(target.num_parameters)} in {_name(shape.target_dtype)}{stored}",
            ),
            ("head", f"{head.num_layers} layers of width {head.hidden_size:,}, {vocabulary}"),
            ("", f"{_millions(shape.num_parameters)}{frozen} in {_name(shape.dtype)}{rounded}"),
            (
                "data",
                f"{len(dataset):,} sequences, {len(dataset.tokens):,} tokens, the longest has "
                f"{dataset.longest:,}",
            ),
            ("batch", f"{batch} of them tokens: {stream.tokens_per_step:,.0f} tokens"),
            ("steps", self._steps_text()),
        ]

    def _steps_text(self) -> str:
        epoch, minutes = self.stream.steps_per_epoch, self.config.run.minutes
        planned = "" if minutes is None else f", by run.minutes = {minutes:g}"
        if self.steps is None or self.epochs is None:
            return f"as a step's time tells when the run begins{planned}; {epoch:,} an epoch"
        return f"{self.steps:,}{planned}, {epoch:,} an epoch: {self.epochs:,.2f} epochs"

    def _memory_rows(self) -> list[Row]:
        memory, parts = self.memory, self.memory.parts.items()
        rows: list[Row] = [(n, size_text(s)) for n, s in sorted(parts, key=lambda part: -part[1])]
        rows.append(("may take", f"{size_text(self.budget.size)} ({self.budget.source})"))
        if self.config.method.name == "peagle":
            layers = "recomputed" if memory.recompute else "kept"
            segments = f"{memory.segments} segment" + "s" * (memory.segments > 1)
            title = "takes least" if memory.total > self.budget.size else "chosen"
            peaks = ", ".join(f"S={m.segments} {size_text(m.total)}" for m in self.by_segments)
            rows.append((title, f"{segments}, layers {layers}"))
            rows.append(("by segments", f"{peaks}, estimated"))
        return rows

    def _disk_rows(self) -> list[Row]:
        disk, stored = self.disk, "" if self.shape.is_stored else "would take "
        sizes = disk["checkpoint"], disk["head"]
        too_little = ", too little" if missing_room(self.config.output, *sizes) else ""
        dtype = stored_dtype(self.config.data)
        return [
            ("checkpoint", f"{size_text(disk['checkpoint'])}, twice while it is written"),
            ("head", size_text(disk["head"])),
            ("stored features", f"{stored}{size_text(disk['store'])} in {dtype}"),
            ("free", size_text(disk["free"]) + too_little),
        ]

    def _time_rows(self) -> list[Row]:
        total, hours = sum(self.flops.values()), self.hours
        parts = sorted(self.flops.items(), key=lambda part: -part[1])
        shares = ", ".join(f"{name} {size / total:.0%}" for name, size in parts)
        size = f"{total / 1e12:,.0f} TFLOP" if total >= 1e13 else f"{total / 1e9:,.1f} GFLOP"
        rows: list[Row] = [("a step", f"about {size} ({shares})")]
        if hours is None:
            is_gpu = self.shape.device.type == "cuda"
            why = "unknown, the step is too small" if is_gpu else "unknown"
            return [*rows, ("all steps", f"{why}; measure a few steps and give --tokens-per-s")]
        time = f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 60:,.1f} minutes"
        return [
            *rows,
            ("speed", f"{self.tokens_per_s:,.0f} tokens/s, {self.basis}"),
            ("all steps", f"{time}, without validation and saving"),
        ]


def make_plan(
    config: TrainConfig,
    *,
    gpu_memory_gib: float | None = None,
    num_gpus: int = 1,
    tokens_per_s: float | None = None,
) -> TrainingPlan:
    """Plan a run; on a GPU of this machine, with one process, run a few of its steps.

    Args:
        gpu_memory_gib: memory of a GPU that this machine may lack; None plans for this machine.
        num_gpus: processes that share the run.
        tokens_per_s: measured speed of the whole run, padding left out.

    Raises:
        UserError: target, data or configuration are not usable. That the run does not fit is no
            error here but the plan's `problem`.
    """
    device, data = _device(config, gpu_memory_gib), config.data
    target, tokenizer = TargetShape.read(config.target), load_tokenizer(config.target)
    dataset = ResponseDataset.load(data.train, tokenizer, target.vocab_size, data.max_length)
    stream = BatchStream(
        dataset, data.batch_tokens, data.length_multiple, config.run.seed, world_size=num_gpus
    )
    head, batch = planned_shape(config, target, tokenizer), BatchShape.of(stream)
    shape = TrainingShape(config, head, target, batch, device, num_gpus)
    budget = Budget.of(config.run, device, gpu_memory_gib)
    speed, basis, problem = tokens_per_s, "as given", ""
    try:
        if device.type == "cuda" and gpu_memory_gib is None and num_gpus == 1:
            trainer = Trainer(config)
            memory = trainer.measure_memory()
            if speed is None:
                speed = stream.tokens_per_step / trainer.measure_step()
                basis = "measured"
        else:
            given = dataclasses.replace(budget, is_given=True)
            memory = choose_memory(shape, config.run, given)
    except UserError as error:
        ways = (estimate_memory(shape, *w) for w in step_ways(config.run, config.method.name))
        memory, problem = min(ways, key=lambda way: way.total), str(error)
    flops, disk = estimate_flops(shape, memory.recompute), _disk(shape, dataset)
    if gpu_memory_gib is None:
        room = missing_room(config.output, shape.checkpoint_bytes, shape.head_bytes)
        problem = f"{problem} {room}"
    seconds = sum(flops.values()) / (GPU_TFLOPS * 1e12)
    if speed is None and device.type == "cuda" and seconds >= MIN_STEP_SECONDS:
        speed = stream.tokens_per_step / seconds
        basis = f"if an H100-class GPU sustains {GPU_TFLOPS:g} TFLOP/s"
    shown = _SHOWN_SEGMENTS if config.method.name == "peagle" else (1,)
    by_segments = tuple(estimate_memory(shape, count, memory.recompute) for count in shown)
    return TrainingPlan(
        config=config,
        shape=shape,
        stream=stream,
        budget=budget,
        memory=memory,
        by_segments=by_segments,
        flops=flops,
        disk=disk,
        tokens_per_s=speed,
        basis="" if speed is None else basis,
        problem=problem.strip(),
    )


def _device(config: TrainConfig, gpu_memory_gib: float | None) -> torch.device:
    name = config.run.device
    if gpu_memory_gib is None:
        if name.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(
                f"run.device is {name!r} and there is no GPU here; say how much memory it has, as "
                "in --gpu-memory-gib 80."
            )
        return resolve_device(name)
    if name not in ("auto", "cuda") and not name.startswith("cuda:"):
        raise UserError(
            f"--gpu-memory-gib is {gpu_memory_gib:g}, but run.device is {name!r}; leave one "
            "of them out."
        )
    return torch.device("cuda")


def _disk(shape: TrainingShape, dataset: ResponseDataset) -> dict[str, int]:
    config, target = shape.config, shape.target
    sizes = (target.vocab_size, target.hidden_size, target.num_layers)
    facts = StoreFacts(
        dataset_sha256="",
        num_sequences=len(dataset),
        num_tokens=len(dataset.tokens),
        longest=0,
        target=TargetFingerprint(Path(target.name).name, *sizes, None, ""),
        target_dtype="bfloat16",
        aux_layer_ids=shape.head.aux_layer_ids,
        dtype=stored_dtype(config.data),
    )
    graded = int(dataset.num_graded.sum())
    return {
        "checkpoint": shape.checkpoint_bytes,
        "head": shape.head_bytes,
        # What `peagle data features` writes, but for headers.
        "store": facts.num_tokens * facts.position_bytes + graded * facts.graded_bytes,
        "free": free_bytes(config.output),
    }


def _memory_json(memory: PeakMemory) -> dict[str, Any]:
    return {
        "segments": memory.segments,
        "recompute_layers": memory.recompute,
        "peak": memory.total,
        "is_measured": not memory.parts,
        "parts": memory.parts,
    }


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f}M parameters"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
