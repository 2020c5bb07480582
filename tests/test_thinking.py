"""Reasoning and answer told apart: channels of gpt-oss and Gemma 4, cut into any pieces."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.markers import SIGN, unmarked
from peagle.thinking import GemmaSplitter, HarmonySplitter, ThinkingSplitter, family_splitter

FIXTURES = Path(__file__).parent / "fixtures"
TEMPLATES = FIXTURES / "chat_templates"
NAMES = {kind: kind.markers for kind in (HarmonySplitter, GemmaSplitter)}


def signed(text: str, kind: type[HarmonySplitter | GemmaSplitter] = HarmonySplitter) -> str:
    """A text whose names of markers are marker tokens."""
    pattern = "|".join(map(re.escape, NAMES[kind]))
    return re.sub(pattern, lambda found: SIGN + found[0], text)


def split(splitter: Any, *chunks: str) -> tuple[str, str]:
    """Reasoning and answer of a text in chunks."""
    pieces = [piece for chunk in chunks for piece in splitter.add(chunk)]
    pieces += splitter.add("", final=True)
    assert all(piece.text for piece in pieces)
    reasoning, answer = (
        "".join(piece.text for piece in pieces if piece.is_reasoning == kind)
        for kind in (True, False)
    )
    return reasoning, answer


# ---- gpt-oss ----

FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.get<|message|>{}<|call|>"


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("", "", ""),
        (f"{FINAL}Hi.<|return|>", "", "Hi."),
        (f"{ANALYSIS}Think.{NEXT}{FINAL}Hi.<|return|>", "Think.", "Hi."),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c<|return|>", "a\nb", "c"),
        (f"<|channel|>commentary<|message|>First.{NEXT}{FINAL}c", "", "First.\nc"),
        # A call is part of the answer, in one form.
        (f"{ANALYSIS}a{NEXT}{CALL}", "a", CALL),
        (f"{ANALYSIS}a{NEXT} to=functions.get<|channel|>commentary json<|message|>{{}}<|call|>",
         "a", CALL),
        (" to=functions.get<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", "", CALL),
        ("<|channel|>commentary to=functions.get<|constrain|>json<|message|>{}<|call|>", "", CALL),
        ("<|channel|>commentary to=functions.get code<|message|>{}<|call|>", "", CALL),
        ("<|channel|>analysis to=functions.get<|message|>{}<|call|>", "", CALL),
        (f"{CALL}<|start|>assistant{CALL}", "", CALL + CALL),
        # The model's own tools: a thought in the channel of thoughts, else a call.
        ("<|channel|>analysis to=python code<|message|>1+1<|call|>", "1+1", ""),
        (
            "<|channel|>commentary to=browser.search<|message|>{}<|call|>",
            "",
            "<|channel|>commentary to=browser.search<|message|>{}<|call|>",
        ),
        # Cut off.
        (f"{ANALYSIS}unfini", "unfini", ""),
        (f"{ANALYSIS}a{NEXT}<|channel|>fin", "a", ""),
        ("<|channel|>", "", ""),
        (CALL[:-9], "", CALL[:-9]),
        # Broken: no text is lost.
        ("Hello there<|return|>", "", "Hello there"),
        ("  {} \n", "", "  {} \n"),
        ("to=x", "", "to=x"),
        ("<|message|>no header<|return|>", "", "no header"),
        ("<|channel|>final Hello<|return|>", "", "Hello"),
        ("<|channel|>analysis Why<|end|>", "Why", ""),
        ("<|channel|>weird<|message|>Hi.<|return|>", "", "Hi."),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "", "{}"),
        (f"{ANALYSIS}a<|start|>assistant{FINAL}b<|return|>", "a", "b"),
        (f"{ANALYSIS}a{FINAL}b<|return|>", "a", "b"),
        (f"{CALL[:-8]}<|start|>assistant{FINAL}b", "", f"{CALL[:-8]}<|end|>b"),
        (f"{ANALYSIS}a<|end|>\n<|start|>assistant{FINAL}c", "a", "c"),
        (f"<|start|>assistant{FINAL}Hi.<|return|>", "", "Hi."),
    ],
)  # fmt: skip
def test_messages_of_gpt_oss(text: str, reasoning: str, answer: str) -> None:
    for chunks in ([signed(text)], signed(text)):
        found, rest = split(HarmonySplitter(), *chunks)
        assert (found, unmarked(rest)) == (reasoning, answer)


def test_a_text_that_only_spells_a_marker_is_text() -> None:
    text = f"{signed(FINAL)}It writes {ANALYSIS}a{NEXT}.{signed('<|return|>')}"
    assert split(HarmonySplitter(), text) == ("", f"It writes {ANALYSIS}a{NEXT}.")


def test_text_is_given_at_once() -> None:
    splitter = HarmonySplitter()
    assert not [*splitter.add(signed("<|channel|>analysis<|message|>"))]
    assert [piece.text for piece in splitter.add("Wh")] == ["Wh"]
    assert [piece.text for piece in splitter.add("y <|end")] == ["y <|end"]


# What openai-harmony 0.0.8 reads in outputs: (channel, recipient, text) of each message.
REFERENCE = json.loads((FIXTURES / "harmony_messages.json").read_text())


@pytest.mark.parametrize("case", REFERENCE, ids=lambda case: case["output"])
def test_the_reference_reads_the_same(case: dict[str, Any]) -> None:
    reasoning, answer = [], []
    for channel, recipient, text in case["messages"]:
        if recipient is not None and (recipient != "python"):
            answer.append(f"<|channel|>commentary to={recipient}<|message|>{text}")
        else:
            (reasoning if channel == "analysis" else answer).append(text)
    found, rest = split(HarmonySplitter(), signed(case["output"]))
    assert found == "\n".join(reasoning)
    assert re.sub(r"<\|(call|end|return)\|>", "", unmarked(rest)) == "".join(answer)


def test_the_recorded_reference_is_what_openai_harmony_reads() -> None:
    harmony = pytest.importorskip("openai_harmony")
    if "TIKTOKEN_ENCODINGS_BASE" not in os.environ:
        pytest.skip("needs TIKTOKEN_ENCODINGS_BASE, a folder with o200k_base.tiktoken")
    encoding = harmony.load_harmony_encoding("HarmonyGptOss")
    for case in REFERENCE:
        parser = harmony.StreamableParser(encoding, role=harmony.Role.ASSISTANT)
        for token in encoding.encode(case["output"], allowed_special="all"):
            parser.process(token)
        parser.process_eos()
        assert case["messages"] == [
            [message.channel, message.recipient, message.content[0].text]
            for message in parser.messages
        ]


# ---- Gemma 4 ----

TOOL = "<|tool_call>call:get{}<tool_call|>"


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("", "", ""),
        ("Hi.\n", "", "Hi.\n"),
        ("<|channel>thought\nWhy.\n<channel|>Hi.", "Why.", "Hi."),
        ("<|channel>thought\nWhy?\n\nSo.<channel|>\n\nHi.\n", "Why?\n\nSo.", "Hi.\n"),
        ("<|channel>thought\n<channel|>Hi.", "", "Hi."),
        (f"<|channel>thought\nWhy.<channel|>{TOOL}", "Why.", TOOL),
        (f"<|channel>thought\nWhy.\n{TOOL}", "Why.", TOOL),
        (f"{TOOL}<|channel>thought\na<channel|>b<|channel>thought\nc<channel|>", "a\nc",
         f"{TOOL}b"),
        # Cut off, or broken.
        ("<|channel>thou", "", ""),
        ("<|channel>thought\nunfini", "unfini", ""),
        ("<|channel>Let me see<channel|>Hi.", "Let me see", "Hi."),
        ("Hi.<channel|> So.", "", "Hi. So."),
    ],
)  # fmt: skip
def test_channels_of_gemma_4(text: str, reasoning: str, answer: str) -> None:
    text = signed(text, GemmaSplitter)
    for chunks in ([text], text):
        found, rest = split(GemmaSplitter(), *chunks)
        assert (found, unmarked(rest)) == (reasoning, answer)


# ---- all ----

PIECES = st.sampled_from(
    [
        *(SIGN + name for names in NAMES.values() for name in names),
        *(
            "assistant",
            "analysis",
            "final",
            "commentary",
            " to=functions.get",
            " json",
            "thought\n",
        ),
        *("\n", " ", "a", "é", "<think>", "</think>", "<|end|>", "to="),
    ]
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["harmony", "gemma", "think", "opened"])
@settings(deadline=None, max_examples=150)
@given(pieces=st.lists(PIECES, max_size=14), data=st.data())
def test_chunks_make_no_difference(kind: str, pieces: list[str], data: st.DataObject) -> None:
    def splitter() -> Any:
        if kind in ("think", "opened"):
            return ThinkingSplitter(opened=kind == "opened")
        return HarmonySplitter() if kind == "harmony" else GemmaSplitter()

    text = "".join(pieces)
    expected = split(splitter(), text)
    assert split(splitter(), *text) == expected
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert split(splitter(), *chunks) == expected


@settings(deadline=None, max_examples=150)
@given(text=st.text("ab<|>c \n", max_size=20), channel=st.sampled_from(["analysis", "final"]))
def test_text_of_a_message_is_kept(text: str, channel: str) -> None:
    output = f"{signed(f'<|channel|>{channel}<|message|>')}{text}{signed('<|end|>')}"
    assert split(HarmonySplitter(), output)[channel == "final"] == text


def test_the_template_tells_the_family() -> None:
    kinds = {path.stem: type(family_splitter(path.read_text())) for path in TEMPLATES.iterdir()}
    assert kinds == {
        "gpt-oss": HarmonySplitter,
        "gemma-4": GemmaSplitter,
        "qwen3-coder": type(None),
    }
