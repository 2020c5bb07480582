"""Grammars that requests bring: refused where the operator wants none, ended where they cost."""

from __future__ import annotations

from typing import Any

import pytest

from peagle.serving.errors import ApiError
from peagle.serving.protocol import ChatBody, CompletionBody, ResponsesBody, refuse_grammars
from serving.live import KEYS, LiveServer

pytest.importorskip("xgrammar")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "regex", "pattern": "a+"}}, "response_format"),
        ({"response_format": {"type": "grammar", "grammar": "root ::= [a]"}}, "response_format"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= [a]"}}, "structured_outputs.grammar"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"guided_grammar": "root ::= [a]"}, "guided_grammar"),
    ],
)
def test_each_way_to_bring_a_grammar_is_refused(fields: dict[str, Any], param: str) -> None:
    body = CompletionBody.model_validate({"prompt": "x", **fields})
    with pytest.raises(ApiError, match="--no-user-grammars") as caught:
        refuse_grammars(body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.code == "grammars_not_allowed"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_choice": ["yes", "no"]},
        {"guided_json": SCHEMA},
        {"guided_regex": None},
    ],
)
def test_other_structures_stay(fields: dict[str, Any]) -> None:
    refuse_grammars(CompletionBody.model_validate({"prompt": "x", **fields}))
    messages = [{"role": "user", "content": "x"}]
    refuse_grammars(ChatBody.model_validate({"messages": messages, **fields}))
    refuse_grammars(ResponsesBody.model_validate({"input": "x"}))


def complete(server: LiveServer, **fields: Any) -> Any:
    with server.as_holder(KEYS[4]) as client:
        body = {"prompt": "x", "max_tokens": 8, "temperature": 0, **fields}
        return client.post("/v1/completions", json=body)


def test_a_server_that_takes_no_grammars(strict: LiveServer) -> None:
    answer = complete(strict, guided_regex="a+")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "grammars_not_allowed"
    assert complete(strict).status_code == 200


def test_a_grammar_beyond_the_budget(strict: LiveServer) -> None:
    for _ in range(2):
        answer = complete(strict, guided_choice=["yes", "no"])
        assert answer.status_code == 400
        assert "--grammar-budget" in answer.json()["error"]["message"]
