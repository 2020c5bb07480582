"""Prompts of nine families: the same everywhere, and with no special token but the template's."""

import asyncio
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from peagle.chat import render_chat
from peagle.config import SamplingParams
from peagle.data.readers import AskedConversation, Record
from peagle.data.regenerate import Ask, LocalAnswerer
from peagle.data.samples import Sample, SampleMaker
from peagle.errors import UserError
from peagle.evaluation.decoding import Request
from peagle.evaluation.engine_backend import EngineBackend
from peagle.llm import LLM
from peagle.serving.tokenizer import Tokenizer
from tests.families import FAMILIES, FIXTURES, small_tokenizer, tokenizer_of

Messages = list[dict[str, Any]]

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Now.", "parameters": PARAMETERS},
    }
]
ARGUMENTS = {"city": "Zürich", "days": [1, 2]}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "How is the weather? "}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "It is 20 <b>degrees</b>."}


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function}


def called(arguments: Any, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(arguments)], **others}


ANSWERED = {"role": "assistant", "content": "It is warm."}
# The messages before an answer as clients send them, and as each template reads them.
CELLS: dict[str, tuple[Messages, Messages]] = {
    "plain": ([SYSTEM, ASKED], [SYSTEM, ASKED]),
    "tools": (
        [SYSTEM, ASKED, called(json.dumps(ARGUMENTS)), RESULT],
        [SYSTEM, ASKED, called(ARGUMENTS), RESULT],
    ),
    "thinking": (
        [ASKED, called(json.dumps(ARGUMENTS), reasoning="I must look."), RESULT],
        [ASKED, called(ARGUMENTS, reasoning_content="I must look."), RESULT],
    ),
    "turns": (
        [SYSTEM, ASKED, {**ANSWERED, "reasoning_content": "Easy."}, ASKED, ANSWERED, ASKED],
        [SYSTEM, ASKED, {**ANSWERED, "reasoning_content": "Easy."}, ASKED, ANSWERED, ASKED],
    ),
}


def in_form_of(family: str, messages: Messages) -> Messages:
    """The messages as the family's template reads them, for gpt-oss with its own names."""
    formed = [{k: v for k, v in message.items() if v is not None} for message in messages]
    if family == "gpt-oss":
        for message in formed:
            if "reasoning_content" in message:
                message["thinking"] = message.pop("reasoning_content")
    return formed


# ---- the ways to a prompt ----


def served(tokenizer: Tokenizer, messages: Messages, tools: Any, thinking: bool | None) -> Any:
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    ids, _ = asyncio.run(tokenizer.render(messages, 4096, tools=tools, template_kwargs=kwargs))
    return ids


def chatted(tokenizer: Any, messages: Messages, tools: Any, thinking: bool | None) -> Any:
    """What `LLM.chat` lets the engine complete."""

    class _Sent(Exception):
        pass

    def generate(prompts: list[Any], *_: Any, **__: Any) -> Any:
        raise _Sent(prompts[0]["prompt_token_ids"])

    llm: Any = object.__new__(LLM)
    llm.tokenizer, llm.generate = tokenizer, generate
    with pytest.raises(_Sent) as sent:
        llm.chat(messages, tools=tools, thinking=thinking)
    return sent.value.args[0]


def trained(tokenizer: Any, messages: Messages, tools: Any, thinking: bool | None) -> Any:
    """The prompt of the last sample that `peagle data prepare` makes."""
    maker = SampleMaker(tokenizer, [tokenizer.eos_token_id], thinking=thinking)
    thinks = "</think>" in tokenizer.chat_template
    answer = {**ANSWERED, "reasoning_content": "So."} if thinks else ANSWERED
    record = {"messages": [*messages, answer]} | ({"tools": tools} if tools else {})
    found = list(maker.samples(Record(record, 1, "line 1")))
    samples = [one for one in found if isinstance(one, Sample)]
    if not samples:
        raise UserError(str(found))
    last = samples[-1]
    begin, end = last.answers[-1]
    assert ANSWERED["content"] in (text := tokenizer.decode(last.ids[begin:end]))
    assert ASKED["content"].strip() not in text
    return last.ids[:begin]


def evaluated(tokenizer: Any, messages: Messages, tools: Any, thinking: bool | None) -> Any:
    """The prompt of a dialogue of `peagle eval`."""
    llm: Any = SimpleNamespace(tokenizer=tokenizer)
    prompt: Any = messages
    request = Request("1", prompt, SamplingParams(), tools=tools or ())
    return EngineBackend(llm, thinking=thinking).encode(request)


def regenerated(tokenizer: Any, messages: Messages, tools: Any, thinking: bool | None) -> Any:
    """The prompt of a question that `peagle data regenerate` asks its own engine."""
    config = SimpleNamespace(config=SimpleNamespace(max_num_seqs=1))
    llm: Any = SimpleNamespace(tokenizer=tokenizer, engine=config)
    answerer = LocalAnswerer(llm, SamplingParams(), is_chat=True, thinking=thinking)
    asked = AskedConversation("1", ("?",), tools=tuple(tools or ()))
    return answerer._prompt(Ask(asked, 0, tuple(messages), 0))


@cache
def front_end(family: str, folder: Path) -> Tokenizer:
    tokenizer_of(family).save_pretrained(folder)
    return Tokenizer(str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def refusal_of(way: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(UserError) as refused:
        way(*arguments)
    return str(refused.value)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_to_a_prompt_gives_the_tokens_of_the_template(
    family: str, cell: str, folder: Path
) -> None:
    tokenizer, facts = tokenizer_of(family), FAMILIES[family]
    front = front_end(family, folder / family)
    given, formed = CELLS[cell]
    tools = TOOLS if cell in ("tools", "thinking") else None
    thinking = True if cell == "thinking" else None
    ways = dict.fromkeys((chatted, trained, evaluated, regenerated), tokenizer)
    ways[served] = front
    if (tools and not facts.has_tools) or (thinking and not facts.thinking):
        # What a template cannot render, nobody renders.
        for way, reads in ways.items():
            refusal_of(way, reads, given, tools, thinking)
        if not facts.has_tools:
            return
        thinking = None
    options = {} if thinking is None else {"enable_thinking": thinking}
    text = tokenizer.apply_chat_template(
        in_form_of(family, formed),
        tools=tools,
        add_generation_prompt=True,
        tokenize=False,
        **options,
    )
    expected = tokenizer.encode(text, add_special_tokens=False)
    for way, reads in ways.items():
        assert way(reads, given, tools, thinking) == expected, way


# ---- users who spell special tokens ----

# Qwen3-Coder writes keys of schemas between "<" and ">"; Gemma 4 takes channels out of answers.
CODERS = {
    "qwen3-coder": ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>"),
    "gemma-4": (
        *("<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>"),
        *("<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
        '<|"|>',
    ),
}
HARMLESS = str.maketrans("<>[]|", "(((((")


@cache
def any_tokenizer(family: str) -> PreTrainedTokenizerFast:
    if family in FAMILIES:
        return tokenizer_of(family)
    core = small_tokenizer("bytes")
    core.add_special_tokens(list(CODERS[family]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=CODERS[family][1])
    tokenizer.chat_template = (FIXTURES / "chat_templates" / f"{family}.jinja").read_text()
    return tokenizer


@cache
def spellings(family: str) -> st.SearchStrategy[str]:
    """Text of special tokens, of their halves, and of little else."""
    added = [token.content for token in any_tokenizer(family).added_tokens_decoder.values()]
    halves = [content[:n] for content in added for n in range(1, len(content))]
    halves += [content[n:] for content in added for n in range(1, len(content))]
    others = ["a", " ", "\n", "</think>", "<think>", "user", "/nothink", '"', "\\", "é"]
    piece = st.sampled_from(added) | st.sampled_from(halves) | st.sampled_from(others)
    return st.lists(piece, max_size=4).map("".join)


def conversation(draw: Callable[[], str], *, calls: bool) -> dict[str, Any]:
    """A conversation and tools, in which every string that a client chooses is drawn."""
    assistant = {"role": "assistant", "content": draw(), "reasoning_content": draw()}
    messages = [
        {"role": "system", "content": draw(), "name": draw()},
        {"role": "user", "content": [{"type": "text", "text": draw()} for _ in range(2)]},
        assistant,
        {"role": "user", "content": draw()},
    ]
    if not calls:
        return {"messages": messages}
    name, key, key_id = draw(), draw(), draw()
    function = {"name": name, "arguments": json.dumps({key: draw(), draw(): [draw()]})}
    schema = {
        "type": "object",
        "properties": {key: {"type": "string", "description": draw(), draw(): draw()}},
        draw(): draw(),
        "required": [key],
    }
    tool = {"name": name, "description": draw(), "parameters": schema}
    calling = {
        **assistant,
        "tool_calls": [{"id": key_id, "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": key_id, "name": name, "content": draw()}
    messages += [calling, result]
    return {"messages": messages, "tools": [{"type": "function", "function": tool}]}


def special_ids(family: str, *, parse_special_tokens: bool = False, **options: Any) -> list[int]:
    tokenizer = any_tokenizer(family)
    ids = render_chat(tokenizer, parse_special_tokens=parse_special_tokens, **options)
    added = tokenizer.added_tokens_decoder
    return [id for id in ids if id in added and added[id].special and id != tokenizer.unk_token_id]


def outcome(family: str, **options: Any) -> list[int] | None:
    """The special tokens of a prompt; None where the template refuses the conversation."""
    try:
        return special_ids(family, **options)
    except UserError as error:
        assert "cannot render" in str(error)
        return None


@pytest.mark.parametrize("family", [*FAMILIES, *CODERS])
@settings(max_examples=20)
@given(data=st.data())
def test_no_text_of_a_client_becomes_a_special_token(family: str, data: st.DataObject) -> None:
    calls = family in CODERS or FAMILIES[family].has_tools
    drawn: list[str] = []

    def draw() -> str:
        drawn.append(data.draw(spellings(family)))
        return drawn[-1]

    hostile = conversation(draw, calls=calls)
    again = iter(drawn)
    harmless = conversation(lambda: next(again).translate(HARMLESS), calls=calls)
    found = outcome(family, **hostile)
    if found is not None:
        assert found == outcome(family, **harmless)


@pytest.mark.parametrize("family", [*FAMILIES, *CODERS])
def test_a_spelled_token_is_read_only_where_it_is_asked_for(family: str) -> None:
    tokenizer = any_tokenizer(family)
    for content in (t.content for t in tokenizer.added_tokens_decoder.values() if t.special):
        hostile = {"messages": [{"role": "user", "content": f"a {content} b"}]}
        harmless = {"messages": [{"role": "user", "content": "a b"}]}
        expected = special_ids(family, **harmless)
        assert special_ids(family, **hostile) == expected
        parsed = special_ids(family, parse_special_tokens=True, **hostile)
        assert len(parsed) == len(expected) + 1
