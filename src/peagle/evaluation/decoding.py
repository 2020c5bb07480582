"""What `peagle eval` and `peagle bench` ask of an engine or a server, and what they learn of it.

A backend keeps a number of requests in flight: as one ends, the next is sent, so that the load
stays the same for the whole run (a closed loop).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from peagle.config import SamplingParams
from peagle.engine import SpeculationStats
from peagle.errors import UserError
from peagle.evaluation.acceptance import DecodedStep

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        id: of the prompt, for reports.
        prompt: text to complete, or messages to answer behind the model's chat template.
        params: how it is sampled.
    """

    id: str
    prompt: str | Sequence[Message]
    params: SamplingParams


@dataclass(slots=True)
class Answer:
    """What came of a request. Times are seconds since it was sent.

    Attributes:
        text: the output.
        finish_reason: "stop" or "length"; "" where it broke off.
        num_prompt_tokens, num_tokens: of the prompt and of the output.
        chunks: when each piece of the output came, and how many tokens it held.
        seconds: to the end.
        token_ids: of the output, where the backend tells them.
        texts: text of each chunk.
        steps: one a chunk, the first the prompt pass, where the backend tells them.
        stats: drafts of this request, where the backend tells them.
        error: why there is no whole answer; "" where there is.
    """

    text: str = ""
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    seconds: float = 0.0
    token_ids: list[int] | None = None
    texts: list[str] = field(default_factory=list)
    steps: list[DecodedStep] | None = None
    stats: SpeculationStats | None = None
    error: str = ""

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds to the first chunk that holds a token; None without one."""
        return next((when for when, count in self.chunks if count), None)


@dataclass(slots=True)
class Run:
    """Some requests answered.

    Attributes:
        answers: in the order of the requests.
        seconds: from the first request to the last answer.
        counters: drafts of the whole run, by the backend's own counters; None where it has none.
    """

    answers: list[Answer]
    seconds: float
    counters: SpeculationStats | None = None


class Backend(Protocol):
    """Something that answers requests: an engine in this process, or a server.

    Attributes:
        name: "peagle" for our engine, else the server's URL.
        tells_steps: answers carry `steps` and `token_ids`.
    """

    name: str
    tells_steps: bool

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int,
        watch: Callable[[int, Answer], None] | None = None,
    ) -> Run:
        """Answer `requests`, so many in flight at a time.

        Args:
            requests: what to send, in this order.
            concurrency: requests in flight, at least 1.
            watch: called with the index and the answer of each request that ended.

        Raises:
            UserError: the server cannot be reached, or refuses what is asked of it.
        """
        ...


def require_some(concurrency: int) -> None:
    """Refuse to keep no request in flight."""
    if concurrency < 1:
        raise UserError(f"The concurrency is {concurrency}; expected at least 1 request in flight.")
