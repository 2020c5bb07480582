"""Engine processes that do what engines should not: each is `run_engine` with one thing changed.

They load the bundled pair and serve it as any engine does, in a process of their own.
"""

import asyncio
import os
import time
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch

from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.engine.requests import Requests
from peagle.serving import engine_pool, engine_process
from peagle.serving.engine_process import Add, EngineSpec, Heartbeat, announce_compilation
from serving.warm import _fork_engines

REAL_STEP, REAL_LOAD = Requests.step, engine_process._load
SPEC = EngineSpec(
    str(BUNDLED_TARGET),
    {"peagle": SpeculativeConfig(model=str(BUNDLED_PEAGLE), num_speculative_tokens=3)},
    EngineConfig(max_num_seqs=4, kv_cache_gib=0.1),
    threads=1,
    hang_timeout_s=4,
)
SLOW_S = 6.0


def hangs_in_a_step(*args: Any) -> None:
    def step(requests: Requests) -> Any:
        while True:
            time.sleep(1000)

    patch.object(Requests, "step", step).start()
    engine_process.run_engine(*args)


def is_slow_once(*args: Any) -> None:
    """Its third step takes `SLOW_S`; the limit is higher, since another one took a fifth of it."""
    numbers = iter(range(10**9))

    def step(requests: Requests) -> Any:
        time.sleep({1: SLOW_S / 5, 2: SLOW_S}.get(next(numbers), 0))
        return REAL_STEP(requests)

    patch.object(Requests, "step", step).start()
    engine_process.run_engine(*args)


def compiles_then_hangs(*args: Any) -> None:
    """The first step compiles for `SLOW_S` with torch.compile, the fifth one never ends."""
    numbers = iter(range(10**9))

    def load(spec: Any, heartbeat: Heartbeat) -> Any:
        announce_compilation(heartbeat)
        return REAL_LOAD(spec, heartbeat)

    def backend(graph: Any, _: Any) -> Any:
        time.sleep(SLOW_S)
        return graph

    def step(requests: Requests) -> Any:
        number = next(numbers)
        if number == 0:
            torch.compile(torch.neg, backend=backend)(torch.ones(1))
        if number == 4:
            time.sleep(1000)
        return REAL_STEP(requests)

    patch.object(engine_process, "_load", load).start()
    patch.object(Requests, "step", step).start()
    engine_process.run_engine(*args)


def dies_in_a_step(*args: Any) -> None:
    def step(requests: Requests) -> Any:
        os._exit(1)

    patch.object(Requests, "step", step).start()
    engine_process.run_engine(*args)


def loads_in_json_only(*args: Any) -> None:
    """Loads if its log is to be JSON, and ends at once if not."""
    if args[0].log_format != "json":
        os._exit(1)
    engine_process.run_engine(*args)


def be_front_end(connection: Connection) -> None:
    """In a process of its own: have an engine that hangs in a step, and tell its process id."""
    _fork_engines()
    patch.object(engine_pool, "run_engine", hangs_in_a_step).start()
    asyncio.run(_feed(connection))


async def _feed(connection: Connection) -> None:
    loaded = asyncio.Event()
    engine = engine_pool.EngineProcess(0, SPEC, lambda *_: loaded.set())
    await loaded.wait()
    engine.send(Add(0, [1, 2, 3], SamplingParams(max_tokens=5), "peagle"))
    connection.send(engine.pid)
    await asyncio.sleep(1000)
