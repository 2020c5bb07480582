"""Compile the FP8 kernels of the roofline benchmark for a card, and print what each needs, as JSON.

Run it in a process without TRITON_INTERPRET, with benchmarks/kernels among the folders of modules.
"""

from __future__ import annotations

import json
from typing import Any

import fp8_products_triton  # type: ignore[import-not-found]
from fp8_products import CONFIGS  # type: ignore[import-not-found]
from triton.compiler import ASTSource

from tests.kernels.compile_for_card import compile_kernel


def quantised() -> dict[str, Any]:
    """`quantise_kernel`."""
    types = {"q_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "x_ptr": "*bf16"}
    constants = {"ROWS": 4, "LARGEST": 448.0}
    kernel, options = fp8_products_triton.quantise_kernel, {"num_warps": 4}
    return compile_kernel(kernel, ASTSource, types, constants, options, ("num_rows",))


def product(config: Any, split_k: int, *, has_gate: bool, planned: bool) -> dict[str, Any]:
    """`product_kernel`."""
    types = dict.fromkeys(("x_scale_ptr", "w_scale_ptr", "partial_ptr"), "*fp32")
    types |= dict.fromkeys(("x_ptr", "w_ptr"), "*fp8e4nv") | {"out_ptr": "*bf16"}
    types |= dict.fromkeys(("order_ptr", "tiles_ptr", "arrivals_ptr"), "*i32")
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SPLIT_K": split_k,
        "STAGES": config.num_stages,
        "HAS_GATE": has_gate,
        "PLANNED": planned,
        "WX": config.wx,
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    loose = ("num_rows", "max_tiles", "chosen")
    kernel = fp8_products_triton.product_kernel
    return compile_kernel(kernel, ASTSource, types, constants, options, loose)


if __name__ == "__main__":
    found = {"quantise": quantised()}
    for config in CONFIGS:
        found[f"dense {config.label}"] = product(config, 2, has_gate=False, planned=False)
        found[f"experts {config.label}"] = product(config, 1, has_gate=True, planned=True)
    print(json.dumps(found))
