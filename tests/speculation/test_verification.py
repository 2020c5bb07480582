"""Verification keeps the target's distribution: enumeration, chi-square, planted wrong samplers.

The sampled tests play the whole loop on a language of five tokens whose next-token probabilities
depend on the last two: draft K, verify, append, draft again after a rejection, with the same
counter-based numbers as the engine. The joint distribution of the first three tokens is compared
with the exact one.
"""

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from peagle.kernels.sampling.logits_rules import VerificationRows
from peagle.kernels.sampling.probabilities import sample_from_weights
from peagle.kernels.sampling.random import Purpose, of_step, uniform
from peagle.speculation.verification import SamplingTensors, Verified, verify

VOCAB = 5
START = VOCAB  # what stands before the first token
LENGTH = 3
# A q that is 3% too small has p-values below 1e-4 in every case of drawn drafts.
COUNT = 100_000

Verify = Callable[..., Verified]
# lengths(drafts [B, K], their q [B, K, V]) -> how many of them are verified, [B].
Lengths = Callable[[Tensor, Tensor], Tensor]


def probabilities(
    logits: list[float], temperature: float, top_k: int = 0, top_p: float = 1.0
) -> list[float]:
    """The target distribution of one row, in plain Python."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return [float(i == order[0]) for i in range(len(logits))]
    weight = [math.exp((x - logits[order[0]]) / temperature) for x in logits]
    kept = order[: top_k or None]
    total = sum(weight[i] for i in kept)
    before = list(itertools.accumulate((weight[i] / total for i in kept), initial=0.0))
    kept = [i for i, mass in zip(kept, before) if mass == 0 or mass < top_p]
    total = sum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(len(logits))]


@dataclass(frozen=True)
class Case:
    """One setting of the loop."""

    k: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    probabilistic: bool = True
    parallel: bool = True
    ragged: bool = False


def tables(case: Case) -> tuple[Tensor, Tensor]:
    """Logits of the target and of the drafter, which is right about half of the time.

    Target [a, b, V]. Drafter [a, b, K, V]: parallel drafting knows the two tokens before the draft
    and the depth; autoregressive drafting knows its own last tokens, and looks at depth 0 only.
    """
    generator = torch.Generator().manual_seed(17)
    shape = (VOCAB + 1, VOCAB + 1)
    target = 1.5 * torch.randn(*shape, VOCAB, generator=generator, dtype=torch.float64)
    noise = torch.randn(*shape, case.k, VOCAB, generator=generator, dtype=torch.float64)
    return target, target.unsqueeze(2) + 0.6 * noise


def exact_distribution(case: Case) -> Tensor:
    """P(x1, x2, x3) of the target alone, [V, V, V]."""
    target, _ = tables(case)
    settings_ = (case.temperature, case.top_k, case.top_p)
    rows = torch.tensor(
        [[probabilities(row.tolist(), *settings_) for row in line] for line in target],
        dtype=torch.float64,
    )
    first = rows[START, START]
    second = rows[START, :VOCAB]
    third = rows[:VOCAB, :VOCAB]
    return first[:, None, None] * second[:, :, None] * third


def sampling_of(case: Case, seeds: Tensor, num_outputs: Tensor) -> SamplingTensors:
    count = len(seeds)
    return SamplingTensors(
        temperature_B=torch.full((count,), case.temperature, dtype=torch.float64),
        top_k_B=torch.full((count,), case.top_k),
        top_p_B=torch.full((count,), case.top_p, dtype=torch.float64),
        seeds_B=seeds,
        num_outputs_B=num_outputs,
        all_greedy=case.temperature == 0,
    )


def draft(
    case: Case, drafter: Tensor, a: Tensor, b: Tensor, sampling: SamplingTensors
) -> tuple[Tensor, Tensor | None]:
    """K drafts of every row and their q (None for argmax drafts), as the proposers make them."""
    rows = torch.arange(len(a))
    tokens, probs = [], []
    for j in range(case.k):
        logits = drafter[a, b, j if case.parallel else 0]
        if case.probabilistic:
            probs.append(sampling.probs(logits, rows))
            u = uniform(sampling.seeds_B, of_step(sampling.num_outputs_B, j), Purpose.DRAFT)
            tokens.append(sample_from_weights(probs[-1], u))
        else:
            tokens.append(logits.argmax(-1))
        if not case.parallel:
            a, b = b, tokens[-1]
    return torch.stack(tokens, 1), torch.stack(probs, 1) if probs else None


@dataclass(frozen=True)
class Outcome:
    """First three tokens of every row, and the share of drafts that were accepted."""

    tokens: Tensor
    acceptance: float


def simulate(
    case: Case,
    verifier: Verify = verify,
    count: int = COUNT,
    first_seed: int | None = None,
    lengths: Lengths | None = None,
) -> Outcome:
    target, drafter = tables(case)
    width = 2 + LENGTH + case.k + 1
    text = torch.full((count, width), START)
    length = torch.zeros(count, dtype=torch.int64)
    drafted = accepted = 0
    if first_seed is None:  # every case has numbers of its own
        first_seed = zlib.crc32(repr(case).encode()) << 24
    while len(rows := (length < LENGTH).nonzero().flatten()):
        n = length[rows]
        a, b = text[rows, n], text[rows, n + 1]
        sampling = sampling_of(case, first_seed + rows, n)
        tokens_BK, probs_BKV = draft(case, drafter, a, b, sampling)
        num_draft_tokens = rows % (case.k + 1) if case.ragged else torch.full_like(rows, case.k)
        if lengths is not None and probs_BKV is not None:
            num_draft_tokens = lengths(tokens_BK, probs_BKV)
        context = torch.cat((a.unsqueeze(1), b.unsqueeze(1), tokens_BK), dim=1)
        logits_BJV = target[context[:, :-1], context[:, 1:]]
        packed = torch.arange(case.k + 1) <= num_draft_tokens.unsqueeze(1)
        packed_rows = VerificationRows(tokens_BK, num_draft_tokens, n, int(packed.sum()))
        verified = verifier(logits_BJV[packed], packed_rows, sampling, probs_BKV)
        for j in range(case.k + 1):
            own = tokens_BK[:, min(j, case.k - 1)]
            token = torch.where(j < verified.num_accepted_B, own, verified.next_tokens_B)
            keep = j <= verified.num_accepted_B
            text[rows[keep], 2 + n[keep] + j] = token[keep]
        length[rows] += verified.num_accepted_B + 1
        drafted += int(num_draft_tokens.sum())
        accepted += int(verified.num_accepted_B.sum())
    return Outcome(text[:, 2 : 2 + LENGTH], accepted / drafted)


def fit(tokens: Tensor, exact: Tensor) -> float:
    """P-value of the chi-square test of the joint counts; 0 where the impossible happened."""
    code = (tokens * torch.tensor([VOCAB**2, VOCAB, 1])).sum(-1).numpy()
    counts = np.bincount(code, minlength=VOCAB**3)
    expected = exact.flatten().numpy() * len(tokens)
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 10
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    possible = expected > 0
    return float(stats.chisquare(counts[possible], expected[possible]).pvalue)


CASES = [
    # Every two of the four settings meet in all their values.
    Case(1, 0.5),
    Case(1, 1.0, probabilistic=False),
    Case(1, 1.5, parallel=False),
    Case(2, 0.5, probabilistic=False),
    Case(2, 1.0),
    Case(2, 1.5, probabilistic=False, parallel=False),
    Case(3, 0.5, parallel=False),
    Case(3, 1.0, probabilistic=False, parallel=False),
    Case(3, 1.5),
    Case(3, 1.0, top_k=3),
    Case(3, 1.5, top_p=0.7, parallel=False),
    Case(2, 1.5, top_k=4, top_p=0.8, probabilistic=False),
    Case(3, 1.0, ragged=True, parallel=False),
    Case(2, 1.0, ragged=True, probabilistic=False),
]


# Drafts that are not drawn are held token by token below.
@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.probabilistic or c.top_k], ids=str)
def test_joint_distribution_is_the_targets(case: Case) -> None:
    outcome = simulate(case)
    # Rejections and acceptances both occur often, and so re-drafted positions too.
    assert 0.1 < outcome.acceptance < 0.9
    assert fit(outcome.tokens, exact_distribution(case)) > 1e-3


@pytest.mark.parametrize("case", [c for c in CASES if not c.probabilistic], ids=str)
def test_drafts_that_were_not_drawn_change_no_token(case: Case) -> None:
    """The tokens of plain decoding, drawn row after row with the same seeds."""
    count, first_seed = 20_000, 5 << 24
    target, _ = tables(case)
    text = torch.full((count, 2 + LENGTH), START)
    rows = torch.arange(count)
    for n in range(LENGTH):
        seeds, num_outputs = first_seed + rows, torch.full((count,), n)
        sampling = sampling_of(case, seeds, num_outputs)
        probs = sampling.probs(target[text[:, n], text[:, n + 1]], rows)
        text[:, 2 + n] = sample_from_weights(probs, uniform(seeds, num_outputs, Purpose.SAMPLE))
    outcome = simulate(case, count=count, first_seed=first_seed)
    assert torch.equal(outcome.tokens, text[:, 2:])
    assert 0.1 < outcome.acceptance < 0.9
    drawn = simulate(replace(case, probabilistic=True), count=count, first_seed=first_seed)
    assert not torch.equal(drawn.tokens, text[:, 2:])


def test_drafts_that_were_not_drawn_are_verified_as_ever_beside_drawn_ones() -> None:
    """Copies of the text, or the argmax drafts of a greedy request."""
    case, count = Case(3), 2_000
    target, drafter = tables(case)
    rows, start = torch.arange(count), torch.full((count,), START)
    sampling = sampling_of(case, rows, torch.zeros_like(rows))
    drafts_BK, probs_BKV = draft(case, drafter, start, start, sampling)
    assert probs_BKV is not None
    probs_BKV[::2] = 0
    context = torch.cat((start.unsqueeze(1), start.unsqueeze(1), drafts_BK), dim=1)
    logits_RV = target[context[:, :-1], context[:, 1:]].flatten(0, 1)
    packed_rows = VerificationRows(
        drafts_BK, torch.full_like(rows, case.k), torch.zeros_like(rows), len(logits_RV)
    )
    beside = verify(logits_RV, packed_rows, sampling, probs_BKV)
    alone = verify(logits_RV, packed_rows, sampling)
    assert torch.equal(beside.num_accepted_B[::2], alone.num_accepted_B[::2])
    assert torch.equal(beside.next_tokens_B[::2], alone.next_tokens_B[::2])
    assert not torch.equal(beside.num_accepted_B[1::2], alone.num_accepted_B[1::2])


# ---- how many drawn drafts are verified ----


def sure_before_the_draw(tokens_BK: Tensor, probs_BKV: Tensor) -> Tensor:
    """Draft j while the margin of q_j is large: q_j depends on the drafts before j alone."""
    best_BK2 = probs_BKV.topk(2, -1).values
    return (best_BK2[..., 0] - best_BK2[..., 1] >= 0.25).long().cumprod(1).sum(1)


def sure_of_the_draft(tokens_BK: Tensor, probs_BKV: Tensor) -> Tensor:
    """Draft j while q_j of the draft itself is large."""
    own_BK = probs_BKV.gather(2, tokens_BK.unsqueeze(2)).squeeze(2)
    return (own_BK >= 0.35).long().cumprod(1).sum(1)


def surest_of_the_batch(tokens_BK: Tensor, probs_BKV: Tensor) -> Tensor:
    """Of two sequences the one whose drafts are surer has all the rows of both."""
    own_BK = probs_BKV.gather(2, tokens_BK.unsqueeze(2)).squeeze(2)
    sure_B, partner_B = own_BK.prod(1), torch.arange(len(own_BK)) ^ 1
    other_B = sure_B[partner_B.clamp_max(len(sure_B) - 1)]
    return torch.where(sure_B >= other_B, tokens_BK.shape[1], 0)


DRAWN = [Case(2, 1.0, parallel=False), Case(3, 1.5, parallel=False)]


@pytest.mark.slow
@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_lengths_decided_before_the_draw_keep_the_distribution(case: Case) -> None:
    seen: set[int] = set()

    def lengths(tokens_BK: Tensor, probs_BKV: Tensor) -> Tensor:
        num_draft_tokens = sure_before_the_draw(tokens_BK, probs_BKV)
        seen.update(num_draft_tokens.unique().tolist())
        return num_draft_tokens

    outcome = simulate(case, lengths=lengths)
    assert seen == set(range(case.k + 1)) and outcome.acceptance > 0.1
    assert fit(outcome.tokens, exact_distribution(case)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("rule", [sure_of_the_draft, surest_of_the_batch])
def test_lengths_decided_by_the_draw_are_noticed(rule: Lengths) -> None:
    """Both bias the output: what is not verified is drawn anew, and only likely drafts are."""
    outcome = simulate(DRAWN[0], lengths=rule)
    assert fit(outcome.tokens, exact_distribution(DRAWN[0])) < 1e-6
