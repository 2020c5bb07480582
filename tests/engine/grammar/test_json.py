"""Schemas: every masked sample parses and is valid, and what cannot be enforced is refused."""

import json
import random
from typing import Any

import jsonschema
import pytest

from peagle.config.structured import StructuredOutput
from peagle.errors import UserError
from tests.engine.grammar.conftest import admits, encode, fits, sample

pytest.importorskip("xgrammar")

VALIDATOR = jsonschema.Draft202012Validator
FORMATS = VALIDATOR.FORMAT_CHECKER
PAIR = {
    "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    "$defs": {
        "A": {
            "type": "object",
            "properties": {"kind": {"const": "a"}, "v": {"type": "integer"}},
            "required": ["kind"],
        },
        "B": {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"]},
    },
}
SCHEMAS: list[Any] = [
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": r'^[^a-f]{1,3}"\\?.$'},
    {"type": "string", "pattern": r"\s\S|\d{3}-\d{4}|\n\t"},
    {"type": "string", "format": "date", "title": "a day"},
    {"minLength": 3},
    {"type": "integer", "minimum": -3, "maximum": 117},
    {"type": "integer", "exclusiveMinimum": 41},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "minimum": -0.5, "exclusiveMaximum": 2.25},
    {"type": ["integer", "null"], "minimum": 3},
    {"enum": [1, 'é\n"', None, {"b": [1.5, True]}]},
    {"type": "string", "enum": ["red", "green"]},
    {"type": "array", "maxItems": 3},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "minItems": 2},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
            "more": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        },
        "required": ["name"],
        "additionalProperties": False,
    },
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "null"}}},
    {"type": "object", "propertyNames": {"maxLength": 2}, "maxProperties": 2},
    {"properties": {"": {"type": "null"}, 'a"b': {"type": "null"}}, "required": ['a"b']},
    PAIR,
    {"allOf": [{"type": "boolean"}]},
    {"type": "object"},
]


OBJECT_OF_ANY = StructuredOutput.json_object()


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:40])
def test_samples_parse_and_are_valid(compiler, schema):
    structure, rng = StructuredOutput.json_schema(schema), random.Random(0)
    samples = [text for text in (sample(compiler, structure, rng) for _ in range(25)) if text]
    assert len(samples) >= 5
    for text in samples:
        VALIDATOR(schema, format_checker=FORMATS).validate(json.loads(text))


@pytest.mark.parametrize(
    "text", ["{}", '{"a": [1, {"b": null}, "\\u00e9\\"", -2.5e-3, []], "c": {"d": true}}']
)
def test_json_admits(compiler, text):
    assert fits(compiler, OBJECT_OF_ANY, text)


@pytest.mark.parametrize(
    "text", ["[1]", "1", '{"a" 1', '{"a": 01', '{"a": "\n', "{'a'", " {", "{" + " " * 70]
)
def test_json_does_not_admit(compiler, text):
    state = compiler.start(OBJECT_OF_ANY)
    assert not all(state.try_advance(token) for token in encode(text)) or not state.is_complete


# ---- refusals ----

OBJECT = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "foo"}, "type at # is"),
        ({"type": 5}, "type at #"),
        ({"type": [["a"]]}, "type at #"),
        ({"type": []}, "type at #"),
        ({"type": "object", "properties": 3}, "#/properties is 3"),
        ({"type": "object", "properties": {"a": 3}}, "#/properties/a is 3"),
        ({"type": "object", "properties": {"a": False}}, "#/properties/a is false"),
        ({"properties": {"a": {"type": "foo"}}}, "type at #/properties/a"),
        (False, "# is false"),
        ({"$ref": "#/nope"}, "#/nope"),
        ({"$ref": "http://x/y"}, "http://x/y"),
        ({"$ref": "#name"}, "#name"),
        ({"$ref": 3}, "\\$ref at # is 3"),
        ({"$ref": "#"}, "no text"),
        ({"$dynamicRef": "#x"}, "dynamicRef"),
        ({"enum": []}, "at least one value"),
        ({"enum": 3}, "at least one value"),
        ({"enum": ["a", 3], "type": "string"}, "has 3; expected a value of type string"),
        ({"enum": [1, 5], "minimum": 3}, "minimum beside enum"),
        ({"const": float("inf")}, "float values"),
        ({"const": "\ud800"}, "surrogates"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum greater than maximum"),
        ({"type": "integer", "minimum": 0.5}, "whole number"),
        ({"type": "integer", "minimum": True}, "must be a number"),
        ({"type": "integer", "maximum": 10**30}, "exceeds"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"type": "integer", "multipleOf": 1025}, "multipleOf at # is 1025; a whole number"),
        ({"type": "integer", "multipleOf": 0.5}, "multipleOf at # is 0.5"),
        ({"type": "integer", "multipleOf": 0}, "multipleOf at # is 0"),
        ({"type": "integer", "multipleOf": 7, "minimum": 8, "maximum": 13}, "no number fits"),
        ({"type": "integer", "multipleOf": 7, "minimum": 10**9}, "greater than maximum"),
        ({"type": "number", "minimum": 1e300, "maximum": 1e301}, "no number fits the bounds at #"),
        ({"type": "string", "format": "regex"}, "format at # is 'regex', which cannot"),
        ({"type": "string", "format": "int32"}, "format at # is 'int32', which cannot"),
        ({"type": "object", "minProperties": 2}, "minProperties at # cannot be enforced"),
        ({"type": "array", "prefixItems": [True], "minItems": 2}, "no array fits minItems 2"),
        ({"propertyNames": {"enum": ["a", 1]}}, "schema of strings"),
        ({"propertyNames": {"maxLength": 2}, "unevaluatedProperties": OBJECT}, "propertyNames"),
        ({"type": "string", "minLength": -1}, "minLength at # is -1"),
        ({"type": "string", "maxLength": "x"}, "maxLength at # is 'x'"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "at least minLength"),
        ({"type": "string", "pattern": "a+", "minLength": 5}, "beside pattern"),
        ({"type": "string", "format": "date", "maxLength": 5}, "beside pattern or format"),
        ({"type": "string", "format": "date", "pattern": "1.*"}, "format beside pattern"),
        ({"type": "string", "pattern": "("}, "pattern '\\(' at #"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "string", "pattern": "\x01"}, "control character"),
        ({"type": "string", "pattern": 3}, "expected text"),
        (
            {"type": "array", "minItems": 3, "maxItems": 1},
            "maxItems at # is 1; expected at least minItems, 3",
        ),
        ({"type": "array", "items": [{"type": "integer"}]}, "#/items is"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"type": "object", "required": ["a"]}, "required at # names 'a'"),
        ({"type": "object", "required": "a"}, "list of names"),
        ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({**OBJECT, "propertyNames": {"maxLength": 2}}, "propertyNames"),
        ({**OBJECT, "patternProperties": {"a": {}}}, "patternProperties"),
        ({"patternProperties": {"a": {}, "b": {}}}, "2 patterns"),
        ({"type": "object", "propertyNames": {"type": "null"}}, "schema of strings"),
        ({"type": "object", "minProperties": 5, "maxProperties": 1}, "maxProperties at # is 1"),
        ({**OBJECT, "anyOf": [{"required": ["a"]}]}, "properties, type beside anyOf"),
        ({"anyOf": []}, "at least one schema"),
        ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "allOf at # has 2 parts"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "may overlap"),
        ({"oneOf": [{"$ref": "#"}, {"type": "number"}]}, "may overlap"),
        ({"not": {"type": "string"}}, "not at #"),
        ({"type": "integer", "if": {}, "then": {}}, "if at #"),
        ({"properties": {str(i): {} for i in range(1001)}}, "1001 entries"),
        ({"enum": ["x" * 100_000]}, "characters; expected"),
    ],
    ids=lambda value: json.dumps(value)[:40] if not isinstance(value, str) else "",
)
def test_what_is_wrong_or_cannot_be_enforced_is_refused(compiler, schema, reason):
    with pytest.raises(UserError, match=reason) as caught:
        compiler.compile(StructuredOutput.json_schema(schema))
    assert str(caught.value).startswith("json_schema ")
    assert ".cc:" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("levels", [70, 500, 100_000])
def test_deep_schemas_are_refused(compiler, levels):
    with pytest.raises(UserError, match="deep"):
        source = '{"items":' * levels + "{}" + "}" * levels
        compiler.compile(StructuredOutput.json_schema(source))


def test_references_in_a_circle_are_refused(compiler):
    a, b = {"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}
    one_of = {"oneOf": [a, b], "$defs": {"a": a, "b": b}}
    with pytest.raises(UserError, match="overlap"):
        compiler.compile(StructuredOutput.json_schema(one_of))
    with pytest.raises(UserError, match="no text"):
        compiler.compile(StructuredOutput.json_schema({**a, "$defs": {"a": a, "b": b}}))


def test_compact_json_has_no_blanks_between_its_parts(compiler):
    schema = {"type": "object", "properties": {"a b": {"type": "array"}}, "required": ["a b"]}
    for text, is_compact in (('{"a b":[1,{"c":"d e"}]}', True), ('{ "a b": []}', False)):
        assert admits(compiler, schema, text)
        assert admits(compiler, schema, text, compact=True) == is_compact
