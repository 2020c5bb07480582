"""The batches of a captured step against their references, padded as a captured graph pads them.

On a CPU the kernels run under Triton's interpreter.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.kernels.drafts import batches as reference
from tests.kernels.devices import DEVICES, INTERPRETED

pytest.importorskip("triton", reason="needs triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from peagle.kernels.drafts import batches_triton

CPU = "cpu"
MASK_TOKEN = 999
TARGET_FIELDS = reference.TargetBatch.__dataclass_fields__
DRAFT_FIELDS = reference.DraftBatch.__dataclass_fields__


def block_tables(num_seqs: int, width: int) -> Tensor:
    return torch.randperm(num_seqs * width).view(num_seqs, width)


def target_state(num_seqs: int, k: int, block_size: int, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    active = torch.rand(num_seqs) < 0.8
    return {
        "last_tokens_B": torch.randint(900, (num_seqs,)),
        "drafts_BK": torch.randint(900, (num_seqs, k)),
        "num_draft_tokens_B": torch.randint(k + 1, (num_seqs,)) * active,
        "first_positions_B": torch.randint(40, (num_seqs,)),
        "block_tables_BM": block_tables(num_seqs, -(-(40 + k + 1) // block_size)),
        "active_B": active,
    }


def on(tensors: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("num_seqs", "k", "block_size", "spare", "max_model_len"),
    [(1, 1, 4, 0, 100), (3, 5, 4, 7, 30), (8, 7, 16, 0, 44), (17, 3, 3, 33, 100), (5, 8, 1, 1, 9)],
)
def test_target_batch(
    num_seqs: int, k: int, block_size: int, spare: int, max_model_len: int, device: str
) -> None:
    for seed in range(3):
        state = target_state(num_seqs, k, block_size, seed)
        num_rows = int(((state["num_draft_tokens_B"] + 1) * state["active_B"]).sum()) + spare
        num_rows = max(num_rows, 1)
        expected = reference.build_target_batch(
            **state, num_rows=num_rows, block_size=block_size, max_model_len=max_model_len
        )
        out = reference.TargetBatch.allocate(num_seqs, num_rows, device)
        for name in TARGET_FIELDS:
            getattr(out, name).fill_(-77)
        batches_triton.build_target_batch(
            **on(state, device), out=out, block_size=block_size, max_model_len=max_model_len
        )
        for name in TARGET_FIELDS:
            assert getattr(out, name).tolist() == getattr(expected, name).tolist(), name


def test_the_target_reference_is_the_loop() -> None:
    state = target_state(6, 4, 4, seed=9)
    batch = reference.build_target_batch(**state, num_rows=40, block_size=4, max_model_len=35)
    row = 0
    for b in range(6):
        assert batch.query_start_loc[b] == row
        if not state["active_B"][b]:
            assert batch.seq_lens_B[b] == 0
            continue
        count, first = int(state["num_draft_tokens_B"][b]), int(state["first_positions_B"][b])
        tokens = [int(state["last_tokens_B"][b]), *state["drafts_BK"][b, :count].tolist()]
        for offset, token in enumerate(tokens):
            position = first + offset
            slot = int(state["block_tables_BM"][b, position // 4]) * 4 + position % 4
            assert batch.tokens_R[row] == token
            assert batch.positions_R[row] == position
            assert batch.slots_R[row] == (slot if position < 35 else -1)
            assert batch.sequences_R[row] == b
            row += 1
        assert batch.seq_lens_B[b] == first + count + 1
    assert batch.query_start_loc[6] == row
    assert batch.slots_R[row:].eq(-1).all()
    assert batch.sequences_R[row:].eq(-1).all()


def padded_expand(inputs: dict[str, Tensor], num_slots: int, k: int, **options: Any) -> dict:
    """The reference on the active sequences only, put back among the inactive ones and padded."""
    active, loc = inputs["active_B"], inputs["target_start_loc"]
    num_target_rows = len(inputs["target_tokens_T"])
    num_seqs = len(active)
    lens = torch.zeros(num_seqs, dtype=torch.int64)
    fields = {
        "seq_lens_B": torch.zeros(num_seqs, dtype=torch.int64),
        "last_ntp_B": torch.zeros(num_seqs, dtype=torch.int64),
        "draft_rows_BK": torch.zeros(num_seqs, k, dtype=torch.int64),
    }
    parts = {
        name: torch.full((num_slots,), value)
        for name, value in (
            ("tokens_R", MASK_TOKEN),
            ("positions_R", 0),
            ("slots_R", -1),
            ("feature_rows_R", num_target_rows),
        )
    }
    if active.any():
        batch = reference.expand_draft_batch(
            inputs["target_tokens_T"],
            inputs["target_positions_T"],
            torch.cat((loc[:-1][active], loc[-1:])),
            inputs["num_accepted_B"][active],
            inputs["next_tokens_B"][active],
            inputs["block_tables_BM"][active],
            num_mask_slots_B=inputs["num_mask_slots_B"][active],
            max_drafts=k,
            mask_token_id=MASK_TOKEN,
            **options,
        )
        for name, part in parts.items():
            part[: len(batch.tokens_R)] = getattr(batch, name)
        for name, field in fields.items():
            field[active] = getattr(batch, name)
        lens[active] = batch.query_start_loc.diff()
    start_loc = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    return {**parts, **fields, "query_start_loc": start_loc}


def expand_inputs(
    num_seqs: int, k: int, block_size: int, seed: int, *, most_rows: int = 0
) -> dict[str, Tensor]:
    """A target batch with some accepted tokens; prompts of up to `most_rows` if that is not 0."""
    torch.manual_seed(seed)
    active = torch.rand(num_seqs) < 0.8
    rows = torch.randint(1, (most_rows or k + 1) + 1, (num_seqs,)) * active
    accepted = (torch.rand(num_seqs) * rows).long() if not most_rows else (rows - 1).clamp_min(0)
    first = torch.randint(30, (num_seqs,))
    num_rows = int(rows.sum())
    loc = torch.nn.functional.pad(rows.cumsum(0), (1, 0))
    of = torch.repeat_interleave(rows)
    padding = (0, 5)
    positions = first[of] + torch.arange(num_rows) - loc[of]
    longest = 30 + int(rows.max()) + k
    return {
        "target_tokens_T": torch.nn.functional.pad(torch.randint(900, (num_rows,)), padding),
        "target_positions_T": torch.nn.functional.pad(positions, padding),
        "target_start_loc": loc,
        "num_accepted_B": accepted,
        "next_tokens_B": torch.randint(900, (num_seqs,)),
        "block_tables_BM": block_tables(num_seqs, -(-longest // block_size)),
        "num_mask_slots_B": torch.randint(k, (num_seqs,)) * active,
        "num_draft_tokens_B": torch.full((num_seqs,), 77),
        "active_B": active,
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("num_seqs", "k", "block_size", "spare", "max_model_len", "most_rows"),
    [
        (1, 1, 4, 0, 100, 0),
        (3, 5, 4, 7, 30, 0),
        (9, 7, 16, 0, 33, 0),
        (17, 3, 3, 50, 100, 0),
        (4, 4, 5, 2, 90, 77),
    ],
)
def test_draft_batch(
    num_seqs: int,
    k: int,
    block_size: int,
    spare: int,
    max_model_len: int,
    most_rows: int,
    device: str,
) -> None:
    for seed in range(3):
        inputs = expand_inputs(num_seqs, k, block_size, seed, most_rows=most_rows)
        lens = inputs["num_accepted_B"] + 1 + inputs["num_mask_slots_B"]
        num_slots = max(int((lens * inputs["active_B"]).sum()) + spare, 1)
        options: dict[str, Any] = {"block_size": block_size, "max_model_len": max_model_len}
        expected = padded_expand(inputs, num_slots, k, **options)
        out = reference.DraftBatch.allocate(num_seqs, num_slots, k, device)
        for name in DRAFT_FIELDS:
            getattr(out, name).fill_(-77)
        batches_triton.expand_draft_batch(
            **on(inputs, device), out=out, mask_token_id=MASK_TOKEN, **options
        )
        assert set(expected) == set(DRAFT_FIELDS)
        for name, values in expected.items():
            assert getattr(out, name).tolist() == values.tolist(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("left", [0, 1, 5, 11])
def test_mask_slots_without_room_are_left_out(left: int, device: str) -> None:
    for seed in range(3):
        inputs = expand_inputs(9, 7, 4, seed)
        active, wanted = inputs["active_B"], inputs["num_mask_slots_B"]
        num_slots = int(((inputs["num_accepted_B"] + 1) * active).sum()) + left
        room, fitting, drafts = left, [], []
        for b in range(9):
            fitting.append(min(room, int(wanted[b])))
            drafts.append(77 if fitting[b] == wanted[b] else fitting[b] + 1)
            room -= fitting[b]
        fit = reference.fit_mask_slots(
            inputs["num_accepted_B"] * active - (~active).long(), wanted, num_slots
        )
        assert fit.tolist() == fitting and sum(fitting) == min(left, int(wanted.sum()))
        options: dict[str, Any] = {"block_size": 4, "max_model_len": 100}
        expected = padded_expand(inputs | {"num_mask_slots_B": fit}, num_slots, 7, **options)
        out = reference.DraftBatch.allocate(9, num_slots, 7, device)
        given = on(inputs, device)
        batches_triton.expand_draft_batch(**given, out=out, mask_token_id=MASK_TOKEN, **options)
        assert given["num_draft_tokens_B"].tolist() == drafts
        for name, values in expected.items():
            assert getattr(out, name).tolist() == values.tolist(), name


@pytest.mark.parametrize(
    ("num_seqs", "num_rows", "max_accepted", "num_masks", "num_slots"),
    [
        (4, 32, 7, 6, 56),  # chains of 7
        (4, 64, 7, 6, 56),  # trees of 15 nodes
        (4, 16, 4, 3, 28),  # trees of 3 nodes
        (1, 16, 32, 6, 22),  # trees of 15 nodes with copies
        (64, 1024, 32, 6, 1030),
        (64, 2048, 32, 6, 2054),  # of 31 nodes
        (4, 64, 32, 0, 64),  # a head that makes one draft a pass
    ],
)
def test_slots_of_a_captured_batch(
    num_seqs: int, num_rows: int, max_accepted: int, num_masks: int, num_slots: int
) -> None:
    assert reference.count_draft_slots(num_seqs, num_rows, max_accepted, num_masks) == num_slots


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_rows", "num_slots", "width"), [(1, 1, 1), (7, 13, 33), (5, 9, 2100)])
def test_gather_features(
    num_rows: int, num_slots: int, width: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    features = torch.randn(num_rows, width, dtype=dtype, device=device)
    features[0] = torch.nan  # a rejected row: nobody asks for it
    h_shared = torch.randn(width, dtype=dtype, device=device)
    rows = torch.randint(1, num_rows + 1, (num_slots,), device=device)
    out = torch.full((num_slots, width), torch.nan, dtype=dtype, device=device)
    batches_triton.gather_features(features, h_shared, rows, out)
    assert torch.equal(out, torch.cat((features, h_shared.unsqueeze(0)))[rows])


def test_too_many_sequences() -> None:
    state = target_state(1025, 1, 4, seed=0)
    out = reference.TargetBatch.allocate(1025, 2050, CPU)
    with pytest.raises(ValueError, match="1025 sequences"):
        batches_triton.build_target_batch(**state, out=out, block_size=4, max_model_len=100)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("lens", "width", "sizes"),
    [
        ([1], 1, (1, 1, 1)),
        ([3, 5], 2, (8, 2, 2)),
        ([4, 1, 9], 3, (32, 5, 7)),
        ([7] * 32, 40, (256, 32, 64)),
        ([600, 1], 300, (1024, 4, 301)),
    ],
)
@pytest.mark.parametrize("has", ["nothing", "buffers", "all"])
def test_a_batch_in_larger_buffers(
    lens: list[int], width: int, sizes: tuple[int, int, int], has: str, device: str
) -> None:
    """Numbers behind the batch are those of padding; block tables keep theirs."""
    torch.manual_seed(len(lens))
    most_rows, most_seqs, most_width = sizes
    num_rows, num_seqs = sum(lens), len(lens)
    numbers = [torch.randint(1, 1000, (num_rows,)) for _ in range(4)]
    tokens_R, positions_R, slots_R, visible_R = numbers
    start_loc = torch.nn.functional.pad(torch.tensor(lens).cumsum(0), (1, 0))
    seq_lens_B, starts_B = torch.randint(1, 99, (2, num_seqs))
    tables_BM = torch.randint(1, 1000, (num_seqs, width))
    batch = reference.PackedBatch(tokens_R, positions_R, slots_R, start_loc, seq_lens_B)
    out = reference.TargetBatch.allocate(most_seqs, most_rows, device)
    for one in out.tensors:
        one.fill_(-77)
    out_tables_BM = torch.full((most_seqs, most_width), -77, device=device)
    out_starts_B = torch.full((most_seqs,), -77, device=device)
    out_visible_R = torch.full((most_rows,), -77, device=device)
    given, buffers = (starts_B, visible_R), (out_starts_B, out_visible_R)
    batches_triton.pad_batch(
        reference.PackedBatch(*(one.to(device) for one in batch.tensors)),
        tables_BM.to(device),
        *(one.to(device) if has == "all" else None for one in given),
        out,
        out_tables_BM,
        *(None if has == "nothing" else one for one in buffers),
    )

    def padded(values: Tensor, count: int, filling: int) -> list[int]:
        return [*values.tolist(), *[filling] * (count - len(values))]

    assert out.tokens_R.tolist() == padded(tokens_R, most_rows, 0)
    assert out.positions_R.tolist() == padded(positions_R, most_rows, 0)
    assert out.slots_R.tolist() == padded(slots_R, most_rows, reference.PADDING_SLOT)
    assert out.query_start_loc.tolist() == padded(start_loc, most_seqs + 1, num_rows)
    assert out.seq_lens_B.tolist() == padded(seq_lens_B, most_seqs, 0)
    expected = torch.full((most_seqs, most_width), -77)
    expected[:num_seqs, :width] = tables_BM
    assert torch.equal(out_tables_BM.cpu(), expected)
    if has == "nothing":
        return
    has_starts = starts_B if has == "all" else torch.zeros(num_seqs, dtype=torch.int64)
    assert out_starts_B.tolist() == padded(has_starts, most_seqs, 0)
    assert out_visible_R.tolist()[:num_rows] == (
        visible_R.tolist() if has == "all" else [-77] * num_rows
    )
