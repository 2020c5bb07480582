"""The evidence that a running vLLM drafts as it was started to.

A P-EAGLE head that vLLM was not started to draft with in parallel loads with one warning and drafts
one token after another: outputs are right, speed is lost. Four kinds of evidence show it, and each
alone refuses the server:

- the engine's configuration as it came to be (the guard's own route inside vLLM);
- the line of its log that mask_hidden was left out;
- its counters: drafts are made, of K tokens each;
- its counters again: a P-EAGLE head was never trained to read its own output, so that one after
  another every draft after the first is refused (docs/vllm.md has figures).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peagle.client.counters import DraftCounts
from peagle.errors import UserError

# Predictable texts: any head that drafts at all is often right here.
PROBES = (
    "The quick brown fox jumps over the lazy dog. " * 4,
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\n",
    "a b c d e f g h " * 6,
)
PROBE_TOKENS = 48
_SKIPPED = "Skipping loading mask_hidden"
# A second draft token is looked for once so many first ones were accepted, of this share of drafts;
# fewer than the last share of them means that there is none.
_ENOUGH, _SHARE, _NONE = 20, 0.2, 0.05


@dataclass(frozen=True, slots=True)
class Expected:
    """The drafts that vLLM was started to make.

    Attributes:
        method: "eagle3" or "ngram".
        num_speculative_tokens: K.
        is_parallel: all K in one pass.
        is_fixed: every draft has K tokens, but the last ones of a text.
    """

    method: str
    num_speculative_tokens: int
    is_parallel: bool
    is_fixed: bool = True


def skips_mask_hidden(line: str) -> bool:
    """Whether a line of vLLM's log means that it drafts one token after another."""
    return _SKIPPED in line


def judge(
    expected: Expected,
    counts: DraftCounts | None,
    facts: Mapping[str, Any] | None,
    *,
    skipped: bool = False,
    num_requests: int = len(PROBES),
) -> tuple[str, ...]:
    """Refuse a server that does not draft as it was started to.

    Args:
        expected: the drafts that it was started to make.
        counts: counters of the probes alone; None if there are none.
        facts: the guard's facts of the engine; None if it does not answer.
        skipped: whether the log has the line that mask_hidden was left out.
        num_requests: number of probes.

    Returns:
        notes for the user about evidence that is missing.

    Raises:
        UserError: it does not draft, or not in parallel.
    """
    running = (facts or {}).get("speculative")
    if (facts or {}).get("has_config") and running is None:
        raise _refusal("the engine's configuration has no speculation")
    if expected.is_parallel and skipped:
        raise _refusal(f"its log says {_SKIPPED!r}: it drafts one token after another")
    if running is not None and bool(running.get("parallel_drafting")) != expected.is_parallel:
        raise _refusal(f"parallel_drafting is {running.get('parallel_drafting')} in the engine")
    if counts is None:
        raise _refusal("it has no counters vllm:spec_decode_* at /metrics")
    if not counts.num_drafts:
        if expected.method == "ngram":
            return ("the probes brought no drafts: prompt lookup found nothing to repeat",)
        raise _refusal("its counters show no drafts at all")
    k = expected.num_speculative_tokens
    most = k * counts.num_drafts
    # The last draft of a text may be shorter.
    is_fixed = expected.is_fixed and expected.method != "ngram"
    least = most - (k - 1) * num_requests if is_fixed else 0
    if not least <= counts.num_draft_tokens <= most:
        raise _refusal(f"its counters show drafts of another length than K = {k} ({counts})")
    if not expected.is_parallel or k == 1:  # one token is one pass either way
        return ()
    first, second, *_ = (*counts.num_accepted_tokens_per_pos, 0, 0)
    if first < max(_ENOUGH, _SHARE * counts.num_drafts):
        return (
            "too few drafts were accepted to see in the counters whether they are made in parallel "
            f"({counts})",
        )
    if second < _NONE * first:
        raise _refusal(
            f"its counters show that drafts after the first are not accepted ({counts}), as when "
            "a P-EAGLE head drafts one token after another"
        )
    return ()


def _refusal(evidence: str) -> UserError:
    return UserError(
        f"vLLM runs, but does not draft as asked: {evidence}. It was stopped. Expected a head "
        "that vLLM can draft with: peagle doctor examines it, docs/vllm.md lists what is known."
    )
