"""Compile kernels for compute capability 9.0 without a card, and print what each needs, as JSON.

Run it in a process without TRITON_INTERPRET: `python -m tests.kernels.compile_for_card`.
"""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from peagle.kernels import experts_triton, mxfp4_gluon
from peagle.kernels.packed_weights import FORMATS

TARGET = GPUTarget("cuda", 90, 32)
DATA = {"plain": "*bf16", "fp8": "*u8", "int8": "*i8", "int4": "*u8", "mxfp4": "*u8"}
SCALE_K = {"fp8": 128, "int4": 128, "mxfp4": 32}


def grouped(format: str, gate: int, mode: int, *, wx: bool) -> dict[str, Any]:
    """`grouped_kernel` for decode steps (`wx`) or prompts."""
    step = 32 if format == "mxfp4" else 128
    constants: dict[str, Any] = {
        "BLOCK_M": 8 if wx else 64,
        "BLOCK_N": 32 if wx else 64,
        "STEP": step,
        "STEPS": 128 // step,
        "STAGES": 3,
        "SPLIT_K": 2 if wx else 1,
        "FORMAT": FORMATS.index(format),
        "SCALE_ROWS": 128 if format == "fp8" else 1,
        "SCALE_K": SCALE_K.get(format, 0),
        "GATE": gate,
        "HAS_BIAS": format == "mxfp4",
        "HAS_ZERO": format == "int4",
        "EVEN_N": True,
        "EVEN_K": format != "mxfp4",
        "MODE": mode,
        "ASM": format != "mxfp4",
        "WX": wx,
    }
    options = {"num_warps": 2 if wx else 4, "num_stages": 3}
    return compile_grouped(experts_triton.grouped_kernel, ASTSource, format, constants, options)


def in_registers(gate: int, mode: int, block_m: int, *, wgmma: bool) -> dict[str, Any]:
    """`mxfp4_kernel`, of the kind "warpgroup" or "registers"."""
    constants = {
        "BLOCK_M": block_m,
        "BLOCK_N": 64,
        "SPLIT_K": 2 if mode == 1 else 1,
        "GATE": gate,
        "HAS_BIAS": True,
        "EVEN_N": False,
        "MODE": mode,
        "STAGES": 3,
        "WGMMA": wgmma,
    }
    options = {"num_warps": 4, "maxnreg": 255 if wgmma else 168}
    kernel = mxfp4_gluon.mxfp4_kernel
    return compile_grouped(kernel, GluonASTSource, "mxfp4", constants, options)


def compile_grouped(
    kernel: Any, source: Any, format: str, constants: dict[str, Any], options: dict[str, int]
) -> dict[str, Any]:
    pointers = dict.fromkeys(("out_ptr", "x_ptr", "bias_ptr"), "*bf16")
    pointers |= dict.fromkeys(("order_ptr", "tiles_ptr", "arrivals_ptr"), "*i32")
    pointers["partial_ptr"] = "*fp32"
    pointers |= {"index_ptr": "*i64", "data_ptr": DATA[format], "alpha": "fp32", "limit": "fp32"}
    pointers["scale_ptr"] = "*i32" if format == "mxfp4" else "*fp32"
    pointers["zero_ptr"] = "*u8" if format == "int4" else pointers["scale_ptr"]
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    loose = ("num_rows", "max_tiles", "chosen", "alpha", "limit")
    aligned = [n for n in names if n not in constants and n not in loose]
    ast = source(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled: Any = triton.compile(ast, target=TARGET, options=options)
    return {"shared": compiled.metadata.shared, "mma": "mma" in compiled.asm["ptx"]}


if __name__ == "__main__":
    found = {
        f"{format} {gate} {mode} {wx}": grouped(format, gate, mode, wx=wx)
        for format in FORMATS
        for gate, mode, wx in ((1, 2, True), (0, 1, True), (0, 0, False))
    }
    for gate, mode, block_m, wgmma in (
        (2, 2, 8, False),
        (0, 1, 16, False),
        (3, 0, 32, True),
        (2, 2, 64, True),
        (0, 2, 128, True),
    ):
        found[f"mxfp4 {gate} {mode} {block_m}"] = in_registers(gate, mode, block_m, wgmma=wgmma)
    print(json.dumps(found))
