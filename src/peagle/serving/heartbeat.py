"""Signs of life of an engine process, in memory that it shares with the front end.

The engine writes when it was last alive and until when it may be silent. The front end compares
that with its clock, without a message: so it sees an engine that is stopped, locked up, or waiting
for a GPU that does not answer. Both read `time.monotonic`, on Linux one clock for all processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, get_args

Activity = Literal["working", "loading", "compiling"]

# A step may take so many times as long as the slowest one before it.
_SLOWER = 20
# Even what announces itself must end: loading may read a large model from a slow disk.
_ANNOUNCED_S = {"loading": 3600.0, "compiling": 600.0}
# To take a request needs no GPU, but may need a tokenizer for long lists of words.
_ORDER_S = 60.0
_ACTIVITIES: tuple[Activity, ...] = get_args(Activity)


class Heartbeat:
    """The shared memory: one process writes it, the other one reads it.

    Args:
        context: of multiprocessing; a process that it starts may be given the heartbeat.
        timeout_s: how long the engine may be silent at least; 0 is for ever.

    Attributes:
        timeout_s: as given.
    """

    def __init__(self, context: Any, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._values = context.RawArray("d", 3)
        self.announce("loading")

    def beat(self, limit_s: float = 0.0, activity: Activity = "working") -> None:
        """Say that the engine is alive, and may be silent for `limit_s` or the time-out."""
        now = time.monotonic()
        limit_s = max(limit_s, self.timeout_s) if self.timeout_s else math.inf
        self._values[:] = (now, now + limit_s, _ACTIVITIES.index(activity))

    def announce(self, activity: Activity) -> None:
        """Say that something begins that takes long."""
        self.beat(_ANNOUNCED_S[activity], activity)

    @property
    def last_s(self) -> float:
        """When the engine was last alive, by `time.monotonic`."""
        return self._values[0]

    @property
    def due_s(self) -> float:
        """When it must be alive again."""
        return self._values[1]

    @property
    def activity(self) -> Activity:
        """What it does meanwhile."""
        return _ACTIVITIES[int(self._values[2])]


class Pulse:
    """What the engine process writes to a heartbeat, and for how long each beat holds.

    The limit of a step is 20 times the slowest step before it. A pass over more tokens than any
    before it may also take as long as its tokens would take one by one, which is always longer: a
    batch reads the weights once. So the first long prompt on a slow CPU is no hang. A step in
    which something was compiled says nothing about the speed of others.

    Args:
        heartbeat: where it goes.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._is_loading = True
        self._num_compiling = 0  # one compilation begins others
        self._has_compiled = False
        self._token_s = 0.0
        self._slowest_s = 0.0
        self._most_tokens = 0
        self._planned_tokens = 0

    def loading(self) -> None:
        """A stage of loading begins."""
        self._write(0.0)

    def loaded(self, token_s: float) -> None:
        """All is loaded.

        Args:
            token_s: seconds of a step of one token.
        """
        self._token_s = self._slowest_s = token_s
        self._is_loading = False
        self.beat()

    def beat(self) -> None:
        """The loop goes round, or waits for requests."""
        self._write(_SLOWER * self._slowest_s)

    def order(self) -> None:
        """An order of the front end is carried out."""
        self._write(max(_SLOWER * self._slowest_s, _ORDER_S))

    def planned(self, num_tokens: int) -> None:
        """A pass over so many tokens begins."""
        self._planned_tokens = max(self._planned_tokens, num_tokens)
        one_by_one_s = num_tokens * self._token_s if num_tokens > self._most_tokens else 0.0
        self._write(max(_SLOWER * self._slowest_s, one_by_one_s))

    def _write(self, limit_s: float) -> None:
        if self._is_loading:
            self._heartbeat.announce("loading")
        else:
            self._heartbeat.beat(limit_s)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of the engine."""
        self._has_compiled, self._num_compiling, self._planned_tokens = False, 0, 0
        self.beat()
        start = time.monotonic()
        yield
        if not self._has_compiled:
            self._slowest_s = max(self._slowest_s, time.monotonic() - start)
        self._most_tokens = max(self._most_tokens, self._planned_tokens)

    def compiling(self, *_: Any, **__: Any) -> None:
        """Something begins to compile."""
        self._has_compiled = True
        self._num_compiling += 1
        self._heartbeat.announce("compiling")

    def compiled(self, *_: Any, **__: Any) -> None:
        """It has compiled."""
        self._num_compiling -= 1
        # Between two compilations of the start, graphs are captured.
        if self._is_loading or self._num_compiling > 0:
            self._heartbeat.announce("compiling")
        else:
            self.beat()


def announce_compilation(pulse: Pulse) -> None:
    """Have a pulse told whenever torch.compile or Triton compiles something, in any step."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(pulse.compiling)
    callback_handler.register_end_callback(pulse.compiled)
    with suppress(ImportError):  # only where torch brings it
        from triton import knobs

        knobs.runtime.jit_cache_hook = pulse.compiling
        knobs.runtime.jit_post_compile_hook = pulse.compiled
