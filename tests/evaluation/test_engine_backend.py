"""Engines on one target: as a backend, and in timed runs."""

import asyncio
import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import LLM, SamplingParams, SpeculativeConfig
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.config import EngineConfig
from peagle.engine import SpeculationStats
from peagle.engine.placement import load_target
from peagle.errors import UserError
from peagle.evaluation.decoding import Answer, Request
from peagle.evaluation.dialogues import run_dialogues
from peagle.evaluation.engine_backend import EngineBackend, build_llms, time_requests
from peagle.evaluation.prompt_sets import load
from peagle.evaluation.prompts import load_prompt_set
from peagle.llm import StreamChunk
from peagle.models.target import TargetModel
from peagle.serving.protocol import FunctionSpec, Tool, tool_dicts
from peagle.serving.tokenizer import Tokenizer

K = 5
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}"
)


TOOLS_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    speculative = {"model": str(BUNDLED_PEAGLE), "num_speculative_tokens": K}
    return LLM(BUNDLED_TARGET, speculative_config=speculative, max_num_seqs=8, max_model_len=512)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [
        Request(prompt.id, prompt.text, SamplingParams(max_tokens=8 + 5 * i, seed=i))
        for i, prompt in enumerate(load_prompt_set("heldout_code", 5))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 3, 100])
def test_answers_are_those_of_generate(
    llm: LLM, requests: list[Request], concurrency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate([str(r.prompt) for r in requests], [r.params for r in requests])
    most, ended, step = 0, list[int](), llm.requests.step

    def counting() -> Any:
        nonlocal most
        most = max(most, llm.stats.num_running + llm.stats.num_waiting)
        return step()

    monkeypatch.setattr(llm.requests, "step", counting)
    backend = EngineBackend(llm)
    before = backend.counters
    assert before.num_drafts > 0, "counters run since the engine was built"
    run = backend.run(requests, concurrency, lambda index, answer: ended.append(index))
    assert most == min(concurrency, len(requests))
    assert sorted(ended) == list(range(len(requests)))
    drafts = SpeculationStats.pooled(answer.stats for answer in run.answers if answer.stats)
    assert run.counters == drafts == backend.counters.since(before)
    for answer, output in zip(run.answers, expected, strict=True):
        assert (answer.token_ids, answer.stats) == (output.token_ids, output.stats)
        assert (answer.text, answer.finish_reason) == (output.text, output.finish_reason)
        assert answer.num_tokens == len(output.token_ids) == sum(n for _, n in answer.chunks)
        assert answer.num_prompt_tokens == len(output.prompt_token_ids)
        assert "".join(answer.texts) == answer.text and not answer.error
        assert answer.steps is not None
        assert [one.num_tokens for one in answer.steps] == [n for _, n in answer.chunks]
        assert (answer.steps[0].num_tokens, answer.steps[0].num_drafted) == (1, 0)
        assert all(one.num_drafted == K for one in answer.steps[1:-1])
        times = [when for when, _ in answer.chunks]
        assert times == sorted(times) and 0 < times[0] == answer.time_to_first_token_s
        assert times[-1] == answer.seconds <= run.seconds
    # The engine is busy for at least the share of the requests' time that fits in flight.
    total = sum(answer.seconds for answer in run.answers)
    assert total <= min(concurrency, len(requests)) * run.seconds * 1.01


def test_a_refused_request_has_an_error_and_the_others_go_on(
    llm: LLM, requests: list[Request]
) -> None:
    long = Request("long", "x = 1\n" * 400, SamplingParams())
    ended: list[Answer] = []
    run = EngineBackend(llm).run([long, *requests[:2]], 1, lambda _, answer: ended.append(answer))
    assert "context of 512" in run.answers[0].error and not run.answers[0].finish_reason
    assert [bool(answer.error) for answer in run.answers] == [True, False, False]
    assert ended == run.answers


@pytest.mark.slow
def test_messages_go_behind_the_template(llm: LLM) -> None:
    backend = EngineBackend(llm, chat_template=TEMPLATE)
    request = Request("chat", [{"role": "user", "content": "def f(x):"}], SamplingParams())
    assert backend.encode(request) == llm.tokenizer.encode("<user>def f(x):")
    written = Answer(text="so</think>\nyes")
    assert backend.answer_text(request, written) == "so</think>\nyes"
    thinking = EngineBackend(llm, chat_template=TEMPLATE, thinking=True)
    assert thinking.answer_text(request, written) == "yes"
    (answer,) = backend.run([request], 1).answers
    assert answer.text == llm.generate("<user>def f(x):", SamplingParams())[0].text


def test_mistakes(llm: LLM, requests: list[Request]) -> None:
    backend = EngineBackend(llm)
    several = replace(requests[0], params=SamplingParams(n=2, temperature=1.0))
    chat = replace(requests[0], prompt=[{"role": "user", "content": "Hi"}])
    for sent, concurrency, message in (
        (requests, 0, "concurrency is 0"),
        ([several], 1, "n is 2"),
        ([requests[0], chat], 1, "no chat template"),
    ):
        with pytest.raises(UserError, match=message):
            backend.run(sent, concurrency)
    stream: Any = llm.stream("def f(", SamplingParams())
    next(stream)
    with pytest.raises(UserError, match="generating already"):
        backend.run(requests, 1)
    stream.close()
    assert not llm.requests.has_unfinished


def test_an_interruption_leaves_nothing_running(llm: LLM, requests: list[Request]) -> None:
    def interrupt(index: int, answer: Answer) -> None:
        assert not gc.isenabled(), "no collection is timed"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EngineBackend(llm).run(requests, 4, interrupt)
    assert not llm.requests.has_unfinished and gc.isenabled()
    assert EngineBackend(llm).run(requests[:1], 1).answers[0].num_tokens == 8
    nothing = EngineBackend(llm).run([], 4)
    assert (nothing.answers, nothing.counters) == ([], SpeculationStats(0, 0, 0, [0] * K))


PROMPTS = ["def f(x):", "import", "class Stack:\n    "]
PARAMS = SamplingParams(max_tokens=20)


@pytest.fixture
def llms(target_folder: Path, head_folders: Callable[..., Path]) -> dict[str, LLM]:
    target = load_target(target_folder, EngineConfig(dtype="float64", device="cpu"))
    heads = {"peagle": head_folders(parallel=True), "eagle3": head_folders(parallel=False)}
    configurations: dict[str, SpeculativeConfig | None] = {
        name: SpeculativeConfig(model=str(folder), num_speculative_tokens=3)
        for name, folder in heads.items()
    }
    configurations["ngram"] = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    return build_llms(target, {"plain": None, **configurations}, max_num_seqs=2)


@pytest.mark.slow
def test_engines_on_one_target_do_not_disturb_each_other(
    llms: dict[str, LLM], target_folder: Path
) -> None:
    alone = LLM(target_folder, dtype="float64").generate(PROMPTS, PARAMS)
    expected = [output.token_ids for output in alone]
    for name in [*llms, *llms]:
        run = time_requests(llms[name], PROMPTS, PARAMS)
        assert run.token_ids == expected, name
        assert run.tokens_per_s > 0


@pytest.mark.slow
def test_engines_on_one_target_may_even_take_turns_by_the_step(llms: dict[str, LLM]) -> None:
    expected = [llm.generate(PROMPTS, PARAMS) for llm in llms.values()]
    streams = [llm.stream(PROMPTS, PARAMS) for llm in llms.values()]
    found: list[dict[int, list[int]]] = [{} for _ in streams]
    running = list(range(len(streams)))
    while running:
        for i in list(running):
            chunk = next(streams[i], None)
            if chunk is None:
                running.remove(i)
            elif chunk.output is not None:
                found[i][chunk.index] = chunk.output.token_ids
    for ours, theirs in zip(found, expected, strict=True):
        assert [ours[i] for i in range(len(PROMPTS))] == [output.token_ids for output in theirs]


@pytest.mark.slow
def test_measure_counts_steps_and_leaves_the_watcher_out(llms: dict[str, LLM]) -> None:
    chunks: list[StreamChunk] = []

    def watch(chunk: StreamChunk) -> None:
        assert not gc.isenabled()
        chunks.append(chunk)
        time.sleep(0.02)

    start = time.perf_counter()
    run = time_requests(llms["ngram"], PROMPTS, PARAMS, watch)
    passed = time.perf_counter() - start
    assert run.seconds < passed - 0.02 * len(chunks)
    assert len(run.answers) == len(PROMPTS)
    for answer in run.answers:
        steps, stats = answer.steps or [], answer.stats or SpeculationStats()
        assert sum(step.num_tokens for step in steps) == answer.num_tokens
        assert steps[0].num_drafted == 0
        assert sum(step.num_drafted for step in steps) == stats.num_draft_tokens
        assert sum(step.num_drafted > 0 for step in steps) == stats.num_drafts
    num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
    assert sum(map(len, run.token_ids)) == num_tokens
    assert run.tokens_per_s == num_tokens / run.seconds
    assert run.stats.num_accepted_tokens > 0


def test_engines_on_one_card_share_what_is_free(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each plans with an equal part of what the others before it have left."""
    free, total = 2**28, 2**28 + 2**26
    plan: list[tuple[int, int]] = []

    def card(device: torch.device) -> tuple[int, int]:
        return free, total

    make = LLM.__init__

    def watched(self: LLM, **options: Any) -> None:
        nonlocal free
        share = options["gpu_memory_utilization"]
        given = int(total * share) - (total - free)
        make(self, **{**options, "num_kv_blocks": 2})
        plan.append((given, free))
        free -= given

    monkeypatch.setattr("peagle.evaluation.engine_backend.free_and_total", card)
    monkeypatch.setattr(LLM, "__init__", watched)
    target = load_target(target_folder, EngineConfig(dtype="float64", device="cpu"))
    build_llms(target, dict.fromkeys("abc"), gpu_memory_utilization=0.8)
    shares = [given for given, _ in plan]
    assert max(shares) - min(shares) <= len(shares)
    assert 0 <= int(0.8 * total) - (total - free) <= len(shares)
    assert free > 0


@pytest.mark.parametrize("role", ["system", "developer"])
def test_prompts_of_a_set_are_those_that_a_server_computes(
    llm: LLM, tmp_path: Path, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With system messages and tools, at each turn."""
    function = {"parameters": {"type": "object"}, "name": "f", "description": None}
    messages = [{"role": role, "content": "s"}, {"role": "user", "content": "q"}]
    later = [{"role": "assistant", "content": "old"}, {"role": "user", "content": "r"}]
    row = {"messages": [*messages, *later], "tools": json.dumps([function])}
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(row))
    backend, sent = EngineBackend(llm, chat_template=TOOLS_TEMPLATE), list[list[int]]()
    add = llm.requests.add

    def adding(index: int, prompt: list[int], params: SamplingParams) -> None:
        sent.append(prompt)
        add(index, prompt, params)

    monkeypatch.setattr(llm.requests, "add", adding)
    params = SamplingParams(max_tokens=4, seed=0)
    results = run_dialogues(backend, {"set": load(str(path))}, params, 1, chat=True)
    tools = tool_dicts([Tool(type="function", function=FunctionSpec(**function))])
    server = Tokenizer(str(BUNDLED_TARGET), TOOLS_TEMPLATE)
    answer = {"role": "assistant", "content": results.observations[0].answer.text}
    wanted = [
        asyncio.run(server.render(said, 512, tools=tools))[0]
        for said in (messages, [*messages, answer, later[1]])
    ]
    assert sent == wanted and len(tools) == 1


def test_load_target(target_folder: Path) -> None:
    target = load_target(target_folder, EngineConfig(dtype="bfloat16", device="auto"))
    assert isinstance(target, TargetModel)
    assert target.dtype == torch.bfloat16
