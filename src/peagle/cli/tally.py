"""Counts of tokens, drafts and seconds while a command generates text."""

import time
from collections.abc import Generator, Iterator
from typing import Self

from peagle.engine import SpeculationStats
from peagle.llm import LLM, StreamChunk


class Tally:
    """Counts of tokens and drafts, and the engine's seconds for them.

    Attributes:
        num_tokens: output tokens.
        seconds: time of the engine with prompt passes, without work between steps.
        stats: drafts of the finished outputs.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.seconds = 0.0
        self.stats = SpeculationStats()

    def watch(self, stream: Iterator[StreamChunk]) -> Generator[StreamChunk]:
        """Yield the chunks of a stream and count them; closing this generator cancels the rest."""
        try:
            while True:
                start = time.perf_counter()
                chunk = next(stream, None)
                self.seconds += time.perf_counter() - start
                if chunk is None:
                    return
                self.num_tokens += len(chunk.token_ids)
                if chunk.output is not None:
                    self.stats.add(chunk.output.stats)
                yield chunk
        finally:
            if isinstance(stream, Generator):
                stream.close()

    def add(self, other: Self) -> None:
        """Add the counts of another tally."""
        self.num_tokens += other.num_tokens
        self.seconds += other.seconds
        self.stats.add(other.stats)

    @property
    def tokens_per_s(self) -> float:
        """Return the number of output tokens a second."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def drafting(self, k: int) -> str:
        """Describe how well drafts of K tokens were accepted; K = 0 is no speculation."""
        if not k:
            return "no speculation"
        return f"acceptance length {self.stats.acceptance_length:.2f} at K={k}"


def drafts_of(llm: LLM) -> int:
    """Return K, the number of draft tokens of a step, or 0 without drafts."""
    speculative = llm.engine.speculative
    return 0 if speculative is None else speculative.k
