"""What was certified: its parts, the verdict, and how it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from peagle.evaluation.certify.distribution import Fit
from peagle.evaluation.identity import Difference

Status = Literal["passed", "near-ties", "fault", "not applicable"]
_MARKS = {"passed": "ok", "near-ties": "ok*", "fault": "FAULT", "not applicable": "-"}
_SHOWN_DIFFERENCES = 12


@dataclass(frozen=True, slots=True)
class CertifiedCase:
    """One feature under one way to decode, greedy, against the reference.

    Attributes:
        feature, method: which.
        num_outputs, num_tokens: compared.
        num_accepted_tokens: drafts accepted meanwhile: what speculation had to do with it.
        differences: the first one of each output that has one.
        faults: what else is wrong, in words.
        note: why the cell is not applicable, or what to know of it.
    """

    feature: str
    method: str
    num_outputs: int = 0
    num_tokens: int = 0
    num_accepted_tokens: int = 0
    differences: Sequence[Difference] = ()
    faults: Sequence[str] = ()
    note: str = ""

    @property
    def status(self) -> Status:
        """Passed, passed but for near-ties, fault, or not applicable."""
        if self.faults or any(not one.is_near_tie for one in self.differences):
            return "fault"
        if not self.num_outputs:
            return "not applicable"
        return "near-ties" if self.differences else "passed"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        num_near_ties = sum(one.is_near_tie for one in self.differences)
        return {
            "feature": self.feature,
            "method": self.method,
            "status": self.status,
            "num_outputs": self.num_outputs,
            "num_tokens": self.num_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_near_ties": num_near_ties,
            "num_faults": len(self.differences) - num_near_ties + len(self.faults),
            "differences": [_without_infinity(one.to_json()) for one in self.differences],
            "faults": list(self.faults),
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class SampledTest:
    """The distribution of one prompt's outputs under one way to decode.

    Attributes:
        method, draft_sampling: "" for ways without a head.
        prompt: its id.
        num_tokens: first tokens of an output whose joint distribution is tested.
        fit: the test.
        significance: a p-value below it is a fault (the certificate's, divided by the tests).
        num_draft_tokens, num_accepted_tokens: drafts for the tokens that are tested.
    """

    method: str
    draft_sampling: str
    prompt: str
    num_tokens: int
    fit: Fit
    significance: float
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def passed(self) -> bool:
        """The p-value is not below the significance."""
        return self.fit.p_value >= self.significance

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "method": self.method,
            "draft_sampling": self.draft_sampling,
            "prompt": self.prompt,
            "num_tokens": self.num_tokens,
            **self.fit.to_json(),
            "significance": self.significance,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "passed": self.passed,
        }


@dataclass(frozen=True, slots=True)
class Certificate:
    """Greedy outputs, the feature matrix and the distribution tests, with the verdict.

    Attributes:
        settings: what was tested: target, dtype, device, K, sizes, seed, bound of near-ties.
        identity: plain greedy outputs of every method, cells of the feature "greedy".
        matrix: every feature under every method.
        distribution: one a method, draft sampling and prompt.
        seconds: that it took.
    """

    settings: dict[str, Any]
    identity: list[CertifiedCase]
    matrix: list[CertifiedCase]
    distribution: list[SampledTest]
    seconds: float

    @property
    def passed(self) -> bool:
        """No fault anywhere; near-ties are none."""
        cells = [*self.identity, *self.matrix]
        return all(c.status != "fault" for c in cells) and all(t.passed for t in self.distribution)

    @property
    def faults(self) -> list[str]:
        """What failed, each in a line."""
        named = [
            f"{cell.feature}, {cell.method}: {_what(cell)}"
            for cell in [*self.identity, *self.matrix]
            if cell.status == "fault"
        ]
        return named + [
            f"sampling, {_way(test)}, {test.prompt}: p = {test.fit.p_value:.2g}, "
            f"below {test.significance:.2g}"
            for test in self.distribution
            if not test.passed
        ]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "format_version": 1,
            "passed": self.passed,
            "faults": self.faults,
            "seconds": self.seconds,
            "settings": self.settings,
            "identity": [cell.to_json() for cell in self.identity],
            "matrix": [cell.to_json() for cell in self.matrix],
            "distribution": [test.to_json() for test in self.distribution],
        }

    def to_text(self) -> str:
        """For a terminal or a file of text."""
        told = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        parts = [f"Losslessness certificate: {told}"]
        parts.append(_identity_text(self.identity))
        if self.matrix:
            parts.append(_matrix_text(self.matrix))
        if self.distribution:
            parts.append(_distribution_text(self.distribution))
        if differences := _differences_text([*self.identity, *self.matrix]):
            parts.append(differences)
        verdict = "PASSED: drafts change nothing that was tested here."
        if not self.passed:
            verdict = "FAILED:\n" + "\n".join(f"  {fault}" for fault in self.faults)
        return "\n\n".join([*parts, f"{verdict} ({self.seconds:.0f} s)"])


def _what(cell: CertifiedCase) -> str:
    wrong = [one for one in cell.differences if not one.is_near_tie]
    told = list(cell.faults)
    if wrong:
        one = wrong[0]
        told.append(
            f"{len(wrong)} of {cell.num_outputs} outputs differ; {one.prompt} at token "
            f"{one.position}: {one.token} in place of {one.reference_token}, gap {one.gap:.3g}"
        )
    return "; ".join(told)


def _identity_text(cells: Sequence[CertifiedCase]) -> str:
    lines = ["Greedy outputs against transformers' own generation"]
    for cell in cells:
        near = sum(one.is_near_tie for one in cell.differences)
        lines.append(
            f"  {cell.method:<12} {cell.num_outputs} outputs, {cell.num_tokens} tokens, "
            f"{cell.num_accepted_tokens} from drafts: {len(cell.differences) - near} faults, "
            f"{near} near-ties"
        )
    return "\n".join(lines)


def _matrix_text(cells: Sequence[CertifiedCase]) -> str:
    methods = list(dict.fromkeys(cell.method for cell in cells))
    by_feature: dict[str, dict[str, CertifiedCase]] = {}
    for cell in cells:
        by_feature.setdefault(cell.feature, {})[cell.method] = cell
    width = max((len(feature) for feature in by_feature), default=0)
    widths = {method: max(len(method), 5) for method in methods}
    lines = ["Greedy under every feature (ok* = near-ties only; - = not applicable)"]
    lines.append("  ".join(["  " + " " * width, *(f"{m:<{widths[m]}}" for m in methods)]).rstrip())
    for feature, row in by_feature.items():
        marks = [_MARKS[row[m].status] if m in row else "" for m in methods]
        shown = [f"{mark:<{widths[m]}}" for mark, m in zip(marks, methods, strict=True)]
        lines.append("  ".join([f"  {feature:<{width}}", *shown]).rstrip())
    notes = {f"  {cell.feature}, {cell.method}: {cell.note}" for cell in cells if cell.note}
    return "\n".join([*lines, *sorted(notes)])


def _distribution_text(tests: Sequence[SampledTest]) -> str:
    first = tests[0]
    lines = [
        f"Sampled outputs against the exact joint distribution of their first {first.num_tokens} "
        f"tokens (a fault is p < {first.significance:.2g})"
    ]
    for test in tests:
        drafts = f"{test.num_accepted_tokens} of {test.num_draft_tokens} drafts accepted"
        lines.append(
            f"  {_way(test):<24} {test.prompt}: p = {test.fit.p_value:.3g}, {test.fit.num_samples} "
            f"samples, {test.fit.num_cells} cells, {drafts}; finds a shift of "
            f"{test.fit.detectable_shift:.1%}"
        )
    return "\n".join(lines)


def _differences_text(cells: Sequence[CertifiedCase]) -> str:
    found = [(cell, one) for cell in cells for one in cell.differences]
    found.sort(key=lambda pair: pair[1].is_near_tie)
    lines = [
        f"  {cell.feature}, {cell.method}, {one.prompt} at token {one.position}: {one.token} in "
        f"place of {one.reference_token}, gap {one.gap:.2g} "
        f"({'near-tie' if one.is_near_tie else 'FAULT'})"
        for cell, one in found[:_SHOWN_DIFFERENCES]
    ]
    if len(found) > len(lines):
        lines.append(f"  and {len(found) - len(lines)} more (in the JSON form)")
    return "\n".join(["First differences", *lines]) if lines else ""


def _way(test: SampledTest) -> str:
    return f"{test.method} {test.draft_sampling}".strip()


def _without_infinity(data: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: gaps of outputs of other lengths are null."""
    return {k: None if v in (float("inf"), float("-inf")) else v for k, v in data.items()}
