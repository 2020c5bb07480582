"""Padded batches of a verification: made at random, run by the references and by the kernels.

Needs triton, and a card or TRITON_INTERPRET=1; tests that import this skip without.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from peagle.kernels.batches import TargetBatch, build_target_batch
from peagle.kernels.logits import apply_probability_filters
from peagle.kernels.logits_rules import VerificationRows
from peagle.kernels.step_state import StepLimits, StepRecord, StepState, advance
from peagle.speculation.verification import SamplingTensors, verify
from tests.kernels.devices import INTERPRETED

pytest.importorskip("triton", reason="needs triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from peagle.kernels import verify_triton


@dataclass
class Case:
    """A padded batch on the CPU: what the target ran, what it found, what may come of it."""

    batch: TargetBatch
    drafts_BK: Tensor
    active_B: Tensor
    logits_RV: Tensor
    state: StepState
    limits: StepLimits
    sampling: SamplingTensors
    min_p_B: Tensor | None = None
    probs_BKD: Tensor | None = None
    target_ids_D: Tensor | None = None
    rates_K: Tensor | None = None


def make_case(
    num_seqs: int,
    k: int,
    vocab_size: int,
    *,
    seed: int = 0,
    greedy: bool = False,
    cuts: bool = False,
    min_p: bool = False,
    draft_vocab: int = 0,
    scale: float = 1.0,
) -> Case:
    """Random logits; drafts that are often right; a third greedy, a fifth inactive."""
    torch.manual_seed(seed)
    active = torch.rand(num_seqs) < 0.8
    active[0] = True
    num_drafts = torch.randint(k + 1, (num_seqs,)) * active
    state = StepState(
        torch.randint(vocab_size, (num_seqs,)),
        torch.randint(5, 60, (num_seqs,)),
        torch.randint(5, (num_seqs,)),
        num_drafts,
        (torch.rand(num_seqs) < 0.1).long(),
    )
    limits = StepLimits(
        torch.randint(-1, vocab_size, (num_seqs, 3)),
        torch.randint(6, (num_seqs,)),
        torch.randint(1, 12, (num_seqs,)),
        torch.randint(k + 1, (num_seqs,)),
        max_model_len=60,
        max_draft_len=50,
    )
    num_rows = num_seqs * (k + 1)
    logits = torch.randn(num_rows, vocab_size) * scale
    ids = torch.randperm(vocab_size)[:draft_vocab].sort().values if draft_vocab else None
    probs = None
    of_BJ = torch.nn.functional.pad((num_drafts + 1) * active, (1, 0)).cumsum(0)[:-1, None]
    rows_BK = (of_BJ + torch.arange(k)).clamp_max(num_rows - 1)
    if ids is None:
        drafts = logits[rows_BK].argmax(-1)
        drafts = torch.where(
            torch.rand(num_seqs, k) < 0.7, drafts, torch.randint(vocab_size, (num_seqs, k))
        )
    else:
        noisy = logits[rows_BK][..., ids] + 0.5 * torch.randn(num_seqs, k, draft_vocab)
        probs = torch.softmax(noisy, -1)
        drafts = torch.multinomial(probs.flatten(0, 1), 1).view(num_seqs, k)
        drafts = ids[drafts]
    temperature = torch.empty(num_seqs, dtype=torch.float64).uniform_(0.5, 1.5)
    if greedy:
        temperature.zero_()
    else:
        temperature[torch.rand(num_seqs) < 0.3] = 0
    none = torch.zeros(num_seqs, dtype=torch.int64)
    sampling = SamplingTensors(
        temperature,
        torch.randint(30, (num_seqs,)) if cuts else none,
        torch.rand(num_seqs, dtype=torch.float64) if cuts else none + 1.0,
        torch.randint(2**62, (num_seqs,)),
        state.num_outputs_B.clone(),
        greedy,
    )
    return Case(
        build_target_batch(
            state.last_tokens_B,
            drafts,
            num_drafts,
            state.first_positions_B,
            torch.zeros(num_seqs, 100, dtype=torch.int64),
            active,
            num_rows=num_rows,
            block_size=16,
            max_model_len=60,
        ),
        drafts,
        active,
        logits,
        state,
        limits,
        sampling,
        torch.rand(num_seqs, dtype=torch.float64) ** 6 if min_p else None,
        probs,
        ids,
    )


def expected(case: Case) -> tuple[StepRecord, StepState]:
    """The references, on the active sequences alone."""
    active = case.active_B
    num_rows = int(case.batch.query_start_loc[-1])
    logits = case.logits_RV[:num_rows]
    per_sequence = {
        field.name: getattr(case.sampling, field.name)[active]
        for field in fields(SamplingTensors)
        if field.name != "all_greedy"
    }
    sampling = SamplingTensors(**per_sequence, all_greedy=case.sampling.all_greedy)
    rows = VerificationRows(
        case.drafts_BK[active],
        case.state.num_drafts_B[active],
        sampling.num_outputs_B,
        num_rows,
    )
    of_R = rows.sequences_R
    if case.min_p_B is not None:
        temperature_R = sampling.temperature_B[of_R]
        min_p_R = case.min_p_B[active][of_R]
        logits = apply_probability_filters(logits, temperature_R, min_p_R)
    q = None
    if case.probs_BKD is not None:
        assert case.target_ids_D is not None
        q = torch.zeros(len(case.drafts_BK), case.drafts_BK.shape[1], logits.shape[1])
        q[:, :, case.target_ids_D] = case.probs_BKD
        # The head drafts by argmax where the request is greedy: one-hot there.
        one_hot = torch.nn.functional.one_hot(case.drafts_BK, logits.shape[1]).float()
        q = torch.where((case.sampling.temperature_B == 0)[:, None, None], one_hot, q)[active]
    found = verify(logits, rows, sampling, q, case.rates_K)
    accepted, next_tokens = (torch.zeros(len(active), dtype=torch.int64) for _ in range(2))
    accepted[active] = found.num_accepted_B
    next_tokens[active] = found.next_tokens_B
    state = StepState(*(getattr(case.state, f.name).clone() for f in fields(StepState)))
    return advance(state, case.limits, active, case.drafts_BK, accepted, next_tokens), state


def run(
    case: Case, device: str, dtype: torch.dtype = torch.float32
) -> tuple[StepRecord, StepState]:
    """The kernels, over buffers that hold rubbish."""

    def to(value: Tensor) -> Tensor:
        return value.to(device, copy=True)

    num_seqs, k = case.drafts_BK.shape
    state = StepState(*(to(getattr(case.state, f.name)) for f in fields(StepState)))
    limits = replace(
        case.limits,
        **{
            f.name: to(value)
            for f in fields(StepLimits)
            if isinstance(value := getattr(case.limits, f.name), Tensor)
        },
    )
    num_rows, vocab_size = case.logits_RV.shape
    logits = to(case.logits_RV).to(dtype)
    logits[int(case.batch.query_start_loc[-1]) :] = torch.nan
    out = StepRecord.allocate(num_seqs, k, device)
    for f in fields(StepRecord):
        getattr(out, f.name).fill_(-77)
    scratch = verify_triton.VerifyScratch.allocate(num_seqs, num_rows, vocab_size, device)
    batch = to(case.batch.sequences_T), to(case.batch.query_start_loc)
    before = (logits, *batch, to(case.drafts_BK), to(case.active_B))
    after = (state, limits, scratch, out)
    synthetic = None
    if case.rates_K is not None:
        rates, seeds = to(case.rates_K), to(case.sampling.seeds_B)
        synthetic = verify_triton.SyntheticAcceptance(rates, seeds)
    if case.sampling.all_greedy:
        verify_triton.verify_greedy(*before, *after, synthetic=synthetic)
        return out, state
    sampling = verify_triton.SequenceSampling(
        to(case.sampling.temperature_B),
        to(case.sampling.top_k_B),
        to(case.sampling.top_p_B),
        to(case.sampling.seeds_B),
        None if case.min_p_B is None else to(case.min_p_B),
    )
    q = None
    if case.probs_BKD is not None:
        assert case.target_ids_D is not None
        index = torch.full((vocab_size,), -1, dtype=torch.int32)
        index[case.target_ids_D] = torch.arange(len(case.target_ids_D), dtype=torch.int32)
        full = len(case.target_ids_D) == vocab_size
        q = verify_triton.DraftProbs(to(case.probs_BKD), None if full else to(index))
    verify_triton.verify_sampled(*before, sampling, *after, q, synthetic=synthetic)
    return out, state


def check(case: Case, device: str, dtype: torch.dtype = torch.float32) -> int:
    """Compare; the number of sequences that decided otherwise."""
    wanted, wanted_state = expected(case)
    found, found_state = run(case, device, dtype)
    same = torch.ones_like(case.active_B)
    for f in fields(StepRecord):
        here, there = getattr(found, f.name).cpu(), getattr(wanted, f.name)
        same &= (here == there).view(len(same), -1).all(1)
    for f in fields(StepState):
        same &= getattr(found_state, f.name).cpu() == getattr(wanted_state, f.name)
    return int((~same).sum())
