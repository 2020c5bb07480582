"""A server's counters of drafts, read from its page of metrics (Prometheus's text format)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from peagle.engine import SpeculationStats

_SAMPLE = re.compile(
    r"^(?:vllm|peagle):(?P<name>\w+?)(?:_total)?(?:\{(?P<labels>.*)\})?[ \t]+(?P<value>\S+)",
    re.MULTILINE,
)
_LABEL = re.compile(r'(?P<name>\w+)="(?P<value>(?:[^"\\]|\\.)*)"')
_PREFIX = "spec_decode_"
_TOTALS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
_PER_POS = "num_accepted_tokens_per_pos"


@dataclass(frozen=True, slots=True)
class Counters:
    """What a server counted since it began.

    Attributes:
        drafts: None for a server that does not draft, or does not count it.
        num_tokens: tokens given out, to whomever; None where it does not tell.
    """

    drafts: SpeculationStats | None
    num_tokens: int | None


def read_counters(text: str, model: str) -> Counters:
    """The counters of vLLM (`vllm:spec_decode_*`) or of ours (`peagle:spec_decode_*`).

    They are summed over engines, processes and all other labels; of several models' counters
    (label `model_name`) only those of `model` count.

    Args:
        text: of GET /metrics.
        model: what the server calls it.
    """
    samples = list(_samples(text))
    named = {labels["model_name"] for _, labels, _ in samples if "model_name" in labels}
    if len(named) > 1:
        samples = [one for one in samples if one[1].get("model_name", model) == model]
    totals: dict[str, float] = {}
    per_pos: dict[int, float] = {}
    for name, labels, value in samples:
        key = name.removeprefix(_PREFIX)
        if key == _PER_POS and labels.get("position", "").isdigit():
            position = int(labels["position"])
            per_pos[position] = per_pos.get(position, 0.0) + value
        else:
            totals[key] = totals.get(key, 0.0) + value
    drafts = None
    if all(name in totals for name in _TOTALS):
        counts = {name: round(totals[name]) for name in _TOTALS}
        positions = range(max(per_pos, default=-1) + 1)
        accepted = [round(per_pos.get(position, 0.0)) for position in positions]
        drafts = SpeculationStats(**counts, num_accepted_tokens_per_pos=accepted)
    tokens = totals.get("generation_tokens")
    return Counters(drafts, None if tokens is None else round(tokens))


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name without prefix and `_total`, labels, value) of each sample that matters here."""
    for match in _SAMPLE.finditer(text):
        name = match["name"]
        if name != "generation_tokens" and name.removeprefix(_PREFIX) not in (*_TOTALS, _PER_POS):
            continue
        labels = {label["name"]: label["value"] for label in _LABEL.finditer(match["labels"] or "")}
        try:
            yield name, labels, float(match["value"])
        except ValueError:
            continue
