"""`LLM.chat`: what it generates from, and what it gives back for the next turn."""

from collections.abc import Callable
from pathlib import Path

import pytest

from peagle import LLM, SamplingParams
from peagle.chat import render_chat
from peagle.errors import UserError
from peagle.messages import ChatMessage

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def llm(target_folder: Path) -> LLM:
    return LLM(target_folder)


def test_chat_generates_from_the_rendered_conversation(llm: LLM) -> None:
    (answer,) = llm.chat(HELLO, PARAMS, chat_template=TEMPLATE)
    prompt = llm.tokenizer.encode("<user>hello<assistant>", add_special_tokens=False)
    assert answer.output.prompt_token_ids == prompt
    assert answer.output.token_ids == llm.generate([prompt], PARAMS)[0].token_ids
    assert answer.answer == answer.output.text and answer.reasoning == ""
    assert answer.messages == [*HELLO, {"role": "assistant", "content": answer.answer}]


def test_the_next_turn_reads_the_answer(llm: LLM) -> None:
    (first,) = llm.chat([ChatMessage("user", "hello")], PARAMS, chat_template=TEMPLATE)
    more = [*first.messages, {"role": "user", "content": "and?"}]
    (second,) = llm.chat(more, PARAMS, chat_template=TEMPLATE)
    expected = render_chat(llm.tokenizer, more, chat_template=TEMPLATE)
    assert second.output.prompt_token_ids == expected
    assert [m["role"] for m in second.messages] == ["user", "assistant", "user", "assistant"]


def test_open_thinking_is_kept_out_of_the_answer(llm: LLM) -> None:
    (answer,) = llm.chat(HELLO, PARAMS, chat_template=TEMPLATE, thinking=True)
    assert answer.answer == "", "the reasoning was cut off before its end"
    assert answer.reasoning == answer.output.text.strip()
    assert answer.messages[-1] == {"role": "assistant", "content": ""}


def test_conversations_are_batched_and_each_equals_itself_alone(
    target_folder: Path, head_folders: Callable[..., Path]
) -> None:
    head = {"model": str(head_folders(parallel=True)), "num_speculative_tokens": 3}
    llm = LLM(target_folder, speculative_config=head, dtype="float64")
    chats = [[{"role": "user", "content": text}] for text in ("a", "two words", "third")]
    together = llm.chat(chats, PARAMS, chat_template=TEMPLATE)
    for chat, answer in zip(chats, together, strict=True):
        (alone,) = llm.chat(chat, PARAMS, chat_template=TEMPLATE)
        assert alone.output.token_ids == answer.output.token_ids
        assert answer.output.stats.num_drafts > 0


def test_no_conversation_no_answer(llm: LLM) -> None:
    assert llm.chat([], chat_template=TEMPLATE) == []


@pytest.mark.parametrize(
    ("chats", "options", "problem"),
    [
        ([HELLO, []], {"chat_template": TEMPLATE}, "Conversation 2 of 2: "),
        (HELLO, {}, "chat_template"),
        (HELLO, {"chat_template": "no-such-template"}, "'no-such-template'"),
        (HELLO, {"chat_template": "{{ messages[0].content }}", "thinking": True}, "thinking"),
    ],
)
def test_mistakes_are_named(llm: LLM, chats: list, options: dict, problem: str) -> None:
    with pytest.raises(UserError, match="Conversation") as caught:
        llm.chat(chats, PARAMS, **options)
    assert problem in str(caught.value)
    assert not llm.engine.has_unfinished
