"""Packing against its rules, and packed documents against the same documents alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peagle.data.batches import (
    Batch,
    BatchStream,
    ValidationStream,
    by_length,
    fill_rows,
    make_batch,
)
from peagle.data.dataset import ResponseDataset
from peagle.data.features import TargetStates, target_states
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.training.config import MethodSection
from peagle.training.partition import PartitionLayout, two_pass_backward
from peagle.training.training_methods import Graded, TrainingMethod, eagle3_graded
from tests.conftest import byte_tokenizer, make_drafter
from tests.models.tiny import EXPERTS, LOCAL_GLOBAL, make_model

K = 4


def make_dataset(sizes: list[tuple[int, int]], seed: int = 3) -> ResponseDataset:
    """Random tokens; sizes are (prompt, response)."""
    lengths = torch.tensor([prompt + response for prompt, response in sizes])
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, 300, (int(lengths.sum()),), generator=generator, dtype=torch.int32)
    start_loc = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return ResponseDataset.of_prompts(
        tokens, start_loc, torch.tensor([prompt for prompt, _ in sizes])
    )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(0, 5))
def test_rows_hold_every_sequence_once_and_no_more_than_fits(lengths: list[int], seed: int) -> None:
    rows = fill_rows(lengths, 50, torch.Generator().manual_seed(seed))
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in row) for row in rows]
    assert all(0 < total <= 50 for total in sums)
    # Best fit leaves at most one row half empty.
    assert sum(total <= 25 for total in sums) <= 1


def test_a_batch_says_what_lies_where() -> None:
    dataset = make_dataset([(2, 5), (1, 3), (4, 2)])
    batch = make_batch(dataset, [[1, 2], [0]], 12)
    tokens = dataset.tokens.tolist()
    first, second, third = tokens[:7], tokens[7:11], tokens[11:]
    assert batch.tokens_BN.tolist() == [[*second, *third, 0, 0], [*first, 0, 0, 0, 0, 0]]
    assert batch.documents_BN.tolist() == [[0] * 4 + [1] * 6 + [-1] * 2, [0] * 7 + [-1] * 5]
    # Element (a, d) counts iff x[a+1] .. x[a+d+2] all lie in the response.
    expected = torch.full((2, 12), -1)
    for row, start, prompt, length in ((0, 0, 1, 4), (0, 4, 4, 6), (1, 0, 2, 7)):
        for anchor in range(length):
            for depth in range(length):
                if prompt <= anchor + 1 and anchor + depth + 2 < length:
                    expected[row, start + anchor] = depth
    assert batch.deepest_BN.tolist() == expected.tolist()
    assert [(p.sequence, p.row, p.start, p.length) for p in batch.places] == [
        (1, 0, 0, 4),
        (2, 0, 4, 6),
        (0, 1, 0, 7),
    ]
    assert batch.max_anchors >= int((expected >= 0).sum(1).max()) and batch.num_tokens == 17


def same(one: Batch, other: Batch) -> bool:
    return torch.equal(one.tokens_BN, other.tokens_BN) and one.places == other.places


def test_a_stream_is_a_function_of_seed_and_step() -> None:
    dataset = make_dataset([(1, 2 + i % 20) for i in range(97)])
    stream, again, other = (BatchStream(dataset, 96, 8, seed=s) for s in (1, 1, 2))
    per_epoch = stream.steps_per_epoch
    later = again.at(per_epoch + 3)
    for step in range(per_epoch + 4):
        batch = stream.at(step)
        assert batch.tokens_BN.shape == (4, 24), "one shape for all steps"
    assert same(batch, later) and not same(batch, other.at(per_epoch + 3))
    used = [place.sequence for step in range(per_epoch) for place in stream.at(step).places]
    assert len(used) == len(set(used)) > 80, "each sequence at most once, few left over"
    assert stream.fill > 0.9
    assert not same(stream.at(0), stream.at(per_epoch)), "another order"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_processes_share_the_rows_of_a_batch(world_size: int) -> None:
    dataset = make_dataset([(1, 2 + i % 20) for i in range(97)])
    whole = BatchStream(dataset, 96, 8, seed=1)
    shares = [
        BatchStream(dataset, 96, 8, seed=1, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for step in (0, 7):
        parts = [share.at(step) for share in shares]
        assert torch.equal(torch.cat([p.tokens_BN for p in parts]), whole.at(step).tokens_BN)
        # The same elements are kept, however many share them.
        method = TrainingMethod(MethodSection(depth=K))  # type: ignore[call-arg]

        def kept(batch: Batch, method: TrainingMethod = method) -> list[tuple[int, ...]]:
            generator = torch.Generator().manual_seed(5)
            elements = method.elements(batch, generator)
            row, column = elements.supervised.nonzero(as_tuple=True)
            columns = (elements.anchors[row, column], elements.depths[row, column])
            return sorted(zip((row + batch.first_row).tolist(), *(c.tolist() for c in columns)))

        together = [element for part in parts for element in kept(part)]
        assert together == kept(whole.at(step)) and len(together) > 50


def test_validation_has_one_sequence_a_row() -> None:
    lengths = [3 + i % 40 for i in range(61)]
    batches = by_length(lengths, 128, 8)
    assert sorted(i for _, rows in batches for [i] in rows) == list(range(61))
    for length, rows in batches:
        assert length * len(rows) <= 128 and all(lengths[i] <= length for [i] in rows)
    dataset = make_dataset([(1, n - 1) for n in lengths])
    assert len(ValidationStream(dataset, 128, 8, limit=5)) == 5
    everything = ValidationStream(dataset, 128, 8, limit=500)
    seen = [p.sequence for i in range(len(everything)) for p in everything.at(i).places]
    assert sorted(seen) == list(range(61))


SIZES = [(3, 9), (6, 4), (1, 12), (5, 8), (2, 2), (9, 3)]
PACKED = [[0, 1], [2, 3, 4], [5]]


KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {**LOCAL_GLOBAL, "attn_logit_softcapping": 5.0},
    "gpt_oss": {**LOCAL_GLOBAL, "num_local_experts": 4, **EXPERTS},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("launches", [0, 512], ids=["one-by-one", "masked"])
def test_the_target_reads_packed_documents_as_if_alone(
    tmp_path: Path, kind: str, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(kind, **KINDS[kind]).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    target = TargetModel.load(tmp_path, dtype=torch.float32)
    target.tap_aux((1, 2, 3))
    monkeypatch.setattr("peagle.attention.torch_backend._MIN_LAUNCH_KEYS", launches)
    dataset = make_dataset(SIZES)
    batch = make_batch(dataset, PACKED, 32)
    packed = target_states(target, batch)
    for place in batch.places:
        alone = target_states(target, make_batch(dataset, [[place.sequence]], place.length))
        at = (place.row, slice(place.start, place.start + place.length))
        torch.testing.assert_close(
            packed.features_BNA[at], alone.features_BNA[0], rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(packed.hidden_BNH[at], alone.hidden_BNH[0], rtol=1e-4, atol=1e-4)


def gradients(head: Drafter, name: str, batch: Batch, states: TargetStates) -> dict[str, Tensor]:
    """Of a loss that is a sum over elements."""
    head.zero_grad()
    method = TrainingMethod(MethodSection(name=name, depth=K))  # type: ignore[arg-type,call-arg]

    def loss_of(graded: Graded) -> Tensor:
        tokens = batch.tokens_BN[
            graded.selected.row, graded.selected.anchor + graded.selected.depth + 2
        ]
        logits = head.compute_logits(graded.hidden_MD)
        return torch.nn.functional.cross_entropy(logits, tokens, reduction="sum")

    if name == "eagle3":
        loss_of(eagle3_graded(head, batch, states, method)).backward()
    else:
        elements = method.elements(batch, None, everything=True)
        layout = PartitionLayout.of(elements, batch.tokens_BN.shape[1], 2, method)
        two_pass_backward(head, batch, states, layout, loss_of, method=method)
    return {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["peagle", "eagle3"])
def test_packed_documents_give_the_gradients_of_the_documents_alone(
    target: TargetModel, name: str
) -> None:
    head = make_drafter(target, parallel=name == "peagle").double()
    target.tap_aux(head.config.aux_layer_ids)
    dataset = make_dataset(SIZES)
    batch = make_batch(dataset, PACKED, 32)
    packed = gradients(head, name, batch, target_states(target, batch))
    total = {name: torch.zeros_like(gradient) for name, gradient in packed.items()}
    for index, (prompt, response) in enumerate(SIZES):
        alone = make_batch(dataset, [[index]], prompt + response)
        for n, gradient in gradients(head, name, alone, target_states(target, alone)).items():
            total[n] += gradient
    for n, gradient in packed.items():
        # Angles of RoPE are float32: those of later positions are rounded otherwise.
        error = (gradient - total[n]).norm() / total[n].norm()
        assert error < 1e-5, n
