"""K by batch size: the ranges of a schedule, the best single K, and speculative configurations."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from peagle.errors import UserError

Speed = Callable[[int, int], float]
Schedule = list[tuple[int, int, int]]
DEFAULT_THRESHOLD = 0.03


def choose_schedule(
    speed: Speed, largest_batch: int, ks: Sequence[int], threshold: float = DEFAULT_THRESHOLD
) -> Schedule:
    """Choose K by batch size, in as few ranges as lose nowhere more than the threshold.

    Neighbouring sizes share a K if speed(b, K) >= max over K' of speed(b, K') / (1 + threshold)
    for every size b in the range. Of all schedules with the fewest such ranges this is the one with
    the highest speed, by geometric mean over the sizes; at equal speed, the one with fewer drafts.
    The threshold 0 takes the best K of every size.

    Returns:
        (first, last, K), ascending; the ranges cover the sizes from 1 to `largest_batch`.

    Raises:
        UserError: no size or no K is given, or the threshold is negative.
    """
    if largest_batch < 1 or not ks or threshold < 0:
        raise UserError(
            f"Batch sizes to {largest_batch}, K of {list(ks)} and the threshold {threshold} make "
            "no schedule; expected a size of at least 1, some K and a threshold of at least 0."
        )
    # By K of the last size so far: (ranges, loss, drafts) and the K of every size.
    paths: dict[int, tuple[tuple[int, float, int], tuple[int, ...]]] = {-1: ((0, 0.0, 0), ())}
    for batch in range(1, largest_batch + 1):
        speeds = {k: speed(batch, k) for k in ks}
        best = max(speeds.values())
        near = [k for k in ks if speeds[k] * (1 + threshold) >= best]
        losses = {k: math.log(best / speeds[k]) for k in near}
        paths = {
            k: min(
                ((ranges + (last != k), round(lost + losses[k], 12), drafts + k), (*sizes, k))
                for last, ((ranges, lost, drafts), sizes) in paths.items()
            )
            for k in near
        }
    _, chosen = min(paths.values())
    schedule: Schedule = []
    for k, group in groupby(enumerate(chosen, 1), key=lambda one: one[1]):
        batches = [batch for batch, _ in group]
        schedule.append((batches[0], batches[-1], k))
    return schedule


def k_at(schedule: Schedule, batch: int) -> int:
    """Return K of a schedule at a batch size; the last K holds beyond the last range."""
    return next((k for _, last, k in schedule if batch <= last), schedule[-1][2])


def best_single_k(speed: Speed, batches: Sequence[int], ks: Sequence[int]) -> int:
    """Return the single K with the highest speed over these batch sizes, by geometric mean."""
    return max(ks, key=lambda k: (sum(math.log(speed(b, k)) for b in batches), -k))


def speculative_config(draft: str, schedule: Schedule) -> dict[str, Any] | None:
    """Return the value of `--speculative-config` for a schedule; None if it never drafts."""
    most = max(k for _, _, k in schedule)
    if not most:
        return None
    config: dict[str, Any] = {"method": "eagle3", "model": draft, "num_speculative_tokens": most}
    if len(schedule) > 1:
        config["num_speculative_tokens_per_batch_size"] = [list(one) for one in schedule]
    return config


def vllm_config(draft: str, schedule: Schedule, *, is_parallel: bool) -> dict[str, Any] | None:
    """Return vLLM's speculative configuration for a schedule; None if it never drafts.

    vLLM needs the key `parallel_drafting`. Its versions up to 0.32 crash on a schedule with that
    key: they take a single K, the schedule of one range.
    """
    config = speculative_config(draft, schedule)
    if config is not None and is_parallel:
        config["parallel_drafting"] = True
    return config
