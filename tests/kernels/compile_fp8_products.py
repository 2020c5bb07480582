"""Compile the FP8 kernel of the roofline benchmark for a card, and print what it needs, as JSON.

Run it in a process without TRITON_INTERPRET, with benchmarks/kernels among the folders of modules.
"""

from __future__ import annotations

import json
from typing import Any

import fp8_products_triton  # type: ignore[import-not-found]
from fp8_products import CONFIGS  # type: ignore[import-not-found]
from triton.compiler import ASTSource

from tests.kernels.compile_for_card import compile_kernel


def product(config: Any, split_k: int, *, has_gate: bool) -> dict[str, Any]:
    """`experts_kernel`."""
    types = dict.fromkeys(("x_scale_ptr", "w_scale_ptr", "partial_ptr"), "*fp32")
    types |= dict.fromkeys(("x_ptr", "w_ptr"), "*fp8e4nv") | {"out_ptr": "*bf16"}
    types |= dict.fromkeys(("order_ptr", "tiles_ptr", "arrivals_ptr"), "*i32")
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SPLIT_K": split_k,
        "STAGES": config.num_stages,
        "HAS_GATE": has_gate,
        "WX": config.wx,
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    kernel = fp8_products_triton.experts_kernel
    return compile_kernel(kernel, ASTSource, types, constants, options, ("max_tiles", "chosen"))


if __name__ == "__main__":
    found = {}
    for config in CONFIGS:
        found[f"down {config.label}"] = product(config, 2, has_gate=False)
        found[f"gate and up {config.label}"] = product(config, 1, has_gate=True)
    print(json.dumps(found))
