"""What the sampler must do: one sequence, one position at a time, by textbook formulas.

The toy world is a function of a sequence's seed and tokens alone: target, drafter and grammar say
the same in the same context, whatever the batch, the schedule and preemption do.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peagle.config import SamplingParams
from peagle.kernels.sampling.random import DRAWS_PER_STEP, Purpose, uniform
from tests.speculation.block_reference import accept_block
from tests.speculation.test_verification import probabilities

VOCAB = 8
INF = math.inf


@dataclass
class Request:
    """What the sampler reads of a sequence, and how the toy world treats it.

    drafting is "none", "argmax" or "probabilistic"; with a grammar a few tokens are permitted in
    each context.
    """

    seq_id: int
    params: SamplingParams
    seed: int
    prompt_token_ids: list[int] = field(default_factory=lambda: [3, 1, 3])
    stop_token_ids: frozenset[int] = frozenset()
    drafting: str = "none"
    is_constrained: bool = False  # by a grammar
    grammar: None = None  # no state of the engine's
    output_token_ids: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    draft_probs_KV: Tensor | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_drawn(self) -> int:
        return len(self.drafts)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)


# --- the toy world ---


def _dice(what: str, request: Request, context: Sequence[int]) -> random.Random:
    return random.Random(repr((what, request.seed, request.prompt_token_ids, list(context))))


def target_row(request: Request, context: Sequence[int]) -> list[float]:
    """Raw logits after some output."""
    dice = _dice("target", request, context)
    return [dice.gauss(0, 1.5) for _ in range(VOCAB)]


def permitted(request: Request, context: Sequence[int]) -> set[int]:
    """What the grammar permits after some output."""
    if not request.is_constrained:
        return set(range(VOCAB))
    return set(_dice("grammar", request, context).sample(range(VOCAB), 3))


def draft(request: Request, most: int = 4) -> int:
    """Leave drafts on a request; returns how many of them the next step is to verify."""
    request.drafts, request.draft_probs_KV = [], None
    dice = _dice("draft", request, request.output_token_ids)
    if request.drafting == "none" or not request.output_token_ids:
        return 0
    probs = []
    for _ in range(most):
        row = target_row(request, request.output_token_ids + request.drafts)
        noisy = [x + dice.gauss(0, 0.7) for x in row]
        probs.append(probabilities(noisy, 1.0))
        drawn = dice.choices(range(VOCAB), probs[-1])[0]
        likely = max(range(VOCAB), key=lambda token: noisy[token])
        request.drafts.append(likely if request.drafting == "argmax" else drawn)
    if request.drafting == "probabilistic":
        request.draft_probs_KV = torch.tensor(probs, dtype=torch.float64)
    return dice.randint(0, most)


@dataclass
class Rows:
    """The packed rows of one sequence: row j stands behind its first j drafts."""

    contexts: list[list[int]]
    logits: list[list[float]]
    permitted: list[set[int]]

    @classmethod
    def of(cls, request: Request, num_drafted: int) -> Rows:
        contexts = [request.output_token_ids + request.drafts[:j] for j in range(num_drafted + 1)]
        sets = [permitted(request, context) for context in contexts]
        for j, token in enumerate(request.drafts[:num_drafted]):
            if token not in sets[j]:
                # A grammar cannot go on behind a draft that it refuses.
                sets[j + 1 :] = [set() for _ in sets[j + 1 :]]
                break
        return cls(contexts, [target_row(request, context) for context in contexts], sets)


def packed(rows: Sequence[Rows]) -> tuple[Tensor, Tensor]:
    """Logits and grammar masks of a batch, [R, V]."""
    logits = torch.tensor([row for r in rows for row in r.logits], dtype=torch.float64)
    sets = [s for r in rows for s in r.permitted]
    return logits, torch.tensor([[token in s for token in range(VOCAB)] for s in sets])


# --- the reference ---


def processed(
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop: frozenset[int],
    raw: Sequence[float],
    grammar: set[int],
) -> list[float]:
    """Logits after every rule but temperature, top-k and top-p."""
    row = _masked(params, [*prompt, *output], len(output), stop, raw, grammar)
    row = _penalised(params, prompt, output, row)
    return row if params.is_greedy else _filtered(params, row)


def _masked(
    params: SamplingParams,
    context: list[int],
    num_outputs: int,
    stop: frozenset[int],
    raw: Sequence[float],
    grammar: set[int],
) -> list[float]:
    row = list(raw)
    for token, value in params.logit_bias:
        row[token] += value
    banned = set(stop) if num_outputs < params.min_tokens else set()
    for word in params.bad_words:
        *before, last = word
        if context[len(context) - len(before) :] == before:
            banned.add(last)
    allowed = params.allowed_token_ids
    strict = grammar & set(grammar if allowed is None else allowed)
    left = {token for token in strict - banned if row[token] > -INF}
    if not left:
        survivor = max(strict or grammar, key=lambda token: raw[token])
        left, row[survivor] = {survivor}, raw[survivor]
    return [x if token in left else -INF for token, x in enumerate(row)]


def _penalised(
    params: SamplingParams, prompt: Sequence[int], output: Sequence[int], row: list[float]
) -> list[float]:
    result = []
    for token, x in enumerate(row):
        if token in prompt or token in output:
            by = params.repetition_penalty
            x = x / by if x > 0 else x * by
        x -= params.presence_penalty * (token in output)
        result.append(x - params.frequency_penalty * list(output).count(token))
    return result


def _filtered(params: SamplingParams, row: list[float]) -> list[float]:
    if params.min_p > 0:
        probs = probabilities(row, params.temperature)
        floor = params.min_p * max(probs)
        row = [x if p >= floor else -INF for x, p in zip(row, probs, strict=True)]
    if params.typical_p < 1:
        probs = probabilities(row, params.temperature)
        surprise = [-math.log(p) if p > 0 else INF for p in probs]
        entropy = sum(p * s for p, s in zip(probs, surprise, strict=True) if p > 0)
        order = sorted(range(len(row)), key=lambda token: abs(surprise[token] - entropy))
        mass = itertools.accumulate((probs[token] for token in order), initial=0.0)
        kept = {token for token, m in zip(order, mass, strict=False) if m < params.typical_p}
        row = [x if token in kept else -INF for token, x in enumerate(row)]
    return row


def target_probs(request: Request, context: Sequence[int], raw: Sequence[float]) -> list[float]:
    """p after some output, by everything that the request asks for."""
    params = request.params
    grammar = permitted(request, context)
    prompt, stop = request.prompt_token_ids, request.stop_token_ids
    row = processed(params, prompt, context, stop, raw, grammar)
    return probabilities(row, params.temperature, params.top_k, params.top_p)


def step(request: Request, rows: Rows) -> list[int]:
    """The tokens that a step emits: drafts that pass, then the target's own or one instead.

    Drafts that were all drawn pass as a block. Among others a drawn one passes by p / q, one that
    was not if the target draws the same.
    """
    begin = len(rows.contexts[0])

    def number(position: int, purpose: Purpose) -> float:
        if purpose is Purpose.ACCEPT:
            position = begin * DRAWS_PER_STEP + position - begin
        return uniform(torch.tensor(request.seed), torch.tensor(position), purpose).item()

    def drawn(position: int, weights: list[float]) -> int:
        threshold = number(position, Purpose.SAMPLE) * sum(weights)
        sums = itertools.accumulate(weights)
        return next(token for token, total in enumerate(sums) if total > threshold)

    drafts, pairs = request.drafts[: len(rows.contexts) - 1], zip(rows.contexts, rows.logits)
    p = [target_probs(request, context, raw) for context, raw in pairs]
    q = [] if request.draft_probs_KV is None else request.draft_probs_KV.tolist()
    is_block = bool(q) and all(q[j][x] > 0 for j, x in enumerate(drafts))
    share, accepted = 1.0, 0
    if is_block:
        numbers = [number(begin + j, Purpose.ACCEPT) for j in range(len(drafts))]
        accepted, share = accept_block(p, q, drafts, numbers)
    for j, x in enumerate(drafts[accepted:] if not is_block else []):
        own = drawn(begin + j, p[j])
        is_drawn = bool(q) and q[j][x] > 0
        passes = own == x
        if is_drawn:
            passes = number(begin + j, Purpose.ACCEPT) * q[j][x] < p[j][x]
        if not passes:
            break
        accepted += 1
    weights = p[accepted]
    if accepted < len(drafts) and q and q[accepted][drafts[accepted]] > 0:
        left = [max(share * x - y, 0.0) for x, y in zip(weights, q[accepted], strict=True)]
        weights = left if sum(left) > 0 else weights
    return [*drafts[:accepted], drawn(begin + accepted, weights)]
