"""How a captured decode step begins and ends: who runs, what the host is told, and the time.

One launch each; everything that they read and write stays on the device.

Shapes: B sequences (a bucket), K most drafts, J = K + 1.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from peagle.kernels.launch import launch
from peagle.kernels.step_state import StepRecord, StepState

NUM_STAMPS = 4


@triton.jit
def _stamp(times_ptr, index, TIMED: tl.constexpr):
    if TIMED:
        tl.store(times_ptr + index, globaltimer())


@triton.jit
def _begin_kernel(
    active_ptr,
    finish_ptr,
    num_drafts_ptr,
    running_ptr,
    num_drafted_ptr,
    times_ptr,
    num_seqs,
    SEQS: tl.constexpr,
    TIMED: tl.constexpr,
):
    _stamp(times_ptr, 0, TIMED)
    b = tl.arange(0, SEQS)
    known = b < num_seqs
    active = tl.load(active_ptr + b, mask=known, other=0) != 0
    running = active & (tl.load(finish_ptr + b, mask=known, other=0) == 0)
    num_drafts = tl.load(num_drafts_ptr + b, mask=known, other=0)
    tl.store(running_ptr + b, running.to(tl.int64), mask=known)
    tl.store(num_drafted_ptr + b, tl.where(running, num_drafts, 0), mask=known)


def begin_step(
    active_B: Tensor, state: StepState, running_B: Tensor, num_drafted_B: Tensor, times: Tensor
) -> None:
    """Say who runs (active and not finished), and how many drafts each verifies; stamp the time."""
    launch(
        _begin_kernel,
        (1,),
        active_B,
        state.finish_B,
        state.num_drafts_B,
        running_B,
        num_drafted_B,
        times,
        active_B.shape[0],
        SEQS=triton.next_power_of_2(active_B.shape[0]),
        TIMED=times.is_cuda,
        num_warps=1,
    )


@triton.jit
def _stamp_kernel(times_ptr, index, TIMED: tl.constexpr):
    _stamp(times_ptr, index, TIMED)


def stamp(times: Tensor, index: int) -> None:
    """times[index] = the card's clock in nanoseconds, once all before it is done."""
    if times.is_cuda:
        launch(_stamp_kernel, (1,), times, index, TIMED=True, num_warps=1)


@triton.jit
def _report_kernel(
    num_drafted_ptr,
    num_accepted_ptr,
    num_drafts_ptr,
    emitted_ptr,
    drafts_ptr,
    times_ptr,
    report_ptr,
    num_seqs,
    max_drafts,
    COLUMNS: tl.constexpr,
    STAMPS: tl.constexpr,
    TIMED: tl.constexpr,
):
    b = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    width = 2 * max_drafts + 4
    row = report_ptr + b.to(tl.int64) * width
    if b < num_seqs:
        tl.store(row, tl.load(num_drafted_ptr + b))
        tl.store(row + 1, tl.load(num_accepted_ptr + b))
        tl.store(row + 2, tl.load(num_drafts_ptr + b))
        emitted = tl.load(
            emitted_ptr + b * (max_drafts + 1) + columns, mask=columns <= max_drafts, other=0
        )
        tl.store(row + 3 + columns, emitted, mask=columns <= max_drafts)
        drafts = tl.load(drafts_ptr + b * max_drafts + columns, mask=columns < max_drafts, other=0)
        tl.store(row + 4 + max_drafts + columns, drafts, mask=columns < max_drafts)
    else:
        _stamp(times_ptr, STAMPS - 1, TIMED)
        tl.debug_barrier()
        i = tl.arange(0, STAMPS)
        tl.store(row + i, tl.load(times_ptr + i))


def report_step(
    num_drafted_B: Tensor,
    out: StepRecord,
    state: StepState,
    drafts_BK: Tensor,
    times: Tensor,
    report_RX: Tensor,
) -> None:
    """Put what the host wants to know into one tensor; stamp the time.

    Args:
        num_drafted_B: drafts that were verified.
        out, state: after the step.
        drafts_BK: the next drafts.
        times: int64 [NUM_STAMPS].
        report_RX: int64 [B + 1, 2K + 4]: of each sequence the drafts verified, those accepted, the
            drafts to come, the emitted tokens, the next drafts; the last row begins with the times.
    """
    num_seqs, max_drafts = drafts_BK.shape
    assert report_RX.shape == (num_seqs + 1, 2 * max_drafts + 4) and report_RX.is_contiguous()
    launch(
        _report_kernel,
        (num_seqs + 1,),
        num_drafted_B,
        out.num_accepted_B,
        state.num_drafts_B,
        out.emitted_BJ,
        drafts_BK,
        times,
        report_RX,
        num_seqs,
        max_drafts,
        COLUMNS=triton.next_power_of_2(max_drafts + 1),
        STAMPS=NUM_STAMPS,
        TIMED=times.is_cuda,
        num_warps=1,
    )
