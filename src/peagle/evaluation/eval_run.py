"""`peagle eval`: every method at every K and temperature, on an engine here or on a server."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

import torch

from peagle.config import SamplingParams
from peagle.environment import environment
from peagle.errors import UserError
from peagle.evaluation.acceptance_file import AcceptanceFile, digest_of, weights_digest
from peagle.evaluation.compare import build, release
from peagle.evaluation.decoding import Backend
from peagle.evaluation.decoding_methods import DecodingMethod
from peagle.evaluation.dialogues import DialogueResults, PromptSets, ask, num_requests
from peagle.evaluation.endpoint import EndpointBackend
from peagle.evaluation.local import EngineBackend
from peagle.evaluation.training_record import read_training_record
from peagle.evaluation.xray import beyond_training, xray, xray_of_counters
from peagle.models.checkpoint import load_drafter
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import TargetModel
from peagle.models.target_facts import TargetFacts
from peagle.results import Entry, EntryKey


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """What is put to every method.

    Attributes:
        sets: prompts by the name of their set.
        ks: draft tokens per step; each is a run of its own. Reading K = 3 off the first positions
            of a run at K = 7 would be biased: the steps of a shorter draft begin elsewhere in the
            text, more of them where drafting is easy. Empty leaves K to a server.
        temperatures: of the target's sampling.
        params: how to sample otherwise; the seed is not None.
        draft_sampling: of heads, where the temperature is not 0.
        concurrency: requests in flight.
        chat: prompts go behind the chat template.
        thinking: mode of the template; None leaves it to the template.
    """

    sets: PromptSets
    ks: tuple[int, ...]
    temperatures: tuple[float, ...]
    params: SamplingParams
    draft_sampling: str
    concurrency: int
    chat: bool
    thinking: bool | None = None

    def settings(self, target_sha256: str) -> dict[str, Any]:
        """What all entries share, as JSON."""
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
class LocalMethod:
    """A method whose head, if it has one, was found.

    Attributes:
        method: as the user calls it.
        folder: of the head, "" without one.
        trained_length: tokens of the longest sequence that the head was trained on, None if it
            does not tell.
        trained_depth: K that the head was trained for, None if it does not tell.
    """

    method: DecodingMethod
    folder: str = ""
    trained_length: int | None = None
    trained_depth: int | None = None

    @property
    def loadable(self) -> DecodingMethod:
        """The method with the folder for its source."""
        return DecodingMethod(self.method.name, self.folder)


class EvaluationView(Protocol):
    """What the user sees meanwhile."""

    def begin(self, key: EntryKey, num_requests: int) -> None:
        """An entry is begun."""
        ...

    def advance(self) -> None:
        """One of its requests ended."""
        ...

    def end(self, entry: Entry, *, was_there: bool) -> None:
        """It is measured, or was there already."""
        ...


def provenance(target: str, dtype: str, device: torch.device | None = None) -> dict[str, Any]:
    """Who measured with what: the command, the time, the machine and the target."""
    return {
        "command": shlex.join(["peagle", *sys.argv[1:]]),
        "created": _now(),
        "environment": environment(device),
        "target": target,
        "dtype": dtype,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def check_heads(target: TargetFacts, methods: Iterable[LocalMethod]) -> None:
    """Load every head once, so that one that does not fit is found before anything runs.

    Raises:
        UserError: naming the method whose head does not fit.
    """
    for one in methods:
        if not one.folder:
            continue
        try:
            load_drafter(one.folder, target)
        except UserError as error:
            raise UserError(f"The head of {one.method.name} is of no use here: {error}") from None


Opener = Callable[[LocalMethod, int], AbstractContextManager[Backend]]


def evaluate(
    methods: Sequence[LocalMethod],
    plan: EvalPlan,
    file: AcceptanceFile,
    view: EvaluationView,
    opened: Opener,
    engine: str = "peagle",
) -> list[Entry]:
    """Measure what the file does not have yet.

    Args:
        methods: none of them plain.
        plan: what is put to them.
        file: gets each entry as it is finished.
        view: is told.
        opened: what decodes by a method at a K, for as long as its context lasts.
        engine: its name in the entries.

    Returns:
        the entries asked for, in order.

    Raises:
        UserError: an option is not usable, a head has changed since an entry of it was measured,
            or no prompt of an entry has an answer.
    """
    digests = [weights_digest(one.folder) for one in methods]
    for one, digest in zip(methods, digests, strict=True):
        for key in (key for k in plan.ks for key in _keys(one.method, k, plan, engine)):
            file.find(key, digest)  # a head that has changed is named before anything runs
    entries: list[Entry] = []
    for one, digest in zip(methods, digests, strict=True):
        for k in plan.ks:
            with ExitStack() as stack:
                backend: Backend | None = None
                for key in _keys(one.method, k, plan, engine):
                    if (entry := file.find(key, digest)) is not None:
                        view.end(entry, was_there=True)
                        entries.append(entry)
                        continue
                    if backend is None:
                        backend = stack.enter_context(opened(one, k))
                    entry = _entry(backend, key, plan, view, digest, one)
                    file.add(entry)
                    view.end(entry, was_there=False)
                    entries.append(entry)
                backend = None  # what it holds is released with the context
    return entries


def on_engines(target: TargetModel, plan: EvalPlan, **engine_options: Any) -> Opener:
    """Engines of our own for `evaluate`, one at a time.

    Args:
        target: loaded.
        plan: what is put to them.
        **engine_options: fields of EngineConfig.
    """

    @contextmanager
    def opened(one: LocalMethod, k: int) -> Iterator[Backend]:
        yield _backend(target, one, plan, k, engine_options)
        release(target)

    return opened


def _keys(method: DecodingMethod, k: int, plan: EvalPlan, engine: str) -> list[EntryKey]:
    def sampling(temperature: float) -> str:
        return plan.draft_sampling if method.source and temperature else "argmax"

    name, source = method.name, method.source
    return [
        EntryKey(
            method=name,
            source=source,
            k=k,
            temperature=temperature,
            draft_sampling=sampling(temperature),
            engine=engine,
        )
        for temperature in plan.temperatures
    ]


def _backend(
    target: TargetModel, one: LocalMethod, plan: EvalPlan, k: int, engine_options: dict[str, Any]
) -> EngineBackend:
    options = {"draft_sampling": plan.draft_sampling} if one.folder else {}
    config = one.loadable.config(k, **options)
    engine_options = {"max_num_seqs": plan.concurrency, **engine_options}
    llm = build(target, {one.method.name: config}, **engine_options)[one.method.name]
    return EngineBackend(llm, thinking=plan.thinking)


def evaluate_endpoint(
    backend: EndpointBackend,
    name: str,
    plan: EvalPlan,
    file: AcceptanceFile,
    view: EvaluationView,
) -> list[Entry]:
    """Measure what the file does not have yet, on a server.

    Args:
        backend: the server.
        name: what the method is called.
        plan: what is put to it; without K the server's own.
        file: gets each entry as it is finished.
        view: is told.

    Returns:
        the entries asked for, in order.

    Raises:
        UserError: the server goes away or refuses; or K is asked for of a server that has its own.
    """
    if plan.ks and not backend.is_ours:
        raise UserError(
            f"-k is {plan.ks[0]}, but {backend.name} decides on its own K; leave -k out, and serve "
            "it with that K instead."
        )
    entries: list[Entry] = []
    for k in plan.ks or (None,):
        for temperature in plan.temperatures:
            shown = k if k is not None else backend.num_speculative_tokens() or 0
            key = EntryKey(
                method=name,
                source=backend.model,
                k=shown,
                temperature=temperature,
                engine=backend.name,
            )
            entry = file.find(key, "")
            was_there = entry is not None
            if entry is None:
                own = replace(plan, params=replace(plan.params, num_speculative_tokens=k))
                entry = _entry(backend, key, own, view)
                file.add(entry)
            view.end(entry, was_there=was_there)
            entries.append(entry)
    return entries


def _entry(
    backend: Backend,
    key: EntryKey,
    plan: EvalPlan,
    view: EvaluationView,
    weights_sha256: str = "",
    one: LocalMethod | None = None,
) -> Entry:
    view.begin(key, num_requests(plan.sets))
    params = replace(plan.params, temperature=key.temperature)
    outcome = ask(backend, plan.sets, params, plan.concurrency, chat=plan.chat, watch=view.advance)
    is_server = isinstance(backend, EndpointBackend)
    tokenizer = backend.llm.tokenizer if isinstance(backend, EngineBackend) else None
    seed = params.seed or 0
    notes = _notes(outcome)
    if all(one.answer.stats is not None for one in outcome.observations):
        figures = xray(outcome.observations, key.k, tokenizer, seed=seed)
        if one is not None and one.trained_length is not None:
            lost = beyond_training(outcome.observations, one.trained_length, key.k, seed=seed)
            notes += [lost] if lost else []
    else:
        figures = xray_of_counters(outcome.groups, key.k)
    training = read_training_record(one.folder) if one is not None and one.folder else None
    return Entry(
        **dict(key),
        **dict(figures),
        training=training,
        seconds=outcome.seconds,
        output_tokens_per_s=outcome.num_tokens / outcome.seconds if outcome.seconds else 0.0,
        num_errors=outcome.num_errors,
        notes=[*notes, *(backend.notes if is_server else ())],
        weights_sha256=weights_sha256,
        created=_now(),
    )


def _notes(outcome: DialogueResults) -> list[str]:
    if not outcome.num_errors:
        return []
    return [f"{outcome.num_errors} requests have no answer; the first: {outcome.first_error}"]


def target_digest(target: TargetFacts) -> str:
    """What tells a target from another of the same name."""
    return TargetFingerprint.of(target).lm_head_sha256
