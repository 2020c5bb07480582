"""Sampled text under drafts has exactly the distribution of plain decoding, for every feature.

The language of five tokens of the verification tests: thousands of seeds of one prompt, ragged
drafts, and the joint counts of the first three tokens against the product of the conditional
probabilities that the slow reference gives.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.config import SamplingParams
from peagle.engine import sampler as sampler_module
from peagle.engine.sampler import Sampler
from peagle.kernels import logits as logits_module
from tests.engine.sampling_reference import Request, processed
from tests.speculation.test_verification import START, VOCAB, Case, fit, probabilities, tables

LENGTH = 3
COUNT = 12_000
K = 2
PROMPT = [2, 0]
STOP = frozenset({4})
TARGET, DRAFTER = tables(Case(K))

FEATURES: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {0: 1.0, 3: -math.inf}},
    "allowed ids": {"allowed_token_ids": (0, 1, 4)},
    "bad words": {"bad_words": ((1, 2), (2, 0, 3), (0, 0))},
    "min tokens": {"min_tokens": 2},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 0.9},
    "min_p": {"min_p": 0.15},
    "typical_p": {"typical_p": 0.85},
    "top_k and top_p": {"top_k": 4, "top_p": 0.85},
    "grammar": {},
    "all together": {
        "logit_bias": {0: 0.5},
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "min_p": 0.02,
        "typical_p": 0.97,
        "top_p": 0.98,
    },
}


def make_params(feature: str) -> SamplingParams:
    return SamplingParams(temperature=1.1, **FEATURES[feature])


def grammar_of(feature: str) -> Tensor:
    """What may follow the last two tokens, bool [a, b, V]."""
    if feature not in ("grammar", "all together"):
        return torch.ones_like(TARGET, dtype=torch.bool)
    generator = torch.Generator().manual_seed(5)
    permitted = torch.rand(TARGET.shape, generator=generator) < 0.6
    return permitted.scatter(2, TARGET.argmax(-1, keepdim=True), True)


def exact(feature: str) -> Tensor:
    """P(x1, x2, x3) of plain decoding, [V, V, V]."""
    params, permitted = make_params(feature), grammar_of(feature)

    def after(*output: int) -> Tensor:
        a, b = (START, START, *output)[-2:]
        grammar = set(permitted[a, b].nonzero().flatten().tolist())
        row = processed(params, PROMPT, output, STOP, TARGET[a, b].tolist(), grammar)
        probs = probabilities(row, params.temperature, params.top_k, params.top_p)
        return torch.tensor(probs, dtype=torch.float64)

    tokens = range(VOCAB)
    pairs = torch.stack([torch.stack([after(x, y) for y in tokens]) for x in tokens])
    second = torch.stack([after(x) for x in tokens])
    return after()[:, None, None] * second[:, :, None] * pairs


def draft(text: Tensor, probabilistic: bool, generator: torch.Generator) -> tuple[Tensor, Any]:
    """K drafts behind the last two tokens, and their q."""
    q_BKV = DRAFTER[text[:, 0], text[:, 1]].softmax(-1)
    if not probabilistic:
        return q_BKV.argmax(-1), None
    drawn = torch.multinomial(q_BKV.flatten(0, 1), 1, generator=generator)
    return drawn.view(len(text), K), q_BKV


def simulate(feature: str, probabilistic: bool, count: int = COUNT) -> Tensor:
    """First three tokens of every sequence, [count, 3]."""
    params, permitted = make_params(feature), grammar_of(feature)
    first_seed = zlib.crc32(repr((feature, probabilistic)).encode()) << 24
    generator = torch.Generator().manual_seed(first_seed)
    sampler = Sampler(VOCAB, torch.device("cpu"), count)
    every = [Request(i, params, first_seed + i, PROMPT, STOP) for i in range(count)]
    while running := [r for r in every if r.num_output_tokens < LENGTH]:
        text = torch.tensor([[START, START, *r.output_token_ids][-2:] for r in running])
        drafts_BK, q_BKV = draft(text, probabilistic, generator)
        num_drafted = [(r.seq_id + r.num_output_tokens) % (K + 1) for r in running]
        for row, (request, tokens) in enumerate(zip(running, drafts_BK.tolist(), strict=True)):
            request.drafts = tokens
            request.draft_probs_KV = None if q_BKV is None else q_BKV[row]
        context = torch.cat((text, drafts_BK), 1)
        a_BJ, b_BJ = context[:, :-1], context[:, 1:]
        packed = torch.arange(K + 1) <= torch.tensor(num_drafted).unsqueeze(1)
        masks = permitted[a_BJ, b_BJ][packed]
        result = sampler.sample(
            TARGET[a_BJ, b_BJ][packed], running, num_drafted, None if masks.all() else masks
        )
        for request, tokens in zip(running, result.new_token_ids, strict=True):
            request.output_token_ids.extend(tokens)
    return torch.tensor([r.output_token_ids[:LENGTH] for r in every])


@pytest.mark.parametrize("probabilistic", [False, True], ids=["argmax", "probabilistic"])
@pytest.mark.parametrize("feature", FEATURES)
def test_distribution_is_that_of_plain_decoding(feature: str, probabilistic: bool) -> None:
    tokens, wanted = simulate(feature, probabilistic), exact(feature)
    assert fit(tokens, wanted) > 1e-3
    assert fit(tokens, biased(wanted)) < 1e-5


def biased(wanted: Tensor) -> Tensor:
    """One part in a hundred moved from the likeliest outcome to the rarest that is seen often."""
    moved = wanted.flatten().clone()
    rarest = moved.where(moved * COUNT >= 15, 1).argmin()
    moved[moved.argmax()] -= 0.01
    moved[rarest] += 0.01
    return moved


def test_the_features_change_the_distribution() -> None:
    """Each is far from the others and from the plain one, so no test passes by chance."""
    all_ = torch.stack([exact(feature).flatten() for feature in FEATURES])
    distance = (all_[:, None] - all_).abs().sum(-1) / 2
    assert bool((distance + torch.eye(len(all_)) > 0.05).all())


# --- wrong samplers ------------------------------------------------------------------------------


def _penalties_ignore_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        logits_module, "_output_counts", lambda rows, counts, slots_R: counts.outputs_SV[slots_R]
    )


def _rejected_drafts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sampler_module.Sampler._count

    def wrong(self: Sampler, rules: Any, rows: Any, verified: Any) -> None:
        right(self, rules, rows, verified)
        slots_BK = rules.count_slots_B.unsqueeze(1).expand_as(rows.drafts_BK)
        rejected_BK = rows.columns_J[:-1] >= verified.num_accepted_B.unsqueeze(1)
        self._counts.add(slots_BK, rows.drafts_BK, rejected_BK & rows.drafted_BK)  # type: ignore

    monkeypatch.setattr(sampler_module.Sampler, "_count", wrong)


def _emitted_tokens_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module.Sampler, "_count", lambda *_: None)


def _drafts_do_not_lengthen_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    right = logits_module.VerificationRows.of
    monkeypatch.setattr(
        logits_module.VerificationRows,
        "of",
        lambda self, sequences_N: (0 * self.columns_J, *right(self, sequences_N)[1:]),
    )


def _logits_are_not_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module.Sampler, "_processed", lambda self, batch, raw, *_: raw)


@pytest.mark.parametrize(
    ("fault", "feature"),
    [
        (_penalties_ignore_drafts, "repetition"),
        (_penalties_ignore_drafts, "frequency"),
        (_rejected_drafts_are_counted, "presence"),
        (_emitted_tokens_are_not_counted, "frequency"),
        (_drafts_do_not_lengthen_the_output, "min tokens"),
        (_logits_are_not_processed, "bad words"),
    ],
)
def test_a_wrong_sampler_fails(fault: Any, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert fit(simulate(feature, probabilistic=True), exact(feature)) < 1e-5
