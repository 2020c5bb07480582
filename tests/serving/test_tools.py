"""Tools of requests: what is checked, what is forced, and answers as clients see them."""

import json
from typing import Any

import pytest

from conftest import VOCAB_SIZE, byte_tokenizer
from peagle.config.structured import StructuredOutput
from peagle.engine.grammar.compiler import GrammarCompiler
from peagle.errors import UserError
from peagle.serving.app import parsed
from peagle.serving.errors import ApiError
from peagle.serving.protocol import ChatBody, ToolChoice, tool_dicts
from peagle.serving.tools import (
    CallDelta,
    ContentDelta,
    check_tools,
    constraint,
    finish_reason,
    message_from,
)
from serving.test_tool_parsers import named

EOS = 0


def tool(name: Any, parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, **more}
    return {"type": "function", "function": function}


def refusal_of(tools: Any, choice: Any) -> ApiError | None:
    """Check tools as a request brings them."""
    given = {"tools": tools, "tool_choice": choice, "messages": [{"role": "user", "content": "x"}]}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        body = parsed(ChatBody, given)
        chosen = body.tool_choice
        chosen = chosen.model_dump() if isinstance(chosen, ToolChoice) else chosen
        check_tools(tool_dicts(body.tools), chosen)
    except ApiError as error:
        return error
    return None


# ---- requests ----


def test_good_tools_and_choices_pass():
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    tools = [tool("get", parameters, strict=True), tool("x" * 64, {}), named("without")]
    for choice in (None, "none", "auto", "required", named("get")):
        assert refusal_of(tools, choice) is None
    assert refusal_of(None, None) is None
    assert refusal_of([], "none") is None
    assert refusal_of([tool(f"f{i}") for i in range(128)], "auto") is None


@pytest.mark.parametrize(
    ("tools", "choice", "param", "message"),
    [
        ([tool("a"), tool("a")], "auto", "tools[1].function.name", "name 'a'"),
        ([tool("a b")], None, "tools[0].function.name", "'a b'"),
        ([tool("x" * 65)], None, "tools[0].function.name", "1 to 64"),
        ([tool("")], None, "tools[0].function.name", "''"),
        ([tool("a\n")], None, "tools[0].function.name", "expected 1 to 64"),
        ([tool(None)], None, "tools.0.function.name", "is missing"),
        ([tool("a"), {"type": "web"}], None, "tools.1.type", "'web'"),
        ([tool("a"), "b"], None, "tools.1", "'b'"),
        ([tool("a", [1])], None, "tools.0.function.parameters", "[1]"),
        ([tool("a", {"type": "array"})], None, "tools[0].function.parameters", "'array'"),
        (
            [tool("a", {"type": ["object"]})],
            None,
            "tools[0].function.parameters",
            "type ['object']",
        ),
        (
            [tool("a", {"properties": [3]})],
            None,
            "tools[0].function.parameters.properties",
            "[3]",
        ),
        (
            [tool("a", {"properties": {"x": 3}})],
            None,
            "tools[0].function.parameters.properties",
            "{'x': 3}",
        ),
        (
            [tool("a", {"required": "x"})],
            None,
            "tools[0].function.parameters.required",
            "'x'",
        ),
        ([tool(f"f{i}") for i in range(129)], None, "tools", "129"),
        ([tool("a")], named("b"), "tool_choice", "'b'"),
        ([tool("a")], "any", "tool_choice", "'any'"),
        ([tool("a")], {"type": "function"}, "tool_choice.function", "is missing"),
        ([tool("a")], {"type": "tool", "function": {"name": "a"}}, "tool_choice.type", "'tool'"),
        ([], "required", "tool_choice", "no tools"),
        (None, named("a"), "tool_choice", "no tools"),
    ],
)
def test_bad_tools_and_choices_are_refused(tools, choice, param, message):
    refusal = refusal_of(tools, choice)
    assert refusal is not None and message in str(refusal)
    assert (refusal.status, refusal.param) == (400, param)


def test_long_values_are_shortened_in_errors():
    refusal = refusal_of([tool("a", {"type": ["x" * 10_000]})], None)
    assert refusal is not None and len(refusal.message) < 400


# ---- forced calls ----

# Two functions whose definitions have the same name and differ.
FIRST = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}},
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "string", "enum": ["Rome", "Oslo"]}},
}
SECOND = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://example.com/second",
    "type": "object",
    "title": "Second",
    "properties": {
        "place": {"$ref": "#/$defs/Place", "description": "where"},
        "then": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        "default": {"type": "boolean"},
    },
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "integer"}},
}
PAIR = [tool("first", FIRST), tool("second", SECOND), tool("bare")]
FITTING = [
    [{"name": "first", "arguments": {"place": "Rome"}}],
    [{"name": "second", "arguments": {"place": 3}}],
    [{"name": "second", "arguments": {"place": 3, "then": {"place": 4, "then": None}}}],
    [{"name": "second", "arguments": {"place": 3, "then": None, "default": True}}],
    [{"name": "bare", "arguments": {}}],
]
UNFIT = [
    [],
    {},
    [{"name": "third", "arguments": {}}],
    [{"name": "first", "arguments": {"place": 3}}],
    [{"name": "first", "arguments": {"place": "Bonn"}}],
    [{"name": "first", "arguments": {}}],
    [{"name": "second", "arguments": {"place": "Rome"}}],
    [{"name": "second", "arguments": {"place": 3, "then": {"place": "Rome"}}}],
    [{"name": "bare", "arguments": {"a": 1}}],
    [{"name": "bare"}],
    [{"name": "bare", "arguments": {}, "more": 1}],
]
TWO = [*FITTING[0], *FITTING[1]]


class Matcher:
    """Whether an output fits a structure, by peagle's own grammars."""

    def __init__(self) -> None:
        pytest.importorskip("xgrammar")
        self.tokenizer = byte_tokenizer()
        self.compiler = GrammarCompiler(self.tokenizer, VOCAB_SIZE, [EOS])

    def __call__(self, structure: StructuredOutput, value: Any) -> bool:
        state = self.compiler.start(structure)
        tokens = self.tokenizer.encode(json.dumps(value), add_special_tokens=False)
        return all(state.try_advance(token) for token in tokens) and state.is_complete


@pytest.fixture(scope="module")
def matches() -> Matcher:
    return Matcher()


def is_valid(structure: StructuredOutput, value: Any) -> bool:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator
    schema = json.loads(structure.source)
    validator.check_schema(schema)
    return validator(schema).is_valid(value)


def test_free_choices_force_nothing():
    for choice in (None, "auto", "none"):
        assert constraint(PAIR, choice) is None
    assert constraint(None) is None


def required(parallel: bool = True) -> StructuredOutput:
    structure = constraint(PAIR, "required", parallel)
    assert structure is not None
    return structure


@pytest.mark.parametrize("calls", FITTING, ids=json.dumps)
def test_required_takes_calls(calls, matches):
    for parallel in (True, False):
        assert is_valid(required(parallel), calls)
        assert matches(required(parallel), calls)


@pytest.mark.parametrize("calls", UNFIT, ids=json.dumps)
def test_required_takes_nothing_else(calls, matches):
    assert not is_valid(required(), calls)
    assert not matches(required(), calls)


def test_several_calls_only_if_parallel(matches):
    assert is_valid(required(), TWO)
    assert matches(required(), TWO)
    assert not is_valid(required(parallel=False), TWO)
    assert not matches(required(parallel=False), TWO)


@pytest.mark.parametrize(
    ("name", "arguments", "fits"),
    [
        ("first", {"place": "Rome"}, True),
        ("first", {"place": 1}, False),
        ("second", {"place": 1, "then": {"place": 2}}, True),
        ("second", {"place": "Rome"}, False),
        ("bare", {}, True),
        ("bare", {"a": 1}, False),
        ("bare", [], False),
        ("any", {"a": [1]}, True),
        ("any", [], False),
        ("open", {"a": 1}, True),
        ("open", 3, False),
    ],
)
def test_a_named_function_has_its_arguments_forced(name, arguments, fits, matches):
    properties = {"properties": {"a": {"type": "integer"}}}
    tools = [*PAIR, tool("any", {}), tool("open", properties)]
    structure = constraint(tools, named(name))
    assert structure is not None
    assert is_valid(structure, arguments) == fits
    assert matches(structure, arguments) == fits


def test_values_that_look_like_schemas_stay():
    odd = {"const": {"$ref": "#/x", "title": "y"}}
    properties = {"$ref": {"type": "string"}, "title": odd, "enum": {"enum": [{"default": 1}]}}
    structure = constraint([tool("f", {"type": "object", "properties": properties})], "required")
    assert structure is not None
    moved = json.loads(structure.source)["$defs"]["f"]["properties"]
    assert moved == properties


def test_tools_are_left_as_they_are():
    before = json.dumps(PAIR)
    required()
    constraint(PAIR, named("second"))
    assert json.dumps(PAIR) == before


def test_a_schema_too_deep_is_refused():
    deep: Any = {}
    for _ in range(2000):
        deep = {"anyOf": [deep]}
    with pytest.raises((ApiError, UserError), match="too deeply"):
        constraint([tool("f", {"properties": {"a": deep}})], "required")


# ---- answers ----


def test_deltas_make_a_message():
    deltas = [
        ContentDelta("a"),
        CallDelta(0, "", "call_x", "get"),
        CallDelta(0, '{"a"'),
        CallDelta(0, ": 1}"),
        ContentDelta("b"),
        CallDelta(1, "{}", "call_y", "b-2"),
    ]
    content, calls = message_from(deltas)
    assert content == "ab"
    assert calls == [
        {"id": "call_x", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}},
        {"id": "call_y", "type": "function", "function": {"name": "b-2", "arguments": "{}"}},
    ]
    assert message_from([]) == (None, [])


def test_deltas_as_clients_see_them():
    assert ContentDelta("a").body() == {"content": "a"}
    function = {"name": "get", "arguments": "{"}
    assert CallDelta(0, "{", "call_x", "get").body() == {
        "tool_calls": [{"index": 0, "id": "call_x", "type": "function", "function": function}]
    }
    assert CallDelta(1, "}").body() == {
        "tool_calls": [{"index": 1, "function": {"arguments": "}"}}]
    }


@pytest.mark.parametrize(
    ("reason", "called", "choice", "expected"),
    [
        ("stop", True, "auto", "tool_calls"),
        ("stop", True, None, "tool_calls"),
        ("stop", True, "required", "tool_calls"),
        ("stop", True, named("get"), "stop"),
        ("stop", False, "auto", "stop"),
        ("length", True, "required", "length"),
        ("length", True, named("get"), "length"),
    ],
)
def test_finish_reason(reason, called, choice, expected):
    assert finish_reason(reason, called, choice) == expected
