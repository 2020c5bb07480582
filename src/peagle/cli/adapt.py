"""`peagle adapt`: make a better head from recorded traffic, if it proves to be better."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from peagle.cli.adapting import (
    ENGINE,
    PlaceOptions,
    TrainingOptions,
    adapted,
    figures,
    refuse,
    write_figures,
)
from peagle.cli.flags import Given, refuse_idle, spread, takes
from peagle.cli.groups import Format, OutputFormat
from peagle.cli.head_server import ADMIN_KEY, find_server, hand_over, told_of
from peagle.cli.terminal import command_prefix
from peagle.config.checks import require_writable_file
from peagle.errors import UserError

EXAMPLES = """
A new correction for the bundled head, from traffic that a server recorded:
  peagle serve --record traffic --record-all
  peagle adapt bundled --target bundled --traffic traffic --output adapted

The head too, on encrypted records, with data that it was trained on against forgetting:
  peagle adapt ./head --target ./Qwen3-0.6B --traffic traffic --record-key-file key \\
      --what head --old train.safetensors --output adapted --minutes 30

A report whether or not the head passes; a bound on memory, as in `peagle train`:
  peagle adapt ./head --target ./Qwen3-0.6B --traffic traffic --output adapted \\
      --report report.json --set run.memory_gib=20

On trial in a running server, whose --allow-heads names the folder `heads`:
  peagle adapt ./head --target ./Qwen3-0.6B --traffic traffic --output heads/adapted \\
      --serve http://127.0.0.1:8000 --admin-key-file admin.key
"""


@dataclass(frozen=True)
class AdaptOptions(TrainingOptions, PlaceOptions):
    """The options of `adapt` outside the shared groups, as typed."""

    report: Path | None = typer.Option(
        None, metavar="FILE", help="Write the result there as JSON, also if the head is refused."
    )
    serve: str | None = typer.Option(
        None,
        metavar="URL",
        help="Running server that takes the new head, if it passes; its --allow-heads has to "
        "contain --output.",
        show_default="no server takes it",
    )
    admin_key_file: Path | None = typer.Option(
        None,
        metavar="FILE",
        help=f"File whose first key is one of that server's --admin-key-file; {ADMIN_KEY} may "
        "hold the key instead.",
        show_default=False,
    )
    trial_requests: int = typer.Option(
        500,
        min=0,
        max=100_000,
        help="Number of requests that the new head serves there on trial, in turns with the old "
        "one; 0 swaps at once.",
    )
    output_format: Format = OutputFormat.TEXT


@takes(*ENGINE)
@spread
def adapt(given: Given, context: typer.Context, options: AdaptOptions) -> None:
    """Make a better head from recorded traffic; it is written only if it proves to be better.

    The newest tenth of the traffic, by conversations, is held out; the rest is trained on. The
    target answers the held-out prompts greedily with the old head and with the new one. The new
    head passes if the 95% interval of its gain in acceptance length, before the loops of outputs,
    is above 0, and if it lost less than --max-loss on old data. Else the status is 3.
    """
    options.check(context)
    if options.serve is None:
        refuse_idle(context, ["trial_requests"], "without --serve", "add --serve URL")
    if options.report is not None:
        require_writable_file(options.report, "--report")
        if options.report.resolve().is_relative_to(options.output.resolve()):
            raise UserError(
                f"--report {str(options.report)!r} is in --output, which is made for a head that "
                "passes alone; name a file elsewhere."
            )
    server = find_server(options.serve, options.admin_key_file)
    result = adapted(given, options, options)
    not_served: UserError | None = None
    if server is not None and result["head"]:
        try:
            result["served"] = hand_over(server, options.output, options.trial_requests)
        except UserError as error:
            not_served = error
    if options.output_format is OutputFormat.JSON:
        print(json.dumps(result, indent=2))
    else:
        print("\n".join([*figures(result), *_end(result, options)]))
    if options.report is not None:
        write_figures(options.report, result, "The result is on standard output.")
    refuse(result)
    if not_served is not None:
        raise not_served


def _end(result: Mapping[str, Any], options: AdaptOptions) -> list[str]:
    """Return where the head is, and what serves it."""
    if not result["head"]:
        return ["no head was written"]
    if result["served"] is not None and options.serve is not None:
        told = told_of(result["served"], options.serve, options.admin_key_file)
        return [f"the new head is in {result['head']}; {told}"]
    serve = f"{command_prefix()} serve {options.target} --draft {result['head']}"
    return [f"the new head is in {result['head']}; serve it:", f"  {serve}"]
