"""Prompt sets put to a backend, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from peagle.chat import with_answer
from peagle.config import SamplingParams
from peagle.engine import SpeculationStats
from peagle.errors import UserError
from peagle.evaluation.decoding import Answer, Backend, Message, Request
from peagle.evaluation.local import EngineBackend
from peagle.evaluation.observation import Observation
from peagle.evaluation.prompts import Prompt
from peagle.evaluation.xray import GroupCounters

PromptSets = Mapping[str, Sequence[Prompt]]
TURN_SEEDS = 1_000_003  # more than a set has prompts


@dataclass(slots=True)
class Dialogue:
    """A prompt and how far its conversation has come.

    Attributes:
        set: that it is of.
        index: within the set.
        prompt: the prompt.
        said: what the next request sends: text so far, or messages.
    """

    set: str
    index: int
    prompt: Prompt
    said: str | list[Message]

    @classmethod
    def begin(cls, name: str, index: int, prompt: Prompt, *, chat: bool) -> Dialogue:
        """Before the first answer."""
        text = prompt.text
        return cls(name, index, prompt, [_user(text)] if chat else text)

    def go_on(self, answer: Answer, turn: int, opened: bool | None) -> None:
        """Add the answer, without its reasoning where it is a chat, and what the user says next."""
        text = self.prompt.turns[turn]
        if isinstance(self.said, str):
            self.said = f"{self.said}{answer.text}\n\n{text}"
        else:
            self.said = [*with_answer(self.said, answer.text, opened=opened), _user(text)]


@dataclass(slots=True)
class DialogueResults:
    """What came of prompt sets.

    Attributes:
        observations: requests with a whole answer, in order.
        groups: what the backend counted, by set and category.
        num_errors: requests without a whole answer; the turns after them are not sent.
        first_error: why the first of them has none.
        seconds: that the requests took.
    """

    observations: list[Observation] = field(default_factory=list)
    groups: list[GroupCounters] = field(default_factory=list)
    num_errors: int = 0
    first_error: str = ""
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return sum(one.answer.num_tokens for one in self.observations)


def num_requests(sets: PromptSets) -> int:
    """Turns in all prompts."""
    return sum(len(prompt.turns) for prompts in sets.values() for prompt in prompts)


def ask(
    backend: Backend,
    sets: PromptSets,
    params: SamplingParams,
    concurrency: int,
    *,
    chat: bool,
    watch: Callable[[], None] | None = None,
) -> DialogueResults:
    """Put every prompt to a backend, second turns behind the answers to first ones.

    A backend that does not tell steps gets one category after the other, so that its counters tell
    them apart. Turn t of prompt i of a set is sampled with the seed of `params` + i + 1,000,003 t.

    Args:
        backend: what answers.
        sets: prompts by the name of their set.
        params: how they are sampled; the seed is not None.
        concurrency: requests in flight.
        chat: behind the model's chat template; else a second turn goes on with the text.
        watch: called as each request ends.

    Raises:
        UserError: as `Backend.run`; or no request at all has an answer.
    """
    outcome = DialogueResults()
    for group in _groups(sets, chat=chat, apart=not backend.tells_steps):
        _ask_group(backend, group, params, concurrency, outcome, watch)
    if outcome.num_errors and not outcome.observations:
        raise UserError(
            f"None of {outcome.num_errors} requests has an answer; the first: {outcome.first_error}"
        )
    return outcome


def _groups(sets: PromptSets, *, chat: bool, apart: bool) -> Iterator[list[Dialogue]]:
    begun = [
        Dialogue.begin(name, index, prompt, chat=chat)
        for name, prompts in sets.items()
        for index, prompt in enumerate(prompts)
    ]
    if not apart:
        yield begun
        return
    order = list(sets)
    begun.sort(key=lambda one: (order.index(one.set), one.prompt.category))
    for _, group in groupby(begun, key=lambda one: (one.set, one.prompt.category)):
        yield list(group)


def _ask_group(
    backend: Backend,
    group: Sequence[Dialogue],
    params: SamplingParams,
    concurrency: int,
    outcome: DialogueResults,
    watch: Callable[[], None] | None,
) -> None:
    assert params.seed is not None
    counters: list[SpeculationStats | None] = []
    asked, first = list(group), len(outcome.observations)
    for turn in range(max(len(one.prompt.turns) for one in group)):
        asked = [one for one in asked if len(one.prompt.turns) > turn]
        requests = [
            Request(
                f"{one.set}/{one.prompt.id}",
                one.said,
                replace(params, seed=params.seed + one.index + turn * TURN_SEEDS),
            )
            for one in asked
        ]
        run = backend.run(requests, concurrency, (lambda *_: watch()) if watch else None)
        outcome.seconds += run.seconds
        counters.append(run.counters)
        left: list[Dialogue] = []
        for one, request, answer in zip(asked, requests, run.answers, strict=True):
            if answer.error:
                outcome.num_errors += 1
                outcome.first_error = outcome.first_error or f"{request.id}: {answer.error}"
                continue
            outcome.observations.append(_observation(one, turn, answer))
            if len(one.prompt.turns) > turn + 1:
                one.go_on(answer, turn + 1, _opened(backend, request))
                left.append(one)
        asked = left
        if not asked:
            break
    if len({(one.set, one.prompt.category) for one in group}) == 1:
        outcome.groups.append(_group_counters(group[0], outcome.observations[first:], counters))


def _observation(one: Dialogue, turn: int, answer: Answer) -> Observation:
    prompt = one.prompt
    text = one.said if isinstance(one.said, str) else prompt.turns[turn]
    return Observation(one.set, prompt.category, prompt.id, turn, text, answer)


def _group_counters(
    one: Dialogue, answered: Sequence[Observation], counters: Iterable[SpeculationStats | None]
) -> GroupCounters:
    known = [stats for stats in counters if stats is not None]
    return GroupCounters(
        one.set,
        f"{one.set}/{one.prompt.category}" if one.prompt.category else one.set,
        len(answered),
        sum(observation.answer.num_tokens for observation in answered),
        SpeculationStats.pooled(known) if known else None,
    )


def _opened(backend: Backend, request: Request) -> bool | None:
    """Whether the prompt opened the reasoning; None where only the output can tell."""
    return backend.opens_thinking(request) if isinstance(backend, EngineBackend) else None


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
