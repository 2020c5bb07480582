"""Conversations to prompts and answers back, with templates written here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from peagle.chat import (
    ChatMessage,
    opens_thinking,
    render_chat,
    resolve_chat_template,
    split_thinking,
    with_answer,
)
from peagle.errors import UserError
from tests.conftest import byte_tokenizer

CHATML = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
QWEN = (
    CHATML + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}"
)
# As DeepSeek and others do it: the default is set in the template, to a variable of that name.
DEEPSEEK = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    + CHATML
    + "{% if thinking %}<think>\n{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be first.') }}{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
)
HELLO = [{"role": "user", "content": "hé"}]


def tokenizer_with(template: str | dict[str, str] | None) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def text_of(template: Any, messages: Any = HELLO, **options: Any) -> str:
    tokenizer = tokenizer_with(template)
    token_ids = render_chat(tokenizer, messages, **options)
    assert all(isinstance(token_id, int) for token_id in token_ids)
    return str(tokenizer.decode(token_ids))


# ---- which template -------------------------------------------------------------------------


def test_the_own_template_is_the_default() -> None:
    assert text_of(CHATML) == "[user]hé\n[assistant]"
    assert text_of(CHATML, add_generation_prompt=False) == "[user]hé\n"


def test_a_template_may_be_a_file_a_text_or_a_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("file {{ messages[0].content }}", encoding="utf-8")
    assert text_of(None, chat_template=file) == "file hé"
    assert text_of(CHATML, chat_template=str(file)) == "file hé"
    assert text_of(CHATML, chat_template="text {{ messages[0].content }}") == "text hé"
    named = {"default": CHATML, "short": "{{ messages[0].content }}"}
    assert text_of(named, chat_template="short") == "hé"
    assert text_of(named) == "[user]hé\n[assistant]"


def test_tools_take_the_template_for_tools() -> None:
    named = {"default": CHATML, "tool_use": "{{ tools[0].name }}"}
    assert text_of(named, tools=[{"name": "search"}]) == "search"


def test_an_unknown_template_is_named_with_those_that_exist() -> None:
    tokenizer = tokenizer_with({"default": CHATML, "rag": CHATML})
    with pytest.raises(
        UserError, match=r"'chatml'.*\(default, rag\).*\.jinja file.*Jinja template"
    ):
        render_chat(tokenizer, HELLO, chat_template="chatml")
    with pytest.raises(UserError, match=r"'chatml'.*no named templates"):
        render_chat(tokenizer_with(CHATML), HELLO, chat_template="chatml")


@pytest.mark.parametrize("value", ["", "  ", 3])
def test_a_template_that_is_none_at_all(value: Any) -> None:
    with pytest.raises(UserError, match=f"{value!r}"):
        render_chat(tokenizer_with(CHATML), HELLO, chat_template=value)


def test_a_missing_template_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.jinja.*No such file"):
        resolve_chat_template(tokenizer_with(CHATML), str(tmp_path / "gone.jinja"))


def test_a_base_model_without_template_gets_the_remedy() -> None:
    with pytest.raises(UserError, match=r"no chat template.*pass chat_template.*generate"):
        render_chat(tokenizer_with(None), HELLO)


def test_several_templates_without_default() -> None:
    with pytest.raises(UserError, match=r"one of: a, b"):
        render_chat(tokenizer_with({"b": CHATML, "a": CHATML}), HELLO)


def test_a_template_that_does_not_parse() -> None:
    with pytest.raises(UserError, match=r"does not parse: line 2"):
        render_chat(tokenizer_with(None), HELLO, chat_template="a\n{% if %}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ messages[0].nothing.deeper }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_that_breaks_out_or_breaks_is_refused(template: str) -> None:
    with pytest.raises(UserError, match="cannot render"):
        render_chat(tokenizer_with(template), HELLO)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="empty prompt"):
        render_chat(tokenizer_with("{{ '' }}"), HELLO)


# ---- thinking and other options --------------------------------------------------------------


def test_thinking_is_passed_under_the_name_that_the_template_reads() -> None:
    assert text_of(QWEN) == text_of(QWEN, thinking=True) == "[user]hé\n[assistant]"
    assert text_of(QWEN, thinking=False) == "[user]hé\n[assistant]<think></think>"
    assert text_of(DEEPSEEK) == text_of(DEEPSEEK, thinking=False) == "[user]hé\n[assistant]"
    assert text_of(DEEPSEEK, thinking=True) == "[user]hé\n[assistant]<think>\n"


def test_a_default_set_on_the_variable_itself_still_reads_it() -> None:
    template = "{% set thinking = thinking | default(true) %}{{ thinking }}{{ messages[0].role }}"
    assert text_of(template) == "Trueuser"
    assert text_of(template, thinking=False) == "Falseuser"


def test_a_template_without_a_thinking_mode_cannot_think() -> None:
    with pytest.raises(UserError, match=r"thinking is True.*neither enable_thinking nor"):
        render_chat(tokenizer_with(CHATML), HELLO, thinking=True)
    with pytest.raises(UserError, match="no option 'enable_thinking'"):
        text_of(CHATML, template_kwargs={"enable_thinking": True})


@pytest.mark.parametrize(
    "options",
    [
        {"thinking": False},
        {"template_kwargs": {"enable_thinking": False}},
        {"thinking": False, "template_kwargs": {"thinking": False}},
    ],
)
def test_no_thinking_is_what_a_template_without_a_thinking_mode_does(options: Any) -> None:
    assert text_of(CHATML, **options) == text_of(CHATML)
    with pytest.raises(UserError, match="opens the model's reasoning in every prompt"):
        text_of(CHATML + "<think>\n", **options)


def test_a_template_with_efforts_is_not_without_thinking() -> None:
    template = CHATML + "{{ reasoning_effort }}"
    with pytest.raises(UserError, match=r"thinking is False.*set reasoning_effort in template_kw"):
        text_of(template, thinking=False)
    with pytest.raises(UserError, match=r"no option 'enable_thinking'.*reads: reasoning_effort"):
        text_of(template, template_kwargs={"enable_thinking": False})


def test_thinking_that_is_no_truth_value_is_refused() -> None:
    with pytest.raises(UserError, match="'off'"):
        render_chat(tokenizer_with(QWEN), HELLO, thinking="off")  # type: ignore[arg-type]


def test_thinking_given_twice_is_refused() -> None:
    with pytest.raises(UserError, match="give one of them"):
        render_chat(
            tokenizer_with(QWEN), HELLO, thinking=True, template_kwargs={"enable_thinking": False}
        )


def test_template_kwargs_reach_the_template() -> None:
    template = "{{ messages[0].content }} {{ effort }}"
    assert text_of(template, template_kwargs={"effort": "low"}) == "hé low"


@pytest.mark.parametrize("name", ["efort", "messages", "tokenize", "range", "raise_exception"])
def test_template_kwargs_without_effect_are_refused(name: str) -> None:
    template = "{{ messages[0].content }} {{ effort }} {{ tokenize }} {{ range(1) }}"
    with pytest.raises(UserError, match=rf"no option '{name}'.*it reads: effort\."):
        render_chat(tokenizer_with(template), HELLO, template_kwargs={name: 1})


def test_tools_without_effect_are_refused() -> None:
    with pytest.raises(UserError, match="does not read tools"):
        render_chat(tokenizer_with(CHATML), HELLO, tools=[{"name": "search"}])


# ---- messages -------------------------------------------------------------------------------


def test_message_objects_and_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text_of(CHATML, [ChatMessage("user", parts)]) == "[user]a\nb\n[assistant]"


def test_the_final_message_can_be_left_open() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Sure, "}]
    assert text_of(CHATML, messages, continue_final_message=True) == "[user]hé\n[assistant]Sure, "


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "empty"),
        ("hello", "expected a list of messages"),
        ({"role": "user", "content": "a"}, "expected a list of messages"),
        (["hello"], "Message 1 of 1 is 'hello'"),
        ([{"content": "a"}], "role None"),
        ([*HELLO, {"role": "asistant", "content": "a"}], "Message 2 of 2 has the role 'asistant'"),
        ([{"role": 3, "content": "a"}], "role 3"),
        ([{"role": "user"}], r"\(user\) has no content"),
        ([{"role": "assistant", "content": None}], r"\(assistant\) has no content"),
        ([{"role": "user", "content": 3}], "content 3"),
        ([{"role": "user", "content": []}], "empty list of parts"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'.*text only"),
        ([{"role": "user", "content": ["a"]}], "type None"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text None"),
        ([*HELLO, {"role": "assistant", "content": "a"}], "continue_final_message"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        render_chat(tokenizer_with(CHATML), messages)


def test_both_ends_at_once_are_refused() -> None:
    with pytest.raises(UserError, match="Leave one out"):
        render_chat(
            tokenizer_with(CHATML), HELLO, add_generation_prompt=True, continue_final_message=True
        )


def test_a_role_that_the_template_names_is_fine() -> None:
    template = "{% if messages[0].role == 'ipython' %}{{ messages[0].content }}{% endif %}"
    assert text_of(template, [{"role": "ipython", "content": "a"}]) == "a"


def test_a_tool_call_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    messages = [*HELLO, call, {"role": "tool", "content": "1"}]
    template = "{% for m in messages %}{{ m.content | default(m.tool_calls) }};{% endfor %}"
    assert text_of(template, messages) == "hé;[{'name': 'f'}];1;"


def test_what_the_template_says_against_the_messages_is_passed_on() -> None:
    messages = [*HELLO, {"role": "system", "content": "late"}]
    with pytest.raises(UserError, match="System message must be first"):
        render_chat(tokenizer_with(STRICT), messages)
    assert text_of(STRICT, messages[::-1]) == "latehé"


# ---- answers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("an answer", None, ("", "an answer")),
        ("<think>\nwhy\n</think>\n\nan answer", None, ("why", "an answer")),
        ("\n<think>why</think>  indented", None, ("why", "  indented")),
        ("<think>\nwhy it was cut", None, ("why it was cut", "")),
        ("<think></think>\n\nat once", None, ("", "at once")),
        ("why\n</think>\nan answer", None, ("why", "an answer")),
        ("why it was cut", True, ("why it was cut", "")),
        ("say </think> to stop", False, ("", "say </think> to stop")),
        ("write <think> first", None, ("", "write <think> first")),
        ("", None, ("", "")),
    ],
)
def test_split_thinking(text: str, opened: bool | None, expected: tuple[str, str]) -> None:
    assert split_thinking(text, opened=opened) == expected


def test_split_thinking_with_other_markers() -> None:
    assert split_thinking("[T]why[/T]so", "[T]", "[/T]") == ("why", "so")


def test_whether_a_prompt_opens_the_reasoning() -> None:
    tokenizer = tokenizer_with(DEEPSEEK)
    assert opens_thinking(tokenizer, render_chat(tokenizer, HELLO, thinking=True))
    assert not opens_thinking(tokenizer, render_chat(tokenizer, HELLO, thinking=False))


def test_turns_add_up_without_their_reasoning() -> None:
    first = with_answer([ChatMessage("user", "hé")], "<think>why</think>\nso")
    assert first == [*HELLO, {"role": "assistant", "content": "so"}]
    second = [*first, {"role": "user", "content": "and?"}]
    assert text_of(CHATML, second) == "[user]hé\n[assistant]so\n[user]and?\n[assistant]"
    assert len(with_answer(second, "then")) == 4
    assert len(second) == 3


def test_an_open_final_message_is_gone_on_with() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Sure, "}]
    assert with_answer(messages, "here")[-1] == {"role": "assistant", "content": "Sure, here"}
    assert messages[-1]["content"] == "Sure, "


def test_a_malformed_conversation_gets_no_answer() -> None:
    with pytest.raises(UserError, match="empty"):
        with_answer([], "a")
