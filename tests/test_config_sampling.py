"""Every check of a request's sampling parameters and of the shape that its output must have."""

import json
import math
import re
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from peagle.config import (
    MAX_LOGPROBS,
    MAX_OUTPUTS,
    MAX_SEED,
    MAX_SPECULATIVE_TOKENS,
    MAX_STOP_STRINGS,
    SamplingParams,
    StructuredOutput,
    StructuredOutputsParams,
)
from peagle.errors import UserError

JSON = StructuredOutput.json_object()


def test_the_defaults_are_greedy_and_ask_for_nothing() -> None:
    params = SamplingParams()
    assert params.is_greedy and params.max_tokens == 128
    assert not SamplingParams(temperature=1e-300).is_greedy
    neutral = SamplingParams(
        top_k=0, top_p=1, min_p=0, typical_p=1, repetition_penalty=1, logit_bias={}, stop=[]
    )
    assert neutral == params


@pytest.mark.parametrize(
    ("name", "least", "most", "optional"),
    [
        ("max_tokens", 1, None, False),
        ("min_tokens", 0, None, False),
        ("top_k", 0, None, False),
        ("n", 1, MAX_OUTPUTS, False),
        ("logprobs", 0, MAX_LOGPROBS, True),
        ("prompt_logprobs", 0, MAX_LOGPROBS, True),
        ("num_speculative_tokens", 0, MAX_SPECULATIVE_TOKENS, True),
    ],
)
def test_counts(name: str, least: int, most: int | None, optional: bool) -> None:
    rest: dict[str, Any] = {"temperature": 1.0}
    if name == "min_tokens":
        rest["max_tokens"] = 10**6
    for value in (least, least + 1, 10**5 if most is None else most):
        assert getattr(SamplingParams(**rest, **{name: value}), name) == value
    below = -2 if name == "top_k" else least - 1  # a top_k of -1 keeps all tokens, as in vLLM
    wrong: list[Any] = [below, 1.0, "1", True, math.nan, [1], *([] if optional else [None])]
    wrong += [] if most is None else [most + 1]
    for value in wrong:
        with pytest.raises(UserError) as caught:
            SamplingParams(**rest, **{name: value})
        message = str(caught.value)
        assert message.startswith(f"{name} is {value!r}; expected a whole number")
        assert str(least) in message and ("or none" in message) is optional
    if optional:
        assert getattr(SamplingParams(**{name: None}), name) is None


def test_a_negative_seed_stands_for_one_that_is_not() -> None:
    assert SamplingParams(seed=None).seed is None
    for seed in (0, 1, MAX_SEED):
        assert SamplingParams(seed=seed).seed == seed
    for seed in (-1, -7, -MAX_SEED, -(2**63)):
        params = SamplingParams(seed=seed)
        assert params.seed == seed % 2**63 and replace(params) == params
    for seed in (-(2**63) - 1, 2**63, 1.0, "1", True, math.nan):
        with pytest.raises(UserError) as caught:
            SamplingParams(seed=seed)  # type: ignore[arg-type]
        expected = "expected a whole number from -2**63 to 2**63 - 1, or none."
        assert str(caught.value) == f"seed is {seed!r}; {expected}"


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("temperature", [0, 0.7, 1e9], [-0.1]),
        ("top_p", [1e-9, 0.5, 1], [0, 1.01, -1]),
        ("typical_p", [1e-9, 0.5, 1], [0, 1.01, -1]),
        ("min_p", [0, 0.5, 1], [-0.01, 1.01]),
        ("repetition_penalty", [1e-3, 1, 50], [0, -1]),
        ("presence_penalty", [-2, 0, 2], [-2.01, 2.01]),
        ("frequency_penalty", [-2, 0, 2], [-2.01, 2.01]),
    ],
)
def test_numbers(name: str, right: list[float], wrong: list[Any]) -> None:
    for value in right:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (*wrong, math.nan, math.inf, -math.inf, "0.5", None, True, [0.5]):
        with pytest.raises(UserError) as caught:
            SamplingParams(**{name: value})
        assert str(caught.value).startswith(f"{name} is {value!r}; expected a number")


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_ids(name: str) -> None:
    for given in ([3, 1], (3, 1), range(3, 1, -1)):
        assert getattr(SamplingParams(**{name: given}), name) == tuple(given)
    assert set(getattr(SamplingParams(**{name: {3, 1}}), name)) == {1, 3}
    for wrong in (5, "12", [1, -1], [1.0], [True], ["1"], [[1]], 1.5):
        with pytest.raises(UserError, match=f"^{name} is "):
            SamplingParams(**{name: wrong})


def test_allowed_token_ids_are_none_or_some() -> None:
    assert SamplingParams(allowed_token_ids=None).allowed_token_ids is None
    with pytest.raises(UserError, match=r"allowed_token_ids is \(\); expected at least one"):
        SamplingParams(allowed_token_ids=[])  # type: ignore[arg-type]


def test_logit_bias() -> None:
    wanted = ((5, 1.0), (7, -math.inf))
    for given in ({5: 1, 7: -math.inf}, [(5, 1.0), [7, -math.inf]], wanted):
        assert SamplingParams(logit_bias=given).logit_bias == wanted  # type: ignore[arg-type]
    for wrong, expected in (
        (5, "a mapping of token ids"),
        ({5}, "a mapping of token ids"),
        ("ab", "pairs of a token id and a number"),
        ([(5,)], "pairs of"),
        ([(5, 1, 2)], "pairs of"),
        ([5], "pairs of"),
        ({"5": 1.0}, "token ids of at least 0"),
        ({-1: 1.0}, "token ids of at least 0"),
        ({True: 1.0}, "token ids of at least 0"),
        ({5: math.inf}, "finite numbers, or -inf"),
        ({5: math.nan}, "finite numbers"),
        ({5: "1"}, "finite numbers"),
        ({5: None}, "finite numbers"),
        ({5: True}, "finite numbers"),
    ):
        with pytest.raises(UserError, match=r"^logit_bias is ") as caught:
            SamplingParams(logit_bias=wrong)  # type: ignore[arg-type]
        assert expected in str(caught.value)


def test_bad_words() -> None:
    params = SamplingParams(bad_words=["no", [1, 2], (3,)])  # type: ignore[arg-type]
    assert params.bad_words == ("no", (1, 2), (3,))
    for wrong, expected in (
        ("no", "a list of texts or of lists"),
        (5, "a list of texts or of lists"),
        ([""], "texts that are not empty"),
        ([[]], "lists of at least one token id"),
        ([5], "a list of token ids"),
        ([[1, -2]], "token ids of at least 0"),
        ([["a"]], "token ids of at least 0"),
    ):
        with pytest.raises(UserError, match=r"^bad_words is ") as caught:
            SamplingParams(bad_words=wrong)  # type: ignore[arg-type]
        assert expected in str(caught.value)


def test_stop_strings() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert len(SamplingParams(stop=tuple("x" * 64)).stop) == MAX_STOP_STRINGS
    for wrong, expected in (
        (5, "a string or a list of strings"),
        ("", "strings that are not empty"),
        (["a", ""], "strings that are not empty"),
        ([5], "strings that are not empty"),
        (["x"] * 65, "stop is '65 strings'; expected at most 64"),
    ):
        with pytest.raises(UserError, match=r"^stop is ") as caught:
            SamplingParams(stop=wrong)  # type: ignore[arg-type]
        assert expected in str(caught.value)


def test_ignore_eos_is_true_or_false() -> None:
    with pytest.raises(UserError, match="ignore_eos is 1; expected true or false"):
        SamplingParams(ignore_eos=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9 and max_tokens 8"),
        ({"n": 2}, "n is 2 and temperature 0: greedy outputs are all the same"),
        ({"structured_output": "json"}, "structured_output is 'json'; expected a Structured"),
        ({"structured_output": JSON, "allowed_token_ids": [1]}, "allowed_token_ids (1,) were both"),
        ({"structured_output": JSON, "bad_words": ["a"]}, "bad_words ('a',) were both given"),
        ({"structured_output": JSON, "min_tokens": 2}, "min_tokens 2 were both given"),
        ({"structured_output": JSON, "ignore_eos": True}, "structured_output and ignore_eos"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_contradictions(params: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        SamplingParams(**params)
    assert expected in str(caught.value)


def test_what_goes_with_a_grammar() -> None:
    params = SamplingParams(
        structured_output=JSON,
        logit_bias={1: -math.inf},  # type: ignore[arg-type]
        repetition_penalty=1.2,
        stop_token_ids=(1,),
        stop=("x",),
        n=2,
        temperature=1.0,
    )
    assert params.structured_output is JSON
    assert SamplingParams(min_tokens=8, max_tokens=8).min_tokens == 8


# --- vLLM's names ---

VLLM_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "bad_words": None,
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "flat_logprobs": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "structured_outputs": None,
    "guided_decoding": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
    "best_of": None,
    "logits_processors": None,
}


def test_the_neutral_arguments_of_vllm_change_nothing() -> None:
    assert SamplingParams(**VLLM_DEFAULTS) == SamplingParams()
    empty: dict[str, Any] = {"extra_args": {}, "logits_processors": []}
    assert SamplingParams(**empty, best_of=1) == SamplingParams()
    assert SamplingParams(n=2, best_of=2, temperature=1.0) == SamplingParams(n=2, temperature=1.0)
    assert replace(SamplingParams(**VLLM_DEFAULTS), max_tokens=3) == SamplingParams(max_tokens=3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"detokenize": False}, "detokenize is False; expected True or nothing: every output"),
        ({"detokenize": 1}, "detokenize is 1; expected True or nothing"),
        ({"include_stop_str_in_output": True}, "the text ends before the stop string"),
        ({"skip_special_tokens": False}, "token_ids has them"),
        ({"best_of": 3}, "best_of is 3; expected None or nothing"),
        ({"best_of": 1, "n": 2, "temperature": 1}, "best_of is 1; expected None or nothing"),
        ({"logits_processors": [print]}, "logits_processors is [<built-in"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx is unknown"),
        ({"structured_outputs": "a+"}, "structured_outputs is 'a+'; expected StructuredOutputs"),
        (
            {"guided_decoding": {"regex": "a"}, "structured_output": JSON},
            "guided_decoding was given beside another constraint",
        ),
    ],
)
def test_what_vllm_would_do_otherwise_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        SamplingParams(**values)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
def test_structures_in_the_names_of_vllm(name: str) -> None:
    cases: list[dict[str, Any]] = [
        {"regex": "a|b"},
        {"choice": ["a"]},
        {"json": {"type": "object"}},
    ]
    for given in cases:
        expected = StructuredOutput.from_vllm(given)
        for wanted in (given, StructuredOutputsParams(**given)):
            asked: dict[str, Any] = {name: wanted}
            params = SamplingParams(**asked)
            assert params.structured_output == expected
            assert replace(params, seed=3).structured_output == expected
    with pytest.raises(UserError, match="Expected exactly one of"):
        StructuredOutputsParams(regex="a", choice=["b"])


def test_an_assigned_value_is_checked_with_the_next_copy() -> None:
    params = SamplingParams()
    params.max_tokens, params.stop = 7, "x"  # type: ignore[assignment]
    assert replace(params) == SamplingParams(max_tokens=7, stop=("x",))
    params.top_p = 3.0
    with pytest.raises(UserError, match=r"top_p is 3\.0"):
        replace(params)


# --- structured output ---


def test_kinds_of_structure() -> None:
    assert StructuredOutput("json") == JSON and JSON.source == ""
    assert StructuredOutput.regex("a+").source == "a+"
    assert StructuredOutput.ebnf('root ::= "a"').kind == "ebnf"
    assert StructuredOutput.json_schema(True).source == "true"


def test_schemas_are_compact_json() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"const": "é"}}}
    forms = (schema, json.dumps(schema, indent=3), json.dumps(schema, ensure_ascii=False))
    (source,) = {StructuredOutput.json_schema(form).source for form in forms}
    # The order of properties is that of the output, so it stays.
    expected = '{"type":"object","properties":{"b":{"type":"null"},"a":{"const":"é"}}}'
    assert source == expected


@pytest.mark.parametrize(
    ("kind", "source", "expected"),
    [
        ("xml", "", "structured output kind is 'xml'; expected one of json, json_schema, regex"),
        (None, "", "structured output kind is None"),
        (["json"], "", "structured output kind is ['json']"),
        ("json", "{}", "source is '{}'; expected none with kind \"json\""),
        ("regex", "", "regex is ''; expected text that is not empty"),
        ("ebnf", "", "ebnf is ''; expected text that is not empty"),
        ("regex", 5, "regex is 5; expected text"),
        ("ebnf", None, "ebnf is None; expected text"),
        ("json_schema", "", "json_schema is not JSON"),
        ("json_schema", "{", "json_schema is not JSON"),
        ("json_schema", "5", "json_schema is 5; expected a JSON object"),
        ("json_schema", "[]", "json_schema is []; expected a JSON object"),
        ("json_schema", None, "json_schema is None; expected a JSON object"),
        ("json_schema", {"const": {1}}, "json_schema cannot be written as JSON"),
        ("json_schema", {"const": math.nan}, "json_schema cannot be written as JSON"),
        ("json_schema", '{"const": Infinity}', "json_schema cannot be written as JSON"),
        ("json_schema", MappingProxyType({}), "json_schema cannot be written as JSON"),
        ("json_schema", "[" * 10**6, "json_schema is nested too deeply"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_structures_that_are_refused(kind: Any, source: Any, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        StructuredOutput(kind, source)
    assert expected in str(caught.value)


@pytest.mark.parametrize(("kind", "compact"), [("regex", True), ("json", 1), ("ebnf", "yes")])
def test_compact_is_for_json(kind: Any, compact: Any) -> None:
    with pytest.raises(UserError, match=r"compact is .*; expected true or false, true for JSON"):
        StructuredOutput(kind, "" if kind == "json" else "a", compact)


def test_a_schema_that_holds_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(UserError, match="json_schema cannot be written as JSON"):
        StructuredOutput.json_schema(schema)
    deep: dict[str, Any] = {}
    for _ in range(10**5):
        deep = {"items": deep}
    with pytest.raises(UserError, match="json_schema cannot be written as JSON"):
        StructuredOutput.json_schema(deep)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"json": {"type": "object"}}, StructuredOutput.json_schema({"type": "object"})),
        ({"json": '{"type": "object"}'}, StructuredOutput.json_schema({"type": "object"})),
        ({"json_object": True, "regex": None}, StructuredOutput.json_object()),
        (
            {"json": {}, "disable_any_whitespace": True, "disable_fallback": True},
            StructuredOutput.json_schema({}, compact=True),
        ),
        ({"regex": "[ab]+", "json_object": False}, StructuredOutput.regex("[ab]+")),
        ({"regex": "a", "disable_any_whitespace": True}, StructuredOutput.regex("a")),
        ({"grammar": 'root ::= "x"'}, StructuredOutput.ebnf('root ::= "x"')),
    ],
)
def test_constraints_in_the_names_of_vllm(given: Any, expected: StructuredOutput) -> None:
    assert StructuredOutput.from_vllm(given) == expected


def test_a_choice_is_a_regular_expression_that_matches_the_texts_alone() -> None:
    texts = ["a+b", "yes", "yes (no)", "zwei\nZeilen", "日本"]
    structure = StructuredOutput.from_vllm({"choice": texts})
    assert structure.kind == "regex"
    for text in texts:
        assert re.fullmatch(structure.source, text)
    for text in ("aab", "ye", "yes (no) ", "", "yesa+b"):
        assert not re.fullmatch(structure.source, text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "^Expected exactly one of guided_json, guided_regex.*; found none[.]"),
        ({"json": None}, "; found none[.]"),
        ({"json": {}, "regex": "a"}, "; found guided_json, guided_regex[.]"),
        ({"choice": "yes"}, "guided_choice is 'yes'; expected a list of texts"),
        ({"choice": []}, "guided_choice is .*; expected a list of texts"),
        ({"choice": ["a", ""]}, "expected a list of texts, none of them empty"),
        ({"choice": ["a", 1]}, "expected a list of texts"),
        ({"regex": 1}, "guided_regex is 1; expected text"),
        ({"grammar": ""}, "guided_grammar is ''; expected text"),
        ({"json": 5}, "guided_json is 5; expected a JSON schema"),
        ({"json": "{"}, "not JSON"),
        ({"json_object": 1}, "guided_json_object is 1; expected true or false"),
        ({"json": {}, "disable_any_whitespace": "yes"}, "is 'yes'; expected true or false"),
        ({"regx": "a"}, "guided_regx is unknown.*Did you mean 'guided_regex'"),
        ({"json": {}, "whitespace_pattern": " "}, "guided_whitespace_pattern is not supported"),
        ({"json": {}, "disable_additional_properties": True}, "into the schema"),
        ({"structural_tag": "{}"}, "guided_structural_tag is not supported"),
    ],
)
def test_what_cannot_be_read_in_the_names_of_vllm(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        StructuredOutput.from_vllm(given, "guided_")
