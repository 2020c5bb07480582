"""Rules between the graphs of a step against the sampler, and against one row at a time.

The match of drafts is the captured one. On a CPU the kernels run under Triton's interpreter.
"""

from __future__ import annotations

import math
import random
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from peagle.config import SamplingParams
from peagle.engine.sampler import Sampler, SamplerOutput
from peagle.kernels.drafts.step_state import NO_TOKEN, DecodeLimits, DecodeResult, DecodeState
from peagle.kernels.sampling.logprobs import TokenLogprobs
from tests.engine.sampling_reference import VOCAB, Request, Rows, draft, step
from tests.engine.test_sampler import STOP, requests_
from tests.kernels.devices import DEVICES, INTERPRETED

pytest.importorskip("triton", reason="needs triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from peagle.engine.rules import CountSlots, has_rules
from peagle.engine.step import rules as step_rules
from peagle.engine.step.rules import DecodeRules
from peagle.kernels.sampling.verify_triton import SequenceSampling, match_drafts

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

    Rows of sequences without rules have their right token, others hold UNTOUCHED.
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

    def tensors(self) -> dict[str, Any]:
        """The arguments of `DecodeRules.apply`."""
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
        state = DecodeState.allocate(num_seqs, self.device)
        state.num_outputs_B.copy_(self.ints(self.of_rows(lambda r: r.num_output_tokens)))
        state.num_draft_tokens_B.copy_(self.ints(self.num_drafted))

        def floats(value: Any) -> Tensor:
            return torch.tensor(self.of_rows(value), dtype=torch.float32, device=self.device)

        return {
            "logits_TV": self.logits_TV.to(self.device),
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
            "tokens_T": tokens.to(self.device),
        }

    def matched(self, given: dict[str, Any]) -> DecodeResult:
        """What the captured match makes of the tokens; no limit is near."""
        num_seqs, width = given["drafts_BK"].shape
        zeros = torch.zeros_like(given["running_B"])
        stop = torch.full((num_seqs, 1), -1, device=self.device)
        limits = DecodeLimits(stop, zeros, zeros + 2**60, zeros, 2**60, 2**60)
        out = DecodeResult.allocate(num_seqs, width, self.device)
        place = given["start_loc"], given["drafts_BK"], given["running_B"]
        match_drafts(given["tokens_T"], *place, given["state"], limits, out)
        return out


def own_token(request: Request, rows: Rows, j: int) -> int:
    """The target's own token of one row, by the slow reference."""
    alone = copy(request)
    alone.drafts = []
    return step(alone, Rows([rows.contexts[j]], [rows.logits[j]], [rows.permitted[j]]))[0]


def run(rules: DecodeRules, taken: Step) -> tuple[list[list[int]], list[Any]]:
    """Take a step; returns the emitted tokens and the log-probabilities of all rows."""
    given = taken.tensors()
    if not rules.is_needed:
        out = taken.matched(given)
        return emitted(out), [None] * len(taken.pairs)
    rules.apply(**given)
    tokens = given["tokens_T"].tolist()
    for b in range(len(taken.pairs)):
        assert tokens[taken.firsts[b] : taken.firsts[b + 1]] == taken.own[b]
    assert all(token == UNTOUCHED for token in tokens[taken.firsts[-1] :])
    out = taken.matched(given)
    pending = rules.after(out, given["start_loc"])
    if taken.device == "cuda":
        torch.cuda.synchronize()
    new = emitted(out)
    return new, [None] * len(new) if pending is None else pending.read(new)


def emitted(out: DecodeResult) -> list[list[int]]:
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
        self.rules = DecodeRules(self.eager.slots, VOCAB, torch.device(device))

    def expected(self, requests: list[Request], taken: Step) -> SamplerOutput:
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
        taken = Step(rows, k, self.device)
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
        request.is_constrained = False
        if request.drafting != "none":
            request.drafting = "argmax"
    return list(requests)


some_requests = st.integers(1, 5).flatmap(lambda n: st.tuples(*(requests_(i) for i in range(n))))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=20)
@given(some_requests.map(without_grammar), st.integers(0, 3), st.integers(0, 2**31))
def test_mixed_rules_and_schedules(
    device: str, requests: list[Request], num_empty: int, seed: int
) -> None:
    simulate(World(requests, len(requests) + num_empty, device), seed, num_steps=5)


# --- what lies on the device ---

PENALTY = SamplingParams(frequency_penalty=1.5, repetition_penalty=1.4)


def words_after(seed: int) -> SamplingParams:
    """Greedy, with so many bad words of two and three tokens that most contexts end in a prefix."""
    dice = random.Random(seed)
    lengths = [2] * 20 + [3] * (60 if seed % 2 else 0)
    words = [[dice.randrange(VOCAB) for _ in range(length)] for length in lengths]
    return SamplingParams(bad_words=words)  # pyright: ignore


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_bad_words_follow_the_tokens_that_the_host_has_not_read(device: str, seed: int) -> None:
    requests = [Request(i, words_after(seed + i), i, drafting="argmax") for i in range(3)]
    simulate(World(requests, 3, device), seed, num_steps=8)


@pytest.mark.parametrize("seed", range(0, 12, 2))
def test_longer_words_join_shorter_ones_in_flight(seed: int) -> None:
    """The tails of a sequence in flight are kept, though others need wider ones, or narrower."""
    requests = [Request(i, words_after(i), i, drafting="argmax") for i in (seed, seed + 1)]
    world = World(requests, 2)
    pair, other = world.pairs
    for rows in ([pair, None], [pair, other], [None, pair], [other, pair], [pair, None]):
        if other not in rows:
            other.catch_up()
        world.set_rows(rows, 3)
        world.captured(rows, 3)
    assert len(pair.true.output_token_ids) > len(pair.known.output_token_ids)


def test_tails_are_those_of_the_host_behind_an_eager_step() -> None:
    """Though the same sequences stand in the same rows."""
    pair = World([Request(0, words_after(1), 5, drafting="argmax")], 1)
    for _ in range(4):
        pair.set_rows([*pair.pairs], 2)
        pair.captured([*pair.pairs], 2)
        pair.pairs[0].catch_up()
        pair.eagerly(pair.pairs, 2)


@pytest.mark.parametrize("seed", range(3))
def test_some_have_rules_and_others_want_logprobs(seed: int) -> None:
    banning = {"logit_bias": {2: -math.inf, 5: 2.0}}
    requests = [
        Request(i, SamplingParams(temperature=0.7, **params), i, drafting="argmax")
        for i, params in enumerate(({"logprobs": 2}, banning, {"logprobs": 0, **banning}, {}))
    ]
    simulate(World(requests, 5), seed, num_steps=6)


def test_a_released_sequence_counts_in_its_new_slot() -> None:
    world = World([Request(i, PENALTY, i, drafting="argmax") for i in range(2)], 2)
    first, second = world.pairs
    world.set_rows([first, None], 2)
    world.captured([first, None], 2)
    first.catch_up()
    world.eager.release(first.true)
    world.eagerly([second], 0)  # takes the slot
    world.set_rows([first, None], 2)
    world.captured([first, None], 2)
    world.check_counts(second.true)


def test_a_sequence_that_has_ended_changes_nothing() -> None:
    params = SamplingParams(frequency_penalty=1.5, bad_words=[[1, 2]], logprobs=1)  # pyright: ignore
    requests = [Request(i, params, i, output_token_ids=[i, 1]) for i in range(2)]
    world = World(requests, 2)
    taken = Step([*world.pairs], 2, "cpu")
    world.set_rows([*world.pairs], 2)
    before = counts_of(world.eager.slots, requests[1])
    given = taken.tensors()
    given["running_B"][1] = 0
    # An ended sequence has no rows: its first is that of the next, or behind the last.
    given["start_loc"][1:] = given["start_loc"][1]
    world.rules.apply(**given)
    assert given["tokens_T"].tolist() == [*taken.own[0], *[UNTOUCHED] * 5]
    out = taken.matched(given)
    pending = world.rules.after(out, given["start_loc"])
    assert pending is not None
    found = pending.read(out.emitted_BJ.tolist())
    assert [one.token_id for one in found[0] or []] == taken.own[0] and found[1] == []
    assert counts_of(world.eager.slots, requests[1]) == before
    assert sum(counts_of(world.eager.slots, requests[0])) == 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_give_no_token(value: float, temperature: float) -> None:
    """Also where a rule forbids the tokens that are broken, and only in the rows that are."""
    params = SamplingParams(
        temperature=temperature,
        allowed_token_ids=[1, 2],
        frequency_penalty=0.5,
        typical_p=0.9,
        logprobs=2,
    )
    world = World([Request(i, params, i) for i in range(2)], 2)
    taken = Step([*world.pairs], 0, "cpu")
    every = [value] * VOCAB if value == -torch.inf else [0.0] * (VOCAB - 1) + [value]
    taken.logits_TV[0] = torch.tensor(every)
    world.set_rows([*world.pairs], 0)
    given = taken.tensors()
    world.rules.apply(**given)
    assert given["tokens_T"].tolist() == [NO_TOKEN, *taken.own[1]]
    out = taken.matched(given)
    pending = world.rules.after(out, given["start_loc"])
    assert pending is not None
    found = pending.read(out.emitted_BJ.tolist())
    assert found[0] == [] and len(found[1] or []) == 1
    assert counts_of(world.eager.slots, world.pairs[0].true) == [0] * VOCAB


# --- when it works ---


def test_a_minimum_that_the_host_knows_to_be_reached_is_dropped() -> None:
    params = SamplingParams(min_tokens=3)
    world = World([Request(0, params, 0, stop_token_ids=STOP)], 1)
    world.set_rows([*world.pairs], 0)
    for num_outputs in range(6):
        assert world.rules.is_needed == (num_outputs <= 3)
        if world.rules.is_needed:
            world.captured([*world.pairs], 0)
    assert not STOP & {*world.pairs[0].true.output_token_ids[:3]}
    world.set_rows([*world.pairs], 0)
    assert not world.rules.is_needed


def test_requests_that_the_graphs_serve_need_nothing() -> None:
    stop = {"stop_token_ids": STOP}
    plain = [
        Request(0, SamplingParams(), 0),
        Request(1, SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.2), 0),
        Request(2, SamplingParams(typical_p=0.5), 0),
        Request(3, SamplingParams(min_tokens=2), 0),
        Request(4, SamplingParams(min_tokens=2), 0, output_token_ids=[1, 1], **stop),
    ]
    rules = DecodeRules(CountSlots(8, VOCAB, CPU), VOCAB, CPU)
    assert not rules.is_needed
    rules.set_rows([None, *plain], 3)  # pyright: ignore
    assert not rules.is_needed
    for asks in (
        SamplingParams(temperature=0.5, typical_p=0.5),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(bad_words=[[1]]),  # pyright: ignore
        SamplingParams(allowed_token_ids=[1]),
        SamplingParams(min_tokens=1),
        SamplingParams(logprobs=0),
    ):
        rules.set_rows([*plain, Request(9, asks, 0, **stop)], 3)  # pyright: ignore
        assert rules.is_needed, asks
        rules.set_rows([*plain], 3)  # pyright: ignore
        assert not rules.is_needed


def test_rules_are_built_once_for_rows_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    build = step_rules.build_rules
    monkeypatch.setattr(
        step_rules, "build_rules", lambda of, *rest: built.append(len(of)) or build(of, *rest)
    )
    asks = [Request(i, PENALTY, i) for i in range(2)]
    plain = [Request(i, SamplingParams(), i) for i in range(5, 8)]
    rules = DecodeRules(CountSlots(8, VOCAB, CPU), VOCAB, CPU)
    rows: list[Any]
    for rows in ([None, *asks], [plain[0], *asks], [plain[1], *asks, plain[2]], [*asks], [asks[0]]):
        rules.set_rows(rows, 3)
    rules.set_rows([asks[0]], 2)
    assert built == [2, 2, 1, 1]


def test_each_request_gets_as_many_most_likely_tokens_as_it_wants() -> None:
    """Also where one takes the row of another that wanted fewer, and neither has rules."""
    requests = [Request(i, SamplingParams(logprobs=n), i) for i, n in enumerate((1, 4, 0))]
    world = World(requests, 1)
    for pair in world.pairs:
        world.set_rows([pair], 0)
        world.captured([pair], 0)


WAITING = (
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique",
    "aten::_unique2",
    "aten::bincount",
)


class NoWaits(TorchDispatchMode):
    """Fails at what would wait for a GPU: data on the host, sizes that depend on data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        assert name not in WAITING, name
        if name == "aten::repeat_interleave":
            assert (kwargs or {}).get("output_size") is not None, name
        if name in ("aten::index", "aten::index_put", "aten::index_put_"):
            of = [one.dtype for one in args[1] if one is not None]
            assert not {torch.bool, torch.uint8} & set(of), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_step_waits_for_nothing(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """Of the kernels no more than the arguments: the interpreter reads all of them."""
    requests = every_rule(temperature)
    world = World(requests, 4)
    monkeypatch.setattr(step_rules, "own_tokens", lambda *_, **__: None)
    rows = [*world.pairs, None]
    world.set_rows(rows, 3)
    taken = Step(rows, 3, "cpu")
    given = taken.tensors()
    with NoWaits():
        world.rules.apply(**given)
    out = taken.matched(given)
    with NoWaits():
        assert world.rules.after(out, given["start_loc"]) is not None
    # Were anything found at all?
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWaits():
        bool(given["tokens_T"].any())
    with pytest.raises(AssertionError, match="index"), NoWaits():
        given["tokens_T"][given["tokens_T"] > 0]


def every_rule(temperature: float) -> list[Request]:
    params = SamplingParams(
        temperature=temperature,
        top_k=5,
        top_p=0.9,
        min_p=0.01,
        typical_p=0.9,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={1: 2.0, 3: -math.inf},
        bad_words=[[1, 2, 3], [5]],  # pyright: ignore
        allowed_token_ids=[0, 1, 2, 4, 5, 6],
        min_tokens=50,
        logprobs=3,
    )
    return [
        Request(i, params, i, drafting="argmax", stop_token_ids=STOP, output_token_ids=[4, 1, 2])
        for i in range(3)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_step_on_a_card_waits_for_nothing(temperature: float) -> None:
    """Nor does a change of the rows."""
    world = World(every_rule(temperature), 4, "cuda")
    rows = [*world.pairs, None]
    for shift in range(3):
        rows = [*rows[shift:], *rows[:shift]]
        taken = Step(rows, 3, "cuda")
        given = taken.tensors()
        if not shift:  # what is made once may wait
            world.set_rows(rows, 3)
            world.rules.apply(**given)
            given = taken.tensors()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            world.set_rows(rows, 3)
            world.rules.apply(**given)
            pending = world.rules.after(taken.matched(given), given["start_loc"])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert pending is not None
