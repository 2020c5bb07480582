"""Grammars that take long: they sit out steps, change no output, and end beyond their budget."""

import time
from typing import Any

import pytest

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE
from peagle.config.structured import StructuredOutput
from peagle.engine.grammar import budget as grammar_budget
from peagle.engine.grammar.budget import GrammarBudget
from peagle.engine.grammar.compiler import GrammarCompiler, GrammarState
from peagle.engine.outputs import RequestOutput
from peagle.engine.requests import Requests
from peagle.errors import UserError
from tests.engine.grammar.conftest import drained

pytest.importorskip("xgrammar")

SLOW = StructuredOutput.regex("[a-z ]{5,60}")
STRUCTURES = (
    StructuredOutput.json_object(),
    None,
    StructuredOutput.json_schema(
        {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    ),
    SLOW,
    None,
    StructuredOutput.ebnf('root ::= item ("," item)*\nitem ::= "def" | "class" | [0-9]+'),
)
PROMPTS = ("def f(x):", "import os\n", "{", "# sort", "class A", "1,")
SPECULATIVE: dict[str, Any] = {
    "peagle": {"model": str(BUNDLED_PEAGLE), "num_speculative_tokens": 5},
    "eagle3": {"model": str(BUNDLED_EAGLE3), "num_speculative_tokens": 3},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "plain": None,
}


def make_llm(speculative: dict[str, Any] | None = None) -> LLM:
    sizes: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_gib": 0.1}
    return LLM(speculative_config=speculative, dtype="float64", **sizes)


def outputs_of(llm: LLM, budget_s: float | None, temperature: float = 0.0) -> list[RequestOutput]:
    """What the prompts give under their structures, all in one batch."""
    requests = Requests(llm.engine, llm.tokenizer, budget_s)
    for index, (prompt, structure) in enumerate(zip(PROMPTS, STRUCTURES, strict=True)):
        params = SamplingParams(
            max_tokens=24, temperature=temperature, seed=index, structured_output=structure
        )
        requests.add(index, prompt, params)
    found = drained(requests)
    return [found[index] for index in range(len(PROMPTS))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "temperature"),
    # Drawn tokens depend on the drafts beside them, and a busy grammar ends drafting.
    [(name, 0.0) for name in SPECULATIVE] + [("plain", 1.0)],
)
def test_sitting_out_changes_no_output(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mask is waited for: sequences leave and join the batch at every step."""
    llm = make_llm(SPECULATIVE[name])
    expected = outputs_of(llm, None, temperature)
    mask_into = GrammarState.mask_into
    num_beside = 0

    def mask_beside(state: GrammarState, *args: Any) -> None:
        nonlocal num_beside
        until(lambda: state.is_busy)
        num_beside += 1
        mask_into(state, *args)

    monkeypatch.setattr(grammar_budget, "_PATIENCE_S", -1.0)
    monkeypatch.setattr(grammar_budget, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(GrammarState, "mask_into", mask_beside)
    found = outputs_of(llm, 1000.0, temperature)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert num_beside > len(PROMPTS)


@pytest.fixture
def burning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of the slow structure take 0.3 s of the processor."""
    fill = GrammarState._fill

    def slow(state: GrammarState, *args: Any) -> None:
        fill(state, *args)
        if state.budget.seconds is not None and state.is_slow:  # type: ignore[attr-defined]
            end = time.thread_time() + 0.3
            while time.thread_time() < end:
                pass

    start = GrammarCompiler.start

    def marked(compiler: GrammarCompiler, structure: StructuredOutput, *stop: Any) -> GrammarState:
        state = start(compiler, structure, *stop)
        MARKS[id(state)] = structure == SLOW
        return state

    MARKS: dict[int, bool] = {}
    monkeypatch.setattr(GrammarState, "is_slow", property(lambda s: MARKS.get(id(s))), False)
    monkeypatch.setattr(GrammarState, "_fill", slow)
    monkeypatch.setattr(GrammarCompiler, "start", marked)


@pytest.mark.slow
@pytest.mark.usefixtures("burning")
def test_beyond_the_budget_one_request_ends_alone() -> None:
    llm = make_llm(SPECULATIVE["peagle"])
    expected = outputs_of(llm, None)
    found = outputs_of(llm, 0.1)
    for one, other, structure in zip(found, expected, STRUCTURES, strict=True):
        if structure == SLOW:
            assert (one.finish_reason, one.error_code) == ("error", "grammar_too_slow")
            assert "more than 0.1 s of the processor in one step" in (one.error or "")
            assert one.to_json()["error_code"] == "grammar_too_slow"
        else:
            assert (one.token_ids, one.error) == (other.token_ids, None)


@pytest.mark.slow
@pytest.mark.usefixtures("burning")
def test_such_a_structure_is_refused_the_next_time() -> None:
    llm = make_llm()
    requests = Requests(llm.engine, llm.tokenizer, 0.1)
    params = SamplingParams(max_tokens=5, structured_output=SLOW)
    requests.add(0, "x", params)
    while requests.has_unfinished:
        requests.step()
    with pytest.raises(UserError, match="of the processor in one step"):
        requests.compile_grammar(params)
    requests.compile_grammar(SamplingParams(structured_output=StructuredOutput.json_object()))


class Spender(grammar_budget.Spender):
    """Something that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.calls: list[str] = []

    def burn(self) -> None:
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        self.calls.append("work")


def until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.slow
def test_one_that_takes_long_holds_up_nobody() -> None:
    budget = GrammarBudget(100.0)
    spenders = [Spender(0.0), Spender(0.5), Spender(0.0), Spender(0.0)]
    budget.each(
        [*spenders[:3], None, spenders[3]],
        lambda index, spender: spender.burn(),
        lambda index, spender: spender.calls.append(f"afterwards {index}"),
    )
    slow = spenders.pop(1)
    assert slow.is_busy and not slow.calls
    assert [spender.calls for spender in spenders] == [["work"]] * 3
    assert not any(spender.is_busy for spender in spenders)
    # Whoever is busy is passed over.
    budget.each([slow], lambda index, spender: spender.calls.append("never"))
    until(lambda: not slow.is_busy)
    assert slow.calls == ["work", "afterwards 1"]
    assert slow.spent_s >= 0.5 and not slow.is_over_budget


@pytest.mark.slow
def test_only_so_many_go_on_beside_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_budget, "_MAX_BESIDE", 1)
    budget = GrammarBudget(100.0)
    spenders = [Spender(0.2) for _ in range(4)]
    budget.each(spenders, lambda index, spender: spender.burn())
    assert sum(not job.is_over for job in budget._beside) <= 2
    budget.wait_for_room()
    until(lambda: not any(spender.is_busy for spender in spenders))
    assert all(spender.calls == ["work"] for spender in spenders)


def test_the_excess_is_seen_while_the_call_goes_on() -> None:
    budget = GrammarBudget(0.1)
    spender = Spender(1.5)
    budget.each([spender], lambda index, spender: spender.burn())

    def is_over() -> bool:
        budget.mark_excess()
        return spender.is_over_budget

    until(is_over)
    assert spender.is_busy and not spender.calls


@pytest.mark.parametrize("seconds", [None, 100.0], ids=["in the engine", "in a worker"])
def test_an_error_stays_with_its_spender(seconds: float | None) -> None:
    def work(index: int, spender: Any) -> None:
        if index == 1:
            raise ValueError("the matcher broke")
        spender.burn()

    spenders = [Spender(0.0) for _ in range(3)]
    for _ in range(2):
        GrammarBudget(seconds).each(spenders, work)
    assert [len(spender.calls) for spender in spenders] == [2, 0, 2]
    assert [str(spender.error) for spender in spenders] == ["None", "the matcher broke", "None"]
    assert [spender.is_free for spender in spenders] == [True, False, True]


@pytest.mark.slow
def test_an_error_beside_the_engine_stays_with_its_spender() -> None:
    def work(index: int, spender: Any) -> None:
        spender.burn()
        raise ValueError("the matcher broke")

    spender = Spender(0.3)
    budget = GrammarBudget(100.0)
    assert budget.each([spender], work, lambda *_: spender.calls.append("never")) == {0}
    until(lambda: not spender.is_busy)
    assert spender.calls == ["work"] and isinstance(spender.error, ValueError)
