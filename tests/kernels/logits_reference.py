"""Requests with every rule, their references token by token, and the strategies that draw them.

The references see one growing context at a time; the functions under test see all rows at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from peagle.kernels.logits import process_logits
from peagle.kernels.logits_rules import (
    AllowedTokens,
    BadWords,
    LogitBias,
    LogitsRules,
    MinTokens,
    TokenCounts,
    VerificationRows,
    context_tails,
)

VOCAB = 7
INF = math.inf


@dataclass
class Request:
    """One sequence and what it asks for: by default nothing."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    temperature: float = 1.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    min_p: float = 0.0
    typical_p: float = 1.0
    bias: dict[int, float] = field(default_factory=dict)
    allowed: list[int] | None = None
    bad_words: list[list[int]] = field(default_factory=list)
    min_tokens: int = 0
    stop: list[int] = field(default_factory=list)

    def plain(self) -> Request:
        return Request(self.prompt, self.output, self.drafts, self.temperature)


def floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def rules_of(batch: list[Request]) -> LogitsRules:
    bias = [(b, t, v) for b, r in enumerate(batch) for t, v in r.bias.items()]
    sets = [r.allowed for r in batch if r.allowed is not None]
    mask = torch.zeros(len(sets), VOCAB, dtype=torch.bool)
    for row, allowed in enumerate(sets):
        mask[row, allowed] = True
    which = iter(range(len(sets)))
    stops = [(b, t) for b, r in enumerate(batch) for t in r.stop]
    return LogitsRules(
        repetition_penalty_B=floats([r.repetition for r in batch]),
        presence_penalty_B=floats([r.presence for r in batch]),
        frequency_penalty_B=floats([r.frequency for r in batch]),
        min_p_B=floats([r.min_p for r in batch]),
        typical_p_B=floats([r.typical_p for r in batch]),
        bias=LogitBias(
            ints([b for b, _, _ in bias]),
            ints([t for _, t, _ in bias]),
            floats([v for _, _, v in bias]),
        ),
        allowed=AllowedTokens(mask, ints([-1 if r.allowed is None else next(which) for r in batch]))
        if sets
        else None,
        bad_words=BadWords.build([r.bad_words for r in batch]),
        min_tokens=MinTokens(
            ints([r.min_tokens for r in batch]),
            ints([b for b, _ in stops]),
            ints([t for _, t in stops]),
        ),
    )


def rows_of(batch: list[Request], extra_tail: int = 0) -> VerificationRows:
    most = max(len(r.drafts) for r in batch)
    # What stands past a sequence's drafts must not matter, not even an id outside the vocabulary.
    padded = [r.drafts + [-1] * (most - len(r.drafts)) for r in batch]
    width = BadWords.build([r.bad_words for r in batch]).prefix_len + extra_tail
    return VerificationRows(
        torch.tensor(padded, dtype=torch.int64).view(len(batch), most),
        ints([len(r.drafts) for r in batch]),
        ints([len(r.output) for r in batch]),
        sum(len(r.drafts) + 1 for r in batch),
        context_tails([r.prompt + r.output for r in batch], width),
    )


def counts_of(batch: list[Request]) -> TokenCounts:
    counts = TokenCounts(len(batch), VOCAB)
    for slot, r in enumerate(batch):
        counts.start(slot, ints(r.prompt))
        counts.add(torch.full((len(r.output),), slot), ints(r.output))
    return counts


def process(batch: list[Request], logits: Tensor, grammar: Tensor | None = None) -> Tensor:
    temperature = floats([r.temperature for r in batch])
    rows, rules, counts = rows_of(batch), rules_of(batch), counts_of(batch)
    return process_logits(logits, rows, rules, temperature, counts, grammar)


def contexts(batch: list[Request]) -> list[tuple[Request, list[int]]]:
    """The request and the output before each packed row."""
    return [(r, r.output + r.drafts[:j]) for r in batch for j in range(len(r.drafts) + 1)]


def random_logits(num_rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB, generator=generator, dtype=torch.float64) * 2


def logits_for(batch: list[Request], seed: int = 0) -> Tensor:
    return random_logits(len(contexts(batch)), seed)


# --- references: one context at a time -----------------------------------------------------------


def hf_masks(r: Request, output: list[int], row: Tensor) -> Tensor:
    """transformers' processors; empty rows by hand."""
    ids, scores = torch.tensor([r.prompt + output]), row[None]
    # First, because it has a rule of its own for rows that come in empty.
    if r.allowed is not None:
        scores = hf.PrefixConstrainedLogitsProcessor(lambda *_: r.allowed, 1)(ids, scores)
    if r.bias:
        scores = hf.SequenceBiasLogitsProcessor({(t,): v for t, v in r.bias.items()})(ids, scores)
    if r.bad_words:
        scores = hf.NoBadWordsLogitsProcessor(r.bad_words)(ids, scores)
    if r.stop:
        shortest = hf.MinNewTokensLengthLogitsProcessor(len(r.prompt), r.min_tokens, r.stop)
        scores = shortest(ids, scores)
    if bool((scores == -INF).all()):
        best = max(r.allowed or range(VOCAB), key=lambda token: float(row[token]))
        scores[0, best] = row[best]
    return scores[0]


def loop_penalties(r: Request, output: list[int], row: Tensor) -> Tensor:
    ids = torch.tensor([r.prompt + output])
    scores = hf.RepetitionPenaltyLogitsProcessor(r.repetition)(ids, row[None])[0]
    for token in range(VOCAB):
        count = output.count(token)
        scores[token] -= r.presence * (count > 0) + r.frequency * count
    return scores


def hf_filters(r: Request, row: Tensor) -> Tensor:
    ids, scores = torch.tensor([[0]]), row[None]
    if r.temperature == 0:
        return row
    if r.min_p > 0:
        scaled = hf.MinPLogitsWarper(r.min_p)(ids, scores / r.temperature)
        scores = scores.masked_fill(scaled == -INF, -INF)
    if r.typical_p < 1:
        scaled = hf.TypicalLogitsWarper(r.typical_p)(ids, scores / r.temperature)
        scores = scores.masked_fill(scaled == -INF, -INF)
    return scores[0]


def reference(batch: list[Request], logits: Tensor) -> Tensor:
    rows = []
    for (r, output), row in zip(contexts(batch), logits, strict=True):
        rows.append(hf_filters(r, loop_penalties(r, output, hf_masks(r, output, row))))
    return torch.stack(rows)


def one_at_a_time(batch: list[Request], logits: Tensor) -> Tensor:
    """Our own functions, a batch of one sequence without drafts for every row."""
    rows = []
    for (r, output), row in zip(contexts(batch), logits, strict=True):
        alone = Request(**{**vars(r), "output": output, "drafts": []})
        rows.append(process([alone], row[None])[0])
    return torch.stack(rows)


# --- strategies ----------------------------------------------------------------------------------

tokens = st.integers(0, VOCAB - 1)


def few(most: int, least: int = 0) -> st.SearchStrategy[list[int]]:
    return st.lists(tokens, min_size=least, max_size=most)


requests = st.builds(
    Request,
    prompt=few(5, 1),
    output=few(5),
    drafts=few(4),
    temperature=st.sampled_from([0.0, 0.4, 1.0, 1.9]),
    repetition=st.sampled_from([1.0, 0.7, 1.3, 2.0]),
    presence=st.sampled_from([0.0, 0.8, -1.5]),
    frequency=st.sampled_from([0.0, 0.4, -0.3]),
    min_p=st.sampled_from([0.0, 0.1, 0.45, 1.0]),
    typical_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 2.0, -INF]), max_size=3),
    allowed=st.none() | st.lists(tokens, min_size=1, max_size=5, unique=True),
    bad_words=st.lists(few(3, 1), max_size=4, unique_by=tuple),
    min_tokens=st.integers(0, 9),
    stop=st.lists(tokens, max_size=3, unique=True),
)
batches = st.lists(requests, min_size=1, max_size=4)
seeds = st.integers(0, 2**31)
