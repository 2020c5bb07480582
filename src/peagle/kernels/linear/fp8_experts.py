"""Experts of a mixture over FP8 activations and FP8 weights, for many rows of each expert.

    y[s] = down(silu(gate(x[s])) * up(x[s])) of the expert of s

Activations, weights and their orders are those of `fp8_linear`.

Shapes: S assignments of tokens to E experts, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from peagle.kernels.launch import DeviceLimits, launch
from peagle.kernels.linear.fp8_activations import BLOCK, QuantisedRows
from peagle.kernels.linear.fp8_linear import Fp8Config, fits_fp8
from peagle.kernels.linear.packed_weights import PackedWeight

# Assignments of an expert on average, from which on FP8 activations are used: with fewer the
# products are bound by the bytes of the weights, which are the same (docs/lab/roofline.md).
MIN_ROWS = 32
# The fastest ones of an H200 up to `_LOW_ROWS` assignments of an expert, and beyond.
_LOW, _TALL = Fp8Config(64, 64, 4, 4), Fp8Config(128, 64, 8, 3)
_LOW_ROWS = 256


def choose_config(num_assignments: int, num_experts: int, limits: DeviceLimits) -> Fp8Config:
    """Return the parameters of both products."""
    config = _LOW if num_assignments <= _LOW_ROWS * num_experts else _TALL
    stages = min(config.num_stages, max(1, limits.shared_bytes // config.stage_bytes()))
    return replace(config, num_stages=stages)


def experts_product(
    x: QuantisedRows,
    weight: PackedWeight,
    plan: Tensor,
    *,
    num_assignments: int,
    has_gate: bool = False,
    chosen: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    config: Fp8Config,
) -> Tensor:
    """Multiply in Triton, [S, N], or with a gate silu(gate) * up, [S, N / 2].

    Args:
        x: [S / chosen, K].
        weight: [E, N, K], of which `fits_fp8` is true; with a gate the rows of gate are first.
        plan: `plan_tiles` of the assignments for `config.block_m`.
        num_assignments: S.
        has_gate: apply SiLU, in float32.
        chosen: assignments that share a row of x.
        dtype: of the result.
        config: K is not split.
    """
    from peagle.kernels.linear import fp8_linear_triton

    data, scale, k = weight.data, weight.scale, weight.num_inputs
    n = weight.num_outputs // (2 if has_gate else 1)
    columns, odd_rows = divmod(weight.num_outputs, 2 * config.block_n)
    assert fits_fp8(weight) and scale is not None and n % BLOCK == 0 and config.split_k == 1
    assert data.is_contiguous() and scale.is_contiguous()
    assert BLOCK % config.block_n == 0 and odd_rows == 0
    assert x.q.shape[1] == k and x.num_rows * chosen == num_assignments
    out = torch.empty(num_assignments, n, dtype=dtype, device=data.device)
    tiles = (plan.numel() - num_assignments) // 3
    if tiles == 0:
        return out
    launch(
        fp8_linear_triton.experts_kernel,
        (columns, tiles),
        out,
        x.q,
        x.scale,
        plan,
        plan[num_assignments:],
        data,
        scale,
        n,
        k,
        tiles,
        chosen,
        x.scale.stride(0),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        HAS_GATE=has_gate,
        ASM=data.is_cuda,
        WX=config.wx,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out
