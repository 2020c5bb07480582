"""Acceptance of drafts behind an endpoint, and its drift from an expected acceptance.

Our container reports its counters to CloudWatch (`serving.emf`). The managed vLLM container only
logs them; this file reads its lines.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from peagle.config import cloudwatch as names
from peagle.errors import UserError
from peagle.results import AcceptanceResults, Entry, read_document

# A drop by this share of the expected acceptance length counts as drift, as in
# deploy/cloudwatch-alarms.yaml.
TOLERATED_DROP = 0.15
# At K = 7 the accepted tokens of a draft have a standard deviation of about 2, so the mean of so
# many drafts has one of about 0.1. Fewer drafts cannot show a drift.
ENOUGH_DRAFTS = 500
# Users set this tag with --tag, so it is not one of the tags "peagle:..." that `create` sets.
EXPECTED_TAG = "peagle-acceptance-length"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counters of the drafts in a time span, pooled over all instances.

    Attributes:
        num_drafts: verified drafts.
        num_accepted_tokens: accepted tokens of the drafts.
        num_accepted_tokens_per_pos: drafts whose tokens up to each position were all accepted.
        source: where the counters are from, for people.
    """

    num_drafts: float
    num_accepted_tokens: float
    num_accepted_tokens_per_pos: tuple[float, ...]
    source: str

    @property
    def acceptance_length(self) -> float:
        """1 + accepted draft tokens / drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts

    @property
    def unconditional(self) -> list[float]:
        """P(the first i + 1 drafts are all accepted), by position from 0."""
        return [count / self.num_drafts for count in self.num_accepted_tokens_per_pos]

    @property
    def conditional(self) -> list[float | None]:
        """Return P(draft i accepted | all before were), by position; None if none got that far."""
        before = [self.num_drafts, *self.num_accepted_tokens_per_pos]
        return [
            count / reached if reached else None
            for count, reached in zip(self.num_accepted_tokens_per_pos, before)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the acceptance in `status --format json`."""
        return {
            "num_drafts": round(self.num_drafts),
            "num_accepted_tokens": round(self.num_accepted_tokens),
            "num_accepted_tokens_per_pos": [round(c) for c in self.num_accepted_tokens_per_pos],
            "acceptance_length": round(self.acceptance_length, 4),
            "unconditional": [round(share, 4) for share in self.unconditional],
            "conditional": [None if s is None else round(s, 4) for s in self.conditional],
            "source": self.source,
        }


# ---- CloudWatch ----


def metric_names(num_positions: int) -> list[str]:
    """Return the counters of acceptance with drafts of up to `num_positions` tokens."""
    per_pos = [names.num_accepted_at(position) for position in range(num_positions)]
    return [names.NUM_DRAFTS, names.NUM_ACCEPTED_TOKENS, *per_pos]


def from_sums(sums: Mapping[str, float]) -> Acceptance | None:
    """Return the acceptance from sums of our container's counters; None if nothing was drafted."""
    if not sums.get(names.NUM_DRAFTS):
        return None
    per_pos = []
    while (count := sums.get(names.num_accepted_at(len(per_pos)))) is not None:
        per_pos.append(count)
    accepted = sums.get(names.NUM_ACCEPTED_TOKENS, 0)
    return Acceptance(sums[names.NUM_DRAFTS], accepted, tuple(per_pos), "CloudWatch")


# ---- vLLM's log ----

# A filter pattern of CloudWatch Logs: both words are in every line of acceptance.
VLLM_FILTER = '"SpecDecoding metrics"'
_NUMBER = r"(\d+(?:\.\d+)?)"
_VLLM = {
    "length": re.compile(rf"Mean acceptance length: {_NUMBER}"),
    "accepted": re.compile(rf"Accepted: {_NUMBER} tokens"),
    "drafted": re.compile(rf"Drafted: {_NUMBER} tokens"),
    "rates": re.compile(rf"Per-position acceptance rate: ({_NUMBER}(?:, {_NUMBER})*)"),
}


def from_vllm_log(lines: Iterable[str]) -> Acceptance | None:
    """Return the acceptance in the lines that vLLM logs while it drafts; None without any.

    A line has the tokens accepted and drafted since the last line and the rates by position, but
    not the number of drafts. That is the drafted tokens over K, the number of positions; only a
    draft cut short at the end of the context has fewer tokens. The labels find the numbers, since
    their order differs between versions (`SpecDecodingLogging` of vllm/v1/spec_decode/metrics.py,
    0.32).
    """
    num_drafts = num_accepted = 0.0
    per_pos: list[float] = []
    for line in lines:
        found = {name: match[1] for name, p in _VLLM.items() if (match := p.search(line))}
        if len(found) < len(_VLLM):
            continue
        rates = [float(rate) for rate in found["rates"].split(", ")]
        drafts = float(found["drafted"]) / len(rates)
        num_drafts += drafts
        num_accepted += float(found["accepted"])
        counts = [rate * drafts for rate in rates]
        per_pos = [sum(pair) for pair in zip_longest(per_pos, counts, fillvalue=0.0)]
    if not num_drafts:
        return None
    return Acceptance(num_drafts, num_accepted, tuple(per_pos), "vLLM's log")


# ---- drift ----


@dataclass(frozen=True, slots=True)
class ExpectedAcceptance:
    """An acceptance that was measured before, or published.

    Attributes:
        acceptance_length: the length to compare with.
        unconditional: acceptance by position; empty if unknown.
        source: where it comes from, for people.
    """

    acceptance_length: float
    unconditional: tuple[float, ...] = ()
    source: str = ""


def _length(text: str) -> float | None:
    """Return a number as an acceptance length: at least 1; None for other numbers."""
    number = float(text)
    return number if math.isfinite(number) and number >= 1 else None


def expected_from(
    text: str, k: int | None, speculation: Mapping[str, Any] | None = None
) -> ExpectedAcceptance:
    """Return the acceptance that `--expected` gives: a number, or acceptance.json of `peagle eval`.

    Of a file, the entry with the endpoint's K and kind of drafts counts; of several, the one of the
    lowest temperature.

    Args:
        k: K of the endpoint; None if unknown.
        speculation: speculative configuration of the endpoint; None if unknown.

    Raises:
        UserError: it is neither, or the file has no such entry.
    """
    try:
        length = _length(text)
    except ValueError:
        return _expected_in(Path(text).expanduser(), k, speculation)
    if length is None:
        raise UserError(f"--expected is {text}; an acceptance length is at least 1, like 3.1.")
    return ExpectedAcceptance(length, source="--expected")


def _expected_in(
    path: Path, k: int | None, speculation: Mapping[str, Any] | None
) -> ExpectedAcceptance:
    if not path.is_file():
        raise UserError(
            f"--expected is {str(path)!r}; expected an acceptance length or acceptance.json of "
            "`peagle eval --output` (there is no such file)."
        )
    drafting = [entry for entry in read_document(path, AcceptanceResults).entries if entry.k]
    entries = [entry for entry in drafting if k is None or entry.k == k]
    if not entries:
        ks = ", ".join(str(k) for k in sorted({entry.k for entry in drafting})) or "none"
        raise UserError(f"{path} has no entry for K = {k}; it has K: {ks}. Measure it with eval.")
    if speculation is not None:
        kind = _kind_of(speculation)
        found = sorted({_kind_of_entry(entry) for entry in entries})
        entries = [entry for entry in entries if _kind_of_entry(entry) == kind]
        if not entries:
            raise UserError(
                f"{path} has no entry of {kind}, which the endpoint drafts; for K = {k} it has "
                f"{', '.join(found)}. Measure it with eval."
            )
    entry = min(entries, key=lambda one: one.temperature)
    if entry.pooled.length is None:
        raise UserError(f"{path} has no drafts for K = {entry.k}. Measure it again with eval.")
    source = f"{path}, {entry.method}, K = {entry.k}, temperature {entry.temperature:g}"
    return ExpectedAcceptance(entry.pooled.length, tuple(entry.pooled.unconditional), source)


_NGRAM, _CHAINS, _TREES = "ngram", "chains", "candidate trees"


def _kind_of(speculation: Mapping[str, Any]) -> str:
    """Return what a speculative configuration drafts."""
    if speculation.get("method") == _NGRAM:
        return _NGRAM
    if speculation.get("parallel_drafting_spec") is None:
        return _CHAINS
    has_copies = speculation.get("prompt_lookup") is not False
    return f"{_TREES} with copies of the text" if has_copies else _TREES


def _kind_of_entry(entry: Entry) -> str:
    """Return what an entry of `peagle eval` drafted, as `_kind_of` names it."""
    has_copies = bool(entry.pooled.text_per_pos)
    spec = {"parallel_drafting_spec": entry.has_trees or None, "prompt_lookup": has_copies}
    return _kind_of({"method": entry.method, **spec})


def expected_from_tags(tags: Mapping[str, str]) -> ExpectedAcceptance | None:
    """Return the acceptance length in an endpoint's tag; None without one."""
    try:
        length = _length(tags.get(EXPECTED_TAG, ""))
    except ValueError:
        return None
    return None if length is None else ExpectedAcceptance(length, source=f"tag {EXPECTED_TAG}")


@dataclass(frozen=True, slots=True)
class Drift:
    """Measured acceptance compared with the expected one.

    Attributes:
        expected: the acceptance to compare with.
        share: (measured - expected) / expected acceptance length.
        is_known: whether there were enough drafts to say.
        per_pos: measured minus expected unconditional acceptance, as far as that is known.
    """

    expected: ExpectedAcceptance
    share: float
    is_known: bool
    per_pos: tuple[float, ...]

    @property
    def is_drift(self) -> bool:
        """Return whether acceptance fell by more than the tolerated drop."""
        return self.is_known and self.share < -TOLERATED_DROP

    def to_json(self) -> dict[str, Any]:
        """Return the drift in `status --format json`."""
        return {
            "expected_acceptance_length": self.expected.acceptance_length,
            "expected_from": self.expected.source,
            "change": round(self.share, 4),
            "tolerated_drop": TOLERATED_DROP,
            "enough_drafts": self.is_known,
            "is_drift": self.is_drift,
            "unconditional_change": [round(change, 4) for change in self.per_pos],
        }


def drift(measured: Acceptance, expected: ExpectedAcceptance) -> Drift:
    """Compare acceptance with the expected one."""
    return Drift(
        expected,
        measured.acceptance_length / expected.acceptance_length - 1,
        measured.num_drafts >= ENOUGH_DRAFTS,
        tuple(a - b for a, b in zip(measured.unconditional, expected.unconditional)),
    )
