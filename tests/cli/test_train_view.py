"""How a training run's reports look as text."""

from __future__ import annotations

from dataclasses import replace

from peagle.cli.train import progress_text, result_text
from peagle.training.reporting import TrainingReport

TRAIN = TrainingReport(
    kind="train",
    step=20,
    steps=100,
    loss=1.23456,
    accuracy=[0.5, 0.25, 1.0],
    acceptance=[0.5, 0.2, 0.1],
    acceptance_lengths=[1.5, 1.7, 1.8],
    learning_rate=1e-3,
    tokens_per_s=12_345.6,
    tokens_per_step=4096.0,
    seconds_left=125.0,
)
VALIDATION = replace(
    TRAIN,
    kind="validation",
    is_best=True,
    num_drafts=90,
    acceptance_lengths=[1.512, 1.699, 1.754],
    unconditional_acceptance_per_pos=[0.5, 0.2, 0.0],
    conditional_acceptance_per_pos=[0.5, 0.4, 0.0],
    temperature=0.7,
    sampled_acceptance_lengths=[1.3, 1.4, 1.41],
    sampled_unconditional_acceptance_per_pos=[0.3, 0.0, 0.0],
    sampled_conditional_acceptance_per_pos=[0.3, 0.0, None],
)


def test_training_is_one_line() -> None:
    assert progress_text(TRAIN) == (
        "train      20/100  loss 1.2346  AL 1.80 (K=3)  accuracy by depth .50 .25 1.00  "
        "12,346 tokens/s  2:05 left"
    )


def test_a_validation_is_a_block() -> None:
    assert progress_text(VALIDATION).splitlines() == [
        "validation 20/100  loss 1.2346  the best head so far",
        "  by K; by position of K=3        1     2     3",
        "  acceptance length, greedy    1.51  1.70  1.75",
        "  acceptance length, T=0.7     1.30  1.40  1.41",
        "  unconditional, greedy         .50   .20   .00",
        "  unconditional, T=0.7          .30   .00   .00",
        "  conditional, greedy           .50   .40   .00",
        "  conditional, T=0.7            .30   .00     -",
    ]


def test_what_is_not_known_is_left_out() -> None:
    greedy = replace(
        VALIDATION,
        is_best=False,
        temperature=None,
        sampled_acceptance_lengths=[],
        sampled_unconditional_acceptance_per_pos=[],
        sampled_conditional_acceptance_per_pos=[],
    )
    assert len(progress_text(greedy).splitlines()) == 5
    assert "best" not in progress_text(greedy) and "T=" not in progress_text(greedy)
    nothing = progress_text(replace(VALIDATION, num_drafts=0))
    assert nothing.splitlines()[1:] == ["  no acceptance: every response is shorter than 5 tokens"]


def test_a_deep_head_shows_some_columns() -> None:
    shares = [0.9] * 40
    deep = replace(
        VALIDATION,
        acceptance_lengths=[1 + k / 10 for k in range(40)],
        unconditional_acceptance_per_pos=shares,
        conditional_acceptance_per_pos=shares,
        sampled_acceptance_lengths=shares,
        sampled_unconditional_acceptance_per_pos=shares,
        sampled_conditional_acceptance_per_pos=shares,
    )
    lines = progress_text(deep).splitlines()
    assert lines[1].split()[-7:] == ["1", "2", "4", "8", "16", "32", "40"]
    assert lines[2].split()[-7:] == ["1.00", "1.10", "1.30", "1.70", "2.50", "4.10", "4.90"]
    assert max(map(len, lines)) < 100


def test_the_end_names_the_head_that_was_kept() -> None:
    record = {
        "best": {"step": 40, "k": 3, "temperature": 0.7, "acceptance_length": 1.406},
        "stop_reason": "patience",
        "steps": 80,
        "seconds": 61.4,
        "config": {"run": {"patience": 2}},
    }
    assert result_text(record, "run/head").splitlines() == [
        "stopped at step 80: no better head in 2 validations",
        "head of step 40 (acceptance length 1.41 as served, K=3, temperature 0.7) written to "
        "run/head after 61 s",
    ]
    plain = {**record, "best": None, "stop_reason": "steps"}
    assert result_text(plain, "run/head") == "head written to run/head after 61 s"
