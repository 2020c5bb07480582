"""How a certificate of losslessness reads."""

from __future__ import annotations

from collections.abc import Sequence

from peagle.results import CertificateResults, CertifiedCase, SampledTest

_MARKS = {"passed": "ok", "near-ties": "ok*", "fault": "FAULT", "not applicable": "-"}
_SHOWN_DIFFERENCES = 12


def certificate_text(certificate: CertificateResults) -> str:
    """A certificate for a terminal or a file of text."""
    settings = ", ".join(f"{key} {value}" for key, value in certificate.settings.items())
    parts = [f"Losslessness certificate: {settings}", _identity_text(certificate.identity)]
    if certificate.matrix:
        parts.append(_matrix_text(certificate.matrix))
    if certificate.distribution:
        parts.append(_distribution_text(certificate.distribution))
    if differences := _differences_text([*certificate.identity, *certificate.matrix]):
        parts.append(differences)
    verdict = "PASSED: drafts change nothing that was tested here."
    if not certificate.passed:
        verdict = "FAILED:\n" + "\n".join(f"  {fault}" for fault in certificate.faults)
    return "\n\n".join([*parts, f"{verdict} ({certificate.seconds:.0f} s)"])


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
        way = f"{test.method} {test.draft_sampling}".strip()
        drafts = f"{test.num_accepted_tokens} of {test.num_draft_tokens} drafts accepted"
        lines.append(
            f"  {way:<24} {test.prompt}: p = {test.p_value:.3g}, {test.num_samples} "
            f"samples, {test.num_cells} cells, {drafts}; finds a shift of "
            f"{test.detectable_shift:.1%}"
        )
    return "\n".join(lines)


def _differences_text(cells: Sequence[CertifiedCase]) -> str:
    found = [(cell, one) for cell in cells for one in cell.differences]
    found.sort(key=lambda pair: pair[1].is_near_tie)
    lines = [
        f"  {cell.feature}, {cell.method}, {one.prompt} at token {one.position}: {one.token} in "
        f"place of {one.reference_token}, "
        f"{'' if one.gap is None else f'gap {one.gap:.2g} '}("
        f"{'near-tie' if one.is_near_tie else 'FAULT'})"
        for cell, one in found[:_SHOWN_DIFFERENCES]
    ]
    if len(found) > len(lines):
        lines.append(f"  and {len(found) - len(lines)} more (in the JSON form)")
    return "\n".join(["First differences", *lines]) if lines else ""
