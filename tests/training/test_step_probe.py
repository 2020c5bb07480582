"""Segments are chosen by what steps take: the fewest that fit, and a refusal where none do."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.errors import UserError
from peagle.training.config import RunSection
from peagle.training.step_memory import (
    SEGMENTS,
    Budget,
    PeakMemory,
    TrainingShape,
    available_ram,
    choose_memory,
    estimate_memory,
)
from peagle.training.trainer import Trainer
from tests.training.runs import make_config, read_checkpoint, twelve_steps
from tests.training.step_runs import Case

GIB = 2**30
LONG = Case(rows=4, length=512, method={"depth": 8})


def run_section(**options: Any) -> RunSection:
    return RunSection(device="cpu", **options)  # type: ignore[call-arg]


def choose(
    shape: TrainingShape,
    size: float,
    measure: Callable[[int, bool], int | None] | None = None,
    stored: tuple[int, bool] | None = None,
    **options: Any,
) -> PeakMemory:
    budget = Budget(int(size), "run.memory_gib is so much", True)
    return choose_memory(shape, run_section(**options), budget, measure=measure, stored=stored)


def total(shape: TrainingShape, segments: int, recompute: bool) -> int:
    return estimate_memory(shape, segments, recompute).total


# ---- by the estimate ----


@pytest.mark.parametrize("segments", [1, 2, 3, 8])
def test_the_fewest_segments_that_fit(segments: int) -> None:
    shape = LONG.shape
    needed = total(shape, segments, False)
    found = choose(shape, needed)
    assert (found.segments, found.recompute, found.total) == (segments, False, needed)
    assert segments == 1 or choose(shape, needed - 1).segments > segments


def test_layers_are_recomputed_only_where_nothing_else_fits() -> None:
    shape = LONG.shape
    without = min(total(shape, count, False) for count in SEGMENTS)
    assert not choose(shape, without).recompute
    found = choose(shape, without - 1)
    assert found.recompute
    before = SEGMENTS[max(0, SEGMENTS.index(found.segments) - 1)]
    assert found.segments == 1 or total(shape, before, True) > without - 1


def test_what_is_written_stays() -> None:
    shape, ample = LONG.shape, 100 * GIB
    found = choose(shape, ample, segments=5, recompute_layers=True)
    assert (found.segments, found.recompute) == (5, True)
    # Recomputation makes room for a number that is written.
    found = choose(shape, total(shape, 2, False) - 1, segments=2)
    assert (found.segments, found.recompute) == (2, True)
    # A guess at the memory overrules nobody who has written everything.
    guess = Budget(1, "half", False)
    written = run_section(segments=2, recompute_layers=False)
    assert choose_memory(shape, written, guess).segments == 2
    with pytest.raises(UserError, match=r"A step may take 1 B \(half\)"):
        choose_memory(shape, run_section(), guess)


def test_eagle3_has_one_way() -> None:
    shape = Case(method={"name": "eagle3"}).shape
    found = choose_memory(shape, run_section(), Budget(1, "half", False))
    assert (found.segments, found.recompute) == (1, False)
    with pytest.raises(UserError, match=r"positions takes about [\d.]+ MiB \("):
        choose(shape, 1)


# ---- by measuring ----


def test_a_measurement_overrules_the_estimate() -> None:
    shape, size, tried = LONG.shape, total(LONG.shape, 1, False), []

    def measure(segments: int, recompute: bool) -> int | None:
        tried.append((segments, recompute))
        return {1: None, 2: size + 1}.get(segments, size - 1)

    found = choose(shape, size, measure)
    assert tried == [(1, False), (2, False), (3, False)], "out of memory, too much, enough"
    assert found == PeakMemory(3, False, size - 1, {})
    assert str(found).endswith("(measured), S = 3, layers kept")


def test_what_the_estimate_calls_hopeless_is_not_tried() -> None:
    shape, size, tried = LONG.shape, total(LONG.shape, 8, False), []

    def measure(segments: int, recompute: bool) -> int:
        tried.append(segments)
        return 1

    choose(shape, size, measure)
    assert tried[0] > 1 and total(shape, tried[0], False) <= 1.5 * size


def test_a_resumed_run_tries_nothing_cheaper_than_its_own_way() -> None:
    shape, ample = LONG.shape, 100 * GIB
    found = choose(shape, ample, stored=(4, False))
    assert (found.segments, found.recompute) == (4, False)
    found = choose(shape, total(shape, 4, False) - 1, stored=(4, False))
    assert (found.segments, found.recompute) == (6, False), "less memory than before"
    assert choose(shape, ample, stored=(4, False), segments=2).segments == 2


@pytest.mark.slow
def test_a_run_keeps_its_segments(target_folder: Path, responses: Path, tmp_path: Path) -> None:
    def trainer(**run: Any) -> Trainer:
        changes = twelve_steps(**run)
        return Trainer(make_config(target_folder, responses, tmp_path, **changes))

    ample = trainer()
    assert ample.memory.segments == 1
    small = (estimate_of(ample, 3) + 1) / GIB
    first = trainer(memory_gib=small)
    assert first.memory.segments == 3
    first.run()
    resumed = trainer()
    assert resumed.memory.segments == 3, "there is more memory now, and the run stays the same"
    assert resumed.run(resume=True)["segments"] == 3


def estimate_of(trainer: Trainer, segments: int) -> int:
    from peagle.models.target_facts import TargetShape
    from peagle.training.step_memory import BatchShape

    config, head = trainer.config, trainer.drafter.config
    target, batch = TargetShape.read(config.target), BatchShape.of(trainer.stream)
    return total(TrainingShape(config, head, target, batch, trainer.device), segments, False)


@pytest.mark.slow
def test_a_probe_changes_nothing(
    target_folder: Path, responses: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of a probe are real; only what counts bytes is replaced, which a CPU lacks."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 5)
    for optimizer in ("adamw", "muon"):
        changes: dict[str, Any] = {
            "optimizer": {"steps": 4, "name": optimizer},
            "run": {"segments": 2, "recompute_layers": False},
        }
        for name in ("plain", "probed"):
            output = tmp_path / optimizer / name
            trainer = Trainer(make_config(target_folder, responses, output, **changes))
            if name == "probed":
                assert trainer.memory.parts
                measured = trainer.measure_memory()
                assert (measured.segments, measured.total, measured.parts) == (2, 5, {})
            trainer.run()
        plain, probed = (
            read_checkpoint(tmp_path / optimizer / name) for name in ("plain", "probed")
        )
        assert all(torch.equal(value, probed[name]) for name, value in plain.items())


def test_the_largest_batch_has_the_most_anchors(
    target_folder: Path, responses: Path, tmp_path: Path
) -> None:
    stream = Trainer(make_config(target_folder, responses, tmp_path)).stream
    largest = int((stream.largest().deepest_BN >= 0).sum())
    batches = [stream.at(step) for step in range(2 * stream.steps_per_epoch)]
    counts = [int((batch.deepest_BN >= 0).sum()) for batch in batches]
    assert largest >= max(counts) > 0
    assert stream.largest().tokens_BN.shape == batches[0].tokens_BN.shape


@pytest.mark.gpu
def test_a_probe_on_a_gpu(target_folder: Path, responses: Path, tmp_path: Path) -> None:
    head = {"num_layers": 1, "head_dim": 16}  # FlexAttention on a GPU wants 16 at least
    config = make_config(target_folder, responses, tmp_path, head=head, run={"device": "cuda"})
    trainer = Trainer(config)
    assert trainer.memory.segments == 1 and not trainer.memory.parts
    measured = trainer.memory.total
    torch.cuda.reset_peak_memory_stats()
    trainer.run()
    assert torch.cuda.max_memory_allocated() < 1.1 * measured
    little = {"device": "cuda", "memory_gib": 0.001}
    with pytest.raises(UserError, match="A step may take 1"):
        Trainer(make_config(target_folder, responses, tmp_path / "b", head=head, run=little))


# ---- refusals ----


def refusal(shape: TrainingShape, size: float, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        choose(shape, size, **options)
    return str(caught.value)


def test_a_refusal_says_what_is_there_and_what_is_not() -> None:
    shape = LONG.shape
    size = total(shape, 2, False) - 1
    text = refusal(shape, size, recompute_layers=False, segments=1)
    assert text.startswith("A step may take ") and "(run.memory_gib is so much)" in text
    needed = estimate_memory(shape, 1, False)
    assert f"4 x 512 positions takes about {needed.total / 2**20:.1f} MiB in 1 segment (" in text
    assert f"deeper elements {needed.parts['deeper elements'] / 2**20:.1f} MiB" in text
    assert 'Set run.segments = "auto". Set run.recompute_layers = true.' in text
    rows = re.search(r"data\.batch_tokens = (\d+) would fit", text)
    assert rows is not None
    smaller = Case(rows=int(rows[1]) // 512, length=512, method={"depth": 8}).shape
    assert total(smaller, 1, False) <= size


def test_a_long_row_is_told_to_be_shorter() -> None:
    shape = Case(rows=1, length=4096).shape
    size = total(shape, SEGMENTS[-1], True) / 2
    text = refusal(shape, size)
    length = re.search(r"data\.max_length = data\.batch_tokens = (\d+) would fit", text)
    assert length is not None and "data.batch_tokens = 4096" not in text
    assert choose(Case(rows=1, length=int(length[1])).shape, size).total <= size


def test_a_head_that_is_too_large_itself() -> None:
    shape = LONG.shape
    target = dataclasses.replace(shape.target, num_parameters=3 * GIB)
    text = refusal(dataclasses.replace(shape, target=target), 2 * GIB)
    assert "No shorter batch would fit" in text and "head.num_layers" in text
    assert "Stored features (`peagle data features`) save the target's 12.0 GiB" in text


# ---- budgets ----


def test_where_a_budget_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    given = Budget.of(run_section(memory_gib=1.5), cpu)
    assert given == Budget(3 * GIB // 2, "run.memory_gib is 1.5", True)
    half = Budget.of(run_section(), cpu)
    assert 0.3 < half.size / available_ram() < 0.7 and not half.is_given
    assert half.source.startswith("50% of the ")
    planned = Budget.of(run_section(), gpu, 80)
    assert planned.size == int(72 * GIB) and planned.source == "90% of the 80.0 GiB of a GPU"
    module = "peagle.training.step_memory"
    monkeypatch.setattr(f"{module}.free_and_total", lambda _: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(f"{module}.device_name", lambda _: "Card 9")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: GIB)
    here = Budget.of(run_section(), gpu)
    assert here == Budget(int(64 * GIB), "90% of the 70.0 GiB free on Card 9", False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segments": 0}, 'expected "auto" or a whole number of at least 1'),
        ({"segments": "many"}, 'expected "auto" or a whole number'),
        ({"segments": True}, 'expected "auto" or a whole number'),
        ({"recompute_layers": 3}, 'expected "auto", true or false'),
        ({"memory_gib": 0}, "greater than 0"),
    ],
)
def test_mistakes_in_the_configuration(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_section(**options)
