"""Recorded traffic, and the newest part that is held out."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.chat import render_chat
from peagle.data.limits import Limits
from peagle.data.recorded import RecordFolder, line_of, new_record_file
from peagle.data.samples import SampleMaker
from peagle.data.traffic import RecordedTurn, collect, hold_out, read_traffic, turns_of
from peagle.errors import UserError
from peagle.models.target import load_tokenizer
from tests.conftest import byte_tokenizer

PAIR2 = Path(__file__).parents[1] / "fixtures" / "pair2"


def write(folder: Path, turns: list[tuple[float, list[int], list[int]]]) -> Path:
    """Record (time, prompt, output) in two files by turns, as two servers do."""
    made = RecordFolder.create(folder)
    files = [new_record_file(made.path, 10.0), new_record_file(made.path, 11.0)]
    for number, (time, prompt, output) in enumerate(turns):
        fields = {"prompt_token_ids": prompt, "response_token_ids": output, "temperature": 0}
        with files[number % 2].open("ab") as file:
            file.write(line_of(None, time, fields, None))
    return folder


def test_turns_are_in_order_and_know_their_conversations(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "records",
        [
            (30.0, [1, 2, 9, 9, 3], [4, 4]),
            (10.0, [1, 2], [9, 9]),  # the turn before
            (20.0, [1, 3], [9, 9]),
            (40.0, [7], [5]),  # too short to learn from
            (50.0, [1, 3], [8, 8]),  # asked again
        ],
    )
    turns, dropped = read_traffic(folder, Limits(10), "x", SampleMaker(None), lm_head=None)
    assert [turn.prompt for turn in turns] == [[1, 2], [1, 3], [1, 2, 9, 9, 3], [1, 3]]
    first, other, later, again = (turn.conversation for turn in turns)
    assert first == later and other == again and first != other
    assert dict(dropped.dropped) == {"no prompt, or an output of less than 2 tokens": 1}
    learned, held = hold_out(turns, 0.25)
    assert [turn.response for turn in held] == [[9, 9], [8, 8]], "with the turn before"
    assert {turn.conversation for turn in learned} == {first}
    joined = collect(turns, Limits(10))
    assert joined.tokens[0].tolist() == [1, 2, 9, 9, 3, 4, 4]
    assert turns_of(joined)[0].prompt == [1, 2] and turns_of(joined)[0].response == [9, 9]


def test_captured_calls_are_tokenised_in_the_order_of_time(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    for hour, prompt in ((2, "b"), (1, "ab")):
        sides = {"Input": {"prompt": prompt}, "Output": {"choices": [{"text": "xy"}]}}
        calls = {f"endpoint{name}": {"data": json.dumps(one)} for name, one in sides.items()}
        line = {"captureData": calls, "eventMetadata": {"inferenceTime": f"2026-01-02T0{hour}:00"}}
        (tmp_path / f"{9 - hour}.jsonl").write_text(json.dumps(line) + "\n")
    turns, dropped = read_traffic(tmp_path, Limits(1000), "x", SampleMaker(tokenizer), lm_head=None)
    assert [tokenizer.decode(turn.prompt) for turn in turns] == ["ab", "b"]
    assert [tokenizer.decode(turn.response) for turn in turns] == ["xy", "xy"]
    assert not dropped.dropped


def test_captured_conversations_need_a_thinking_mode(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(PAIR2 / "target")
    messages = [{"role": "user", "content": "Hi"}]
    message = {"content": "<think>\nSo.\n</think>\n\nHello there."}
    sides = {"Input": {"messages": messages}, "Output": {"choices": [{"message": message}]}}
    calls = {f"endpoint{name}": {"data": json.dumps(one)} for name, one in sides.items()}
    (tmp_path / "x.jsonl").write_text(json.dumps({"captureData": calls}))
    with pytest.raises(UserError, match="say with --thinking or --no-thinking"):
        read_traffic(tmp_path, Limits(10**6), "x", SampleMaker(tokenizer), lm_head=None)
    maker = SampleMaker(tokenizer, thinking=True)
    (turn,), _ = read_traffic(tmp_path, Limits(10**6), "x", maker, lm_head=None)
    assert turn.prompt == render_chat(tokenizer, messages, thinking=True)
    assert "Hello there." in tokenizer.decode(turn.response)


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1), st.sampled_from([0.1, 0.3, 0.9]))
def test_no_conversation_is_on_both_sides(names: list[str], share: float) -> None:
    turns = [RecordedTurn([number], [1, 1], name) for number, name in enumerate(names)]
    learned, held = hold_out(turns, share)
    assert sorted(turn.prompt for turn in learned + held) == [turn.prompt for turn in turns]
    assert not {turn.conversation for turn in learned} & {turn.conversation for turn in held}
    assert len(held) >= share * len(turns) and turns[-1] in held
    # Without the conversation whose last turn is the oldest there would be too few.
    last = {turn.conversation: number for number, turn in enumerate(turns)}
    oldest = min((turn.conversation for turn in held), key=last.__getitem__)
    assert sum(turn.conversation != oldest for turn in held) < share * len(turns)
    assert all(last[turn.conversation] < last[oldest] for turn in learned)
