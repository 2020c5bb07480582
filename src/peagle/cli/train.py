"""`peagle train`: train a draft head as a TOML file says."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from peagle.cli.main import INTERRUPTED

if TYPE_CHECKING:
    from peagle.training.reporting import Report
    from peagle.training.trainer import Trainer

EXAMPLES = """
# A P-EAGLE head for the bundled code model (paths in the file are relative to it)
peagle train recipes/bundled_pair/peagle.toml

# Go on after an interruption: the same steps an uninterrupted run would have taken
peagle train recipes/bundled_pair/peagle.toml --resume

# A short trial elsewhere, with machine-readable progress
peagle train head.toml --output /tmp/trial --set optimizer.steps=50 --format json
"""


def train(
    config: Annotated[Path, typer.Argument(help="TOML file with the whole run.", metavar="CONFIG")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint in the output folder.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Output folder, in place of the file's.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Put a value over the file's; repeatable."),
    ] = None,
    format: Annotated[
        Literal["text", "json"], typer.Option(help="Progress as text or as one JSON object a line.")
    ] = "text",
) -> None:
    """Train a P-EAGLE or EAGLE-3 draft head on responses that the target generated.

    Writes to the output folder: head/ (vLLM style), checkpoint/ (to resume from), metrics.jsonl and
    train.json.
    """
    from peagle.training.config import TrainConfig
    from peagle.training.trainer import Trainer, TrainingStopped

    plan = TrainConfig.read(config, overrides or [])
    if output is not None:
        plan = plan.model_copy(update={"output": output.absolute()})
    show = _print_json if format == "json" else _print_text
    trainer = Trainer(plan, show)
    if format == "text":
        parameters = sum(p.numel() for p in trainer.drafter.parameters())
        print(
            f"{plan.method.name}: {parameters / 1e6:.2f}M parameters, "
            f"{len(trainer.dataset)} sequences, {trainer.stream.steps_per_epoch} steps an epoch, "
            f"{plan.optimizer.steps} steps on {trainer.device}",
            file=sys.stderr,
        )
        if trainer.vocabulary is not None:
            print(trainer.vocabulary, file=sys.stderr)
    _stop_on_interrupt(trainer)
    try:
        record = trainer.run(resume=resume)
    except TrainingStopped as stopped:
        print(f"peagle: {stopped}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    if format == "json":
        print(json.dumps({"kind": "result", "head": str(plan.output / "head"), **record}))
    else:
        print(f"head written to {plan.output / 'head'} after {record['seconds']:.0f} s")


def _stop_on_interrupt(trainer: Trainer) -> None:
    """The first Ctrl-C finishes and saves the step at hand; the second stops at once."""

    def stop(number: int, frame: object) -> None:
        print("peagle: saving after this step; once more to stop at once", file=sys.stderr)
        trainer.stop_requested = True
        signal.signal(number, signal.default_int_handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _print_json(report: Report) -> None:
    print(json.dumps(asdict(report)), flush=True)


def _print_text(report: Report) -> None:
    lengths = report.acceptance_lengths
    line = f"{report.kind:<10} {report.step}/{report.steps}  loss {report.loss:.4f}"
    if report.kind == "validation":
        by_k = "  ".join(f"K={k} {length:.2f}" for k, length in enumerate(lengths, start=1))
        print(f"{line}  acceptance length as served, greedy: {by_k}", flush=True)
        return
    accuracy = " ".join(f"{value:.2f}".removeprefix("0") for value in report.accuracy)
    minutes, seconds = divmod(round(report.seconds_left), 60)
    print(
        f"{line}  AL {lengths[-1]:.2f} (K={len(lengths)})  accuracy by depth {accuracy}  "
        f"{report.tokens_per_s:,.0f} tokens/s  {minutes}:{seconds:02d} left",
        flush=True,
    )
