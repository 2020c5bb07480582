"""The measurements of `peagle eval`: every method at every K and temperature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from peagle.config import SamplingParams
from peagle.evaluation.acceptance_file import AcceptanceFile, digest_of, weights_digest
from peagle.evaluation.decoding import Backend
from peagle.evaluation.decoding_methods import DecodingMethod
from peagle.evaluation.dialogues import PromptSets, num_requests, run_dialogues
from peagle.evaluation.endpoint import EndpointBackend
from peagle.evaluation.engine_backend import EngineBackend
from peagle.evaluation.training_record import read_training_record
from peagle.evaluation.xray import beyond_training, xray, xray_of_counters
from peagle.results import Entry, EntryKey


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The requests that every method gets.

    Attributes:
        sets: prompts by the name of their set.
        temperatures: of the target's sampling.
        params: of sampling otherwise; the seed is not None.
        draft_sampling: of heads, where the temperature is not 0.
        concurrency: requests in flight.
        chat: prompts go behind the chat template.
        thinking: mode of the template; None leaves it to the template.
    """

    sets: PromptSets
    temperatures: tuple[float, ...]
    params: SamplingParams
    draft_sampling: str
    concurrency: int
    chat: bool
    thinking: bool | None = None

    def settings(self, target_sha256: str) -> dict[str, Any]:
        """Return the settings that all entries share, as JSON."""
        texts = (
            text
            for name, prompts in self.sets.items()
            for prompt in prompts
            for text in (name, prompt.id, prompt.category, *prompt.turns)
        )
        return {
            "sets": {name: len(prompts) for name, prompts in self.sets.items()},
            "max_new_tokens": self.params.max_tokens,
            "top_p": self.params.top_p,
            "top_k": self.params.top_k,
            "chat_template": self.chat,
            "thinking": self.thinking,
            "seed": self.params.seed,
            "concurrency": self.concurrency,
            "prompts_sha256": digest_of(texts),
            "target_sha256": target_sha256,
        }


@dataclass(frozen=True, slots=True)
class EvalArm:
    """A method at one K.

    Attributes:
        method: its name and head.
        k: draft tokens per step. Each K is a run of its own: reading K = 3 off the first positions
            of a run at K = 7 would be biased, since the steps of a shorter draft begin elsewhere in
            the text, more of them where drafting is easy.
        open: opens the backend, for as long as its context lasts.
        engine: its name in the entries.
        requested_k: K that every request asks for; None asks for none.
    """

    method: DecodingMethod
    k: int
    open: Callable[[], AbstractContextManager[Backend]]
    engine: str = "peagle"
    requested_k: int | None = None

    def keys(self, plan: EvalPlan) -> list[EntryKey]:
        """Return the keys of its entries, one a temperature."""
        return [
            EntryKey(
                method=self.method.name,
                source=self.method.source,
                k=self.k,
                temperature=t,
                draft_sampling=plan.draft_sampling if self.method.source and t else "argmax",
                engine=self.engine,
            )
            for t in plan.temperatures
        ]


class EvaluationView(Protocol):
    """The progress that the user sees."""

    def begin(self, key: EntryKey, num_requests: int) -> None:
        """Show that an entry is begun."""
        ...

    def advance(self) -> None:
        """Show that one of its requests ended."""
        ...

    def end(self, entry: Entry, *, was_there: bool) -> None:
        """Show an entry that is measured, or was there already."""
        ...


def evaluate(
    arms: Sequence[EvalArm], plan: EvalPlan, file: AcceptanceFile, view: EvaluationView
) -> None:
    """Measure the entries that the file does not have yet; it gets each as it is finished.

    Raises:
        UserError: an option is not usable, a head has changed since an entry of it was measured, a
            server goes away or refuses, or no prompt of an entry has an answer.
    """
    digests = {one.method.folder: weights_digest(one.method.folder) for one in arms}
    for arm in arms:
        for key in arm.keys(plan):
            # A head that has changed is named before anything runs.
            file.find(key, digests[arm.method.folder])
    for arm in arms:
        digest = digests[arm.method.folder]
        with ExitStack() as stack:
            backend: Backend | None = None
            for key in arm.keys(plan):
                entry = file.find(key, digest)
                was_there = entry is not None
                if entry is None:
                    backend = backend or stack.enter_context(arm.open())
                    entry = _measure(backend, arm, key, plan, view, digest)
                    file.add(entry)
                view.end(entry, was_there=was_there)
            backend = None  # its memory is released with the context


def _measure(
    backend: Backend,
    arm: EvalArm,
    key: EntryKey,
    plan: EvalPlan,
    view: EvaluationView,
    weights_sha256: str,
) -> Entry:
    """Measure one entry."""
    view.begin(key, num_requests(plan.sets))
    params = replace(
        plan.params, temperature=key.temperature, num_speculative_tokens=arm.requested_k
    )
    found = run_dialogues(
        backend, plan.sets, params, plan.concurrency, chat=plan.chat, watch=view.advance
    )
    notes = []
    if found.num_errors:
        notes = [f"{found.num_errors} requests have no answer; the first: {found.first_error}"]
    seed, method = params.seed or 0, arm.method
    if all(one.answer.stats is not None for one in found.observations):
        tokenizer = backend.llm.tokenizer if isinstance(backend, EngineBackend) else None
        figures = xray(found.observations, key.k, tokenizer, seed=seed)
        if method.trained_length is not None:
            lost = beyond_training(found.observations, method.trained_length, key.k, seed=seed)
            notes += [lost] if lost else []
    else:
        figures = xray_of_counters(found.groups, key.k)
    if isinstance(backend, EndpointBackend):
        notes += backend.notes
    return Entry(
        **dict(key),
        **dict(figures),
        training=read_training_record(method.folder) if method.folder else None,
        seconds=found.seconds,
        output_tokens_per_s=found.num_tokens / found.seconds if found.seconds else 0.0,
        num_errors=found.num_errors,
        notes=notes,
        weights_sha256=weights_sha256,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
