"""Drawing drafts against torch, and what verification makes of drafts that were drawn here.

On a CPU the kernels run under Triton's interpreter.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.kernels.drafts.step_state import NO_TOKEN, DecodeLimits, DecodeResult, DecodeState
from peagle.kernels.sampling.probabilities import probs_from_logits, sample_from_weights
from peagle.kernels.sampling.random import Purpose, of_step, uniform
from tests.kernels.devices import DEVICES, INTERPRETED

pytest.importorskip("triton", reason="needs triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from peagle.kernels.drafts.draw_triton import DrawScratch, draw_drafts
from peagle.kernels.sampling.rejection_triton import DraftProbs, reject_drafts
from peagle.kernels.sampling.verify_triton import SequenceSampling, VerifyScratch, own_tokens
from tests.kernels import drawn_verification
from tests.kernels.drawn_verification import verify_drafts

# The interpreter computes as numpy does: integers of one element warn when they wrap around.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MOST = 5  # columns of the buffers


def make_sampling(num_seqs: int, device: str, *, cuts: bool) -> SequenceSampling:
    """Every third sequence is greedy."""
    temperature = torch.empty(num_seqs).uniform_(0.5, 1.5)
    temperature[::3] = 0
    top_k = torch.randint(30, (num_seqs,)) if cuts else torch.zeros(num_seqs, dtype=torch.int64)
    top_p = torch.rand(num_seqs) if cuts else torch.ones(num_seqs)
    seeds = torch.randint(2**62, (num_seqs,))
    return SequenceSampling(*(t.to(device) for t in (temperature, top_k, top_p, seeds)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_seqs", "columns", "first"), [(1, 1, 0), (7, 3, 0), (4, 2, 2)])
@pytest.mark.parametrize("vocab_size", [2, 97, 2311])
@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("has_map", [False, True])
def test_drafts_and_their_distributions(
    num_seqs: int, columns: int, first: int, vocab_size: int, cuts: bool, has_map: bool, device: str
) -> None:
    """Into the first rows of greater buffers, of which the rest stays as it is."""
    torch.manual_seed(num_seqs + vocab_size)
    logits = 2 * torch.randn(num_seqs * columns, vocab_size)
    sampling = make_sampling(num_seqs, device, cuts=cuts)
    num_outputs = torch.randint(50, (num_seqs,))
    d2t = torch.randint(4, (vocab_size,)).cumsum(0) if has_map else None
    drafts = torch.full((num_seqs + 1, MOST), -77, device=device)
    probs = torch.full((num_seqs + 1, MOST, vocab_size), -77.0, device=device)
    where = slice(0, num_seqs), slice(first, first + columns)
    draw_drafts(
        logits.to(device),
        None if d2t is None else d2t.to(device),
        sampling,
        num_outputs.to(device),
        DrawScratch.allocate(num_seqs, columns, vocab_size, device),
        drafts[where],
        probs[where],
        first=first,
    )
    temperature, top_k, top_p, seeds = (
        getattr(sampling, name).cpu().repeat_interleave(columns)
        for name in ("temperature_B", "top_k_B", "top_p_B", "seeds_B")
    )
    wanted_q = probs_from_logits(logits, temperature, top_k, top_p)
    columns_J = torch.arange(columns)
    positions = of_step(num_outputs.unsqueeze(1), first + columns_J).flatten()
    tokens = sample_from_weights(wanted_q, uniform(seeds, positions, Purpose.DRAFT))
    tokens += 0 if d2t is None else d2t[tokens]
    assert drafts[where].flatten().tolist() == tokens.tolist()
    wanted_q[temperature == 0] = 0
    torch.testing.assert_close(probs[where].flatten(0, 1).cpu(), wanted_q, rtol=1e-4, atol=1e-6)
    drafts[where] = -77
    probs[where] = -77
    assert drafts.eq(-77).all() and probs.eq(-77).all(), "written beside its place"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_mean_nothing_leave_a_draft_that_was_not_drawn(
    value: float, device: str
) -> None:
    sampling = make_sampling(3, device, cuts=True)
    logits = torch.full((6, 97), value, device=device)
    drafts = torch.full((3, 2), -77, device=device)
    probs = torch.zeros(3, 2, 97, device=device)
    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    scratch = DrawScratch.allocate(3, 2, 97, device)
    draw_drafts(logits, None, sampling, zeros, scratch, drafts, probs, first=0)
    assert drafts.eq(0).all() and not (probs > 0).any()


# ---- verification of them ----


def draw_and_verify(
    count: int, k: int, seed: int, device: str, target: Tensor, head: Tensor
) -> tuple[Tensor, Tensor]:
    """First tokens of sequences in equal contexts with k drafts each, and the drafts accepted.

    target: logits of every row; head: of every draft, over the first tokens of the vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    ones = torch.ones(count, device=device)
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    seeds = torch.randint(2**62, (count,), generator=generator).to(device)
    sampling = SequenceSampling(0.8 * ones, zeros, ones, seeds)
    vocab_size, draft_vocab = len(target), len(head)
    drafts = torch.zeros(count, k, dtype=torch.int64, device=device)
    probs = torch.zeros(count, MOST, draft_vocab, device=device)
    draw_drafts(
        head.to(device).expand(count * k, -1).contiguous(),
        None,
        sampling,
        zeros,
        DrawScratch.allocate(count, k, draft_vocab, device),
        drafts,
        probs[:, :k],
        first=0,
    )
    index = torch.full((vocab_size,), -1, dtype=torch.int32, device=device)
    index[:draft_vocab] = torch.arange(draft_vocab, dtype=torch.int32, device=device)
    num_rows = count * (k + 1)
    rows = torch.arange(num_rows, device=device)
    state = DecodeState.allocate(count, device)
    state.num_draft_tokens_B.fill_(k)
    stop = torch.full((count, 1), -1, device=device)
    limits = DecodeLimits(stop, zeros, zeros + 99, zeros, 99, 99)
    out = DecodeResult.allocate(count, k, device)
    verify_drafts(
        target.to(device).expand(num_rows, -1).contiguous(),
        rows // (k + 1),
        torch.arange(count + 1, device=device) * (k + 1),
        drafts,
        torch.ones_like(zeros),
        state,
        limits,
        VerifyScratch.allocate(num_rows, vocab_size, device),
        out,
        sampling=sampling,
        draft_probs=DraftProbs(probs[:, :k], index),
    )
    return out.emitted_BJ[:, 0].cpu(), out.num_accepted_B.cpu()


def misfit(tokens: Tensor, target: Tensor) -> float:
    """Chi-square of tokens that should have the target's distribution."""
    wanted = torch.softmax(target / 0.8, 0) * len(tokens)
    counts = torch.bincount(tokens, minlength=len(target))
    return float(((counts - wanted) ** 2 / wanted).sum())


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fault", ["", "keeps the target's own token", "verifies with another q"])
def test_outputs_have_the_distribution_of_the_target(
    fault: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half of the target's mass is on tokens that the head drafts too often: faults show most.
    target = torch.tensor([0.5, 0.8, 0.5, 0.3, 0.0, -1.0])
    head = torch.tensor([-1.5, 1.8, 1.5, -1.0])
    if fault.startswith("keeps"):

        def keep(*given: Any, **named: Any) -> None:
            reject_drafts(*given, **{**named, "replaces": False})

        monkeypatch.setattr(drawn_verification, "reject_drafts", keep)
    if fault.startswith("verifies"):
        kept = DraftProbs

        def even(q: Tensor, index: Tensor) -> DraftProbs:
            return kept(torch.full_like(q, 1 / len(head)), index)

        monkeypatch.setattr(f"{__name__}.DraftProbs", even)
    count = 200 if device == "cpu" else 20_000
    tokens, accepted = draw_and_verify(count, 1, 3, device, target, head)
    # The chi-square of five degrees of freedom is above 20.5 once in a thousand, and above 37.3
    # once in two millions.
    assert misfit(tokens, target) > 37.3 if fault else misfit(tokens, target) < 20.5
    if not fault:
        p, q = torch.softmax(target / 0.8, 0), torch.softmax(head / 0.8, 0)
        chance = torch.minimum(p[:4], q).sum()
        share = (accepted > 0).float().mean()
        assert abs(share - chance) < 4 * (chance * (1 - chance) / count) ** 0.5


@pytest.mark.parametrize("device", DEVICES)
def test_some_sequences_of_a_step_by_rows_of_their_own(device: str) -> None:
    """As rules need it: those that are not asked for keep what was found of them."""
    num_seqs, k, vocab_size = 6, 3, 97
    torch.manual_seed(5)
    sampling = make_sampling(num_seqs, device, cuts=True)
    probs = torch.softmax(torch.randn(num_seqs, k, vocab_size), -1).to(device)
    drafts = torch.multinomial(probs.flatten(0, 1), 1).view(num_seqs, k)
    logits = torch.randn(num_seqs * (k + 1), vocab_size).to(device)
    state = DecodeState.allocate(num_seqs, device)
    state.num_draft_tokens_B.copy_(torch.tensor([3, 2, 3, 3, 1, 3]))
    named = {"sampling": sampling, "draft_probs": DraftProbs(probs)}

    def found(asked: list[int]) -> tuple[Tensor, list[list[int]]]:
        """Rows of the sequences asked for stand first, k + 1 each."""
        rows = torch.tensor([b * (k + 1) + j for b in asked for j in range(k + 1)])
        scratch = VerifyScratch.allocate(len(rows), vocab_size, device)
        start_loc = torch.full((num_seqs,), 10**9, device=device)
        start_loc[asked] = torch.arange(len(asked), device=device) * (k + 1)
        active = torch.zeros(num_seqs, dtype=torch.int64, device=device)
        active[asked] = 1
        accepted = torch.full_like(active, -77)
        of = torch.tensor(asked, device=device).repeat_interleave(k + 1)
        some = logits[rows.to(device)]
        own_tokens(some, of, start_loc, sampling, state.num_outputs_B, scratch)
        reject_drafts(some, start_loc, drafts, active, state, scratch, accepted, **named)
        return accepted.cpu(), scratch.tokens_R.view(len(asked), k + 1).tolist()

    accepted, tokens = found(list(range(num_seqs)))
    some = [4, 0, 3]
    again, again_tokens = found(some)
    assert again[some].tolist() == accepted[some].tolist()
    assert again_tokens == [tokens[b] for b in some]
    assert again[[1, 2, 5]].tolist() == [-77] * 3


@pytest.mark.parametrize("device", DEVICES)
def test_no_draft_passes_where_the_targets_own_token_is_none(device: str) -> None:
    """Rules may give a distribution to a row whose logits mean nothing."""
    vocab_size, k = 5, 2
    ones = torch.ones(1, device=device)
    zeros = torch.zeros(1, dtype=torch.int64, device=device)
    sampling = SequenceSampling(ones, zeros, ones, zeros)
    logits = torch.tensor([[0.0, 9.0, 0, 0, 0]] * (k + 1), device=device)
    drafts = torch.ones(1, k, dtype=torch.int64, device=device)
    probs = torch.full((1, k, vocab_size), 0.2, device=device)
    state = DecodeState.allocate(1, device)
    state.num_draft_tokens_B.fill_(k)
    scratch, accepted = VerifyScratch.allocate(k + 1, vocab_size, device), zeros.clone()
    sequences, start_loc = torch.zeros(k + 1, dtype=torch.int64, device=device), zeros
    for broken, wanted in ((None, k), (1, 1), (0, 0)):
        own_tokens(logits, sequences, start_loc, sampling, state.num_outputs_B, scratch)
        if broken is not None:
            scratch.tokens_R[broken] = NO_TOKEN
        reject_drafts(
            logits,
            start_loc,
            drafts,
            zeros + 1,
            state,
            scratch,
            accepted,
            sampling=sampling,
            draft_probs=DraftProbs(probs),
        )
        assert accepted.tolist() == [wanted]
        if broken is not None:
            assert int(scratch.tokens_R[broken]) == NO_TOKEN
