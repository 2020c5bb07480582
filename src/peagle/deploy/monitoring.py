"""How well drafts are accepted behind an endpoint, and how that compares with what is expected.

Our container tells CloudWatch its counters (`serving.emf`); the managed vLLM container only logs
them, in lines that are read here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from peagle.config import cloudwatch as names
from peagle.errors import UserError

# A drop by this share of the expected acceptance length counts as drift: what deploy/
# cloudwatch-alarms.yaml tolerates too.
TOLERATED_DROP = 0.15
# At K = 7 the accepted tokens of a draft have a standard deviation of about 2, the mean of so many
# drafts one of about 0.1: fewer say nothing about a drift.
ENOUGH_DRAFTS = 500
# Not of the tags "peagle:...", which `create` keeps to itself: users set this one with --tag.
EXPECTED_TAG = "peagle-acceptance-length"


def container_environment(endpoint: str, variant: str) -> dict[str, str]:
    """Variables by which our container knows the dimensions of its metrics."""
    return {names.ENDPOINT_VARIABLE: endpoint, names.VARIANT_VARIABLE: variant}


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Drafts of some time, pooled over all instances.

    Attributes:
        num_drafts: verified drafts.
        num_accepted_tokens: tokens of them that were accepted.
        num_accepted_tokens_per_pos: drafts whose tokens up to each position were all accepted.
        source: where it is known from, for people.
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
        """P(draft i accepted | those before it were), by position; None where never asked."""
        before = [self.num_drafts, *self.num_accepted_tokens_per_pos]
        return [
            count / reached if reached else None
            for count, reached in zip(self.num_accepted_tokens_per_pos, before)
        ]

    def to_json(self) -> dict[str, Any]:
        """What `status --format json` prints."""
        return {
            "num_drafts": round(self.num_drafts),
            "num_accepted_tokens": round(self.num_accepted_tokens),
            "num_accepted_tokens_per_pos": [round(c) for c in self.num_accepted_tokens_per_pos],
            "acceptance_length": round(self.acceptance_length, 4),
            "unconditional": [round(share, 4) for share in self.unconditional],
            "conditional": [None if s is None else round(s, 4) for s in self.conditional],
            "source": self.source,
        }


# ---- from CloudWatch ------------------------------------------------------------------------


def metric_names(num_positions: int) -> list[str]:
    """The counters of acceptance with drafts of up to so many tokens."""
    per_pos = [names.num_accepted_at(position) for position in range(num_positions)]
    return [names.NUM_DRAFTS, names.NUM_ACCEPTED_TOKENS, *per_pos]


def from_sums(sums: Mapping[str, float]) -> Acceptance | None:
    """Acceptance of what our container's counters add up to; None where nothing was drafted.

    Args:
        sums: by the names of `metric_names`; those without data are missing.
    """
    if not sums.get(names.NUM_DRAFTS):
        return None
    per_pos = []
    while (count := sums.get(names.num_accepted_at(len(per_pos)))) is not None:
        per_pos.append(count)
    accepted = sums.get(names.NUM_ACCEPTED_TOKENS, 0)
    return Acceptance(sums[names.NUM_DRAFTS], accepted, tuple(per_pos), "CloudWatch")


# ---- from vLLM's log ------------------------------------------------------------------------

# Both words are in every such line; a filter pattern of CloudWatch Logs.
VLLM_FILTER = '"SpecDecoding metrics"'
_NUMBER = r"(\d+(?:\.\d+)?)"
_VLLM = {
    name: re.compile(pattern)
    for name, pattern in {
        "length": rf"Mean acceptance length: {_NUMBER}",
        "accepted": rf"Accepted: {_NUMBER} tokens",
        "drafted": rf"Drafted: {_NUMBER} tokens",
        "rates": rf"Per-position acceptance rate: ({_NUMBER}(?:, {_NUMBER})*)",
    }.items()
}


def from_vllm_log(lines: Iterable[str]) -> Acceptance | None:
    """Acceptance of the lines that vLLM logs every ten seconds while it drafts; None without any.

    A line has the tokens accepted and drafted since the last one and the rates by position, but not
    the number of drafts. That is the drafted tokens over K, the number of positions; a draft cut
    short at the end of the context is the only one with fewer.

    Args:
        lines: messages of the log; others among them are left out. Read by their labels, since
            their order differs between versions (`SpecDecodingLogging` of
            vllm/v1/spec_decode/metrics.py, 0.32).
    """
    num_drafts = num_accepted = 0.0
    per_pos: list[float] = []
    for line in lines:
        found = {name: pattern.search(line) for name, pattern in _VLLM.items()}
        if not all(found.values()):
            continue
        value = {name: match[1] for name, match in found.items() if match}
        rates = [float(rate) for rate in value["rates"].split(", ")]
        drafts = float(value["drafted"]) / len(rates)
        num_drafts += drafts
        num_accepted += float(value["accepted"])
        counts = [rate * drafts for rate in rates]
        per_pos = [sum(pair) for pair in zip_longest(per_pos, counts, fillvalue=0.0)]
    if not num_drafts:
        return None
    return Acceptance(num_drafts, num_accepted, tuple(per_pos), "vLLM's log")


# ---- what is expected -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Expected:
    """What was measured before, or is published.

    Attributes:
        acceptance_length: to compare with.
        unconditional: by position; empty where not known.
        source: where it comes from, for people.
    """

    acceptance_length: float
    unconditional: tuple[float, ...] = ()
    source: str = ""


class _Slice(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    acceptance_length: float
    unconditional: list[float] = []


class _Entry(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    method: str
    k: int
    temperature: float = 0.0
    pooled: _Slice


class _AcceptanceFile(BaseModel):
    """acceptance.json of `peagle eval`, as far as it is read here."""

    model_config = ConfigDict(extra="ignore")

    entries: list[_Entry]


def expected_from(text: str, k: int | None) -> Expected:
    """What a user expects: a number, or acceptance.json of `peagle eval`.

    Of a file, the entry with the endpoint's K counts; of several, that of the lowest temperature.

    Raises:
        UserError: it is neither, or the file has no such entry.
    """
    try:
        number = float(text)
    except ValueError:
        return _expected_of(Path(text), k)
    if not (math.isfinite(number) and number >= 1):
        raise UserError(f"--expected is {text}; an acceptance length is at least 1, like 3.1.")
    return Expected(number, source="--expected")


def _expected_of(path: Path, k: int | None) -> Expected:
    try:
        found = _AcceptanceFile.model_validate_json(path.expanduser().read_bytes())
    except OSError as error:
        raise UserError(
            f"--expected is {str(path)!r}; expected an acceptance length or acceptance.json of "
            f"`peagle eval --output` ({error.strerror})."
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(
            f"{path} is no acceptance.json of `peagle eval --output`: {where}: {first['msg']}."
        ) from None
    drafting = [entry for entry in found.entries if entry.k]
    entries = [entry for entry in drafting if k is None or entry.k == k]
    if not entries:
        ks = ", ".join(str(k) for k in sorted({entry.k for entry in drafting})) or "none"
        raise UserError(f"{path} has no entry for K = {k}; it has K: {ks}. Measure it with eval.")
    entry = min(entries, key=lambda one: one.temperature)
    source = f"{path}, {entry.method}, K = {entry.k}, temperature {entry.temperature:g}"
    return Expected(entry.pooled.acceptance_length, tuple(entry.pooled.unconditional), source)


def expected_from_tags(tags: Mapping[str, str]) -> Expected | None:
    """What the endpoint's tag says; None without one that is an acceptance length."""
    try:
        number = float(tags.get(EXPECTED_TAG, ""))
    except ValueError:
        return None
    if not (math.isfinite(number) and number >= 1):
        return None
    return Expected(number, source=f"tag {EXPECTED_TAG}")


@dataclass(frozen=True, slots=True)
class Drift:
    """Acceptance measured beside what is expected.

    Attributes:
        share: (measured - expected) / expected acceptance length.
        is_known: whether enough was drafted to say.
        per_pos: measured minus expected unconditional acceptance, where that is known.
    """

    expected: Expected
    share: float
    is_known: bool
    per_pos: tuple[float, ...]

    @property
    def is_drift(self) -> bool:
        """Whether less is accepted than the tolerated drop explains."""
        return self.is_known and self.share < -TOLERATED_DROP

    def to_json(self) -> dict[str, Any]:
        """What `status --format json` prints."""
        return {
            "expected_acceptance_length": self.expected.acceptance_length,
            "expected_from": self.expected.source,
            "change": round(self.share, 4),
            "tolerated_drop": TOLERATED_DROP,
            "enough_drafts": self.is_known,
            "is_drift": self.is_drift,
            "unconditional_change": [round(change, 4) for change in self.per_pos],
        }


def drift(measured: Acceptance, expected: Expected) -> Drift:
    """How far acceptance has moved from what is expected."""
    share = measured.acceptance_length / expected.acceptance_length - 1
    known = measured.num_drafts >= ENOUGH_DRAFTS
    per_pos = _differences(measured.unconditional, expected.unconditional)
    return Drift(expected, share, known, per_pos)


def _differences(now: Sequence[float], then: Sequence[float]) -> tuple[float, ...]:
    return tuple(a - b for a, b in zip(now, then))


def speculation_of(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The speculative configuration in a container's environment; None without one.

    Both containers take vLLM's form in SM_VLLM_SPECULATIVE_CONFIG; text that is no JSON object
    is given under "unreadable".
    """
    text = environment.get("SM_VLLM_SPECULATIVE_CONFIG")
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"unreadable": text}
