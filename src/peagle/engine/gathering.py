"""Prompts that wait for others, so that one step begins several.

A step with prompts takes longer than one without, however few tokens they have: the host launches
passes of their own, and reads and writes the state of new sequences. Where short requests follow
each other quickly, most steps would be such steps. It pays to leave a few places empty for some
steps: the batch decodes a little slower meanwhile.
"""

import time
from collections import deque
from collections.abc import Callable

# Most tokens of prompts that wait: the time of more tokens is that of computing them.
MAX_WAITING_TOKENS = 512
# A wait may cost this share of what it saves at least. Where requests come and go at a steady rate
# a share of 1 gives most tokens a second; a quarter gives nearly as many in half of the wait.
LOSS_SHARE = 0.25
# The latest prompts whose rate counts.
_NUM_KEPT = 16


class Gathering:
    """Decides whether prompts that could begin wait for others.

    They wait as long as all of this holds:

    - other sequences decode, and no prompt waits longer than the limit;
    - the empty places have cost less than LOSS_SHARE of what a step with prompts takes more than
      one without. While i of d + i places are empty, time t costs t i / d;
    - at the rate of the latest prompts, more is saved than lost in the next moment: each prompt
      that comes meanwhile saves a step with prompts.

    Args:
        limit_ms: longest wait in milliseconds; 0: prompts never wait.
        clock: time in seconds.
    """

    def __init__(self, limit_ms: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._limit_s = limit_ms / 1000
        self._clock = clock
        self._begun_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self._since_s: float | None = None  # the first of the waiting prompts could have begun
        self._last_s = self._lost_s = 0.0
        self._num_empty = 0

    def waits(self, num_empty: int, num_decoding: int, num_tokens: int, added_s: float) -> bool:
        """Return whether the waiting prompts wait for another step.

        Args:
            num_empty: i, places that waiting prompts could take.
            num_decoding: d, sequences that decode.
            num_tokens: tokens of these prompts.
            added_s: what a step with prompts takes more than one without.
        """
        if not (self._limit_s and num_empty and num_decoding and added_s):
            return False
        now_s = self._clock()
        if self._since_s is None:
            self._since_s, self._lost_s = now_s, 0.0
        else:
            self._lost_s += (now_s - self._last_s) * self._num_empty / num_decoding
        self._last_s, self._num_empty = now_s, num_empty
        return (
            num_tokens <= MAX_WAITING_TOKENS
            and now_s - self._since_s < self._limit_s
            and self._lost_s < LOSS_SHARE * added_s
            and self._rate(now_s) * added_s >= num_empty / num_decoding
        )

    def began(self, num_prompts: int) -> None:
        """Count prompts that begin now; no prompt waits any more."""
        self._begun_s.extend([self._clock()] * num_prompts)
        self._since_s = None

    def _rate(self, now_s: float) -> float:
        """Return the latest prompts a second; 0 until there are enough to tell."""
        if len(self._begun_s) < _NUM_KEPT:
            return 0.0
        return _NUM_KEPT / max(now_s - self._begun_s[0], 1e-9)
