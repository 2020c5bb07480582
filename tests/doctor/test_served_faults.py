"""Healthy heads, served wrongly: found by draft tokens if they are reported, else by counters."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from peagle.bundled import BUNDLED_PEAGLE
from peagle.doctor.files import examine_files
from peagle.doctor.findings import Examination
from peagle.doctor.head import drafted
from peagle.doctor.probe import Probe
from peagle.doctor.serving import EngineServing, Served, agreement, examine_serving
from peagle.engine import SpeculationStats
from tests.doctor.conftest import HEADS
from tests.doctor.planting import (
    HEAD_CHANGES,
    Counting,
    serve_changed,
    serve_shifted,
    serve_windowed,
)

HEAD = HEADS["pair2"]


def serve(probe: Probe, change: Callable[[Served], Served] | None = None) -> Examination:
    """Examine the serving side alone; with `change` it reports counters only, changed by it."""
    files = examine_files(HEAD, probe.target)
    files.report = Examination()
    engine = EngineServing(probe.target, HEAD, 6)
    examine_serving(engine if change is None else Counting(engine, change), probe, files)
    return files.report


def named(report: Examination) -> set[tuple[str, str]]:
    return {(cause.id, cause.where) for cause in report.causes}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["aux layers", "mask id", "no fc", "one by one", "d2t"])
def test_a_fault_of_the_engine_is_named_by_its_drafts(
    pair2: Probe, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (cause,), change = HEAD_CHANGES[name]
    serve_changed(monkeypatch, change)
    assert named(serve(pair2)) == {(cause, "serving")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual", "theta", "mask_hidden 0"])
def test_a_fault_of_a_server_is_named_by_its_counters(
    pair2: Probe, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (cause,), change = HEAD_CHANGES[name]
    serve_changed(monkeypatch, change)
    assert named(serve(pair2, lambda one: one)) == {(cause, "serving")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tells_drafts"),
    [("any mask id", True), ("any mask id", False), ("mask state", False), ("layer noise", False)],
)
def test_faults_without_a_name(
    pair2: Probe, monkeypatch: pytest.MonkeyPatch, name: str, tells_drafts: bool
) -> None:
    """No known fault makes such drafts; the doctor names the slots that they come from."""
    monkeypatch.setattr("peagle.doctor.serving._FOR_PAIRS", 1)
    causes, change = HEAD_CHANGES[name]
    serve_changed(monkeypatch, change)
    found = named(serve(pair2, None if tells_drafts else lambda one: one))
    assert len(found) == 1
    assert found <= {(cause, "serving") for cause in causes}


@pytest.mark.slow
def test_shifted_tokens_and_windows(pair2: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        serve_shifted(patch)
        assert named(serve(pair2)) == {("token_shift", "serving")}
    with monkeypatch.context() as patch:
        serve_windowed(patch, 16)
        assert named(serve(pair2)) == {("sliding_window", "serving")}
    assert named(serve(pair2)) == named(serve(pair2, lambda one: one)) == set()


@pytest.mark.slow
def test_the_engine_drafts_what_training_foresees(bundled: Probe) -> None:
    """Token by token, to the last draft of an answer, of which its end may cut accepted ones."""
    head = examine_files(BUNDLED_PEAGLE, bundled.target).head
    assert head is not None
    tokens = bundled.all_anchors_PC.shape[1] + 1
    served = EngineServing(bundled.target, BUNDLED_PEAGLE, 6).answer(bundled.questions, tokens)
    ours = drafted(head, bundled, every_anchor=True)
    found = agreement(served, ours, bundled, chained=False)
    assert found.count > 400
    assert found.share > 0.998  # rounding may turn a draft whose two best logits are equal


@pytest.mark.slow
def test_servers_that_differ_in_more_than_drafts(pair2: Probe) -> None:
    """Prompts rendered otherwise, other outputs, no drafts, no counters."""
    plain = {text: len(pair2.tokenizer(text).input_ids) for text in pair2.texts}
    sizes = iter([plain[q.text] for q in pair2.questions[::2]])
    report = serve(pair2, lambda one: replace(one, num_prompt_tokens=next(sizes)))
    assert named(report) == {("chat_template", "serving")}
    report = serve(pair2, lambda one: replace(one, text="something else"))
    assert named(report) == {("wrong_target", "serving")}
    report = serve(pair2, lambda one: replace(one, stats=SpeculationStats()))
    assert named(report) == {("parallel_drafting", "serving")}
    report = serve(pair2, lambda one: replace(one, stats=None))
    assert report.is_healthy and report.checks[-1].status == "not checked"
