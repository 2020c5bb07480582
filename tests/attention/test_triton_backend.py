"""The Triton backend against the torch backend, its refusals, and its life in a CUDA graph.

On a CPU the kernels run under Triton's interpreter (TRITON_INTERPRET=1).
"""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.attention import AttentionMetadata, LayerKVCache, TorchAttention, triton_backend
from peagle.attention.triton_backend import (
    TritonAttention,
    TritonPreparedAttention,
    check_device,
    check_layer,
)
from peagle.errors import UserError
from peagle.kernels.attention.kv_write import kv_write
from peagle.kernels.attention.paged_attention import AttentionShape, PagedAttentionConfig
from peagle.kernels.launch import DeviceLimits
from peagle.models.target import TargetModel
from tests.attention.paged_cases import FP8, SCALING, PagedCase

pytest.importorskip("triton", reason="needs triton")
SOURCE = Path(__file__).resolve().parents[2] / "src"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not 1")
DEVICES = [
    pytest.param("cpu", marks=needs_interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def run(
    case: PagedCase,
    prepared: TritonPreparedAttention,
    cache: LayerKVCache,
    window: int | None = None,
    **special: Any,
) -> Tensor:
    return prepared(
        case.padded(case.query_THd),
        *(case.padded(x) for x in case.new_kv()),
        cache,
        scaling=SCALING,
        sliding_window=window,
        **special,
    )


def small_config(shape: AttentionShape, limits: DeviceLimits) -> PagedAttentionConfig:
    return PagedAttentionConfig(16, 16, num_splits=2, num_warps=4, num_stages=2)


def wide_config(shape: AttentionShape, limits: DeviceLimits) -> PagedAttentionConfig:
    return PagedAttentionConfig(32, 16, num_splits=3, num_warps=4, num_stages=2)


# ---- as the torch backend ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("one_launch", [True, False])
@pytest.mark.parametrize(
    ("past", "new"),
    [([9, 33], [1, 1]), ([20, 3], [5, 2]), ([0], [40]), ([64, 0, 7], [1, 18, 0])],
)
def test_writes_and_attends(past: list[int], new: list[int], one_launch: bool, device: str) -> None:
    starts = [p // 2 for p in past]
    case = PagedCase(past, new, device=device, padding_rows=4, padding_sequences=2, starts=starts)
    cache = case.make_cache(with_new=False)
    special = {"sinks": case.sinks(), "softcap": 9.0}
    backend = TritonAttention(one_launch=one_launch)
    out = run(case, backend.prepare(case.metadata()), cache, 7, **special)
    case.check(out, case.reference(7, **special))
    # The cache holds the new keys and values, and nothing else has changed.
    written = case.make_cache(with_new=True)
    for found, expected in ((cache.keys, written.keys), (cache.values, written.values)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("one_launch", [True, False])
@pytest.mark.parametrize(("past", "new"), [([20, 3], [5, 2]), ([0, 9], [40, 1])])
def test_8bit_cache(past: list[int], new: list[int], one_launch: bool, device: str) -> None:
    case = PagedCase(past, new, cache_dtype=FP8, device=device, padding_rows=4)
    case.key_scale, case.value_scale = 0.05, 0.02
    cache = case.make_cache(with_new=False)
    out = run(case, TritonAttention(one_launch=one_launch).prepare(case.metadata()), cache)
    case.check(out, case.reference())
    written = case.make_cache(with_new=True)
    for found, expected in ((cache.keys, written.keys), (cache.values, written.values)):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [None, FP8], ids=["float32", "FP8"])
def test_writes_alone(dtype: torch.dtype | None, device: str) -> None:
    options = {} if dtype is None else {"cache_dtype": dtype}
    case = PagedCase([20, 3], [5, 2], device=device, padding_rows=4, **options)
    if dtype is not None:
        case.key_scale, case.value_scale = 0.05, 0.02
    cache, written = case.make_cache(with_new=False), case.make_cache(with_new=True)
    prepared = TritonAttention().prepare(case.metadata())
    prepared.write(*(case.padded(x) for x in case.new_kv()), cache)
    for found, expected in ((cache.keys, written.keys), (cache.values, written.values)):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_takes_one_launch(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    writes = []

    def count(*args: Any, **scales: float) -> None:
        writes.append(args)
        kv_write(*args, **scales)

    monkeypatch.setattr(triton_backend, "kv_write", count)
    for queries, one_launch, expected in ((8, True, 0), (8, False, 1), (65, True, 1)):
        writes.clear()
        case = PagedCase([20, 3], [queries, 2], device=device)
        prepared = TritonAttention(wide_config, one_launch=one_launch).prepare(case.metadata())
        out = run(case, prepared, case.make_cache(with_new=False))
        case.check(out, case.reference())
        assert len(writes) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_layers_of_one_pass_may_differ(device: str) -> None:
    """In windows, heads and sizes; those of one shape share the workspace, and only those."""
    shapes = [(2, 64), (1, 64), (2, 80), (2, 64)]
    cases = [
        PagedCase([7, 20], [4, 1], num_kv_heads=h, head_dim=d, device=device) for h, d in shapes
    ]
    prepared = TritonAttention(small_config).prepare(cases[0].metadata())
    workspaces = []
    for window in (None, 3):
        for case in cases:
            out = run(case, prepared, cache := case.make_cache(with_new=False), window)
            case.check(out, case.reference(window))
            workspaces.append(prepared._plan(case.query_THd, cache).workspace)
    assert len({id(workspace) for workspace in workspaces}) == 3
    assert workspaces[0] is workspaces[3] is workspaces[4]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scales", [None, (0.05, 0.2)], ids=["float32", "FP8"])
def test_a_model_runs_over_it(
    target_folder: Path, device: str, scales: tuple[float, float] | None
) -> None:
    """Two prompts, then several tokens each, over an unmodified transformers model."""
    target = TargetModel.load(target_folder, dtype=torch.float32, device=device)
    if scales is not None:
        target.round_kv(dict.fromkeys(range(target.num_layers), scales))
    tokens = torch.randint(2, 250, (2, 30), generator=torch.Generator().manual_seed(0)).to(device)
    tables = torch.randperm(8, generator=torch.Generator().manual_seed(0)).view(2, 4).to(device)
    hidden = []
    for backend in (TorchAttention(), TritonAttention()):
        target.set_kv_caches(target.make_kv_caches(8, 8))
        for first, last in ((0, 23), (23, 28), (28, 30)):
            count = last - first
            position = torch.arange(first, last, device=device).repeat(2)
            blocks = tables.repeat_interleave(count, 0).gather(1, (position // 8)[:, None])
            metadata = AttentionMetadata(
                query_start_loc=torch.arange(3, device=device) * count,
                seq_lens_B=torch.full((2,), last, device=device),
                block_tables_BM=tables,
                slots_T=blocks.squeeze(1) * 8 + position % 8,
                max_query_len=count,
                max_seq_len=last,
            )
            with torch.inference_mode():
                out, _ = target.forward(
                    tokens[:, first:last].flatten(), position, backend.prepare(metadata)
                )
            hidden.append(out)
    for expected, found in zip(hidden[:3], hidden[3:]):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# ---- refusals ----


def test_it_is_imported_without_triton() -> None:
    code = "import peagle.attention.triton_backend as b; b.TritonAttention()\n"
    code = f"import sys; sys.modules['triton'] = None\n{code}"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, env=environment, timeout=120).returncode == 0


@pytest.fixture
def fresh_checks():
    check_device.cache_clear()
    yield
    check_device.cache_clear()


@pytest.mark.usefixtures("fresh_checks")
@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("no triton", ("not installed", "pip install triton")),
        ("no interpreter", ('"cpu"', "NVIDIA GPU", "torch backend")),
        ("an old GPU", ("Tesla T4", "7.5", "8.0", "torch backend")),
        ("ROCm", ("Tesla T4 runs ROCm", "expects an NVIDIA GPU", "torch backend")),
    ],
)
def test_devices_that_cannot_run_it(
    case: str, named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "no triton":
        monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "hip", "7.0" if case == "ROCm" else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(UserError) as error:
        check_device(torch.device("cuda" if case in ("an old GPU", "ROCm") else "cpu"))
    assert all(text in str(error.value) for text in named)


SHAPE = AttentionShape(1, 1, 1, 8, 2, 64, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"head_dim": 520}, ("520", "at most 512")),
        ({"head_dim": 512, "query_dtype": torch.float32}, ("512", "at most 256", "bfloat16")),
        ({"num_heads": 7}, ("7 query heads", "multiple")),
        ({"num_heads": 512}, ("512", "128")),
        ({"query_dtype": torch.float64, "cache_dtype": torch.float64}, ("float64", "bfloat16")),
    ],
)
def test_layers_beyond_the_kernels(changes: dict[str, Any], named: tuple[str, ...]) -> None:
    check_layer(SHAPE)
    with pytest.raises(UserError) as error:
        check_layer(dataclasses.replace(SHAPE, **changes))
    for text in named:
        assert text in str(error.value)


# ---- what only a card can do ----


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 8, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_pass_serves_other_batches(dtype: torch.dtype, queries: int) -> None:
    """One graph, replayed over batches of other lengths, tables and padding; no host wait."""
    many: dict[str, Any] = {"num_heads": 8, "head_dim": 128, "dtype": dtype, "device": "cuda"}
    full = PagedCase([900, 0, 2000, 33], [queries] * 4, seed=1, **many)
    half = max(1, queries // 2)
    ragged = [half, queries]
    other = PagedCase(
        [1500, 4],
        ragged,
        seed=2,
        padding_rows=4 * queries - sum(ragged),
        padding_sequences=2,
        **many,
    )
    assert other.num_blocks <= full.num_blocks
    width = 160
    metadata = full.metadata()
    tables = torch.zeros(4, width, dtype=torch.int64, device="cuda")
    static = dataclasses.replace(metadata, block_tables_BM=tables, max_seq_len=width * 16)
    cache = full.make_cache(with_new=False)
    query, (key, value) = full.query_THd.clone(), full.new_kv()
    sinks = full.sinks()

    def step() -> Tensor:
        return prepared(query, key, value, cache, scaling=SCALING, sinks=sinks)

    def fill(case: PagedCase) -> None:
        found = case.metadata()
        for name in ("query_start_loc", "seq_lens_B", "slots_T"):
            getattr(static, name).copy_(getattr(found, name))
        tables.fill_(case.num_blocks)
        tables[:, : found.block_tables_BM.shape[1]] = found.block_tables_BM
        for static_rows, rows in zip((query, key, value), (case.query_THd, *case.new_kv())):
            static_rows.copy_(case.padded(rows))
        fresh = case.make_cache(with_new=False)
        cache.keys[: len(fresh.keys)] = fresh.keys
        cache.values[: len(fresh.values)] = fresh.values

    prepared = TritonAttention().prepare(static)
    fill(full)
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for case in (full, other, full):
        fill(case)
        out.fill_(torch.nan)
        graph.replay()
        case.check(out, case.reference(sinks=sinks))
