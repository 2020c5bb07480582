"""The measurements of `peagle eval`, kept in acceptance.json entry by entry."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from peagle.config.speculative import DRAWN_CHAINS_FROM, chains_lead
from peagle.errors import UserError
from peagle.evaluation.acceptance import beyond_training, figures_of_answers, figures_of_counters
from peagle.evaluation.decoding import Backend
from peagle.evaluation.decoding_methods import DecodingMethod
from peagle.evaluation.dialogues import num_requests, run_dialogues
from peagle.evaluation.endpoint import EndpointBackend
from peagle.evaluation.engine_backend import EngineBackend
from peagle.evaluation.eval_plan import EvalPlan
from peagle.evaluation.journal import make_folder, require_same_settings, weights_digest
from peagle.evaluation.training_record import read_training_record
from peagle.models.checkpoint.files import write_json
from peagle.results import (
    ACCEPTANCE,
    AcceptanceResults,
    Comparison,
    Entry,
    EntryKey,
    Provenance,
    Turns,
    read_document,
)


class AcceptanceFile:
    """The acceptance.json of an output folder; its content in memory alone if the folder is None.

    `provenance` has "target" and "dtype". All entries share `settings`. `turns` holds the turns of
    the sets whose prompts have several.

    Raises:
        UserError: the file is not readable or newer, or was made with other settings.
    """

    def __init__(
        self,
        folder: Path | None,
        provenance: Mapping[str, Any],
        settings: Mapping[str, Any],
        turns: Mapping[str, Turns] | None = None,
    ) -> None:
        self._path = None if folder is None else folder / ACCEPTANCE
        entries: list[Entry] = []
        if self._path is not None:
            make_folder(self._path.parent)
            if self._path.exists():
                before = read_document(self._path, AcceptanceResults)
                who = before.provenance
                require_same_settings(
                    self._path,
                    {"target": who.target, "dtype": who.dtype, **before.settings},
                    {name: provenance.get(name) for name in ("target", "dtype")} | {**settings},
                )
                entries = before.entries
        self.results = AcceptanceResults(
            provenance=Provenance(**provenance),
            settings=dict(settings),
            turns=dict(turns or {}),
            entries=entries,
        )

    @property
    def entries(self) -> list[Entry]:
        """Return the finished entries, in the order in which they were measured."""
        return self.results.entries

    def find(self, key: EntryKey, weights_sha256: str) -> Entry | None:
        """Return a finished entry; None if the file lacks it.

        Raises:
            UserError: the head has changed since it was measured.
        """
        wanted = key.to_json()
        for entry in self.entries:
            if entry.model_dump(include=set(wanted)) != wanted:
                continue
            if entry.weights_sha256 and entry.weights_sha256 != weights_sha256:
                raise UserError(
                    f"The head {key.source!r} has changed since {str(self._path)!r} was made. "
                    "Name another --output, or remove that file to measure anew."
                )
            return entry
        return None

    def add(self, entry: Entry) -> None:
        """Add a finished entry and write the file."""
        self.entries.append(entry)
        self._write()

    def conclude(self, comparisons: list[Comparison], advice: str) -> None:
        """Set the comparisons and the advice from all entries and write the file."""
        changes = {"comparisons": comparisons, "advice": advice}
        self.results = self.results.model_copy(update=changes)
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            write_json(self._path, self.results.to_json())


@dataclass(frozen=True, slots=True)
class EvalArm:
    """One run of an evaluation: a drafting method at one K.

    Each K is a run of its own. Figures of K = 3 from the first positions of a run at K = 7 would be
    biased: the steps of a shorter draft begin elsewhere in the text, more of them where drafting is
    easy.
    """

    method: DecodingMethod
    k: int
    open: Callable[[], AbstractContextManager[Backend]]
    engine: str = "peagle"  # name of the engine in the entries
    num_speculative_tokens: int | None = None  # K that every request asks for; None asks for none

    def keys(self, plan: EvalPlan) -> list[EntryKey]:
        """Return the keys of the method's entries, one a temperature."""
        return [
            EntryKey(
                method=self.method.name,
                source=self.method.source,
                k=self.k,
                temperature=t,
                draft_sampling=self._draft_sampling(plan, t),
                engine=self.engine,
            )
            for t in plan.temperatures
        ]

    def _draft_sampling(self, plan: EvalPlan, temperature: float) -> str:
        """Return how drafts are chosen; trees that a drawn chain leads are "probabilistic"."""
        method, first = self.method, plan.drawn_chains_from
        if not method.source or not temperature:
            return "argmax"
        if method.trees is None:
            return plan.draft_sampling
        first = DRAWN_CHAINS_FROM if first is None else first
        is_led = chains_lead(first, temperature) and method.is_parallel
        return "probabilistic" if is_led else "argmax"


class EvaluationView(Protocol):
    """The progress that the user sees."""

    def begin(self, key: EntryKey, num_requests: int) -> None:
        """Show that the measurement of an entry begins."""
        ...

    def advance(self) -> None:
        """Show that a request of the entry ended."""
        ...

    def end(self, entry: Entry, *, was_there: bool) -> None:
        """Show an entry that is measured, or that the file had already."""
        ...


def evaluate(
    arms: Sequence[EvalArm], plan: EvalPlan, file: AcceptanceFile, view: EvaluationView
) -> None:
    """Measure the entries that the file lacks; the file gets each as it is finished.

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
                    view.begin(key, num_requests(plan.sets))
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
    """Measure one entry on the backend."""
    params = replace(
        plan.params, temperature=key.temperature, num_speculative_tokens=arm.num_speculative_tokens
    )
    found = run_dialogues(
        backend, plan.sets, params, plan.concurrency, chat=plan.chat, watch=view.advance
    )
    notes = []
    if found.num_errors:
        notes = [f"{found.num_errors} requests have no answer; the first: {found.first_error}"]
    seed, method, trees = params.seed or 0, arm.method, arm.method.trees_at(arm.k)
    if all(one.answer.stats is not None for one in found.observations):
        tokenizer = backend.llm.tokenizer if isinstance(backend, EngineBackend) else None
        figures = figures_of_answers(found.observations, key.k, tokenizer, seed=seed)
        if method.trained_length is not None:
            lost = beyond_training(found.observations, method.trained_length, key.k, seed=seed)
            notes += [lost] if lost else []
    else:
        figures = figures_of_counters(found.groups, key.k)
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
        parallel_drafting_spec=trees and asdict(trees),
    )
