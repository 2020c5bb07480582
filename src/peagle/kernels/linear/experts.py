"""Experts of a mixture in Triton: the plan, the grouped products, and the operators for compilers.

    y[t] = sum over i of weight[t, i] * down(act(gate_up(x[t]))) of expert index[t, i]

Assignments of tokens to experts are ordered by expert on the device, and cut into tiles that read
the weight of their expert once. Nothing waits for the host, and every size follows from shapes, so
that a CUDA graph can hold it all. `grouped_product` with one expert and no plan is the product of
a packed linear layer. With many assignments FP8 weights may multiply FP8 activations.

Shapes: T tokens, C experts chosen for each, S = T * C assignments, E experts, H width, I width
between the two products, N outputs and K inputs of a product.
"""

from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.launch import (
    MAX_ARRIVALS,
    DeviceLimits,
    arrivals,
    launch,
    overlapping,
    power_of_two,
)
from peagle.kernels.linear.fp8_activations import QuantisedRows, quantise
from peagle.kernels.linear.fp8_linear import fits_fp8
from peagle.kernels.linear.packed_weights import FORMATS, FOUR_BIT_FORMATS, STEP, PackedWeight
from peagle.kernels.linear.unpacking import (
    can_use_assembly,
    has_assembly,
    shared_inputs,
    unpack_weight,
)

Kind = Literal["xw", "wx", "registers", "warpgroup"]
Activation = Literal["none", "silu", "clamped", "gelu_tanh"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
_MIN_INPUTS = 512  # of a share of a sum
# Assignments of an expert on average, from which on the library multiplies.
_LIBRARY_ROWS = 256
_MANY_IN_REGISTERS = 1024
# Assignments of an expert on average, from which on FP8 activations are used where they may: with
# fewer, rounding takes longer than it saves (docs/lab/roofline.md).
_FP8_ROWS = 1
_WIDE = 8192  # outputs of a linear layer that keep the memory busy in tiles of many rows
_REGISTERS = 1 << 16  # of a multiprocessor
_ALIGNED = 16  # bytes of a copy, and what Triton looks for in a number
_EPILOGUE_OUTPUTS = 1024  # outputs that one program finishes
_SUM_OUTPUTS = 512  # outputs of a token that one program sums
_MAX_PLANNED = 4096  # assignments that one program orders
_PLANNED_BLOCK = 1024  # of more, assignments of each program


@dataclass(frozen=True, slots=True)
class Gate:
    """The activation between the two products.

    Attributes:
        activation: "silu" and "gelu_tanh" are act(gate) * up; "clamped" is gpt-oss's
            (up + 1) * gate * sigmoid(alpha * gate), with gate up to `limit` and up within it.
        alpha, limit: of "clamped".
    """

    activation: Activation
    alpha: float = 0.0
    limit: float = 0.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Compute the activation of [S, 2I], all gates first, in plain torch, [S, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        if self.activation == "silu":
            return F.silu(gate) * up
        if self.activation == "gelu_tanh":
            return F.gelu(gate, approximate="tanh") * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of one layer's experts.

    Attributes:
        gate_up: [E, 2I, H]; down: [E, H, I].
        gate: what happens between them.
        gate_up_bias: [E, 2I]; down_bias: [E, H]; None: there is none.
        fp8_activations: round activations to FP8 where `uses_fp8` says so; the weights must be
            those of `fits_fp8`, the gate "silu", and there is no bias.
    """

    gate_up: PackedWeight
    down: PackedWeight
    gate: Gate
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    fp8_activations: bool = False

    def __post_init__(self) -> None:
        if self.fp8_activations:
            assert fits_fp8(self.gate_up) and fits_fp8(self.down)
            assert self.gate.activation == "silu"
            assert self.gate_up_bias is None and self.down_bias is None


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """How a grouped product is cut. `steps` is any number, the others are powers of two.

    Attributes:
        block_m: assignments of a tile, from 16 on for "xw", else from 8 on.
        block_n: half of the weight's rows in a tile: of gate and of up, or one half after another.
        step: inputs of one product, which share their scales.
        steps: products of a turn of the loop.
        num_warps, num_stages: Triton's.
        split_k: programs that share the sum over K of one tile.
        kind: "xw" multiplies x W^T in the matrix unit, "wx" W x^T. "registers" and "warpgroup" do
            the latter with tiled formats in bfloat16 through `packed_gluon`, to which `step` and
            `steps` mean nothing and which takes two stages or more; "warpgroup" by wgmma, where
            four warps take 64 rows of the weight or more.
    """

    block_m: int
    block_n: int
    step: int
    steps: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    kind: Kind = "xw"


def choose_fp8_config(num_assignments: int, num_experts: int) -> GroupedConfig:
    """Choose the configuration of an x in FP8, as timing many on an H200 found it."""
    rows = num_assignments / num_experts
    block_m = 16 if rows <= 12 else 32 if rows <= 32 else 64
    return GroupedConfig(block_m, 64, STEP, 1, 4, 3, kind="warpgroup")


def choose_config(
    num_assignments: int, num_experts: int, weight: PackedWeight, *, registers: bool = False
) -> GroupedConfig:
    """Choose a configuration from shapes alone, as timing many on an H100 found them.

    Args:
        num_assignments, num_experts: S and E.
        weight: of one product.
        registers: the kinds of `packed_gluon` are possible.
    """
    touched = min(num_experts, max(num_assignments, 1))
    rows = num_assignments / touched
    step = shared_inputs(weight, 128)
    one, two = max(128 // step, 1), max(256 // step, 1)
    enough = 190  # programs that keep the memory busy
    if registers:
        config, enough = _in_registers(rows, num_experts, weight)
    elif rows <= 32:
        block_m = next(m for m in (8, 16, 32) if rows <= m)
        config = GroupedConfig(block_m, 32, step, one, 2, 3, kind="wx")
    else:
        enough = 100
        tall = GroupedConfig(128, 64, step, one, 8, 3)
        config = tall if rows > 64 else GroupedConfig(32, 64, step, one, 4, 3)
    tiles = touched * -(-int(rows) // config.block_m)
    programs = tiles * -(-weight.num_outputs // (2 * config.block_n))
    if programs >= enough:
        is_low = config.kind == "wx" and rows <= 16
        return GroupedConfig(16, 32, step, two, 4, 3) if is_low else config
    split_k, most = 1, 4 if weight.format == "fp8" and config.kind == "warpgroup" else enough
    while (
        split_k < most
        and programs * split_k < enough
        and weight.num_inputs >= _MIN_INPUTS * 2 * split_k
    ):
        split_k *= 2
    return replace(config, split_k=split_k)


def _in_registers(rows: float, num_experts: int, weight: PackedWeight) -> tuple[GroupedConfig, int]:
    """Choose a configuration of `packed_gluon`, as timing many on an H100 (MXFP4, few rows) and on
    an H200 (FP8) found them; and the programs that keep the memory busy.

    Tokens are not spread evenly: more than one tile of an expert reads its weight again. The tiles
    of a linear layer's rows read the same weight at the same time.
    """
    is_fp8, is_linear = weight.format == "fp8", num_experts == 1
    is_wide = is_linear and weight.num_outputs >= _WIDE

    def cut(block_m: int, block_n: int, warps: int, stages: int, kind: Kind) -> GroupedConfig:
        return GroupedConfig(block_m, block_n, STEP, 1, warps, stages, kind=kind)

    if rows <= (8 if is_linear else 5):
        return cut(8, 32, 2, 3, "registers"), 600
    if rows <= (16 if is_linear else 12):
        if is_fp8 and is_linear:
            return cut(16, 32, 4, 4, "warpgroup"), 256
        return cut(16, 64, 4, 3, "registers"), 600
    if not is_fp8:
        if rows <= (64 if is_linear else 24):
            return cut(32, 64, 4, 3, "warpgroup"), 600
        if rows <= (256 if is_linear else 96):
            return cut(64, 32, 4, 3, "warpgroup"), 256
        return cut(128, 64, 8, 3, "warpgroup"), 128  # one of 8 warps fills a multiprocessor
    if rows <= (32 if is_wide else 64 if is_linear else 40):
        return cut(32, 32, 4, 3, "warpgroup"), 256
    if is_linear and not (is_wide and rows > 128):
        return cut(64, 32, 4, 3, "warpgroup"), 256
    return cut(64, 64, 8, 2, "warpgroup"), 128


def uses_library(x: Tensor, weight: PackedWeight, num_assignments: int) -> bool:
    """Return whether a layer's experts are multiplied by the library: many rows in bfloat16."""
    is_fit = x.dtype == torch.bfloat16 and has_assembly(x.device)
    many = _MANY_IN_REGISTERS if can_use_registers(x, weight) else _LIBRARY_ROWS
    return is_fit and num_assignments >= many * weight.num_experts


def uses_fp8(x: Tensor, experts: ExpertWeights, num_assignments: int) -> bool:
    """Return whether a layer's experts multiply FP8 activations: many rows, where they may."""
    many = _FP8_ROWS * experts.gate_up.num_experts
    is_able = x.device.type == "cpu" or can_use_registers(x, experts.gate_up)
    return experts.fp8_activations and num_assignments >= many and is_able


def can_use_registers(x: Tensor, weight: PackedWeight) -> bool:
    """Return whether the kinds of `packed_gluon` can multiply these.

    Scales of "fp8" must be for all inputs or for whole steps, and x must lie as copies of 16 bytes
    take it.
    """
    inputs, k = weight.block[1], weight.num_inputs
    has_steps = weight.format == "mxfp4" or inputs >= k or inputs % STEP == 0
    return (
        weight.is_tiled
        and has_steps
        and x.dtype == torch.bfloat16
        and _has_gluon(x.device)
        and k % _ALIGNED == x.stride(0) % _ALIGNED == x.data_ptr() % _ALIGNED == 0
    )


def run_experts(
    x_TH: Tensor, index_TC: Tensor, weight_TC: Tensor, experts: ExpertWeights
) -> Tensor:
    """Compute the weighted sum of the chosen experts' outputs in Triton, [T, H].

    A compiler sees the operator `peagle::experts`, and joins the sum with what follows.

    Args:
        x_TH: the tokens' states.
        index_TC: the experts of each token, integers.
        weight_TC: their weights.
        experts: the weights of the layer.
    """
    up, down, gate = experts.gate_up, experts.down, experts.gate
    y_SH = torch.ops.peagle.experts(
        x_TH,
        index_TC,
        [up.data, down.data],
        [up.scale, down.scale],
        [up.zero, down.zero],
        [experts.gate_up_bias, experts.down_bias],
        [
            *(*layout_of(up), *layout_of(down), ACTIVATIONS.index(gate.activation)),
            int(experts.fp8_activations),
        ],
        [gate.alpha, gate.limit],
    )
    if torch.compiler.is_compiling():
        # Expert by expert, not as a sum over a dimension, which compiles to a slower kernel.
        y_TCH, weight_TC = y_SH.view(*weight_TC.shape, -1).float(), weight_TC.float()
        out_TH = y_TCH[:, 0] * weight_TC[:, :1]
        for chosen in range(1, weight_TC.shape[1]):
            out_TH = out_TH + y_TCH[:, chosen] * weight_TC[:, chosen : chosen + 1]
        return out_TH.to(y_SH.dtype)
    return weighted_sum(y_SH, weight_TC)


def layout_of(weight: PackedWeight) -> list[int]:
    """Return the facts that an operator needs beside the tensors of a weight."""
    return [FORMATS.index(weight.format), *weight.block, *weight.padded]


def make_weight(
    data: Tensor, scale: Tensor | None, zero: Tensor | None, layout: list[int]
) -> PackedWeight:
    """Make the weight whose `layout_of` is given."""
    kind, rows, inputs, *padded = layout
    format: Any = FORMATS[kind]
    return PackedWeight(data, format, scale, zero, (rows, inputs), (padded[0], padded[1]))


@torch.library.custom_op(
    "peagle::experts",
    mutates_args=(),
    schema="(Tensor x, Tensor index, Tensor[] data, Tensor?[] scale, Tensor?[] zero, "
    "Tensor?[] bias, int[] layout, float[] gate) -> Tensor",
)
def _experts(
    x: Tensor,
    index: Tensor,
    data: list[Tensor],
    scale: list[Tensor | None],
    zero: list[Tensor | None],
    bias: list[Tensor | None],
    layout: list[int],
    gate: list[float],
) -> Tensor:
    *layouts, activation, is_fp8 = layout
    up = make_weight(data[0], scale[0], zero[0], layouts[:5])
    down = make_weight(data[1], scale[1], zero[1], layouts[5:])
    kind: Any = ACTIVATIONS[activation]
    (num_tokens, chosen), num_experts = index.shape, up.num_experts
    index_S = index.reshape(-1)
    experts = ExpertWeights(up, down, Gate(kind, *gate), bias[0], bias[1], bool(is_fp8))
    if uses_fp8(x, experts, index_S.numel()):
        return experts_in_fp8(x, index_S, experts, chosen)
    if uses_library(x, up, index_S.numel()):
        return experts_of_many(x, index_S, experts, chosen)
    up_config, down_config = (
        choose_config(index_S.numel(), num_experts, w, registers=can_use_registers(x, w))
        for w in (up, down)
    )
    plans: dict[int, Tensor] = {}
    if num_tokens > 1:
        for block_m in {up_config.block_m, down_config.block_m}:
            plans[block_m] = plan_tiles(index_S, num_experts, block_m)
    inner_SI = grouped_product(
        x, up, bias[0], experts.gate,
        index_S=index_S, plan=plans.get(up_config.block_m), chosen=chosen, config=up_config,
    )  # fmt: skip
    return grouped_product(
        inner_SI, down, bias[1],
        index_S=index_S, plan=plans.get(down_config.block_m), config=down_config,
    )  # fmt: skip


@_experts.register_fake
def _(x: Tensor, index: Tensor, data: list, *others: list) -> Tensor:
    scale, zero, _, layout, _ = others
    down = make_weight(data[1], scale[1], zero[1], layout[5:10])
    return x.new_empty(index.numel(), down.num_outputs)


def run_experts_reference(
    x_TH: Tensor, index_TC: Tensor, weight_TC: Tensor, experts: ExpertWeights
) -> Tensor:
    """Compute `run_experts` in plain torch, one expert after the other."""
    out = torch.zeros_like(x_TH)
    gate_up, down = (w.unpack(x_TH.dtype) for w in (experts.gate_up, experts.down))
    for expert in index_TC.unique().tolist():
        token, place = (index_TC == expert).nonzero(as_tuple=True)
        inner = F.linear(x_TH[token], gate_up[expert], _of(experts.gate_up_bias, expert))
        y = F.linear(experts.gate(inner), down[expert], _of(experts.down_bias, expert))
        out.index_add_(0, token, y * weight_TC[token, place, None].to(y.dtype))
    return out


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]


def max_tiles(num_assignments: int, num_experts: int, block_m: int) -> int:
    """Return how many tiles a plan can have at most."""
    return min(num_assignments, num_experts + num_assignments // block_m)


def plan_tiles(index_S: Tensor, num_experts: int, block_m: int) -> Tensor:
    """Order assignments by expert and cut each expert's into tiles, on the device.

    Args:
        index_S: the expert of each assignment, integers below `num_experts`.
        num_experts: E.
        block_m: most assignments of a tile.

    Returns:
        int32 [S + 3 * max_tiles]: the assignments in order; then of every tile its expert, -1 for
        none, and its first and last place in the order.
    """
    count = index_S.numel()
    most = max_tiles(count, num_experts, block_m)
    plan = torch.empty(count + 3 * most, dtype=torch.int32, device=index_S.device)
    if count == 0:
        return plan
    if count > _MAX_PLANNED:
        _plan_many(plan, index_S, num_experts, block_m, most)
        return plan
    from peagle.kernels.linear import experts_triton

    launch(
        experts_triton.plan_kernel,
        (1,),
        plan,
        plan[count:],
        torch.empty(num_experts, dtype=torch.int32, device=index_S.device),
        index_S,
        count,
        num_experts,
        most,
        BLOCK_M=block_m,
        ASSIGNMENTS=power_of_two(count),
        EXPERTS=power_of_two(num_experts),
        TILES=power_of_two(most),
        **overlapping(plan.device),
        num_warps=4 if count <= 512 else 16,
    )
    return plan


def _plan_many(plan: Tensor, index_S: Tensor, experts: int, rows: int, most: int) -> None:
    """Fill a plan in two launches, of a program for each `_PLANNED_BLOCK` assignments."""
    from peagle.kernels.linear import experts_triton

    count = index_S.numel()
    blocks = -(-count // _PLANNED_BLOCK)
    counts, places = torch.empty(2, blocks, experts, dtype=torch.int32, device=plan.device)
    sizes: Any = {"BLOCK": _PLANNED_BLOCK, "EXPERTS": power_of_two(experts), "num_warps": 4}
    launch(experts_triton.count_kernel, (blocks,), counts, index_S, count, experts, **sizes)
    launch(
        experts_triton.place_kernel,
        (blocks,),
        plan,
        plan[count:],
        places,
        counts,
        index_S,
        count,
        experts,
        most,
        BLOCK_M=rows,
        ROWS=16,
        TILES=32,
        **sizes,
    )


def experts_of_many(x_TH: Tensor, index_S: Tensor, experts: ExpertWeights, chosen: int) -> Tensor:
    """Compute the outputs of all assignments, [S, H], by the library's grouped products.

    Weights are unpacked before. With many rows this costs less than tiles that unpack the same
    weight again.
    """
    num_experts = experts.gate_up.num_experts
    order_S = plan_tiles(index_S, num_experts, _LIBRARY_ROWS)[: index_S.numel()]
    expert_S = index_S[order_S]
    numbers = torch.arange(num_experts, dtype=index_S.dtype, device=x_TH.device)
    ends = torch.searchsorted(expert_S, numbers, right=True, out_int32=True)

    def product(x_SK: Tensor, weight: PackedWeight) -> Tensor:
        return F.grouped_mm(x_SK, unpack_weight(weight, x_SK.dtype).mT, offs=ends)

    y_SN = product(x_TH[order_S // chosen], experts.gate_up)
    inner_SI = _epilogue(y_SN, experts.gate_up_bias, experts.gate, expert_S)
    y_SH = product(inner_SI, experts.down)
    return _epilogue(y_SH, experts.down_bias, None, expert_S, order_S)


def experts_in_fp8(x_TH: Tensor, index_S: Tensor, experts: ExpertWeights, chosen: int) -> Tensor:
    """Compute the outputs of all assignments, [S, H], with FP8 activations before both products; on
    a CPU in plain torch.

    NaN or infinity in a row of x changes the outputs of no other row.
    """
    rows = quantise(x_TH.contiguous(), is_tiled=True)
    if x_TH.device.type == "cpu":
        of_up, of_down = (experts.gate_up, None, experts.gate), (experts.down, None, None)
        inner_SI = grouped_product_reference(rows.dequantise(), *of_up, index_S)
        rows = quantise(inner_SI.to(x_TH.dtype), is_tiled=True)
        return grouped_product_reference(rows.dequantise(), *of_down, index_S).to(x_TH.dtype)
    num_experts = experts.gate_up.num_experts
    config = choose_fp8_config(index_S.numel(), num_experts)
    plan = plan_tiles(index_S, num_experts, config.block_m)
    given: Any = {"index_S": index_S, "plan": plan, "config": config}
    inner_SI = grouped_product(rows, experts.gate_up, None, experts.gate, chosen=chosen, **given)
    return grouped_product(quantise(inner_SI, is_tiled=True), experts.down, **given)


def _epilogue(
    y_SN: Tensor,
    bias: Tensor | None,
    gate: Gate | None,
    expert_S: Tensor,
    place_S: Tensor | None = None,
) -> Tensor:
    """out[place of s] = gate(y[s] + bias of the expert of s); without places they stay."""
    from peagle.kernels.linear import experts_triton

    gate = gate or Gate("none")
    activation = ACTIVATIONS.index(gate.activation)
    count, n = y_SN.shape[0], y_SN.shape[1] // (2 if activation else 1)
    out = y_SN.new_empty(count, n)
    launch(
        experts_triton.epilogue_kernel,
        (count, -(-n // _EPILOGUE_OUTPUTS)),
        out,
        y_SN,
        out if bias is None else bias,
        expert_S,
        expert_S if place_S is None else place_S,
        n,
        gate.alpha,
        gate.limit,
        BLOCK=_EPILOGUE_OUTPUTS,
        GATE=activation,
        HAS_BIAS=bias is not None,
        HAS_PLACE=place_S is not None,
        num_warps=4,
    )
    return out


def weighted_sum(y_SN: Tensor, weight_TC: Tensor) -> Tensor:
    """Compute the sum over the experts of each token in float32, [T, N]."""
    from peagle.kernels.linear import experts_triton

    (num_tokens, chosen), n = weight_TC.shape, y_SN.shape[1]
    out = y_SN.new_empty(num_tokens, n)
    if num_tokens:
        launch(
            experts_triton.weighted_sum_kernel,
            (num_tokens, -(-n // _SUM_OUTPUTS)),
            out,
            y_SN,
            weight_TC.contiguous(),
            n,
            BLOCK=_SUM_OUTPUTS,
            CHOSEN=chosen,
            num_warps=2,
        )
    return out


def grouped_product(
    x: Tensor | QuantisedRows,
    weight: PackedWeight,
    bias: Tensor | None = None,
    gate: Gate | None = None,
    *,
    index_S: Tensor | None = None,
    plan: Tensor | None = None,
    chosen: int = 1,
    config: GroupedConfig | None = None,
) -> Tensor:
    """out[s] = W x[s // chosen] + bias of the expert of s in Triton, then the gate; [S, N].

    Sums are in float32, and rounded once before the gate.

    Args:
        x: [S / chosen, K], rows contiguous. Tiled rows in FP8 take a weight of `fits_fp8` and a
            configuration of the kind "warpgroup", and give bfloat16.
        weight: [E, N, K], or [N, K] without `index_S`; with a gate N counts gate and up.
        bias: [E, N] or [N].
        gate: leaves N / 2 outputs; None leaves all.
        index_S: the experts of the assignments; None: there is but one weight.
        plan: `plan_tiles` of them for `config.block_m`; None gives each a tile of its own, which
            is best for a single token.
        chosen: assignments that share a row of x.
        config: default `choose_config`.
    """
    from peagle.kernels.linear import experts_triton

    gate, data, scale = gate or Gate("none"), weight.data, weight.scale
    activation, (rows, inputs) = ACTIVATIONS.index(gate.activation), weight.block
    x_scale, dtype = None, torch.bfloat16
    if isinstance(x, QuantisedRows):
        assert x.is_tiled and fits_fp8(weight)
        assert config is not None and config.kind == "warpgroup"
        x, x_scale = x.q[: x.num_rows], x.scale
    else:
        dtype = x.dtype
    count, k = x.shape[0] * chosen, weight.num_inputs
    num_experts = 1 if index_S is None else weight.num_experts
    registers = can_use_registers(x, weight)
    cut = config or choose_config(count, num_experts, weight, registers=registers)
    assert x.shape[1] == k and x.stride(1) == data.stride(-1) == 1
    n = weight.num_outputs // (2 if activation else 1)
    out = torch.empty(count, n, dtype=dtype, device=x.device)
    if count == 0:
        return out
    if index_S is None:
        mode, tiles = 0, -(-count // cut.block_m)
    elif plan is None:
        mode, tiles = 1, count
    else:
        mode, tiles = 2, (plan.numel() - count) // 3
    scales = out if scale is None else scale
    is_shared = scale is None or (inputs >= k and weight.format != "mxfp4" and x_scale is None)
    assert is_shared or weight.format == "mxfp4" or inputs % cut.step == 0
    columns = -(-n // (cut.block_n * (1 if activation else 2)))
    partial = counters = out  # not looked at where K is not split
    if cut.split_k > 1:
        assert columns * tiles <= MAX_ARRIVALS, "too many tiles to split over K"
        size = columns * tiles * cut.split_k * 2 * cut.block_m * cut.block_n
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        counters = arrivals(x.device)
    zero = weight.zero
    assert zero is None or (scale is not None and zero.stride() == scale.stride())
    tensors = (
        out if plan is None else plan,
        out if plan is None else plan[count:],
        out if index_S is None else index_S,
        data,
        scales,
        scales if zero is None else zero,
        out if bias is None else bias,
        partial,
        counters,
    )
    numbers = (count, n, k, tiles, chosen, x.stride(0))
    strides = (
        0 if index_S is None else data.stride(0),
        weight.row_stride,
        0 if index_S is None or scale is None else scale.stride(0),
        0 if scale is None else scale.stride(-2),
        0 if scale is None else scale.stride(-1),
    )
    options = {
        "BLOCK_M": cut.block_m,
        "BLOCK_N": cut.block_n,
        "SPLIT_K": cut.split_k,
        "GATE": activation,
        "HAS_BIAS": bias is not None,
        "EVEN_N": n % (cut.block_n * (1 if activation else 2)) == 0,
        "MODE": mode,
        "FORMAT": FORMATS.index(weight.format),
        "SCALE_ROWS": 0 if rows >= weight.num_outputs else rows,
        "SCALE_K": 0 if is_shared else inputs,
        **overlapping(x.device),
        "num_warps": cut.num_warps,
    }
    grid = (columns * cut.split_k, tiles)
    if cut.kind not in ("xw", "wx"):
        from peagle.kernels.linear import packed_gluon

        launch(
            packed_gluon.packed_kernel,
            grid[::-1] if mode == 0 else grid,
            out,
            x,
            out if x_scale is None else x_scale,
            *tensors,
            *numbers,
            0 if x_scale is None else x_scale.stride(0),
            *strides,
            gate.alpha,
            gate.limit,
            **options,
            STAGES=cut.num_stages,
            WGMMA=cut.kind == "warpgroup",
            maxnreg=max_registers(
                cut, weight.format == "fp8" and not is_shared, in_fp8=x_scale is not None
            ),
        )
        return out
    stages = fitting_stages(cut, x, weight, DeviceLimits.of(x.device).shared_bytes)
    launch(
        experts_triton.grouped_kernel,
        grid,
        out,
        x,
        *tensors,
        *numbers,
        *strides,
        gate.alpha,
        gate.limit,
        **options,
        STEP=cut.step,
        STEPS=cut.steps,
        STAGES=stages,
        HAS_ZERO=zero is not None,
        EVEN_K=k % (cut.step * cut.steps) == 0,
        ASM=can_use_assembly(weight, x.dtype) and weight.format != "mxfp4",
        WX=cut.kind == "wx",
        num_stages=stages,
    )
    return out


def fitting_stages(cut: GroupedConfig, x: Tensor, weight: PackedWeight, shared_bytes: int) -> int:
    """Return how many stages of a configuration go into shared memory, at least 1."""
    inputs = cut.step * cut.steps
    row_bytes = inputs * weight.data.itemsize // (2 if weight.format in FOUR_BIT_FORMATS else 1)
    stage = cut.block_m * inputs * x.element_size() + 2 * cut.block_n * row_bytes
    return max(1, min(cut.num_stages, shared_bytes // stage))


def max_registers(cut: GroupedConfig, has_parts: bool, *, in_fp8: bool = False) -> int:
    """Return the registers of a thread: as few as do with little spilling.

    Args:
        cut: of `packed_gluon`.
        has_parts: sums of `STEP` inputs are scaled before they are added.
        in_fp8: x is in FP8, and a thread holds no numbers.
    """
    sums = cut.block_m * (2 if has_parts else 1)
    held = 2 * cut.block_n * (sums + (0 if in_fp8 else 64)) // (32 * cut.num_warps)
    few = 96 if cut.num_warps == 8 and has_parts else 72  # so that two programs fit
    enough = 128 if held <= few else 168 if held <= 96 else 255
    return min(enough, _REGISTERS // (32 * cut.num_warps))


def grouped_product_reference(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, gate: Gate | None, index_S: Tensor
) -> Tensor:
    """Compute `grouped_product` in plain torch, from the unpacked weights."""
    matrices = weight.unpack(x.dtype)[index_S]
    rows = x.repeat_interleave(len(index_S) // len(x), 0)
    out = torch.einsum("snk,sk->sn", matrices, rows)
    out = out if bias is None else out + bias[index_S]
    return out if gate is None else gate(out)


@cache
def _has_gluon(device: torch.device) -> bool:
    """Return whether Gluon is there, and a card with wgmma: of compute capability 9."""
    is_fit = has_assembly(device) and torch.cuda.get_device_capability(device)[0] == 9
    return is_fit and find_spec("triton.experimental.gluon") is not None
