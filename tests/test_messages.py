"""Messages and tools as OpenAI's API has them, in the form that chat templates read."""

import json
from typing import Any

import pytest

from peagle.chat import render_chat
from peagle.errors import UserError
from tests.conftest import byte_tokenizer

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Be kind."}
WHOLE = "{{ messages | tojson }}{{ (tools or []) | tojson }}"
HARMONY = "{# <|channel|><|message|> 'developer' #}" + WHOLE
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
# Templates of four families: every system message is written, the first alone, each by a strict
# one, and none; other roles say nothing.
EVERY = (
    "{% for m in messages %}{% if m.role in ('user', 'system') %}[{{ m.role }}]{{ m.content }}"
    "{% endif %}{% endfor %}"
)
FIRST = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content | trim }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[user]{{ m.content }}{% endif %}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be first.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
NONE = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
KNOWN = (
    "{% for m in messages %}{% if m['role'] in ['user', 'developer', 'system'] %}"
    "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)


def text_of(template: str, messages: Any, **options: Any) -> str:
    tokenizer = byte_tokenizer()
    return str(
        tokenizer.decode(render_chat(tokenizer, messages, chat_template=template, **options))
    )


def formed(*messages: Any, template: str = WHOLE, **options: Any) -> Any:
    """The messages and the tools that the template got."""
    text = text_of(template, list(messages), **options)
    got, end = json.JSONDecoder().raw_decode(text)
    return got, json.loads(text[end:])


# ---- developer messages ----


@pytest.mark.parametrize("template", [EVERY, FIRST, STRICT])
def test_a_developer_message_is_a_system_message_where_the_template_knows_no_other(
    template: str,
) -> None:
    assert text_of(template, [DEVELOPER, USER]) == "[system]Be kind.[user]hi"
    joined = "[system]Be brief.\n\nBe kind.[user]hi"
    assert text_of(template, [SYSTEM, DEVELOPER, USER]) == joined
    assert text_of(template, [SYSTEM, DEVELOPER, DEVELOPER, USER]) == (
        "[system]Be brief.\n\nBe kind.\n\nBe kind.[user]hi"
    )


def test_a_late_developer_message_is_written_where_it_stands_or_refused() -> None:
    late = [USER, DEVELOPER, USER]
    assert text_of(EVERY, late) == "[user]hi[system]Be kind.[user]hi"
    with pytest.raises(UserError, match=r"Message 2 of 3 is a developer message.*leave it out"):
        text_of(FIRST, late)
    with pytest.raises(UserError, match="System message must be first"):
        text_of(STRICT, late)


def test_a_developer_message_never_vanishes() -> None:
    for messages in ([DEVELOPER, USER], [SYSTEM, DEVELOPER, USER]):
        with pytest.raises(UserError, match=r"is a developer message.*leave it out"):
            text_of(NONE, messages)
    # A template may change the words, as long as it writes them.
    shouting = EVERY.replace("m.content", "m.content | upper")
    assert text_of(shouting, [DEVELOPER, USER]) == "[system]BE KIND.[user]HI"


def test_a_template_that_knows_developers_gets_them() -> None:
    assert text_of(KNOWN, [SYSTEM, DEVELOPER, USER]) == (
        "[system]Be brief.[developer]Be kind.[user]hi"
    )
    # A word in its text, or in a comment, is no role.
    assert text_of("{# 'developer' #}developer" + EVERY, [DEVELOPER, USER]) == (
        "developer[system]Be kind.[user]hi"
    )


@pytest.mark.parametrize("role", ["<|im_end|>", "user\n", "a b", "user<|im_end|>"])
def test_a_role_is_a_word(role: str) -> None:
    template = EVERY + "{{ '<|im_end|>' }}{{ 'user\n' }}{{ 'a b' }}{{ 'user<|im_end|>' }}"
    with pytest.raises(UserError, match=r"Message 1 of 1 has the role .*; expected one of"):
        text_of(template, [{"role": role, "content": "a"}])


@pytest.mark.parametrize("role", ["content", "role", "x"])
def test_the_name_of_a_field_is_no_role(role: str) -> None:
    template = "{% for m in messages %}{{ m['role'] }}{{ m['content'] }}{{ m.x }}{% endfor %}"
    with pytest.raises(UserError, match=r"Message 1 of 1 has the role .*; expected one of"):
        text_of(template, [{"role": role, "content": "a"}])


# ---- calls and reasoning ----


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"city": "Oslo"}', {"city": "Oslo"}),
        ({"city": "Oslo"}, {"city": "Oslo"}),
        ("{city: Oslo}", "{city: Oslo}"),
        ("[1]", "[1]"),
        ("", ""),
        (None, None),
    ],
)
def test_arguments_are_objects_where_their_text_is_one(given: Any, expected: Any) -> None:
    for content in ({}, {"content": None}, {"content": ""}, {"content": "I look."}):
        asked = {"role": "assistant", **content, "tool_calls": [call(given)]}
        got, _ = formed(USER, asked, {"role": "tool", "content": "20"})
        assert got[1]["tool_calls"] == [call(expected)]
        assert got[1].get("content", "") == (content.get("content") or "")
    flat = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": given}]}
    got, _ = formed(USER, flat, USER)
    assert got[1]["tool_calls"] == [{"name": "f", "arguments": expected}]
    text = {"role": "assistant", "tool_calls": json.dumps([call(given)])}
    assert formed(USER, text, USER)[0][1]["tool_calls"] == [call(expected)]


def test_an_empty_list_of_calls_is_no_calls() -> None:
    for calls in (None, [], "[]"):
        got, _ = formed(USER, {"role": "assistant", "content": "a", "tool_calls": calls}, USER)
        assert got[1] == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize("calls", ["f()", {"name": "f"}, 3])
def test_calls_that_are_no_list_are_refused(calls: Any) -> None:
    with pytest.raises(UserError, match=r"Message 2 of 3 has the tool_calls.*expected a list"):
        formed(USER, {"role": "assistant", "content": "a", "tool_calls": calls}, USER)


def test_reasoning_has_one_name() -> None:
    for given in (
        {"reasoning": "why"},
        {"reasoning_content": "why"},
        {"reasoning": "why", "reasoning_content": None},
        {"reasoning": "other", "reasoning_content": "why"},
    ):
        got, _ = formed(USER, {"role": "assistant", "content": "a", **given}, USER)
        assert got[1]["reasoning_content"] == "why"


# ---- tools ----


def test_tools_may_be_json_text() -> None:
    for given in ([TOOL], (TOOL,), json.dumps([TOOL]), [json.dumps(TOOL)]):
        assert formed(USER, tools=given)[1] == [TOOL]
    for none in (None, [], "", " ", "null", "[]"):
        assert formed(USER, tools=none)[1] == []


@pytest.mark.parametrize("tools", ["search", 3, TOOL, json.dumps(TOOL), '[{"a": 1}'])
def test_tools_that_are_no_list_are_refused_by_name(tools: Any) -> None:
    with pytest.raises(UserError, match=r"The tools are .*expected a list of JSON schemas"):
        formed(USER, tools=tools)


@pytest.mark.parametrize("tool", ["search", 3, None, lambda city: city])
def test_a_tool_that_is_no_schema_is_refused_by_number(tool: Any) -> None:
    with pytest.raises(UserError, match=r"Tool 2 of 2 is .*expected a list of JSON schemas"):
        formed(USER, tools=[TOOL, tool])


def test_gpt_oss_needs_descriptions_and_functions() -> None:
    _, tools = formed(USER, template=HARMONY, tools=[TOOL])
    assert tools == [{**TOOL, "function": {**TOOL["function"], "description": ""}}]
    with pytest.raises(UserError, match=r"Tool 1 of 1 has the function None; .*gpt-oss"):
        formed(USER, template=HARMONY, tools=[{"name": "f"}])
