"""`AsyncLLM`: streams equal the offline outputs, and whatever a client does harms no other."""

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from peagle import LLM, AsyncLLM, SamplingParams
from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.errors import UserError

T = TypeVar("T")
PROMPTS: list[Any] = [[5, 9, 200, 31], [17] * 12, "hi", list(range(20, 55)), [5, 9, 200, 31]]
LONG = SamplingParams(max_tokens=240, ignore_eos=True)
SHORT = SamplingParams(max_tokens=10, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=14, temperature=1.1, top_k=40, seed=3, ignore_eos=True)
PARAMS = [
    SHORT,
    SAMPLED,
    replace(SAMPLED, n=3),
    replace(SHORT, max_tokens=30, num_speculative_tokens=0),
    replace(SAMPLED, seed=8, logprobs=2, prompt_logprobs=1, max_tokens=25),
    replace(SHORT, repetition_penalty=1.3, max_tokens=20, num_speculative_tokens=2),
]


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result; a deadlock is an error."""

    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def is_idle(llm: AsyncLLM) -> bool:
    stats = llm.stats
    free = stats.num_free_kv_blocks == stats.num_kv_blocks
    return free and stats.num_waiting == stats.num_running == 0


@pytest.fixture(scope="module")
def options(target_folder: Path, head_folders: Callable[..., Path]) -> dict[str, Any]:
    head = {"model": str(head_folders(parallel=True)), "num_speculative_tokens": 4}
    return {"target": target_folder, "speculative_config": head, "dtype": "float64"}


@pytest.fixture(scope="module")
def offline(options: dict[str, Any]) -> LLM:
    return LLM(**options)


Reference = Callable[[Any, SamplingParams], list[RequestOutput]]


@pytest.fixture(scope="module")
def reference(offline: LLM) -> Reference:
    """reference(prompt, params): the offline outputs, made once, for all PROMPTS together."""

    made: dict[str, list[RequestOutput]] = {}

    def of(prompt: Any, params: SamplingParams) -> list[RequestOutput]:
        key = repr(params)
        if key not in made:
            made[key] = offline.generate(PROMPTS, params)
        return made[key][PROMPTS.index(prompt)].outputs

    return of


@pytest.fixture
def llm(options: dict[str, Any]) -> Iterator[AsyncLLM]:
    """Four seats. Its thread must be gone in the end."""
    made = AsyncLLM(**options, max_num_seqs=4)
    yield made
    run(made.aclose())
    assert "peagle-engine" not in [thread.name for thread in threading.enumerate()]


def facts(output: RequestOutput) -> tuple[Any, ...]:
    """Return the parts of an output that depend on neither time nor other requests."""
    return (
        output.index,
        output.text,
        output.token_ids,
        output.prompt_token_ids,
        output.finish_reason,
        output.stats,
        # The shape of the batch moves the last digits.
        [(one.token_id, one.rank, round(one.logprob, 9)) for one in output.logprobs or []],
        [
            (one.token_id, one.rank, round(one.logprob, 9))
            for one in (output.prompt_logprobs or [])[1:]
            if one
        ],
    )


async def collect(llm: AsyncLLM, *request: Any, **options: Any) -> list[StreamChunk]:
    return [chunk async for chunk in llm.stream(*request, **options)]


# ---- what comes out ----


@pytest.mark.slow
def test_concurrent_streams_equal_the_offline_outputs(llm: AsyncLLM, reference: Reference) -> None:
    requests = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
    expected = [reference(*request) for request in requests]

    async def all_streams() -> list[list[StreamChunk]]:
        streams = (collect(llm, *one, priority=i % 3) for i, one in enumerate(requests))
        return await asyncio.gather(*streams)

    for chunks, outputs in zip(run(all_streams()), expected, strict=True):
        found = {c.output_index: c.output for c in chunks if c.output is not None}
        assert sorted(found) == list(range(len(outputs)))
        for i, output in enumerate(outputs):
            mine = [c for c in chunks if c.output_index == i]
            assert facts(found[i]) == facts(output)
            assert "".join(c.text for c in mine) == output.text
            assert [t for c in mine for t in c.token_ids] == output.token_ids
            assert [c.output is None for c in mine] == [True] * (len(mine) - 1) + [False]
    assert is_idle(llm)


def test_generate_gives_every_output_in_order(llm: AsyncLLM, offline: LLM) -> None:
    params = replace(SAMPLED, n=4)
    outputs = run(llm.generate("hi", params))
    assert [facts(o) for o in outputs] == [
        facts(o) for o in offline.generate("hi", params)[0].outputs
    ]
    assert [o.index for o in outputs] == [0, 1, 2, 3]


def test_outputs_of_a_request_may_end_in_one_step(options: dict[str, Any]) -> None:
    # Without a cache to share they run in step.
    llm = AsyncLLM(**{**options, "speculative_config": None}, enable_prefix_caching=False)

    async def twice() -> list[int]:
        async with llm:
            first = await llm.generate("hi", replace(SAMPLED, n=3))
            return [len(o.token_ids) for o in first + await llm.generate("ho", SHORT)]

    assert run(twice()) == [14, 14, 14, 10]


@pytest.mark.slow
def test_a_slow_reader_misses_nothing(llm: AsyncLLM, offline: LLM) -> None:
    async def read() -> list[StreamChunk]:
        chunks: list[StreamChunk] = []
        async for chunk in llm.stream("hi", replace(SHORT, max_tokens=40)):
            chunks.append(chunk)
            if len(chunks) == 2:  # the engine does not wait
                await until(lambda: is_idle(llm) and llm.stats.num_finished == 1)
        return chunks

    chunks = run(read())
    (expected,) = offline.generate("hi", replace(SHORT, max_tokens=40))
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert chunks[-1].output is not None
    assert facts(chunks[-1].output) == facts(expected)


# ---- leaving early ----


async def leave_by_break(llm: AsyncLLM, params: SamplingParams) -> None:
    async for _ in llm.stream("hi", params):
        break


async def leave_by_closing(llm: AsyncLLM, params: SamplingParams) -> None:
    async with aclosing(llm.stream("hi", params)) as stream:
        await anext(stream)


async def leave_by_timeout(llm: AsyncLLM, params: SamplingParams) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as scope:
            async for _ in llm.stream("hi", params):
                scope.reschedule(0)


async def leave_by_cancelling(llm: AsyncLLM, params: SamplingParams) -> None:
    task = asyncio.create_task(llm.generate("hi", params))
    await until(lambda: llm.stats.num_output_tokens > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_between(llm: AsyncLLM, params: SamplingParams) -> None:
    arrived = asyncio.Event()

    async def busy() -> None:
        async for _ in llm.stream("hi", params):
            arrived.set()
            await asyncio.sleep(3600)

    task = asyncio.create_task(busy())
    await arrived.wait()
    task.cancel()
    await asyncio.wait([task])


WAYS = [leave_by_break, leave_by_closing, leave_by_timeout, leave_by_cancelling, leave_between]


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("leave", WAYS)
def test_leaving_early_cancels_the_request(
    llm: AsyncLLM, offline: LLM, leave: Callable[..., Any], n: int
) -> None:
    async def leave_it_to_the_other() -> RequestOutput:
        other = asyncio.create_task(llm.generate(PROMPTS[3], replace(SHORT, max_tokens=30)))
        await leave(llm, replace(LONG, n=n, temperature=1.0))
        await until(lambda: llm.stats.num_cancelled == n)
        (output,) = await other
        return output

    output = run(leave_it_to_the_other())
    (expected,) = offline.generate([PROMPTS[3]], replace(SHORT, max_tokens=30))
    assert facts(output) == facts(expected)
    assert is_idle(llm) and llm.stats.num_finished == 1


def test_leaving_while_still_queued(llm: AsyncLLM) -> None:
    async def queue_and_leave() -> None:
        task = asyncio.create_task(llm.generate("hi", LONG))
        await asyncio.sleep(0)  # the task runs up to its first wait: the order is given
        task.cancel()
        await until(lambda: llm.stats.num_cancelled == 1)

    run(queue_and_leave())
    assert is_idle(llm) and llm.stats.num_output_tokens < LONG.max_tokens


@pytest.mark.slow
def test_leaving_after_the_engine_has_finished(llm: AsyncLLM) -> None:
    async def leave_late() -> None:
        async for _ in llm.stream("hi", SHORT):
            await until(lambda: llm.stats.num_finished == 1)
            break
        await llm.generate("ho", SHORT)

    run(leave_late())
    assert (llm.stats.num_finished, llm.stats.num_cancelled) == (2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clients_that_come_and_go_at_random(llm: AsyncLLM, reference: Reference, seed: int) -> None:
    rng = random.Random(seed)
    requests = [(rng.choice(PROMPTS), rng.choice(PARAMS)) for _ in range(40)]
    stays = [rng.choice([0, 1, 2, 5, 99]) for _ in requests]
    starts = [rng.random() * 0.3 for _ in requests]

    async def client(request: tuple[Any, SamplingParams], num_chunks: int, start: float) -> Any:
        await asyncio.sleep(start)
        chunks: list[StreamChunk] = []
        async for chunk in llm.stream(*request):
            chunks.append(chunk)
            if len(chunks) > num_chunks:
                break
        return chunks

    async def all_clients() -> list[list[StreamChunk]]:
        clients = map(client, requests, stays, starts)
        found = await asyncio.gather(*clients)
        await until(lambda: is_idle(llm))
        return found

    for chunks, request in zip(run(all_clients()), requests, strict=True):
        expected = reference(*request)
        for chunk in chunks:
            if chunk.output is not None:
                assert facts(chunk.output) == facts(expected[chunk.output_index])


# ---- mistakes ----

MISTAKES: list[tuple[Any, Any, dict[str, Any], str]] = [
    ("", SHORT, {}, "The prompt is empty"),
    ([5, 320], SHORT, {}, "prompt_token_ids is 320; expected token ids from 0 to 319"),
    (None, SHORT, {}, "A prompt is None; expected text or token ids"),
    ([5] * 300, SHORT, {}, "The prompt has 300 tokens"),
    ("hi", {"max_tokens": 3}, {}, "sampling params are {'max_tokens': 3}; expected SamplingParams"),
    ("hi", SHORT, {"priority": "high"}, "priority is 'high'; expected a whole number; lower goes"),
    ("hi", replace(SHORT, stop_token_ids=(400,)), {}, "stop_token_ids is 400"),
    ("hi", replace(SHORT, num_speculative_tokens=9), {}, "num_speculative_tokens of the request"),
]


def test_mistakes_reach_their_caller_alone(llm: AsyncLLM, offline: LLM) -> None:
    async def right_and_wrong() -> list[Any]:
        good = [llm.generate(prompt, SAMPLED) for prompt in PROMPTS]
        bad = [llm.generate(prompt, params, **more) for prompt, params, more, _ in MISTAKES]
        return await asyncio.gather(*good[:3], *bad, *good[3:], return_exceptions=True)

    results = run(right_and_wrong())
    for error, (*_, message) in zip(results[3:-2], MISTAKES, strict=True):
        assert isinstance(error, UserError) and message in str(error)
    outputs = [outputs[0] for outputs in results[:3] + results[-2:]]
    expected = offline.generate(PROMPTS, SAMPLED)
    assert [facts(o) for o in outputs] == [facts(o) for o in expected]
    assert is_idle(llm)


def test_a_surprise_while_adding_reaches_its_caller_alone(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = llm.llm.requests.encode

    def surprising(prompt: Any) -> list[int]:
        return encode({}["surprise"] if prompt == "boo" else prompt)

    monkeypatch.setattr(llm.llm.requests, "encode", surprising)

    async def both() -> list[Any]:
        requests = (llm.generate(prompt, SHORT) for prompt in ("hi", "boo", "ho"))
        return await asyncio.gather(*requests, return_exceptions=True)

    first, error, second = run(both())
    assert isinstance(error, KeyError)
    assert len(first[0].token_ids) == len(second[0].token_ids) == 10


# ---- the end ----


def test_closing_ends_running_streams(llm: AsyncLLM) -> None:
    async def close_amid() -> list[Any]:
        # More than there are seats: some are waiting.
        tasks = [asyncio.create_task(llm.generate("hi", LONG)) for _ in range(6)]
        await until(lambda: llm.stats.num_output_tokens > 20)
        await asyncio.gather(llm.aclose(), llm.aclose())
        await llm.aclose()
        with pytest.raises(UserError, match="This AsyncLLM is closed; make another one"):
            await llm.generate("hi", SHORT)
        return await asyncio.gather(*tasks, return_exceptions=True)

    errors = run(close_amid())
    assert {str(error) for error in errors} == {"This AsyncLLM is closed; make another one."}
    assert len({id(error) for error in errors}) == 6, "an error each: tasks add tracebacks to it"
    assert is_idle(llm) and llm.stats.num_cancelled == 6


def test_a_context_manager_closes(options: dict[str, Any]) -> None:
    async def use() -> AsyncLLM:
        async with AsyncLLM(**options) as llm:
            await llm.generate("hi", SHORT)
            return llm

    llm = run(use())
    with pytest.raises(UserError, match="is closed"):
        run(llm.generate("hi", SHORT))


def test_a_failing_engine_tells_everybody(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = llm.llm.engine.step, iter(range(5))
    fault = ArithmeticError("no such step")

    def failing() -> Any:
        if next(steps, None) is None:
            raise fault
        return step()

    monkeypatch.setattr(llm.llm.engine, "step", failing)

    async def fail() -> list[Any]:
        requests = (llm.generate("hi", LONG) for _ in range(6))
        errors = await asyncio.gather(*requests, return_exceptions=True)
        with pytest.raises(RuntimeError, match="The engine failed") as refused:
            await llm.generate("hi", SHORT)
        await llm.aclose()
        return [*errors, refused.value]

    for error in run(fail()):
        assert isinstance(error, RuntimeError) and error.__cause__ is fault
        assert "ArithmeticError('no such step')" in str(error)


# ---- several event loops ----


@pytest.mark.slow
def test_two_event_loops_share_an_engine(llm: AsyncLLM, offline: LLM) -> None:
    found: dict[int, list[list[RequestOutput]]] = {}

    async def all_prompts() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(llm.generate(prompt, SAMPLED) for prompt in PROMPTS))

    def serve(which: int) -> None:
        found[which] = run(all_prompts())

    threads = [threading.Thread(target=serve, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = [facts(output) for output in offline.generate(PROMPTS, SAMPLED)]
    for which in range(2):
        assert [facts(output) for (output,) in found[which]] == expected


def test_a_closed_event_loop_takes_its_requests_with_it(llm: AsyncLLM, offline: LLM) -> None:
    loop = asyncio.new_event_loop()
    stream = llm.stream("hi", replace(LONG, n=2, temperature=1.0))
    loop.run_until_complete(anext(stream))
    loop.close()

    async def others() -> RequestOutput:
        await until(lambda: llm.stats.num_cancelled == 2)
        return (await llm.generate("hi", SHORT))[0]

    assert facts(run(others())) == facts(offline.generate("hi", SHORT)[0])
    assert is_idle(llm)
