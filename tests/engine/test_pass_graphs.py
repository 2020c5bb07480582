"""Passes over few tokens as graphs: the same as the model's own, target or drafter.

On a CPU nothing is captured, the pass runs as it is and its kernels under Triton's interpreter. The
reference is the torch backend over caches of its own.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle import LLM, SamplingParams
from peagle.attention import AttentionMetadata, LayerKVCache, TorchAttention
from peagle.engine import graph_runner
from peagle.engine.graph_runner import (
    PassGraphs,
    make_capturer,
    make_drafter_graphs,
    make_target_graphs,
)
from peagle.models.target import TargetModel
from peagle.speculation import AutoregressiveProposer
from tests.conftest import make_drafter, make_target_folder

pytest.importorskip("triton", reason="needs triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from peagle.attention.triton_backend import TritonAttention  # noqa: E402

needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not 1")
DEVICES = [
    pytest.param("cpu", marks=needs_interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
BUCKETS = (4, 8, 16)
MOST_SEQUENCES = 4
BLOCK_SIZE = 4
WIDTH = 6  # blocks of the longest sequence
NUM_BLOCKS = 30  # some are nobody's
# Largest difference of float32, over the largest value; a card multiplies in another order.
TOLERANCE = 1e-4
Chunks = Sequence[tuple[int, int]]


class Target:
    """Final hidden states and features of the tiny target."""

    def __init__(self, folder: Path, device: str, backend: TritonAttention) -> None:
        self.backend = backend
        self.model = TargetModel.load(folder, dtype=torch.float32, device=device)
        self.model.tap_aux((0, 1))
        self.kv_shapes = self.model.kv_shapes()
        self.width = None  # of hidden states that go in

    def use(self, caches: list[LayerKVCache]) -> None:
        self.model.set_kv_caches(caches)

    def graphs(self, device: str) -> PassGraphs:
        capture = make_capturer(torch.device(device))
        return make_target_graphs(self.model, self.backend, capture, WIDTH)

    def run(self, tokens_T: Tensor, positions_T: Tensor, attend: Any, hidden: None) -> Any:
        return self.model.forward(tokens_T, positions_T, attend)


class Head:
    """Hidden states of a head, which go in as well."""

    def __init__(self, folder: Path, device: str, backend: TritonAttention) -> None:
        target = TargetModel.load(folder, dtype=torch.float32)
        drafter = make_drafter(target, parallel=False, num_layers=1)
        config = drafter.config
        self.kv_shapes = [(config.num_kv_heads, config.head_dim)] * config.num_layers
        self.width = config.hidden_size
        self.proposer = AutoregressiveProposer(
            drafter.to(device), backend, [], max_model_len=WIDTH * BLOCK_SIZE
        )

    def use(self, caches: list[LayerKVCache]) -> None:
        self.proposer.caches = caches

    def graphs(self, device: str) -> PassGraphs:
        return make_drafter_graphs(self.proposer, make_capturer(torch.device(device)), WIDTH)

    def run(self, tokens_T: Tensor, positions_T: Tensor, attend: Any, hidden_TD: Tensor) -> Any:
        return (self.proposer.run_prepared(tokens_T, hidden_TD, positions_T, attend),)


@dataclass
class World:
    """Sequences on shuffled blocks, run by graphs over poisoned caches and by the reference.

    A model has one set of caches at a time, so that the two take turns.
    """

    model: Target | Head
    device: str
    graphs: PassGraphs = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        order = torch.randperm(NUM_BLOCKS, generator=generator)
        self.tables_BM = order[: MOST_SEQUENCES * WIDTH].view(MOST_SEQUENCES, WIDTH)
        length = WIDTH * BLOCK_SIZE
        self.tokens_BL = torch.randint(2, 300, (MOST_SEQUENCES, length), generator=generator)
        self.hidden_BLD = torch.randn(
            MOST_SEQUENCES, length, self.model.width or 0, generator=generator
        )
        self.caches, self.reference = self.make_caches(), self.make_caches()
        for cache in self.caches:
            cache.keys.fill_(torch.nan)
            cache.values.fill_(torch.nan)
        self.model.use(self.caches)
        self.graphs = self.model.graphs(self.device)

    def make_caches(self) -> list[LayerKVCache]:
        device = torch.device(self.device)
        return [
            LayerKVCache(NUM_BLOCKS, BLOCK_SIZE, heads, size, torch.float32, device)
            for heads, size in self.model.kv_shapes
        ]

    def batch(
        self, chunks: Chunks, sequences: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor, AttentionMetadata, Tensor | None]:
        """Chunks (first position, tokens) of the sequences, as `ModelRunner` packs them."""
        rows = list(sequences or range(len(chunks)))
        where = [(b, p) for b, (f, n) in zip(rows, chunks, strict=True) for p in range(f, f + n)]
        lens = [f + n for f, n in chunks]
        width = -(-max(lens) // BLOCK_SIZE)
        slots = [
            int(self.tables_BM[b, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for b, p in where
        ]
        start_loc = list(accumulate((n for _, n in chunks), initial=0))
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor(start_loc, device=self.device),
            seq_lens_B=torch.tensor(lens, device=self.device),
            block_tables_BM=self.tables_BM[rows, :width].to(self.device),
            slots_T=torch.tensor(slots, device=self.device),
            max_query_len=max(n for _, n in chunks),
            max_seq_len=max(lens),
        )
        tokens = torch.tensor([int(self.tokens_BL[b, p]) for b, p in where], device=self.device)
        positions = torch.tensor([p for _, p in where], device=self.device)
        hidden_TD = torch.stack([self.hidden_BLD[b, p] for b, p in where]).to(self.device)
        return tokens, positions, metadata, hidden_TD if self.model.width else None

    def check(self, chunks: Chunks, sequences: Sequence[int] | None = None) -> None:
        """Run chunks both ways: equal outputs, equal KV, and no other KV touched."""
        tokens_T, positions_T, metadata, hidden_TD = self.batch(chunks, sequences)
        before = contents(self.caches)
        with torch.inference_mode():
            found = self.graphs(tokens_T, positions_T, metadata, hidden_TD)
            assert found is not None
            found = [part.clone() for part in found]
            self.model.use(self.reference)
            attend = TorchAttention().prepare(metadata)
            expected = self.model.run(tokens_T, positions_T, attend, hidden_TD)  # type: ignore
            self.model.use(self.caches)
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs)
        self.check_caches(before, metadata.slots_T)

    def check_caches(self, before: list[Tensor], slots_T: Tensor) -> None:
        after = contents(self.caches)
        for ours, theirs in zip(after, contents(self.reference), strict=True):
            assert_close(ours[slots_T], theirs[slots_T])
        others = torch.ones(len(after[0]), dtype=torch.bool, device=self.device)
        others[slots_T] = False
        for old, new in zip(before, after, strict=True):
            assert torch.equal(bits(old[others]), bits(new[others])), "KV of others was written"

    def refuses(self, chunks: Chunks, sequences: Sequence[int] | None = None) -> bool:
        return self.graphs(*self.batch(chunks, sequences)) is None


def contents(caches: list[LayerKVCache]) -> list[Tensor]:
    """Copies of keys and values, [slots, ...] each; the scrap block's slots are the last."""
    return [part.flatten(0, 1).clone() for cache in caches for part in (cache.keys, cache.values)]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)  # NaN are equal then


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert found.numel(), "nothing was compared"
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter is slow: two layers."""
    return make_target_folder(tmp_path_factory.mktemp("small"), num_hidden_layers=2)


@pytest.fixture
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_runner, "TOKEN_BUCKETS", BUCKETS)
    monkeypatch.setattr(graph_runner, "MAX_SEQUENCES", MOST_SEQUENCES)


@pytest.fixture(params=["target", "target, KV apart", "head, KV apart"])
def world(
    request: pytest.FixtureRequest, device: str, small_folder: Path, few_sizes: None
) -> World:
    """KV apart: written by a kernel of its own, as it is where there are more tokens than here."""
    kind, _, apart = request.param.partition(", ")
    backend = TritonAttention(one_launch=not apart)
    return World((Target if kind == "target" else Head)(small_folder, device, backend), device)


@pytest.mark.parametrize("lens", [[3], [4], [1, 1, 3], [5, 1, 2], [2, 1, 6, 4]])
def test_prompts(world: World, lens: list[int]) -> None:
    """Alone and ragged together, with padding and without."""
    world.check([(0, n) for n in lens])


def test_chunks_go_on_where_the_kv_ends(world: World) -> None:
    world.check([(0, 5), (0, 7), (0, 2)])
    # One goes on in the middle of a block, one at its end, one begins; one is a single token.
    world.check([(5, 3), (7, 1), (2, 2), (0, 9)])
    world.check([(8, 8), (8, 1), (4, 4)])
    world.check([(16, 8)])


def test_what_a_larger_pass_left_does_not_leak(world: World) -> None:
    """In the same buffers: tokens, slots, tables and lengths of the pass before lie behind."""
    world.check([(0, 5), (0, 6), (0, 1), (0, 4)])
    world.check([(4, 9)], sequences=[3])  # over other blocks than row 0 had
    world.check([(0, 3), (5, 7)], sequences=[3, 0])
    world.check([(6, 9)], sequences=[1])


@needs_interpreter
@pytest.mark.usefixtures("few_sizes")
def test_the_smallest_graph_runs(small_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(small_folder, "cpu", TritonAttention())
    world = World(target, "cpu")
    sizes: list[int] = []
    forward = target.model.forward

    def watched(tokens_T: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        sizes.append(tokens_T.shape[0])
        return forward(tokens_T, *rest)

    monkeypatch.setattr(target.model, "forward", watched)
    assert not any(world.refuses([(0, count)]) for count in (1, 4, 5, 8, 9))
    assert sizes == [4, 4, 8, 8, 16]


def test_what_does_not_fit_is_refused(world: World) -> None:
    before = contents(world.caches)
    assert world.refuses([(0, 17)])
    assert world.refuses([(0, 9), (0, 8)])
    assert world.refuses([(0, 1)] * 5, sequences=[0, 1, 2, 3, 0])
    tokens_T, positions_T, metadata, hidden_TD = world.batch([(0, 4)])
    holes = replace(metadata, context_starts_B=torch.ones_like(metadata.seq_lens_B))
    assert world.graphs(tokens_T, positions_T, holes, hidden_TD) is None
    for old, new in zip(before, contents(world.caches), strict=True):
        assert torch.equal(bits(old), bits(new)), "refused, and yet written"
    assert not world.refuses([(0, 4)] * 4)


# ---- in the engine --------------------------------------------------------------------------


def make(folder: Path, head: Path | None, *, eager: bool) -> LLM:
    config = None if head is None else {"model": str(head), "num_speculative_tokens": 3}
    return LLM(
        folder,
        speculative_config=config,
        dtype="float32",
        device="cuda",
        block_size=4,
        max_model_len=64,
        max_num_seqs=4,
        enforce_eager=eager,
        enable_prefix_caching=False,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "peagle", "eagle3"])
def test_prompts_of_any_length_give_the_same(
    target_folder: Path,
    head_folders: Callable[..., Path],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens, and the drafts accepted: the features of the prompts decide about these."""
    taken: dict[bool, list[int]] = {False: [], True: []}  # by whether hidden states go in
    call = PassGraphs.__call__

    def watched(self: PassGraphs, tokens_T: Tensor, *rest: Any) -> tuple[Tensor, ...] | None:
        done = call(self, tokens_T, *rest)
        if done is not None:
            taken[len(rest) == 3].append(tokens_T.shape[0])
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
    assert set(range(1, 41)) <= set(taken[False]), "each prompt by itself"
    assert bool(taken[True]) == (head is not None)
