"""The engine process from within: orders, chunks and grammars that take too long."""

import asyncio
import gc
import math
import multiprocessing
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig, StructuredOutput
from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.errors import UserError
from peagle.llm import LLM
from peagle.serving.config import ServerConfig
from peagle.serving.engine_pool import specs_for
from peagle.serving.engine_process import (
    Add,
    Cancel,
    EngineSpec,
    EngineWorker,
    Heartbeat,
    NewChunks,
    Refused,
    Stop,
)
from peagle.serving.errors import ApiError
from peagle.serving.metrics import Metrics
from peagle.serving.service import Caller, Generation, Service

SPECULATIVE = SpeculativeConfig(model=str(BUNDLED_PEAGLE), num_speculative_tokens=3)
SLOW = SamplingParams(structured_output=StructuredOutput.regex("[a-z]{20,30}"))
JSON = SamplingParams(max_tokens=30, structured_output=StructuredOutput.json_object())


@dataclass
class Front:
    """The other end of the pipe."""

    connection: Connection
    llm: LLM
    worker: EngineWorker
    refused: dict[int, Refused] = field(default_factory=dict)
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    seen: list[Any] = field(default_factory=list)

    def send(self, message: Any) -> None:
        self.connection.send(message)

    def add(self, index: int, params: SamplingParams, text: str = "def f(") -> None:
        self.send(Add(index, self.llm.requests.encode(text), params, "peagle"))

    def until(self, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        """Read messages until something is so."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, self.seen[-3:]
            if self.connection.poll(0.05):
                self._take(self.connection.recv())

    def _take(self, message: Any) -> None:
        self.seen.append(message)
        if isinstance(message, Refused):
            self.refused[message.index] = message
        elif isinstance(message, NewChunks):
            for chunk in message.chunks:
                if chunk.output is not None:
                    self.outputs[chunk.index] = chunk.output


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(speculative_config=SPECULATIVE, max_num_seqs=4, kv_cache_gib=0.1)


@pytest.fixture
def front(llm: LLM) -> Iterator[Front]:
    ours, theirs = Pipe()
    spec = EngineSpec(str(BUNDLED_TARGET), {"peagle": SPECULATIVE}, EngineConfig())
    heartbeat = Heartbeat(multiprocessing, spec.hang_timeout_s)
    worker = EngineWorker({"peagle": llm}, spec, theirs, heartbeat)
    thread = threading.Thread(target=worker.serve)
    thread.start()
    front = Front(ours, llm, worker)
    yield front
    front.send(Stop())
    thread.join(20)
    assert not thread.is_alive()
    llm.requests.cancel_all()


def test_the_steps_of_a_request_add_up(front: Front) -> None:
    front.add(5, SamplingParams(max_tokens=20))
    front.until(lambda: 5 in front.outputs)
    chunks = [chunk for m in front.seen if isinstance(m, NewChunks) for chunk in m.chunks]
    output = front.outputs[5]
    assert [token for chunk in chunks for token in chunk.token_ids] == output.token_ids
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert len(chunks) < 20  # a message a step, of several tokens
    for chunk in chunks[:-1]:
        assert len(chunk.rejected_token_ids) == chunk.num_drafted - chunk.num_accepted
    assert 0 <= output.queue_time_s <= output.time_to_first_token_s <= output.elapsed_s


def test_an_idle_engine_gives_signs_of_life(front: Front) -> None:
    front.add(6, SamplingParams(max_tokens=1))
    front.until(lambda: 6 in front.outputs)
    heartbeat, seen_s = front.worker._heartbeat, [time.monotonic()]
    for _ in range(2):
        front.until(lambda: heartbeat.last_s > seen_s[-1] + 0.1)
        seen_s.append(heartbeat.last_s)


def test_no_collection_goes_through_what_is_loaded(front: Front) -> None:
    front.add(7, SamplingParams(max_tokens=1))
    front.until(lambda: 7 in front.outputs)
    later: list[Any] = [[]]
    visited = {id(one) for one in gc.get_objects()}
    assert id(front.llm.engine.__dict__) not in visited and id(later) in visited


def test_a_bad_request_is_refused_and_the_next_one_runs(front: Front) -> None:
    front.send(Add(1, [999_999], SamplingParams(), "peagle"))
    front.add(2, SamplingParams(max_tokens=2))
    front.until(lambda: 2 in front.outputs)
    assert front.refused[1].is_user_error and "999999" in front.refused[1].message


def test_a_cancelled_request_is_gone_from_the_counters(front: Front) -> None:
    front.add(1, SamplingParams(max_tokens=2000, ignore_eos=True))
    front.until(lambda: any(isinstance(m, NewChunks) and m.chunks for m in front.seen))
    front.send(Cancel(1))

    def is_idle() -> bool:
        told = [m.stats for m in front.seen if isinstance(m, NewChunks) and m.stats]
        last = told[-1]
        return last.num_running == 0 and last.num_free_kv_blocks == last.num_kv_blocks

    front.until(is_idle)
    assert 1 not in front.outputs


def test_a_grammar_that_takes_too_long_holds_up_nobody(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xgrammar")
    ended = threading.Event()

    def burn() -> None:
        while not ended.is_set():
            pass

    def slow(params: SamplingParams) -> None:
        threading.Thread(target=burn).start()  # as xgrammar's own threads
        ended.wait(60)

    with monkeypatch.context() as patched:
        patched.setattr(front.llm.requests, "compile_grammar", slow)
        patched.setattr(front.worker, "_compile_timeout_s", 0.3)
        front.add(1, SLOW)
        front.add(2, SamplingParams(max_tokens=30))
        front.until(lambda: 2 in front.outputs)
        front.until(lambda: 1 in front.refused)
        ended.set()
    assert "more than 0.3 s of the processor to compile" in front.refused[1].message
    front.add(3, SamplingParams(max_tokens=2))
    front.add(4, SLOW)
    front.until(lambda: 3 in front.outputs and 4 in front.refused)
    assert "more than 0.3 s of the processor to compile" in front.refused[4].message
    assert set(front.outputs) == {2, 3}


def test_a_grammar_that_waits_for_the_processor_is_compiled(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a compilation takes long, and little of the processor."""
    pytest.importorskip("xgrammar")
    compile_grammar = front.llm.requests.compile_grammar

    def waiting(params: SamplingParams) -> None:
        time.sleep(2.0)
        compile_grammar(params)

    monkeypatch.setattr(front.llm.requests, "compile_grammar", waiting)
    monkeypatch.setattr(front.worker, "_compile_timeout_s", 0.5)
    front.llm.requests.warm_up_grammars()
    front.add(1, JSON)
    front.until(lambda: 1 in front.outputs)
    assert not front.refused


def test_the_first_grammar_is_warmed_up() -> None:
    pytest.importorskip("xgrammar")
    llm = LLM(max_num_seqs=1, kv_cache_gib=0.1)
    spec = EngineSpec(str(BUNDLED_TARGET), {"": None}, EngineConfig())
    heartbeat = Heartbeat(multiprocessing, spec.hang_timeout_s)
    EngineWorker({"": llm}, spec, Pipe()[1], heartbeat).rehearse()
    compiler = llm.requests._compiler
    assert compiler is not None and len(compiler._cache) == 1
    llm.requests.compile_grammar(JSON)
    assert llm.requests._compiler is compiler


def test_without_the_package_nothing_is_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    llm = LLM(max_num_seqs=1, kv_cache_gib=0.1)
    llm.requests.warm_up_grammars()
    with pytest.raises(UserError, match="xgrammar"):
        llm.requests.compile_grammar(JSON)


def test_grammars_are_compiled_aside(front: Front) -> None:
    pytest.importorskip("xgrammar")
    front.add(1, JSON)
    front.until(lambda: 1 in front.outputs)
    assert front.outputs[1].text.lstrip().startswith("{")


def test_log_probabilities_are_sent_once(front: Front, llm: LLM) -> None:
    """Those of the output with its chunks, those of the prompt with its first output, as tables."""
    ids = llm.requests.encode("def f(x):\n    return x\n" * 60)
    params = SamplingParams(
        max_tokens=30, n=3, temperature=1.0, ignore_eos=True, logprobs=20, prompt_logprobs=20
    )
    front.send(Add(1, ids, params, "peagle"))

    def chunks() -> list[StreamChunk]:
        return [chunk for m in front.seen if isinstance(m, NewChunks) for chunk in m.chunks]

    front.until(lambda: sum(chunk.output is not None for chunk in chunks()) == 3)
    outputs = {chunk.output_index: chunk.output for chunk in chunks() if chunk.output is not None}
    for index, output in outputs.items():
        assert output.logprobs is None and (output.prompt_logprobs is None) == (index > 0)
        own = [one for c in chunks() if c.output_index == index for one in c.logprobs]
        assert [one.token_id for one in own] == output.token_ids
    given = outputs[0].prompt_logprobs
    assert given is not None and [one and one.token_id for one in given] == [None, *ids[1:]]
    assert len(pickle.dumps(given)) < 1.1 * len(ids) * 42 * 8  # a number has 8 bytes


def test_a_request_with_nan_is_an_error_of_its_own(front: Front) -> None:
    """Its client is told with status 500; the request beside it goes on."""
    broken = 2000

    def breaks(_: Any, args: Any, embedded: Any) -> Any:
        return embedded.masked_fill((args[0] == broken).unsqueeze(-1), math.nan)

    embedding: Any = front.llm.target.model.get_input_embeddings()
    hook = embedding.register_forward_hook(breaks)
    try:
        params = SamplingParams(max_tokens=8, logprobs=1, prompt_logprobs=1, ignore_eos=True)
        front.send(Add(1, [broken, 7, 8], params, "peagle"))
        front.add(2, params)
        front.until(lambda: {1, 2} <= set(front.outputs))
    finally:
        hook.remove()
    assert front.outputs[1].finish_reason == "error"
    assert front.outputs[2].finish_reason == "length" and front.outputs[2].error is None

    class Pool:
        def choose(self, _: int) -> Any:
            return SimpleNamespace(number=0)

        async def stream(self, *_: Any, **__: Any) -> Any:
            yield [(0, StreamChunk(0, "", [], 0, 0, front.outputs[1]))]

    pool: Any = Pool()
    service = Service(ServerConfig(), "model", ("peagle",), pool, Metrics("model"))
    caller = Caller("id", "/v1/completions")
    generation = Generation(service, [[broken]], params, "peagle", 0, caller)
    with pytest.raises(ApiError, match="logits are NaN or infinite after 3 tokens") as caught:
        asyncio.run(generation.run_to_end())
    assert (caught.value.status, caught.value.code) == (500, "logits_not_finite")


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, ["0", "1"]),
        ("", ["0", "1"]),
        ("5,2", ["5", "2"]),
        ("GPU-8c1f,MIG-77,3", ["GPU-8c1f", "MIG-77"]),
    ],
)
def test_engines_get_the_gpus_that_the_server_was_given(
    monkeypatch: pytest.MonkeyPatch, named: str | None, expected: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    spec = EngineSpec("target", {"": None}, EngineConfig())
    assert [one.gpu for one in specs_for(spec, 2)] == expected
    assert specs_for(spec, 1) == [spec] == [replace(spec, gpu=None)]
    with pytest.raises(UserError, match="data_parallel_size is 3, and there are 2 GPUs"):
        specs_for(spec, 3)
