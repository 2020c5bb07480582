"""The engine process: models, steps, and one message a step to the front end.

It never waits for clients, HTTP or JSON, which are the front end's. It shows that it lives by a
heartbeat in memory that both processes share.
"""

import ctypes
import gc
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from multiprocessing.connection import Connection
from queue import Empty
from typing import Any, Literal, get_args

import torch

from peagle.config import EngineConfig, SpeculativeConfig
from peagle.config.engine import TARGET_DEFAULTS
from peagle.engine import Calibration, EngineStats, LLMEngine, SpeculationStats
from peagle.engine.head_swap import HeadSwap
from peagle.engine.loop import Add, EngineLoop, Order
from peagle.engine.outputs import StreamChunk
from peagle.engine.placement import fix_threads, load_target, resolve_device
from peagle.engine.requests import Requests
from peagle.errors import UserError
from peagle.llm import LLM
from peagle.models.fingerprint import identity_of
from peagle.serving.logs import configure_logging
from peagle.serving.memory_release import leave_to_itself, trim

CPU_KV_GIB = 2.0  # KV cache of all engines on a CPU by default
_STATS_EVERY_S = 0.1
# Beats of an idle engine, and steps of one token that show that its device still answers.
_BEAT_EVERY_S = 0.5
_CHECK_EVERY_S = 10.0
# What a step may take to end when the front end is gone.
_LAST_STEP_S = 2.0
_PR_SET_PDEATHSIG = 1
# A new head decodes what follows these.
_TRIED_TEXTS = ("def add(a, b):\n", "The capital of France is", "1, 2, 3, 4, 5,")


# ---- messages between the front end and an engine process, pickled over a private pipe ----


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The models that an engine process loads, and the limits that it keeps.

    Attributes:
        target: folder of the target.
        proposers: how each proposer drafts, by name; the first one is the default. They share the
            target's weights and split the KV budget.
        threads: CPU threads of torch; None chooses by model and machine.
        gpu: the GPU as CUDA_VISIBLE_DEVICES names it, where there are several processes.
        compile_timeout_s, grammar_budget_s, hang_timeout_s, log_format: see `ServerConfig`.
        show_memory: whether the server logs the memory plans on a CPU too.
        identify_target: whether the engine tells which target it has.
    """

    target: str
    proposers: dict[str, SpeculativeConfig | None]
    engine: EngineConfig
    threads: int | None = None
    gpu: str | None = None
    compile_timeout_s: float = 10.0
    grammar_budget_s: float = 5.0
    hang_timeout_s: float = 10.0
    log_format: Literal["text", "json"] = "text"
    show_memory: bool = False
    identify_target: bool = False


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of a loaded engine; the process sends them when it is ready.

    Attributes:
        max_num_seqs: number of sequences decoded together.
        num_speculative_tokens: K of each proposer, by name, 0 for plain decoding.
        defaults: sampling parameters that the model asks for, fields of SamplingParams.
        memory_plans: the memory plan of each proposer's engine, by name, as text.
        target_identity: `tokenizer_sha256` and `lm_head_sha256` of the target, if asked for.
        corrections: names of the corrections that requests may choose, by proposer.
    """

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    num_speculative_tokens: dict[str, int]
    defaults: dict[str, Any]
    device: str
    memory_plans: dict[str, str]
    target_identity: dict[str, str | None] | None = None
    corrections: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cancel:
    """An order to stop a request and free its memory."""

    index: int


@dataclass(frozen=True, slots=True)
class Stop:
    """An order to end the process."""


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """An order to the first proposer's engine in a swap of its head for the one in `folder`.

    Loading (with all checks), copying, and each turn of the old or the new head end with a
    `HeadDone`.
    """

    action: Literal["load", "copy", "old", "new", "keep", "restore"]
    folder: str = ""


@dataclass(frozen=True, slots=True)
class HeadDone:
    """The end of a `HeadOrder`; `error` is "" unless it failed."""

    error: str = ""
    is_user_error: bool = True


@dataclass(frozen=True, slots=True)
class Failed:
    """The process ends, by a mistake in the settings (`is_user_error`) or by a fault."""

    message: str
    is_user_error: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was not queued."""

    index: int
    message: str
    is_user_error: bool


@dataclass(frozen=True, slots=True)
class NewChunks:
    """The chunks of one step; `stats` now and then."""

    chunks: list[StreamChunk]
    stats: EngineStats | None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle chunks as plain tuples, at a fifth of the time."""
        return _new_chunks, ([tuple(chunk) for chunk in self.chunks], self.stats)


def _new_chunks(chunks: list[tuple[Any, ...]], stats: EngineStats | None) -> NewChunks:
    return NewChunks([StreamChunk._make(chunk) for chunk in chunks], stats)


# ---- signs of life ----

Activity = Literal["working", "loading", "compiling"]
_ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
# A step may take this many times as long as the slowest step before it.
_HANG_FACTOR = 20
# Announced work must end too; loading may read a large model from a slow disk.
_ANNOUNCED_S = {"loading": 3600.0, "compiling": 600.0}
# Taking a request may tokenize long lists of words.
_ORDER_S = 60.0


class Heartbeat:
    """When the engine was last alive and until when it may be silent, in shared memory.

    The engine writes, the front end compares with its clock, without a message. So the front end
    notices an engine that is stopped, locked up, or waiting for a GPU that does not answer. On
    Linux all processes share the clock `time.monotonic`.

    The limit of a step is 20 times the slowest step before it. A pass over more tokens than any
    before it may also take as long as its tokens would take one by one. A batch always takes less,
    because it reads the weights once. So the first long prompt on a slow CPU is no hang. Steps that
    compile something do not count.

    Args:
        context: multiprocessing context, whose processes may receive the heartbeat.
        timeout_s: seconds that the engine may always be silent; 0 sets no limit.
    """

    def __init__(self, context: Any, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._values = context.RawArray("d", 3)
        # The engine alone uses the attributes below.
        self._is_loading = True
        self._num_compiling = 0  # one compilation begins others
        self._has_compiled = False
        self._token_s = 0.0
        self._slowest_s = 0.0
        self._most_tokens = 0
        self._planned_tokens = 0
        self.beat()

    # ---- read by the front end ----

    @property
    def last_s(self) -> float:
        """Return when the engine was last alive, by `time.monotonic`."""
        return self._values[0]

    @property
    def due_s(self) -> float:
        """Return when the engine must be alive again, by `time.monotonic`."""
        return self._values[1]

    @property
    def activity(self) -> Activity:
        """Return the engine's activity until then."""
        return _ACTIVITIES[int(self._values[2])]

    # ---- written by the engine ----

    def _write(self, limit_s: float, activity: Activity) -> None:
        now = time.monotonic()
        limit_s = max(limit_s, self._timeout_s) if self._timeout_s else math.inf
        self._values[:] = (now, now + limit_s, _ACTIVITIES.index(activity))

    def beat(self, limit_s: float = 0.0) -> None:
        """Note that the engine goes on, and may be silent for `limit_s`, or longer by its steps."""
        if self._is_loading:
            self._write(_ANNOUNCED_S["loading"], "loading")
        else:
            self._write(max(limit_s, _HANG_FACTOR * self._slowest_s), "working")

    def loaded(self, token_s: float) -> None:
        """Note that all is loaded; a step of one token takes `token_s` seconds."""
        self._token_s = self._slowest_s = token_s
        self._is_loading = False
        self.beat()

    def planned(self, num_tokens: int) -> None:
        """Note that a pass over so many tokens begins."""
        self._planned_tokens = max(self._planned_tokens, num_tokens)
        self.beat(num_tokens * self._token_s if num_tokens > self._most_tokens else 0.0)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a step of the engine."""
        self._has_compiled, self._num_compiling, self._planned_tokens = False, 0, 0
        self.beat()
        start = time.monotonic()
        yield
        if not self._has_compiled:
            self._slowest_s = max(self._slowest_s, time.monotonic() - start)
        self._most_tokens = max(self._most_tokens, self._planned_tokens)

    def compiling(self, *_: Any, **__: Any) -> None:
        """Note that a compilation begins."""
        self._has_compiled = True
        self._num_compiling += 1
        self._write(_ANNOUNCED_S["compiling"], "compiling")

    def compiled(self, *_: Any, **__: Any) -> None:
        """Note that a compilation ended."""
        self._num_compiling -= 1
        # Between two compilations of the start, graphs are captured.
        if self._is_loading or self._num_compiling > 0:
            self._write(_ANNOUNCED_S["compiling"], "compiling")
        else:
            self.beat()


def announce_compilation(heartbeat: Heartbeat) -> None:
    """Call a heartbeat whenever torch.compile or Triton compiles something."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(heartbeat.compiling)
    callback_handler.register_end_callback(heartbeat.compiled)
    with suppress(ImportError):  # only where torch brings it
        from triton import knobs

        knobs.runtime.jit_cache_hook = heartbeat.compiling
        knobs.runtime.jit_post_compile_hook = heartbeat.compiled


# ---- the process ----


def run_engine(spec: EngineSpec, connection: Connection, heartbeat: Heartbeat) -> None:
    """Serve until the front end says stop or goes away; the entry point of the process."""
    # A signal to stop the server reaches the whole process group; the front end handles it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _end_with_front_end()
    configure_logging(spec.log_format)
    try:
        worker = EngineWorker(_load(spec, heartbeat), spec, connection, heartbeat)
        worker.rehearse()
        start = time.monotonic()
        worker.check()
        heartbeat.loaded(time.monotonic() - start)
        connection.send(worker.info())
        worker.serve()
    except (BrokenPipeError, EOFError, ConnectionResetError):
        pass  # the front end is gone
    except BaseException as error:
        is_mistake = isinstance(error, UserError)
        connection.send(Failed(str(error) if is_mistake else traceback.format_exc(), is_mistake))
    finally:
        # Threads that still compile a grammar are not waited for.
        os._exit(0)


def _end_with_front_end() -> None:
    """Make the process end when the front end does, even in the middle of a step.

    A thread waits for the front end, which the system reports by the end of a pipe. No thread runs
    in a process that is stopped, or while a step holds the interpreter: on Linux the kernel kills
    it when the front end's main thread, which started it, ends.
    """
    front_end = multiprocessing.parent_process()
    assert front_end is not None

    def end() -> None:
        front_end.join()
        time.sleep(_LAST_STEP_S)
        os._exit(1)

    threading.Thread(target=end, name="peagle-front-end", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if not front_end.is_alive():  # it ended before the kernel knew
            os._exit(1)


def _load(spec: EngineSpec, heartbeat: Heartbeat) -> dict[str, LLM]:
    """Load an LLM for each proposer, on one target."""
    if spec.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = spec.gpu
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if spec.threads is not None:
        fix_threads(spec.threads)
    heartbeat.beat()
    device = resolve_device(spec.engine.device)
    if device.type == "cuda":  # nothing is compiled for a CPU, and the compilers load slowly
        announce_compilation(heartbeat)
    target = load_target(spec.target, spec.engine)
    sizes = replace(spec.engine, **TARGET_DEFAULTS)
    llms: dict[str, LLM] = {}
    for number, (name, speculative) in enumerate(spec.proposers.items()):
        heartbeat.beat()
        share = asdict(split_kv(sizes, device, number, len(spec.proposers)))
        llm = llms[name] = LLM(model=target, speculative_config=speculative, **share)
        llm.requests = Requests(llm.engine, llm.tokenizer, spec.grammar_budget_s or None)
        llm.engine.touch_caches()
    return llms


def split_kv(config: EngineConfig, device: torch.device, number: int, count: int) -> EngineConfig:
    """Return the sizes of engine `number` of `count`, made one after another on a loaded target.

    The engines share the blocks or the GiB that the user asked for. On a GPU where the user asked
    for neither, each engine takes its part of the memory that is left when its turn comes.
    """
    if count == 1:
        return config
    if config.num_kv_blocks is not None:
        return replace(config, num_kv_blocks=max(1, config.num_kv_blocks // count))
    if config.kv_cache_gib is not None:
        return replace(config, kv_cache_gib=config.kv_cache_gib / count)
    if device.type != "cuda":
        return replace(config, kv_cache_gib=CPU_KV_GIB / count)
    free, total = torch.cuda.mem_get_info(device)
    used = 1 - free / total
    left = max(config.gpu_memory_utilization - used, 0.0)
    return replace(config, gpu_memory_utilization=used + left / (count - number))


class EngineWorker(EngineLoop):
    """The loop of an engine process: orders come from the front end, chunks go back to it.

    Args:
        llms: an LLM for each proposer, all on one target.
        connection: the pipe to the front end.
    """

    def __init__(
        self, llms: dict[str, LLM], spec: EngineSpec, connection: Connection, heartbeat: Heartbeat
    ) -> None:
        super().__init__({n: llm.requests for n, llm in llms.items()}, spec.compile_timeout_s)
        self._llms = llms
        self._connection = connection
        self._heartbeat = heartbeat
        self._spec = spec
        self._beat_every_s = min(_BEAT_EVERY_S, spec.hang_timeout_s / 4 or _BEAT_EVERY_S)
        self._worked_s = time.monotonic()
        for llm in llms.values():
            llm.engine.on_pass = heartbeat.planned
        self._last_stats_s = 0.0
        self._swap: HeadSwap | None = None
        self._try_out: Iterator[None] | None = None

    def info(self) -> EngineInfo:
        llm = next(iter(self._llms.values()))
        return EngineInfo(
            max_model_len=llm.engine.max_model_len,
            vocab_size=llm.target.vocab_size,
            max_num_seqs=llm.engine.config.max_num_seqs,
            num_speculative_tokens={
                name: one.engine.num_speculative_tokens for name, one in self._llms.items()
            },
            defaults=llm.target.generation_defaults(),
            device=str(llm.target.device),
            memory_plans={n: str(one.engine.memory_plan) for n, one in self._llms.items()},
            target_identity=identity_of(llm.target) if self._spec.identify_target else None,
            corrections={n: one.engine.corrections for n, one in self._llms.items()},
        )

    def serve(self) -> None:
        """Serve until the front end says stop, or until the pipe ends."""
        leave_to_itself()  # or a collection stops every stream
        threading.Thread(target=self._receive, name="peagle-orders", daemon=True).start()
        self._send([], always=True)
        self.run()

    def rehearse(self) -> None:
        """Let each engine do the one-time work of its first steps; no request may run."""
        for llm in self._llms.values():
            with self._heartbeat.step():
                llm.engine.rehearse()
                llm.engine.check()
                llm.requests.warm_up_grammars()

    def check(self) -> None:
        """Compute one token with each engine; no request may run."""
        for llm in self._llms.values():
            with self._heartbeat.step():
                llm.engine.check()
        self._worked_s = time.monotonic()

    def step(self) -> list[StreamChunk]:
        with self._heartbeat.step():
            chunks = super().step()
        if self._try_out is not None:
            self._heartbeat.beat(_ORDER_S)
            self._try_head(self._try_out)
        self._worked_s = time.monotonic()
        return chunks

    @property
    def has_unfinished(self) -> bool:
        return self._try_out is not None or super().has_unfinished

    def deliver(self, chunks: list[StreamChunk]) -> None:
        self._send([_without_repeats(chunk) for chunk in chunks], always=not self.has_unfinished)

    def refuse(self, index: int, error: BaseException) -> None:
        is_mistake = isinstance(error, UserError)
        text = str(error) if is_mistake else "".join(traceback.format_exception(error))
        self._connection.send(Refused(index, text, is_mistake))

    def next_order(self) -> Order | None:
        """Wait for an order; an idle engine beats, and is checked now and then."""
        while True:
            self._heartbeat.beat()
            try:
                order = self._orders.get(timeout=self._beat_every_s)
            except Empty:
                if time.monotonic() - self._worked_s > _CHECK_EVERY_S:
                    self.check()
                    if trim is not None:
                        trim(0)
            else:
                self._heartbeat.beat(_ORDER_S)
                return order

    def _receive(self) -> None:
        """Turn messages into orders, in a thread of its own."""
        with suppress(EOFError, OSError):
            while not isinstance(message := self._connection.recv(), Stop):
                self.post(partial(self._obey, message))
        self.post(None)

    def _obey(self, message: Add | Cancel | HeadOrder) -> None:
        if isinstance(message, Add):
            self.add(message)
        elif isinstance(message, HeadOrder):
            self._swap_head(message)
        elif self.cancel(message.index):
            self._send([], always=True)

    # ---- swap of the head ----

    def _swap_head(self, order: HeadOrder) -> None:
        swap = self._swap
        if order.action == "load":
            name = "peagle-head"
            threading.Thread(target=self._load_head, args=(order,), name=name, daemon=True).start()
        elif order.action in ("copy", "old", "new"):
            assert swap is not None, "a head was loaded"
            turn = partial(swap.turn, is_new=order.action == "new")
            if self._succeeds(swap.copy if order.action == "copy" else turn):
                self._connection.send(HeadDone())
        else:
            if order.action == "restore" and swap is not None:
                swap.restore()
            self._swap = self._try_out = None
            # A busy engine would keep what loading took; the small engine has cycles.
            gc.collect()
            if trim is not None:
                threading.Thread(target=trim, args=(0,), name="peagle-trim", daemon=True).start()

    def _load_head(self, order: HeadOrder) -> None:
        """Load a new head in a thread of its own; the engine's then tries it out."""
        engine = next(iter(self._llms.values())).engine
        try:
            swap = HeadSwap(engine, order.folder)
        except Exception as error:
            self.post(partial(self._refuse_head, error))
        else:
            self.post(partial(self._begin_try_out, swap))

    def _begin_try_out(self, swap: HeadSwap) -> None:
        requests = next(iter(self._llms.values())).requests
        prompts = [ids for text in _TRIED_TEXTS if (ids := requests.encode(text))]
        self._swap, self._try_out = swap, swap.try_out(prompts)

    def _try_head(self, try_out: Iterator[None]) -> None:
        """Run one step of trying a head out; its end is that of the order to load."""

        def step() -> None:
            if next(try_out, self) is self:
                self._try_out = None

        if not self._succeeds(step):
            self._swap = self._try_out = None
        elif self._try_out is None:
            self._connection.send(HeadDone())

    def _succeeds(self, work: Callable[[], None]) -> bool:
        """Do a part of a swap; send an error, and return false, if it fails."""
        try:
            work()
        except Exception as error:
            self._refuse_head(error)
            return False
        return True

    def _refuse_head(self, error: Exception) -> None:
        is_mistake = isinstance(error, UserError)
        text = str(error) if is_mistake else "".join(traceback.format_exception(error))
        self._connection.send(HeadDone(text, is_mistake))

    def _send(self, chunks: list[StreamChunk], *, always: bool) -> None:
        """Send chunks, and the counters of all engines together at most every so often."""
        now, stats = time.monotonic(), None
        if always or now - self._last_stats_s >= _STATS_EVERY_S:
            self._last_stats_s = now
            stats = pooled([llm.engine for llm in self._llms.values()])
        if chunks or stats:
            self._connection.send(NewChunks(chunks, stats))


def _without_repeats(chunk: StreamChunk) -> StreamChunk:
    """Leave out of a finished output the log-probabilities that the front end has by then.

    Earlier chunks brought the output's. Outputs of one prompt share its own: the first one has
    them.
    """
    output = chunk.output
    if output is None or (output.logprobs is None and output.prompt_logprobs is None):
        return chunk
    of_prompt = None if output.index else output.prompt_logprobs
    return chunk._replace(output=replace(output, logprobs=None, prompt_logprobs=of_prompt))


def pooled(engines: list[LLMEngine]) -> EngineStats:
    """Return the counters of several engines, pooled."""
    every = [engine.stats for engine in engines]
    totals: dict[str, Any] = {
        f.name: sum(getattr(stats, f.name) for stats in every)
        for f in fields(EngineStats)
        if f.name not in ("speculation", "step_times", "eager_steps", "decode_steps", "calibration")
    }
    calibration = Calibration()
    eager_steps: Counter[str] = Counter()
    decode_steps: Counter[int] = Counter()
    for stats in every:
        eager_steps.update(stats.eager_steps)
        decode_steps.update(stats.decode_steps)
        calibration.add(stats.calibration)
    speculation = SpeculationStats.pooled(stats.speculation for stats in every)
    return EngineStats(
        **totals,
        speculation=speculation,
        step_times={},
        eager_steps=eager_steps,
        decode_steps=decode_steps,
        calibration=calibration,
    )
