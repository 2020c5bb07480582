"""Conversations to prompts and answers back, with templates written here."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from peagle.chat import (
    opens_thinking,
    render_chat,
    resolve_chat_template,
    split_thinking,
    with_answer,
)
from peagle.errors import UserError
from peagle.messages import ChatMessage
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


# ---- which template ----


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


def test_a_missing_template_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.jinja.*No such file"):
        resolve_chat_template(tokenizer_with(CHATML), str(tmp_path / "gone.jinja"))


EFFORTS = CHATML + "{{ reasoning_effort }}"
FEW = "{{ messages[0].content }} {{ effort }} {{ tokenize }} {{ range(1) }}"
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    # which template
    (
        {"default": CHATML, "rag": CHATML},
        {"chat_template": "chatml"},
        r"'chatml'.*\(default, rag\).*\.jinja file.*Jinja template",
    ),
    (CHATML, {"chat_template": "chatml"}, r"'chatml'.*no named templates"),
    *((CHATML, {"chat_template": value}, f"{value!r}") for value in ("", "  ", 3)),
    (None, {}, r"no chat template.*pass chat_template.*generate"),
    ({"b": CHATML, "a": CHATML}, {}, r"one of: a, b"),
    (None, {"chat_template": "a\n{% if %}"}, r"does not parse: line 2"),
    ("{{ '' }}", {}, "empty prompt"),
    # templates that break out, or break
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", {}, "cannot render"),
    ("{{ messages.append(1) }}", {}, "cannot render"),
    ("{% include '/etc/passwd' %}", {}, "cannot render"),
    ("{{ messages[0].nothing.deeper }}", {}, "cannot render"),
    ("{{ messages[0].content + 1 }}", {}, "cannot render"),
    ("{{ 1 // 0 }}", {}, "cannot render"),
    # options
    (CHATML, {"thinking": True}, r"thinking is True.*neither enable_thinking nor"),
    (CHATML, {"template_kwargs": {"enable_thinking": True}}, "no option 'enable_thinking'"),
    (EFFORTS, {"thinking": False}, r"thinking is False.*set reasoning_effort in template_kw"),
    (
        EFFORTS,
        {"template_kwargs": {"enable_thinking": False}},
        r"no option 'enable_thinking'.*reads: reasoning_effort",
    ),
    (QWEN, {"thinking": "off"}, "'off'"),
    (QWEN, {"thinking": True, "template_kwargs": {"enable_thinking": False}}, "give one of them"),
    *(
        (FEW, {"template_kwargs": {name: 1}}, rf"no option '{name}'.*it reads: effort\.")
        for name in ("efort", "messages", "tokenize", "range", "raise_exception")
    ),
    (CHATML, {"tools": [{"name": "search"}]}, "does not read tools"),
    (CHATML, {"add_generation_prompt": True, "continue_final_message": True}, "Leave one out"),
]


@pytest.mark.parametrize(("template", "options", "expected"), REFUSED)
def test_templates_and_options_that_are_refused(
    template: Any, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        render_chat(tokenizer_with(template), HELLO, **options)


# ---- thinking and other options ----


def test_thinking_is_passed_under_the_name_that_the_template_reads() -> None:
    assert text_of(QWEN) == text_of(QWEN, thinking=True) == "[user]hé\n[assistant]"
    assert text_of(QWEN, thinking=False) == "[user]hé\n[assistant]<think></think>"
    assert text_of(DEEPSEEK) == text_of(DEEPSEEK, thinking=False) == "[user]hé\n[assistant]"
    assert text_of(DEEPSEEK, thinking=True) == "[user]hé\n[assistant]<think>\n"


def test_a_default_set_on_the_variable_itself_still_reads_it() -> None:
    template = "{% set thinking = thinking | default(true) %}{{ thinking }}{{ messages[0].role }}"
    assert text_of(template) == "Trueuser"
    assert text_of(template, thinking=False) == "Falseuser"


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


def test_template_kwargs_reach_the_template() -> None:
    template = "{{ messages[0].content }} {{ effort }}"
    assert text_of(template, template_kwargs={"effort": "low"}) == "hé low"


# ---- messages ----


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


def test_a_role_that_the_template_names_is_fine() -> None:
    template = "{% if messages[0].role == 'ipython' %}{{ messages[0].content }}{% endif %}"
    assert text_of(template, [{"role": "ipython", "content": "a"}]) == "a"


def test_a_tool_call_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    messages = [*HELLO, call, {"role": "tool", "content": "1"}]
    template = "{% for m in messages %}{{ m.content | default(m.tool_calls) }};{% endfor %}"
    assert text_of(template, messages) == "hé;[{'name': 'f'}];1;"


def test_a_template_that_reads_every_content_gets_an_empty_one() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    template = "{% for m in messages %}{{ m.content + ';' }}{{ m.tool_calls }}{% endfor %}"
    assert text_of(template, [*HELLO, call, *HELLO]) == "hé;;[{'name': 'f'}]hé;"


def test_calls_never_vanish() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    with pytest.raises(UserError, match="Message 2 of 3 has tool calls, and the chat template doe"):
        text_of(CHATML, [*HELLO, call, *HELLO])


def test_what_the_template_says_against_the_messages_is_passed_on() -> None:
    messages = [*HELLO, {"role": "system", "content": "late"}]
    with pytest.raises(UserError, match="System message must be first"):
        render_chat(tokenizer_with(STRICT), messages)
    assert text_of(STRICT, messages[::-1]) == "latehé"


# ---- answers ----


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
