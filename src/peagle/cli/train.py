"""`peagle train`: train a draft head as a TOML file says."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from peagle.cli.main import INTERRUPTED
from peagle.cli.options import quiet_libraries
from peagle.cli.progress import ProgressLine
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.training.config import TrainConfig
    from peagle.training.distributed import Processes
    from peagle.training.reporting import TrainingReport
    from peagle.training.trainer import Trainer

EXAMPLES = """
# A head for the bundled code model; the file's first lines say how its data are made
peagle train recipes/quickstart.toml

# Continue after an interruption: the same steps an uninterrupted run would have taken
peagle train head.toml --resume

# Train for longer; the learning rate is then that of a run of 4,000 steps
peagle train head.toml --resume --set optimizer.steps=4000

# On both GPUs of a machine: each takes half of the rows of every batch
torchrun --nproc-per-node 2 -m peagle train head.toml

# Memory and hours on a GPU of 80 GiB, estimated: nothing runs, and no weights are needed
peagle train head.toml --plan --gpu-memory-gib 80

# A short trial elsewhere, with machine-readable progress
peagle train head.toml --output /tmp/trial --set optimizer.steps=50 --format json
"""


def train(
    config: Annotated[
        Path, typer.Argument(help="TOML file that describes the run.", metavar="CONFIG")
    ],
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the output folder's checkpoint; only optimizer.steps may differ.",
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Output folder, instead of the one in the file.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a value of the file; may be repeated."
        ),
    ] = None,
    format: Annotated[
        Literal["text", "json"], typer.Option(help="Progress as text or as one JSON object a line.")
    ] = "text",
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Print memory, disk space and hours of the run, and do not train."
        ),
    ] = False,
    gpu_memory_gib: Annotated[
        float | None,
        typer.Option(
            help="With --plan: memory of a GPU that is not here, in GiB.", show_default="this one"
        ),
    ] = None,
    gpus: Annotated[
        int, typer.Option(min=1, help="With --plan: number of GPUs that share the run.")
    ] = 1,
    tokens_per_s: Annotated[
        float | None,
        typer.Option(
            help="With --plan: tokens per second, as training prints them.",
            show_default="measured or computed",
        ),
    ] = None,
) -> None:
    """Train a P-EAGLE or EAGLE-3 draft head on responses that the target generated.

    Writes to the output folder: head/ (vLLM style; the best one where there is validation data),
    checkpoint/ (to resume from), metrics.jsonl and train.json.
    """
    from peagle.config import require_writable_folder
    from peagle.training.config import TrainConfig

    _check_plan_options(plan, gpu_memory_gib, gpus, tokens_per_s)

    def read() -> TrainConfig:
        run = TrainConfig.read(config, overrides or [])
        if output is not None:
            run = run.model_copy(update={"output": output.absolute()})
        run.check_paths()
        if not plan:
            require_writable_folder(run.output, "The output folder")
        return run

    if os.environ.get("WORLD_SIZE", "1") == "1":
        read()  # A mistake is refused before torch is imported, which takes seconds.
    with ProgressLine("step", quiet=plan or not _shows_progress(format)) as progress:
        progress.begin("importing torch")
        from peagle.training.distributed import joined

        result = None
        with joined() as processes:
            run = read()
            if not plan:
                result = _train(run, processes, progress, resume=resume, as_json=format == "json")
            elif processes.is_first:
                count = max(gpus, processes.world_size)
                _print_plan(run, gpu_memory_gib, count, tokens_per_s, as_json=format == "json")
    if result is not None:
        print(result)


def _check_plan_options(
    is_plan: bool, gpu_memory_gib: float | None, gpus: int, tokens_per_s: float | None
) -> None:
    """Refuse numbers that are not above 0, and options of --plan without it."""
    given = {"--gpu-memory-gib": gpu_memory_gib, "--tokens-per-s": tokens_per_s}
    for name, value in given.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name} is {value}; expected a number above 0.")
    given["--gpus"] = gpus if gpus > 1 else None
    for name, value in given.items():
        if value is not None and not is_plan:
            raise UserError(f"{name} is {value:g}; it goes with --plan. Leave one of them out.")


def _print_plan(
    run: TrainConfig,
    gpu_memory_gib: float | None,
    gpus: int,
    tokens_per_s: float | None,
    *,
    as_json: bool,
) -> None:
    """Print the plan of a run, and raise its problem if it has one."""
    quiet_libraries()
    from peagle.training.training_plan import Where, make_plan

    plan = make_plan(run, Where(gpu_memory_gib, gpus, tokens_per_s))
    print(json.dumps(plan.to_json()) if as_json else plan, flush=True)
    if plan.problem:
        raise UserError(plan.problem)


def _shows_progress(format: str) -> bool:
    """Whether this process shows progress as text; of several processes the first one does."""
    return format == "text" and os.environ.get("RANK", "0") == "0"


def _train(
    plan: TrainConfig, processes: Processes, progress: ProgressLine, *, resume: bool, as_json: bool
) -> str | None:
    """Train; returns what is printed at the end, in the first process."""
    from peagle.cli.train_view import TrainView, result_text
    from peagle.training.trainer import Trainer, TrainingStopped

    view = TrainView(progress, plan.optimizer.steps)
    report = _print_json if as_json else view.report
    trainer = Trainer(plan, report, processes, begin=progress.begin, stepped=view.stepped)
    if not as_json and processes.is_first:
        for line in _facts(trainer):
            progress.print(line)
    _stop_on_interrupt(trainer, progress)
    try:
        record = trainer.run(resume=resume)
    except TrainingStopped as stopped:
        if not processes.is_first:
            raise SystemExit(INTERRUPTED) from None
        print(f"peagle: {stopped}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    head = plan.output / "head"
    if not processes.is_first:
        return None
    if as_json:
        return json.dumps({"kind": "result", "head": str(head), **record})
    here, head = Path.cwd(), head.resolve()
    return result_text(record, str(head.relative_to(here) if head.is_relative_to(here) else head))


def _facts(trainer: Trainer) -> Iterator[str]:
    """The size of the run, its warm start, memory and vocabulary, a line each."""
    plan = trainer.config
    parameters = sum(p.numel() for p in trainer.drafter.parameters())
    yield (
        f"{plan.method.name} head: {parameters / 1e6:.2f}M parameters, "
        f"{len(trainer.dataset)} sequences, {trainer.stream.steps_per_epoch} steps an epoch, "
        f"{plan.optimizer.steps} steps on {_places(trainer)}"
    )
    if trainer.warm_start is not None:
        yield str(trainer.warm_start)
    if plan.method.name == "peagle":
        yield str(trainer.memory)
    if trainer.vocabulary is not None:
        yield str(trainer.vocabulary)


def _places(trainer: Trainer) -> str:
    count = trainer.processes.world_size
    return str(trainer.device) if count == 1 else f"{count} times {trainer.device.type}"


def _stop_on_interrupt(trainer: Trainer, progress: ProgressLine) -> None:
    """The first Ctrl-C finishes and saves the step at hand; the second stops at once."""

    def stop(number: int, frame: object) -> None:
        if trainer.processes.is_first:
            print("peagle: saving after this step; press again to stop at once", file=sys.stderr)
        trainer.stop_requested = True
        signal.signal(number, signal.default_int_handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _print_json(report: TrainingReport) -> None:
    print(json.dumps(asdict(report)), flush=True)
