"""What a request took, as answers tell it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from peagle.engine import SpeculationStats
from peagle.engine.outputs import RequestOutput, StreamChunk
from peagle.serving.logprobs import TokenText
from peagle.serving.protocol import StreamOptions


class RunningUsage:
    """Tokens of each choice so far, for streams that want them in every chunk, as vLLM tells them.

    Args:
        options: of the stream.
        prompt_lengths: tokens of each prompt.
    """

    def __init__(self, options: StreamOptions | None, prompt_lengths: Sequence[int]) -> None:
        wanted = options is not None and options.include_usage and options.continuous_usage_stats
        self.is_wanted = wanted
        self._prompt_lengths = prompt_lengths
        self._counts: Counter[tuple[int, int]] = Counter()

    def add(self, prompt_index: int, chunk: StreamChunk) -> dict[str, int]:
        """The usage of a choice with this chunk of it."""
        key = prompt_index, chunk.output_index
        self._counts[key] += len(chunk.token_ids)
        prompt, completion = self._prompt_lengths[prompt_index], self._counts[key]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def usage_of(
    outputs: Iterable[RequestOutput], *, report: bool, num_echoed: int | None = None
) -> dict[str, Any]:
    """Tokens of a request, each prompt counted once; with `report` its drafts too.

    `num_echoed`: completion tokens to tell in place of those really made, for a prompt alone.
    """
    outputs = list(outputs)
    firsts = [output for output in outputs if output.index == 0]
    prompt = sum(len(output.prompt_token_ids) for output in firsts)
    completion = sum(len(output.token_ids) for output in outputs)
    completion = completion if num_echoed is None else num_echoed
    cached = sum(output.num_cached_tokens for output in firsts)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if report:
        usage["speculation"] = speculation_of(outputs)
    return usage


def speculation_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Drafts made and accepted."""
    total = SpeculationStats.pooled(output.stats for output in outputs)
    return {
        "num_drafts": total.num_drafts,
        "num_draft_tokens": total.num_draft_tokens,
        "num_accepted_tokens": total.num_accepted_tokens,
        "num_accepted_tokens_per_pos": total.num_accepted_tokens_per_pos,
        "acceptance_length": round(total.acceptance_length, 4),
    }


def report_of(chunk: StreamChunk, text_of: TokenText) -> dict[str, Any]:
    """What a step drafted, and what became of it."""
    accepted = chunk.num_accepted
    return {
        "num_drafted": chunk.num_drafted,
        "num_accepted": accepted,
        "tokens": [[text_of(token), i < accepted] for i, token in enumerate(chunk.token_ids)],
        "rejected": [text_of(token) for token in chunk.rejected_token_ids],
    }
