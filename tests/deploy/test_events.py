"""Server-sent events put together again, however they were cut."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.deploy.events import Event, EventReader

NUM_SPLITS = 1000


def read(parts: list[bytes]) -> list[Event]:
    reader = EventReader()
    return [event for part in parts for event in reader.feed(part)]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        # After the examples of the HTML standard, "Interpreting an event stream".
        ("data: YHOO\ndata: +2\ndata: 10\n\n", [Event("YHOO\n+2\n10")]),
        (": test stream\n\ndata: first\nid: 1\n\ndata:second\nid\n\n", ["first", "second"]),
        ("data:  third\n\n", [" third"]),
        ("data\n\ndata\ndata\n\ndata:\n", ["", "\n"]),
        ("data:test\n\ndata: test\n\n", ["test", "test"]),
        ("event: add\ndata: 1\n\ndata: 2\n\n", [Event("1", "add"), Event("2")]),
        ("event: nothing\n\ndata: 2\n\n", [Event("2")]),  # without data there is no event
        ("data: 1\r\n\r\ndata: 2\r\rdata: 3\n\n", ["1", "2", "3"]),
        ("\ufeffdata: 1\n\n\ufeffdata: 2\n\n", ["1"]),  # one byte order mark, at the start
        ("data: cut", []),
        ("data: cut\n", []),
        ("retry: 10\nwhatever: 1\ndata: a:b\n\n", ["a:b"]),
    ],
)
def test_what_the_standard_says(stream, events):
    expected = [Event(event) if isinstance(event, str) else event for event in events]
    data = stream.encode()
    assert read([data]) == expected
    assert read([data[i : i + 1] for i in range(len(data))]) == expected


LINE = st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=("Cs",)), max_size=9)
DATA = st.lists(LINE, min_size=1, max_size=3).map("\n".join)


@given(
    events=st.lists(DATA, max_size=6),
    # A lone \r before a lone \n would be one end, and is not meant.
    ends=st.lists(st.sampled_from(["\n", "\r\n"]), min_size=1, max_size=4) | st.just(["\r"]),
    comments=st.lists(st.booleans(), max_size=6),
    places=st.lists(st.integers(0, 400), max_size=12),
)
def test_any_stream_cut_anywhere_gives_its_events(events, ends, comments, places):
    text, number = "", 0

    def line(content: str) -> str:
        nonlocal number
        end = ends[number % len(ends)]
        number += 1
        return content + end

    for index, data in enumerate(events):
        if comments[index : index + 1] == [True]:
            text += line(": ping")
        text += "".join(line(f"data: {part}") for part in data.split("\n")) + line("")
    raw = text.encode()
    found = read(cut(raw, [place for place in places if place <= len(raw)]))
    assert [event.data for event in found] == events


def test_a_thousand_random_splits_give_the_same_events(capsys):
    texts = ["Zürich 🦅", "日本語", "line\nbreak", "x" * 200, "", "é" * 40, '{"a": [1, 2]}']
    raw = b"".join(
        b": keep-alive\r\n"
        + b"".join(b"data: " + part.encode() + b"\r\n" for part in text.split("\n"))
        + b"\r\n"
        for text in [*texts, "[DONE]"]
    )
    whole = read([raw])
    assert [event.data for event in whole] == [*texts, "[DONE]"]
    draw, equal, in_character = random.Random(8), 0, 0
    for _ in range(NUM_SPLITS):
        places = [draw.randrange(len(raw) + 1) for _ in range(draw.randrange(1, 60))]
        equal += read(cut(raw, places)) == whole
        # The second or a later byte of a character of several.
        in_character += any(place < len(raw) and raw[place] & 0xC0 == 0x80 for place in places)
    with capsys.disabled():
        print(f" {equal} of {NUM_SPLITS} random splits equal, {in_character} inside characters ")
    assert equal == NUM_SPLITS
    assert in_character > NUM_SPLITS / 2
