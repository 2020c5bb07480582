"""Prompts in the pass of a decode step: what comes out is what comes out of passes of their own.

On a CPU nothing is captured. The models compute in float64 there, with torch's attention, so that
no near-tie can hide a difference; the kernels of a step run under Triton's interpreter.
"""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.config import StructuredOutput
from peagle.engine.features import FeatureRing
from peagle.engine.stats import EngineStats
from peagle.engine.step.graph_runner import GraphRunner
from peagle.engine.step.mixed_pass import MixedPass
from peagle.engine.step.pass_graphs import PassGraphs
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from tests.engine.engines import watch_drafts, watch_steps

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("graphs_everywhere")
INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1"
)
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]
HEADS = {"plain": None, "peagle": BUNDLED_PEAGLE, "eagle3": BUNDLED_EAGLE3}
TREES = {"num_parallel_trees": 3, "prediction_depth": 3, "max_nodes": 7}
OWN_TREES = {"parallel_drafting_spec": TREES, "prompt_lookup": False}
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
# By min-p: the search for a cut by top-k takes the interpreter as long as the rest of a step.
SAMPLED = replace(GREEDY, temperature=0.9, min_p=0.02, seed=5)


def paused(most: int) -> dict[str, Any]:
    """A configuration with which drafting pauses from two requests on."""
    schedule = [[1, 1, most], [2, 4, 0]]
    return {"num_speculative_tokens_per_batch_size": schedule, "correction": False}


@pytest.fixture
def in_float64(device: str, torch_attention: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU passes run in float64; the kernels of a step get the logits in float32."""
    if device != "cpu":
        return
    for owner in (TargetModel, Drafter):
        compute = owner.compute_logits

        def rounded(self: Any, hidden: Tensor, compute: Any = compute) -> Tensor:
            return compute(self, hidden).float()

        monkeypatch.setattr(owner, "compute_logits", rounded)


def make(head: Path | None, device: str, **options: Any) -> LLM:
    config = options.pop("speculative", {})
    if head is not None:
        # A correction is no matter of prompts, and takes half of the interpreter's time.
        own = {"model": str(head), "num_speculative_tokens": 3, "correction": False}
        config = {**own, **config}
    dtype = "float64" if device == "cpu" else "float32"
    sizes = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 4}
    options = {"dtype": dtype, **sizes, **options}
    return LLM(
        BUNDLED_TARGET,
        speculative_config=config or None,
        device=device,
        **options,
    )


@dataclass
class Run:
    """What became of some traffic.

    Attributes:
        outputs: (tokens, log-probabilities, drafts) of each request that was not cancelled.
        mixed: (prompts, tokens of these) of each pass over a step and prompts.
    """

    outputs: dict[int, Any]
    stats: EngineStats
    mixed: list[tuple[int, int]]
    drafts: dict[tuple[int, ...], list[int]]


def run(
    llm: LLM,
    arrivals: Mapping[int, list[tuple[list[int], SamplingParams]]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    mixes: bool = True,
    cancels: Mapping[int, int] | None = None,
) -> Run:
    """Let requests come, and be cancelled, before steps of an engine; the first one is number 0."""
    mixed: list[tuple[int, int]] = []
    call = MixedPass.__call__

    def watched(self: MixedPass, step: Any, batch: Any, tables: Tensor, **sizes: int) -> Any:
        mixed.append((len(tables), len(batch.tokens_R)))
        return call(self, step, batch, tables, **sizes)

    found: dict[int, Any] = {}
    requests, steps, number = llm.requests, 0, 0
    last = max((*arrivals, *(cancels or {})))
    with monkeypatch.context() as patch:
        patch.setattr(MixedPass, "__call__", watched)
        if not mixes:
            patch.setattr(GraphRunner, "can_mix", lambda *sizes: False)
        drafts = watch_steps(llm)
        ids: dict[int, list[int]] = {}
        while requests.has_unfinished or steps <= last:
            for prompt, params in arrivals.get(steps, []):
                ids[number] = requests.add(number, prompt, params)
                number += 1
            if cancels and steps in cancels:
                requests.cancel(ids[cancels[steps]])
            for chunk in requests.step():
                if (done := chunk.output) is not None:
                    logprobs = done.logprobs, done.prompt_logprobs
                    found[chunk.index] = done.token_ids, logprobs, done.stats
            steps += 1
    stats = llm.engine.stats
    assert stats.num_free_kv_blocks == stats.num_kv_blocks and not stats.num_running
    return Run(found, stats, mixed, drafts)


def assert_same(one: Run, other: Run) -> None:
    """Tokens, accepted drafts and counters; log-probabilities up to rounding."""
    assert one.outputs.keys() == other.outputs.keys()
    for index, (tokens, logprobs, stats) in one.outputs.items():
        wanted_tokens, wanted_logprobs, wanted_stats = other.outputs[index]
        assert (tokens, stats) == (wanted_tokens, wanted_stats)
        for ours, theirs in zip(logprobs, wanted_logprobs, strict=True):
            assert (ours is None) == (theirs is None)
            for got, wanted in zip(ours or [], theirs or [], strict=True):
                assert (got is None) == (wanted is None)
                if got is not None:
                    assert (got.token_id, got.rank) == (wanted.token_id, wanted.rank)
                    assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
    ours, theirs = (replace(x.stats, step_times={}) for x in (one, other))
    predicted = theirs.calibration.predicted
    assert ours.calibration.predicted == pytest.approx(predicted, rel=1e-4), "from float32 scores"
    same = replace(ours.calibration, predicted=predicted)
    assert replace(ours, calibration=same) == theirs


def traffic() -> dict[int, list[tuple[list[int], SamplingParams]]]:
    """A long prompt in chunks, its blocks shared later, several at once, and rules of all kinds."""
    long, short = [*range(300, 326)], replace(GREEDY, max_tokens=3)
    letters = StructuredOutput("regex", "[a-z]{3,20}")
    return {
        0: [([5, 9, 200, 31, 77], replace(GREEDY, max_tokens=16))],
        2: [(long, SAMPLED)],
        4: [([41, 42, 43], short), ([51, 52, 53, 54, 55, 56, 57], SAMPLED)],
        9: [([*long[:20], 7], replace(short, logprobs=1))],
        10: [([61, 62, 63, 64], replace(short, structured_output=letters, ignore_eos=False))],
        12: [([71, 72, 73, 74], replace(short, prompt_logprobs=0))],
        13: [([81, 82, 83], replace(SAMPLED, max_tokens=4, repetition_penalty=1.3)), ([9], short)],
    }


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*HEADS, "trees"])
def test_mixed_passes_change_nothing(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, options = HEADS.get(kind, BUNDLED_PEAGLE), {"max_num_batched_tokens": 12}
    if kind == "trees":
        options["speculative"] = OWN_TREES
    cancels = {6: 3}
    mixed = run(make(head, device, **options), traffic(), monkeypatch, cancels=cancels)
    apart = make(head, device, **options)
    apart_run = run(apart, traffic(), monkeypatch, mixes=False, cancels=cancels)
    assert_same(mixed, apart_run)
    assert mixed.drafts == apart_run.drafts
    assert mixed.stats.eager_steps == {} and not apart_run.mixed
    assert mixed.stats.num_cached_tokens > 0 and mixed.stats.num_cancelled == 1
    assert len({count for count, _ in mixed.mixed}) > 1, "one prompt, and several"
    assert sum(tokens for _, tokens in mixed.mixed) > 40, "chunks, too"
    plain = make(None, device, enforce_eager=True)
    every = [one for arriving in traffic().values() for one in arriving]
    expected = plain.generate([prompt for prompt, _ in every], [params for _, params in every])
    for index, (tokens, _, _) in mixed.outputs.items():
        assert tokens == expected[index].token_ids


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("device", DEVICES)
def test_prompts_of_preempted_sequences_mix(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed again beside those that took their blocks, their outputs included."""
    params = [replace(GREEDY, max_tokens=20), replace(SAMPLED, max_tokens=20)]
    arrivals = {0: [([7, 8, 9], params[0])], 1: [([7, 5, 9, 3], params[1])], 3: [([4, 4], GREEDY)]}
    sizes = {"num_kv_blocks": 14, "enable_prefix_caching": False, "max_num_batched_tokens": 9}
    llms = [make(BUNDLED_PEAGLE, device, **sizes) for _ in range(2)]
    mixed = run(llms[0], arrivals, monkeypatch)
    assert mixed.stats.num_preemptions > 0
    assert max(tokens for _, tokens in mixed.mixed) > 4, "more than a prompt has"
    assert_same(mixed, run(llms[1], arrivals, monkeypatch, mixes=False))


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mixes", [True, False])
def test_the_tokens_of_a_step_are_sent_before_the_head_reads_prompts(
    mixes: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host launches in this order, and takes the drafts when the next step begins."""
    llm, order = make(BUNDLED_PEAGLE, device), list[str]()
    engine: Any = llm.engine
    runner, proposer = engine._pipeline.runner, engine.drafting.proposer

    def noting(name: str, call: Any) -> Any:
        def noted(*given: Any, **options: Any) -> Any:
            order.append(name)
            return call(*given, **options)

        return noted

    graph = runner._graph_of((1, 3))
    for name in ("_verify", "_draft"):
        parts = getattr(graph, name)
        monkeypatch.setitem(parts, False, noting(name, parts[False]))
    for owner, names in (
        (graph, ("_report",)),
        (proposer, ("read", "propose")),
        (runner, ("read_drafts",)),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
    if not mixes:
        monkeypatch.setattr(GraphRunner, "can_mix", lambda *sizes: False)
    engine.add_request(list(range(300, 309)), GREEDY)
    assert not engine.step()
    launched = ["_verify", "_report", "read", "_draft", "_report"]
    assert order == launched
    assert [len(output.new_token_ids) for output in engine.step()] == [1]
    follows = ["_verify", "_report", "_draft", "_report"]
    assert order == launched + follows, "the tokens are out, and no drafts are awaited"
    engine.step()
    assert order == [*launched, *follows, "read_drafts", *follows]


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("most", [3, 7], ids=["chains", "trees"])
def test_prompts_mix_while_drafting_pauses(
    most: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step keeps features from a prompt's end on; those of the prompt are put before them."""
    monkeypatch.setattr("peagle.engine.depth.RESUME_STEPS", 2)
    arrivals = {
        0: [([5, 9, 200, 31], replace(GREEDY, max_tokens=9)), ([17, 18], GREEDY)],
        3: [([*range(300, 318)], replace(GREEDY, max_tokens=18))],
    }
    trees = OWN_TREES if most == 7 else {}
    llms = [make(BUNDLED_PEAGLE, device, speculative=paused(most) | trees) for _ in range(2)]
    mixed = run(llms[0], arrivals, monkeypatch)
    apart = run(llms[1], arrivals, monkeypatch, mixes=False)
    assert (1, 17) in mixed.mixed, "drafting paused then"
    assert_same(mixed, apart)
    assert mixed.drafts == apart.drafts != {}, "what the head reads when it resumes"
    never = make(
        BUNDLED_PEAGLE, device, speculative={"correction": False, **trees}, enforce_eager=True
    )
    expected = watch_drafts(never)
    never.generate([list(text[:-1]) for text in mixed.drafts], GREEDY)
    assert mixed.drafts == {text: expected[text] for text in mixed.drafts}
    assert set(mixed.stats.decode_steps) == {0, most}


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("device", DEVICES)
def test_long_prompts_mix_while_drafting_pauses(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk as long as a ring leaves the row of the step that runs in its pass."""
    monkeypatch.setattr("peagle.engine.depth.RESUME_STEPS", 2)
    monkeypatch.setattr("peagle.engine.features.FEATURES_KEPT", 8)
    arrivals = {
        0: [([5, 9, 200, 31], replace(GREEDY, max_tokens=7)), ([17, 18], GREEDY)],
        3: [([*range(300, 325)], replace(GREEDY, max_tokens=18))],
    }
    sizes = {"max_num_batched_tokens": 12, "speculative": paused(3)}
    llms = [make(BUNDLED_PEAGLE, device, **sizes) for _ in range(2)]
    get, read = FeatureRing.get, list[Tensor]()

    def watched(self: FeatureRing) -> Tensor:
        read.append(get(self))
        return read[-1]

    monkeypatch.setattr(FeatureRing, "get", watched)
    mixed = run(llms[0], arrivals, monkeypatch)
    apart = run(llms[1], arrivals, monkeypatch, mixes=False)
    assert (1, 12) in mixed.mixed, "drafting paused then"
    assert_same(mixed, apart)
    torch.testing.assert_close(read[0], read[1])
    assert len(read) == 2 and len(read[0]) == 8


@pytest.mark.slow
@INTERPRETED
@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("has_trees", [False, True])
def test_graphs_of_mixed_passes(
    has_trees: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Over fixed buffers with padding, and over KV that is poisoned where nothing was written."""
    options: dict[str, Any] = {"max_num_batched_tokens": 8, "max_num_seqs": 3}
    if has_trees:
        options["speculative"] = OWN_TREES
    head = BUNDLED_PEAGLE if has_trees else None
    arrivals = {
        0: [([5, 9, 200, 31, 77], replace(GREEDY, max_tokens=7))],
        2: [([*range(300, 315)], replace(SAMPLED, max_tokens=2))],
        4: [([41, 42, 43], replace(GREEDY, max_tokens=2))],
    }
    llm = make(head, device, dtype="float32", **options)
    engine: Any = llm.engine
    passes = engine._pipeline.runner._mixed_pass.passes
    graphs = PassGraphs(
        passes,
        lambda run: run,
        16,
        4,
        torch.device(device),
        token_buckets=(8, 16, 32),
        has_trees=has_trees,
    )
    taken: Counter[bool] = Counter()

    def call(*batch: Any) -> Any:
        done = graphs(*batch)
        taken[done is not None] += 1
        return done

    passes.graphs = call
    for cache in llm.target.kv_caches:
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    mixed = run(llm, arrivals, monkeypatch)
    request.getfixturevalue("torch_attention")
    apart = make(head, device, dtype="float32", **options)
    assert_same(mixed, run(apart, arrivals, monkeypatch, mixes=False))
    assert taken == {True: len(mixed.mixed)} and len(mixed.mixed) > 3


@pytest.mark.slow
@INTERPRETED
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("device", ["cpu"])
def test_when_prompts_do_not_mix(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens, long contexts, weights that are unpacked: passes of their own, as ever."""
    arrivals = {
        0: [([5, 9, 200, 31, 77], replace(GREEDY, max_tokens=4))],
        2: [([*range(300, 310)], replace(GREEDY, max_tokens=2))],
    }

    def mixed(**limits: Any) -> list[tuple[int, int]]:
        with monkeypatch.context() as patch:
            for name, value in limits.items():
                patch.setattr(f"peagle.engine.step.graph_runner.{name}", value)
            return run(make(None, device), arrivals, monkeypatch).mixed

    assert mixed() == [(1, 4), (1, 9)]
    assert mixed(_MIXED_BUCKETS=(8,)) == [(1, 4)]
    assert mixed(_MAX_MIXED_CONTEXT=8) == [(1, 4)]
    assert mixed(mixed_buckets=lambda *_: ()) == []
