"""The serving side: the same prompts through an engine or a server, and what became of drafts.

Another serving side is another class with `name` and `answer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from peagle.backends.vllm.checks import check_launch
from peagle.backends.vllm.command import VllmLaunch
from peagle.backends.vllm.installation import VllmInstallation
from peagle.config import SamplingParams
from peagle.engine import SpeculationStats
from peagle.errors import CheckpointError, UserError
from peagle.evaluation.decoding import Message, Request
from peagle.evaluation.endpoint import EndpointBackend
from peagle.evaluation.vllm_server import vllm_backend
from peagle.llm import LLM
from peagle.models.target import TargetModel


class ServingFailed(UserError):
    """The serving side does not come up with this head, or does not last."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt: as it is asked, and the token ids that the training side makes of it."""

    prompt: str | tuple[Message, ...]
    token_ids: list[int]


@dataclass(slots=True)
class Served:
    """The answer to a question.

    Attributes:
        text: the output.
        num_prompt_tokens: as the serving side counts them; 0 if it does not tell.
        stats: drafts of this answer; None if it does not tell.
        token_ids: of the output; None if it does not tell.
        drafts: by the number of output tokens before them, the tokens of each draft; None if it
            does not tell.
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
        """For reports."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What it cannot tell."""
        ...

    def answer(self, questions: Sequence[Question], max_tokens: int) -> list[Served]:
        """Answer greedily, so many tokens each.

        Raises:
            UserError: it cannot be reached, or refuses.
        """
        ...


@dataclass(slots=True)
class EngineServing:
    """Our engine in this process, which tells every draft token.

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
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        prompts = [question.token_ids for question in questions]
        served = [Served("", len(prompt), token_ids=[], drafts={}) for prompt in prompts]
        for chunk in llm.stream(prompts, params):
            one = served[chunk.index]
            assert one.token_ids is not None and one.drafts is not None
            if chunk.num_drafted:
                draft = chunk.token_ids[: chunk.num_accepted]
                # An answer may end within a draft: accepted tokens beyond its end are not told.
                if len(draft) + len(chunk.rejected_token_ids) == chunk.num_drafted:
                    draft = draft + chunk.rejected_token_ids
                one.drafts[len(one.token_ids)] = draft
            one.token_ids += chunk.token_ids
            if chunk.output is not None:
                one.text, one.stats = chunk.output.text, chunk.output.stats
        return served


class EndpointServing:
    """A server with OpenAI's interface; of drafts it tells counters, if that.

    Args:
        url: of the server.
        model: its name there; None takes the first.
        template_kwargs: variables of the chat template, sent with each request.

    Raises:
        UserError: as `peagle.evaluation.endpoint.EndpointBackend`.
    """

    def __init__(
        self, url: str, model: str | None = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.backend = EndpointBackend(url, model, extra_body=_extra_body(template_kwargs))
        self.name = url

    @property
    def notes(self) -> list[str]:
        """What the server cannot tell."""
        return self.backend.notes

    def num_drafts(self) -> int | None:
        """K of the server; 0 if it does not draft, None if it does not tell."""
        return self.backend.num_speculative_tokens()

    def answer(self, questions: Sequence[Question], max_tokens: int) -> list[Served]:
        """Answer as `Serving.answer`."""
        return _one_by_one(self.backend, questions, max_tokens)


class VllmServing:
    """vLLM, which serves the head for as long as it is asked; of drafts it tells counters.

    Args:
        launch: what it serves, as the head's files say.
        installation: of vLLM.
        template_kwargs: variables of the chat template, sent with each request.
        progress: told what it waits for.

    Raises:
        UserError: vLLM is known to fail with such options. What is wrong with the head is not said
            here, but found.
    """

    def __init__(
        self,
        launch: VllmLaunch,
        installation: VllmInstallation,
        template_kwargs: Mapping[str, Any] | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        with suppress(CheckpointError):
            check_launch(launch, installation)
        self.launch, self.installation = launch, installation
        self.name = "vLLM"
        self.notes: list[str] = []
        self._template_kwargs, self._progress = template_kwargs, progress

    def answer(self, questions: Sequence[Question], max_tokens: int) -> list[Served]:
        """Answer as `Serving.answer`.

        Raises:
            ServingFailed: vLLM does not serve this head.
        """
        extra = _extra_body(self._template_kwargs)
        # Whether it drafts as asked is what the examination finds out.
        server = vllm_backend(
            self.launch, self.installation, say=self._progress, extra_body=extra, as_asked=False
        )
        try:
            with server as backend:
                self.notes = backend.notes
                return _one_by_one(backend, questions, max_tokens)
        except UserError as error:
            raise ServingFailed(str(error)) from None


def _extra_body(template_kwargs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return {"chat_template_kwargs": dict(template_kwargs)} if template_kwargs else None


def _one_by_one(
    backend: EndpointBackend, questions: Sequence[Question], max_tokens: int
) -> list[Served]:
    """Answers, one request at a time, so that counters are each one's."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    served = []
    for number, question in enumerate(questions):
        run = backend.run([Request(str(number), question.prompt, params)], 1)
        answer = run.answers[0]
        stats = answer.stats if answer.stats is not None else run.counters
        served.append(Served(answer.text, answer.num_prompt_tokens, stats))
    return served
