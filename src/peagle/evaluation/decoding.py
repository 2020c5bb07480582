"""The requests that eval, bench and tune send to an engine or a server, and the answers.

A backend keeps a number of requests in flight: as one ends, the next is sent, so that the load
stays the same for the whole run (a closed loop).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from peagle.config import SamplingParams
from peagle.engine import SpeculationStats
from peagle.errors import UserError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """A text to complete, or messages to answer behind the model's chat template.

    `later_turns` are the user's texts after the answer, turn by turn. A backend answers the
    prompt alone. `tools` are functions that the model may call, for messages.
    """

    id: str
    prompt: str | Sequence[Message]
    params: SamplingParams
    later_turns: tuple[str, ...] = ()
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class DecodeCounts:
    """The tokens that one step added to one output.

    `num_drafted` draft tokens were verified; the first `num_accepted` tokens added are drafts.
    `draft_depth` is the depth of a tree; None for a chain. `text_from` is the number of accepted
    drafts before those that the text alone drafted; None where no text drafts.
    """

    num_tokens: int
    num_drafted: int
    num_accepted: int
    draft_depth: int | None = None
    text_from: int | None = None


@dataclass(slots=True)
class Answer:
    """The answer to a request. Times are seconds since the request was sent.

    `token_ids`, `steps` and `stats` are None if the backend does not report them.
    """

    text: str = ""
    finish_reason: str = ""  # "stop" or "length"; "" for a broken answer
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    chunks: list[tuple[float, int]] = field(default_factory=list)  # time, number of tokens
    seconds: float = 0.0  # time of the end
    token_ids: list[int] | None = None
    texts: list[str] = field(default_factory=list)  # one a chunk
    steps: list[DecodeCounts] | None = None  # one a chunk, the first is the prompt pass
    stats: SpeculationStats | None = None  # drafts of this request
    error: str = ""  # the reason why there is no whole answer

    @property
    def time_to_first_token_s(self) -> float | None:
        """Return the seconds to the first chunk that holds a token; None without one."""
        return next((when for when, count in self.chunks if count), None)


@dataclass(slots=True)
class Run:
    """Answers in the order of their requests, and the seconds from first request to last answer.

    `counters` are the backend's own draft counters of the whole run; None without any.
    """

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    counters: SpeculationStats | None = None

    def extend(self, other: Self) -> None:
        """Append the answers, the seconds and the counters of another run."""
        self.answers += other.answers
        self.seconds += other.seconds
        both = [one for one in (self.counters, other.counters) if one is not None]
        self.counters = SpeculationStats.pooled(both) if len(both) == 2 else None

    @property
    def token_ids(self) -> list[list[int]]:
        """Return the tokens of each answer; empty lists if the backend does not report them."""
        return [answer.token_ids or [] for answer in self.answers]

    @property
    def tokens_per_s(self) -> float:
        """Return output tokens a second."""
        num_tokens = sum(answer.num_tokens for answer in self.answers)
        return num_tokens / self.seconds if self.seconds else 0.0

    @property
    def stats(self) -> SpeculationStats:
        """Return the pooled draft counters of all answers."""
        return SpeculationStats.pooled(one.stats for one in self.answers if one.stats)


class Backend(Protocol):
    """An engine in this process, or a server; its name is "peagle", or the server's URL.

    With `tells_steps` answers carry `steps` and `token_ids`.
    """

    name: str
    tells_steps: bool

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int,
        watch: Callable[[int, Answer], None] | None = None,
    ) -> Run:
        """Answer requests, at most `concurrency` in flight, and watch each that ends.

        Raises:
            UserError: the server cannot be reached, or refuses the requests.
        """
        ...


def require_some(concurrency: int) -> None:
    """Raise a UserError for a concurrency below 1."""
    if concurrency < 1:
        raise UserError(f"The concurrency is {concurrency}; expected at least 1 request in flight.")


@dataclass(frozen=True, slots=True)
class Observation:
    """A turn of a prompt, counted from 0, and its answer; `prompt` is the user's text."""

    set: str
    category: str
    id: str
    turn: int
    prompt: str
    answer: Answer

    @property
    def conversation(self) -> str:
        """Return the name that all turns of one prompt share."""
        return f"{self.set}/{self.id}"

    @property
    def group(self) -> str:
        """Return "set/category", or the set alone without a category."""
        return f"{self.set}/{self.category}" if self.category else self.set
