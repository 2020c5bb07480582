"""A matcher that contradicts its mask, or breaks, ends its own request and no other."""

import re
from functools import lru_cache
from typing import Any

import pytest

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE
from peagle.config.structured import StructuredOutput
from peagle.engine.grammar import budget as grammar_budget
from peagle.engine.grammar.compiler import GrammarCompiler, GrammarState
from peagle.engine.outputs import RequestOutput
from peagle.engine.requests import Requests
from tests.engine.grammar.conftest import drained

pytest.importorskip("xgrammar")

FAULTY = StructuredOutput.regex("[a-z ]{5,900}")
STRUCTURES = (
    StructuredOutput.json_object(),
    None,
    FAULTY,
    StructuredOutput.ebnf('root ::= item ("," item)*\nitem ::= "def" | "class" | [0-9]+'),
)
PROMPTS = ("def f(x):", "import os\n", "# sort", "1,")
TREES = {"num_parallel_trees": 3, "prediction_depth": 4, "max_nodes": 9}
PEAGLE: dict[str, Any] = {"model": str(BUNDLED_PEAGLE), "num_speculative_tokens": 4}
SPECULATIVE: dict[str, Any] = {
    "plain": None,
    "peagle": PEAGLE,
    "eagle3": {"model": str(BUNDLED_EAGLE3), "num_speculative_tokens": 3},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "trees": {**PEAGLE, "parallel_drafting_spec": TREES},
    "eagle3 trees": {"model": str(BUNDLED_EAGLE3), "parallel_drafting_spec": TREES},
}
NUM_GOOD = 5  # tokens that the faulty matcher takes


class FaultyMatcher:
    """A matcher whose `name`d method fails once it stands behind so many tokens."""

    def __init__(self, matcher: Any, name: str, result: Any) -> None:
        self._matcher, self._name, self._result = matcher, name, result
        self._num_tokens = 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if name == self._name and self._num_tokens >= NUM_GOOD:
                if isinstance(self._result, Exception):
                    raise self._result
                return self._result
            result = getattr(self._matcher, name)(*args)
            self._num_tokens += (name == "accept_token" and result) - (
                args[0] if name == "rollback" else 0
            )
            return result

        return call


FAULTS: dict[str, tuple[str, Any]] = {
    "refuses": ("accept_token", False),
    "raises": ("accept_token", RuntimeError("the matcher broke")),
    "has no mask": ("fill_next_token_bitmask", ValueError("the matcher broke")),
    "cannot go back": ("rollback", RuntimeError("the matcher broke")),
    "has no end": ("is_completed", AssertionError("the matcher broke")),
}


@lru_cache
def make_llm(name: str) -> LLM:
    sizes: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_gib": 0.1}
    return LLM(speculative_config=SPECULATIVE[name], dtype="float64", **sizes)


def outputs_of(llm: LLM, indices: range, budget_s: float | None = None) -> list[RequestOutput]:
    """What some of the prompts give in one batch."""
    requests = Requests(llm.engine, llm.tokenizer, budget_s)
    for index in indices:
        params = SamplingParams(max_tokens=10, temperature=0.0, structured_output=STRUCTURES[index])
        requests.add(index, PROMPTS[index], params)
    found = drained(requests)
    return [found[index] for index in indices]


@lru_cache
def alone(name: str) -> list[RequestOutput]:
    """What each prompt gives without the others."""
    llm = make_llm(name)
    return [outputs_of(llm, range(i, i + 1))[0] for i in range(len(PROMPTS))]


def plant(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    start = GrammarCompiler.start

    def faulty(compiler: GrammarCompiler, structure: StructuredOutput, *stop: Any) -> GrammarState:
        state = start(compiler, structure, *stop)
        if structure == FAULTY:
            state._matcher = FaultyMatcher(state._matcher, *FAULTS[fault])
        return state

    monkeypatch.setattr(GrammarCompiler, "start", faulty)


def check(found: list[RequestOutput], name: str) -> None:
    for one, expected, structure in zip(found, alone(name), STRUCTURES, strict=True):
        if structure == FAULTY:
            assert (one.finish_reason, one.error_code) == ("error", "grammar_failed")
            assert "matcher" in (one.error or "")
            assert one.token_ids == expected.token_ids[: len(one.token_ids)]
            assert len(one.token_ids) < len(expected.token_ids)
        else:
            assert (one.token_ids, one.error) == (expected.token_ids, None)


CASES = [(name, "refuses") for name in SPECULATIVE]
CASES += [("peagle", fault) for fault in FAULTS if fault != "refuses"]
CASES += [
    (name, fault)
    for name in ("trees", "eagle3 trees")
    for fault in ("has no mask", "cannot go back")
]
CASES += [("plain", "has no end")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), CASES)
def test_a_fault_ends_its_request_alone(
    name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_alone = alone(name)
    plant(monkeypatch, fault)
    llm = make_llm(name)
    found = outputs_of(llm, range(len(PROMPTS)), 1000.0 if name == "peagle" else None)
    check(found, name)
    faulty = STRUCTURES.index(FAULTY)
    if fault == "refuses":
        assert "refuses token" in (found[faulty].error or "")
        assert len(found[faulty].token_ids) == NUM_GOOD
    monkeypatch.undo()
    # The same structure is served as before.
    (again,) = outputs_of(llm, range(faulty, faulty + 1))
    assert (again.token_ids, again.error) == (check_alone[faulty].token_ids, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("plain", "refuses"),
        ("peagle", "has no mask"),
        ("trees", "refuses"),
        ("eagle3 trees", "refuses"),
    ],
)
def test_a_fault_beside_the_engine(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call of the matcher is waited for."""
    alone(name)
    plant(monkeypatch, fault)
    monkeypatch.setattr(grammar_budget, "_PATIENCE_S", -1.0)
    monkeypatch.setattr(grammar_budget, "_LOOK_EVERY_S", 0.0005)
    monkeypatch.setattr("peagle.engine.grammar.compiler._LONG_ACCEPT_S", -1.0)
    check(outputs_of(make_llm(name), range(len(PROMPTS)), 1000.0), name)


def test_text_before_a_stop_string_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails behind a stop string concerns nobody."""
    llm = make_llm("peagle")
    plant(monkeypatch, "refuses")
    whole = alone("peagle")[STRUCTURES.index(FAULTY)].text
    requests = Requests(llm.engine, llm.tokenizer)
    params = SamplingParams(
        max_tokens=16, temperature=0.0, structured_output=FAULTY, stop=(whole[3:6],)
    )
    requests.add(0, PROMPTS[2], params)
    outputs = []
    while requests.has_unfinished:
        outputs += [chunk.output for chunk in requests.step() if chunk.output is not None]
    assert (outputs[0].finish_reason, outputs[0].error) == ("stop", None)
    assert outputs[0].text == whole[:3]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trees", "eagle3 trees"])
def test_a_grammar_allows_every_node(name: str) -> None:
    config = {**SPECULATIVE[name], "prompt_lookup": False}
    llm = LLM(speculative_config=config, dtype="float32", device="cpu")
    structure = StructuredOutput.regex("[a-z]{2,3}( [0-9]{2}){9}")
    params = SamplingParams(max_tokens=12, temperature=0.0, structured_output=structure)
    requests = Requests(llm.engine, llm.tokenizer)
    requests.add(0, "# sort", params)
    num_nodes = 0
    while requests.has_unfinished:
        requests.step()
        llm.engine._complete_drafts()  # else the next step would begin with it
        for sequence in llm.engine.scheduler.running:
            state, paths = sequence.grammar, list[list[int]]([[]])
            assert state is not None
            pairs = zip(sequence.drafts, sequence.draft_parents or (), strict=False)
            for token, parent in pairs:
                paths.append([*paths[parent], token])
                moved = sum(state.try_advance(one) for one in paths[-1])
                assert moved == len(paths[-1])
                state.rollback(moved)
            num_nodes += len(sequence.drafts)
    assert num_nodes > 20


@pytest.mark.slow
def test_drafts_that_a_grammar_refuses_are_not_verified() -> None:
    """A step that ran as a graph leaves such drafts on its sequences."""
    llm = make_llm("peagle")
    structure = StructuredOutput.regex("[a-z]{5,40}")
    params = SamplingParams(max_tokens=12, temperature=0.0, structured_output=structure)
    expected = llm.generate(["# sort"], params)[0].token_ids
    requests = Requests(llm.engine, llm.tokenizer)
    requests.add(0, "# sort", params)
    refused = llm.tokenizer.encode("1")[-1]
    outputs = []
    while requests.has_unfinished:
        for sequence in llm.engine.scheduler.running:
            assert sequence.grammar is not None
            sequence.drafts = [*sequence.drafts[:1], refused, refused]
            sequence.grammar.prepared = None
        outputs += [chunk.output for chunk in requests.step() if chunk.output is not None]
    assert outputs[0].token_ids == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["peagle", "trees"])
def test_steps_with_and_without_a_graph_follow_each_other(name: str) -> None:
    """Drafts of a step that ran as a graph are verified by one that does not."""
    llm = LLM(speculative_config=SPECULATIVE[name], max_num_seqs=4, kv_cache_gib=0.5)
    pattern = "[0-9]{30,60}"
    structured = SamplingParams(
        max_tokens=70, temperature=0.0, structured_output=StructuredOutput.regex(pattern)
    )
    # So many ids to stop at that no graph takes them.
    others = [SamplingParams(max_tokens=4, stop_token_ids=tuple(range(1000, 1200)))] * 3
    requests = Requests(llm.engine, llm.tokenizer)
    requests.add(0, "# sort", structured)
    outputs: dict[int, RequestOutput] = {}
    for number, other in enumerate([*others, None], start=1):
        for _ in range(4):
            for chunk in requests.step():
                if chunk.output is not None:
                    outputs[chunk.index] = chunk.output
        if other is not None:
            requests.add(number, "def f(x):", other)
    while requests.has_unfinished:
        for chunk in requests.step():
            if chunk.output is not None:
                outputs[chunk.index] = chunk.output
    assert set(outputs) == {0, 1, 2, 3}
    assert outputs[0].error is None and re.fullmatch(pattern, outputs[0].text)
    assert llm.engine.stats.eager_steps["stop_token_ids"]
