"""A training plan for people."""

from __future__ import annotations

from peagle.engine.memory_plan import size_text
from peagle.training.budget import segments_text
from peagle.training.step_shape import stored_dtype
from peagle.training.training_plan import TrainingPlan

Row = tuple[str, str]


def plan_text(plan: TrainingPlan) -> str:
    """A few lines on each of: the run, memory, disk, time."""
    rows = [*_run(plan), *_elements(plan)]
    sections = [
        ("", rows),
        (_memory_title(plan), _memory(plan)),
        ("disk", _disk(plan)),
        ("time", _time(plan)),
    ]
    width = max(len(name) for _, rows in sections for name, _ in rows)
    lines = [f"{plan.config.method.name} head for {plan.shape.target.name}"]
    for title, rows in sections:
        lines += [title] if title else []
        lines += [f"  {name:<{width}}  {text}" for name, text in rows]
    return "\n".join(lines)


def _run(plan: TrainingPlan) -> list[Row]:
    shape, stream, config = plan.shape, plan.stream, plan.config
    head, own, dataset = shape.head, shape.parameters, stream.dataset
    steps, epoch = config.optimizer.steps, stream.steps_per_epoch
    frozen = own.total - own.trained
    vocabulary = f"{head.draft_vocab_size:,} of {head.vocab_size:,} tokens"
    parameters = f"{own.total / 1e6:,.1f}M parameters"
    if frozen:
        parameters += f", {frozen / 1e6:,.1f}M of them frozen"
    target = f"{shape.target.num_parameters / 1e6:,.1f}M parameters in {_type(shape.target_dtype)}"
    longest = f"the longest has {dataset.longest:,}"
    shared = f" on {shape.world_size} GPUs" if shape.world_size > 1 else ""
    return [
        ("target", target + (", from stored features" if shape.stored else "")),
        ("head", f"{head.num_layers} layers of width {head.hidden_size:,}, {vocabulary}"),
        ("", f"{parameters} in {_type(shape.dtype)}"),
        (
            "data",
            f"{len(dataset):,} sequences, {len(dataset.tokens):,} tokens, {longest}",
        ),
        (
            "batch",
            f"{stream.num_rows} x {stream.row_length:,} positions{shared}, {stream.fill:.0%} of "
            f"them tokens: {stream.tokens_per_step:,.0f} tokens",
        ),
        ("steps", f"{steps:,}, {epoch:,} an epoch: {steps / epoch:,.2f} epochs"),
    ]


def _elements(plan: TrainingPlan) -> list[Row]:
    positions, work = plan.shape.batch.positions, plan.work
    return [
        (
            "elements",
            f"{work.elements:,} a step ({positions:,} of depth 0, {work.elements - positions:,} "
            f"deeper), {work.graded:,} graded",
        )
    ]


def _memory_title(plan: TrainingPlan) -> str:
    return f"memory: about {size_text(plan.memory.total)} at the peak ({plan.memory.phase})"


def _memory(plan: TrainingPlan) -> list[Row]:
    memory, is_peagle = plan.memory, plan.config.method.name == "peagle"
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])
    rows = [(name, size_text(size)) for name, size in parts]
    rows.append(("may take", f"{size_text(plan.budget.size)} ({plan.budget.source})"))
    if is_peagle:
        again = "recomputed" if memory.recompute else "kept"
        rows.append(
            (
                "takes least" if memory.total > plan.budget.size else "chosen",
                f"{segments_text(memory.segments)}, layers {again}",
            )
        )
        peaks = ", ".join(f"S={m.segments} {size_text(m.total)}" for m in plan.by_segments)
        rows.append(("by segments", peaks))
    return rows


def _disk(plan: TrainingPlan) -> list[Row]:
    disk = plan.disk
    stored = "" if plan.shape.stored else "would take "
    return [
        ("checkpoint", f"{size_text(disk.checkpoint)}, twice while it is written"),
        ("head", size_text(disk.head)),
        ("stored features", f"{stored}{size_text(disk.store)} in {stored_dtype(plan.config.data)}"),
        ("free", size_text(disk.free) + (", too little" if disk.needed > disk.free else "")),
    ]


def _time(plan: TrainingPlan) -> list[Row]:
    work, pace = plan.work, plan.pace
    total = work.total
    parts = sorted(work.parts.items(), key=lambda part: -part[1])
    shares = ", ".join(f"{name} {size / total:.0%}" for name, size in parts)
    size = f"{total / 1e12:,.0f} TFLOP" if total >= 1e13 else f"{total / 1e9:,.1f} GFLOP"
    rows = [("a step", f"{size} ({shares})")]
    if pace is None:
        why = "the step is too small to tell" if plan.shape.device.type == "cuda" else "not known"
        return [*rows, ("all steps", f"{why}; measure a few steps and give --tokens-per-s")]
    return [
        *rows,
        ("speed", f"{pace.tokens_per_s:,.0f} tokens/s, {pace.basis}"),
        ("all steps", f"{_hours(pace.hours)}, without validation and saving"),
    ]


def _hours(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 60:,.1f} minutes"


def _type(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
