"""A server's counters of drafts and tokens, read from its page of metrics (Prometheus's text)."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import zip_longest
from math import isfinite, nan

_SAMPLE = re.compile(
    r"^(?:vllm|peagle):(?P<name>(?:spec_decode_)?(?:num_drafts|num_draft_tokens"
    r"|num_accepted_tokens|num_accepted_(?:text_)?tokens_per_pos|generation_tokens))(?:_total)?"
    r"(?:\{(?P<labels>.*)\})?[ \t]+(?P<value>[-+.\w]+)",
    re.MULTILINE,
)
_LABEL = re.compile(r'(?P<name>\w+)="(?P<value>(?:[^"\\]|\\.)*)"')
_TOTALS = "num_drafts", "num_draft_tokens", "num_accepted_tokens"
_Sample = tuple[str, dict[str, str], float]  # name, labels, value
_PER_POS = "num_accepted_tokens_per_pos", "num_accepted_text_tokens_per_pos"


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counters of drafts, summed over engines, with the fields of `SpeculationStats`."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_accepted_text_tokens_per_pos: tuple[int, ...] = ()

    def since(self, earlier: DraftCounts) -> DraftCounts:
        """Return the counts since `earlier`."""
        pairs = (zip_longest(getattr(self, n), getattr(earlier, n), fillvalue=0) for n in _PER_POS)
        return DraftCounts(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            *(tuple(now - then for now, then in own) for own in pairs),
        )

    def __str__(self) -> str:
        per_pos = ", ".join(map(str, self.num_accepted_tokens_per_pos))
        drafted = f"{self.num_drafts} drafts of {self.num_draft_tokens} tokens"
        return f"{drafted}, accepted by position: {per_pos}"


@dataclass(frozen=True, slots=True)
class Counters:
    """The counts of a server since it started; None for counts that are not known."""

    drafts: DraftCounts | None
    num_tokens: int | None  # output tokens of all its clients
    engines: dict[str, Counters] = field(default_factory=dict)  # the counts of each, by its labels

    def since(self, earlier: Counters) -> Counters:
        """Return the counts of an engine since `earlier`; all if any fell, as it began anew."""
        drafts = tokens = None
        counts = [0]
        if self.drafts is not None and earlier.drafts is not None:
            drafts = self.drafts.since(earlier.drafts)
            counts += [drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens]
        if self.num_tokens is not None and earlier.num_tokens is not None:
            counts.append(tokens := self.num_tokens - earlier.num_tokens)
        return self if min(counts) < 0 else Counters(drafts, tokens)


def read_counters(text: str, model: str) -> Counters:
    """Read the counters of vLLM (`vllm:spec_decode_*`) or of ours (`peagle:spec_decode_*`).

    `text` is the body of GET /metrics. The counters are summed over engines, processes and all
    other labels, but not over models: of labels `model_name` only `model` counts. Where a value is
    no finite number, the count is not known.
    """
    samples = [
        (
            match["name"].removeprefix("spec_decode_"),
            {label["name"]: label["value"] for label in _LABEL.finditer(match["labels"] or "")},
            _number(match["value"]),
        )
        for match in _SAMPLE.finditer(text)
    ]
    if len({labels.get("model_name", model) for _, labels, _ in samples}) > 1:
        samples = [one for one in samples if one[1].get("model_name", model) == model]
    by_engine: dict[str, list[_Sample]] = defaultdict(list)
    for sample in samples:
        labels = sorted(one for one in sample[1].items() if one[0] != "position")
        by_engine[str(labels)].append(sample)
    found = _summed(samples)
    engines = {name: _summed(own) for name, own in by_engine.items()}
    return Counters(found.drafts, found.num_tokens, engines)


def _summed(samples: list[_Sample]) -> Counters:
    totals: dict[str, float] = defaultdict(float)
    per_pos: dict[str, dict[int, float]] = {name: defaultdict(float) for name in _PER_POS}
    for name, labels, value in samples:
        totals[name] += value
        if name in per_pos and labels.get("position", "").isdigit():
            per_pos[name][int(labels["position"])] += value
    drafts = None
    counts_read = [totals.get(name, nan) for name in _TOTALS]
    counts_read += [value for counts in per_pos.values() for value in counts.values()]
    if all(map(isfinite, counts_read)):
        drafts = DraftCounts(
            round(totals["num_drafts"]),
            round(totals["num_draft_tokens"]),
            round(totals["num_accepted_tokens"]),
            *(
                tuple(round(counts[at]) for at in range(max(counts, default=-1) + 1))
                for counts in per_pos.values()
            ),
        )
    tokens = totals.get("generation_tokens", nan)
    return Counters(drafts, round(tokens) if isfinite(tokens) else None)


def _number(text: str) -> float:
    """Return a value as a number; NaN, which no counter has, for a text that is none."""
    try:
        return float(text)
    except ValueError:
        return nan
