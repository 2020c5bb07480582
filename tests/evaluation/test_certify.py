"""The losslessness certificate: a healthy pair passes, and planted faults are found and named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import SamplingParams
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.config import CandidateTrees, EngineConfig
from peagle.engine import model_runner, sampler
from peagle.engine.placement import load_target
from peagle.errors import UserError
from peagle.evaluation.certify import matrix
from peagle.evaluation.certify.matrix import Case, difference
from peagle.evaluation.certify.options import Options
from peagle.evaluation.certify.reference import Reference, TargetReference, probabilities
from peagle.evaluation.certify.run import certificate_text, run_certificate
from peagle.evaluation.decoding_methods import DecodingMethod
from peagle.kernels.sampling.probabilities import sample_from_weights
from peagle.kernels.sampling.random import Purpose, uniform
from peagle.results import CertificateResults, CertifiedCase, Difference
from peagle.speculation import verification
from peagle.speculation.verification import Verified
from tests.speculation.test_verification import probabilities as textbook

K = 3
PROMPTS = ["def f(x):", "import os\nimport re\nimport", "class Stack:\n    ", "x = [1, 2, 3"]
FEATURES = [
    "one at a time",
    "batched",
    "prefix caching",
    "chunked prefill",
    "preemption",
    "K 1 to 3",
    "K schedule",
    "penalties",
    "min_tokens",
    "stop strings",
    "logprobs",
    "grammar",
]
SMALL: dict[str, Any] = {"prompts": 2, "matrix_prompts": 2, "max_new_tokens": 16, "samples": 40}


@pytest.fixture(scope="module")
def methods(head_folders: Callable[..., Path]) -> list[DecodingMethod]:
    kinds = {"peagle": True, "eagle3": False}
    return [DecodingMethod(name, str(head_folders(parallel=kind))) for name, kind in kinds.items()]


@pytest.fixture
def certify(
    target_folder: Path, methods: list[DecodingMethod], tmp_path: Path
) -> Callable[..., CertificateResults]:
    """certify(**options) runs it on the tiny pairs, in float64."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))

    def make(
        which: slice | list[DecodingMethod] = slice(None),
        quantization: Any = None,
        **options: Any,
    ) -> CertificateResults:
        config = EngineConfig(dtype="float64", device="cpu", quantization=quantization)
        target = load_target(target_folder, config)
        chosen = Options(**{**SMALL, "prompt_set": str(prompts), **options})
        own = methods[which] if isinstance(which, slice) else which
        return run_certificate(target, target_folder, own, K, chosen, {"target": "t"})

    return make


def statuses(certificate: CertificateResults) -> dict[tuple[str, str], str]:
    return {(cell.feature, cell.method): cell.status for cell in certificate.matrix}


# ---- whole certificates ----


@pytest.mark.slow
def test_a_healthy_pair_passes(certify: Callable[..., CertificateResults]) -> None:
    certificate = certify(slice(1, None), max_new_tokens=24)  # until blocks are too few
    assert certificate.passed and not certificate.faults
    ways = ["plain", "eagle3", "ngram"]
    assert [cell.method for cell in certificate.identity] == ways
    assert all(cell.status == "passed" for cell in certificate.identity)
    found = statuses(certificate)
    assert list(dict.fromkeys(feature for feature, _ in found)) == FEATURES
    not_for_plain = {("K 1 to 3", "plain"), ("K schedule", "plain")}
    for cell, status in found.items():
        assert status == ("not applicable" if cell in not_for_plain else "passed"), cell
    assert sum(cell.num_accepted_tokens for cell in certificate.matrix) > 0
    tested = [(t.method, t.draft_sampling) for t in certificate.distribution]
    assert tested[::2] == [
        ("plain", ""),
        ("eagle3", "argmax"),
        ("eagle3", "probabilistic"),
        ("ngram", ""),
    ]
    assert all(t.num_draft_tokens for t in certificate.distribution if t.method != "plain")
    data = json.loads(json.dumps(certificate.to_json(), allow_nan=False))
    assert data["passed"] and data["settings"]["k"] == K and len(data["matrix"]) == len(found)
    text = certificate_text(certificate)
    assert "PASSED" in text and all(feature in text for feature in FEATURES)


@pytest.mark.slow
def test_stop_strings_that_no_output_has_are_not_passed(
    certify: Callable[..., CertificateResults], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "_STOP_CHARACTERS", 0)
    certificate = certify([], samples=0, prompts=1, matrix_prompts=1)
    assert statuses(certificate)["stop strings", "ngram"] == "not applicable"
    assert "stop strings, ngram: not reached with these prompts" in certificate_text(certificate)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The target's weights are rounded")
def test_the_reference_rounds_weights_as_the_target_does(
    certify: Callable[..., CertificateResults],
) -> None:
    certificate = certify([], quantization="int8", samples=0, matrix_prompts=0)
    assert certificate.passed and certificate.identity


@pytest.mark.slow
def test_trees_are_certified(
    certify: Callable[..., CertificateResults], methods: list[DecodingMethod]
) -> None:
    """Beside chains, of another depth than these, and with more nodes than they reserve slots."""
    trees = methods[0].with_trees(CandidateTrees(3, 2, 20))
    beams = methods[1].with_trees(CandidateTrees(4, 3, 9))
    certificate = certify([methods[0], trees, beams], samples=10, matrix_prompts=2)
    assert certificate.passed
    assert all(one.name in certificate_text(certificate) for one in (trees, beams))
    chains = {test.draft_sampling for test in certificate.distribution if test.method == "peagle"}
    assert chains == {"argmax", "probabilistic"}
    for name, ways in ((trees.name, chains), (beams.name, {"argmax"})):
        cells = [cell for cell in certificate.matrix if cell.method == name]
        assert [cell.feature for cell in cells] == FEATURES
        assert [cell for cell in cells if cell.status != "passed"] == []
        tested = [test for test in certificate.distribution if test.method == name]
        assert {test.draft_sampling for test in tested} == ways
        assert all(test.num_accepted_tokens <= test.num_draft_tokens for test in tested)


@pytest.mark.slow
def test_a_fault_of_trees_is_found_and_named(
    certify: Callable[..., CertificateResults],
    methods: list[DecodingMethod],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The accepted path stays where the nodes lie."""
    monkeypatch.setattr(model_runner, "move_path", lambda *_: None)
    trees = methods[0].with_trees(CandidateTrees(9, K, 30))
    certificate = certify([trees], samples=0, prompts=1, matrix_prompts=1, max_new_tokens=24)
    faults = {cell.method for cell in certificate.matrix if cell.status == "fault"}
    assert faults == {trees.name}
    assert any(f", {trees.name}: " in line for line in certificate.faults)


@pytest.mark.slow
def test_a_fault_in_verification_is_found_and_named(
    certify: Callable[..., CertificateResults], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verification that accepts the first draft without a look."""

    def careless(logits: Any, rows: Any, *rest: Any) -> Verified:
        verified = verification.verify(logits, rows, *rest)
        accepted = torch.maximum(verified.num_accepted_B, rows.num_draft_tokens_B.clamp_max(1))
        return replace(verified, num_accepted_B=accepted)

    monkeypatch.setattr(sampler, "verify", careless)
    certificate = certify(slice(1), samples=0, matrix_prompts=0)
    assert not certificate.passed
    by_method = {case.method: case for case in certificate.identity}
    assert (by_method["plain"].status, by_method["peagle"].status) == ("passed", "fault")
    assert certificate.faults[0].startswith("greedy, peagle: 2 of 2 outputs differ")
    assert not any(", plain:" in line for line in certificate.faults)
    text = certificate_text(certificate)
    assert "FAILED" in text and "FAULT" in text
    json.dumps(certificate.to_json(), allow_nan=False)


@pytest.mark.slow
def test_features_that_fail_are_named(
    certify: Callable[..., CertificateResults], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.engine.rules._min_tokens", lambda *_: None)
    right = sampler.token_logprobs
    monkeypatch.setattr(sampler, "token_logprobs", lambda rows, *rest: right(rows / 1.01, *rest))
    certificate = certify(slice(0), samples=0)
    bad = {case for case, status in statuses(certificate).items() if status == "fault"}
    assert bad == {(f, m) for f in ("min_tokens", "logprobs") for m in ("plain", "ngram")}
    wrong = [fault for fault in certificate.faults if fault.startswith("logprobs")]
    assert wrong and all("log-probabilities are off" in fault for fault in wrong)


@pytest.mark.slow
@pytest.mark.parametrize("is_biased", [False, True])
def test_a_bias_of_sampling_is_found(is_biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled pair, whose drafts are often nearly right, in single precision.

    The bias: a refused draft is replaced by a draw from p, the draft included: it comes too often.
    """

    def biased(logits: Any, rows: Any, sampling: Any, *rest: Any) -> Verified:
        verified = verification.verify(logits, rows, sampling, *rest)
        emitting_B = rows.first_row_B + verified.num_accepted_B
        probs_BV = sampling.probs(logits[emitting_B], rows.sequences_R[emitting_B])
        position_B = sampling.num_outputs_B + verified.num_accepted_B
        u_B = uniform(sampling.seeds_B + 1, position_B, Purpose.SAMPLE)
        return replace(verified, next_tokens_B=sample_from_weights(probs_BV, u_B))

    if is_biased:
        monkeypatch.setattr(sampler, "verify", biased)
    options = Options(
        prompts=1,
        matrix_prompts=0,
        max_new_tokens=16,
        samples=150,
        sampled_prompts=1,
        draft_samplings=("argmax",),
    )
    target = load_target(BUNDLED_TARGET, EngineConfig(dtype="float32", device="cpu"))
    head = DecodingMethod("peagle", str(BUNDLED_PEAGLE))
    certificate = run_certificate(target, BUNDLED_TARGET, [head], 2, options, {"target": "t"})
    assert [case.status for case in certificate.identity] == ["passed"] * 3
    assert all(case.num_accepted_tokens for case in certificate.identity if case.method != "plain")
    tests = certificate.distribution
    assert all(test.passed for test in tests if test.method == "plain")
    assert all(0 < test.detectable_shift < 0.2 for test in tests)
    drafted = [test for test in tests if test.method == "peagle"]
    assert all(0.1 < t.num_accepted_tokens / t.num_draft_tokens < 0.9 for t in drafted)
    assert certificate.passed == (not is_biased)
    if is_biased:
        assert not any(test.passed for test in tests if test.draft_sampling == "argmax")
        assert any(line.startswith("sampling, peagle argmax") for line in certificate.faults)


# ---- parts ----


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompts": 0}, "prompts of the certificate is 0; expected at least 1"),
        ({"sampled_tokens": 1}, "sampled_tokens of the certificate is 1; expected at least 2"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"alpha": 1.0}, "alpha is 1.0"),
    ],
)
def test_bad_options(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Options(**wrong)


def test_status_of_a_cell() -> None:
    def status(num_outputs: int = 2, **more: Any) -> str:
        case = CertifiedCase(feature="f", method="m", num_outputs=num_outputs, **more)
        assert CertifiedCase.model_validate(case.to_json()) == case
        return case.status

    near = Difference(prompt="p", position=3, gap=1e-5, top2_gap=1e-5, bound=1e-4)
    far, ended = (near.model_copy(update={"gap": gap}) for gap in (0.5, None))
    assert status(0) == "not applicable"
    assert status() == "passed"
    assert status(differences=[near]) == "near-ties"
    assert status(differences=[near, far]) == status(differences=[ended]) == "fault"
    assert status(faults=["x"]) == "fault"


def test_under_a_grammar_only_the_tokens_that_came_are_compared() -> None:
    logits = torch.tensor([[9.0, 1.0, 1.0 + 1e-5, 3.0]])
    grammar = SamplingParams(structured_output=None)
    case = Case("p", [0], grammar, Reference([1], logits))
    plainly = difference(case, [2], 1e-4)
    assert plainly is not None and not plainly.is_near_tie
    structured: Any = type("Params", (), {"structured_output": object()})()
    found = difference(replace(case, params=structured), [2], 1e-4)
    assert found is not None and found.is_near_tie
    far = difference(replace(case, params=structured), [3], 1e-4)
    assert far is not None and not far.is_near_tie


@pytest.mark.parametrize(
    "asked",
    [{}, {"repetition_penalty": 1.7, "presence_penalty": 0.9, "frequency_penalty": 0.4}],
)
def test_reference_under_penalties(target_folder: Path, asked: dict[str, float]) -> None:
    reference = TargetReference(target_folder, torch.float64, "cpu")
    prompt = [40, 50, 60, 50]
    params = SamplingParams(max_tokens=20, **asked)  # type: ignore[arg-type]
    output: list[int] = []
    for _ in range(20):
        logits_V = reference.model(torch.tensor([prompt + output])).logits[0, -1].detach()
        for token in {*prompt, *output}:
            by = params.repetition_penalty
            logits_V[token] = logits_V[token] / by if logits_V[token] > 0 else logits_V[token] * by
        for token in set(output):
            logits_V[token] -= params.presence_penalty
            logits_V[token] -= params.frequency_penalty * output.count(token)
        output.append(int(logits_V.argmax()))
        if output[-1] == 0:
            break
    found = reference.greedy(prompt, params)
    assert found.token_ids == output
    assert found.logits_NV.argmax(-1).tolist() == output


def test_reference_stops_where_it_may(target_folder: Path) -> None:
    reference = TargetReference(target_folder, torch.float64, "cpu")
    free = reference.greedy([40, 50], SamplingParams(max_tokens=20)).token_ids
    stop = free[2]
    early = reference.greedy([40, 50], SamplingParams(max_tokens=20, stop_token_ids=(stop,)))
    assert early.token_ids == free[: free.index(stop) + 1]
    params = SamplingParams(max_tokens=20, stop_token_ids=(stop,), min_tokens=10)
    late = reference.greedy([40, 50], params).token_ids
    assert stop not in late[:10] and len(late) >= 10
    assert reference.scored([40, 50], free).logits_NV.argmax(-1).tolist() == free


@pytest.mark.parametrize("top_k", [0, 1, 3])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
@pytest.mark.parametrize("temperature", [0.5, 1.3])
def test_probabilities(top_k: int, top_p: float, temperature: float) -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(5, 9, dtype=torch.float64)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    found = probabilities(logits, params)
    for row, one in zip(logits.tolist(), found.tolist(), strict=True):
        assert one == pytest.approx(textbook(row, temperature, top_k, top_p))
