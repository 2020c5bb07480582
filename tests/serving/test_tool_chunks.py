"""Tool calls in any text, calls of all families, broken ones and noise, cut into any chunks."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.serving.tool_parsers import PARSERS, ForcedCall, ForcedCalls, parser_for
from peagle.serving.tools import ContentDelta
from serving.tool_calls import NAMES, TOOLS, hermes, llama, parse

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=4), JSON, max_size=3).flatmap(
    lambda value: st.sampled_from(
        [
            json.dumps(value),
            json.dumps(value, ensure_ascii=False, separators=(",", ":")),
            json.dumps(value, indent=1),
        ]
    )
)
NOISE = st.one_of(
    st.text(alphabet='<>{}[]":,;\\ \nab|_', max_size=8),
    st.text(max_size=8),
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]"),
            *("[CALL_ID]", '{"name": "get"', '"arguments": {', '"name": "b-2"', "get_weather{"),
            *("[{", "}]", "; ", '{"name": "other", "arguments": {}}'),
        ]
    ),
)
FORMS = [
    *('<tool_call>\n{{"name": "{0}", "arguments": {1}}}\n</tool_call>', "{0}{1}"),
    *('<tool_call>{{"arguments": {1}, "name": "{0}"}}</tool_call>', '<tool_call>{{"name":"{0}"}}'),
    *('{{"name": "{0}", "parameters": {1}}}', '{{"id": "x", "name": "{0}", "arguments": {1}}}'),
    *("[TOOL_CALLS]{0}{1}", "[TOOL_CALLS]{0}[ARGS]{1}", "[TOOL_CALLS]{0}[CALL_ID]abc[ARGS]{1}"),
    *(
        '[TOOL_CALLS] [{{"name": "{0}", "arguments": {1}}}]',
        ', {{"name": "{0}", "arguments": {1}}}',
    ),
    '[{{"name": "{0}", "arguments": {1}, "id": "x"}}, {{"name": "{0}", "arguments": {1}}}]',
]
CALLS = st.builds(str.format, st.sampled_from(FORMS), st.sampled_from([*NAMES, "other"]), ARGUMENTS)


@st.composite
def outputs(draw: st.DrawFn) -> str:
    """Calls of all families, some broken, and noise."""
    pieces: list[str] = []
    for piece in draw(st.lists(CALLS | NOISE, max_size=5)):
        if piece and draw(st.integers(0, 3)) == 0:
            at = draw(st.integers(0, len(piece) - 1))
            broken = [piece[:at], piece[:at] + piece[at + 1 :], piece[:at] + "}" + piece[at:]]
            piece = draw(st.sampled_from(broken))
        pieces.append(piece)
    return "".join(pieces)


ALL_PARSERS = {
    **{kind: lambda kind=kind: PARSERS[kind](NAMES) for kind in PARSERS},
    "named": lambda: ForcedCall("get"),
    "required": lambda: ForcedCalls(NAMES),
}


@pytest.mark.parametrize("kind", ALL_PARSERS)
@settings(deadline=None, max_examples=80)
@given(text=outputs(), data=st.data())
def test_chunks_make_no_difference(kind, text, data):
    expected = parse(ALL_PARSERS[kind](), text)
    assert parse(ALL_PARSERS[kind](), *text) == expected
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert parse(ALL_PARSERS[kind](), *chunks) == expected


FRAME = (
    r"(?:[\s{}\[\],:;]|</?tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|\[CALL_ID\]\w*|\[ARGS\]"
    r'|"(?:name|arguments|parameters)"|"(?:id|type)"\s*:\s*"(?:[^"\\]|\\[\s\S])*")*'
)


def account_of(deltas: list[Any]) -> str:
    """A pattern of all texts from which these deltas may come."""
    pattern = ""
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            pattern += re.escape(delta.text)
            continue
        name, arguments = f'"?{delta.name}"?', re.escape(delta.arguments)
        orders = [f"{name}{FRAME}{arguments}", f"{arguments}{FRAME}{name}"]
        orders += [name] * (delta.arguments == "{}")
        pattern += f"{FRAME}(?:{'|'.join(orders)}){FRAME}"
    return pattern


@pytest.mark.parametrize("kind", [k for k in ALL_PARSERS if k != "named"])
@settings(deadline=None, max_examples=80)
@given(text=outputs())
def test_nothing_is_lost(kind, text):
    deltas = ALL_PARSERS[kind]().add(text, final=True)
    pattern = account_of(deltas)
    assert re.fullmatch(pattern + r"\s*" if "(?:" in pattern else pattern, text), deltas


@settings(deadline=None, max_examples=80)
@given(text=outputs())
def test_all_text_is_the_arguments_of_a_named_call(text):
    assert parse(ForcedCall("get"), text) == (None, [("get", text)] if text else [])


PROSE = st.text(alphabet="ab <_{\n.", max_size=6)


@settings(deadline=None, max_examples=80)
@given(
    before=PROSE,
    calls=st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=4),
    after=PROSE,
)
def test_hermes_reads_what_was_written(before, calls, after):
    text = before + "\n".join(hermes(*call) for call in calls) + after
    kept = [part for part in (before, after) if part.strip()]
    assert parse(parser_for("hermes", TOOLS), text) == ("".join(kept) or None, calls)


@settings(deadline=None, max_examples=80)
@given(
    calls=st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=4),
    data=st.data(),
)
def test_whole_answers_are_read_as_written(calls, data):
    objects = [llama(*call) for call in calls]
    array = f"[{', '.join(objects)}]"
    texts = [
        ("llama3_json", " ; ".join(objects)),
        ("llama3_json", "<|python_tag|>" + ";".join(objects)),
        ("mistral", array),
        ("mistral", "[TOOL_CALLS]" + array),
        ("mistral", "".join(f"[TOOL_CALLS]{name}{arguments}" for name, arguments in calls)),
        ("mistral", "".join(f"{name}{arguments}" for name, arguments in calls)),
        ("required", array),
    ]
    kind, text = data.draw(st.sampled_from(texts))
    assert parse(ALL_PARSERS[kind](), text) == (None, calls)


def test_a_long_output_takes_linear_time():
    # Quadratic in these lengths would be noticed.
    text = "<tool_call>" * 20_000 + '[{"<' * 20_000
    assert parse(parser_for("hermes", TOOLS), text) == (text, [])
    assert parse(parser_for("mistral", TOOLS), "[TOOL_CALLS]" * 20_000)[1] == []
