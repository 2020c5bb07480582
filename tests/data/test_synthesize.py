"""Prompts that a target writes: judged in order, resumed, the same in every batch; real targets."""

import fcntl
import json
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peagle import LLM, SamplingParams
from peagle.chat import render_chat
from peagle.data.readers import AskedConversation, dialogue_of, read_records, read_side
from peagle.data.regenerate import seed_of
from peagle.data.synthesize import (
    REASON_CUT,
    REASON_ENDED,
    REASON_HELD_OUT,
    REASON_REPEATED,
    LocalWriter,
    SynthesizeProgress,
    WrittenSample,
    dropped_file,
    synthesize,
)
from peagle.errors import UserError
from tests.conftest import byte_tokenizer
from tests.fake_hub import message_of

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NOUNS = "ants bees cats dogs eels foxes gnus hens ibises jays kois lynxes".split()  # noqa: SIM905
TEXTS = [
    *(f"Do {noun} sleep?" for noun in NOUNS[:4]),
    "no",
    "",
    "do CATS sleep",
    "Why do rivers bend, and what do they carry to the sea?",
    "Which evaluation prompt was this, and who wrote it in the first place?",
    "round and round and we go " * 4,
    *(f"Tell me of {noun}." for noun in NOUNS[4:]),
]
HELD = ["Which evaluation prompt was this, and who wrote it in the first place?"]


class Reciter:
    """Writes the n-th text as sample n, in any order; some are cut, and it may be stopped."""

    is_chat = True

    def __init__(self, texts: list[str] = TEXTS, *, order: int = 0, stops_at: int = -1) -> None:
        self.texts, self.stops_at = texts, stops_at
        self.random = random.Random(order)
        self.written: list[int] = []

    def samples(
        self, take: Callable[[], int | None], judge: Callable[[str], str | None]
    ) -> Iterator[WrittenSample]:
        under_way: list[int] = []
        while True:
            while len(under_way) < 5 and (number := take()) is not None:
                under_way.append(number)
            if not under_way:
                return
            number = under_way.pop(self.random.randrange(len(under_way)))
            if number == self.stops_at:
                raise KeyboardInterrupt
            self.written.append(number)
            text = self.texts[number % len(self.texts)]
            fault = judge(text) or (REASON_CUT if text.startswith("Why") else None)
            yield WrittenSample(number, None, [text], fault, 3)


def write(output: Path, writer: Any, count: int = 12, **options: Any) -> SynthesizeProgress:
    return synthesize(
        writer, count, output, {"model": "m", **options}, {"who": "test"}, held_out=HELD
    )


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_kept_and_what_is_dropped(tmp_path: Path) -> None:
    output = tmp_path / "sub" / "out.jsonl"
    done = write(output, Reciter())
    kept = [0, 1, 2, 3, *range(10, 18)]
    assert [(row["id"], row["sample"]) for row in rows(output)] == [
        (f"sample-{number}", number) for number in kept
    ]
    assert [row["turns"] for row in rows(output)] == [[TEXTS[number]] for number in kept]
    left_out = {row["sample"]: (row["reason"], row["text"]) for row in rows(dropped_file(output))}
    reasons = {
        4: "fewer than 3 words",
        5: "empty",
        6: REASON_REPEATED,
        7: REASON_CUT,
        8: REASON_HELD_OUT,
        9: "looping: 6 words occur 3 times",
    }
    assert left_out == {number: (reason, TEXTS[number]) for number, reason in reasons.items()}
    assert done.dropped == dict.fromkeys(reasons.values(), 1)
    assert (done.kept, done.samples, done.resumed) == (12, 18, 0)
    side = read_side(output)
    assert side["kind"] == "synthesize" and side["who"] == "test" and side["samples"] == 18
    assert side["dropped"] == done.dropped and len(side["output_sha256"]) == 64


def test_regenerate_reads_the_output(tmp_path: Path) -> None:
    class Told(Reciter):
        def samples(self, take: Any, judge: Any) -> Iterator[WrittenSample]:
            for sample in super().samples(take, judge):
                sample.system = "be kind"
                yield sample

    write(tmp_path / "out.jsonl", Told())
    read = [dialogue_of(record) for record in read_records(tmp_path / "out.jsonl")]
    assert read[0] == AskedConversation(
        "sample-0", (TEXTS[0],), ({"role": "system", "content": "be kind"},)
    )
    assert len(read) == 12 and all(isinstance(one, AskedConversation) for one in read)


@pytest.mark.parametrize("order", range(5))
def test_the_output_does_not_depend_on_the_order_of_arrival(tmp_path: Path, order: int) -> None:
    for name, number in (("a.jsonl", order), ("b.jsonl", order + 1)):
        write(tmp_path / name, Reciter(order=number))
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert rows(tmp_path / "a.dropped.jsonl") == rows(tmp_path / "b.dropped.jsonl")


@pytest.mark.parametrize("stop", range(1, 17, 3))
def test_an_interrupted_run_goes_on(tmp_path: Path, stop: int) -> None:
    output = tmp_path / "out.jsonl"
    whole = write(tmp_path / "whole.jsonl", Reciter())
    with pytest.raises(KeyboardInterrupt):
        write(output, Reciter(stops_at=stop, order=stop))
    before = len(rows(output))
    judged = before + len(rows(dropped_file(output)))
    with output.open("a") as file:
        file.write('{"id": "half')  # a line that a killed run left
    again = Reciter()
    done = write(output, again)
    assert (done.kept, done.resumed, done.samples) == (12, before, whole.samples)
    assert done.dropped == whole.dropped
    assert min(again.written) == judged <= stop, "what was judged is not written again"
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert write(output, Reciter(stops_at=0)).resumed == 12, "nothing is left to write"


def test_a_full_disk_names_the_file_and_the_run_goes_on(tmp_path: Path) -> None:
    """A limit of the size of files stands for a full disk."""
    output = tmp_path / "out.jsonl"
    write(tmp_path / "whole.jsonl", Reciter())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
        message = message_of(lambda: write(output, Reciter()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert message.startswith(f"{str(output)!r} cannot be written: File too large. All prompts so")
    assert "Make room, then run the same command again" in message
    assert 0 < output.stat().st_size <= 500
    assert write(output, Reciter()).resumed > 0
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_more_may_be_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "whole.jsonl", Reciter())
    for count in (5, 3, 12):
        write(tmp_path / "out.jsonl", Reciter(order=count), count=count)
        assert len(rows(tmp_path / "out.jsonl")) == max(count, 5)
    for name in ("jsonl", "dropped.jsonl"):
        assert rows(tmp_path / f"out.{name}") == rows(tmp_path / f"whole.{name}")


def test_outputs_of_others_are_refused(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    write(output, Reciter())
    assert "was begun with seed None, now it is 1" in message_of(
        lambda: write(output, Reciter(), seed=1)
    )
    message = message_of(lambda: write(output, Reciter(), model="other"))
    assert "was begun with model 'm', now it is 'other'" in message
    with output.open("a+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "Another process is writing" in message_of(lambda: write(output, Reciter()))
    output.write_text('{"id": 1, "turns": ["x"]}\n')
    assert f"{output}, line 1 is none that" in message_of(lambda: write(output, Reciter()))


def test_a_target_that_writes_nothing_of_use_is_given_up(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    message = message_of(lambda: write(output, Reciter(["no", "Why is the sky so blue?"])))
    assert message.startswith("Of 200 samples 0 were kept (100 × fewer than 3 words; 100 × cut off")
    assert str(dropped_file(output)) in message and "--temperature" in message
    assert rows(output) == []
    message = message_of(lambda: write(tmp_path / "b.jsonl", Reciter(TEXTS[:1])))
    assert "Of 200 samples 1 were kept (199 × a near-duplicate of an earlier" in message


# ---- a real target ----

PARAMS = SamplingParams(max_tokens=24, temperature=1.0, seed=3)


@pytest.fixture
def llm(target_folder: Path) -> LLM:
    return LLM(target_folder, dtype="float32", max_num_seqs=4)


def take_from(numbers: Iterator[int]) -> Callable[[], int | None]:
    return lambda: next(numbers, None)


def collected(writer: LocalWriter, count: int, judge: Any = lambda _: None) -> list[WrittenSample]:
    found = writer.samples(take_from(iter(range(count))), judge)
    return sorted(found, key=lambda sample: sample.number)


@pytest.mark.slow
def test_the_target_goes_on_behind_the_open_turn(llm: LLM) -> None:
    systems = ["be kind", "be brief"]
    writer = LocalWriter(llm, PARAMS, systems=systems, chat_template=TEMPLATE)
    found = collected(writer, 6)
    assert [sample.system for sample in found] == systems * 3
    for sample in found:
        opened = f"<system>{sample.system}</system><user>"
        messages = [{"role": "system", "content": sample.system}]
        seed = seed_of(3, [{"sample": sample.number, "messages": messages}])
        params = SamplingParams(
            max_tokens=24, temperature=1.0, seed=seed, stop=["</user><assistant>"]
        )
        alone = llm.generate(byte_tokenizer()(opened)["input_ids"], params)[0]
        assert sample.turns == [alone.text.strip()]
        assert sample.fault == (REASON_CUT if alone.finish_reason == "length" else None)
        assert sample.num_tokens == len(alone.token_ids)


def test_a_turn_ends_where_the_template_ends_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first special token behind the message, or by the text there."""
    writer = LocalWriter(llm, PARAMS, chat_template=TEMPLATE)
    assert writer._params.stop == ("</user><assistant>",)
    writer = LocalWriter(
        llm, PARAMS, chat_template=TEMPLATE.replace("</{{ m.role }}>", "<|mask|>\n")
    )
    assert (writer._params.stop, writer._params.stop_token_ids) == ((), (1,))


@pytest.mark.slow
def test_a_second_turn_follows_the_answer(llm: LLM) -> None:
    long = SamplingParams(max_tokens=24, temperature=1.0, seed=3, stop=("e", "a", "\n", "0"))
    writer = LocalWriter(llm, long, turns=2, chat_template=TEMPLATE)
    found = [one for one in collected(writer, 12) if len(one.turns) == 2]
    assert found
    for sample in found:
        first = {"role": "user", "content": sample.turns[0]}
        asked = [first]
        seed = seed_of(3, [{"sample": sample.number, "messages": asked}])
        prompt = render_chat(llm.tokenizer, asked, chat_template=TEMPLATE)
        params = SamplingParams(max_tokens=24, temperature=1.0, seed=seed, stop=long.stop)
        answer = llm.generate(prompt, params)[0].text
        asked = [first, {"role": "assistant", "content": answer}]
        seed = seed_of(3, [{"sample": sample.number, "messages": asked}])
        prompt = render_chat(llm.tokenizer, [*asked, {"role": "user", "content": "X"}],
                             chat_template=TEMPLATE, continue_final_message=True)[:-1]  # fmt: skip
        params = SamplingParams(
            max_tokens=24, temperature=1.0, seed=seed, stop=(*long.stop, "</user><assistant>")
        )
        assert sample.turns[1] == llm.generate(prompt, params)[0].text.strip()


def test_of_a_dropped_second_turn_the_first_stays(tmp_path: Path) -> None:
    class Two(Reciter):
        def samples(self, take: Any, judge: Any) -> Iterator[WrittenSample]:
            for sample in super().samples(take, judge):
                if sample.fault is None:
                    sample.turns.append("no" if sample.number % 2 else f"Go on, {sample.number}.")
                    sample.fault = judge(sample.turns[1])
                yield sample

    done = write(tmp_path / "out.jsonl", Two())
    assert [len(row["turns"]) for row in rows(tmp_path / "out.jsonl")] == [2, 1] * 6
    assert done.dropped["second turn: fewer than 3 words"] == 6
    assert (done.kept, done.samples) == (12, 18)


def test_a_base_model_begins_documents(llm: LLM) -> None:
    llm.tokenizer.chat_template = None
    found = collected(LocalWriter(llm, PARAMS), 4)
    for sample in found:
        seed = seed_of(3, [{"sample": sample.number, "messages": []}])
        params = SamplingParams(max_tokens=24, temperature=1.0, seed=seed)
        alone = llm.generate([0], params)[0]
        assert sample.turns == [alone.text]
        assert sample.fault == (None if alone.finish_reason == "length" else REASON_ENDED)
    for options in ({"turns": 2}, {"systems": ["be kind"]}, {"thinking": False}):
        message = message_of(lambda: LocalWriter(llm, PARAMS, **options))  # noqa: B023
        assert "has no chat template, so it begins documents: leave --turns" in message
    llm.tokenizer.eos_token = None
    assert "names no token that begins or" in message_of(lambda: LocalWriter(llm, PARAMS))


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}x",
        "{{ raise_exception('no users here') }}",
        "{{ messages[0].content }}",
    ],
)
def test_a_template_without_an_open_turn(llm: LLM, template: str) -> None:
    message = message_of(lambda: LocalWriter(llm, PARAMS, chat_template=template))
    assert "chat template opens no message of the user so" in message and "\n" not in message
    assert "another --chat-template, or bring prompts of your own." in message


def test_a_prompt_that_the_engine_refuses_is_an_error(target_folder: Path) -> None:
    llm = LLM(target_folder, dtype="float32", max_model_len=16)
    writer = LocalWriter(llm, PARAMS, systems=["word " * 40], chat_template=TEMPLATE)
    with pytest.raises(UserError, match="16"):
        collected(writer, 1)
