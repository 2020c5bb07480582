"""The evidence that a running vLLM drafts as it was started to.

Four kinds of evidence, each of which alone refuses the server (docs/vllm.md has figures): the
configuration of the engine (by the guard's own route inside vLLM); the line of its log that
mask_hidden was left out; its counters of drafts of K tokens; its counters of accepted tokens. A
P-EAGLE head was never trained to read its own output: if it drafts one token after another, every
draft token after the first is refused.
"""

from collections.abc import Mapping
from typing import Any

from peagle.client.counters import DraftCounts
from peagle.config import SpeculativeConfig
from peagle.errors import UserError

# Predictable texts: any head that drafts at all is often right here.
PROBE_TEXTS = (
    "The quick brown fox jumps over the lazy dog. " * 4,
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\n",
    "a b c d e f g h " * 6,
)
PROBE_TOKENS = 48
# vLLM's log has these words where it drafts one token after another.
SEQUENTIAL_LOG_WORDS = "Skipping loading mask_hidden"
# Second draft tokens are judged once so many first ones were accepted, of this share of drafts;
# second ones below the last share of the first ones count as none.
_MIN_ACCEPTED, _MIN_ACCEPTED_SHARE, _MAX_SHARE_OF_NONE = 20, 0.2, 0.05


def judge(
    config: SpeculativeConfig,
    counts: DraftCounts | None,
    facts: Mapping[str, Any] | None,
    *,
    is_parallel: bool,
    skipped: bool = False,
    num_requests: int = len(PROBE_TEXTS),
) -> tuple[str, ...]:
    """Refuse a server that does not draft as it was started to.

    Args:
        config: the drafts that it was started to make.
        counts: counters of the probes alone; None if there are none.
        facts: the guard's facts of the engine; None if the guard does not answer.
        is_parallel: it was started to draft all K tokens in one pass.
        skipped: whether the log says that mask_hidden was left out.
        num_requests: number of probes.

    Returns:
        notes for the user about evidence that is missing.

    Raises:
        UserError: it does not draft, or not in parallel.
    """
    running = (facts or {}).get("speculative")
    if (facts or {}).get("has_config") and running is None:
        raise _refusal("the engine's configuration has no speculation")
    if is_parallel and skipped:
        raise _refusal(f"its log says {SEQUENTIAL_LOG_WORDS!r}: it drafts one token after another")
    if running is not None and bool(running.get("parallel_drafting")) != is_parallel:
        raise _refusal(f"parallel_drafting is {running.get('parallel_drafting')} in the engine")
    if counts is None:
        raise _refusal("it has no counters vllm:spec_decode_* at /metrics")
    looks_up, schedule = config.method == "ngram", config.num_speculative_tokens_per_batch_size
    if not counts.num_drafts:
        if looks_up:
            return ("the probes brought no drafts: prompt lookup found nothing to repeat",)
        if any(entry[-1] == 0 for entry in schedule or ()):
            return ("the probes brought no drafts: the schedule has K = 0 for some loads",)
        raise _refusal("its counters show no drafts at all")
    k = config.k
    most = k * counts.num_drafts
    has_one_k = not looks_up and schedule is None
    # The last draft of a text may be shorter.
    least = most - (k - 1) * num_requests if has_one_k else 0
    if not least <= counts.num_draft_tokens <= most:
        raise _refusal(f"its counters show drafts of another length than K = {k} ({counts})")
    if not is_parallel or counts.num_draft_tokens == counts.num_drafts:
        return ()  # one token is one pass either way
    first, second, *_ = (*counts.num_accepted_tokens_per_pos, 0, 0)
    if first < max(_MIN_ACCEPTED, _MIN_ACCEPTED_SHARE * counts.num_drafts):
        return (
            "too few drafts were accepted to see in the counters whether they are made in parallel "
            f"({counts})",
        )
    if second < _MAX_SHARE_OF_NONE * first:
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
