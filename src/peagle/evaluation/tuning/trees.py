"""Candidate trees of a few sizes beside chains: the cost of their steps, and where they win."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from peagle.config import CandidateTrees
from peagle.evaluation.journal import Journal
from peagle.evaluation.tuning.acceptance import TreeAcceptance
from peagle.evaluation.tuning.machine import DecodeCost
from peagle.models.drafter import DrafterConfig
from peagle.models.head_json import default_k
from peagle.results import Prediction, TunedTrees

Measure = Callable[[int, CandidateTrees], DecodeCost]


def tree_shapes(sizes: Sequence[int], head: DrafterConfig) -> list[CandidateTrees]:
    """Return the shape of trees of each number of nodes, as deep as the head was trained for.

    The number of first tokens is the default of the head.
    """
    depth, parallel = default_k(head.trained_depth), head.is_parallel
    return [CandidateTrees.parse({"max_nodes": size}, depth, parallel=parallel) for size in sizes]


def measure_tree_steps(
    measure: Measure,
    shapes: Sequence[CandidateTrees],
    batches: Sequence[int],
    rounds: int,
    journal: Journal,
    watch: Callable[[int, CandidateTrees, bool], None] = lambda batch, shape, was_there: None,
) -> dict[tuple[int, int], float]:
    """Return the seconds of the fastest step by batch size and nodes, of `rounds` visits to each.

    The journal gets every visit and saves measuring it again. `watch` is called after each visit,
    with whether the journal had it. Batch sizes take turns within a shape.
    """
    seconds: dict[tuple[int, int], float] = {}
    for shape in shapes:
        for number in range(rounds):
            for batch in batches:
                key = f"cost batch={batch} nodes={shape.max_nodes} visit={number}"
                found = journal.get(key)
                cost = measure(batch, shape) if found is None else DecodeCost(**found)
                if found is None:
                    journal.add(key, asdict(cost))
                at = batch, shape.max_nodes
                seconds[at] = min(seconds.get(at, math.inf), cost.seconds)
                watch(batch, shape, found is not None)
    return seconds


def tuned_trees(
    shapes: Sequence[CandidateTrees],
    acceptances: Sequence[TreeAcceptance],
    seconds: Mapping[tuple[int, int], float],
    chains: Sequence[Prediction],
    threshold: float,
) -> list[TunedTrees]:
    """Return the speed of each shape by batch size, and where it is the best configuration.

    A shape wins at a batch size if it is the fastest shape and gains more than the threshold over
    every measured K, K = 0 too.

    Args:
        acceptances: acceptance of each shape.
        seconds: seconds of a step, by batch size and nodes.
        chains: measured speeds at every batch size and K.
    """
    batches = sorted({batch for batch, _ in seconds})
    best_chain = {
        batch: max(one.measured_tokens_per_s or 0.0 for one in chains if one.batch == batch)
        for batch in batches
    }
    speeds = {
        shape: {batch: batch * one.length / seconds[batch, shape.max_nodes] for batch in batches}
        for shape, one in zip(shapes, acceptances, strict=True)
    }
    best_tree = {batch: max(speeds, key=lambda one: speeds[one][batch]) for batch in batches}
    return [
        TunedTrees(
            parallel_drafting_spec=asdict(shape),
            acceptance_length=one.length,
            **one.by_source,
            tokens_per_s=list(speeds[shape].items()),
            wins_at=[
                batch
                for batch in batches
                if best_tree[batch] == shape
                and speeds[shape][batch] > best_chain[batch] * (1 + threshold)
            ],
        )
        for shape, one in zip(shapes, acceptances, strict=True)
    ]


def tree_config(draft: str, trees: Sequence[TunedTrees]) -> dict[str, Any] | None:
    """Return the value of `--speculative-config` for the shape that wins at most batch sizes.

    Of shapes that win as often it is the one with fewer nodes; None if no shape wins anywhere.
    """
    best = max(trees, key=lambda one: len(one.wins_at), default=None)
    if best is None or not best.wins_at:
        return None
    shape = best.parallel_drafting_spec
    return {"method": "eagle3", "model": draft, "parallel_drafting_spec": shape}
