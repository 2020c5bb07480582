"""Signs of life of an engine process, in memory that it shares with the front end.

The engine writes when it was last alive and until when it may be silent. The front end compares
this with its clock, without a message. So it notices an engine that is stopped, locked up, or
waiting for a GPU that does not answer. On Linux all processes share the clock `time.monotonic`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, get_args

Activity = Literal["working", "loading", "compiling"]

# A step may take this many times as long as the slowest step before it.
_SLOWER = 20
# Announced work must end too; loading may read a large model from a slow disk.
_ANNOUNCED_S = {"loading": 3600.0, "compiling": 600.0}
# Taking a request may tokenize long lists of words.
_ORDER_S = 60.0
_ACTIVITIES: tuple[Activity, ...] = get_args(Activity)


class Heartbeat:
    """The shared memory, which the engine writes and the front end reads.

    Args:
        context: multiprocessing context, whose processes may receive the heartbeat.
        timeout_s: seconds that the engine may always be silent; 0 sets no limit.
    """

    def __init__(self, context: Any, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._values = context.RawArray("d", 3)
        self.announce("loading")

    def beat(self, limit_s: float = 0.0, activity: Activity = "working") -> None:
        """Write that the engine is alive, and may be silent for `limit_s` or the time-out."""
        now = time.monotonic()
        limit_s = max(limit_s, self.timeout_s) if self.timeout_s else math.inf
        self._values[:] = (now, now + limit_s, _ACTIVITIES.index(activity))

    def announce(self, activity: Activity) -> None:
        """Write that work begins that takes long."""
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
        """What the engine does until then."""
        return _ACTIVITIES[int(self._values[2])]


class Pulse:
    """Writes an engine process's heartbeat, and decides for how long each beat holds.

    The limit of a step is 20 times the slowest step before it. A pass over more tokens than any
    before it may also take as long as its tokens would take one by one. A batch always takes less,
    because it reads the weights once. So the first long prompt on a slow CPU is no hang. Steps that
    compile something do not count.
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
        """Note that a stage of loading begins."""
        self._write(0.0)

    def loaded(self, token_s: float) -> None:
        """Note that all is loaded; a step of one token takes `token_s` seconds."""
        self._token_s = self._slowest_s = token_s
        self._is_loading = False
        self.beat()

    def beat(self) -> None:
        """Note that the loop begins a round, or waits for requests."""
        self._write(_SLOWER * self._slowest_s)

    def order(self) -> None:
        """Note that the loop carries out an order of the front end."""
        self._write(max(_SLOWER * self._slowest_s, _ORDER_S))

    def planned(self, num_tokens: int) -> None:
        """Note that a pass over so many tokens begins."""
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
        self._heartbeat.announce("compiling")

    def compiled(self, *_: Any, **__: Any) -> None:
        """Note that a compilation ended."""
        self._num_compiling -= 1
        # Between two compilations of the start, graphs are captured.
        if self._is_loading or self._num_compiling > 0:
            self._heartbeat.announce("compiling")
        else:
            self.beat()


def announce_compilation(pulse: Pulse) -> None:
    """Call a pulse whenever torch.compile or Triton compiles something."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(pulse.compiling)
    callback_handler.register_end_callback(pulse.compiled)
    with suppress(ImportError):  # only where torch brings it
        from triton import knobs

        knobs.runtime.jit_cache_hook = pulse.compiling
        knobs.runtime.jit_post_compile_hook = pulse.compiled
