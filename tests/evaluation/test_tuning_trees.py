"""Candidate trees beside chains: shapes, visits, and where they win."""

from dataclasses import replace
from pathlib import Path

from peagle.bundled import BUNDLED_PEAGLE
from peagle.config import CandidateTrees, SpeculativeConfig
from peagle.evaluation.journal import Journal
from peagle.evaluation.tuning.acceptance import TreeAcceptance
from peagle.evaluation.tuning.machine import DecodeCost
from peagle.evaluation.tuning.trees import (
    measure_tree_steps,
    tree_config,
    tree_shapes,
    tuned_trees,
)
from peagle.models.checkpoint import read_head
from peagle.results import Prediction

SHAPES = [CandidateTrees(n, min(n, 7), n) for n in (4, 16)]
LENGTHS = [TreeAcceptance(3.0), TreeAcceptance(4.0)]


def chain(batch: int, k: int, speed: float) -> Prediction:
    return Prediction(
        batch=batch, k=k, predicted_tokens_per_s=0.0, measured_tokens_per_s=speed, fitted=True
    )


def test_shapes_are_as_deep_as_the_head_and_as_wide_as_their_default() -> None:
    config = read_head(BUNDLED_PEAGLE).config
    assert tree_shapes((4, 16), config) == SHAPES
    assert tree_shapes((4,), replace(config, trained_depth=3)) == [CandidateTrees(4, 3, 4)]
    autoregressive = replace(config, mask_token_id=None)
    beams = [CandidateTrees(2, 2, 2), CandidateTrees(4, 7, 16)]
    assert tree_shapes((2, 16), autoregressive) == beams


def test_the_fastest_visit_counts_and_is_kept(tmp_path: Path) -> None:
    times = iter([3.0, 5.0, 2.0, 6.0, 9.0, 9.0, 8.0, 9.0])

    def measure(batch: int, shape: CandidateTrees) -> DecodeCost:
        return DecodeCost(next(times), 0.0, 0.0)

    def run() -> dict[tuple[int, int], float]:
        journal = Journal(tmp_path / "cells.jsonl", {})
        return measure_tree_steps(measure, SHAPES, (1, 2), 2, journal)

    expected = {(1, 4): 2.0, (2, 4): 5.0, (1, 16): 8.0, (2, 16): 9.0}
    assert run() == expected
    assert run() == expected  # without a measurement: none is left


def test_trees_win_where_they_gain_more_than_the_threshold_over_every_k() -> None:
    # Speeds of the small tree: 30 and 60; of the large one: 40 and 53.
    seconds = {(1, 4): 0.1, (2, 4): 0.1, (1, 16): 0.1, (2, 16): 0.15}
    chains = [chain(1, 0, 10), chain(1, 7, 35), chain(2, 0, 20), chain(2, 7, 59)]
    small, large = tuned_trees(SHAPES, LENGTHS, seconds, chains, 0.03)
    assert small.tokens_per_s == [(1, 30.0), (2, 60.0)]
    assert (small.wins_at, large.wins_at) == ([], [1])  # 60 is less than 3% above 59
    config = tree_config("head", [small, large])
    assert config is not None
    assert SpeculativeConfig.parse(config).parallel_drafting_spec == SHAPES[1]

    small, large = tuned_trees(SHAPES, LENGTHS, seconds, chains, 0.0)
    assert (small.wins_at, large.wins_at) == ([2], [1])
    config = tree_config("head", [small, large])
    assert config is not None and config["parallel_drafting_spec"]["max_nodes"] == 4

    none = tuned_trees(SHAPES, LENGTHS, seconds, [chain(1, 7, 99), chain(2, 7, 99)], 0.03)
    assert tree_config("head", none) is None
    assert tree_config("head", []) is None
