"""Answers that share a row against the same answers in rows of their own."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.data.batches import Batch, fill_rows, make_batch
from peagle.data.dataset import ResponseDataset
from peagle.data.features import target_states
from peagle.data.samples import Dropped, Sample, join_answers
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.training.acceptance import ServedAcceptance
from peagle.training.config import MethodSection
from peagle.training.step import Objective, TrainingStep
from peagle.training.training_methods import TrainingMethod
from peagle.training.warm_start import start_mask_hidden
from tests.conftest import make_drafter
from tests.data.files import dataset_of, separate

DEPTH = 3
VOCAB = 6
Row = tuple[list[int], list[int]]
Element = tuple[tuple[int, ...], int, int]

some_tokens = st.lists(st.integers(1, VOCAB - 1), max_size=6)


@st.composite
def conversations(draw: st.DrawFn) -> list[Sample]:
    """A sample for each answer; some templates render the history of an answer anew."""
    samples, history = [], []
    for _ in range(draw(st.integers(1, 6))):
        if draw(st.integers(0, 3)) == 0:
            history = draw(some_tokens)
        prompt, response = history + draw(some_tokens), draw(some_tokens)
        samples.append(Sample.answered(prompt, response, "one"))
        history = prompt + response
    return samples


def by_definition(samples: list[Sample], max_length: int) -> Counter[Element]:
    """(a, d) counts iff x[a+1] to x[a+d+2] lie in the response; it sees x up to a+1."""
    found = Counter()
    for sample in samples:
        ids, begin = sample.ids[:max_length], len(sample.prompt)
        if not begin:  # nothing was asked
            continue
        for a in range(begin - 1, len(ids)):
            for d in range(min(DEPTH, len(ids) - 2 - a)):
                found[tuple(ids[: a + 2]), d, ids[a + d + 2]] += 1
    return found


def elements_of(batch: Batch) -> Counter[Element]:
    found = Counter()
    for place in batch.places:
        at = (place.row, slice(place.start, place.start + place.length))
        ids, deepest = batch.tokens_BN[at].tolist(), batch.deepest_BN[at].tolist()
        for a, deepest_of_a in enumerate(deepest):
            for d in range(min(DEPTH, deepest_of_a + 1)):
                found[tuple(ids[: a + 2]), d, ids[a + d + 2]] += 1
    return found


@pytest.mark.slow
@given(st.lists(conversations(), min_size=1, max_size=4), st.integers(3, 60), st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_the_supervised_elements_are_those_of_separate_rows(
    each: list[list[Sample]], max_length: int, seed: int
) -> None:
    """Every token with its context, target and depth, as often."""
    rows: list[Row] = []
    for samples in each:
        for sample in join_answers(samples):
            assert not isinstance(sample, Dropped)
            rows.append((sample.ids, list(sample.loss_mask)))
    alone = [sample for samples in each for sample in samples]
    dataset = dataset_of(rows)._cut(max_length)
    expected = by_definition(alone, max_length)
    assert int(dataset.num_graded.sum()) == sum(n for (_, d, _), n in expected.items() if d == 0)
    apart = dataset_of([(s.ids, list(s.loss_mask)) for s in alone])._cut(max_length)
    counts = [one.response_token_counts(VOCAB).tolist() for one in (dataset, apart)]
    assert counts[0] == counts[1]
    if not len(dataset):
        assert not expected
        return
    lengths = dataset.start_loc.diff().tolist()
    packed = fill_rows(lengths, max_length, torch.Generator().manual_seed(seed))
    assert elements_of(make_batch(dataset, packed, max_length)) == expected


def test_a_row_holds_all_answers_that_it_can() -> None:
    """Each prompt goes on after all of the row; an answer without a prompt of its own does not."""
    first, second = Sample.answered([1], [2, 3]), Sample.answered([1, 2, 3, 4], [5, 5])
    third = Sample.answered([1, 2, 3, 4, 5, 5, 1], [2])
    dropped, row = join_answers([first, Dropped("why"), second, third])
    assert isinstance(dropped, Dropped) and isinstance(row, Sample)
    assert row.ids == [1, 2, 3, 4, 5, 5, 1, 2]
    assert (row.prompt, row.response) == ([1, 2, 3, 4, 5, 5, 1], [2, 3, 5, 5, 2])
    assert row.answers == ((1, 3), (4, 6), (7, 8)) and list(row.loss_mask) == [
        0,
        1,
        1,
        0,
        1,
        1,
        0,
        1,
    ]
    for other in (
        Sample.answered([1, 2, 3], [5]),
        Sample.answered([1, 2, 4, 4], [5]),
        Sample.answered([1, 2], [3]),
    ):
        assert list(join_answers([first, other])) == [first, other]


# ---- gradients, grades and drafts ----


def random_rows(seed: int = 4) -> list[Row]:
    """Conversations of one to four answers of unlike lengths."""
    generator = torch.Generator().manual_seed(seed)

    def some(least: int, most: int) -> list[int]:
        count = int(torch.randint(least, most + 1, (1,), generator=generator))
        return torch.randint(2, 300, (count,), generator=generator).tolist()

    rows: list[Row] = []
    for answers in (3, 1, 4, 2):
        ids: list[int] = []
        mask: list[int] = []
        for _ in range(answers):
            prompt, response = some(1, 6), some(2, 14)
            ids += prompt + response
            mask += [0] * len(prompt) + [1] * len(response)
        rows.append((ids, mask))
    return rows


def one_a_row(rows: list[Row]) -> tuple[ResponseDataset, Batch]:
    dataset = dataset_of(rows)
    return dataset, make_batch(dataset, [[i] for i in range(len(rows))], dataset.longest)


def step_of(head: Drafter, target: TargetModel, name: str) -> TrainingStep:
    section = MethodSection(name=name, depth=DEPTH, depth_decay=0.9, cod_ratio=1.0)  # type: ignore
    objective = Objective(head, target, section, 16)
    judged = Objective(head, target, section, 16, temperature=1.0)
    return TrainingStep(head, TrainingMethod(section), objective, judged, 2)


@pytest.mark.parametrize("name", ["peagle", "eagle3"])
def test_loss_and_gradients_are_those_of_separate_rows(target: TargetModel, name: str) -> None:
    """In float64, packed with other conversations or not."""
    head = make_drafter(target, parallel=name == "peagle").double()
    target.tap_aux(head.config.aux_layer_ids)
    rows = random_rows()
    together = dataset_of(rows)
    batches = {
        "separate": one_a_row(separate(rows))[1],
        "joined": one_a_row(rows)[1],
        "packed": make_batch(together, [[0, 2], [3, 1]], len(together.tokens)),
    }
    losses: dict[str, float] = {}
    gradients: dict[str, dict[str, Tensor]] = {}
    for kind, batch in batches.items():
        step, states = step_of(head, target, name), target_states(target, batch)
        outcome = step.backward(batch, states, torch.Generator().manual_seed(1))
        losses[kind] = float(outcome.loss)
        gradients[kind] = {n: p.grad for n, p in head.named_parameters() if p.grad is not None}
        head.zero_grad(set_to_none=True)
        assert len(outcome.row) == int((batch.deepest_BN.clamp(-1, DEPTH - 1) + 1).sum()) > 100
    for kind in ("joined", "packed"):
        assert losses[kind] == pytest.approx(losses["separate"], rel=1e-6)
        assert gradients[kind].keys() == gradients["separate"].keys()
        for n, gradient in gradients[kind].items():
            # Angles of RoPE are float32: those of later positions are rounded otherwise.
            error = (gradient - gradients["separate"][n]).norm() / gradient.norm()
            assert error < 1e-5, (kind, n)


def test_validation_walks_each_answer(target: TargetModel) -> None:
    """The drafts that serving makes, how many reach each position, and their chances there."""
    head = make_drafter(target).double()
    target.tap_aux(head.config.aux_layer_ids)
    rows = random_rows(seed=5)
    found = []
    for batch in (one_a_row(rows)[1], one_a_row(separate(rows))[1]):
        outcome = step_of(head, target, "peagle").evaluate(batch, target_states(target, batch))
        assert outcome.chance is not None
        # A random head drafts nothing that follows: let every third chain element do so.
        token = batch.tokens_BN[outcome.row, outcome.anchor + outcome.depth + 2]
        follows = (token + outcome.depth) % 3 == 0
        meter, at = ServedAcceptance(DEPTH), (outcome.row, outcome.anchor, outcome.depth)
        meter.add(*at, follows, outcome.chance, batch.tokens_BN.shape)
        found.append(meter.counters)
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-9)
    assert found[0][DEPTH - 1, 0, 0] > 20 and found[0][DEPTH - 1, 0, 1] > 5


def test_mask_hidden_starts_from_answers_alone() -> None:
    rows: list[Row] = [([9] * 8, [0, 0, 1, 1, 0, 0, 1, 1]), ([9] * 3, [0, 1, 1])]
    dataset = dataset_of(rows)
    head = cast(Any, SimpleNamespace(mask_hidden=torch.zeros(1, dtype=torch.float64)))

    def features_of(index: int) -> Tensor:
        return 100 * index + torch.arange(len(rows[index][0])).unsqueeze(1)

    start_mask_hidden(head, dataset, features_of)
    assert head.mask_hidden.item() == pytest.approx((2 + 3 + 6 + 7 + 101 + 102) / 6)
