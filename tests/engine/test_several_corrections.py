"""Several corrections of one head: each request drafts as with its own alone."""

import os
import re
import shutil
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.cli import serve
from peagle.cli.flags import Given
from peagle.cli.settings import Setting
from peagle.cli.setup import Setup
from peagle.config import SpeculativeConfig, StructuredOutput
from peagle.disk import size_text
from peagle.engine.head_swap import HeadSwap
from peagle.errors import CheckpointError, UserError
from peagle.models.checkpoint import CORRECTION_NAME, head_identity, read_head, save_correction
from peagle.models.target import TargetModel
from peagle.serving.config import ServerConfig
from tests.corrections import perturbed_correction, random_correction

K = 5
NAMES = (None, "one", "two")
PROMPTS = ["def fibonacci(n):", "import os\n\n\ndef walk(folder):", "class Stack:\n    def push("]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=7)
TREES: dict[str, Any] = {
    "num_speculative_tokens": K,
    "parallel_drafting_spec": {"num_parallel_trees": 3, "prediction_depth": K, "max_nodes": 8},
    "prompt_lookup": False,
}
WAYS: dict[str, dict[str, Any]] = {
    "chains": {"num_speculative_tokens": K},
    "drawn chains": {"num_speculative_tokens": K, "draft_sampling": "probabilistic"},
    "trees": {**TREES, "drawn_chains_from": "never"},
    "trees led by drawn chains": {**TREES, "drawn_chains_from": 0.5},
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel.load(BUNDLED_TARGET, dtype=torch.float32)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """The bundled head, and copies with another correction each in its place."""
    folder = tmp_path_factory.mktemp("heads")
    found: dict[str | None, Path] = {None: BUNDLED_PEAGLE}
    for seed, name in enumerate(("one", "two")):
        found[name] = folder / name
        shutil.copytree(BUNDLED_PEAGLE, folder / name)
        perturbed_correction(BUNDLED_PEAGLE, folder / name / CORRECTION_NAME, seed)
    return found


def named(heads: dict[str | None, Path]) -> dict[str, str]:
    """A folder and a file."""
    return {"one": str(heads["one"]), "two": str(heads["two"] / CORRECTION_NAME)}


def make(target: TargetModel | Path, head: Path, way: dict[str, Any], **options: Any) -> LLM:
    config = {"model": str(head), **way}
    return LLM(model=target, speculative_config=config, kv_cache_gib=0.05, **options)


Step = tuple[list[int], int, int, Any]


def steps(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[list[Step]]:
    """The tokens, accepted and rejected drafts of each step of each request."""
    found = defaultdict[int, list[Step]](list)
    for chunk in llm.stream(prompts, params):
        step = chunk.token_ids, chunk.num_accepted, chunk.num_drafted, chunk.rejected_token_ids
        found[chunk.index].append(step)
    return [found[index] for index in range(len(prompts))]


def mixed_batch_is_each_alone(
    target: TargetModel,
    heads: dict[str | None, Path],
    way: dict[str, Any],
    every: list[SamplingParams],
    **options: Any,
) -> LLM:
    """Requests of all corrections together give what each gives with its own; return the engine."""
    cases = [(PROMPTS[i // 2 % len(PROMPTS)], one) for i, one in enumerate(every)]
    alone = {name: make(target, heads[name], way, enforce_eager=True) for name in NAMES}
    expected = list[list[Step]]()
    for number, ((prompt, one), name) in enumerate(product(cases, NAMES)):
        alone[name].engine._num_requests = number  # seeds follow from it
        expected += steps(alone[name], [prompt], [one])
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert expected[one::3] != expected[other::3], "the corrections draft alike"
    several = make(target, BUNDLED_PEAGLE, {**way, "corrections": named(heads)}, **options)
    prompts = [prompt for prompt, _ in cases for _ in NAMES]
    params = [replace(one, correction=name) for (_, one), name in product(cases, NAMES)]
    assert steps(several, prompts, params) == expected
    return several


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_mixed_batch_drafts_as_each_request_alone(
    way: str, heads: dict[str | None, Path]
) -> None:
    target = TargetModel.load(BUNDLED_TARGET, dtype=torch.float64)
    every = [GREEDY, SEEDED, GREEDY, replace(SEEDED, seed=None)]
    words = StructuredOutput("regex", "[a-z ]{30}")
    every.append(replace(GREEDY, ignore_eos=False, structured_output=words))
    mixed_batch_is_each_alone(target, heads, WAYS[way], every)


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_everywhere", "torch_attention")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1")
@pytest.mark.parametrize("way", WAYS)
def test_captured_steps_do_so_too(way: str, heads: dict[str | None, Path]) -> None:
    """By kernels under the interpreter; rows join, leave and move."""
    target = TargetModel.load(BUNDLED_TARGET, dtype=torch.float32)
    every = [replace(GREEDY, max_tokens=5), replace(SEEDED, max_tokens=8)]
    if way == "trees led by drawn chains":  # no chain leads where there is a seed
        every[1] = replace(every[1], seed=None)
    sizes = {"max_num_seqs": 4, "max_model_len": 64, "block_size": 4}
    llm = mixed_batch_is_each_alone(target, heads, WAYS[way], every, **sizes)
    assert llm.engine._pipeline is not None and llm.stats.eager_steps == {}


@pytest.mark.slow
def test_without_a_correction_of_its_own_the_head_drafts_as_without_any(
    heads: dict[str | None, Path],
) -> None:
    target = TargetModel.load(BUNDLED_TARGET, dtype=torch.float64)
    way = {**WAYS["chains"], "correction": False}
    llm = make(target, BUNDLED_PEAGLE, {**way, "corrections": named(heads)})
    two = replace(GREEDY, correction="two")
    expected = steps(make(target, BUNDLED_PEAGLE, way), PROMPTS, [GREEDY] * 3)
    expected += steps(make(target, heads["two"], WAYS["chains"]), PROMPTS, [GREEDY] * 3)
    assert steps(llm, PROMPTS * 2, [GREEDY] * 3 + [two] * 3) == expected


def test_corrections_that_do_not_fit_are_refused(
    target: TargetModel, heads: dict[str | None, Path], tmp_path: Path
) -> None:
    def refusal(path: Path, error: type[UserError] = CheckpointError) -> str:
        with pytest.raises(error) as caught:
            make(target, BUNDLED_PEAGLE, {**WAYS["chains"], "corrections": {"sql": str(path)}})
        return str(caught.value)

    config = read_head(BUNDLED_PEAGLE).config
    small = random_correction(config.hidden_size)
    identity = head_identity(BUNDLED_PEAGLE, config)
    save_correction(tmp_path, small, identity, dtype=torch.float32)
    assert "The correction 'sql' has rank 4 and width 8; expected 64 and 256" in refusal(tmp_path)
    other = {**identity, "sha256": "0" * 64}
    save_correction(tmp_path, small, other, dtype=torch.float32)
    message = refusal(tmp_path)
    assert "was fitted on a head with sha256 '0000" in message and "The correction 'sql'" in message
    assert message.endswith("Name one that was fitted on this head, or leave it out.")
    assert "is not readable" in refusal(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="is an EAGLE-3 head"):
        way = {"num_speculative_tokens": 3, "corrections": {"sql": str(heads["one"])}}
        make(target, BUNDLED_EAGLE3, way)


def test_a_wrong_correction_is_refused_before_the_target_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `LLM`, and by `peagle serve` before it starts an engine."""
    source = tmp_path / "wrong.st"
    source.write_bytes(b"none")
    refused = re.escape(f"The correction 'sql': {str(source)!r} is not readable as safetensors")
    monkeypatch.setattr("peagle.llm.load_target", lambda *_: pytest.fail("the target was loaded"))
    config = {"model": str(BUNDLED_PEAGLE), "corrections": {"sql": str(source)}}
    with pytest.raises(CheckpointError, match=refused):
        LLM(speculative_config=config)
    setting = Setting((("sql", str(source)),), "--correction")
    with pytest.raises(CheckpointError, match=refused):
        serve._spec(Setup(Given({"speculative.corrections": setting})), ServerConfig(), None)


def test_more_than_the_memory_is_refused(
    target: TargetModel, heads: dict[str | None, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(target, BUNDLED_PEAGLE, {**WAYS["chains"], "corrections": named(heads)})
    plan = llm.engine.memory_plan
    alone = make(target, BUNDLED_PEAGLE, WAYS["chains"]).engine.memory_plan
    assert alone.corrections_bytes == 0
    assert plan.drafter_bytes - alone.drafter_bytes == 2 * plan.corrections_bytes // 3
    size = size_text(plan.corrections_bytes)
    assert f"{size} of it its corrections" in str(plan)
    monkeypatch.setattr("peagle.engine.head.available_ram", lambda: plan.corrections_bytes - 1)
    with pytest.raises(UserError, match=f"own correction and 2 more take {size}; cpu has"):
        make(target, BUNDLED_PEAGLE, {**WAYS["chains"], "corrections": named(heads)})


def test_unknown_names_and_swaps_are_refused(
    target: TargetModel, heads: dict[str | None, Path]
) -> None:
    llm = make(target, BUNDLED_PEAGLE, {**WAYS["chains"], "corrections": named(heads)})
    with pytest.raises(UserError, match="correction is 'sql'; expected one of one, two"):
        llm.generate(PROMPTS, replace(GREEDY, correction="sql"))
    with pytest.raises(UserError, match=r"has further corrections \(one, two\)"):
        HeadSwap(llm.engine, str(BUNDLED_PEAGLE))
    alone = make(target, BUNDLED_PEAGLE, WAYS["chains"])
    with pytest.raises(UserError, match="expected none, as the engine has no named one"):
        alone.generate(PROMPTS, replace(GREEDY, correction="one"))


@pytest.mark.parametrize(
    ("corrections", "message"),
    [
        ("x", "corrections is 'x'; expected names with"),
        ({"a b": "x"}, "'a b'; expected names of 1 to 64 letters"),
        ({"": "x"}, "''; expected names of 1 to 64 letters"),
        ({"a": ""}, "corrections is ''; expected names with"),
        ((("a", "x"), ("a", "y")), "expected each name once"),
    ],
)
def test_names_are_plain(corrections: Any, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        SpeculativeConfig(model="head", corrections=corrections)
    with pytest.raises(UserError, match="none with method"):
        SpeculativeConfig(method="ngram", corrections=(("a", "x"),))
    parsed = SpeculativeConfig.parse({"model": "head", "corrections": {"a": "x"}})
    assert parsed.corrections == (("a", "x"),)
