"""`peagle train`: train a draft head by a TOML file."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from peagle.cli.main import INTERRUPTED
from peagle.cli.progress import ProgressLine, time_text
from peagle.cli.setup import note, quiet_libraries
from peagle.cli.tables import short_share
from peagle.disk import locked
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

# A head and its correction, trained together
peagle train head.toml --set correction.train=together

# A correction of a head that stays as it is, fitted in minutes on the same data and kept beside it
peagle train head.toml --correction-on out/head

# As many steps as take 20 minutes, planned by the time of the first ones; optimizer.steps is then
# left out of the file
peagle train head.toml --set run.minutes=20

# On both GPUs of a machine: each takes half of the rows of every batch
torchrun --nproc-per-node 2 -m peagle train head.toml

# Memory and hours on a GPU of 80 GiB, estimated: nothing runs, and no weights are needed
peagle train head.toml --plan --gpu-memory-gib 80

# A short trial elsewhere, with machine-readable progress
peagle train head.toml --output /tmp/trial --set optimizer.steps=50 --format json
"""


def train(
    config: Path = typer.Argument(..., help="TOML file that describes the run.", metavar="CONFIG"),
    resume: bool = typer.Option(
        False,
        "--resume",
        help="Continue from the output folder's checkpoint; only optimizer.steps may differ.",
    ),
    correction_on: str | None = typer.Option(
        None,
        metavar="HEAD",
        help="Fit a correction of this head's drafts instead, and write it beside the head.",
        show_default=False,
    ),
    output: Path | None = typer.Option(None, help="Output folder, instead of the one in the file."),
    overrides: list[str] | None = typer.Option(
        None, "--set", metavar="KEY=VALUE", help="Override a value of the file; may be repeated."
    ),
    format: Literal["text", "json"] = typer.Option(
        "text", help="Progress as text or as one JSON object a line."
    ),
    plan: bool = typer.Option(
        False, "--plan", help="Print memory, disk space and hours of the run, and do not train."
    ),
    show_config: bool = typer.Option(
        False, "--show-config", help="Print the run with every value that is decided, as JSON."
    ),
    gpu_memory_gib: float | None = typer.Option(
        None, help="With --plan: memory of a GPU that is not here, in GiB.", show_default="this one"
    ),
    gpus: int = typer.Option(1, min=1, help="With --plan: number of GPUs that share the run."),
    tokens_per_s: float | None = typer.Option(
        None,
        help="With --plan: tokens per second, as training prints them.",
        show_default="measured or computed",
    ),
) -> None:
    """Train a P-EAGLE or EAGLE-3 draft head on responses that the target generated.

    Writes to the output folder: head/ (vLLM style; the best one where there is validation data),
    checkpoint/ (to resume from), metrics.jsonl and train.json. With correction.train = "together"
    head/ has the head's correction too. With --correction-on the head stays
    as it is and gets correction.st beside it; the rest goes to correction/ in the output folder.
    """
    from peagle.training.checkpoint_facts import continued
    from peagle.training.config import TrainConfig, optimizer_note
    from peagle.training.start_checks import check_start

    _check_plan_options(plan, gpu_memory_gib, gpus, tokens_per_s)
    is_first = os.environ.get("RANK", "0") == "0"

    def read() -> TrainConfig:
        given = TrainConfig.read(
            config, overrides or [], output=output, correction_on=correction_on
        )
        run = continued(given) if resume else given
        if is_first and (text := optimizer_note(given, run)):
            note(text)
        return run

    def check(run: TrainConfig) -> None:
        if not plan:
            check_start(run, resume=resume)
        elif run.correction.on is None:
            run.check_paths()
        else:
            raise UserError(
                f"--plan is of training a head; a correction of {str(run.correction.on)!r} is "
                "asked for, which takes minutes. Leave one of them out."
            )

    if show_config:
        print(json.dumps(read().to_json(), indent=2))
        return
    run = None
    if os.environ.get("WORLD_SIZE", "1") == "1":
        # A mistake is refused before torch is imported, which takes seconds.
        check(run := read())
    as_json = format == "json"
    with ProgressLine("step", quiet=plan or as_json or not is_first) as progress:
        progress.begin("importing torch")
        from peagle.training.distributed import joined_processes, leave

        result = None
        with joined_processes() as processes:
            if run is None:
                run = read()
                processes.first(partial(check, run))
            if not plan:
                with ExitStack() as held:
                    # One process locks the output for the whole run, before anything is loaded.
                    processes.first(lambda: held.enter_context(locked(run.output)))
                    result = _train(run, processes, progress, resume=resume, as_json=as_json)
            elif processes.is_first:
                count = max(gpus, processes.world_size)
                quiet_libraries()
                from peagle.training.training_plan import make_plan

                forecast = make_plan(
                    run, gpu_memory_gib=gpu_memory_gib, num_gpus=count, tokens_per_s=tokens_per_s
                )
                print(json.dumps(forecast.to_json()) if as_json else forecast, flush=True)
                if forecast.problem:
                    raise UserError(forecast.problem)
    if result is not None:
        print(result)
    leave(processes)


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


def _train(
    plan: TrainConfig, processes: Processes, progress: ProgressLine, *, resume: bool, as_json: bool
) -> str | None:
    """Train, and return the final text in the first process."""
    from peagle.training.trainer import Trainer, TrainingStopped

    view = TrainView(progress, lambda: trainer.config.optimizer.planned_steps)

    def print_json(report: TrainingReport) -> None:
        print(json.dumps(asdict(report)), flush=True)

    report = print_json if as_json else view.report
    trainer = Trainer(plan, report, processes, begin=progress.begin, stepped=view.stepped)
    if not as_json and processes.is_first:
        for line in _facts(trainer):
            progress.print(line)
    _stop_on_interrupt(trainer)
    try:
        record = trainer.run(resume=resume, is_locked=True)
    except TrainingStopped as stopped:
        if not processes.is_first:
            raise SystemExit(INTERRUPTED) from None
        print(f"peagle: {stopped}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    head = plan.head_folder
    if not processes.is_first:
        return None
    if as_json:
        return json.dumps({"kind": "result", "head": str(head), **record})
    here, head = Path.cwd(), head.resolve()
    return training_text(record, str(head.relative_to(here) if head.is_relative_to(here) else head))


def _facts(trainer: Trainer) -> Iterator[str]:
    """Yield lines on the size of the run, its warm start, memory and vocabulary."""
    plan, count = trainer.config, trainer.processes.world_size
    places = str(trainer.device) if count == 1 else f"{count} times {trainer.device.type}"
    parameters = sum(p.numel() for p in trainer.trained.parameters())
    own = plan.correction
    steps, minutes = plan.optimizer.steps, plan.run.minutes
    length = f"{minutes:g} minutes" if steps is None else f"{steps} steps"
    kind = "correction" if own.on is not None else f"{plan.method.name} head"
    if own.train == "together":
        kind += " with a correction"
    yield (
        f"{kind}: {parameters / 1e6:.2f}M parameters, "
        f"{len(trainer.dataset)} sequences, {trainer.stream.steps_per_epoch} steps an epoch, "
        f"{length} on {places}"
    )
    quantization = plan.head.layer_quantization
    if quantization is not None and plan.correction.on is None:
        yield f"fc and linear layers are rounded to {quantization}"
    if trainer.warm_start is not None:
        yield str(trainer.warm_start)
    if plan.method.name == "peagle":
        yield str(trainer.memory)
    if trainer.vocabulary is not None:
        yield str(trainer.vocabulary)


def _stop_on_interrupt(trainer: Trainer) -> None:
    """Let a first Ctrl-C finish and save the present step, and a second one stop at once."""

    def stop(number: int, frame: object) -> None:
        if trainer.processes.is_first:
            print("peagle: saving after this step; press again to stop at once", file=sys.stderr)
        trainer.stop_requested = True
        signal.signal(number, signal.default_int_handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


_MAX_COLUMNS = 8  # A validation then fits into 80 columns.
_LABEL = 27


class TrainView:
    """The display of a run: its progress line, and text on standard output.

    If the line is live and standard output is the same terminal, reports of training are only on
    the line, and validations are text above it. `steps` gives the number of all steps, which is
    known from the first step on.
    """

    def __init__(self, progress: ProgressLine, steps: Callable[[], int]) -> None:
        self._progress, self._steps = progress, steps
        self._figures = ""

    def stepped(self, step: int) -> None:
        """Show the number of a finished step."""
        self._progress.update(step, self._steps(), self._figures)

    def report(self, report: TrainingReport) -> None:
        """Show the figures of a report."""
        if report.kind == "train":
            self._figures = (
                f"loss {report.loss:.4f}  AL {report.acceptance_lengths[-1]:.2f}  "
                f"{report.tokens_per_s:,.0f} tokens/s"
            )
            self.stepped(report.step)
        if report.kind == "validation" or not (self._progress.is_live and sys.stdout.isatty()):
            print(progress_text(report), flush=True)


def progress_text(report: TrainingReport) -> str:
    """Return a report of training as one line, of validation as a block."""
    head = f"{report.kind:<10} {report.step}/{report.steps}  loss {report.loss:.4f}"
    if report.kind == "validation":
        note = "  the best head so far" if report.is_best else ""
        return "\n".join([head + note, *_acceptance_rows(report)])
    lengths = report.acceptance_lengths
    accuracy = " ".join(short_share(value) for value in report.accuracy)
    return (
        f"{head}  AL {lengths[-1]:.2f} (K={len(lengths)})  accuracy by depth {accuracy}  "
        f"{report.tokens_per_s:,.0f} tokens/s  {time_text(report.seconds_left)} left"
    )


def training_text(record: dict[str, Any], folder: str) -> str:
    """Describe why a run stopped and where its head is."""
    best, lines = record["best"], []
    if record["stop_reason"] == "patience":
        patience = record["config"]["run"]["patience"]
        lines.append(f"stopped at step {record['steps']}: no better head in {patience} validations")
    which = kind = "correction" if "correction" in record else "head"
    if best is not None:
        how = f"temperature {best['temperature']:g}" if best["temperature"] else "greedy"
        which = (
            f"{kind} of step {best['step']} (acceptance length {best['acceptance_length']:.2f} as "
            f"served, K={best['k']}, {how})"
        )
    if kind == "correction" and best is not None and not best["step"]:
        lines.append(f"no correction written to {folder}: none drafts better than the head alone")
    else:
        lines.append(f"{which} written to {folder} after {record['seconds']:.0f} s")
    return "\n".join(lines)


def _acceptance_rows(report: TrainingReport) -> list[str]:
    """Return the rows of simulated acceptance by K and by position, with a heading."""
    depth = len(report.acceptance_lengths)
    if not report.num_drafts:
        return [f"  no acceptance: every response is shorter than {depth + 2} tokens"]
    columns = chosen_columns(depth, _MAX_COLUMNS)
    at = f"T={report.temperature:g}" if report.temperature is not None else ""
    alone = report.acceptance_lengths_alone
    rows: list[tuple[str, Sequence[float | None], bool]] = [
        ("acceptance length, head alone", alone, False),
        (
            f"acceptance length, {'corrected' if alone else 'greedy'}",
            report.acceptance_lengths,
            False,
        ),
        (f"acceptance length, {at}", report.sampled_acceptance_lengths, False),
        ("unconditional, greedy", report.unconditional_acceptance_per_pos, True),
        (f"unconditional, {at}", report.sampled_unconditional_acceptance_per_pos, True),
        ("conditional, greedy", report.conditional_acceptance_per_pos, True),
        (f"conditional, {at}", report.sampled_conditional_acceptance_per_pos, True),
    ]
    width = max(_LABEL, *(len(label) for label, values, _ in rows if values))
    heading = f"  {f'by K; by position of K={depth}':<{width}}"
    lines = [heading + "".join(f"{column + 1:>6}" for column in columns)]
    for label, values, shares in rows:
        if values:
            shown = (short_share(values[i]) if shares else f"{values[i]:.2f}" for i in columns)
            lines.append(f"  {label:<{width}}" + "".join(f"{text:>6}" for text in shown))
    return lines


def chosen_columns(count: int, most: int) -> list[int]:
    """Return the indices 0 to count - 1, or with more than `most`: 0, 1, 3, 7, ... and the last."""
    if count <= most:
        return list(range(count))
    powers = [2**i - 1 for i in range(count.bit_length()) if 2**i < count]
    return [*powers, count - 1]
