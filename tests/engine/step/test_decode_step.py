"""Decode steps as graphs: the same tokens as the engine that launches kernel by kernel.

On a CPU the step is not captured and its kernels run under Triton's interpreter, which is slow: one
short test there, the others on a card. EAGLE-3 does not run as graphs yet.
"""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.config import StructuredOutput
from peagle.engine.grammar import GrammarState
from peagle.engine.step.pass_graphs import MAX_SEQUENCES
from peagle.engine.step.pipeline import Pipeline
from tests.corrections import add_correction

pytest.importorskip("triton")
ON_CPU = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.usefixtures("graphs_everywhere")
DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPTS = [[5, 9, 200, 31], [17] * 12, [3], list(range(20, 55)), [8, 8, 9, 9] * 3]
GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=5)


def make(
    folder: Path,
    head: Path | None,
    device: str,
    *,
    eager: bool,
    window: int | None = None,
    speculative: dict[str, Any] | None = None,
    **options: Any,
) -> LLM:
    config = None
    if head is not None:
        config = {"model": str(head), "num_speculative_tokens": 3, "draft_window": window}
        config |= speculative or {}
    options = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 4, **options}
    return LLM(
        folder,
        speculative_config=config,
        dtype="float32",
        device=device,
        enforce_eager=eager,
        **options,
    )


@pytest.fixture(params=["plain", "peagle"])
def head(request: pytest.FixtureRequest, head_folders: Callable[..., Path]) -> Path | None:
    if request.param == "plain":
        return None
    return head_folders(parallel=True, draft_vocab_size=200)


def outputs(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[Any]:
    found = llm.generate(PROMPTS, params)
    assert llm.stats.num_free_kv_blocks == llm.stats.num_kv_blocks
    return [(o.token_ids, o.finish_reason, o.stats) for o in found]


@pytest.mark.slow
@pytest.mark.skipif(not ON_CPU, reason="TRITON_INTERPRET is not 1")
@pytest.mark.parametrize(
    ("parallel", "window", "kv", "is_corrected"),
    [
        (True, None, "auto", False),
        (True, None, "auto", True),
        (False, None, "auto", False),
        (True, 3, "auto", False),
        (True, None, "fp8", False),
    ],
)
def test_a_step_under_the_interpreter(
    target_folder: Path,
    head_folders: Callable[..., Path],
    parallel: bool,
    window: int | None,
    kv: str,
    is_corrected: bool,
) -> None:
    build = partial(make, kv_cache_dtype=kv)
    head = head_folders(parallel=parallel)
    if is_corrected:
        add_correction(head)
    params = [GREEDY, replace(SAMPLED, max_tokens=3)]
    params = [replace(one, max_tokens=4) for one in params]
    eager = build(target_folder, head, "cpu", eager=True, window=window)
    expected = eager.generate(PROMPTS[:2], params)
    steps = build(target_folder, head, "cpu", eager=False, window=window, max_num_seqs=2)
    found = steps.generate(PROMPTS[:2], params)
    assert steps.engine._pipeline is not None
    assert [(o.token_ids, o.stats) for o in found] == [(o.token_ids, o.stats) for o in expected]


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@pytest.mark.skipif(not ON_CPU, reason="TRITON_INTERPRET is not 1")
def test_a_seed_gives_the_output_of_plain_decoding_under_the_interpreter() -> None:
    """With the bundled head, whose drafts often pass."""
    prompts = ["def fibonacci(n):"] * 3
    params = [replace(SAMPLED, max_tokens=8, seed=1), replace(GREEDY, max_tokens=8)]
    letters = StructuredOutput("regex", "[^0-9]{4,40}")
    params.append(replace(params[1], structured_output=letters, ignore_eos=False))
    build = partial(make, Path(BUNDLED_TARGET), device="cpu", max_num_seqs=2)
    plain = build(None, eager=True).generate(prompts, params)
    steps = build(Path(BUNDLED_PEAGLE), eager=False)
    found = steps.generate(prompts, params)
    assert steps.engine._pipeline is not None
    assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    for output in (found[0], found[2]):
        assert 0 < output.stats.num_accepted_tokens < output.stats.num_draft_tokens
    assert steps.stats.eager_steps == {}


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@pytest.mark.skipif(not ON_CPU, reason="TRITON_INTERPRET is not 1")
def test_a_rehearsal_leaves_no_trace(
    target_folder: Path, head_folders: Callable[..., Path]
) -> None:
    """It runs a pass of the most prompt tokens, and one of the most sequences."""
    build = partial(make, device="cpu", max_num_seqs=2, max_num_batched_tokens=40)
    head = head_folders(parallel=True)
    expected = build(target_folder, head, eager=True).generate(PROMPTS[:2], GREEDY)
    steps = build(target_folder, head, eager=False)
    engine, passes = steps.engine, list[int]()
    before, free = engine.stats, list(engine.blocks._free)
    engine.on_pass = passes.append
    engine.rehearse()
    assert max(passes) >= 18 and engine.stats == before
    assert engine.scheduler.max_prompts == MAX_SEQUENCES  # no graph takes more
    assert list(engine.blocks._free) == free and not engine.blocks._published
    assert [o.token_ids for o in steps.generate(PROMPTS[:2], GREEDY)] == [
        o.token_ids for o in expected
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@pytest.mark.skipif(not ON_CPU, reason="TRITON_INTERPRET is not 1")
@pytest.mark.parametrize("device", ["cpu"])
def test_arrivals_under_the_interpreter(
    target_folder: Path,
    head_folders: Callable[..., Path],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some steps have padding beyond the rows of their sequences."""
    padded = "peagle.engine.step.graph_runner.count_target_rows"
    monkeypatch.setattr(padded, lambda sizes: {(r, k): r * (k + 1) + 3 for r, k in sizes})
    arrivals_change_nothing(target_folder, head_folders(parallel=True), device, max_tokens=5)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_arrivals(target_folder: Path, head_folders: Callable[..., Path], device: str) -> None:
    arrivals_change_nothing(target_folder, head_folders(parallel=True), device, max_tokens=20)


def arrivals_change_nothing(target: Path, head: Path, device: str, max_tokens: int) -> None:
    """Requests come, end and are cancelled between steps, prompts run in chunks, K changes.

    Everyone has the output of a request alone, and after the first step one is always in flight.
    """
    every = [replace(GREEDY, max_tokens=max_tokens), replace(SAMPLED, max_tokens=max_tokens)]
    alone = make(target, None, device, eager=True)
    expected = [
        alone.generate([prompt], every[i % 2])[0].token_ids for i, prompt in enumerate(PROMPTS)
    ]
    # No pause in it: drafting would resume by a step of its own.
    schedule = {
        "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 2, 1], [3, 3, 2], [4, 4, 3]]
    }
    build = partial(make, target, head, device, eager=False, speculative=schedule)
    llm = build(max_num_batched_tokens=8)
    engine: Any = llm.engine
    sequences = [engine.add_request(PROMPTS[0], every[0])]
    engine.step()
    for i, prompt in enumerate(PROMPTS[1:], 1):
        sequences.append(engine.add_request(prompt, every[i % 2]))
        sequences.append(engine.add_request(prompt, every[i % 2]))
        for _ in range(2):
            engine.step()
            assert engine._pipeline._flight is not None
        engine.cancel(sequences.pop())
    while engine.has_unfinished:
        engine.step()
    assert [s.output_token_ids for s in sequences] == expected
    assert engine.stats.eager_steps == {}
    assert llm.stats.num_free_kv_blocks == llm.stats.num_kv_blocks


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@pytest.mark.skipif(not ON_CPU, reason="TRITON_INTERPRET is not 1")
@pytest.mark.parametrize("device", ["cpu"])
def test_rules_under_the_interpreter(
    target_folder: Path, head_folders: Callable[..., Path], device: str
) -> None:
    rules_stay_in_the_graphs(target_folder, head_folders(parallel=True), device, max_tokens=6)


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@pytest.mark.skipif(not ON_CPU, reason="TRITON_INTERPRET is not 1")
def test_a_slow_grammar_sits_out_steps(
    target_folder: Path, head_folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its neighbour goes on, and neither's output changes."""
    words = StructuredOutput("regex", "[a-f]{9}")
    params = [replace(GREEDY, max_tokens=6)] * 2
    params[1] = replace(params[1], structured_output=words, ignore_eos=False, logprobs=0)
    plain = make(target_folder, None, "cpu", eager=True)
    expected = [plain.generate([PROMPTS[0]], one)[0].token_ids for one in params]
    llm = make(target_folder, head_folders(parallel=True), "cpu", eager=False, max_num_seqs=2)
    engine, grammars, num_out = llm.engine, list[GrammarState](), 0
    pipeline: Any = engine._pipeline
    prepare, read = pipeline._prepare, pipeline._read

    def prepare_slowly() -> None:
        """Of every second step the grammar's masks are late."""
        for grammar in grammars:
            grammar.is_busy = False
        prepare()
        for sequence in engine.scheduler.running:
            grammar, count = sequence.grammar, sequence.num_output_tokens
            if grammar is not None and count % 2 and count not in late:
                late.append(count)
                grammar.is_busy = True
                grammars.append(grammar)

    def read_counting(flight: Any, follows: bool) -> None:
        nonlocal num_out
        num_out += 0 if flight is None else flight.sequences.count(None)
        read(flight, follows)

    late: list[int] = []
    monkeypatch.setattr(pipeline, "_prepare", prepare_slowly)
    monkeypatch.setattr(engine, "_prepare_grammars", prepare_slowly)
    monkeypatch.setattr(pipeline, "_read", read_counting)
    found = llm.generate([PROMPTS[0]] * 2, params)
    assert [output.token_ids for output in found] == expected
    assert num_out >= len(late) > 1
    assert engine.stats.eager_steps == {}


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@pytest.mark.skipif(not ON_CPU, reason="TRITON_INTERPRET is not 1")
def test_a_grammar_holds_where_acceptance_is_synthetic(
    target_folder: Path, head_folders: Callable[..., Path]
) -> None:
    """The rates accept every draft, and random drafts break the grammar."""
    rates = {"synthetic_acceptance_rates": [1.0] * 3, "rejection_sample_method": "synthetic"}
    build = partial(make, eager=False, max_num_seqs=2, speculative=rates)
    llm = build(target_folder, head_folders(parallel=True), "cpu")
    words = StructuredOutput("regex", "[a-f]{5}[0-9]{4}")
    params = [replace(GREEDY, structured_output=words, ignore_eos=False), GREEDY]
    constrained, free = llm.generate([PROMPTS[0]] * 2, params)
    assert re.fullmatch("[a-f]{5}[0-9]{4}", constrained.text)
    assert free.stats.num_accepted_tokens == free.stats.num_draft_tokens
    assert llm.stats.eager_steps == {}


# ---- drawn drafts ----

DRAWS = {"draft_sampling": "probabilistic"}
# By drawn drafts a seed gives other outputs than by argmax drafts: each has its own.
DRAWN = [
    replace(SAMPLED, min_p=0.1, top_k=5, top_p=1.0, seed=1),
    replace(SAMPLED, min_p=0.05, top_k=0, top_p=1.0, seed=2),
    GREEDY,
    replace(SAMPLED, top_k=0, top_p=0.8, temperature=1.4, seed=3, num_speculative_tokens=2),
    # Without a cut every q that is lost changes the output.
    replace(SAMPLED, top_k=0, top_p=1.0, min_p=0.0, seed=4),
]


def drawn_drafts_give_the_same(
    target: Path,
    head: Path,
    device: str,
    params: list[SamplingParams],
    speculative: dict[str, Any] | None = None,
    **options: Any,
) -> LLM:
    """Requests together give what each gives alone without graphs; return their engine."""
    alone = make(target, head, device, eager=True, speculative=DRAWS)
    wanted = [alone.generate([prompt], one)[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    llm = make(
        target, head, device, eager=False, speculative=DRAWS | (speculative or {}), **options
    )
    found = llm.generate(PROMPTS, params)
    assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
    for one, other, params_of in zip(found, wanted, params, strict=True):
        # K follows the load where no output depends on it.
        assert one.stats == other.stats or (speculative and params_of.is_greedy)
    argmax = make(target, head, device, eager=True).generate(PROMPTS, params)
    assert [o.token_ids for o in argmax] != [o.token_ids for o in wanted], "drafts are drawn"
    passed = llm.stats.speculation
    assert 0 < passed.num_accepted_tokens < passed.num_draft_tokens
    assert llm.stats.num_free_kv_blocks == llm.stats.num_kv_blocks
    return llm


def lasting(params: list[SamplingParams], max_tokens: int) -> list[SamplingParams]:
    """The same requests, which end one after another."""
    return [
        replace(one, max_tokens=max_tokens + i, ignore_eos=True) for i, one in enumerate(params)
    ]


DRAWN_CASES = {
    "joins and leaves": (DRAWN, {"max_num_seqs": 3}),
    "steps without graphs": (
        [*DRAWN[:4], replace(DRAWN[4], stop_token_ids=tuple(range(230, 240)), max_tokens=3)],
        {},
    ),
    "K by load": (
        DRAWN,
        {"speculative": {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 9, 1]]}},
    ),
    "rules": (
        [
            replace(DRAWN[0], repetition_penalty=1.5, frequency_penalty=0.4, logprobs=2),
            replace(DRAWN[1], typical_p=0.9, bad_words=((9,), (200, 31))),
            replace(DRAWN[2], logit_bias={77: 2.5, 12: -3.0}),
            replace(DRAWN[3], logprobs=1),
            replace(DRAWN[4], allowed_token_ids=tuple(range(40, 90)), presence_penalty=0.3),
        ],
        {},
    ),
}


def check_drawn_drafts(
    target: Path, heads: Callable[..., Path], device: str, kind: str, case: str, length: int
) -> None:
    head = heads(parallel=kind != "eagle3", draft_vocab_size=200)
    if kind == "corrected":
        add_correction(head)
    params, options = DRAWN_CASES[case]
    llm = drawn_drafts_give_the_same(target, head, device, lasting(params, length), **options)
    reasons = {"steps without graphs": {"stop_token_ids"}, "K by load": {"kept_k"}}
    assert set(llm.engine.stats.eager_steps) == reasons.get(case, set())


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@pytest.mark.skipif(not ON_CPU, reason="TRITON_INTERPRET is not 1")
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, "peagle") for case in DRAWN_CASES),
        ("joins and leaves", "eagle3"),
        ("joins and leaves", "corrected"),
    ],
)
def test_drawn_drafts_under_the_interpreter(
    target_folder: Path, head_folders: Callable[..., Path], case: str, kind: str
) -> None:
    # A corrected head draws its drafts one after another.
    length = 3 if kind == "corrected" else 4
    check_drawn_drafts(target_folder, head_folders, "cpu", kind, case, length)


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@pytest.mark.skipif(not ON_CPU, reason="TRITON_INTERPRET is not 1")
@pytest.mark.parametrize("fault", [False, True], ids=["", "planted fault"])
def test_preemption_keeps_drawn_drafts_under_the_interpreter(
    target_folder: Path,
    head_folders: Callable[..., Path],
    fault: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests of higher priority come while a step is in flight."""
    head = head_folders(parallel=True, draft_vocab_size=200)
    if fault:
        monkeypatch.setattr(Pipeline, "must_drain", lambda pipeline: False)
    build = partial(make, target_folder, head, "cpu", speculative=DRAWS)
    params = replace(DRAWN[-1], max_tokens=14, ignore_eos=True)
    wanted = build(eager=True).generate([PROMPTS[3]], params)[0].token_ids
    engine = build(eager=False, max_num_seqs=1).engine
    sequence = engine.add_request(PROMPTS[3], params, priority=1)
    for _ in range(3):
        for _ in range(3):
            engine.step()
        engine.add_request(PROMPTS[2], replace(GREEDY, max_tokens=1))
    while engine.has_unfinished:
        engine.step()
    assert sequence.num_preemptions > 1
    assert (sequence.output_token_ids == wanted) is not fault


@pytest.mark.gpu
@pytest.mark.parametrize("case", DRAWN_CASES)
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("kind", ["peagle", "eagle3", "corrected"])
def test_drawn_drafts(
    target_folder: Path, head_folders: Callable[..., Path], device: str, kind: str, case: str
) -> None:
    check_drawn_drafts(target_folder, head_folders, device, kind, case, length=16)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_rules(target_folder: Path, head_folders: Callable[..., Path], device: str) -> None:
    rules_stay_in_the_graphs(target_folder, head_folders(parallel=True), device, max_tokens=14)


def rules_stay_in_the_graphs(target: Path, head: Path, device: str, max_tokens: int) -> None:
    """Requests of all kinds together give what each gives alone without graphs."""
    greedy, sampled = (replace(one, max_tokens=max_tokens) for one in (GREEDY, SAMPLED))
    plain = make(target, None, device, eager=True)
    first = plain.generate([PROMPTS[1]], greedy)[0].token_ids
    params = [
        replace(greedy, repetition_penalty=1.5, frequency_penalty=0.4, logprobs=2),
        replace(sampled, bad_words=((first[1],), tuple(first[2:4])), typical_p=0.9),
        replace(greedy, min_tokens=4, stop_token_ids=(first[1],), logprobs=0),
        replace(sampled, logit_bias={first[0]: -3.0, 77: 2.5}, presence_penalty=0.3),
        replace(sampled, logprobs=1),
        replace(greedy, allowed_token_ids=tuple(range(40, 90))),
        greedy,
        replace(
            sampled,
            structured_output=StructuredOutput("regex", "[a-f]{2}[0-9]+x"),
            frequency_penalty=0.2,
            ignore_eos=False,
        ),
        replace(
            greedy,
            structured_output=StructuredOutput("regex", "north|nose|south"),
            logprobs=1,
            ignore_eos=False,
        ),
    ]
    expected = [plain.generate([PROMPTS[1]], one)[0] for one in params]
    llm = make(target, head, device, eager=False)
    pipeline, free = llm.engine._pipeline, len(llm.engine.sampler.slots._free)
    assert pipeline is not None
    pipeline.runner.warm_up_rules(llm.engine.sampler.release)  # as on a card at the start
    assert len(llm.engine.sampler.slots._free) == free
    found = llm.generate([PROMPTS[1]] * len(params), params)
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        for got, wanted in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert (got.token_id, got.rank) == (wanted.token_id, wanted.rank)
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert [t for t, _ in got.top] == [t for t, _ in wanted.top]
    assert llm.engine.stats.eager_steps == {}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_graphs_give_the_same(
    target_folder: Path, head: Path | None, device: str, params: SamplingParams
) -> None:
    every = [replace(params, seed=i, max_tokens=params.max_tokens + i) for i in range(5)]
    eager = outputs(make(target_folder, head, device, eager=True), every)
    graphs = make(target_folder, head, device, eager=False)
    assert outputs(graphs, every) == eager
    assert graphs.engine._pipeline is not None
    assert outputs(graphs, every) == eager, "and again, with cached prompts"


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_over_an_fp8_cache(target_folder: Path, head: Path | None, device: str) -> None:
    fp8 = {"kv_cache_dtype": "fp8"}
    eager = outputs(make(target_folder, head, device, eager=True, **fp8), GREEDY)
    graphs = make(target_folder, head, device, eager=False, **fp8)
    for _ in range(2):  # the second time with cached prompts
        assert [o[:2] for o in outputs(graphs, GREEDY)] == [o[:2] for o in eager]
    plain = outputs(make(target_folder, None, device, eager=True, **fp8), GREEDY)
    assert [o[:2] for o in plain] == [o[:2] for o in eager], "drafts change nothing"


@pytest.mark.parametrize("device", DEVICES)
def test_few_blocks_and_chunks(target_folder: Path, head: Path | None, device: str) -> None:
    eager = outputs(make(target_folder, head, device, eager=True), GREEDY)
    small = make(
        target_folder, head, device, eager=False, num_kv_blocks=19, max_num_batched_tokens=7
    )
    assert [o[:2] for o in outputs(small, GREEDY)] == [o[:2] for o in eager]
    assert small.stats.num_preemptions > 0


@pytest.mark.parametrize("device", DEVICES)
def test_stops_and_features_among_graphs(
    target_folder: Path, head: Path | None, device: str
) -> None:
    """Stop ids end a row on the device, stop strings a step late; penalties run by kernels."""
    whole = make(target_folder, head, device, eager=True).generate(PROMPTS, GREEDY)
    params = [
        replace(GREEDY, stop_token_ids=(whole[0].token_ids[5],)),
        replace(GREEDY, stop=(whole[1].text[3:5],)) if len(whole[1].text) > 5 else GREEDY,
        replace(GREEDY, repetition_penalty=1.4, max_tokens=6),
        replace(GREEDY, min_tokens=9, stop_token_ids=(whole[3].token_ids[4],)),
        replace(GREEDY, logprobs=2, max_tokens=4),
    ]
    eager = outputs(make(target_folder, head, device, eager=True), params)
    assert outputs(make(target_folder, head, device, eager=False), params) == eager


@pytest.mark.parametrize("device", DEVICES)
def test_cancelled_while_in_flight(target_folder: Path, head: Path | None, device: str) -> None:
    llm = make(target_folder, head, device, eager=False)
    whole = make(target_folder, head, device, eager=True).generate(PROMPTS, GREEDY)
    for chunk in llm.stream(PROMPTS[:2], GREEDY):
        if len(chunk.token_ids) and chunk.output is None:
            break
    assert llm.stats.num_free_kv_blocks == llm.stats.num_kv_blocks
    assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY)] == [o.token_ids for o in whole]
