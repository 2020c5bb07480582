"""Rules between the graphs of a step against the sampler, and against one row at a time.

The match of drafts is the captured one. On a CPU the kernels run under Triton's interpreter.
"""

from __future__ import annotations

import random
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.engine.sampler import SampledStep, Sampler
from peagle.kernels.logprobs import TokenLogprobs
from peagle.kernels.step_state import StepLimits, StepRecord, StepState
from tests.engine.sampling_reference import VOCAB, Request, Rows, draft, step
from tests.engine.test_sampler import requests_
from tests.kernels.devices import DEVICES, INTERPRETED

pytest.importorskip("triton", reason="needs triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from peagle.engine.rules import CountSlots, has_rules
from peagle.engine.step_rules import StepRules
from peagle.kernels.verify_triton import SequenceSampling, match_drafts

# The interpreter computes as numpy does: integers of one element warn when they wrap around.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")
UNTOUCHED = -77


@dataclass
class Pair:
    """A sequence as it is, and as the host knows it while a step is in flight."""

    true: Request
    known: Request = field(init=False)

    def __post_init__(self) -> None:
        self.known = copy(self.true)
        self.catch_up()

    def catch_up(self) -> None:
        """The host reads what the device has done."""
        self.known.output_token_ids = list(self.true.output_token_ids)


@dataclass
class Step:
    """One step over the buffers of B rows.

    The hidden state of a row is its number, so that logits are looked up. Rows of sequences without
    rules have their right token, others hold UNTOUCHED.
    """

    pairs: list[Pair | None]
    k: int
    device: str
    rows_of: list[Rows | None] = field(init=False)
    num_drafted: list[int] = field(init=False)
    logits_TV: Tensor = field(init=False)
    own: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        true = [pair and pair.true for pair in self.pairs]
        self.num_drafted = [0 if r is None else draft(r, self.k) for r in true]
        drafted = zip(true, self.num_drafted, strict=True)
        self.rows_of = [None if r is None else Rows.of(r, n) for r, n in drafted]
        rows = [row for of in self.rows_of if of is not None for row in of.logits]
        num_rows = len(self.pairs) * (self.k + 1)
        self.logits_TV = torch.full((num_rows, VOCAB), torch.nan)
        self.logits_TV[: len(rows)] = torch.tensor(rows)
        self.own = [
            [] if r is None or of is None else [own_token(r, of, j) for j in range(len(of.logits))]
            for r, of in zip(true, self.rows_of, strict=True)
        ]

    @property
    def requests(self) -> list[Request]:
        return [pair.true for pair in self.pairs if pair is not None]

    def ints(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def of_rows(self, value: Any, empty: Any = 0) -> list[Any]:
        return [empty if pair is None else value(pair.true) for pair in self.pairs]

    def compute_logits(self, hidden_RH: Tensor) -> Tensor:
        return self.logits_TV.to(self.device)[hidden_RH.squeeze(1).long()]

    def tensors(self) -> dict[str, Any]:
        """The arguments of `StepRules.apply`."""
        num_seqs, width = len(self.pairs), max(self.k, 1)
        counts = self.of_rows(lambda r: 1, 0)
        num_rows = [n + k for n, k in zip(counts, self.num_drafted, strict=True)]
        firsts = [sum(num_rows[:b]) for b in range(num_seqs + 1)]
        pad = [UNTOUCHED] * width
        drafts = [(d + pad)[:width] for d in self.of_rows(lambda r: r.drafts, [])]
        self.firsts = firsts
        tokens = torch.full((num_seqs * (self.k + 1),), UNTOUCHED)
        for b, pair in enumerate(self.pairs):
            if pair is not None and not has_rules(pair.true):
                tokens[firsts[b] : firsts[b + 1]] = torch.tensor(self.own[b])
        state = StepState.allocate(num_seqs, self.device)
        state.num_outputs_B.copy_(self.ints(self.of_rows(lambda r: r.num_output_tokens)))
        state.num_drafts_B.copy_(self.ints(self.num_drafted))

        def floats(value: Any) -> Tensor:
            return torch.tensor(self.of_rows(value), dtype=torch.float32, device=self.device)

        return {
            "hidden_TH": torch.arange(len(tokens), device=self.device).float().unsqueeze(1),
            "start_loc": self.ints(firsts),
            "drafts_BK": self.ints(drafts),
            "state": state,
            "sampling": SequenceSampling(
                temperature_B=floats(lambda r: r.params.temperature),
                top_k_B=self.ints(self.of_rows(lambda r: min(r.params.top_k, VOCAB))),
                top_p_B=floats(lambda r: r.params.top_p),
                seeds_B=self.ints(self.of_rows(lambda r: r.seed)),
                min_p_B=floats(lambda r: r.params.min_p),
            ),
            "running_B": self.ints(counts),
            "tokens_R": tokens.to(self.device),
        }

    def matched(self, given: dict[str, Any]) -> StepRecord:
        """What the captured match makes of the tokens; no limit is near."""
        num_seqs, width = given["drafts_BK"].shape
        zeros = torch.zeros_like(given["running_B"])
        stop = torch.full((num_seqs, 1), -1, device=self.device)
        limits = StepLimits(stop, zeros, zeros + 2**60, zeros, 2**60, 2**60)
        out = StepRecord.allocate(num_seqs, width, self.device)
        place = given["start_loc"], given["drafts_BK"], given["running_B"]
        match_drafts(given["tokens_R"], *place, given["state"], limits, out)
        return out


def own_token(request: Request, rows: Rows, j: int) -> int:
    """The target's own token of one row, by the slow reference."""
    alone = copy(request)
    alone.drafts = []
    return step(alone, Rows([rows.contexts[j]], [rows.logits[j]], [rows.permitted[j]]))[0]


def run(rules: StepRules, taken: Step) -> tuple[list[list[int]], list[Any]]:
    """Take a step; returns the emitted tokens and the log-probabilities of all rows."""
    given = taken.tensors()
    if not rules.is_needed:
        out = taken.matched(given)
        return emitted(out), [None] * len(taken.pairs)
    rules.apply(**given)
    tokens = given["tokens_R"].tolist()
    for b in range(len(taken.pairs)):
        assert tokens[taken.firsts[b] : taken.firsts[b + 1]] == taken.own[b]
    assert all(token == UNTOUCHED for token in tokens[taken.firsts[-1] :])
    out = taken.matched(given)
    pending = rules.after(out)
    if taken.device == "cuda":
        torch.cuda.synchronize()
    new = emitted(out)
    return new, [None] * len(new) if pending is None else pending.read(new)


def emitted(out: StepRecord) -> list[list[int]]:
    return [[token for token in row if token >= 0] for row in out.emitted_BJ.tolist()]


def assert_same_logprobs(found: list[TokenLogprobs] | None, wanted: Any) -> None:
    assert (found is None) == (wanted is None)
    for one, other in zip(found or [], wanted or [], strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [i for i, _ in one.top] == [i for i, _ in other.top]
        assert [x for _, x in one.top] == pytest.approx([x for _, x in other.top], abs=1e-5)


def counts_of(slots: CountSlots, request: Request) -> list[int]:
    assert slots.counts is not None
    return slots.counts.outputs_SV[slots.of(request)].tolist()  # pyright: ignore


class World:
    """Captured steps, and the eager steps of the same sampler, beside a sampler of its own."""

    def __init__(self, requests: list[Request], num_rows: int, device: str = "cpu") -> None:
        self.pairs = [Pair(request) for request in requests]
        self.num_rows, self.device = num_rows, device
        self.eager = Sampler(VOCAB, torch.device(device), len(requests))
        self.reference = Sampler(VOCAB, CPU, len(requests))
        self.step: Step | None = None
        self.rules = StepRules(self._logits, self.eager.slots, VOCAB, torch.device(device))

    def _logits(self, hidden_RH: Tensor) -> Tensor:
        assert self.step is not None
        return self.step.compute_logits(hidden_RH)

    def expected(self, requests: list[Request], taken: Step) -> SampledStep:
        num_drafted = [
            n for n, pair in zip(taken.num_drafted, taken.pairs, strict=True) if pair is not None
        ]
        logits = taken.logits_TV[: sum(num_drafted) + len(num_drafted)]
        return self.reference.sample(logits, requests, num_drafted)

    def captured(self, rows: list[Pair | None], k: int) -> None:
        """One step of these rows, held against the sampler; the host reads the one before."""
        for pair in rows:
            if pair is not None:
                pair.catch_up()
        taken = self.step = Step(rows, k, self.device)
        wanted = self.expected(taken.requests, taken)
        new, logprobs = run(self.rules, taken)
        of_sequences = [b for b, pair in enumerate(rows) if pair is not None]
        assert [new[b] for b in of_sequences] == wanted.new_token_ids
        for b, other in zip(of_sequences, wanted.logprobs, strict=True):
            assert_same_logprobs(logprobs[b], other)
        for request, tokens in zip(taken.requests, wanted.new_token_ids, strict=True):
            request.output_token_ids = [*request.output_token_ids, *tokens]
            self.check_counts(request)

    def set_rows(self, rows: list[Pair | None], k: int) -> None:
        self.rules.set_rows([pair and pair.known for pair in rows], k)  # pyright: ignore

    def eagerly(self, pairs: list[Pair], k: int) -> None:
        """One step by the sampler that captured steps take turns with."""
        taken = Step([*pairs], k, self.device)
        requests, wanted = taken.requests, self.expected(taken.requests, taken)
        logits = taken.logits_TV[: sum(taken.num_drafted) + len(requests)].to(self.device)
        found = self.eager.sample(logits, requests, taken.num_drafted)
        assert found.new_token_ids == wanted.new_token_ids
        for request, tokens in zip(requests, found.new_token_ids, strict=True):
            request.output_token_ids = [*request.output_token_ids, *tokens]
        for pair in pairs:
            pair.catch_up()

    def check_counts(self, request: Request) -> None:
        if request.seq_id in self.eager.slots._slot_of:
            wanted = [request.output_token_ids.count(token) for token in range(VOCAB)]
            assert counts_of(self.eager.slots, request) == wanted


def simulate(world: World, seed: int, num_steps: int) -> None:
    """Sequences join, leave, move and are preempted; the host is up to one step behind."""
    dice = random.Random(seed)
    rows: list[Pair | None] = []
    k = 0
    for _ in range(num_steps):
        if not rows or dice.random() < 0.6:
            some = dice.sample(world.pairs, dice.randint(1, min(len(world.pairs), world.num_rows)))
            rows = [*some, *[None] * (world.num_rows - len(some))]
            dice.shuffle(rows)
            k = dice.randint(0, 7)
            others = [pair for pair in world.pairs if pair not in rows]
            for pair in others:
                pair.catch_up()
            if others and dice.random() < 0.5:
                world.eagerly(dice.sample(others, dice.randint(1, len(others))), dice.randint(0, 3))
            for pair in others:
                if dice.random() < 0.3:
                    world.eager.release(pair.true)
            world.set_rows(rows, k)
        world.captured(rows, k)
        if dice.random() < 0.3:
            drained = [pair for pair in rows if pair is not None]
            for pair in drained:
                pair.catch_up()
            world.eagerly(drained, dice.randint(0, 3))
            world.set_rows(rows, k)


def without_grammar(requests: tuple[Request, ...]) -> list[Request]:
    for request in requests:
        request.grammar = False
        if request.drafting != "none":
            request.drafting = "argmax"
    return list(requests)


some_requests = st.integers(1, 5).flatmap(lambda n: st.tuples(*(requests_(i) for i in range(n))))


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=30)
@given(some_requests.map(without_grammar), st.integers(0, 3), st.integers(0, 2**31))
def test_mixed_rules_and_schedules(
    device: str, requests: list[Request], num_empty: int, seed: int
) -> None:
    simulate(World(requests, len(requests) + num_empty, device), seed, num_steps=5)
