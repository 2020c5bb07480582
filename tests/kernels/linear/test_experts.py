"""Grouped products of experts in Triton against plain torch; on a CPU under the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.linear.experts import (
    ExpertWeights,
    Gate,
    GroupedConfig,
    can_use_registers,
    choose_config,
    experts_of_many,
    fitting_stages,
    grouped_product,
    grouped_product_reference,
    max_registers,
    max_tiles,
    plan_tiles,
    run_experts,
    run_experts_reference,
    uses_library,
    weighted_sum,
)
from peagle.kernels.linear.packed_linear import packed_linear
from peagle.kernels.linear.packed_weights import (
    PackedWeight,
    make_fp8,
    make_int4,
    make_mxfp4,
    pack_fp8,
    pack_int4,
    pack_int8,
)
from tests.kernels.devices import DEVICES, INTERPRETED, compile_for_card
from tests.kernels.gluon_in_torch import launcher_of

pytest.importorskip("triton", reason="needs triton")
FP8 = ["fp8", "fp8 128", "fp8 channel", "fp8 tensor"]
FORMATS = ["plain", *FP8, "int8", "int4", "int4 zeros", "mxfp4"]
GATES = [
    None,
    Gate("clamped", 1.702, 0.4),
    Gate("gelu_tanh"),
]


def pack_mxfp4(weight: Tensor) -> PackedWeight:
    """Quantise [..., N, K] to "mxfp4": the largest magnitude of 32 inputs decides their scale."""
    groups = weight.float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1)
    exponent = torch.floor(torch.log2(largest.clamp_min(2.0**-120))) - 2
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = (groups * torch.exp2(-exponent)[..., None]).flatten(-2)
    q = (scaled.abs()[..., None] - values).abs().argmin(-1).to(torch.uint8)
    q |= (scaled < 0).to(torch.uint8) << 3
    return make_mxfp4(q, (exponent + 127).to(torch.uint8))


def make_weight(format: str, *shape: int, device: str, dtype: torch.dtype) -> PackedWeight:
    weight = torch.randn(*shape) / shape[-1] ** 0.5
    if format == "plain":
        return PackedWeight(weight.to(device, dtype))
    packed = {
        "fp8": lambda: pack_fp8(weight, (32, 32)),
        "fp8 128": lambda: pack_fp8(weight, (128, 128)),
        "fp8 channel": lambda: pack_fp8(weight, (1, shape[-1])),
        "fp8 tensor": lambda: pack_fp8(weight, (shape[-2], shape[-1])),
        "int8": lambda: pack_int8(weight, (1, shape[-1])),
        "int4": lambda: pack_int4(weight, 32),
        "int4 zeros": lambda: pack_int4(weight, 32),
        "mxfp4": lambda: pack_mxfp4(weight),
    }[format]()
    zero = None
    if format == "int4 zeros":
        assert packed.scale is not None
        zero = torch.randint(0, 16, packed.scale.shape, dtype=torch.uint8)
        zero = zero.to(device).mT.contiguous().mT
    scale = None if packed.scale is None else packed.scale.to(device)
    return replace(packed, data=packed.data.to(device), scale=scale, zero=zero)


def check(found: Tensor, expected: Tensor) -> None:
    assert found.isfinite().all()
    bound = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[found.dtype]
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < bound


# ---- packing ----


def test_unpacks_what_the_format_says() -> None:
    q = torch.arange(64, dtype=torch.uint8).remainder(16).view(1, 64)
    scale = torch.tensor([[128, 126]], dtype=torch.uint8)  # 2 and 1/2
    found = make_mxfp4(q, scale).unpack(torch.float32)[0]
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    numbers = torch.tensor([*e2m1, *(-x for x in e2m1)])
    assert torch.equal(found, torch.cat([numbers * 2, numbers * 2, numbers / 2, numbers / 2]))
    halves, zero = torch.tensor([[0.5, 2.0]]), torch.tensor([[3, 15]], dtype=torch.uint8)
    q_16 = torch.arange(16.0).repeat(2)
    found = make_int4(q, halves, None, 32).unpack(torch.float32)[0]
    assert torch.equal(found, torch.cat([(q_16 - 8) / 2, (q_16 - 8) * 2]))
    found = make_int4(q, halves, zero, 32).unpack(torch.float32)[0]
    assert torch.equal(found, torch.cat([(q_16 - 3) / 2, (q_16 - 15) * 2]))


def test_fp8_unpacks_to_the_plain_numbers() -> None:
    """Every number of e4m3, and rows and inputs that fill no tile."""
    torch.manual_seed(0)
    every = torch.arange(256, dtype=torch.uint8).view(2, 128).view(torch.float8_e4m3fn)
    found = make_fp8(every, torch.full((1, 1), 0.5), (2, 128)).unpack(torch.float32)
    assert torch.equal(found.nan_to_num(-1), (every.float() / 2).nan_to_num(-1))
    for n, k in ((1, 1), (64, 128), (70, 17), (200, 300)):
        q = torch.randn(3, n, k).to(torch.float8_e4m3fn)
        weight = make_fp8(q, torch.full((3, 1, 1), 2.0), (n, k))
        assert (weight.num_outputs, weight.num_inputs) == (n, k)
        assert weight.data.shape[1:] == (-(-n // 64), 2 * -(-k // 128), 64, 64)
        assert torch.equal(weight.unpack(torch.float32), q.float() * 2)


def test_threads_find_what_the_matrix_unit_wants_of_them() -> None:
    """The operand of 16 inputs has in thread t of a row the inputs 2t, 2t + 1, 8 + 2t and 9 + 2t;
    instructions of the kernels make them of a word.
    """
    torch.manual_seed(0)
    q = (torch.randn(70, 300) * 0.1).to(torch.float8_e4m3fn)
    weight = make_fp8(q, torch.ones(1, 1), (70, 300))
    word = weight.data.view(torch.int32).long() & 0xFFFFFFFF  # rows of tiles, tiles, rows, words
    first = (word & 0x80008000) | (word >> 4 & 0x07F007F0)
    last = (word << 8 & 0x80008000) | (word << 4 & 0x07F007F0)
    pairs = torch.stack([first, last], -1).to(torch.int32).view(torch.bfloat16)
    numbers = pairs * torch.tensor(0x7B80, dtype=torch.int16).view(torch.bfloat16)
    for row, k, thread in ((0, 0, 0), (5, 16, 1), (63, 112, 3), (69, 272, 2), (17, 288, 1)):
        inputs = [k + 2 * thread + i for i in (0, 1, 8, 9)]
        place = row // 64, k // 64, row % 64, 4 * thread + k // 16 % 4
        assert torch.equal(numbers[place].float(), q[row, inputs].float())


@pytest.mark.parametrize("format", FORMATS[1:])
@pytest.mark.parametrize(("n", "other"), [(70, 45), (128, 64), (128, 128)])
def test_rows_of_weights_can_be_joined(format: str, n: int, other: int) -> None:
    torch.manual_seed(1)
    kind = {"device": "cpu", "dtype": torch.float32}
    weights = [make_weight(format, rows, 160, **kind) for rows in (n, other)]
    joined = PackedWeight.concatenate(weights)
    expected = torch.cat([w.unpack(torch.float32) for w in weights])
    assert (joined.num_outputs, joined.num_inputs) == expected.shape
    assert torch.equal(joined.unpack(torch.float32), expected)
    stacked = PackedWeight.stack([joined, joined])
    flipped = stacked.with_rows(lambda rows: rows.flip(1))
    assert torch.equal(flipped.expert(1).unpack(torch.float32), expected.flip(0))


@pytest.mark.parametrize(
    ("format", "bound"),
    [("fp8", 0.04), ("fp8 channel", 0.04), ("int8", 0.015), ("int4", 0.1), ("mxfp4", 0.2)],
)
def test_packing_keeps_the_weight(format: str, bound: float) -> None:
    torch.manual_seed(3)
    packed = make_weight(format, 3, 70, 64, device="cpu", dtype=torch.float32)
    torch.manual_seed(3)
    weight = torch.randn(3, 70, 64) / 8
    assert (packed.unpack(torch.float32) - weight).norm() / weight.norm() < bound
    assert packed.num_inputs == 64


# ---- the plan ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("count", "experts", "rows"),
    [(1, 3, 16), (7, 5, 4), (64, 128, 16), (300, 32, 16), (4096, 6, 64), (5000, 9, 32)],
)
@pytest.mark.parametrize("skewed", [False, True])
def test_every_assignment_is_in_one_tile_of_its_expert(
    count: int, experts: int, rows: int, skewed: bool, device: str
) -> None:
    torch.manual_seed(count)
    index = torch.randint(experts, (count,))
    if skewed:
        index = torch.full((count,), experts - 1)
    most = max_tiles(count, experts, rows)
    plan = plan_tiles(index.to(device), experts, rows).cpu()
    order, tiles = plan[:count], plan[count:].view(3, most)
    assert sorted(order.tolist()) == list(range(count))
    found: list[int] = []
    for expert, first, last in tiles.T.tolist():
        if expert >= 0:
            assert 0 < last - first <= rows
            assert (index[order[first:last].long()] == expert).all()
            found += range(first, last)
    assert sorted(found) == list(range(count))
    needed = sum(-(-int(n) // rows) for n in index.bincount())
    assert int((tiles[0] >= 0).sum()) == needed


def plan_in_torch(index_S: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """The assignments in order, and of every tile its expert, first and last place, [3, tiles]."""
    order = torch.sort(index_S, stable=True).indices
    tiles, first = [], 0
    for expert, count in enumerate(index_S.bincount(minlength=experts).tolist()):
        end = first + count
        tiles += [(expert, at, min(at + rows, end)) for at in range(first, end, rows)]
        first = end
    return order, torch.tensor(tiles).T


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("count", "experts", "rows"),
    [
        (1, 1, 16),
        (129, 40, 8),
        (4096, 17, 32),
        (4097, 1, 64),
        (4097, 130, 8),
        (5000, 300, 16),
        (16_384, 128, 128),
        (20_481, 5, 16),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_plans_equal_those_of_torch(
    count: int, experts: int, rows: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(count)
    index = torch.randint(experts, (count,), dtype=dtype)
    index[index % 3 == 1] = 0  # some experts have no tokens
    plan = plan_tiles(index.to(device), experts, rows).cpu()
    found = plan[count:].view(3, -1)
    order, tiles = plan_in_torch(index, experts, rows)
    num_tiles = tiles.shape[1]
    assert torch.equal(found[:, :num_tiles].long(), tiles) and (found[0, num_tiles:] == -1).all()
    for expert in range(experts):  # their order is left to chance
        own = index[order] == expert
        assert torch.equal(plan[:count][own].sort().values.long(), order[own])


# ---- products ----

CONFIGS = [
    GroupedConfig(16, 16, 32, 1, 4, 2),
    GroupedConfig(32, 32, 32, 2, 4, 3),
    GroupedConfig(8, 32, 32, 2, 2, 3, kind="wx"),
    GroupedConfig(16, 16, 32, 1, 4, 2, split_k=4),
    GroupedConfig(8, 16, 32, 1, 1, 3, split_k=2, kind="wx"),
]
IN_REGISTERS = [
    *(("mxfp4", gate) for gate in (*GATES, Gate("silu"))),
    *((format, Gate("silu")) for format in FP8[1:]),
    ("fp8 128", None),
]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    ("format", "gate"), [*((f, Gate("silu")) for f in FORMATS), *(("mxfp4", g) for g in GATES)]
)
def test_grouped_product_equals_the_reference(
    gate: Gate | None, format: str, config: GroupedConfig, device: str
) -> None:
    torch.manual_seed(1)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    weight = make_weight(format, 5, 72, 96, device=device, dtype=dtype)
    bias = torch.randn(5, 72).to(device, dtype)
    x = torch.randn(7, 96).to(device, dtype)
    index = torch.randint(4, (14,), device=device)  # no token goes to the last
    plan = plan_tiles(index, 5, config.block_m)
    found = grouped_product(
        x, weight, bias, gate, index_S=index, plan=plan, chosen=2, config=config
    )
    exact = weight.unpack(torch.float64), bias.double()
    expected = grouped_product_reference(x.double(), PackedWeight(exact[0]), exact[1], gate, index)
    check(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        GroupedConfig(8, 64, 32, 1, 4, 3, kind="registers"),
        GroupedConfig(16, 32, 32, 1, 2, 2, kind="registers"),
        GroupedConfig(32, 16, 32, 1, 1, 3, kind="registers"),
        GroupedConfig(8, 32, 32, 1, 1, 3, kind="registers", split_k=3),
        GroupedConfig(8, 32, 32, 1, 4, 3, kind="warpgroup"),
        GroupedConfig(32, 64, 32, 1, 4, 3, kind="warpgroup", split_k=3),
        GroupedConfig(64, 32, 32, 1, 4, 3, kind="warpgroup"),
        GroupedConfig(128, 64, 32, 1, 8, 2, kind="warpgroup"),
        GroupedConfig(64, 64, 32, 1, 8, 3, kind="warpgroup", split_k=3),
    ],
    ids=str,
)
@pytest.mark.parametrize(("format", "gate"), IN_REGISTERS, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 129])
@pytest.mark.parametrize("k", [96, 256, 2880])
def test_products_in_registers_equal_the_reference(
    format: str, config: GroupedConfig, gate: Gate | None, tokens: int, k: int
) -> None:
    torch.manual_seed(1)
    weight = make_weight(format, 5, 152, k, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(5, 152).to("cuda", torch.bfloat16)
    x = torch.randn(tokens, k).to("cuda", torch.bfloat16)
    assert can_use_registers(x, weight) == (torch.cuda.get_device_capability()[0] == 9)
    index = torch.randint(4, (2 * tokens,), device="cuda")
    exact = PackedWeight(weight.unpack(torch.float64)), bias.double()
    for plan in (None, plan_tiles(index, 5, config.block_m)):
        found = grouped_product(
            x, weight, bias, gate, index_S=index, plan=plan, chosen=2, config=config
        )
        check(found, grouped_product_reference(x.double(), *exact, gate, index))
    found = grouped_product(x, weight.expert(0), bias[0], gate, config=config)
    alone = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    check(found, grouped_product_reference(x.double(), *exact, gate, alone))


@pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not 1")
@pytest.mark.parametrize(
    "config",
    [
        GroupedConfig(8, 32, 32, 1, 1, 3, kind="registers", split_k=3),
        GroupedConfig(32, 64, 32, 1, 4, 2, kind="warpgroup"),
    ],
    ids=str,
)
@pytest.mark.parametrize(("format", "gate"), IN_REGISTERS, ids=str)
def test_products_in_registers_say_what_the_reference_says(
    monkeypatch: pytest.MonkeyPatch, format: str, gate: Gate | None, config: GroupedConfig
) -> None:
    torch.manual_seed(1)
    kind: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16}
    weight = make_weight(format, 4, 152, 416, **kind)
    bias, x = torch.randn(4, 152).to(**kind), torch.randn(9, 416).to(**kind)
    index = torch.randint(3, (18,))  # no token goes to the last
    plan = plan_tiles(index, 4, config.block_m)
    in_torch = launcher_of("peagle.kernels.linear.packed_gluon", "packed_kernel")
    monkeypatch.setattr("peagle.kernels.linear.experts.launch", in_torch)
    exact = PackedWeight(weight.unpack(torch.float64)), bias.double()
    found = grouped_product(
        x, weight, bias, gate, index_S=index, plan=plan, chosen=2, config=config
    )
    check(found, grouped_product_reference(x.double(), *exact, gate, index))
    found = grouped_product(x[:1], weight, bias, gate, index_S=index[:1], config=config)
    check(found, grouped_product_reference(x[:1].double(), *exact, gate, index[:1]))
    found = grouped_product(x, weight.expert(0), bias[0], gate, config=config)
    check(found, grouped_product_reference(x.double(), *exact, gate, index[:9] * 0))


@pytest.mark.parametrize("format", ["fp8 128", "fp8 channel", "mxfp4"])
@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("rows", [1, 10, 30, 60, 200])
def test_products_take_every_choice(
    rows: int, experts: int, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configurations that `choose_config` finds for a card compute what they should."""
    torch.manual_seed(rows)
    kind: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16}
    weight, x = make_weight(format, experts, 64, 256, **kind), torch.randn(rows, 256).to(**kind)
    index, config = (
        torch.randint(experts, (rows,)),
        choose_config(rows, experts, weight, registers=True),
    )
    in_torch = launcher_of("peagle.kernels.linear.packed_gluon", "packed_kernel")
    plan = plan_tiles(index, experts, config.block_m)
    monkeypatch.setattr("peagle.kernels.linear.experts.launch", in_torch)
    exact, given = PackedWeight(weight.unpack(torch.float64)), (None, None)
    if experts == 1:
        found = grouped_product(x, weight.expert(0), config=config)
    else:
        found = grouped_product(x, weight, index_S=index, plan=plan, config=config)
    check(found, grouped_product_reference(x.double(), exact, *given, index))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "k"), [(1, 96), (17, 32), (129, 160)])
def test_one_weight_is_a_linear_layer(rows: int, k: int, format: str, device: str) -> None:
    torch.manual_seed(2)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    weight = make_weight(format, 40, k, device=device, dtype=dtype)
    bias = torch.randn(40).to(device, dtype)
    wide = torch.full((rows, k + 8), torch.nan, device=device, dtype=dtype)
    wide[:, :k] = torch.randn(rows, k)
    x = wide[:, :k]
    config = GroupedConfig(16, 16, 32, 1, 4, 2, split_k=2)
    found = grouped_product(x, weight, bias, config=config)
    check(found, F.linear(x.double(), weight.unpack(torch.float64), bias.double()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", ["plain", "fp8 128", "mxfp4"])
@pytest.mark.parametrize(("tokens", "chosen"), [(1, 1), (1, 4), (3, 2), (17, 4), (129, 2)])
@pytest.mark.parametrize("routing", ["random", "one expert"])
def test_experts_equal_the_reference(
    tokens: int, chosen: int, routing: str, format: str, device: str
) -> None:
    torch.manual_seed(tokens)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    experts = ExpertWeights(
        make_weight("plain", 6, 96, 64, device=device, dtype=dtype),
        make_weight("plain", 6, 64, 48, device=device, dtype=dtype),
        Gate("silu"),
    )
    if format != "plain":
        experts = ExpertWeights(
            make_weight(format, 6, 128, 64, device=device, dtype=dtype),
            make_weight(format, 6, 64, 64, device=device, dtype=dtype),
            Gate("clamped", 1.702, 7.0),
            torch.randn(6, 128).to(device, dtype),
            torch.randn(6, 64).to(device, dtype),
        )
    x = torch.randn(tokens, 64).to(device, dtype)
    index = torch.stack([torch.randperm(6)[:chosen] for _ in range(tokens)]).to(device)
    if routing == "one expert":
        index = torch.full((tokens, chosen), 5, device=device)
    weights = torch.rand(tokens, chosen).to(device, dtype)
    found = run_experts(x, index, weights, experts)
    exact = ExpertWeights(
        PackedWeight(experts.gate_up.unpack(torch.float64)),
        PackedWeight(experts.down.unpack(torch.float64)),
        experts.gate,
        None if experts.gate_up_bias is None else experts.gate_up_bias.double(),
        None if experts.down_bias is None else experts.down_bias.double(),
    )
    check(found, run_experts_reference(x.double(), index, weights.double(), exact))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", ["plain", "fp8", "int4 zeros", "mxfp4"])
@pytest.mark.parametrize("gate", [*GATES[1:], Gate("silu")], ids=str)
def test_the_library_multiplies_many_rows(format: str, gate: Gate, device: str) -> None:
    torch.manual_seed(6)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    has_bias = gate.activation == "clamped"
    experts = ExpertWeights(
        make_weight(format, 5, 192, 64, device=device, dtype=dtype),
        make_weight(format, 5, 64, 96, device=device, dtype=dtype),
        gate,
        torch.randn(5, 192).to(device, dtype) if has_bias else None,
        torch.randn(5, 64).to(device, dtype) if has_bias else None,
    )
    x = torch.randn(45, 64).to(device, dtype)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(45)]).to(device)  # none is 4
    weights = torch.rand(45, 2).to(device, dtype)
    many = 5 * (1024 if format == "mxfp4" else 256)
    assert uses_library(x, experts.gate_up, many) == (device == "cuda")
    assert not uses_library(x, experts.gate_up, many - 1)
    found = weighted_sum(experts_of_many(x, index.view(-1), experts, 2), weights)
    check(found, run_experts_reference(x, index, weights, experts))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "chosen", "n"), [(1, 8, 2048), (3, 4, 700), (17, 1, 6), (0, 2, 8)]
)
def test_sums_of_a_token_are_weighted(
    tokens: int, chosen: int, n: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(3)
    y_SN = torch.randn(tokens * chosen, n).to(device, dtype)
    weight_TC = torch.rand(chosen, tokens).to(device, dtype).T  # not contiguous
    expected = torch.einsum("tcn,tc->tn", y_SN.view(tokens, chosen, n).double(), weight_TC.double())
    torch.testing.assert_close(weighted_sum(y_SN, weight_TC), expected.to(dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_half_precision_takes_no_assembly(device: str) -> None:
    torch.manual_seed(4)
    for format in FORMATS:
        weight = make_weight(format, 40, 96, device=device, dtype=torch.float16)
        x = torch.randn(5, 96).to(device, torch.float16)
        found = grouped_product(x, weight, config=GroupedConfig(16, 16, 32, 1, 4, 2))
        check(found, F.linear(x.double(), weight.unpack(torch.float64)))


@pytest.mark.slow
def test_a_compiler_sees_operators() -> None:
    """Layers with experts are compiled whole; shapes may be filled in later."""
    torch.manual_seed(5)
    made = {"device": "cpu", "dtype": torch.float32}
    experts = ExpertWeights(
        make_weight("mxfp4", 6, 128, 64, **made),
        make_weight("mxfp4", 6, 64, 64, **made),
        Gate("silu"),
    )
    linear = make_weight("fp8", 40, 64, **made)

    def run(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return packed_linear(run_experts(x, index, weights, experts) + x, linear)

    compiled = torch.compile(run, backend="eager", fullgraph=True, dynamic=True)
    for tokens in (1, 5):
        x, weights = torch.randn(tokens, 64), torch.rand(tokens, 2)
        index = torch.randint(6, (tokens, 2))
        assert torch.equal(compiled(x, index, weights), run(x, index, weights))


@pytest.mark.parametrize("device", DEVICES)
def test_products_with_tiles_of_unlike_heights(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    torch.manual_seed(5)
    made = {"device": device, "dtype": torch.float32 if device == "cpu" else torch.bfloat16}
    experts = ExpertWeights(
        make_weight("fp8", 2, 64, 64, **made), make_weight("fp8", 2, 64, 32, **made), Gate("silu")
    )
    configs = [GroupedConfig(32, 16, 32, 1, 4, 2), GroupedConfig(8, 16, 32, 1, 1, 2, kind="wx")]
    given = iter(configs)
    monkeypatch.setattr("peagle.kernels.linear.experts.choose_config", lambda *_, **__: next(given))
    x = torch.randn(23, 64).to(**made)
    index, weights = torch.randint(2, (23, 2), device=device), torch.rand(23, 2, device=device)
    found = run_experts(x, index, weights, experts)
    check(found, run_experts_reference(x, index, weights, experts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", ["plain", "fp8", "int4", "mxfp4"])
@pytest.mark.parametrize("assignments", [1, 8, 100, 300, 3000, 30_000])
@pytest.mark.parametrize("experts", [1, 32])
def test_configurations_fit_into_a_card(
    experts: int, assignments: int, format: str, dtype: torch.dtype
) -> None:
    weight = make_weight(format, 128, 512, device="cpu", dtype=dtype)
    config = choose_config(assignments, experts, weight)
    x = torch.empty(1, dtype=dtype)
    for shared_bytes in (99 * 1024, 227 * 1024) if dtype == torch.bfloat16 else (227 * 1024,):
        stages = fitting_stages(config, x, weight, shared_bytes)
        inputs = config.step * config.steps
        weight_bytes = weight.data.nbytes / 128 / 512 * inputs
        stage = config.block_m * inputs * dtype.itemsize + 2 * config.block_n * weight_bytes
        assert stages * stage <= shared_bytes
        assert stages == config.num_stages or (stages + 1) * stage > shared_bytes


@pytest.mark.slow
@pytest.mark.parametrize("format", ["fp8 128", "fp8 channel", "mxfp4"])
def test_a_linear_layer_is_cut_for_its_rows(format: str) -> None:
    weight = make_weight(format, 2048, 4096, device="cpu", dtype=torch.bfloat16)
    for rows in (1, 8, 17, 64, 65, 128, 129, 512):
        config = choose_config(rows, 1, weight, registers=True)
        most = 1 if rows <= 32 else 4
        assert -(-min(rows, 256) // config.block_m) <= most, "every tile reads the weight again"
        tiles = -(-rows // config.block_m) * 2048 // (2 * config.block_n)
        assert tiles * config.split_k >= 128, "as many programs as an H100 has multiprocessors"
        threads = 32 * config.num_warps
        assert all(max_registers(config, parts) * threads <= 1 << 16 for parts in (False, True))


@pytest.mark.slow
def test_plans_compile_for_a_card() -> None:
    found = compile_for_card("plans")
    assert len(found) == 3 * 3
    assert {name: needs["stack"] for name, needs in found.items() if needs["stack"]} == {}


@pytest.mark.slow
def test_kernels_compile_for_a_card() -> None:
    """The interpreter takes what compilers refuse; no card is needed to see that."""
    found = compile_for_card("experts")
    assert len(found) == 2 * 5 + 2 + 2 * 7 + 2 * 2
    for name, needs in found.items():
        assert needs["mma"] and needs["shared"] <= 227 * 1024, name
        if "registers" in name or "warpgroup" in name:
            assert needs["stack"] == 0, f"{name} has too few registers"
            assert needs["wgmma"] == ("warpgroup" in name), name
