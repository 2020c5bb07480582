"""The serving side: the same prompts through an engine or a server, and its drafts.

Another serving side is another class with `name`, `notes` and `answer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from peagle.backends.vllm.checks import check_launch
from peagle.backends.vllm.installation import VllmInstallation
from peagle.backends.vllm.launch import VllmLaunch
from peagle.config import SamplingParams
from peagle.doctor.questions import Question
from peagle.engine import SpeculationStats
from peagle.errors import CheckpointError, UserError
from peagle.evaluation.decoding import Request
from peagle.evaluation.endpoint import EndpointBackend
from peagle.evaluation.vllm_server import vllm_backend
from peagle.llm import LLM
from peagle.models.target import TargetModel


class ServingFailed(UserError):
    """The serving side does not come up with this head, or does not last."""


@dataclass(slots=True)
class Served:
    """The answer to a question; None where the serving side does not report a figure.

    Attributes:
        text: the output.
        num_prompt_tokens: as the serving side counts them; 0 if it does not report them.
        stats: drafts of this answer.
        token_ids: output tokens.
        drafts: by the number of output tokens before them, the tokens of each draft.
    """

    text: str
    num_prompt_tokens: int = 0
    stats: SpeculationStats | None = None
    token_ids: list[int] | None = None
    drafts: dict[int, list[int]] | None = None


class Serving(Protocol):
    """Something that serves the head."""

    @property
    def name(self) -> str:
        """Its name in reports."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What it cannot report."""
        ...

    def answer(self, questions: Sequence[Question], max_tokens: int) -> list[Served]:
        """Answer greedily, so many tokens each.

        Raises:
            UserError: it cannot be reached, or refuses.
        """
        ...


@dataclass(slots=True)
class EngineServing:
    """Our engine in this process, which reports every draft token.

    Args:
        target: loaded; shared with the training side.
        head: folder of the head.
        num_drafts: K.
    """

    target: TargetModel
    head: Path
    num_drafts: int
    name: str = "the engine"
    notes: Sequence[str] = ()

    def answer(self, questions: Sequence[Question], max_tokens: int) -> list[Served]:
        """Answer as `Serving.answer`.

        Raises:
            CheckpointError: the engine refuses the head.
        """
        speculative = {
            "model": str(self.head),
            "num_speculative_tokens": self.num_drafts,
            "check_target": False,
            "draft_window": 0,  # as the forward pass of training, and as vLLM
        }
        llm = LLM(model=self.target, speculative_config=speculative)
        prompts = [question.token_ids for question in questions]
        served = [Served("", len(prompt), token_ids=[], drafts={}) for prompt in prompts]
        for chunk in llm.stream(prompts, _greedy(max_tokens)):
            one = served[chunk.index]
            assert one.token_ids is not None and one.drafts is not None
            if chunk.num_drafted:
                draft = chunk.token_ids[: chunk.num_accepted]
                # An answer may end within a draft: accepted tokens beyond its end are not reported.
                if len(draft) + len(chunk.rejected_token_ids) == chunk.num_drafted:
                    draft = draft + chunk.rejected_token_ids
                one.drafts[len(one.token_ids)] = draft
            one.token_ids += chunk.token_ids
            if chunk.output is not None:
                one.text, one.stats = chunk.output.text, chunk.output.stats
        return served


@dataclass(slots=True)
class EndpointServing:
    """A server with OpenAI's interface, which reports counters of drafts at best."""

    backend: EndpointBackend

    @property
    def name(self) -> str:
        """The server's URL."""
        return self.backend.name

    @property
    def notes(self) -> list[str]:
        """What the server cannot report."""
        return self.backend.notes

    def answer(self, questions: Sequence[Question], max_tokens: int) -> list[Served]:
        """Answer as `Serving.answer`."""
        return _one_by_one(self.backend, questions, max_tokens)


@dataclass(slots=True)
class VllmServing:
    """vLLM, which serves the head for as long as it answers; it reports counters of drafts.

    Args:
        launch: what it serves, as the head's files say.
        installation: vLLM's.
        extra_body: further fields of each request.
        progress: gets a line about each wait.

    Raises:
        UserError: vLLM is known to fail with such options. What is wrong with the head is not said
            here, but found.
    """

    launch: VllmLaunch
    installation: VllmInstallation
    extra_body: dict[str, Any] | None
    progress: Callable[[str], None]
    name: str = "vLLM"
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        with suppress(CheckpointError):
            check_launch(self.launch, self.installation)

    def answer(self, questions: Sequence[Question], max_tokens: int) -> list[Served]:
        """Answer as `Serving.answer`.

        Raises:
            ServingFailed: vLLM does not serve this head.
        """
        # Whether it drafts as asked is what the examination finds out.
        server = vllm_backend(
            self.launch,
            self.installation,
            say=self.progress,
            extra_body=self.extra_body,
            as_asked=False,
        )
        try:
            with server as backend:
                self.notes = backend.notes
                return _one_by_one(backend, questions, max_tokens)
        except UserError as error:
            raise ServingFailed(str(error)) from None


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def _one_by_one(
    backend: EndpointBackend, questions: Sequence[Question], max_tokens: int
) -> list[Served]:
    """Answers, one request at a time, so that counters are each one's."""
    served = []
    for number, question in enumerate(questions):
        run = backend.run([Request(str(number), question.prompt, _greedy(max_tokens))], 1)
        answer = run.answers[0]
        stats = answer.stats if answer.stats is not None else run.counters
        served.append(Served(answer.text, answer.num_prompt_tokens, stats))
    return served
