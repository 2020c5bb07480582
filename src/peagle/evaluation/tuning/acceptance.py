"""Acceptance length by K, from a file of `peagle eval` or measured here at some K."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from peagle.config import CandidateTrees, SamplingParams, SpeculativeConfig
from peagle.engine import SpeculationStats
from peagle.errors import UserError
from peagle.evaluation.decoding_methods import NGRAM
from peagle.evaluation.dialogues import PromptSets, run_dialogues
from peagle.evaluation.engine_backend import open_engine
from peagle.evaluation.journal import Journal
from peagle.models.target import TargetModel
from peagle.results import ACCEPTANCE, AcceptanceResults, read_document

_CONCURRENCY = 8
_SOURCES = "{} by source"  # key of the shares of head and text in the journal


@dataclass(frozen=True, slots=True)
class AcceptanceByK:
    """The share of drafts that are accepted, by K.

    Between two measured K, the unconditional acceptance of a position is interpolated; below the
    smallest it is that of the smallest. (A run with K = 7 cut after 3 is not a run with K = 3,
    whose drafts begin elsewhere: near, but not equal.)

    Raises:
        UserError: a list does not have K probabilities that never rise.
    """

    per_pos: Mapping[int, Sequence[float]]  # by measured K: P(the first i drafts all pass)
    source: Literal["measured", "acceptance.json"] = "measured"

    def __post_init__(self) -> None:
        for k, rates in self.per_pos.items():
            falls = all(a >= b for a, b in pairwise(rates))
            if len(rates) != k or not all(0 <= rate <= 1 for rate in rates) or not falls:
                raise UserError(
                    f"Unconditional acceptance at K = {k} is {list(rates)}; expected {k} "
                    "probabilities, none above the one before."
                )
        if not self.per_pos:
            raise UserError("No acceptance was measured; expected at least one K.")

    @property
    def most(self) -> int:
        """Return the largest known K."""
        return max(self.per_pos)

    def rates(self, k: int) -> tuple[float, ...]:
        """Return the unconditional acceptance of the K positions.

        Raises:
            UserError: K is above the largest measured K.
        """
        if k > self.most:
            raise UserError(
                f"Acceptance at K = {k} is not known: the largest K measured is {self.most}. "
                f"Measure it at K = {k}, or lower -k."
            )
        below = max((known for known in self.per_pos if known <= k), default=None)
        above = min(known for known in self.per_pos if known >= k)
        upper = self.per_pos[above][:k]
        if below is None or below == above:
            return tuple(upper)
        share = (k - below) / (above - below)
        lower = [*self.per_pos[below], *upper[below:]]
        mixed = [(1 - share) * a + share * b for a, b in zip(lower, upper, strict=True)]
        return tuple(accumulate(mixed, min))

    def lengths(self) -> dict[int, float]:
        """Return 1 + sum of the rates for K = 0 to the largest; the lengths never fall."""
        lengths = (1 + sum(self.rates(k)) for k in range(1, self.most + 1))
        return dict(enumerate(accumulate(lengths, max, initial=1.0)))


class TreeAcceptance(NamedTuple):
    """The acceptance of candidate trees of one shape.

    Attributes:
        length: acceptance length.
        by_source: shares of head and text (`SpeculationStats.shares_by_source`).
    """

    length: float
    by_source: Mapping[str, list[float]] = {}


def acceptance_of_file(
    path: Path, *, draft: str, method: str | None = None, temperature: float = 0.0
) -> AcceptanceByK:
    """Read the acceptance of a head's chains from acceptance.json, or from a folder that holds it.

    The entries of `method` are read; without it the entries of the head `draft` (a folder or hub
    id), or of the only head. Entries of candidate trees are left out: their steps have more drafts.

    Raises:
        UserError: the file is not readable, has another format, or lacks such an entry.
    """
    file = path / ACCEPTANCE if path.is_dir() else path
    every = read_document(file, AcceptanceResults).entries
    entries = [one for one in every if one.k and one.method != NGRAM and not one.has_trees]
    names = sorted({one.method for one in entries})
    if method is not None:
        entries = [one for one in entries if one.method == method]
    elif len(names) > 1:
        entries = [
            one
            for one in entries
            if one.source == draft
            or (Path(one.source).is_dir() and Path(one.source).resolve() == Path(draft).resolve())
        ]
    if not entries:
        wanted = f"method {method!r}" if method else f"the head {draft!r}"
        raise UserError(
            f"{str(file)!r} has no entry of {wanted} with chains of drafts; of such it has "
            f"{', '.join(names) or 'none'}. Choose one with --method."
        )
    found = {one.k: one.pooled for one in entries if one.temperature == temperature}
    if not found:
        has = sorted({one.temperature for one in entries})
        raise UserError(
            f"{str(file)!r} has no entry at temperature {temperature:g}; it has "
            f"{', '.join(f'{t:g}' for t in has)}. Set --temperature to one of them."
        )
    per_pos = {k: _padded(pooled.unconditional, k) for k, pooled in found.items()}
    return AcceptanceByK(per_pos, "acceptance.json")


def measure_acceptance(
    target: TargetModel,
    head: str,
    ks: Sequence[int],
    sets: PromptSets,
    params: SamplingParams,
    journal: Journal,
    *,
    chat: bool,
    watch: Callable[[int], None] = lambda k: None,
    **engine_options: Any,
) -> AcceptanceByK:
    """Measure the acceptance of a head on prompts, each K in a run of its own.

    The journal gets the rates of each K as they are measured, and `watch` is called after each.
    `params` has a seed; `engine_options` are fields of EngineConfig.

    Raises:
        UserError: no prompt has an answer, or an option is not usable.
    """
    per_pos: dict[int, list[float]] = {}
    for k in ks:
        config = SpeculativeConfig(model=head, num_speculative_tokens=k)
        per_pos[k] = _measured_rates(
            f"acceptance k={k}", target, config, sets, params, journal, chat, engine_options
        )
        watch(k)
    return AcceptanceByK(per_pos)


def measure_tree_acceptance(
    target: TargetModel,
    head: str,
    shapes: Sequence[CandidateTrees],
    sets: PromptSets,
    params: SamplingParams,
    journal: Journal,
    *,
    chat: bool,
    watch: Callable[[int], None] = lambda max_nodes: None,
    **engine_options: Any,
) -> list[TreeAcceptance]:
    """Return the acceptance with candidate trees of each shape; see measure_acceptance."""
    every = []
    for shape in shapes:
        config = SpeculativeConfig(model=head, parallel_drafting_spec=shape)
        key = f"acceptance nodes={shape.max_nodes}"
        rates = _measured_rates(key, target, config, sets, params, journal, chat, engine_options)
        every.append(TreeAcceptance(1 + sum(rates), journal.get(_SOURCES.format(key)) or {}))
        watch(shape.max_nodes)
    return every


def _measured_rates(
    key: str,
    target: TargetModel,
    config: SpeculativeConfig,
    sets: PromptSets,
    params: SamplingParams,
    journal: Journal,
    chat: bool,
    engine_options: Mapping[str, Any],
) -> list[float]:
    """Return the unconditional acceptance of each position, from the journal if it has the key."""
    rates = journal.get(key)
    if rates is None:
        options = {"max_num_seqs": _CONCURRENCY, "seed": params.seed, **engine_options}
        with open_engine(target, config, **options) as backend:
            found = run_dialogues(backend, sets, params, _CONCURRENCY, chat=chat).observations
            del backend  # its memory is released with the context
        stats = SpeculationStats.pooled(o.answer.stats for o in found if o.answer.stats)
        rates = _padded(stats.acceptance_per_pos if stats.num_drafts else [], config.k)
        if shares := stats.shares_by_source:
            journal.add(_SOURCES.format(key), shares)
        journal.add(key, rates)
    return rates


def _padded(rates: Sequence[float], k: int) -> list[float]:
    """Return the rates of K positions, 0 for positions that were never drafted."""
    return [*rates, *[0.0] * (k - len(rates))]
