"""`peagle train --plan`: what a run will take, before anything runs."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from peagle.cli.options import quiet_libraries
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.training.config import TrainConfig


def check_options(
    planned: bool, gpu_memory_gib: float | None, gpus: int, tokens_per_s: float | None
) -> None:
    """Refuse what cannot be planned with.

    Raises:
        UserError: a number is not above 0, or there is nothing to plan.
    """
    given = {"--gpu-memory-gib": gpu_memory_gib, "--tokens-per-s": tokens_per_s}
    for name, value in given.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name} is {value}; expected a number above 0.")
    given["--gpus"] = gpus if gpus > 1 else None
    for name, value in given.items():
        if value is not None and not planned:
            raise UserError(f"{name} is {value:g}; it goes with --plan. Leave one of them out.")


def show_plan(
    config: TrainConfig,
    *,
    gpu_memory_gib: float | None,
    gpus: int,
    tokens_per_s: float | None,
    as_json: bool,
) -> None:
    """Print the plan of a run.

    Raises:
        UserError: it cannot run as it is; the plan is printed before.
    """
    quiet_libraries()
    from peagle.training.training_plan import Where, make_plan

    plan = make_plan(config, Where(gpu_memory_gib, gpus, tokens_per_s))
    print(json.dumps(plan.to_json()) if as_json else plan, flush=True)
    if plan.problem:
        raise UserError(plan.problem)
