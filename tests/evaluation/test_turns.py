"""Turns: conversations with a backend, and tables that name the turns."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation import report_samples as samples
from evaluation.report_pages import Parsed, page_of
from peagle.config import SamplingParams
from peagle.engine import SpeculationStats
from peagle.errors import UserError
from peagle.evaluation.decoding import Answer, Message, Request, Run
from peagle.evaluation.dialogues import run_conversations
from peagle.evaluation.prompts import Prompt, load_prompt_set
from peagle.evaluation.report import charts, write_report
from peagle.evaluation.report.text import set_name
from peagle.evaluation.turns import name_turns, sent_turns
from peagle.results import Turns

PARAMS = SamplingParams(max_tokens=8)


# ---- conversations ----


@dataclass
class Parrot:
    """Answers "<" + the last line it reads + ">"; a prompt that ends with "fail" has an error."""

    name: str = "http://parrot"
    tells_steps: bool = False
    counts: bool = True
    reasons: str = ""
    passes: list[list[Request]] = field(default_factory=list)

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int,
        watch: Callable[[int, Answer], None] | None = None,
    ) -> Run:
        self.passes.append(list(requests))
        answers = [self._answer(request) for request in requests]
        counters = SpeculationStats(len(requests), 4, 2, [1, 1]) if self.counts else None
        return Run(answers, seconds=float(len(self.passes)), counters=counters)

    def _answer(self, request: Request) -> Answer:
        prompt = request.prompt
        last = prompt.splitlines()[-1] if isinstance(prompt, str) else prompt[-1]["content"]
        error = "planned" if last.endswith("fail") else ""
        return Answer(f"{self.reasons}<{last}>", num_tokens=3, error=error)


def test_a_later_turn_follows_the_answer() -> None:
    parrot = Parrot()
    requests = [
        Request("a", "one", PARAMS, ("two", "three")),
        Request("b", "alone", PARAMS),
        Request("c", "will fail", PARAMS, ("never",)),
        Request("d", "first", PARAMS, ("then fail", "never")),
    ]
    run = run_conversations(parrot, requests, 2)
    assert [[one.prompt for one in sent] for sent in parrot.passes] == [
        ["one", "alone", "will fail", "first"],
        ["one<one>\n\ntwo", "first<first>\n\nthen fail"],
        ["one<one>\n\ntwo<two>\n\nthree"],
    ]
    assert [one.text for one in run.answers] == [
        *("<one>", "<alone>", "<will fail>", "<first>", "<two>", "<then fail>", "<three>")
    ]
    assert run.seconds == 1 + 2 + 3 and sum(bool(one.error) for one in run.answers) == 2
    assert run.counters == SpeculationStats(7, 12, 6, [3, 3])
    assert all(one.params is PARAMS for sent in parrot.passes for one in sent)


def test_a_chat_goes_on_without_the_reasoning() -> None:
    first: list[Message] = [{"role": "user", "content": "one"}]
    parrot = Parrot(counts=False, reasons="<think>hm</think>")
    run = run_conversations(parrot, [Request("a", first, PARAMS, ("two",))], 1)
    _, (second,) = parrot.passes
    assert second.prompt == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<one>"},
        {"role": "user", "content": "two"},
    ]
    assert first == [{"role": "user", "content": "one"}] and run.counters is None


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_every_turn_is_sent_once(sizes: list[int]) -> None:
    parrot = Parrot()
    requests = [
        Request(str(i), "turn 0", PARAMS, tuple(f"turn {t}" for t in range(1, size)))
        for i, size in enumerate(sizes)
    ]
    run = run_conversations(parrot, requests, 2)
    assert len(run.answers) == sum(sizes) and len(parrot.passes) == max(sizes)
    for number, sent in enumerate(parrot.passes):
        assert [one.id for one in sent] == [str(i) for i, s in enumerate(sizes) if s > number]
        assert all(str(one.prompt).endswith(f"turn {number}") for one in sent)


# ---- names ----


def test_turns_of_the_sets() -> None:
    sets = {name: load_prompt_set(name, 3) for name in ("mt_bench", "gsm8k")}
    assert sent_turns(sets) == {"mt_bench": Turns(sent=2, most=2)}
    assert sent_turns(sets, 1) == {"mt_bench": Turns(sent=1, most=2)}
    with pytest.raises(UserError, match=r"is 2, and no prompt of 'gsm8k' has more than one turn"):
        sent_turns(sets, 2)
    with pytest.raises(UserError, match=r"'mt_bench' has more than 2 turns\. Give at most 2, or"):
        sent_turns({"mt_bench": sets["mt_bench"]}, 3)
    uneven = {"x": [Prompt("a", ("1",)), Prompt("b", ("1", "2", "3"))]}
    assert sent_turns(uneven, 2) == {"x": Turns(sent=2, most=3)}


@pytest.mark.parametrize(
    ("sent", "most", "words"),
    [
        (1, 2, "first turn"),
        (2, 2, "both turns"),
        (3, 3, "all 3 turns"),
        (2, 5, "first 2 turns of 5"),
    ],
)
def test_words(sent: int, most: int, words: str) -> None:
    turns = {"mt_bench": Turns(sent=sent, most=most)}
    assert name_turns("mt_bench", turns) == f"mt_bench ({words})"
    assert name_turns("mt_bench/math", turns) == f"mt_bench ({words})/math"
    assert name_turns("mt_bench2", turns) == "mt_bench2"
    assert set_name(name_turns("mt_bench/math", turns)) == f"MT-Bench ({words}), math"


def test_every_table_names_the_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first turn in the benchmark, both in the evaluation: two columns of the pivot."""
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    first, both = Turns(sent=1, most=2), Turns(sent=2, most=2)
    bench = samples.throughput(
        ("plain", "eagle3", "peagle"), (3, 7), (1, 16), turns={"mt_bench": first}
    )
    acceptance = samples.acceptance(("eagle3", "peagle"), (3, 7), (0.0,))
    acceptance["turns"] = {"mt_bench": both.to_json()}
    text = Parsed(page_of(tmp_path, throughput=bench, acceptance=acceptance)).text(
        "style", "script", "dd"
    )
    shown = text.count("MT-Bench")
    assert shown > 20
    assert shown == text.count("MT-Bench (first turn)") + text.count("MT-Bench (both turns)")
    write_report(tmp_path)
    with (tmp_path / "throughput.csv").open() as file:
        assert {row["set"] for row in csv.DictReader(file)} == {
            *("humaneval", "mt_bench (first turn)")
        }
    header = (tmp_path / "pivot.csv").read_text().splitlines()[0]
    assert header.count("mt_bench (first turn) ") == header.count("mt_bench (both turns) ") == 2
    kept = (tmp_path / "results.json").read_text()
    assert '"set": "mt_bench"' in kept and "(first turn)" not in kept
