"""Passes over few tokens as graphs: the same tokens and drafts as kernel by kernel.

On a CPU nothing is captured: the pass runs as it is over the graphs' padded buffers, and its
kernels run under Triton's interpreter. The reference is the torch backend.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle import LLM, SamplingParams
from peagle.attention import Passes
from peagle.engine.step.capture import make_capturer
from peagle.engine.step.pass_graphs import PassGraphs, _Pass
from peagle.kernels.drafts.batches import PackedBatch
from tests.engine.engines import drive, watch_drafts

pytest.importorskip("triton", reason="needs triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from peagle.attention.triton_backend import TritonAttention  # noqa: E402

needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not 1")
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPTS = [list(range(20, 20 + length)) for length in (1, 21, 4, 8, 5)]
FEW_SIZES: Any = {"token_buckets": (4, 8, 16), "max_sequences": 4}


def use_graphs(llm: LLM, *, one_launch: bool) -> list[tuple[int, int, bool]]:
    """Run all short passes as graphs, over poisoned KV; returns their sizes as they come.

    (tokens, sequences, whether a graph took it) of each pass of the target and of the drafter.
    """
    engine: Any = llm.engine
    capture, backend = make_capturer(llm.target.device), TritonAttention(one_launch=one_launch)
    seen: list[tuple[int, int, bool]] = []

    def use(passes: Passes, *hidden_1D: Tensor) -> None:
        passes.backend = backend
        sizes = FEW_SIZES | {"has_starts": bool(hidden_1D)}
        graphs = PassGraphs(passes, capture, 16, 4, llm.target.device, *hidden_1D, **sizes)

        def call(batch: PackedBatch, tables_BM: Tensor, *inputs: Tensor | None) -> Any:
            done = graphs(batch, tables_BM, *inputs)
            seen.append((len(batch.tokens_R), len(tables_BM), done is not None))
            return done

        passes.graphs = call

    use(engine.runner.passes)
    caches = [*llm.target.kv_caches]
    if engine.drafting is not None:
        proposer = engine.drafting.proposer
        hidden_1D = proposer.drafter.norm.weight.unsqueeze(0)
        use(proposer.passes, hidden_1D)
        use(proposer.readings, hidden_1D.new_zeros(1, proposer.drafter.config.feature_size))
        caches += proposer.caches
    for cache in caches:
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    return seen


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize(("kind", "one_launch"), [("peagle", True), ("eagle3", False)])
def test_prompts_in_chunks_and_decode_steps(
    target_folder: Path,
    head_folders: Callable[..., Path],
    kind: str,
    one_launch: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ragged chunks alone and together, with padding and without, larger ones before smaller."""
    monkeypatch.setattr("peagle.engine.drafting.MIN_APART_POSITIONS", 6)
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 9}
    num_layers = 1
    if kind == "peagle":  # a longer prompt's context begins that far before its end
        sizes["draft_window"] = 6
        # The second layer's keys come from rows whose window reaches before that beginning.
        num_layers = 2
    head = head_folders(parallel=kind == "peagle", num_layers=num_layers)
    eager = make(target_folder, head, eager=True, device="cpu", **sizes)
    graphs = make(target_folder, head, eager=True, device="cpu", **sizes)
    seen = use_graphs(graphs, one_launch=one_launch)
    drafts = [watch_drafts(llm) for llm in (eager, graphs)]
    expected, found = (drive(llm, PROMPTS, GREEDY) for llm in (eager, graphs))
    assert [s.output_token_ids for s in found] == [s.output_token_ids for s in expected]
    assert drafts[0] == drafts[1]
    assert all(taken for _, _, taken in seen)
    assert len({tokens for tokens, _, _ in seen}) > 3
    assert {sequences for _, sequences, _ in seen} == {1, 2}


@needs_interpreter
def test_the_smallest_graph_runs_and_what_does_not_fit_is_refused(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(target_folder, None, eager=True, device="cpu")
    sizes: list[int] = []

    def run(tokens_T: Tensor, positions_T: Tensor, attend: Any, hidden: Any) -> tuple[Tensor, ...]:
        sizes.append(len(tokens_T))
        return (tokens_T.clone(),)

    passes = Passes(run, TritonAttention())
    passes.graphs = PassGraphs(passes, lambda run: run, 16, 4, llm.target.device, **FEW_SIZES)

    def taken(num_tokens: int, num_seqs: int = 1, **options: Any) -> bool:
        sizes.clear()
        ones_B, tokens_R = torch.ones(num_seqs, dtype=torch.int64), torch.arange(num_tokens)
        start = torch.full((num_seqs + 1,), num_tokens).index_fill(0, torch.tensor(0), 0)
        batch = PackedBatch(tokens_R, tokens_R, tokens_R, start, ones_B)
        tables = torch.zeros(num_seqs, 1, dtype=torch.int64)
        (done,) = passes(batch, tables, max_query_len=num_tokens, max_seq_len=16, **options)
        assert done.tolist() == tokens_R.tolist()
        return sizes != [num_tokens] or num_tokens in (4, 8, 16)

    found = []
    for count in (1, 4, 5, 8, 9, 16):
        assert taken(count)
        found += sizes
    assert found == [4, 4, 8, 8, 16, 16]
    assert passes.graphs.most_rows(64) == 16

    def measured(one: _Pass) -> None:
        one.least_rows, one.launch_ratio = 3, 1.5

    monkeypatch.setattr(_Pass, "find_least_rows", measured)
    padded = PassGraphs(passes, lambda run: run, 16, 4, llm.target.device, **FEW_SIZES)
    assert padded.most_rows(23) == 16, "launching a pass takes as long as running 24 tokens"
    assert padded.most_rows(24) is None, "larger passes are as fast without a graph"
    assert taken(3, 4) and not taken(5, 5)
    assert not taken(17)
    assert not taken(3, context_starts_B=torch.ones(1, dtype=torch.int64))


def make(
    folder: Path,
    head: Path | None,
    *,
    eager: bool,
    draft_window: int | None = None,
    **options: Any,
) -> LLM:
    config: dict[str, Any] | None = None
    if head is not None:
        config = {"model": str(head), "num_speculative_tokens": 3, "draft_window": draft_window}
    options = {"device": "cuda", "block_size": 4, "max_num_seqs": 4, **options}
    return LLM(
        folder,
        speculative_config=config,
        dtype="float32",
        max_model_len=64,
        enforce_eager=eager,
        enable_prefix_caching=False,
        **options,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "peagle", "eagle3"])
def test_prompts_of_any_length_give_the_same(
    target_folder: Path,
    head_folders: Callable[..., Path],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens, and the drafts accepted: the features of the prompts decide about these.

    The last token of a prompt decodes with the others. A prompt by itself runs in the target's pass
    of its first step, in front of which that step's rows stand.
    """
    taken: dict[bool, list[int]] = {False: [], True: []}  # by whether hidden states go in
    call = PassGraphs.__call__

    def watched(
        self: PassGraphs,
        batch: PackedBatch,
        tables_BM: Tensor,
        hidden: Tensor | None,
        *others: Tensor | None,
    ) -> tuple[Tensor, ...] | None:
        done = call(self, batch, tables_BM, hidden, *others)
        if done is not None:
            taken[hidden is not None].append(batch.tokens_R.shape[0])
        return done

    monkeypatch.setattr(PassGraphs, "__call__", watched)
    head = None if kind == "plain" else head_folders(parallel=kind == "peagle")
    source = random.Random(0)
    prompts = [[source.randrange(2, 300) for _ in range(length)] for length in range(1, 41)]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    eager = make(target_folder, head, eager=True)
    expected = [(o.token_ids, o.stats) for o in eager.generate(prompts, params)]
    assert not any(taken.values())
    graphs = make(target_folder, head, eager=False)
    assert [(o.token_ids, o.stats) for o in graphs.generate(prompts, params)] == expected
    taken[False].clear()
    alone = [graphs.generate([prompt], params)[0] for prompt in prompts]
    assert [(o.token_ids, o.stats) for o in alone] == expected
    num_rows = 1 if head is None else 4
    assert set(range(num_rows + 1, num_rows + 40)) <= set(taken[False]), "each prompt by itself"
    assert bool(taken[True]) == (head is not None)
