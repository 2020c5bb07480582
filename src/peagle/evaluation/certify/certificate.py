"""The results of a certificate, the verdict, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from peagle.evaluation.certify.distribution import Fit
from peagle.evaluation.certify.reference import Difference

Status = Literal["passed", "near-ties", "fault", "not applicable"]
_MARKS = {"passed": "ok", "near-ties": "ok*", "fault": "FAULT", "not applicable": "-"}
_MOST_DIFFERENCES = 12


@dataclass(frozen=True, slots=True)
class CertifiedCase:
    """One feature under one way to decode, greedy, against the reference.

    Attributes:
        num_outputs, num_tokens: compared.
        num_accepted_tokens: draft tokens that were accepted meanwhile.
        differences: the first one of each output that has one.
        faults: other faults, in words.
        note: the reason that the case is not applicable.
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
    def num_near_ties(self) -> int:
        """Outputs whose first difference rounding can explain."""
        return sum(one.is_near_tie for one in self.differences)

    @property
    def status(self) -> Status:
        """Passed, passed but for near-ties, fault, or not applicable."""
        if self.faults or self.num_near_ties < len(self.differences):
            return "fault"
        if not self.num_outputs:
            return "not applicable"
        return "near-ties" if self.differences else "passed"

    def fault_text(self) -> str:
        """The faults in one line."""
        told = list(self.faults)
        if wrong := [one for one in self.differences if not one.is_near_tie]:
            one = wrong[0]
            told.append(
                f"{len(wrong)} of {self.num_outputs} outputs differ; {one.prompt} at token "
                f"{one.position}: {one.token} in place of {one.reference_token}, gap {one.gap:.3g}"
            )
        return f"{self.feature}, {self.method}: {'; '.join(told)}"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            **asdict(self),
            "status": self.status,
            "num_near_ties": self.num_near_ties,
            "num_faults": len(self.differences) - self.num_near_ties + len(self.faults),
            "differences": [one.to_json() for one in self.differences],
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
        """Whether the p-value is at least the significance."""
        return self.fit.p_value >= self.significance

    @property
    def way(self) -> str:
        """Method and draft sampling."""
        return f"{self.method} {self.draft_sampling}".strip()

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        data = asdict(self)
        fit = data.pop("fit")
        return {**data, **fit, "passed": self.passed}


@dataclass(frozen=True, slots=True)
class Certificate:
    """Greedy outputs, the feature matrix and the distribution tests, with the verdict.

    Attributes:
        settings: target, dtype, device, K, sizes, seed, bound of near-ties.
        identity: plain greedy outputs of every method, cases of the feature "greedy".
        matrix: every feature under every method.
        distribution: one a method, draft sampling and prompt.
        seconds: duration of all tests.
    """

    settings: dict[str, Any]
    identity: list[CertifiedCase]
    matrix: list[CertifiedCase]
    distribution: list[SampledTest]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether there is no fault anywhere; near-ties are none."""
        return not self.faults

    @property
    def faults(self) -> list[str]:
        """The faults, each in a line."""
        cases = [*self.identity, *self.matrix]
        return [case.fault_text() for case in cases if case.status == "fault"] + [
            f"sampling, {test.way}, {test.prompt}: p = {test.fit.p_value:.2g}, "
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
            "identity": [case.to_json() for case in self.identity],
            "matrix": [case.to_json() for case in self.matrix],
            "distribution": [test.to_json() for test in self.distribution],
        }

    def to_text(self) -> str:
        """For a terminal or a file of text."""
        settings = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        parts = [
            [f"Losslessness certificate: {settings}"],
            _identity_lines(self.identity),
            _matrix_lines(self.matrix) if self.matrix else [],
            _distribution_lines(self.distribution) if self.distribution else [],
            _difference_lines([*self.identity, *self.matrix]),
        ]
        verdict = "PASSED: drafts change nothing that was tested here."
        if not self.passed:
            verdict = "FAILED:\n" + "\n".join(f"  {fault}" for fault in self.faults)
        parts.append([f"{verdict} ({self.seconds:.0f} s)"])
        return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _identity_lines(cases: Sequence[CertifiedCase]) -> list[str]:
    return [
        "Greedy outputs against transformers' own generation",
        *(
            f"  {case.method:<12} {case.num_outputs} outputs, {case.num_tokens} tokens, "
            f"{case.num_accepted_tokens} from drafts: "
            f"{len(case.differences) - case.num_near_ties} faults, {case.num_near_ties} near-ties"
            for case in cases
        ),
    ]


def _matrix_lines(cases: Sequence[CertifiedCase]) -> list[str]:
    """A row for each feature, a column for each method, and the notes."""
    widths = {case.method: max(len(case.method), 5) for case in cases}
    marks = {(case.feature, case.method): _MARKS[case.status] for case in cases}
    features = list(dict.fromkeys(case.feature for case in cases))
    first = max(map(len, features))

    def row(name: str, values: Sequence[str]) -> str:
        columns = [f"{value:<{width}}" for value, width in zip(values, widths.values())]
        return "  ".join([f"  {name:<{first}}", *columns]).rstrip()

    return [
        "Greedy under every feature (ok* = near-ties only; - = not applicable)",
        row("", list(widths)),
        *(row(feature, [marks[feature, method] for method in widths]) for feature in features),
        *sorted({f"  {case.feature}, {case.method}: {case.note}" for case in cases if case.note}),
    ]


def _distribution_lines(tests: Sequence[SampledTest]) -> list[str]:
    return [
        f"Sampled outputs against the exact joint distribution of their first "
        f"{tests[0].num_tokens} tokens (a fault is p < {tests[0].significance:.2g})",
        *(
            f"  {test.way:<24} {test.prompt}: p = {test.fit.p_value:.3g}, {test.fit.num_samples} "
            f"samples, {test.fit.num_cells} cells, {test.num_accepted_tokens} of "
            f"{test.num_draft_tokens} drafts accepted; finds a shift of "
            f"{test.fit.detectable_shift:.1%}"
            for test in tests
        ),
    ]


def _difference_lines(cases: Sequence[CertifiedCase]) -> list[str]:
    found = [(case, one) for case in cases for one in case.differences]
    if not found:
        return []
    found.sort(key=lambda pair: pair[1].is_near_tie)
    lines = [
        f"  {case.feature}, {case.method}, {one.prompt} at token {one.position}: {one.token} in "
        f"place of {one.reference_token}, gap {one.gap:.2g} "
        f"({'near-tie' if one.is_near_tie else 'FAULT'})"
        for case, one in found[:_MOST_DIFFERENCES]
    ]
    if (more := len(found) - len(lines)) > 0:
        lines.append(f"  and {more} more (in the JSON form)")
    return ["First differences", *lines]
