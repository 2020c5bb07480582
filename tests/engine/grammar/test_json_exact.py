"""Grammars of JSON schemas against the jsonschema package, both ways, and what they may spell."""

import json
import math
import random
import re
from calendar import monthrange
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from peagle.config.structured import StructuredOutput
from peagle.engine.grammar.formats import FORMATS
from tests.engine.grammar.conftest import TOKENIZER, admits, encode, sample

pytest.importorskip("xgrammar")
Draft202012Validator = pytest.importorskip("jsonschema").Draft202012Validator

JSON_SCHEMA = StructuredOutput.json_schema


# ---- schemas ----

BOUND = st.one_of(st.integers(-(10**6), 10**6), st.floats(-1e6, 1e6).map(lambda x: round(x, 3)))


@st.composite
def numbers(draw) -> dict[str, Any]:
    low, high = sorted(draw(st.tuples(BOUND, BOUND)))
    found = {draw(st.sampled_from(["minimum", "exclusiveMinimum"])): low} if draw(FLAG) else {}
    if draw(FLAG):
        found[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = high + 1
    return {"type": "number", **found}


@st.composite
def integers(draw) -> dict[str, Any]:
    low = draw(st.integers(-(2**63), 2**62))
    found = {"minimum": low} if draw(FLAG) else {}
    if draw(FLAG):
        found["maximum"] = draw(st.integers(low, min(2**63 - 1, low + 10**6)))
    if draw(st.integers(0, 3)) == 0:
        found = {"multipleOf": draw(st.integers(1, 60))}
    return {"type": "integer", **found}


@st.composite
def strings(draw) -> dict[str, Any]:
    least = draw(st.integers(0, 3))
    kinds: list[dict[str, Any]] = [{}, {"minLength": least, "maxLength": least + 2}]
    kinds += [{"pattern": r'^[^a-x]{1,3}["\\]?\Z'}, {"format": draw(st.sampled_from([*FORMATS]))}]
    return {"type": "string", **draw(st.sampled_from(kinds))}


FLAG = st.booleans()
NAMES = st.sampled_from(["a", "ab", "b\n", 'c"', "é", ""])
LEAVES = st.one_of(
    *(numbers(), integers(), strings(), st.just(True)),
    st.sampled_from([{"type": "null"}, {"type": ["boolean", "integer"]}]),
    st.builds(lambda v: {"enum": v}, st.lists(st.integers(2**62, 2**70), min_size=1, max_size=3)),
    st.builds(lambda v: {"const": v}, st.sampled_from(["x", [1, {"k": []}], 10**30, 0.5, {}])),
)


def _within(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(arrays(inner), objects(inner), st.builds(_either, inner, inner))


def _either(one: Any, other: Any) -> dict[str, Any]:
    return {"anyOf": [one, other]}


@st.composite
def arrays(draw, inner) -> dict[str, Any]:
    least = draw(st.integers(0, 2))
    found: dict[str, Any] = {"type": "array", "items": draw(inner), "minItems": least}
    if draw(FLAG):
        found["maxItems"] = draw(st.integers(least, 4))
    if draw(FLAG):
        found["prefixItems"] = [draw(inner), draw(inner)]
    return found


@st.composite
def objects(draw, inner) -> dict[str, Any]:
    names = draw(st.lists(NAMES, unique=True, max_size=4))
    required = [name for name in names if draw(FLAG)]
    found = {
        "type": "object",
        "properties": {name: draw(inner) for name in names},
        "required": required,
        "additionalProperties": draw(st.one_of(st.just(False), inner)),
        "minProperties": draw(
            st.integers(0, len(required) + 1 if len(names) > len(required) else 0)
        ),
    }
    if draw(FLAG):
        found["maxProperties"] = draw(st.integers(max(len(required), found["minProperties"]), 6))
    return found


SCHEMAS = st.recursive(LEAVES, _within, max_leaves=5)


def is_valid(value: Any, schema: Any) -> bool:
    checker = Draft202012Validator.FORMAT_CHECKER
    return Draft202012Validator(schema, format_checker=checker).is_valid(value)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**20))
def test_every_sample_is_valid(compiler, schema, seed):
    rng = random.Random(seed)
    for _ in range(3):
        text = sample(compiler, JSON_SCHEMA(schema), rng)
        if text is not None:
            assert is_valid(json.loads(text), schema), text
            assert max(map(len, re.findall(r"[ \n\t]+", _without_strings(text))), default=0) <= 41


def _without_strings(text: str) -> str:
    return re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)


@st.composite
def instances(draw, schema) -> Any:
    """A value that fits a schema above; properties in the order of the schema."""
    if schema is True:
        return draw(
            st.recursive(
                st.none() | st.text(st.characters(exclude_categories=["Cs", "Cc"])),
                st.lists,
                max_leaves=4,
            )
        )
    if "anyOf" in schema:
        return draw(instances(draw(st.sampled_from(schema["anyOf"]))))
    if "enum" in schema or "const" in schema:
        return draw(st.sampled_from(schema.get("enum", [schema.get("const")])))
    kind = schema["type"]
    if kind == "integer":
        low, high = schema.get("minimum", -(2**63)), schema.get("maximum", 2**63 - 1)
        step = schema.get("multipleOf", 1)
        return draw(
            st.integers(low, high) if step == 1 else st.integers(-(10**6), 10**6).map(step.__mul__)
        )
    if kind == "number":
        low = schema.get("minimum", schema.get("exclusiveMinimum", -1e300))
        high = schema.get("maximum", schema.get("exclusiveMaximum", 1e300))
        value = draw(
            st.floats(low, high, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 1e-300)
        )
        bounds = (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum"))
        return (low + high) / 2 if value in bounds else value
    if kind == "array":
        heads = schema.get("prefixItems", [])
        size = draw(st.integers(schema["minItems"], schema.get("maxItems", 4)))
        return [draw(instances((heads[i : i + 1] or [schema["items"]])[0])) for i in range(size)]
    if kind == "object":
        return {name: draw(instances(inner)) for name, inner in schema["properties"].items()}
    if kind == "string" and "minLength" in schema:
        return draw(
            st.text(
                st.characters(exclude_categories=["Cs", "Cc"]),
                min_size=schema["minLength"],
                max_size=schema["maxLength"],
            )
        )
    return {
        "null": None,
        "string": draw(st.text(st.characters(exclude_categories=["Cs", "Cc"]))),
    }.get(kind if isinstance(kind, str) else "", True)


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_is_valid_is_admitted_compact_and_indented(compiler, data):
    schema = data.draw(SCHEMAS)
    value = data.draw(instances(schema))
    # `instances` follows neither patterns nor formats, and the package checks few formats.
    assume('"format"' not in json.dumps(schema))
    assume(is_valid(value, schema) and not _has_small(value))
    for indent, separators in (
        (None, (",", ":")),
        (None, None),
        (2, None),
        (4, None),
        ("\t", None),
    ):
        text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)
        assert admits(compiler, schema, text), text
    assert admits(
        compiler, schema, json.dumps(value, ensure_ascii=False, separators=(",", ":")), compact=True
    )


def _has_small(value: Any) -> bool:
    """Whether a number needs an exponent, which bounds allow in part only."""
    return bool(re.search(r"\de[+-]?\d", json.dumps(value)))


# ---- layout and digits ----


@pytest.mark.parametrize("blanks", ["  ", "\n\n", " \n", "\t", "\n" + " " * 5, "\n\t\t", "\r\n"])
def test_a_gap_is_a_blank_or_a_newline_and_its_indent(compiler, blanks):
    schema = {"type": "array", "items": {"type": "integer"}}
    assert not admits(compiler, schema, f"[{blanks}1]")
    assert not admits(compiler, schema, f"[1,{blanks}2]")
    assert not admits(compiler, {"properties": {"a": True}}, f'{{"a":{blanks}1}}')


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "admitted", "refused"),
    [
        ({"type": "integer"}, [2**63 - 1, -(2**63), 0], [2**63, -(2**63) - 1, 10**43]),
        (
            {"type": "integer", "minimum": 1, "maximum": 65535},
            [1, 9, 80, 65535],
            [0, 65536, 10**44],
        ),
        ({"type": "integer", "multipleOf": 1000}, [0, -5000, 12000], [500, 1001, 10**40]),
        ({"type": "integer", "multipleOf": 7, "minimum": 8, "maximum": 21}, [14, 21], [7, 15, 28]),
        ({"type": "number"}, [0.1, 1e300, -2.5e-300, 2**53 + 0.0], [10**44]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [1, 0.1, 5e-05], [0, 0.0, 1.1]),
        ({"const": 2**70}, [2**70], [float(2**70)]),
    ],
)
def test_digits_are_bounded_and_bounds_hold(compiler, schema, admitted, refused):
    assert all(admits(compiler, schema, json.dumps(value)) for value in admitted)
    assert not any(admits(compiler, schema, json.dumps(value)) for value in refused)


@pytest.mark.parametrize("bound", [0.1, 1.0, 2.5, 0.30000000000000004, 123456.789])
def test_an_exclusive_bound_excludes_what_readers_round_to_it(compiler, bound):
    schema = {"type": "number", "exclusiveMaximum": bound, "minimum": -1}
    near = math.nextafter(bound, -1)
    assert admits(compiler, schema, repr(near))
    beyond = f"{near:.20f}"[:-1] + "9"
    for text in (repr(bound), f"{bound:.16f}", "0.99999999999999999999", beyond):
        assert float(text) < bound or not admits(compiler, schema, text), text


# ---- UTF-8 ----


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "string", "maxLength": 9},
        {"type": "string", "pattern": "[^a]*"},
        {"type": "object"},
    ],
    ids=json.dumps,
)
def test_strings_are_well_formed_utf8(compiler, schema):
    """Overlong forms, surrogates and points beyond the last are not."""
    ids = {TOKENIZER.convert_ids_to_tokens(i): i for i in range(len(TOKENIZER))}
    for point in (0x80, 0x7FF, 0x800, 0xFFF, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF):
        text = f'"{chr(point)}"' if schema["type"] == "string" else f'{{"{chr(point)}":1}}'
        assert admits(compiler, schema, text), hex(point)
    byte_code = bytes_to_unicode()
    for raw in (
        b"\xe0\x80\x80",
        b"\xc0\x80",
        b"\xed\xa0\x80",
        b"\xf0\x80\x80\x80",
        b"\xf4\x90\x80\x80",
        b"\xc3a",
    ):
        state = compiler.start(JSON_SCHEMA(schema))
        opening = '"' if schema["type"] == "string" else '{"'
        state.accept(encode(opening))
        assert not all(state.try_advance(ids[byte_code[byte]]) for byte in raw), raw


@pytest.mark.parametrize("text", [r'"\ud800"', r'"\udc00"', r'"\ud83da"', r'"\ud83d\u0041"'])
def test_no_half_of_a_surrogate_pair_is_escaped(compiler, text):
    assert not admits(compiler, {"type": "string"}, text)
    assert not admits(compiler, {"type": "string", "maxLength": 3}, text)


def test_a_pair_of_surrogates_is_one_character(compiler):
    schema = {"type": "string", "minLength": 1, "maxLength": 1}
    assert admits(compiler, schema, r'"\ud83d\ude00"') and admits(compiler, schema, r'"\u00e9"')


def test_a_name_cannot_be_hidden_by_escapes(compiler):
    schema = {"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}}
    assert admits(compiler, schema, '{"a":null,"b":1,"aa":2}')
    for name in ("a", r"\u0061"):
        assert not admits(compiler, schema, f'{{"{name}":1}}')


# ---- formats and texts ----


def test_dates_are_those_of_the_calendar(compiler):
    schema = {"type": "string", "format": "date"}
    for year in (1, 4, 100, 400, 1900, 1999, 2000, 2023, 2024, 5676, 9999):
        for month in range(14):
            last = monthrange(year, month)[1] if 1 <= month <= 12 else -1
            for day in (0, 1, 28, 29, 30, 31, 32):
                text = f'"{year:04}-{month:02}-{day:02}"'
                assert admits(compiler, schema, text) == (1 <= day <= last), text


@pytest.mark.parametrize(
    ("name", "admitted", "refused"),
    [
        ("ipv4", ["0.0.0.0", "255.249.80.104"], ["095.069.80.104", "256.1.1.1", "1.2.3"]),
        (
            "ipv6",
            ["::", "::1", "1::8", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4"],
            ["1::2::3", ":1", "1:2"],
        ),
        ("time", ["23:59:59Z", "00:00:00.5+05:30"], ["24:00:00Z", "12:00:60Z", "12:00:00"]),
        ("date-time", ["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z", "2024-02-29 10:00:00Z"]),
        ("duration", ["P1Y2M3DT4H5M6S", "PT0S", "P2W"], ["P", "PT", "P1D2H", "P1W2D"]),
        ("hostname", ["example.com", "a-b.c"], ["-a.com", "a..b", "a_b.c"]),
        ("email", ["ada.l+x@example.com"], ["ada", "a..b@c.de", "@x.de"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
        (
            "uri",
            ["https://u@ex.org:8/a?b#c", "urn:a:b", "http://[::1]/"],
            ["/a", "http://a b", "x:%4"],
        ),
        ("uri-reference", ["../a", "", "#x", "//h/p"], ["a b", "\\"]),
    ],
)
def test_formats(compiler, name, admitted, refused):
    schema = {"type": "string", "format": name}
    assert all(admits(compiler, schema, json.dumps(text)) for text in admitted)
    assert not any(admits(compiler, schema, json.dumps(text)) for text in refused)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1), min_size=1, max_size=4
    )
)
def test_escaped_texts_of_any_kind_are_choices(compiler, texts):
    """Every text of a choice is admitted to its end, and its beginnings are no ends."""
    structure = StructuredOutput.regex("|".join(map(re.escape, texts)))
    for text in texts:
        state = compiler.start(structure)
        tokens = encode(text)
        for i, token in enumerate(tokens):
            assert state.is_complete == (i > 0 and TOKENIZER.decode(tokens[:i]) in texts)
            assert state.try_advance(token)
        assert state.is_complete
