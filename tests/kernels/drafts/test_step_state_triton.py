"""How a captured step begins and ends, against loops over its sequences.

On a CPU the kernels run under Triton's interpreter.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.engine.step.graph_runner import RowDrafts, RowTokens, read_drafts, read_tokens
from peagle.engine.step.trees import SCORE_UNIT
from peagle.kernels.drafts.step_state import DecodeResult, DecodeState, Finish, Stamp
from peagle.kernels.launch import launch
from tests.kernels.devices import DEVICES, INTERPRETED

pytest.importorskip("triton", reason="needs triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from peagle.kernels.drafts import step_state_triton
from peagle.kernels.drafts.step_state_triton import (
    NUM_STAMPS,
    begin_step,
    report_step,
    stamp,
)

CPU = "cpu"
POISON = -77
BATCHES = [1, 2, 3, 8, 17, 64]


def poisoned(*shape: int, device: str) -> tuple[Tensor, Tensor]:
    """A poisoned tensor, and what lies behind it in memory."""
    count = torch.Size(shape).numel()
    whole = torch.full((count + 40,), POISON, dtype=torch.int64, device=device)
    return whole[:count].view(shape), whole[count:]


def random_state(num_seqs: int, k: int, device: str) -> DecodeState:
    """As between two steps: some have ended, all have some drafts."""
    finish = torch.tensor([Finish.RUNNING, Finish.RUNNING, Finish.STOP, Finish.LENGTH])
    fields = [torch.randint(1, 900, (num_seqs,)) for _ in range(3)]
    drafts, finish_B = torch.randint(1, k + 1, (num_seqs,)), finish[torch.randint(4, (num_seqs,))]
    return DecodeState(*(field.to(device) for field in (*fields, drafts, finish_B)))


def fields_of(state: DecodeState) -> dict[str, list[int]]:
    return {name: getattr(state, name).tolist() for name in DecodeState.__dataclass_fields__}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_seqs", BATCHES)
def test_who_runs_is_active_and_not_finished(num_seqs: int, device: str) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        state = random_state(num_seqs, 7, device)
        active_B = torch.randint(2, (num_seqs,), device=device)
        running_B, behind_running = poisoned(num_seqs, device=device)
        num_drafted_B, behind_drafted = poisoned(num_seqs, device=device)
        times, behind_times = poisoned(NUM_STAMPS, device=device)
        before = fields_of(state)
        begin_step(active_B, state, running_B, num_drafted_B, times)
        for b in range(num_seqs):
            runs = bool(active_B[b]) and before["finish_B"][b] == Finish.RUNNING
            assert running_B[b] == int(runs)
            assert num_drafted_B[b] == (before["num_draft_tokens_B"][b] if runs else 0)
        assert fields_of(state) == before
        for behind in (behind_running, behind_drafted, behind_times, times[1:]):
            assert behind.eq(POISON).all(), "written beyond its end"
        assert (times[0] > 0) == (device != CPU), "only a card has a clock"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("num_seqs", [1, 3, 8, 17])
@pytest.mark.parametrize("at", [Stamp.VERIFIED, Stamp.DRAFTED])
def test_the_host_reads_what_the_step_did(at: Stamp, num_seqs: int, k: int, device: str) -> None:
    torch.manual_seed(num_seqs * 10 + k)
    state = random_state(num_seqs, k, device)
    num_drafted_B = torch.randint(k + 1, (num_seqs,), device=device)
    out = DecodeResult.allocate(num_seqs, k, device)
    out.num_accepted_B.copy_((torch.rand(num_seqs) * (num_drafted_B.cpu() + 1)).long())
    out.emitted_BJ.copy_(torch.randint(900, (num_seqs, k + 1)))
    for name in ("next_tokens_B", "num_kept_B", "num_mask_slots_B"):
        getattr(out, name).fill_(POISON)
    drafts_BK = torch.randint(900, (num_seqs, k), device=device)
    times = torch.tensor([11, 22, 33, 44, 55], device=device)
    report_RX, behind = poisoned(num_seqs + 1, 2 * k + 4, device=device)
    report_step(num_drafted_B, out, state, drafts_BK, times, report_RX, at=at)

    *rows, stamps = report_RX.tolist()
    for b, row in enumerate(rows):
        drafted, accepted, to_come = (
            int(x[b]) for x in (num_drafted_B, out.num_accepted_B, state.num_draft_tokens_B)
        )
        emitted, drafts = out.emitted_BJ[b].tolist(), drafts_BK[b].tolist()
        assert row == [drafted, accepted, to_come, *emitted, *drafts]
        row_1X = np.array([row])
        assert read_tokens(row_1X, k) == [RowTokens(drafted, accepted, emitted[: accepted + 1])]
        assert read_drafts(row_1X, k, k) == [RowDrafts(drafts[:to_come])]
    first = int(at)
    assert stamps[:first] == [11, 22, 33, 44, 55][:first]
    if device == CPU:
        assert stamps[first:NUM_STAMPS] == [11, 22, 33, 44, 55][first:], "only a card has a clock"
    else:
        assert len({*stamps[first:NUM_STAMPS]}) == 1 and stamps[first] > 55
    assert times.tolist() == stamps[:NUM_STAMPS]
    assert set(stamps[NUM_STAMPS:]) == {POISON}
    assert behind.eq(POISON).all(), "written beyond its end"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("depth", "nodes"), [(1, 1), (3, 5), (7, 63)])
def test_the_host_reads_trees(depth: int, nodes: int, device: str) -> None:
    torch.manual_seed(nodes)
    num_seqs = 5
    state, out = (
        random_state(num_seqs, nodes, device),
        DecodeResult.allocate(num_seqs, depth, device),
    )
    out.num_accepted_B.copy_(torch.randint(depth + 1, (num_seqs,)))
    out.emitted_BJ.copy_(torch.randint(900, (num_seqs, depth + 1)))
    drafts_BN, parents_BN = torch.randint(900, (2, num_seqs, nodes), device=device)
    units_BN = -torch.randint(1 << 20, (num_seqs, nodes), device=device)
    times = torch.tensor([11, 22, 33, 44, 55], device=device)
    report_RX, behind = poisoned(num_seqs + 1, 4 + depth + 3 * nodes, device=device)
    nodes_BX = torch.cat((parents_BN, units_BN), 1)
    report_step(out.num_accepted_B, out, state, drafts_BN, times, report_RX, nodes_BX)
    for b, row in enumerate(report_RX.tolist()[:-1]):
        accepted, count = int(out.num_accepted_B[b]), int(state.num_draft_tokens_B[b])
        drafts, parents = (x[b, :count].tolist() for x in (drafts_BN, parents_BN))
        emitted = out.emitted_BJ[b, : accepted + 1].tolist()
        scores = [unit * SCORE_UNIT for unit in units_BN[b, :count].tolist()]
        row_1X = np.array([row])
        assert read_tokens(row_1X, depth) == [RowTokens(accepted, accepted, emitted)]
        expected = RowDrafts(drafts, parents or None, scores or None)
        assert read_drafts(row_1X, depth, nodes) == [expected]
    assert behind.eq(POISON).all(), "written beyond its end"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [1, 3, 4])
def test_no_program_writes_the_row_of_another(
    k: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run at the same time: what one spilled would now and then stay. Here some are left out.

    One row of the report is one program's.
    """
    num_seqs = 4
    state, out = random_state(num_seqs, k, device), DecodeResult.allocate(num_seqs, k, device)
    drafts_BK = torch.zeros(num_seqs, k, dtype=torch.int64, device=device)
    times = torch.ones(NUM_STAMPS, dtype=torch.int64, device=device)
    for count in range(num_seqs + 1):

        def few(kernel: Any, grid: tuple[int, ...], *rest: Any, count: int = count, **options: Any):
            assert grid == (num_seqs + 1,)
            if count:
                launch(kernel, (count,), *rest, **options)

        monkeypatch.setattr(step_state_triton, "launch", few)
        report_RX, behind = poisoned(num_seqs + 1, 2 * k + 4, device=device)
        report_step(state.num_draft_tokens_B, out, state, drafts_BK, times, report_RX)
        assert report_RX[:count].ne(POISON).all()
        assert report_RX[count:].eq(POISON).all() and behind.eq(POISON).all()


def test_a_report_of_another_size_is_an_assertion() -> None:
    out, state = DecodeResult.allocate(2, 3, CPU), DecodeState.allocate(2, CPU)
    drafts_BK = torch.zeros(2, 3, dtype=torch.int64)
    for shape in [(2, 10), (3, 9)]:
        report_RX = torch.zeros(shape, dtype=torch.int64)
        with pytest.raises(AssertionError):
            report_step(out.num_accepted_B, out, state, drafts_BK, report_RX[0, :5], report_RX)


def test_without_a_card_there_is_no_time() -> None:
    times = torch.full((NUM_STAMPS,), POISON, dtype=torch.int64)
    stamp(times, Stamp.TARGET_DONE)
    assert times.eq(POISON).all()


@pytest.mark.gpu
def test_stamps_are_increasing_nanoseconds() -> None:
    """The stamps of a step against the driver's own clock, in milliseconds."""
    k = 3
    state, out = DecodeState.allocate(2, "cuda"), DecodeResult.allocate(2, k, "cuda")
    ones_B = torch.ones(2, dtype=torch.int64, device="cuda")
    running_B, num_drafted_B = torch.zeros_like(ones_B), torch.zeros_like(ones_B)
    drafts_BK = torch.zeros(2, k, dtype=torch.int64, device="cuda")
    times = torch.zeros(NUM_STAMPS, dtype=torch.int64, device="cuda")
    report_RX = torch.zeros(3, 2 * k + 4, dtype=torch.int64, device="cuda")
    for _ in range(2):  # the first compiles
        events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_STAMPS)]
        begin_step(ones_B, state, running_B, num_drafted_B, times)
        events[0].record()
        for index in range(1, NUM_STAMPS):
            torch.cuda._sleep(index * 10_000_000)
            if index < NUM_STAMPS - 1:
                stamp(times, Stamp(index))
            else:
                report_step(num_drafted_B, out, state, drafts_BK, times, report_RX)
            events[index].record()
        torch.cuda.synchronize()
    stamps = report_RX[-1, :NUM_STAMPS].tolist()
    assert stamps == times.tolist()
    for index in range(1, NUM_STAMPS):
        milliseconds = (stamps[index] - stamps[index - 1]) / 1e6
        driver = events[index - 1].elapsed_time(events[index])
        assert milliseconds > 1
        assert milliseconds == pytest.approx(driver, rel=0.1)
