"""Distinct experts of decode steps, against sets of router indices counted one by one."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.config import SamplingParams, SpeculativeConfig
from peagle.evaluation.decoding import Request
from peagle.evaluation.engine_backend import EngineBackend
from peagle.evaluation.journal import Journal
from peagle.evaluation.sweep import Arm, Sweep
from peagle.evaluation.touched_experts import (
    COUNTED_STEPS,
    DecodePass,
    ExpertCounts,
    count_by_batch,
    count_experts,
    count_touched,
    expected_experts,
    recorded_passes,
)
from peagle.llm import LLM
from peagle.models.checkpoint import save_drafter
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.routers import use_routers
from peagle.models.target import TargetModel
from tests.conftest import byte_tokenizer, make_drafter
from tests.models.test_architectures import ARCHITECTURES
from tests.models.tiny import make_model

PROMPTS = ("def f(x):", "import", "class A")
NUM_TOKENS, K = 9, 3
NUM_EXPERTS = 6


def save_mixture(folder: Path, name: str, **more: Any) -> Path:
    found = ARCHITECTURES[name]
    key = "num_local_experts" if name == "gpt_oss" else "num_experts"
    model = make_model(found.model_type, **{**found.options, key: NUM_EXPERTS, **more})
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def mixture(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixture(tmp_path_factory.mktemp(request.param), request.param)


def params(num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def sweep_of(llm: LLM, k: int, loads: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> Sweep:
    requests = [Request(str(i), prompt, params(num_tokens)) for i, prompt in enumerate(PROMPTS)]
    arm = Arm("m", "", k, EngineBackend(llm), llm.target.device)
    return Sweep([arm], {"s": requests}, loads)


@torch.no_grad()
def chosen_by_position(target: TargetModel, tokens: list[int]) -> list[list[set[int]]]:
    """The experts of each position and layer, of transformers' own pass over a whole sequence."""
    seen: list[Any] = []

    def watch(module: Any, args: Any, output: Any) -> None:
        seen.append(next(part for part in output if part.dtype == torch.int64))

    model = type(target.model).from_pretrained(target.name, dtype=torch.float32)
    hooks = [
        m.register_forward_hook(watch)
        for m in model.modules()
        if type(m).__name__.endswith("Router")
    ]
    model(torch.tensor([tokens]))
    assert len(hooks) == len(seen) == 4
    return [[set(row) for row in layer.tolist()] for layer in seen]


@pytest.mark.parametrize("load", [1, 3])
def test_the_count_of_plain_steps(mixture: Path, load: int) -> None:
    target = TargetModel.load(mixture, dtype=torch.float32)
    llm = LLM(model=target, max_num_seqs=3)
    outputs = llm.generate(list(PROMPTS[:load]), params())
    (found,) = count_experts(sweep_of(llm, 0, (load,)), Journal(None, {})).values()
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS[:load]]
    sequences = [[*p, *o.outputs[0].token_ids] for p, o in zip(prompts, outputs)]
    experts = [chosen_by_position(target, tokens) for tokens in sequences]
    steps = range(NUM_TOKENS - 1)  # the first token comes from the prompt's own pass
    for layer, mean in enumerate(found.per_layer):
        counts = [
            len(set.union(*(e[layer][len(p) + step] for e, p in zip(experts, prompts))))
            for step in steps
        ]
        assert mean == pytest.approx(sum(counts) / len(counts))
    assert (found.num_steps, found.num_experts) == (len(steps), NUM_EXPERTS)
    assert found.mean == pytest.approx(sum(found.per_layer) / 4)


@pytest.mark.slow
def test_drafts_count_whether_accepted_or_not(mixture: Path, tmp_path: Path) -> None:
    target = TargetModel.load(mixture, dtype=torch.float32)
    head = tmp_path / "head"
    save_drafter(head, make_drafter(target), fingerprint=TargetFingerprint.of(target))
    config = SpeculativeConfig(model=str(head), num_speculative_tokens=K)
    llm = LLM(model=target, speculative_config=config, max_num_seqs=3)
    log = Journal(tmp_path / "log.jsonl", {})
    sweep = sweep_of(llm, K, (1, 3), num_tokens=200)
    few, many = count_experts(sweep, log).values()
    assert 2 < few.mean < many.mean <= NUM_EXPERTS
    assert few.num_steps == many.num_steps == COUNTED_STEPS
    assert not llm.engine.has_unfinished and not llm.requests.has_unfinished
    assert llm.engine.blocks.num_free_blocks == llm.engine.blocks.num_blocks
    # What is in the log is not counted again.
    again = count_experts(sweep, Journal(tmp_path / "log.jsonl", {}))
    assert list(again.values()) == [few, many]
    with recorded_passes(llm) as passes:
        llm.generate(list(PROMPTS), params(40))
    assert {one.num_rows for one in passes if len(one.num_rows) == 3} >= {(K + 1,) * 3}
    assert all(one.experts_LTC.shape == (4, sum(one.num_rows), 2) for one in passes)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
def test_engines_with_graphs_count_the_same(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetModel.load(mixture, dtype=torch.float32)
    sampling = params(4)
    plain = LLM(model=target, max_num_seqs=2)
    with recorded_passes(plain) as expected:
        texts = plain.generate(list(PROMPTS[:2]), sampling)
    monkeypatch.setattr("peagle.engine.engine_plan.runs_as_graphs", lambda *parts: True)
    llm = LLM(model=target, max_num_seqs=2)
    llm.requests.add(0, llm.requests.encode(PROMPTS[0]), sampling)
    for _ in range(2):
        llm.requests.step()
    llm.requests.cancel_all()  # leaves a step in flight
    pipeline = llm.engine._pipeline
    with recorded_passes(llm) as found:
        assert llm.engine._pipeline is None
        again = llm.generate(list(PROMPTS[:2]), sampling)
    assert llm.engine._pipeline is pipeline is not None
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in texts]
    assert [one.num_rows for one in found] == [one.num_rows for one in expected]
    assert all(a.experts_LTC.equal(b.experts_LTC) for a, b in zip(found, expected))
    after = llm.generate(list(PROMPTS[:2]), sampling)
    assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in texts]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
def test_routers_of_one_kernel_count_the_same(mixture: Path) -> None:
    """Their experts are 32-bit integers."""
    target = TargetModel.load(mixture, dtype=torch.float32)
    found = []
    for num_changed in (0, 4):
        assert (use_routers(target.model) if num_changed else 0) == num_changed
        llm = LLM(model=target, max_num_seqs=2)
        with recorded_passes(llm) as passes:
            llm.generate(list(PROMPTS[:2]), params(4))
        full = [one for one in passes if one.num_rows == (1, 1)]
        found.append(count_by_batch(full, NUM_EXPERTS, (0,)))
    assert found[0] == found[1] and 2 < found[0].touched(2, 0) <= 4


@pytest.mark.gpu
def test_compiled_layers_in_graphs_count_the_same(mixture: Path) -> None:
    found, texts = [], []
    for enforce_eager in (True, False):
        target = TargetModel.load(mixture, dtype=torch.float32, device="cuda")
        options: dict[str, Any] = {"enforce_eager": enforce_eager, "kv_cache_gib": 0.1}
        llm = LLM(model=target, max_num_seqs=3, **options)
        assert (llm.engine._pipeline is None) == enforce_eager
        found.append(count_experts(sweep_of(llm, 0, (1, 3)), Journal(None, {})))
        outputs = llm.generate(list(PROMPTS), params())
        texts.append([one.outputs[0].token_ids for one in outputs])
    assert found[0] == found[1] and texts[0] == texts[1]


def test_dense_targets_have_no_count(target: TargetModel) -> None:
    assert count_experts(sweep_of(LLM(model=target), 0, (1,)), Journal(None, {})) == {}


# ---- counting ----


def random_pass(source: random.Random, batch: int, rows: int) -> DecodePass:
    experts = [
        [source.sample(range(NUM_EXPERTS), 2) for _ in range(batch * rows)] for _ in range(3)
    ]
    return DecodePass((rows,) * batch, torch.tensor(experts))


def test_passes_with_fewer_sequences_do_not_count() -> None:
    source = random.Random(0)
    full, small = random_pass(source, 4, 2), random_pass(source, 3, 2)
    found = count_touched([small, full], NUM_EXPERTS)
    assert found is not None and found.num_steps == 1
    expected = [len({e for row in layer for e in row}) for layer in full.experts_LTC.tolist()]
    assert found.per_layer == expected
    assert count_touched([], NUM_EXPERTS) is None


def test_counts_by_batch_against_sets() -> None:
    source, batch, most = random.Random(1), 5, 3
    passes = [random_pass(source, batch, most + 1) for _ in range(4)]
    found = count_by_batch(passes, NUM_EXPERTS, (0, 1, most))
    assert found.num_chosen == 2
    for k in (0, 1, most):
        for size in range(1, batch + 1):
            counts = []
            for one in passes:
                for layer in one.experts_LTC.tolist():
                    for first in range(batch):
                        taken = [(first + i) % batch for i in range(size)]
                        rows = [layer[s * (most + 1) + r] for s in taken for r in range(k + 1)]
                        counts.append(len({expert for row in rows for expert in row}))
            assert found.touched(size, k) == pytest.approx(sum(counts) / len(counts))
    assert ExpertCounts.of_json(found.to_json()) == found


def test_eight_tokens_of_top_8_of_128_touch_52() -> None:
    assert round(expected_experts(8, 8, 128)) == 52
    assert expected_experts(1, 8, 128) == pytest.approx(8)
    assert expected_experts(10_000, 8, 128) == pytest.approx(128)


@pytest.mark.parametrize(("tokens", "chosen", "count"), [(8, 8, 128), (3, 4, 32), (40, 2, 16)])
def test_the_expectation_against_simulation(tokens: int, chosen: int, count: int) -> None:
    source, runs = random.Random(2), 4000
    counts = [
        len({e for _ in range(tokens) for e in source.sample(range(count), chosen)})
        for _ in range(runs)
    ]
    # The mean of 4,000 runs is off by less than 0.2 (standard deviations are below 3).
    assert sum(counts) / runs == pytest.approx(expected_experts(tokens, chosen, count), abs=0.2)
