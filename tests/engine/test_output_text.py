"""Stop strings: where they end the text, and that steps of any size end it alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle import LLM, SamplingParams
from peagle.engine.detokenizer import OutputText
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
