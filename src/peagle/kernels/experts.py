"""Experts of a mixture in Triton: the plan, the grouped products, and the operators for compilers.

    y[t] = sum over i of weight[t, i] * down(act(gate_up(x[t]))) of expert index[t, i]

Assignments of tokens to experts are ordered by expert on the device, and cut into tiles that read
the weight of their expert once. Nothing waits for the host, and every size follows from shapes, so
that a CUDA graph can hold it all. `grouped_product` with one expert and no plan is the product of
a quantised linear layer.

Shapes: T tokens, C experts chosen for each, S = T * C assignments, E experts, H width, I width
between the two products, N outputs and K inputs of a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.launch import launch
from peagle.kernels.packed_weights import FORMATS, FOUR_BIT_FORMATS, PackedWeight

Activation = Literal["none", "silu", "clamped", "gelu_tanh"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
_MAX_PLANNED = 4096  # assignments that one program orders


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
    """

    gate_up: PackedWeight
    down: PackedWeight
    gate: Gate
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate_up.data.shape[0]


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """How a grouped product is cut. `steps` is any number, the others are powers of two.

    Attributes:
        block_m: assignments of a tile, from 16 on, or from 8 on with `wx`.
        block_n: half of the weight's rows in a tile: of gate and of up, or one half after another.
        step: inputs of one product, which share their scales.
        steps: products of a turn of the loop.
        num_warps, num_stages: Triton's.
        wx: multiply W x^T in the matrix unit, not x W^T.
    """

    block_m: int
    block_n: int
    step: int
    steps: int
    num_warps: int
    num_stages: int
    wx: bool = False


def choose_config(num_assignments: int, num_experts: int, weight: PackedWeight) -> GroupedConfig:
    """Choose a configuration from shapes alone, as `bench_experts.py` found them on an H100."""
    rows = num_assignments / min(num_experts, max(num_assignments, 1))
    step = _shared_inputs(weight, 128)
    if rows > 32:
        return GroupedConfig(64, 64, step, max(128 // step, 1), 4, 3)
    if weight.format in FOUR_BIT_FORMATS:
        if rows <= 4:
            return GroupedConfig(8, 32, step, max(256 // step, 1), 2, 4, wx=True)
        return GroupedConfig(32 if rows > 8 else 16, 32, step, max(128 // step, 1), 2, 3, wx=True)
    if rows <= 1:
        return GroupedConfig(8, 32, step, max(256 // step, 1), 2, 3, wx=True)
    return GroupedConfig(16 if rows <= 16 else 32, 32, step, max(256 // step, 1), 4, 3)


def _shared_inputs(weight: PackedWeight, most: int) -> int:
    """Return the largest power of two, up to `most`, of inputs that share their scales."""
    inputs = weight.block[1]
    if weight.format != "mxfp4" and (weight.scale is None or inputs >= weight.num_inputs):
        return most
    while inputs % most:
        most //= 2
    return most


def run_experts(
    x_TH: Tensor, index_TC: Tensor, weight_TC: Tensor, experts: ExpertWeights
) -> Tensor:
    """Compute the weighted sum of the chosen experts' outputs in Triton, [T, H].

    A compiler sees the operator `peagle::experts`, and fuses the sum with what follows.

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
        [*_layout(up), *_layout(down), ACTIVATIONS.index(gate.activation)],
        [gate.alpha, gate.limit],
    )
    y_TCH = y_SH.view(*index_TC.shape, -1).float() * weight_TC.float().unsqueeze(-1)
    return y_TCH.sum(1).to(x_TH.dtype)


def packed_linear(x: Tensor, weight: PackedWeight, bias_N: Tensor | None = None) -> Tensor:
    """y = x W^T + bias in Triton, for a packed weight; a compiler sees `peagle::packed_linear`.

    Args:
        x: [..., K].
        weight: [N, K].
        bias_N: [N].

    Returns:
        [..., N], contiguous.
    """
    out_MN = torch.ops.peagle.packed_linear(
        x.reshape(-1, x.shape[-1]), weight.data, weight.scale, weight.zero, bias_N, _layout(weight)
    )
    return out_MN.view(*x.shape[:-1], -1)


def _layout(weight: PackedWeight) -> list[int]:
    return [FORMATS.index(weight.format), *weight.block]


def _weight(
    data: Tensor, scale: Tensor | None, zero: Tensor | None, layout: list[int]
) -> PackedWeight:
    kind, rows, inputs = layout
    format: Any = FORMATS[kind]
    return PackedWeight(data, format, scale, zero, (rows, inputs))


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
    *layouts, activation = layout
    up = _weight(data[0], scale[0], zero[0], layouts[:3])
    down = _weight(data[1], scale[1], zero[1], layouts[3:])
    kind: Any = ACTIVATIONS[activation]
    (num_tokens, chosen), num_experts = index.shape, up.data.shape[0]
    index_S = index.reshape(-1)
    up_config, down_config = (choose_config(index_S.numel(), num_experts, w) for w in (up, down))
    plan = None if num_tokens == 1 else plan_tiles(index_S, num_experts, up_config.block_m)
    inner_SI = grouped_product(
        x, up, bias[0], Gate(kind, *gate),
        index_S=index_S, plan=plan, chosen=chosen, config=up_config,
    )  # fmt: skip
    return grouped_product(inner_SI, down, bias[1], index_S=index_S, plan=plan, config=down_config)


@_experts.register_fake
def _(
    x: Tensor,
    index: Tensor,
    data: list[Tensor],
    scale: list[Tensor | None],
    zero: list[Tensor | None],
    bias: list[Tensor | None],
    layout: list[int],
    gate: list[float],
) -> Tensor:
    return x.new_empty(index.numel(), data[1].shape[1])


@torch.library.custom_op(
    "peagle::packed_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor data, Tensor? scale, Tensor? zero, Tensor? bias, int[] layout) "
    "-> Tensor",
)
def _packed_linear(
    x: Tensor,
    data: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    layout: list[int],
) -> Tensor:
    return grouped_product(x, _weight(data, scale, zero, layout), bias)


@_packed_linear.register_fake
def _(
    x: Tensor,
    data: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    layout: list[int],
) -> Tensor:
    return x.new_empty(x.shape[0], data.shape[0])


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
    from peagle.kernels import experts_triton

    power = _power_of_two
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
        ASSIGNMENTS=power(count),
        EXPERTS=power(num_experts),
        TILES=power(most),
        num_warps=4 if count <= 512 else 16,
    )
    return plan


def _plan_many(plan: Tensor, index_S: Tensor, experts: int, rows: int, most: int) -> None:
    """`plan_kernel` in torch, for any number of assignments."""
    count = index_S.numel()
    _, plan[:count] = torch.sort(index_S, stable=True)
    ones = torch.ones_like(index_S, dtype=torch.int64)
    counts = torch.zeros(experts, dtype=torch.int64, device=index_S.device)
    counts.scatter_add_(0, index_S.long(), ones)
    ends, last_tiles = counts.cumsum(0), (-(-counts // rows)).cumsum(0)
    tile = torch.arange(most, device=index_S.device)
    expert = torch.searchsorted(last_tiles, tile, right=True)
    is_tile, expert = expert < experts, expert.clamp(max=experts - 1)
    in_expert = tile - (last_tiles - -(-counts // rows))[expert]
    first = (ends - counts)[expert] + in_expert * rows
    tiles = plan[count:].view(3, most)
    tiles[0] = torch.where(is_tile, expert, -1)
    tiles[1] = first
    tiles[2] = torch.minimum(first + rows, ends[expert])


def grouped_product(
    x: Tensor,
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
        x: [S / chosen, K], rows contiguous.
        weight: [E, N, K], or [N, K] without `index_S`; with a gate N counts gate and up.
        bias: [E, N] or [N].
        gate: leaves N / 2 outputs; None leaves all.
        index_S: the experts of the assignments; None: there is but one weight.
        plan: `plan_tiles` of them for `config.block_m`; None gives each a tile of its own, which
            is best for a single token.
        chosen: assignments that share a row of x.
        config: default `choose_config`.
    """
    from peagle.kernels import experts_triton

    gate, data, scale = gate or Gate("none"), weight.data, weight.scale
    activation, (rows, inputs) = ACTIVATIONS.index(gate.activation), weight.block
    count, k = x.shape[0] * chosen, weight.num_inputs
    num_experts = 1 if index_S is None else data.shape[0]
    cut = config or choose_config(count, num_experts, weight)
    assert x.shape[1] == k and x.stride(1) == data.stride(-1) == 1
    n = data.shape[-2] // (2 if activation else 1)
    out = torch.empty(count, n, dtype=x.dtype, device=x.device)
    if count == 0:
        return out
    if index_S is None:
        mode, tiles = 0, -(-count // cut.block_m)
    elif plan is None:
        mode, tiles = 1, count
    else:
        mode, tiles = 2, (plan.numel() - count) // 3
    stored = data if data.element_size() > 1 or data.dtype == torch.int8 else data.view(torch.uint8)
    scales = out if scale is None else scale
    is_shared = scale is None or (inputs >= k and weight.format != "mxfp4")
    assert is_shared or inputs % cut.step == 0
    zero = weight.zero
    assert zero is None or (scale is not None and zero.stride() == scale.stride())
    launch(
        experts_triton.grouped_kernel,
        (-(-n // (cut.block_n * (1 if activation else 2))), tiles),
        out,
        x,
        out if plan is None else plan,
        out if plan is None else plan[count:],
        out if index_S is None else index_S,
        stored,
        scales,
        scales if zero is None else zero,
        out if bias is None else bias,
        count,
        n,
        k,
        tiles,
        chosen,
        x.stride(0),
        0 if index_S is None else stored.stride(0),
        stored.stride(-2),
        0 if index_S is None or scale is None else scale.stride(0),
        0 if scale is None else scale.stride(-2),
        0 if scale is None else scale.stride(-1),
        gate.alpha,
        gate.limit,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        STEP=cut.step,
        STEPS=cut.steps,
        STAGES=cut.num_stages,
        FORMAT=FORMATS.index(weight.format),
        SCALE_ROWS=0 if rows >= data.shape[-2] else rows,
        SCALE_K=0 if is_shared else inputs,
        GATE=activation,
        HAS_BIAS=bias is not None,
        HAS_ZERO=zero is not None,
        EVEN_N=n % (cut.block_n * (1 if activation else 2)) == 0,
        EVEN_K=k % (cut.step * cut.steps) == 0,
        MODE=mode,
        ASM=_has_assembly(x.device) and x.dtype == torch.bfloat16,
        WX=cut.wx,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )
    return out


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
def _has_assembly(device: torch.device) -> bool:
    """Return whether a device has products of two bfloat16 at once: 9.0 and later; no CPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
