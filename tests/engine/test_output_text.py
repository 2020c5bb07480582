"""Stop strings: where they end the text, and that steps of any size end it alike."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle import LLM, SamplingParams
from peagle.engine.detokenizer import OutputText
from peagle.markers import SIGN, marker_token_ids
from peagle.models.target import load_tokenizer

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def tokenizer(target_folder: Path):
    return load_tokenizer(str(target_folder))


def expected_end(text: str, stops: list[str]) -> int | None:
    """Where the text is cut, read character by character."""
    for end in range(1, len(text) + 1):
        begins = [text[:end].find(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return min(begins)
    return None


@given(
    text=st.text("ab\n", max_size=30),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4),
    lengths=LENGTHS,
)
def test_the_text_ends_at_the_first_complete_stop_string(
    tokenizer, text: str, stops: list[str], lengths: list[int]
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text), "one token a character"
    written, pieces, position, stopped = OutputText(tokenizer, stops), [], 0, False
    for length in lengths * len(ids):
        chunk = ids[position : position + length]
        if not chunk or stopped:
            break
        position += length
        step = written.add(chunk, final=position >= len(ids))
        pieces.append(step.text)
        stopped = step.stop is not None
        assert text.startswith("".join(pieces)), "what is out is never taken back"
    cut = expected_end(text, stops)
    assert stopped == (cut is not None)
    assert "".join(pieces) == written.text == (text if cut is None else text[:cut])


def test_a_possible_beginning_is_held_back_until_it_is_none(tokenizer) -> None:
    written = OutputText(tokenizer, ["abc"])
    ids = tokenizer.encode("xabxab", add_special_tokens=False)
    assert [written.add([i]).text for i in ids[:-1]] == ["x", "", "", "abx", ""]
    assert written.add([ids[-1]], final=True).text == "ab"


@given(
    text=st.text("ab\né", max_size=20).map(lambda text: text.replace("a", "<|mask|>")),
    stops=st.lists(st.sampled_from(["b", "bb", "\n", "é", "bé", "<|", "|>"]), max_size=2),
    lengths=LENGTHS,
)
def test_markers_are_text_that_no_stop_string_reaches(
    tokenizer, text: str, stops: list[str], lengths: list[int]
) -> None:
    """A marker token is a border: both sides are texts of their own."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    marker = tokenizer.convert_tokens_to_ids("<|mask|>")
    parts, expected = text.split("<|mask|>"), ""
    for number, part in enumerate(parts):
        cut = expected_end(part, stops)
        expected += f"{SIGN}<|mask|>" * (number > 0) + part[:cut]
        if cut is not None:
            break
    written, position = OutputText(tokenizer, stops, [marker]), 0
    for length in lengths * (len(ids) + 1):
        chunk = ids[position : position + length]
        position += length
        step = written.add(chunk, final=position >= len(ids))
        if position >= len(ids) or step.stop is not None:
            break
    assert written.text == expected
    # Without markers, special tokens have no text.
    assert SIGN not in OutputText(tokenizer).add(ids, final=True).text


def test_a_marker_ends_a_character_that_is_incomplete(tokenizer) -> None:
    first, second = tokenizer.encode("é", add_special_tokens=False)
    marker = tokenizer.convert_tokens_to_ids("<|mask|>")
    written = OutputText(tokenizer, (), [marker])
    assert [written.add([i]).text for i in (first, marker)] == ["", f"\ufffd{SIGN}<|mask|>"]
    assert written.add([first, second], final=True).text == "é"


def test_marker_token_ids_are_those_of_added_tokens(tokenizer) -> None:
    names = ("<|mask|>", "a", "<|none|>")
    assert marker_token_ids(tokenizer, names) == (tokenizer.convert_tokens_to_ids("<|mask|>"),)
    assert marker_token_ids(tokenizer, ()) == ()


def test_the_engine_writes_markers_on_request(target_folder: Path) -> None:
    llm = LLM(target_folder)
    marker = llm.tokenizer.convert_tokens_to_ids("<|mask|>")
    options = {"max_tokens": 3, "logit_bias": {marker: 100.0}}
    for ids, text in (((), ""), ((marker,), f"{SIGN}<|mask|>" * 3)):
        chunks = list(llm.stream("x", SamplingParams(**options, marker_token_ids=ids)))
        assert "".join(chunk.text for chunk in chunks) == text
        assert chunks[-1].output is not None and chunks[-1].output.text == text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "peagle", "eagle3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stopped_output_is_the_beginning_of_the_unstopped(
    target_folder: Path, head_folders: Callable[..., Path], kind: str, temperature: float
) -> None:
    head = None
    if kind != "plain":
        folder = str(head_folders(parallel=kind == "peagle"))
        head = {"model": folder, "num_speculative_tokens": 4}
    llm = LLM(target_folder, speculative_config=head, dtype="float64")
    options = {"max_tokens": 40, "ignore_eos": True, "temperature": temperature, "seed": 3}
    (whole,) = llm.generate("hello", SamplingParams(**options))
    free = llm.engine.scheduler.blocks.num_free_blocks
    # A byte that no character begins with shows as U+FFFD before the next one is known.
    pairs = (whole.text[at : at + 2] for at in range(4, len(whole.text) - 1))
    stop = next(pair for pair in pairs if "\ufffd" not in pair)
    chunks = list(llm.stream("hello", SamplingParams(**options, stop=(stop, "never there"))))
    cut = chunks[-1].output
    assert cut is not None
    assert "".join(chunk.text for chunk in chunks) == cut.text
    assert [t for chunk in chunks for t in chunk.token_ids] == cut.token_ids
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.find(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert stop in llm.tokenizer.decode(cut.token_ids, skip_special_tokens=True)
    assert stop not in llm.tokenizer.decode(cut.token_ids[:-1], skip_special_tokens=True)
    assert llm.engine.scheduler.blocks.num_free_blocks == free
    assert not llm.engine.has_unfinished
