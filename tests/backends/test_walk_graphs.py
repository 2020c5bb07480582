"""CUDA graphs of walks in vLLM: which requests take which graph, and on a card the same drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.backends.vllm import corrected_drafts, walk_graphs
from peagle.backends.vllm.walk_graphs import WalkGraphs, capture_walks
from peagle.models.correction import DraftCorrection
from tests.backends.test_plugin import CONFIG, RUNNER, put_module
from tests.corrections import random_correction

K = 3
runs = list[Callable[[], Tensor]]()  # what was captured, and is at replays


class Graph:
    """A CUDA graph without a card: it runs again what was captured."""

    run: Callable[[], Tensor]

    def replay(self) -> None:
        self.run()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that are captured."""
    graphs = list[Graph]()

    @contextmanager
    def graph(made: Graph, pool: str) -> Iterator[None]:
        assert pool == "the pool"
        graphs.append(made)
        yield
        made.run = runs[-1]

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "the pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return graphs


def draft(hidden_RD: Tensor) -> Tensor:
    """The sum of each row."""
    out_R = hidden_RD.sum(1).long()
    runs.append(lambda: out_R.copy_(hidden_RD.sum(1).long()))
    return out_R


@pytest.mark.parametrize(("most", "graphs"), [(1, 1), (3, 3), (64, 11), (256, 11)])
def test_a_batch_takes_the_next_larger_graph(captured: list[Graph], most: int, graphs: int) -> None:
    walks = WalkGraphs(draft, torch.zeros(5), K, most)
    assert len(captured) == graphs
    previous = torch.zeros(0, dtype=torch.int64)
    for requests in range(1, min(most, 64) + 1):
        hidden_RD = torch.arange(requests * K * 5.0).view(-1, 5) + requests
        drafts_R = walks(hidden_RD)
        assert drafts_R is not None and torch.equal(drafts_R, hidden_RD.sum(1).long())
        assert len(previous) == (requests - 1) * K and not torch.equal(previous, drafts_R)
        previous = drafts_R
    assert walks(torch.zeros((min(most, 64) + 1) * K, 5)) is None


WHY_NOT = ["", "no correction", "shared out", "no graphs", "no kernels", "an eager drafter"]


@pytest.mark.parametrize("why_not", WHY_NOT)
def test_they_are_captured_behind_the_graphs_of_vllm(
    why_not: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world_size = 2 if why_not == "shared out" else 1
    made = list[tuple[Any, ...]]()
    runner = type("GPUModelRunner", (), {"capture_model": lambda _: 12345})
    put_module(monkeypatch, RUNNER, GPUModelRunner=runner)
    put_module(monkeypatch, CONFIG, CUDAGraphMode=SimpleNamespace(NONE="none"))
    size = {"get_tensor_model_parallel_world_size": lambda: world_size}
    put_module(monkeypatch, "vllm.distributed", **size)
    monkeypatch.setattr(corrected_drafts, "has_kernels", lambda _: why_not != "no kernels")
    monkeypatch.setattr(walk_graphs, "WalkGraphs", lambda *given: made.append(given) or "walks")
    free = iter([(1000, 2000), (900, 2000)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: next(free))
    capture_walks()
    capture_walks()
    drafter = SimpleNamespace(
        peagle_correction=None if why_not == "no correction" else "a correction",
        peagle_walks=None,
        hidden_size=24,
        device=torch.device("cpu"),
        dtype=torch.float16,
        max_batch_size=8,
        num_speculative_tokens=0,  # of the last step of a schedule
        speculative_config=SimpleNamespace(
            num_speculative_tokens=K, enforce_eager=why_not == "an eager drafter"
        ),
    )
    serving = runner()
    serving.drafter = drafter
    serving.compilation_config = SimpleNamespace(
        cudagraph_mode="none" if why_not == "no graphs" else "full"
    )
    assert serving.capture_model() == (12345 if why_not else 12445)
    if why_not:
        assert not made and drafter.peagle_walks is None
        return
    ((_, hidden_D, num_slots, most),) = made
    assert (hidden_D.shape, hidden_D.dtype, num_slots, most) == ((24,), torch.float16, K, 8)
    assert drafter.peagle_walks == "walks" and drafter.num_speculative_tokens == K
    without = runner()  # speculation is off
    without.compilation_config = serving.compilation_config
    assert without.capture_model() == 12345 and len(made) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("is_pruned", [False, True])
def test_graphs_draft_what_single_launches_draft(is_pruned: bool) -> None:
    torch.manual_seed(0)
    num_ids, width, like = 3000, 64, {"device": "cuda", "dtype": torch.bfloat16}
    ids = torch.arange(0, num_ids, 2 if is_pruned else 1, device="cuda")
    embedding, lm_head = torch.randn(num_ids, width, **like), torch.randn(len(ids), width, **like)
    correction = random_correction(width, rank=8, width=16).to(**like)
    d2t = ids - torch.arange(len(ids), device="cuda") if is_pruned else None
    ready = DraftCorrection(correction, embedding, lm_head)
    corrected = corrected_drafts.Corrected(ready, d2t)
    model: Any = SimpleNamespace(compute_logits=lambda x: x @ lm_head.T)
    if is_pruned:
        model = SimpleNamespace(lm_head=lm_head, logits_processor=lambda w, x: x @ w.T)
    proposer = SimpleNamespace(
        model=model,
        num_speculative_tokens=K,
        peagle_walks=None,
        _enable_probabilistic_draft_probs=False,
    )
    hidden_RD = torch.randn(65 * K, width, **like)
    batches = [hidden_RD[: requests * K] for requests in (1, 3, 8, 9, 33, 64, 65, 2)]
    with torch.inference_mode():
        expected = [corrected_drafts.draft_greedily(proposer, corrected, x) for x in batches]
        proposer.peagle_walks = WalkGraphs(
            lambda x: corrected_drafts.draft_greedily(proposer, corrected, x), hidden_RD[0], K, 256
        )
        found = [corrected_drafts.walk(proposer, corrected, x, None) for x in batches]
    # A product of other rows may round otherwise: a near-tie changes a chain from there on.
    same = [(a == b).float().mean().item() for a, (b, _) in zip(expected, found, strict=True)]
    assert min(same) > 0.95 and same[-2] == 1, same
    assert len({tuple(drafts.tolist()) for drafts, _ in found}) == len(batches)
