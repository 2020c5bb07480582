"""Tool calls in what models write: examples of every family, forced output, text in chunks."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.markers import SIGN, unmarked
from peagle.serving.tool_parsers import (
    PARSERS,
    ForcedCall,
    ForcedCalls,
    MistralParser,
    ToolCallParser,
    detect_parser,
    parser_for,
)
from peagle.serving.tools import CallDelta, ContentDelta, message_from

NAMES = ("get", "get_weather", "b-2")
TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def parse(
    parser: ToolCallParser, *chunks: str
) -> tuple[str | None, list[tuple[str | None, str | None]]]:
    """Content and (name, arguments) of every call."""
    deltas = [delta for chunk in chunks for delta in parser.add(chunk)]
    deltas += parser.add("", final=True)
    content, calls = message_from(deltas)
    return content, [(c["function"]["name"], c["function"]["arguments"]) for c in calls]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def coder(name: str, **values: str) -> str:
    """A call as Qwen3-Coder's chat template shows it."""
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def marked(text: str) -> str:
    """A text in which the names of gpt-oss's and Gemma 4's marker tokens are such tokens."""
    return re.sub(r'<\|[a-z_"]+\|?>|<[a-z_]+\|>', lambda found: SIGN + found[0], text)


def oss(name: str, arguments: str) -> str:
    """A call of gpt-oss, as `HarmonySplitter` gives it."""
    return marked(f"<|channel|>commentary to=functions.{name}<|message|>{arguments}<|call|>")


def gemma(name: str, members: str) -> str:
    """A call of Gemma 4, with strings between "^"."""
    members = members.replace("^", '<|"|>')
    return marked(f"<|tool_call>call:{name}{{{members}}}<tool_call|>")


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


# ---- free output ----

WEATHER = '{"city": "Zürich", "days": [1, 2], "note": "a \\"}]\\" b"}'

DOUBLE_NAME = '{"name": "get", "name": "b-2", "parameters": {}}'
DOUBLE_ARGUMENTS = '{"parameters": {"a": 1}, "name": "get", "parameters": {}}'


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("hermes", "Hello.", "Hello.", []),
        ("hermes", "", None, []),
        ("hermes", " \n ", " \n ", []),
        ("hermes", hermes("get", WEATHER), None, [("get", WEATHER)]),
        ("hermes", "\n\n" + hermes("get", "{}") + "\n", None, [("get", "{}")]),
        (
            "hermes",
            f"I look.\n{hermes('get', '{}')}\n{hermes('get_weather', WEATHER)}",
            "I look.\n",
            [("get", "{}"), ("get_weather", WEATHER)],
        ),
        ("hermes", f"{hermes('get', '{}')}\n Done.", "\n Done.", [("get", "{}")]),
        (
            "hermes",
            '<tool_call>{"arguments":{"a":{}},"name":"get"}</tool_call>',
            None,
            [("get", '{"a":{}}')],
        ),
        ("hermes", '<tool_call>{"name": "get"}</tool_call>', None, [("get", "{}")]),
        (
            "hermes",
            '<tool_call>{"type": "function", "name": "get", "arguments": {}, "id": "}"}',
            None,
            [("get", "{}")],
        ),
        # Of another function, or no call at all: content as it is.
        ("hermes", hermes("other", "{}"), hermes("other", "{}"), []),
        ("hermes", "<tool_call>\nget()</tool_call>", "<tool_call>\nget()</tool_call>", []),
        ("hermes", hermes("get", "[1]"), hermes("get", "[1]"), []),
        ("hermes", hermes("get", '"{}"'), hermes("get", '"{}"'), []),
        ("hermes", '{"name": "get", "arguments": {}}', '{"name": "get", "arguments": {}}', []),
        ("hermes", '<tool_call>{"name": "get", "argu', '<tool_call>{"name": "get", "argu', []),
        ("hermes", "a < b <tool_calls <tool", "a < b <tool_calls <tool", []),
        (
            "hermes",
            "<tool_call><tool_call>" + hermes("get", "{}"),
            "<tool_call><tool_call>",
            [("get", "{}")],
        ),
        (
            "hermes",
            '<tool_call>{"id": "' + hermes("get", "{}"),
            '<tool_call>{"id": "',
            [("get", "{}")],
        ),
        # Cut off, without its end, or broken within: the call stands, the rest is content.
        ("hermes", hermes("get", WEATHER)[:60], None, [("get", WEATHER[:19])]),
        ("hermes", hermes("get", "{}")[:-13], None, [("get", "{}")]),
        ("hermes", hermes("get", "{}").replace("}}", "}"), None, [("get", "{}")]),
        (
            "hermes",
            hermes("get", '{"a": [1}') + "?",
            "}}\n</tool_call>?",
            [("get", '{"a": [1')],
        ),
        ("hermes", hermes("get", '{"a": True\n}'), None, [("get", '{"a": True\n}')]),
        ("llama3_json", llama("get", WEATHER), None, [("get", WEATHER)]),
        ("llama3_json", "<|python_tag|>" + llama("get", "{}"), None, [("get", "{}")]),
        (
            "llama3_json",
            f"{llama('get', '{}')}; {llama('get_weather', WEATHER)}",
            None,
            [("get", "{}"), ("get_weather", WEATHER)],
        ),
        (
            "llama3_json",
            f"<|python_tag|>{llama('get', '{}')};<|python_tag|>{llama('b-2', '{}')}\n",
            None,
            [("get", "{}"), ("b-2", "{}")],
        ),
        ("llama3_json", f"Look: {llama('get', '{}')}", f"Look: {llama('get', '{}')}", []),
        ("llama3_json", llama("get", "{}") + "; or", "; or", [("get", "{}")]),
        ("llama3_json", '{"title": "get"}', '{"title": "get"}', []),
        ("llama3_json", '<|python_tag|>get.call(a="b")', '<|python_tag|>get.call(a="b")', []),
        (
            "mistral",
            f'[TOOL_CALLS] [{{"name": "get", "arguments": {WEATHER}}}]',
            None,
            [("get", WEATHER)],
        ),
        (
            "mistral",
            '[{"name": "get", "arguments": {}, "id": "abcdef"}, {"name": "b-2", "arguments": {}}]',
            None,
            [("get", "{}"), ("b-2", "{}")],
        ),
        ("mistral", f"Now[TOOL_CALLS]get{WEATHER}", "Now", [("get", WEATHER)]),
        (
            "mistral",
            f"[TOOL_CALLS]get{{}}[TOOL_CALLS]get_weather{WEATHER}",
            None,
            [("get", "{}"), ("get_weather", WEATHER)],
        ),
        ("mistral", "get_weather{}get{}", None, [("get_weather", "{}"), ("get", "{}")]),
        (
            "mistral",
            '[TOOL_CALLS]get[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}[TOOL_CALLS]b-2[ARGS]{}',
            None,
            [("get", '{"a": 1}'), ("b-2", "{}")],
        ),
        ("mistral", "[1, 2]", "[1, 2]", []),
        ("mistral", "get {}", "get {}", []),
        ("mistral", "[get{}", "[get{}", []),
        ("mistral", "[TOOL_CALLS]other{}", "[TOOL_CALLS]other{}", []),
        (
            "mistral",
            '[{"name": "get", "arguments": {}}, {"name": "other", "arguments": {}}]',
            ', {"name": "other", "arguments": {}}]',
            [("get", "{}")],
        ),
        # What follows a call and belongs to none is not lost either.
        (
            "llama3_json",
            '{"name": "get", "parameters": {}, <|python_tag|>{"name": "b-2"}',
            ", ",
            [("get", "{}"), ("b-2", "{}")],
        ),
        (
            "mistral",
            '[{"name": "get", "arguments": {}}, [TOOL_CALLS]b-2{}',
            ", ",
            [("get", "{}"), ("b-2", "{}")],
        ),
        ("llama3_json", DOUBLE_NAME, DOUBLE_NAME, []),
        ("llama3_json", DOUBLE_ARGUMENTS, DOUBLE_ARGUMENTS, []),
        ("qwen3_coder", coder("get", city="Zürich"), None, [("get", '{"city": "Zürich"}')]),
        ("qwen3_coder", coder("get"), None, [("get", "{}")]),
        (
            "qwen3_coder",
            f"I look.\n{coder('get', a='x', b='')}\n{coder('b-2', c='1')} Done.",
            "I look.\n Done.",
            [("get", '{"a": "x", "b": ""}'), ("b-2", '{"c": "1"}')],
        ),
        (
            "qwen3_coder",
            coder("get", code='\nif a < b:\n\tprint("é\\n")\n'),
            None,
            [("get", json.dumps({"code": '\nif a < b:\n\tprint("é\\n")\n'}, ensure_ascii=False))],
        ),
        ("qwen3_coder", "<function=get>\n</function>", None, [("get", "{}")]),
        (
            "qwen3_coder",
            "<tool_call><function=get><parameter=a>x</parameter></function></tool_call>",
            None,
            [("get", '{"a": "x"}')],
        ),
        # Of another function, cut off, or broken.
        ("qwen3_coder", coder("other"), coder("other"), []),
        ("qwen3_coder", "<tool_call> <function", "<tool_call> <function", []),
        ("qwen3_coder", coder("get", a="x y")[:42], None, [("get", '{"a": "x')]),
        ("qwen3_coder", coder("get", a="x")[:39], None, [("get", "")]),
        ("qwen3_coder", "<function=get>\nno", "no", [("get", "{}")]),
        ("openai", oss("get", WEATHER), None, [("get", WEATHER)]),
        ("openai", "Look." + oss("get", "{}"), "Look.", [("get", "{}")]),
        ("openai", oss("get", "{}") + oss("b-2", '{"a": 1}'), None,
         [("get", "{}"), ("b-2", '{"a": 1}')]),
        ("openai", oss("get", ""), None, [("get", "{}")]),
        ("openai", oss("get", "{}").replace("functions.", ""), None, [("get", "{}")]),
        # Of another function, cut off, no JSON, or only spelt.
        ("openai", oss("other", "{}"), unmarked(oss("other", "{}")), []),
        ("openai", oss("get", '{"a": 1}')[:-11], None, [("get", '{"a": ')]),
        ("openai", oss("get", "{}")[:40], unmarked(oss("get", "{}")[:40]), []),
        ("openai", oss("get", "{a: True"), None, [("get", "{a: True")]),
        ("openai", oss("get", "{}").replace("call|", "end|") + "So.", "So.", [("get", "{}")]),
        ("openai", unmarked(oss("get", "{}")), unmarked(oss("get", "{}")), []),
        ("gemma4", gemma("get", ""), None, [("get", "{}")]),
        (
            "gemma4",
            gemma("get", 'a:^x "y"\n{,}^,n:-1.50,b:true,c:null,d:[1,^z^,[]],e:{f:^^,g:{}}'),
            None,
            [
                (
                    "get",
                    r'{"a": "x \"y\"\n{,}", "n": -1.50, "b": true, "c": null, '
                    '"d": [1, "z", []], "e": {"f": "", "g": {}}}',
                )
            ],
        ),
        (
            "gemma4",
            "Look." + gemma("get", "a:1") + "\n" + gemma("b-2", "a:^b^") + "Done.",
            "Look.Done.",
            [("get", '{"a": 1}'), ("b-2", '{"a": "b"}')],
        ),
        # In the notation of JSON or of Python, with blanks, with a comma too many.
        ("gemma4", gemma("get", '"a": "x\\"y", ^b^ : [1, 2,],'), None,
         [("get", r'{"a": "x\"y", "b": [1, 2]}')]),
        ("gemma4", gemma("get", "a:True,b:None,c:NaN,d:new york,e:"), None,
         [("get", '{"a": true, "b": null, "c": "NaN", "d": "new york", "e": ""}')]),
        # In quotes, and no JSON between them.
        ("gemma4", gemma("get", '"b\\q": "c\\q\n",d:["\n"]'), None,
         [("get", r'{"b\\q": "c\\q\n", "d": ["\n"]}')]),
        # Of another function, cut off, broken, or only spelt.
        ("gemma4", gemma("get", "a:[1,,2]"), ",2]}<tool_call|>", [("get", '{"a": [1]}')]),
        ("gemma4", gemma("other", "a:^b^"), unmarked(gemma("other", "a:^b^")), []),
        ("gemma4", gemma("get", "a:^bc^")[:31], None, [("get", '{"a": "b')]),
        ("gemma4", gemma("get", "a:^b^,cd:12")[:40], None, [("get", '{"a": "b"')]),
        ("gemma4", gemma("get", "a:^b^,c:12")[:42], None, [("get", '{"a": "b", "c": ')]),
        ("gemma4", gemma("get", "a:[^b"), None, [("get", '{"a": ["b}"]}')]),
        ("gemma4", gemma("get", "a:^b^ c"), " c}<tool_call|>", [("get", '{"a": "b"}')]),
        ("gemma4", gemma("get", "hello"), "hello}<tool_call|>", [("get", "{}")]),
        ("gemma4", unmarked(gemma("get", "")), unmarked(gemma("get", "")), []),
        # A marker that is a special token, in a family whose text may have it either way.
        ("mistral", f"{SIGN}[TOOL_CALLS]get{SIGN}[ARGS]{{}}", None, [("get", "{}")]),
        ("hermes", SIGN + hermes("get", "{}"), None, [("get", "{}")]),
        ("none", hermes("get", "{}"), hermes("get", "{}"), []),
    ],
)  # fmt: skip
def test_free_output(kind, text, content, calls):
    assert parse(parser_for(kind, TOOLS), text) == (content, calls)
    assert parse(parser_for(kind, TOOLS, "auto"), *text) == (content, calls)


def test_without_tools_or_with_none_everything_is_content():
    text = hermes("get", "{}")
    assert parse(parser_for("hermes", TOOLS, "none"), text) == (text, [])
    assert parse(parser_for("hermes", None), text) == (text, [])
    assert parse(parser_for("hermes", [], "auto"), text) == (text, [])


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("hermes", '<tool_call>\n{"name": "get", "arguments": '),
        ("llama3_json", '{"name": "get", "parameters": '),
        ("mistral", '[TOOL_CALLS] [{"name": "get", "arguments": '),
        ("mistral", "[TOOL_CALLS]get"),
        ("mistral", "get"),
    ],
)
def test_arguments_come_as_they_are_written(kind, head):
    parser = parser_for(kind, TOOLS)
    assert all(parser.add(char) == [] for char in head)
    (first,) = parser.add(WEATHER[0])
    assert isinstance(first, CallDelta)
    assert (first.index, first.name, first.arguments) == (0, "get", "{")
    assert re.fullmatch(r"call_[A-Za-z0-9]{24}", first.id or "")
    for char in WEATHER[1:]:
        assert parser.add(char) == [CallDelta(0, char)]


TYPED = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "parameters": {
                "type": "object",
                "properties": {
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "where": {"type": "object"},
                    "limit": {"type": ["integer", "null"]},
                    "kind": {"enum": [1, 2]},
                    "note": {"type": ["string", "null"]},
                    "text": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                    "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                },
            },
        },
    }
]


def test_schemas_decide_what_a_written_value_is():
    values = {"days": "3", "exact": "True", "where": '{"a": [1]}', "limit": "null", "kind": "2"}
    values |= {"note": "null", "text": "12", "count": "many", "unknown": "7"}
    for chunks in ([coder("get", **values)], coder("get", **values)):
        content, [(name, arguments)] = parse(parser_for("qwen3_coder", TYPED), *chunks)
        assert (content, name) == (None, "get")
        assert arguments is not None
        expected = {"days": 3, "exact": True, "where": {"a": [1]}, "limit": None, "kind": 2}
        expected |= {"note": "null", "text": "12", "count": "many", "unknown": "7"}
        assert json.loads(arguments) == expected


ODD = {
    "number": {"type": "number"},
    "list": {"type": "array"},
    "object": {"type": "object"},
    "flag": {"type": "boolean"},
    "odd": {"type": 5},
    "none": {"type": None},
    "options": {"anyOf": 3, "oneOf": [{"type": "integer"}, True]},
    "values": {"enum": {"a": 1}},
    "any": True,
    "deep": {"anyOf": [{"anyOf": [{"type": "integer"}]}, {"type": ["null"]}]},
}
ODD_TOOLS = [
    {"type": "function", "function": {"name": "get", "parameters": {"properties": ODD}}},
    {"type": "function", "function": {"name": "b-2"}},
]


def strict(text: str) -> Any:
    """The value of JSON as it is defined: without NaN, and of numbers that a float can hold."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    def finite(number: str) -> float:
        assert abs(float(number)) < float("inf"), number
        return float(number)

    return json.loads(text, parse_constant=refuse, parse_float=finite)


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        *(("number", text, text) for text in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999")),
        *(("list", text, text) for text in ("[NaN]", "[1e999]", "['a']", "(1, 2)", "[1")),
        ("list", "[" * 9999, "[" * 9999),
        *(("object", text, text) for text in ("{'a': 1}", '{"a": Infinity}', "{a: 1}")),
        ("object", '{"a": "\n"}', '{"a": "\n"}'),
        ("number", "9" * 5000, "9" * 5000),
        ("number", "0x1F", "0x1F"),
        ("number", "007", "007"),
        ("number", "1.50", 1.5),
        ("number", "  -3 ", -3),
        ("number", "", ""),
        ("object", '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ("list", '["\\ud83d"]', ["\ud83d"]),
        ("flag", "True", True),
        ("flag", "None", None),
        ("flag", "yes", "yes"),
        ("deep", "3", 3),
        *((key, "3", "3") for key in ("odd", "none", "options", "values", "any", "unknown")),
    ],
)  # fmt: skip
def test_a_value_that_is_no_json_is_a_string(key: str, written: str, value: Any) -> None:
    for chunks in ([coder("get", **{key: written})], coder("get", **{key: written})):
        content, [(_, arguments)] = parse(parser_for("qwen3_coder", ODD_TOOLS), *chunks)
        assert content is None and arguments is not None
        assert strict(arguments) == {key: value}
        arguments.encode()  # has no half of a surrogate pair


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("<parameter=a>\nx\n</function>\n</tool_call>", None, {"a": "x"}),
        ("<parameter=a>\nx\n</function>", None, {"a": "x"}),
        ("<parameter=number>\n3\n</function>\n</tool_call>", None, {"number": 3}),
        ("<parameter=number>3</function></tool_call> Done.", " Done.", {"number": 3}),
        (
            "<parameter=a>x</parameter><parameter=list>[1]</function></tool_call>",
            None,
            {"a": "x", "list": [1]},
        ),
        # The end of a call within a value is text, as long as the value goes on.
        ("<parameter=a>x</function> y</parameter></function>", None, {"a": "x</function> y"}),
        ("<parameter=a>x</function>\n</tool</parameter></function>", None,
         {"a": "x</function>\n</tool"}),
        ("<parameter=a>\nx\n<parameter=b>\ny\n</parameter></function>", None,
         {"a": "x\n<parameter=b>\ny"}),
        ("<parameter=number>1</parameter><parameter=number>2</parameter></function>", None,
         {"number": 2}),
    ],
)  # fmt: skip
def test_parameters_without_an_end(text: str, content: str | None, arguments: Any) -> None:
    text = f"<tool_call><function=get>{text}"
    for chunks in ([text], text):
        found, [(_, given)] = parse(parser_for("qwen3_coder", ODD_TOOLS), *chunks)
        assert (found, strict(given or "")) == (content, arguments)


def test_a_call_behind_a_parameter_without_an_end() -> None:
    text = "<function=get><parameter=a>x</function></tool_call>" + coder("b-2", c="1")
    _, calls = parse(parser_for("qwen3_coder", ODD_TOOLS), *text)
    assert [(name, strict(given or "")) for name, given in calls] == [
        ("get", {"a": "x"}),
        ("b-2", {"c": "1"}),
    ]


def test_strings_of_xml_come_as_they_are_written():
    parser = parser_for("qwen3_coder", TOOLS)
    (first,) = parser.add("<tool_call>\n<function=get>")
    assert isinstance(first, CallDelta)
    assert (first.index, first.name, first.arguments) == (0, "get", "")
    assert parser.add("\n<parameter=city>") == [CallDelta(0, '{"city": "')]
    assert parser.add("\nZü") == [CallDelta(0, "Zü")]
    assert parser.add('"\n</par') == [CallDelta(0, '\\"')]
    assert parser.add("ty\n") == [CallDelta(0, "\\n</party")]
    assert parser.add("</parameter></function>") == [CallDelta(0, '"}')]
    assert parser.add("\n</tool_call>\n", final=True) == []


def test_strings_of_gemma_come_as_they_are_written():
    parser = parser_for("gemma4", TOOLS)
    assert parser.add(marked("<|tool_call>call:get")) == []
    (first,) = parser.add("{")
    assert isinstance(first, CallDelta)
    assert (first.index, first.name, first.arguments) == (0, "get", "{")
    assert parser.add(marked('city:<|"|>')) == [CallDelta(0, '"city": "')]
    assert parser.add('Zü"') == [CallDelta(0, 'Zü\\"')]
    assert parser.add(marked('<|"|>,days:1')) == [CallDelta(0, '", "days": ')]
    assert parser.add("2}") == [CallDelta(0, "12}")]
    assert parser.add(marked("<tool_call|>"), final=True) == []


VALUES = st.dictionaries(
    st.text(st.characters(exclude_characters=">", exclude_categories=["Cs"]), max_size=5),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    max_size=4,
)


@settings(deadline=None, max_examples=80)
@given(values=VALUES, cuts=st.lists(st.integers(0, 400), max_size=6))
def test_qwen3_coder_reads_what_was_written(values, cuts):
    text = coder("get", **values)
    places = sorted(min(cut, len(text)) for cut in cuts)
    chunks = [text[a:b] for a, b in zip([0, *places], [*places, len(text)])]
    content, [(_, arguments)] = parse(parser_for("qwen3_coder", TOOLS), *chunks)
    assert content is None and arguments is not None
    assert json.loads(arguments) == values


def test_only_the_start_of_a_marker_is_held_back():
    parser = parser_for("hermes", TOOLS)
    assert parser.add("a <tool") == [ContentDelta("a ")]
    assert parser.add("_cal") == []
    assert parser.add("m < ") == [ContentDelta("<tool_calm < ")]
    assert parser.add("x<") == [ContentDelta("x")]
    assert parser.add("", final=True) == [ContentDelta("<")]


def test_a_wrong_name_is_settled_at_its_first_wrong_letter():
    parser = parser_for("llama3_json", TOOLS)
    assert parser.add('{"name": "get_w') == []
    assert parser.add("i") == [ContentDelta('{"name": "get_wi')]


def test_an_answer_in_json_is_not_held_back():
    parser = parser_for("llama3_json", TOOLS)
    assert parser.add('{"ti') == [ContentDelta('{"ti')]


# ---- forced output ----


def test_choices_get_their_parsers():
    assert isinstance(parser_for("none", TOOLS, "required"), ForcedCalls)
    assert isinstance(parser_for("none", TOOLS, named("get")), ForcedCall)
    assert isinstance(parser_for("mistral", TOOLS, "auto"), MistralParser)


def test_forced_calls_come_as_they_are_written():
    parser = parser_for("none", TOOLS, "required")
    assert parser.add('[{"name": "get", "arguments":') == []
    (first,) = parser.add(' {"a":')
    assert isinstance(first, CallDelta)
    assert (first.index, first.name, first.arguments) == (0, "get", '{"a":')
    assert parser.add(" 1}") == [CallDelta(0, " 1}")]
    (second,) = parser.add('},\n {"name": "b-2", "arguments": {}}')
    assert isinstance(second, CallDelta)
    assert (second.index, second.name, second.arguments) == (1, "b-2", "{}")
    assert second.id != first.id
    assert parser.add("]", final=True) == []


@pytest.mark.parametrize("text", [" ", "[", ' [{"name": "get"', "{}", "Sorry."])
def test_what_breaks_the_force_is_content(text):
    assert parse(parser_for("none", TOOLS, "required"), text) == (text, [])


def test_a_forced_call_comes_as_it_is_written():
    parser = parser_for("none", TOOLS, named("get"))
    (first,) = parser.add("{")
    assert isinstance(first, CallDelta)
    assert (first.index, first.name, first.arguments) == (0, "get", "{")
    assert parser.add('"a": 1}', final=True) == [CallDelta(0, '"a": 1}')]


# ---- templates ----


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ('{{ \'<tool_call>\\n{"name": <function-name>, "arguments": <args>}\' }}', "hermes"),
        ("{{ '<tool_call>\\n<function=example>' }}", "qwen3_coder"),
        ("{{ '<tool_call>' + name + '<arg_key>' }}", "none"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ '<|channel|>final<|message|>' }}", "openai"),
        ("{{ '<|tool_call>call:' + name }}", "gemma4"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ('{{ \'{"name": function name, "parameters": dictionary}\' }}', "llama3_json"),
        ('{{ "{\\"name\\": function name, \\"parameters\\": dictionary}" }}', "llama3_json"),
        ("{{ messages[0].content }}", "none"),
        ("", "none"),
    ],
)
def test_the_template_tells_the_family(template, kind):
    assert detect_parser(template) == kind


# ---- any text, cut into any chunks ----


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
            *("<function=get>", "</function>", "<parameter=a>", "\n</parameter>", "<parameter="),
            *(marked('<|"|>'), marked("<|call|>"), marked("<tool_call|>"), marked("<|channel|>")),
            *("call:get{", "commentary to=functions.get", "a:", SIGN),
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
    "<tool_call>\n<function={0}>\n<parameter=a>\n{1}\n</parameter>\n</function>\n</tool_call>",
    oss("{0}", "{1}"),
    marked('<|tool_call>call:{0}{{a:<|"|>{1}<|"|>,b:{1}}}<tool_call|>'),
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL_PARSERS)
@settings(deadline=None, max_examples=80)
@given(text=outputs(), data=st.data())
def test_chunks_make_no_difference(kind, text, data):
    expected = parse(ALL_PARSERS[kind](), text)
    assert parse(ALL_PARSERS[kind](), *text) == expected
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert parse(ALL_PARSERS[kind](), *chunks) == expected


XML = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=get>", "<function=b-2>", "</function>"),
        *(f"<parameter={key}>" for key in (*ODD, "unknown", 'a"b')),
        *(
            "</parameter>",
            "\n",
            "\n</parameter>\n",
            "True",
            "NaN",
            "1e999",
            "[1, ",
            '{"a": 1}',
            '"',
        ),
    ]
)
MEMBERS = st.sampled_from(
    [
        *(marked("<|tool_call>call:get{"), marked("<tool_call|>"), marked('<|"|>'), SIGN),
        *(
            "a:",
            '"b":',
            '"',
            "\\",
            "\\q",
            "\n",
            ",",
            ",,",
            "{",
            "}",
            "[",
            "]",
            "1",
            "NaN",
            "-",
            "x y",
        ),
    ]
)
# What ends any call that is open.
ENDS = {
    "qwen3_coder": "</parameter></function></tool_call>.",
    "gemma4": marked('<tool_call|>"<tool_call|>.'),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDS)
@settings(deadline=None, max_examples=250)
@given(data=st.data())
def test_arguments_that_a_parser_writes_are_json(kind: str, data: st.DataObject) -> None:
    """Whatever the model writes, of every call that does not end with the output itself."""
    pieces = st.lists(XML if kind == "qwen3_coder" else MEMBERS, max_size=25).map("".join)
    head = "<function=get>" if kind == "qwen3_coder" else marked("<|tool_call>call:get{")
    is_call = data.draw(st.integers(0, 3)) > 0
    text = (head + data.draw(pieces) if is_call else data.draw(outputs())) + ENDS[kind]
    content, calls = parse(parser_for(kind, ODD_TOOLS), text)
    assert parse(parser_for(kind, ODD_TOOLS), *text) == (content, calls)
    for _, arguments in calls:
        assert isinstance(strict(arguments or ""), dict)


FRAME = (
    r"(?:[\s{}\[\],:;]|</?tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|\[CALL_ID\]\w*|\[ARGS\]"
    r"|<\|channel\|>commentary to=(?:functions\.)?|<\|(?:message|call|end|return)\|>"
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


# Of XML and of Gemma's notation, arguments are JSON that the parser writes.
@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*ALL_PARSERS} - {"named", "qwen3_coder", "gemma4"}))
@settings(deadline=None, max_examples=80)
@given(text=outputs())
def test_nothing_is_lost(kind, text):
    deltas = ALL_PARSERS[kind]().add(text, final=True)
    pattern = account_of(deltas)
    pattern += r"\s*" if "(?:" in pattern else ""
    assert re.fullmatch(pattern, unmarked(text)), deltas


@settings(deadline=None, max_examples=80)
@given(text=outputs())
def test_all_text_is_the_arguments_of_a_named_call(text):
    text = unmarked(text)
    assert parse(ForcedCall("get"), text) == (None, [("get", text)] if text else [])


PROSE = st.text(alphabet="ab <_{\n.", max_size=6)


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_call_of_gpt_oss_begins_with_its_header():
    parser = parser_for("openai", TOOLS)
    assert not any(parser.add(char) for char in oss("get", "").removesuffix(f">{SIGN}<|call|>"))
    (first,) = parser.add(">")
    assert isinstance(first, CallDelta)
    assert (first.index, first.name, first.arguments) == (0, "get", "")
    for char in WEATHER:
        assert parser.add(char) == [CallDelta(0, char)]


def test_nested_arguments_of_gemma_need_no_stack():
    text = gemma("get", "a:" + "[" * 5_000)
    _, [(_, arguments)] = parse(parser_for("gemma4", TOOLS), text)
    assert arguments == '{"a": ' + "[" * 5_000 + "]" * 5_000 + "}"


def test_a_long_output_takes_linear_time():
    # Quadratic in these lengths would be noticed.
    text = "<tool_call>" * 20_000 + '[{"<' * 20_000
    assert parse(parser_for("hermes", TOOLS), text) == (text, [])
    assert parse(parser_for("mistral", TOOLS), "[TOOL_CALLS]" * 20_000)[1] == []
