"""Conversations with a backend, turn by turn, from prompt sets or from requests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from peagle.chat import with_answer
from peagle.config import SamplingParams
from peagle.engine import SpeculationStats
from peagle.errors import UserError
from peagle.evaluation.acceptance import GroupCounters
from peagle.evaluation.decoding import Answer, Backend, Message, Observation, Request, Run
from peagle.evaluation.engine_backend import EngineBackend
from peagle.evaluation.prompts import Prompt

PromptSets = Mapping[str, Sequence[Prompt]]
TURN_SEEDS = 1_000_003  # more than a set has prompts


@dataclass(slots=True)
class Dialogue:
    """Prompt number `index` of a set, and the text or messages that its next request sends."""

    set: str
    index: int
    prompt: Prompt
    next_prompt: str | list[Message]

    @property
    def group(self) -> tuple[str, str]:
        return self.set, self.prompt.category

    def request(self, turn: int, params: SamplingParams) -> Request:
        seed = (params.seed or 0) + self.index + turn * TURN_SEEDS
        id, tools = f"{self.set}/{self.prompt.id}", self.prompt.tools
        return Request(id, self.next_prompt, replace(params, seed=seed), tools=tools)

    def observation(self, turn: int, answer: Answer) -> Observation:
        prompt = self.prompt
        text = self.next_prompt if isinstance(self.next_prompt, str) else prompt.turns[turn]
        return Observation(self.set, prompt.category, prompt.id, turn, text, answer)


@dataclass(slots=True)
class DialogueResults:
    """The requests with a whole answer, in order, and the backend's counters by set and category.

    The turns after a request without a whole answer are not sent.
    """

    observations: list[Observation] = field(default_factory=list)
    groups: list[GroupCounters] = field(default_factory=list)
    num_errors: int = 0
    first_error: str = ""
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Return the output tokens of all answers."""
        return sum(one.answer.num_tokens for one in self.observations)


def num_requests(sets: PromptSets) -> int:
    """Return the number of turns in all prompts."""
    return sum(len(prompt.turns) for prompts in sets.values() for prompt in prompts)


def run_dialogues(
    backend: Backend,
    sets: PromptSets,
    params: SamplingParams,
    concurrency: int,
    *,
    chat: bool,
    watch: Callable[[], None] | None = None,
) -> DialogueResults:
    """Send every prompt to a backend, second turns behind the answers to first ones.

    A backend that does not report steps gets one category after the other, so that its counters
    tell them apart. Turn t of prompt i of a set is sampled with the seed of `params` + i +
    1,000,003 t. With `chat` prompts go behind the model's chat template; else a second turn
    continues the text. `watch` is called as each request ends.

    Raises:
        UserError: as for `Backend.run`; or no request has an answer.
    """
    results = DialogueResults()
    dialogues = [
        Dialogue(name, index, prompt, prompt.messages if chat else prompt.text)
        for name, prompts in sets.items()
        for index, prompt in enumerate(prompts)
    ]
    if backend.tells_steps:
        _run_group(backend, dialogues, params, concurrency, results, watch)
    else:
        order = list(sets)
        dialogues.sort(key=lambda one: (order.index(one.set), one.prompt.category))
        for (name, category), same in groupby(dialogues, key=lambda one: one.group):
            first = len(results.observations)
            drafts = _run_group(backend, list(same), params, concurrency, results, watch)
            answered = results.observations[first:]
            num_tokens = sum(one.answer.num_tokens for one in answered)
            group = f"{name}/{category}" if category else name
            results.groups.append(GroupCounters(name, group, len(answered), num_tokens, drafts))
    if results.num_errors and not results.observations:
        raise UserError(
            f"None of {results.num_errors} requests has an answer; the first: {results.first_error}"
        )
    return results


def _run_group(
    backend: Backend,
    going_on: list[Dialogue],
    params: SamplingParams,
    concurrency: int,
    results: DialogueResults,
    watch: Callable[[], None] | None,
) -> SpeculationStats | None:
    """Run dialogues turn by turn, and return the backend's counters, None without any."""
    counters: list[SpeculationStats] = []
    turn = 0
    while going_on:
        requests = [one.request(turn, params) for one in going_on]
        run = backend.run(requests, concurrency, (lambda *_: watch()) if watch else None)
        results.seconds += run.seconds
        counters += [run.counters] if run.counters is not None else []
        turn += 1
        unfinished: list[Dialogue] = []
        for one, request, answer in zip(going_on, requests, run.answers, strict=True):
            if answer.error:
                results.num_errors += 1
                results.first_error = results.first_error or f"{request.id}: {answer.error}"
                continue
            results.observations.append(one.observation(turn - 1, answer))
            if len(one.prompt.turns) > turn:
                text = one.prompt.turns[turn]
                one.next_prompt = next_prompt(backend, request, answer, text)
                unfinished.append(one)
        going_on = unfinished
    return SpeculationStats.pooled(counters) if counters else None


def next_prompt(
    backend: Backend, request: Request, answer: Answer, text: str
) -> str | list[Message]:
    """Return the prompt of the next turn: the last prompt, its answer, and the user's text.

    In a chat the answer is without its reasoning.
    """
    if isinstance(request.prompt, str):
        return f"{request.prompt}{answer.text}\n\n{text}"
    # The prompts of a server are unknown: only the output can tell whether they open the reasoning.
    said, opened = answer.text, None
    if isinstance(backend, EngineBackend):
        said, opened = backend.answer_text(request, answer), False
    before = with_answer(request.prompt, said, opened=opened)
    return [*before, {"role": "user", "content": text}]


def run_conversations(backend: Backend, requests: Sequence[Request], concurrency: int) -> Run:
    """Answer requests with their later turns: first turns, then second ones behind their answers.

    The result has the summed times of all passes. The turns after a request without a whole answer
    are not sent.

    Raises:
        UserError: as for `Backend.run`.
    """
    whole = run = backend.run(requests, concurrency)
    while requests := [
        replace(
            request,
            prompt=next_prompt(backend, request, answer, request.later_turns[0]),
            later_turns=request.later_turns[1:],
        )
        for request, answer in zip(requests, run.answers, strict=True)
        if request.later_turns and not answer.error
    ]:
        run = backend.run(requests, concurrency)
        whole.extend(run)
    return whole
