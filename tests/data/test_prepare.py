"""Training data from conversations: masks against texts by hand, and what is refused."""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from peagle.data.dataset import ResponseDataset
from peagle.data.inspect import inspect_data
from peagle.data.limits import Limits
from peagle.data.prepare import PrepareSummary, prepare
from peagle.data.readers import Record, read_side
from peagle.data.samples import Dropped, Sample, SampleMaker
from peagle.errors import UserError
from peagle.serving.protocol import ChatBody, tool_dicts
from peagle.serving.tokenizer import Tokenizer as ServerTokenizer
from tests.conftest import VOCAB_SIZE, byte_tokenizer
from tests.data.files import ids, separate, write

END = "<|endoftext|>"
Messages = list[dict[str, Any]]
Turns = list[tuple[str, str]]


def tokens(text: str) -> list[int]:
    """Token ids by hand: 0 for the end of text, and each byte by its place in the alphabet."""
    vocab = byte_tokenizer().get_vocab()
    # The usual table: printable bytes stand for themselves, the others follow from 256 on.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    letter = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(others)}
    ids: list[int] = []
    for index, part in enumerate(text.split(END)):
        ids += [0] if index else []
        ids += [vocab[letter[byte]] for byte in part.encode()]
    return ids


# ---- templates, and what they must come to, written in Python ----

# Adds a newline behind the end of a turn, which no model writes.
ADDS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Takes blanks off what is said, and has a system prompt of its own.
TRIMS = (
    "{% if messages[0].role != 'system' %}[system]be kind<|endoftext|>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# No token ends a turn.
BARE = (
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
# Reasoning stands in the newest answer only; without thinking an empty one is put there.
THINKS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.last %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)


def pairs(
    turns: Turns,
    asks: str = f"<user>{{}}{END}\n<assistant>",
    end: str = END,
    rest: str = "\n",
    begin: str = "",
    opens: str = "",
) -> list[tuple[str, str]]:
    """Prompt and response of each turn: history, question, opening; answer with its end."""
    found, before = [], begin
    for question, answer in turns:
        before += asks.format(question)
        found.append((before + opens, answer + end))
        before += answer + end + rest
    return found


def trims(turns: Turns) -> list[tuple[str, str]]:
    turns = [(question.strip(), answer.strip()) for question, answer in turns]
    return pairs(turns, f"[user]{{}}{END}[assistant]", rest="", begin=f"[system]be kind{END}")


def bare(turns: Turns) -> list[tuple[str, str]]:
    return pairs(turns, "USER: {}\nASSISTANT: ", end="")


def no_thinking(turns: Turns) -> list[tuple[str, str]]:
    return pairs(turns, opens="<think>\n\n</think>\n\n")


def conversation(turns: Turns) -> Messages:
    roles = ("user", "assistant")
    return [{"role": r, "content": t} for turn in turns for r, t in zip(roles, turn, strict=True)]


def record(**data: Any) -> Record:
    return Record(data, 1, "file, line 1")


def maker(template: str | None = None, **options: Any) -> SampleMaker:
    return SampleMaker(byte_tokenizer(), (0,), chat_template=template, **options)


def samples_of(one: SampleMaker, **data: Any) -> list[Sample]:
    found = list(one.samples(record(**data)))
    assert all(isinstance(sample, Sample) for sample in found), found
    return [sample for sample in found if isinstance(sample, Sample)]


def made(one: SampleMaker, **data: Any) -> list[tuple[list[int], list[int]]]:
    """Every answer with all that comes before it in its sample."""
    found = samples_of(one, **data)
    return [(s.ids[:begin], s.ids[begin:end]) for s in found for begin, end in s.answers]


WORDS = ["a", "b c", "é", "日本", "{{ x }}", "two\nlines", "q? ", "<user>", "1", "end."]


def random_turns(seed: int, *, blanks: bool) -> Turns:
    chance = random.Random(seed)

    def text() -> str:
        words = " ".join(chance.choices(WORDS, k=chance.randint(1, 5)))
        return f"  {words}\n " if blanks and chance.random() < 0.5 else words.strip()

    return [(text(), text()) for _ in range(chance.randint(1, 4))]


@pytest.mark.parametrize(
    ("template", "expected", "options"),
    [
        (ADDS, pairs, {}),
        (TRIMS, trims, {}),
        (BARE, bare, {}),
        (THINKS, no_thinking, {"thinking": False}),
    ],
    ids=["adds", "trims", "bare", "no-thinking"],
)
def test_masks_equal_those_by_hand(
    template: str, expected: Callable[[Turns], list[tuple[str, str]]], options: dict
) -> None:
    one = maker(template, **options)
    for seed in range(25):
        turns = random_turns(seed, blanks=template is TRIMS)
        found = made(one, messages=conversation(turns))
        num_samples = len(samples_of(one, messages=conversation(turns)))
        assert num_samples == (len(turns) if template is THINKS else 1), "one where it is exact"
        wanted = [(tokens(prompt), tokens(response)) for prompt, response in expected(turns)]
        assert found == wanted, turns


def joining_tokenizer() -> PreTrainedTokenizerFast:
    """The byte tokenizer, with one token more: a blank and an x."""
    data = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    data["model"]["vocab"]["\u0120x"] = 258
    data["model"]["merges"] = [["\u0120", "x"]]
    core = Tokenizer.from_str(json.dumps(data))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END)


def test_no_token_reaches_over_the_end_of_the_prompt() -> None:
    tokenizer = joining_tokenizer()
    assert tokenizer.encode(": x") == [*tokens(":"), 258], "the tokenizer joins them"
    messages = conversation([("q", "x"), ("r", "xx")])
    found = made(SampleMaker(tokenizer, (0,), chat_template=BARE), messages=messages)
    # A blank and x are one token in the history, two at the border that serving has.
    first = tokens("USER: q\nASSISTANT: ")
    history = [*tokens("USER: q\nASSISTANT:"), 258, *tokens("\nUSER: r\nASSISTANT: ")]
    assert found == [(first, tokens("x")), (history, tokens("xx"))]


def test_a_special_token_that_an_answer_spells_is_supervised_as_text() -> None:
    text = [id for character in f"a{END}b" for id in tokens(character)]
    prompt = tokens(f"<user>q{END}\n<assistant>")
    found = made(maker(ADDS), messages=conversation([("q", f"a{END}b")]))
    assert found == [(prompt, [*text, *tokens(END)])]
    # Where the border of the prompt is in a token, the text is encoded again: it is left out.
    joining = SampleMaker(joining_tokenizer(), (0,), chat_template=BARE)
    (why,) = reasons(joining, messages=conversation([("q", f"x{END}")]))
    assert why == "the template renders the answer otherwise than a prompt for it begins"


def test_reasoning_is_supervised_in_its_own_turn_only() -> None:
    messages = conversation([("q", "yes"), ("r", "no")])
    messages[1]["reasoning_content"] = "hm"
    messages[3]["reasoning_content"] = "well"
    first, second = made(maker(THINKS, thinking=True), messages=messages)
    assert len(samples_of(maker(THINKS, thinking=True), messages=messages)) == 2
    begin = f"<user>q{END}\n<assistant>"
    assert first == (tokens(begin), tokens(f"<think>\nhm\n</think>\n\nyes{END}"))
    begin += f"yes{END}\n<user>r{END}\n<assistant>"
    assert second == (tokens(begin), tokens(f"<think>\nwell\n</think>\n\nno{END}"))


def test_a_cut_answer_has_no_end_and_a_numbered_turn_is_one_answer() -> None:
    messages = conversation([("q", "yes"), ("r", "no")])
    one = maker(ADDS)
    cut = made(one, messages=messages, finish_reason="length")
    assert [response for _, response in cut] == [tokens(f"yes{END}"), tokens("no")]
    last = made(one, messages=messages, turn=2)
    assert last == [(tokens(pairs([("q", "yes"), ("r", "no")])[1][0]), tokens(f"no{END}"))]


def test_an_answer_right_behind_another_is_a_sample_of_its_own() -> None:
    """Side by side they would be one answer to the loss mask."""
    first = Sample.answered([1], [2, 3])
    assert first.followed_by(Sample.answered([1, 2, 3], [5])) is None
    joined = first.followed_by(Sample.answered([1, 2, 3, 4], [5]))
    assert joined is not None and joined.answers == ((1, 3), (4, 5))


def reasons(one: SampleMaker, **data: Any) -> list[str]:
    return [d.reason for d in one.samples(record(**data)) if isinstance(d, Dropped)]


def test_what_cannot_be_a_sample_says_why() -> None:
    user = {"role": "user", "content": "q"}
    answer = {"role": "assistant", "content": "yes"}
    one = maker(ADDS)
    assert reasons(one, messages=[user]) == ["no answer in the conversation"]
    assert reasons(one, messages=[user, answer | {"content": " "}]) == ["empty answer"]
    assert reasons(one, messages=[answer]) == ["an answer that nothing was asked before"]
    thought = answer | {"reasoning_content": "hm"}
    assert reasons(one, messages=[user, thought]) == [
        "the template leaves out the reasoning of the answer"
    ]
    strict = "{{ raise_exception('no') if messages | length > 1 }}{{ messages[0].content }}"
    assert reasons(maker(strict), messages=[user, answer]) == [
        "the chat template does not render it"
    ]
    opens = ADDS.replace("<assistant>{%", "<assistant><think>{%")
    (why,) = reasons(maker(opens), messages=[user, answer])
    assert why == "the template renders the answer otherwise than a prompt for it begins"
    assert reasons(one, input_ids=[1, 2], loss_mask=[0, 0]) == ["nothing is supervised"]


def test_token_ids_and_masks_pass_as_they_are() -> None:
    ids = {"prompt_token_ids": [5, 6], "response_token_ids": [7, 0]}
    assert made(SampleMaker(None), **ids) == [([5, 6], [7, 0])]
    runs = made(SampleMaker(None), input_ids=[9, 8, 7, 6, 5, 4], loss_mask=[0, 1, 1, 0, 1, 1])
    assert runs == [([9], [8, 7]), ([9, 8, 7, 6], [5, 4])]
    (sample,) = samples_of(SampleMaker(None), input_ids=[9, 8, 7, 6, 5], loss_mask=[0, 1, 0, 1, 0])
    assert (sample.prompt, sample.response) == ([9, 8, 7], [8, 6])
    assert list(sample.loss_mask) == [0, 1, 0, 1], "what follows the last answer is left out"


def test_pairs_are_chats_or_plain_text() -> None:
    pair = {"prompt": "ab", "response": "cd"}
    assert made(maker(), **pair) == [(tokens("ab"), tokens("cd"))], "no template, no chat"
    wanted = [(tokens(f"<user>ab{END}\n<assistant>"), tokens(f"cd{END}"))]
    assert made(maker(ADDS), **pair) == wanted
    assert made(maker(ADDS, chat=False), **pair) == [(tokens("ab"), tokens("cd"))]


def test_completions_of_a_server_are_plain_text() -> None:
    tokenizer = byte_tokenizer()
    processor = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    tokenizer.backend_tokenizer.post_processor = processor
    one = SampleMaker(tokenizer, (0,), chat_template=ADDS)
    pair = {"prompt": "ab", "response": "cd"}
    found = [made(one, **pair, add_special_tokens=flag) for flag in (True, False)]
    assert found == [[(tokens(f"{END}ab"), tokens("cd"))], [(tokens("ab"), tokens("cd"))]]
    assert one.renders(record(**pair)) and not one.renders(record(**pair, add_special_tokens=True))


def test_sharegpt_is_read_as_messages() -> None:
    shared = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "yes"}]
    assert made(maker(ADDS), conversations=shared) == made(
        maker(ADDS), messages=conversation([("q", "yes")])
    )


# ---- tools ----

# Tools and calls as JSON; a thinking mode puts reasoning, if empty, before each newest answer.
CALLS = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}<|endoftext|>\n"
    "{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if enable_thinking is defined and m.role == 'assistant' and loop.last %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
    "<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FUNCTION = {"name": "f", "arguments": {"x": "yes", "end": "<|endoftext|>"}}
CALL = {"type": "function", "function": FUNCTION}
RESULT = {"role": "tool", "content": "20"}


@pytest.mark.parametrize("content", [None, "", "yes"])
@pytest.mark.parametrize("spelled", [FUNCTION, FUNCTION | {"arguments": '{"x": "yes"}'}])
def test_calls_are_the_words_of_the_target(content: str | None, spelled: dict) -> None:
    """Without content or behind it, even where the content stands in the arguments too.

    An end of turn that the arguments only spell is text, and no end.
    """
    call = CALL | {"function": spelled}
    answer = {"role": "assistant", "content": content, "tool_calls": [call, call]}
    messages = [{"role": "user", "content": "q"}, answer, RESULT]
    messages += [{"role": "assistant", "content": "no"}]
    first, second = made(maker(CALLS), messages=messages, tools=[TOOL])
    function = {"name": "f", "arguments": {"x": "yes"}} if spelled is not FUNCTION else FUNCTION
    written = f"{content or ''}" + f"<call>{json.dumps(function)}</call>" * 2
    written_ids = [id for character in written for id in tokens(character)]
    prompt = tokens(f"<tools>{json.dumps(TOOL)}{END}\n<user>q{END}\n<assistant>")
    assert first == (prompt, written_ids + tokens(END))
    prompt += written_ids + tokens(f"{END}\n<tool>20{END}\n<assistant>")
    assert second == (prompt, tokens(f"no{END}"))


def test_calls_of_a_template_without_an_end_are_supervised_whole() -> None:
    template = CALLS.replace("<|endoftext|>\n{% endfor %}", "{% endfor %}")
    answer = {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f"}}]}
    (found,) = made(maker(template), messages=[{"role": "user", "content": "q"}, answer])
    assert found == (tokens("<user>q<assistant>"), tokens('<call>{"name": "f"}</call>'))


def test_a_call_that_was_cut_off_is_left_out() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [CALL]}]
    cut = {"messages": messages, "finish_reason": "length"}
    assert reasons(maker(CALLS), **cut) == ["a call of a tool that was cut off"]
    assert reasons(maker(CALLS), messages=[messages[1]]) == [
        "an answer that nothing was asked before"
    ]


def test_tools_that_the_template_does_not_read_are_named() -> None:
    (found,) = maker(ADDS).samples(record(messages=conversation([("q", "yes")]), tools=[TOOL]))
    assert isinstance(found, Dropped) and "does not read tools" in found.detail


def server_prompt(folder: Path, messages: Messages, tools: list[dict]) -> list[int]:
    """The prompt that a server computes for a request with these fields."""
    body = ChatBody.model_validate({"model": "m", "messages": messages, "tools": tools or None})
    rendering = ServerTokenizer(str(folder)).render(
        body.messages, 4096, tools=tool_dicts(body.tools)
    )
    return asyncio.run(rendering)[0]


def test_prompts_are_those_that_a_server_computes(tmp_path: Path) -> None:
    """For the spellings of data sets, each beside what a client would send."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CALLS
    tokenizer.save_pretrained(tmp_path)
    schema = {"type": "object", "properties": {"x": {"type": "string", "default": None}}}
    function = {"name": "f", "description": "d", "parameters": schema}
    sent = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]
    sent[1]["tool_calls"] = [{"id": "1", **CALL, "function": {"name": "f", "arguments": "{}"}}]
    sent += [{"role": "tool", "tool_call_id": "1", "content": "20"}]
    system = {"role": "system", "content": "s"}
    tools = [{"type": "function", "function": function}]
    answer = {"role": "assistant", "content": "yes"}
    turned = {"function": dict(reversed(function.items())), "type": "function"}
    old = [{"role": "user", "content": [{"type": "text", "text": "q"}], "name": None}]
    old += [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]
    old += [{"role": "function", "name": "f", "content": "20"}, answer]
    shared = [{"from": "human", "value": "q"}]
    shared += [{"from": "function_call", "value": '{"name": "f", "arguments": {}}'}]
    shared += [{"from": "observation", "value": "20"}, {"from": "gpt", "value": "yes"}]
    rows: list[dict[str, Any]] = [
        {"messages": [system, *sent, answer], "tools": [turned]},
        {"messages": [*sent, answer], "tools": json.dumps(tools), "system": "s"},
        {"messages": old, "functions": [function], "system_prompt": "s"},
        {"conversations": shared, "tools": json.dumps([function]), "system": "s"},
    ]
    wanted = [server_prompt(tmp_path, [system, *sent][:size], tools) for size in (2, 4)]
    one = SampleMaker(tokenizer, (0,))
    for row in rows:
        assert [prompt for prompt, _ in made(one, **row)] == wanted, row


# ---- thinking and weights ----


def test_an_empty_block_of_the_template_is_not_supervised() -> None:
    """In thinking mode nobody knows whether the target wrote it, and the prompt has none."""
    why = ["the answer has no reasoning, and the template writes an empty block of it"]
    plain = conversation([("q", "yes")])
    calling = [plain[0], {"role": "assistant", "tool_calls": [CALL]}]
    blank = [plain[0], plain[1] | {"reasoning_content": " "}]
    assert reasons(maker(CALLS, thinking=True), messages=blank) == why
    for messages in (plain, calling):
        assert reasons(maker(CALLS, thinking=True), messages=messages) == why
        assert len(made(maker(CALLS, thinking=False), messages=messages)) == 1
    opened = CALLS.replace("<assistant>{% if enable", "<assistant><think>\n{% if enable")
    assert reasons(maker(opened, thinking=True), messages=plain) == why
    channel = CALLS.replace("<think>", "<|channel>thought").replace("</think>", "<channel|>")
    assert reasons(maker(channel, thinking=True), messages=plain) == why


def test_an_empty_block_of_the_answer_is_supervised() -> None:
    written = "<think>\n\n</think>\n\nyes"
    (found,) = made(maker(ADDS), messages=conversation([("q", written)]))
    assert found == (tokens(f"<user>q{END}\n<assistant>"), tokens(f"{written}{END}"))


def test_reasoning_by_the_name_of_servers() -> None:
    messages = conversation([("q", "yes")])
    messages[1]["reasoning"] = "hm"
    (found,) = made(maker(CALLS, thinking=True), messages=messages)
    assert found[1] == tokens(f"<think>\nhm\n</think>\n\nyes{END}")


def test_answers_of_weight_0_are_read_but_not_supervised() -> None:
    messages = conversation([("q", "bad"), ("r", "good"), ("s", "odd")])
    for message, weight in zip(messages[1::2], (0, 1, 0.5), strict=True):
        message["weight"] = weight
    *left_out, second = maker(ADDS).samples(record(messages=messages))
    assert left_out == [
        Dropped("an answer of weight 0"),
        Dropped("an answer of a weight other than 0 and 1", "weight is 0.5; expected 0 or 1"),
    ]
    prompt = f"<user>q{END}\n<assistant>bad{END}\n<user>r{END}\n<assistant>"
    assert isinstance(second, Sample)
    assert (second.prompt, second.response) == (tokens(prompt), tokens(f"good{END}"))
    shown = ADDS.replace("{{ m.role }}", "{{ m.role }}{{ m.weight }}")
    (unweighed,) = made(maker(shown), messages=messages[2:4])
    assert unweighed == (tokens(f"<user>r{END}\n<assistant>"), tokens(f"good{END}"))


def test_answers_before_what_is_no_text_are_samples() -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}
    messages = [*conversation([("q", "yes")]), picture, {"role": "assistant", "content": "no"}]
    one, why = sorted(maker(ADDS).samples(record(messages=messages)), key=repr, reverse=True)
    assert isinstance(one, Sample) and one.response == tokens(f"yes{END}")
    assert isinstance(why, Dropped) and "image_url" in why.detail


# ---- whole files ----

LETTERS = st.text("ab", min_size=1, max_size=3)


def run(source: Path, fingerprint: str = "f", **limits: Any) -> tuple[Any, Any, PrepareSummary]:
    wanted = {"vocab_size": VOCAB_SIZE, "max_length": 16, **limits}
    return prepare([source], maker(ADDS), Limits(**wanted), fingerprint)


def test_limits_duplicates_and_reasons_are_counted(tmp_path: Path) -> None:
    rows = [
        ids([1, 2], [3, 4, 5]),
        ids([1, 2], [3, 4, 5]),
        ids([1], [2, 3, 4, 5]),  # the same tokens, otherwise divided
        ids([1], [2]),
        ids([], [2, 3]),
        ids([7] * 10, [8] * 10),
        ids([7] * 15, [8] * 10),
    ]
    source = write(tmp_path / "a.jsonl", *rows)
    train, _, report = run(source)
    assert (report.records, report.samples, report.duplicates, report.truncated) == (7, 3, 1, 1)
    assert report.dropped == {
        "response of less than 2 tokens": 1,
        "empty prompt": 1,
        "prompt leaves no room for a response within 16 tokens": 1,
    }
    assert report.details["empty prompt"].endswith("a.jsonl, line 5")
    assert (report.tokens, report.supervised) == (5 + 5 + 16, 3 + 4 + 6)
    assert train.tokens[-1].tolist() == [7] * 10 + [8] * 6
    assert report.unknown_tokenizer == [str(source)]
    _, _, strict = run(source, truncate=False)
    assert strict.dropped["longer than 16 tokens"] == 2 and strict.samples == 2


@pytest.mark.slow
@given(
    st.lists(st.lists(st.tuples(LETTERS, LETTERS), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(3, 80),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_answers_are_kept_as_if_each_had_a_sample(
    chats: list[Turns], max_length: int, truncate: bool
) -> None:
    """Limits, duplicates and reasons count answers; training gets the same tokens."""
    rows = [{"messages": conversation(turns)} for turns in chats]
    alone = [ids(tokens(p), tokens(r)) for turns in chats for p, r in pairs(turns)]
    results = []
    with TemporaryDirectory() as folder:
        for name, lines in (("a", rows), ("b", alone)):
            source = write(Path(folder) / f"{name}.jsonl", *lines)
            try:
                results.append(run(source, max_length=max_length, truncate=truncate))
            except UserError as error:
                told = str(error).replace(str(source), "the file")
                results.append(told.partition("became a sample")[2])
    if isinstance(results[0], str):
        assert results[0] == results[1]
        return
    (joined, _, report), (apart, _, expected) = results
    for name in ("answers", "supervised", "truncated", "duplicates", "dropped"):
        assert getattr(report, name) == getattr(expected, name), name
    found = zip(joined.tokens, joined.masks, strict=True)
    answers = separate([(sequence.tolist(), mask) for sequence, mask in found])
    wanted = zip(apart.tokens, apart.masks, strict=True)
    assert sorted(answers) == sorted((sequence.tolist(), list(mask)) for sequence, mask in wanted)
    assert report.tokens <= expected.tokens


def test_lines_of_one_conversation_share_a_sample(tmp_path: Path) -> None:
    """As `peagle data regenerate` writes them: a line for each answer, conversations mixed."""
    turns = {name: [(f"{name}{i}", f"answer {i}") for i in range(5)] for name in "xyz"}
    rows = []
    for turn in range(1, 6):
        for name in "xyz":
            prompt, response = map(tokens, pairs(turns[name])[turn - 1])
            messages = conversation(turns[name][:turn])
            rows.append({"turn": turn, "messages": messages, **ids(prompt, response)})
    train, _, report = run(write(tmp_path / "a.jsonl", *rows), max_length=400)
    assert (report.samples, report.answers, report.records) == (3, 15, 15)
    for name, sequence in zip("xyz", train.tokens, strict=True):
        prompt, response = pairs(turns[name])[-1]
        assert sequence.tolist() == tokens(prompt + response)
    # The target wrote other tokens than the template has in the history: a sample of its own.
    rows[0]["response_token_ids"] = tokens(f"other{END}")
    _, _, report = run(write(tmp_path / "b.jsonl", *rows), max_length=400)
    assert (report.samples, report.answers) == (4, 15)


def test_lines_of_two_temperatures_share_a_sample_each(tmp_path: Path) -> None:
    turns = {at: [(f"q{i}", f"at {at} {i}") for i in range(3)] for at in (0.0, 0.7)}
    rows = []
    for turn in range(1, 4):
        for at, own in turns.items():
            prompt, response = map(tokens, pairs(own)[turn - 1])
            messages = conversation(own[:turn])
            rows.append(
                {"turn": turn, "temperature": at, "messages": messages, **ids(prompt, response)}
            )
    train, _, report = run(write(tmp_path / "a.jsonl", *rows), max_length=400)
    assert (report.samples, report.answers, report.records) == (2, 6, 6)
    for own, sequence in zip(turns.values(), train.tokens, strict=True):
        prompt, response = pairs(own)[-1]
        assert sequence.tolist() == tokens(prompt + response)
    assert len(set(train.hashes)) == 1, "a conversation is on one side of a split"


@pytest.mark.parametrize("suffix", [".safetensors", ".jsonl"])
def test_train_reads_what_is_written(tmp_path: Path, suffix: str) -> None:
    rows = [ids([1, 2], [3, 4, 5]), {"messages": conversation([("q", "yes"), ("r", "no")])}]
    source = write(tmp_path / "a.jsonl", *rows)
    train, _, _ = run(source, max_length=64)
    output = tmp_path / f"out{suffix}"
    train.write(output, {"tokenizer_sha256": "f"})
    dataset = ResponseDataset.load(output, byte_tokenizer(), VOCAB_SIZE, 64)
    wanted = [([1, 2], [3, 4, 5])]
    wanted += [(tokens(p), tokens(r)) for p, r in pairs([("q", "yes"), ("r", "no")])]
    first, before, whole = (p + r for p, r in wanted)
    assert dataset.tokens.tolist() == first + whole
    assert dataset.prompt_lens.tolist() == [len(p) for p, _ in wanted[:2]]
    assert dataset.start_loc.tolist() == [0, len(first), len(first + whole)]
    between = len(whole) - len(before) - len(wanted[2][1])
    mask = [0] * 2 + [1] * 3 + [0] * len(wanted[1][0]) + [1] * len(wanted[1][1])
    assert dataset.loss_mask.int().tolist() == mask + [0] * between + [1] * len(wanted[2][1])
    again, _, report = run(output, max_length=64)
    assert (again.tokens, again.masks) == (train.tokens, train.masks)
    assert report.unknown_tokenizer == []
    if suffix == ".jsonl":
        assert read_side(output) == {"tokenizer_sha256": "f"}
        lines = list(map(json.loads, output.read_text().splitlines()))
        assert lines[0] == rows[0] and lines[1].keys() == {"input_ids", "loss_mask"}
    else:
        with safe_open(output, framework="pt") as store:
            facts = json.loads(store.metadata()["peagle_data"])
            assert facts == {"tokenizer_sha256": "f", "format_version": 2}
            assert store.get_tensor("tokens").dtype == torch.int32
    with pytest.raises(UserError, match="another tokenizer"):
        run(output, fingerprint="ours")
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_a_conversation_is_on_one_side_of_the_split(tmp_path: Path) -> None:
    chats = [conversation([(f"q{i}", "yes"), (f"r{i}", "no")]) for i in range(200)]
    # Each turn as a record of its own, as regenerate writes them.
    rows = [{"turn": 1, "messages": chat[:2]} for chat in chats]
    rows += [{"turn": 2, "messages": chat} for chat in chats]
    train, held_out, report = run(
        write(tmp_path / "a.jsonl", *rows), max_length=200, validation_share=0.25
    )
    text = byte_tokenizer().decode
    sides = []
    for side in (train, held_out):
        firsts = [str(text(ids.tolist())).split(END)[0] for ids in side.tokens]
        assert len(set(firsts)) == len(firsts) and side.num_answers == 2 * len(firsts), (
            "both turns of a conversation share a sample"
        )
        sides.append(set(firsts))
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 200
    assert 25 <= len(sides[1]) <= 75 and report.validation_answers == 2 * len(sides[1])
    rows.reverse()
    again = run(write(tmp_path / "b.jsonl", *rows), max_length=200, validation_share=0.25)[2]
    assert again.validation_answers == report.validation_answers, "the order does not matter"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ids([1], [2, 400]), "token id 400; the target's vocabulary is 0 to 319"),
        (ids([1], [-2, 4]), "token id -2"),
        ({"prompt_token_ids": [1]}, "response_token_ids is null"),
        ({"prompt_token_ids": [True], "response_token_ids": [1]}, r"is \[true\]"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "1 values for 2 input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "expected a 0 or 1"),
        ({"messages": "x"}, "no list of objects"),
        ({"messages": [{"content": "x"}]}, "the role None"),
        ({"text": "x"}, "has the keys text; expected messages"),
        ({"messages": [{"role": "user", "content": "q"}]}, "1 × no answer in the conversation"),
        ({"tools": "f", "messages": []}, "1 × the tools are no list of functions .* line 1: The"),
        ([1, 2], r"1 × the line is no object .*line 1: \[1, 2\]"),
        ({"messages": None}, r"it has the keys messages \(null\); expected messages"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(write(tmp_path / "a.jsonl", row))


def test_a_record_that_cannot_be_used_ends_no_run(tmp_path: Path) -> None:
    rows = [
        {"messages": "x"},
        {"text": "x"},
        {"prompt_token_ids": [1]},
        {"input_ids": [1, 2], "loss_mask": [1]},
        {"messages": [{"content": "x"}]},
        {"tools": "f", "messages": conversation([("q", "yes")])},
        ids([1], [2, 3]),
        {"text": "y"},
    ]
    source = write(tmp_path / "a.jsonl", *rows)
    _, _, report = run(source)
    assert (report.records, report.samples) == (8, 1)
    assert report.dropped == {
        "the messages are no list of objects": 1,
        "the record has none of the forms": 2,
        "token ids that are no list of whole numbers": 1,
        "the loss_mask does not fit the input_ids": 1,
        "a message has no role": 1,
        "the tools are no list of functions": 1,
    }
    detail = report.details["the record has none of the forms"]
    assert detail.startswith(f"{source}, line 2: it has the keys text; expected messages, prompt")
    assert inspect_data(source, maker(ADDS)).dropped == report.dropped


def test_files_and_limits_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected \.jsonl or \.parquet"):
        run(write(tmp_path / "a.csv", 1))
    with pytest.raises(UserError, match="the files are empty"):
        run(write(tmp_path / "a.jsonl"))
    with pytest.raises(UserError, match="limit is 2"):
        Limits(VOCAB_SIZE, max_length=2)
    with pytest.raises(UserError, match="share is 1"):
        Limits(VOCAB_SIZE, validation_share=1.0)


def test_a_thinking_mode_must_be_chosen(tmp_path: Path) -> None:
    assert maker(THINKS).lacks_thinking and not maker(THINKS, thinking=False).lacks_thinking
    assert not maker(ADDS).lacks_thinking and not maker().lacks_thinking
    limits = Limits(VOCAB_SIZE)
    chats = write(tmp_path / "a.jsonl", {"messages": conversation([("q", "yes")])})
    with pytest.raises(UserError, match="--thinking or --no-thinking"):
        prepare([chats], maker(THINKS), limits, "f", needs_thinking=True)
    plain = write(tmp_path / "b.jsonl", ids([1], [2, 3]))
    assert prepare([plain], maker(THINKS), limits, "f", needs_thinking=True)[2].samples == 1
    with pytest.raises(UserError, match="has no thinking mode"):
        maker(ADDS, thinking=True)
