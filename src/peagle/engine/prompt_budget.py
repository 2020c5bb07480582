"""The number of prompt tokens that a step may compute while other sequences decode.

A step computes chunks of prompts and one pass of the sequences that decode. These get their next
tokens when both are done: the chunk decides their inter-token latency.
"""

import time
import warnings
from collections import deque
from collections.abc import Callable
from statistics import median

from peagle.engine.gathering import MAX_WAITING_TOKENS

# The smallest budget, in tokens and as a share of a step's time: prompts must make progress.
MIN_TOKENS = 64
MIN_SHARE = 0.25
# Prompt tokens of a step before the first measurement.
FIRST_TOKENS = 256
# Number of measurements of a median: one slow step, which compiles, changes nothing.
_NUM_KEPT = 9


class PromptBudget:
    """Learns the cost of prompt tokens, and keeps steps within a limit of inter-token latency.

    With d the median time of a step without prompts and c the median time that a prompt token
    adds, (limit - d) / c tokens fit into a step. If the limit is too small for d, prompts take
    MIN_SHARE * d.

    Args:
        max_itl_ms: limit of the time between two steps' tokens in milliseconds; 0 sets none.
        max_tokens: most prompt tokens of a step.
        clock: time in seconds.
    """

    def __init__(
        self, max_itl_ms: float, max_tokens: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._limit_s = max_itl_ms / 1000
        self._max_tokens = max_tokens
        self._clock = clock
        self._step_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self._token_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self._added_s: deque[float] = deque(maxlen=_NUM_KEPT)  # by steps with few tokens
        self._last_s: float | None = None
        self._num_tokens = 0
        self._has_warned = False

    def __call__(self, *, decoding: bool) -> int:
        """Return the most prompt tokens of the next step; `decoding`: sequences decode too."""
        if not (self._limit_s and decoding):
            return self._max_tokens
        if not self._token_s:
            return min(FIRST_TOKENS, self._max_tokens)
        step_s = self._median_step()
        left_s = self._limit_s - step_s
        if left_s < MIN_SHARE * step_s:
            left_s = MIN_SHARE * step_s
            self._warn(step_s)
        fitting = int(left_s / max(median(self._token_s), 1e-9))
        return min(max(fitting, MIN_TOKENS), self._max_tokens)

    def limit(self, most: int) -> None:
        """Lower the most prompt tokens of a step to `most`."""
        self._max_tokens = min(self._max_tokens, most)

    def ran(self, num_tokens: int) -> None:
        """Count prompt tokens that a step computes before it gives tokens."""
        self._num_tokens += num_tokens

    def gave(self) -> None:
        """Measure the time since the last step that gave tokens to decoding sequences."""
        now_s = self._clock()
        if self._last_s is not None:
            taken_s = now_s - self._last_s
            if not self._num_tokens:
                self._step_s.append(taken_s)
            else:
                added_s = max(taken_s - self._median_step(), 0.0)
                self._token_s.append(added_s / self._num_tokens)
                if self._num_tokens <= MAX_WAITING_TOKENS:
                    self._added_s.append(added_s)
        self._last_s, self._num_tokens = now_s, 0

    @property
    def added_s(self) -> float:
        """Return what a step with a few prompt tokens takes more than one without; 0: unknown."""
        return median(self._added_s) if self._added_s else 0.0

    def forget(self) -> None:
        """Drop all measurements."""
        for measured in (self._step_s, self._token_s, self._added_s):
            measured.clear()
        self.pause()

    def pause(self) -> None:
        """Stop the clock, because nothing decodes: the next tokens have no latency."""
        self._last_s, self._num_tokens = None, 0

    def _median_step(self) -> float:
        return median(self._step_s) if self._step_s else 0.0

    def _warn(self, step_s: float) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"max_itl_ms is {self._limit_s * 1000:g}, but a step without prompts takes "
                f"{step_s * 1000:.3g} ms. Chunks of prompts take {MIN_SHARE:.0%} of that time; "
                "raise max_itl_ms, or lower max_num_seqs.",
                stacklevel=2,
            )
