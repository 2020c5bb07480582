"""Compile kernels for cards without a card, and print what each needs, as JSON.

The compute capability is 9.0; of attention over 8-bit caches also 8.0, which converts by bits.

Run it in a process without TRITON_INTERPRET: `python -m tests.kernels.compile_for_card`.
"""

import json
import re
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from peagle.kernels.attention import kv_moves_triton, kv_write_triton, paged_attention_triton
from peagle.kernels.attention.paged_attention import MAX_WRITE_ROWS, AttentionShape, choose_config
from peagle.kernels.drafts import correction_triton, step_state_triton
from peagle.kernels.drafts import draw_triton as drafts_draw_triton
from peagle.kernels.launch import DeviceLimits, power_of_two
from peagle.kernels.linear import (
    experts_triton,
    fp8_activations_triton,
    fp8_linear_gluon,
    packed_gluon,
    packed_weights_triton,
)
from peagle.kernels.linear.experts import GroupedConfig, choose_fp8_config, max_registers
from peagle.kernels.linear.fp8_linear import choose_linear_config
from peagle.kernels.linear.packed_weights import FORMATS
from peagle.kernels.sampling import (
    draw_triton,
    logprobs_triton,
    penalties_triton,
    rejection_triton,
    verify_triton,
)
from peagle.kernels.sampling.random import Purpose
from peagle.kernels.trees import (
    beams_triton,
    chains_triton,
    copies_triton,
    growth_triton,
    paths_triton,
)
from peagle.kernels.trees.copies import MAX_COPIED, MAX_MATCH, NO_COPY, NUM_LENGTHS

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
DATA = {"plain": "*bf16", "fp8": "*u8", "int8": "*i8", "int4": "*u8", "mxfp4": "*u8"}
SCALE_K = {"fp8": 128, "int4": 128, "mxfp4": 32}

# As `experts.choose_config` has them.
IN_REGISTERS = {
    "registers m8": GroupedConfig(8, 32, 128, 1, 2, 3, kind="registers"),
    "registers m16": GroupedConfig(16, 64, 128, 1, 4, 3, kind="registers"),
    "warpgroup m16": GroupedConfig(16, 32, 128, 1, 4, 4, kind="warpgroup"),
    "warpgroup m32": GroupedConfig(32, 32, 128, 1, 4, 3, kind="warpgroup"),
    "warpgroup m64": GroupedConfig(64, 32, 128, 1, 4, 3, kind="warpgroup"),
    "warpgroup m64 n64": GroupedConfig(64, 64, 128, 1, 8, 2, kind="warpgroup"),
    "warpgroup m128": GroupedConfig(128, 64, 128, 1, 8, 3, kind="warpgroup"),
}


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
        "ASM": format not in ("fp8", "mxfp4"),
        "WX": wx,
    }
    options = {"num_warps": 2 if wx else 4, "num_stages": 3}
    return compile_grouped(experts_triton.grouped_kernel, ASTSource, format, constants, options)


def in_registers(
    format: str, scale_k: int, gate: int, mode: int, config: GroupedConfig, *, in_fp8: bool = False
) -> dict[str, Any]:
    """`packed_kernel`; `scale_k` is 0 where all inputs share a scale, `in_fp8` is of x."""
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SPLIT_K": 2 if mode == 1 else 1,
        "GATE": gate,
        "HAS_BIAS": not in_fp8,
        "EVEN_N": in_fp8,
        "MODE": mode,
        "STAGES": config.num_stages,
        "FORMAT": FORMATS.index(format),
        "SCALE_ROWS": 128 if format == "fp8" else 1,
        "SCALE_K": scale_k,
        "WGMMA": config.kind == "warpgroup",
    }
    has_parts = format == "fp8" and scale_k > 0
    most = max_registers(config, has_parts, in_fp8=in_fp8)
    options = {"num_warps": config.num_warps, "maxnreg": most}
    kernel, x_type = packed_gluon.packed_kernel, "*fp8e4nv" if in_fp8 else "*bf16"
    return compile_grouped(kernel, GluonASTSource, format, constants, options, x_type)


def compile_grouped(
    kernel: Any,
    source: Any,
    format: str,
    constants: dict[str, Any],
    options: dict[str, int],
    x_type: str = "*bf16",
) -> dict[str, Any]:
    pointers = {"out_ptr": "*bf16", "bias_ptr": "*bf16", "x_ptr": x_type, "x_scale_ptr": "*fp32"}
    pointers |= dict.fromkeys(("order_ptr", "tiles_ptr", "arrivals_ptr"), "*i32")
    pointers["partial_ptr"] = "*fp32"
    pointers |= {"index_ptr": "*i64", "data_ptr": DATA[format], "alpha": "fp32", "limit": "fp32"}
    pointers["scale_ptr"] = "*i32" if format == "mxfp4" else "*fp32"
    pointers["zero_ptr"] = "*u8" if format == "int4" else pointers["scale_ptr"]
    loose = ("num_rows", "max_tiles", "chosen", "alpha", "limit")
    return compile_kernel(kernel, source, pointers, constants, options, loose)


def unpacked(format: str) -> dict[str, Any]:
    """`unpack_kernel`."""
    constants: dict[str, Any] = {
        "ROWS": 32,
        "STEP": 128,
        "STEPS": 2,
        "FORMAT": FORMATS.index(format),
        "SCALE_ROWS": 128 if format == "fp8" else 1,
        "SCALE_K": SCALE_K.get(format, 4096),
        "HAS_ZERO": format == "int4",
        "EVEN_K": False,
        "ASM": format != "fp8",
    }
    scale = "*i32" if format == "mxfp4" else "*fp32"
    pointers = {"out_ptr": "*bf16", "data_ptr": DATA[format], "scale_ptr": scale}
    pointers["zero_ptr"] = "*u8" if format == "int4" else scale
    kernel = packed_weights_triton.unpack_kernel
    options = {"num_warps": 4}
    return compile_kernel(kernel, ASTSource, pointers, constants, options, ("num_rows",))


def attention(
    capability: int, cache: str, head_dim: int, queries: int, *, tree: bool = False
) -> dict[str, Any]:
    """`attend_kernel` of a step (up to 64 queries) or a prompt, over an 8-bit cache."""
    types = (torch.bfloat16, torch.float8_e4m3fn)
    shape = AttentionShape(4, 4 * queries, queries, 32, 8, head_dim, *types)
    chosen = choose_config(shape, DeviceLimits(108, SHARED_BYTES[capability]))
    is_step = queries <= MAX_WRITE_ROWS
    constants: dict[str, Any] = {
        "NUM_KV_HEADS": 8,
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "OFFSET": tl.int32,
        "BLOCK_D": head_dim,
        "BLOCK_M": chosen.block_m,
        "BLOCK_N": chosen.block_n,
        "B2": 1 if is_step else 128,
        "SEARCH": not is_step,
        "IS_SPLIT": chosen.num_splits > 1,
        "COMBINE_STAGES": 2,
        "MIN_KEYS": chosen.min_keys,
        "MANY_KEYS": chosen.many_keys,
        "WRITE_ROWS": queries if is_step else 0,
        "LIMIT": 448.0,
        "OPEN_TILES": not (is_step or tree),
        "HAS_WINDOW": True,
        "HAS_STARTS": True,
        "HAS_TREE": tree,
        "HAS_SINKS": True,
        "HAS_SOFTCAP": True,
        "SETTLED": is_step,
    }
    pointers = dict.fromkeys(("out_ptr", "query_ptr", "key_ptr", "value_ptr", "sinks_ptr"), "*bf16")
    pointers |= dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32")
    pointers |= dict.fromkeys(("slots_ptr", "query_start_ptr", "seq_lens_ptr"), "*i64")
    pointers |= dict.fromkeys(("starts_ptr", "tables_ptr", "visible_ptr", "positions_ptr"), "*i64")
    pointers |= {"arrivals_ptr": "*i32"}
    pointers |= dict.fromkeys(("keys_ptr", "values_ptr"), cache)
    numbers = ("score_scale", "cap_scale", "value_scale", "key_factor", "value_factor")
    pointers |= dict.fromkeys(numbers, "fp32")
    kernel = paged_attention_triton.attend_kernel
    loose = (*numbers, "table_width", "num_sequences", "num_rows", "tiles_per_sequence")
    loose = (*loose, "stride_table", "num_splits", "few_splits", "window")
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    return compile_kernel(kernel, ASTSource, pointers, constants, options, loose, capability)


def kv_write(capability: int, cache: str) -> dict[str, Any]:
    """`kv_write_kernel` into an 8-bit cache."""
    sizes = {"NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "BLOCK_H": 8, "BLOCK_D": 128}
    pointers = {"key_ptr": "*bf16", "value_ptr": "*bf16", "slots_ptr": "*i64"}
    pointers |= {"keys_ptr": cache, "values_ptr": cache}
    pointers |= {"key_factor": "fp32", "value_factor": "fp32"}
    kernel, constants = kv_write_triton.kv_write_kernel, {**sizes, "LIMIT": 448.0}
    loose = ("key_factor", "value_factor")
    return compile_kernel(kernel, ASTSource, pointers, constants, {}, loose, capability)


def compile_kernel(
    kernel: Any,
    source: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, int],
    loose: tuple[str, ...],
    capability: int = 90,
) -> dict[str, Any]:
    """Compile with arguments of `types` (else i32), multiples of 16 unless they are `loose`."""
    names = kernel.arg_names
    if "OVERLAPS" in names:
        constants = {"OVERLAPS": capability >= 90} | constants
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = [n for n in names if n not in constants and n not in loose]
    ast = source(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    compiled: Any = triton.compile(ast, target=target, options=options)
    ptx = compiled.asm["ptx"]
    return {
        "shared": compiled.metadata.shared,
        "mma": "mma" in ptx,
        "wgmma": "wgmma.mma" in ptx,
        "stack": stack_bytes(compiled.asm["cubin"]),
    }


def stack_bytes(cubin: bytes) -> int:
    """Local memory of a thread: what does not fit into its registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"STACK:(\d+)", usage)[-1])


def unpacking() -> dict[str, dict[str, Any]]:
    """Unpacking of every format."""
    return {format: unpacked(format) for format in FORMATS[1:]}


def experts() -> dict[str, dict[str, Any]]:
    """Products of experts in every format."""
    found = {
        f"{format} {gate} {mode} {wx}": grouped(format, gate, mode, wx=wx)
        for format in FORMATS
        for gate, mode, wx in ((1, 2, True), (0, 0, False))
    }
    for format in ("plain", "int4"):  # parts of a sum
        found[f"{format} 0 1 True"] = grouped(format, 0, 1, wx=True)
    for name, config in IN_REGISTERS.items():
        cases = [("mxfp4", 32, 2, 2), ("fp8", 128, 1, 2)]
        if name in ("registers m16", "warpgroup m128"):  # one of each kind
            cases += [("fp8", 128, 0, 1), ("fp8", 0, 0, 0)]
        for format, scale_k, gate, mode in cases:
            needs = in_registers(format, scale_k, gate, mode, config)
            found[f"{format} {scale_k} {name} {gate} {mode}"] = needs
    return found


def plans() -> dict[str, dict[str, Any]]:
    """Plans of experts' tiles, of few and of many assignments."""
    types = dict.fromkeys(("order_ptr", "tiles_ptr", "next_ptr", "counts_ptr"), "*i32")
    types |= {"index_ptr": "*i32"}
    kernels = (experts_triton.plan_kernel, experts_triton.count_kernel, experts_triton.place_kernel)
    loose = ("num_assignments", "num_experts", "max_tiles")
    found = {}
    for experts, kernel in product((32, 128, 512), kernels):
        sizes: dict[str, Any] = {"BLOCK_M": 64, "ASSIGNMENTS": 512, "EXPERTS": experts}
        sizes |= {"BLOCK": 1024, "ROWS": 16, "TILES": 32}
        constants = {name: size for name, size in sizes.items() if name in kernel.arg_names}
        needs = compile_kernel(kernel, ASTSource, types, constants, {"num_warps": 4}, loose)
        found[f"{kernel.__name__} {experts}"] = needs
    return found


def fp8() -> dict[str, dict[str, Any]]:
    """Quantising of activations, and products with rows of weights."""
    types = {"q_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "x_ptr": "*bf16"}
    constants: dict[str, Any] = {"BLOCKS": 16, "SMALLEST": 1e-10, "LARGEST": 448.0}
    kernel = fp8_activations_triton.quantise_kernel
    found = {
        f"quantise, tiled {is_tiled}": compile_kernel(
            *(kernel, ASTSource, types),
            {**constants, "TILED": is_tiled, "GATED": not is_tiled},
            {"num_warps": 4},
            ("num_blocks",),
        )
        for is_tiled in (False, True)
    }
    types = dict.fromkeys(("x_scale_ptr", "scale_ptr", "partial_ptr"), "*fp32")
    types |= {"out_ptr": "*bf16", "residual_ptr": "*bf16", "arrivals_ptr": "*i32"}
    kernel = fp8_linear_gluon.linear_kernel
    for rows, outputs in product((64, 128), (4096, 24576)):
        cut = choose_linear_config(rows, outputs, 4096)
        types |= {"x_rows": boxes(64), "w_rows": boxes(cut.block_n)}
        constants = {"BLOCK_M": 64, "BLOCK_N": cut.block_n, "SPLIT_K": cut.split_k}
        constants |= {"STAGES": cut.num_stages, "HAS_RESIDUAL": rows == 64}
        options = {"num_warps": 4}
        loose = ("num_rows", "x_rows", "w_rows")
        found[f"product of {rows}, {outputs}"] = compile_kernel(
            kernel, GluonASTSource, types, constants, options, loose
        )
    return found


def boxes(rows: int) -> str:
    """The type of `fp8_linear._boxes`."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, 256], gl.float8e4nv)
    return f"tensordesc<fp8e4nv[{rows},256],{layout!r}>"


def fp8_of_experts() -> dict[str, dict[str, Any]]:
    """Products of experts with FP8 activations, in the engine's tiles and in others."""
    found = {}
    for config in (choose_fp8_config(1024, 16), IN_REGISTERS["warpgroup m128"]):
        for gate, mode in ((1, 2), (0, 2)):
            needs = in_registers("fp8", 128, gate, mode, config, in_fp8=True)
            found[f"m{config.block_m} {gate}"] = needs
    return found


def caches() -> dict[str, dict[str, Any]]:
    """Writes to 8-bit caches and attention over them, on cards with and without that type."""
    found = {}
    of_trees, steps_and_prompts = ((128, 16), (128, 64), (512, 64)), ((128, 8), (512, 900))
    for capability, cache in ((80, "*u8"), (90, "*fp8e4nv")):
        is_old = capability == 80  # it differs in how a key is converted, not in what is done
        found[f"write {capability}"] = kv_write(capability, cache)
        for head_dim, queries in steps_and_prompts[: 1 if is_old else 2]:
            needs = attention(capability, cache, head_dim, queries)
            found[f"attend {capability} {head_dim} {queries}"] = needs
        for head_dim, queries in () if is_old else of_trees:
            needs = attention(capability, cache, head_dim, queries, tree=True)
            found[f"attend {capability} {head_dim} {queries} tree"] = needs
    return found


def verification() -> dict[str, dict[str, Any]]:
    """Kernels that verify and draw drafts, of bfloat16 logits."""
    # Tensors of a step are int64 but for these.
    kernels = (
        draw_triton.weigh_kernel,
        draw_triton.draw_kernel,
        verify_triton.argmax_kernel,
        verify_triton.match_kernel,
        rejection_triton.weigh_rejected_kernel,
        rejection_triton.draw_rejected_kernel,
        drafts_draw_triton.write_draws_kernel,
        step_state_triton.report_kernel,
    )
    names = {name for kernel in kernels for name in kernel.arg_names}
    types = {name: "*i64" for name in names if name.endswith("_ptr")}
    types |= {"logits_ptr": "*bf16", "weights_ptr": "*fp64"}
    ints = ("argmax_ptr", "chunk_argmax_ptr", "threshold_ptr", "last_tie_ptr", "index_ptr")
    types |= dict.fromkeys(ints, "*i32")
    floats = ("temperature_ptr", "max_ptr", "chunk_max_ptr", "total_ptr", "q_ptr", "rates_ptr")
    types |= dict.fromkeys(floats, "*fp32")
    loose = tuple(name for name in names if not name.endswith("_ptr"))
    sizes: dict[str, Any] = {"CHUNKS": 128, "CHUNK": 2048, "COLUMNS": 8, "STOP_IDS": 8}

    def compiled(kernel: Any, num_warps: int, **flags: Any) -> dict[str, Any]:
        constants = {n: v for n, v in {**sizes, **flags}.items() if n in kernel.arg_names}
        options = {"num_warps": num_warps}
        return compile_kernel(kernel, ASTSource, types, constants, options, loose)

    found = {
        "weigh": compiled(draw_triton.weigh_kernel, 4),
        "argmax": compiled(verify_triton.argmax_kernel, 1),
    }
    purpose = int(Purpose.SAMPLE)
    for has_offsets in (False, True):
        found[f"draw {has_offsets}"] = compiled(
            draw_triton.draw_kernel, 4, PURPOSE=purpose, HAS_OFFSETS=has_offsets
        )
    for has_parents in (False, True):
        found[f"report {has_parents}"] = compiled(
            step_state_triton.report_kernel,
            1,
            HAS_PARENTS=has_parents,
            STAMPS=step_state_triton.NUM_STAMPS,
            STAMP_COLUMNS=8,
            TIMED=True,
        )
    for given in (False, True):
        for synthetic in (False, True):
            found[f"match {given} {synthetic}"] = compiled(
                verify_triton.match_kernel, 4, GIVEN=given, SYNTHETIC=synthetic
            )
    for kernel in kernels[4:6]:
        for has_index in (False, True):
            found[f"{kernel.__name__} {has_index}"] = compiled(
                kernel, 4, HAS_INDEX=has_index, REPLACES=True
            )
    for has_map in (False, True):
        found[f"keep draws {has_map}"] = compiled(kernels[6], 4, HAS_MAP=has_map)
    return found


def rules() -> dict[str, dict[str, Any]]:
    """Kernels of rules and log-probabilities, of bfloat16 logits."""
    chunk, join = logprobs_triton.chunk_logprobs_kernel, logprobs_triton.join_logprobs_kernel
    penalise = penalties_triton.penalise_kernel
    names = {name for kernel in (chunk, join, penalise) for name in kernel.arg_names}
    types = {name: "*i64" for name in names if name.endswith("_ptr")}
    types |= {"logits_ptr": "*bf16", "table_ptr": "*fp64"}
    types |= dict.fromkeys(("above_ptr", "top_ids_ptr", "outputs_ptr"), "*i32")
    types |= dict.fromkeys(("max_ptr", "sum_ptr", "top_ptr", "out_ptr"), "*fp32")
    types |= dict.fromkeys(("in_prompt_ptr", "before_ptr"), "*i1")
    types |= dict.fromkeys(("repetition_ptr", "presence_ptr", "frequency_ptr"), "*fp64")
    loose = tuple(name for name in names if not name.endswith("_ptr"))

    def compiled(kernel: Any, num_warps: int, **sizes: Any) -> dict[str, Any]:
        return compile_kernel(kernel, ASTSource, types, sizes, {"num_warps": num_warps}, loose)

    return {
        "penalise": compiled(penalise, 4, BLOCK=2048),
        "chunk": compiled(chunk, 8, MAX_TOP=32, CHUNK=4096),
        "join": compiled(join, 4, MAX_TOP=32, CHUNKS=64, CANDIDATES=2048),
    }


def trees() -> dict[str, dict[str, Any]]:
    """Kernels of candidate trees, of bfloat16 logits."""
    growth = growth_triton
    of_63: dict[str, Any] = {"N": 63, "ROWS": 64, "IS_CORRECTED": True, "HAS_MAP": True}
    of_63 |= {"HAS_CHOICE": False}
    kernels: dict[Any, tuple[int, list[dict[str, Any]]]] = {
        growth._best_of_part_kernel: (4, [{"PART": 2048}]),
        growth._best_of_slot_kernel: (16, [{"PARTS": 16}, {"PARTS": 128}]),
        growth._grow_kernel: (
            8,
            [
                of_63,
                of_63 | {"IS_CORRECTED": False, "num_roots": 1},
                of_63 | {"HAS_CHOICE": True},
            ],
        ),
        paths_triton.place_rows_kernel: (1, [{"ROWS": 64}]),
        paths_triton.descend_kernel: (1, [{"N": 63, "ROWS": 64}]),
        chains_triton.merge_chains_kernel: (4, [{"N": 63, "ROWS": 64, "FIELDS": 4}]),
        kv_moves_triton.move_slots_kernel: (4, [{"WORD": 4, "BLOCK_W": 512}]),
    }
    sizes: dict[str, Any] = {"C": 64, "WIDTH": 256, "RANK": 64, "PADDING": 256, "DEPTH": 7}
    sizes |= {"BLOCK_D": 8, "LENGTH": 7, "SCORE": 1, "WORTH": 1, "CELL": -1}
    found = {}
    for kernel, (num_warps, variants) in kernels.items():
        of_growth = kernel.fn.__module__ == growth.__name__
        types = {n: "*fp32" if of_growth else "*i64" for n in kernel.arg_names if n[-4:] == "_ptr"}
        if of_growth:
            bfloat16 = ("states_ptr", "embedded_ptr", "down_ptr", "weight_ptr")
            types |= dict.fromkeys(bfloat16, "*bf16")
            int64 = ("depths_ptr", "d2t_ptr", "which_ptr", "out_tokens_ptr", "out_parents_ptr")
            types |= dict.fromkeys(int64, "*i64")
            types |= dict.fromkeys(("tokens_ptr", "best_tokens_ptr"), "*i32")
        if kernel is growth._best_of_part_kernel:
            types["logits_ptr"] = "*bf16"
        types["inverse_temperature"] = "fp32"
        loose = tuple(n for n in kernel.arg_names if not n.endswith("_ptr"))
        for i, flags in enumerate(variants):
            constants = {n: v for n, v in {**sizes, **flags}.items() if n in kernel.arg_names}
            options = {"num_warps": num_warps}
            compiled = compile_kernel(kernel, ASTSource, types, constants, options, loose)
            found[f"{kernel.__name__} {i}"] = compiled
    return found


def beams() -> dict[str, dict[str, Any]]:
    """Kernels of beams of 4 and of 8 nodes, at the first depth and behind it."""
    int64 = {"depths_ptr", "tokens_ptr", "parents_ptr", "out_tokens_ptr", "out_parents_ptr"}
    found = {}
    for width, candidates in ((4, 128), (8, 512)):
        sizes: dict[str, Any] = {"W": width, "CHILDREN": width, "C": 64, "N": 63, "AT_ONCE": 16}
        sizes |= {"CANDIDATES": candidates}
        variants = [
            (beams_triton.extend_beams_kernel, {"IS_ROOT": True, "NODES": 1, "NODE_ROWS": 1}),
            (beams_triton.extend_beams_kernel, {"NODES": width, "NODE_ROWS": width}),
            (beams_triton.rank_candidates_kernel, {}),
        ]
        for i, (kernel, flags) in enumerate(variants):
            names = [n for n in kernel.arg_names if n[-4:] == "_ptr"]
            types = {n: "*fp32" if "scores" in n else "*i64" for n in names}
            if kernel is beams_triton.extend_beams_kernel:
                types |= {"logits_ptr": "*fp32", "others_ptr": "*fp32", "tokens_ptr": "*i32"}
            else:
                types |= {"ranks_ptr": "*i32"} | dict.fromkeys(int64, "*i64")
            every = {"IS_ROOT": False, **sizes, **flags}
            constants = {n: v for n, v in every.items() if n in kernel.arg_names}
            options = {"num_warps": 4 if width == 4 else 8}
            loose = tuple(n for n in kernel.arg_names if not n.endswith("_ptr"))
            compiled = compile_kernel(kernel, ASTSource, types, constants, options, loose)
            found[f"{kernel.__name__} {width} {i}"] = compiled
    return found


def corrections() -> dict[str, dict[str, Any]]:
    """Kernels of corrections, of bfloat16 logits; the walk over a slot, and over the first.

    The last three are of several corrections.
    """
    sizes: dict[str, Any] = {"ROWS": 16, "RANK": 64, "CHUNKS": 64, "HAS_MAP": True}
    sizes |= {"HAS_CHOICE": False}
    small = {"TOKENS": 128, "WIDTH": 32}
    large = {"TOKENS": 512, "WIDTH": 256, "IS_WIDE": False, "IS_FIRST": False, "TILES": 1}
    wide = {"TOKENS": 256, "WIDTH": 128, "IS_WIDE": True, "RANK": 128}
    walk, correct = correction_triton._walk_kernel, correction_triton._correct_kernel
    found = {}
    for kernel, own, warps in (
        (correct, small, 4),
        (walk, {**large, "OVERLAPS": True}, 8),
        (walk, {**large, "OVERLAPS": True, "IS_FIRST": True}, 8),
        (walk, {**large, "OVERLAPS": False, "TILES": 2}, 8),
        (walk, {**large, **wide, "OVERLAPS": True}, 8),
        (correct, {**small, "HAS_CHOICE": True}, 4),
        (walk, {**large, "OVERLAPS": True, "HAS_CHOICE": True, "TILES": 2}, 8),
        (walk, {**large, **wide, "OVERLAPS": True, "HAS_CHOICE": True}, 8),
    ):
        types = {n: "*bf16" for n in kernel.arg_names if n[-4:] == "_ptr"}
        types |= {n: "*i64" for n in ("drafts_ptr", "d2t_ptr", "which_ptr") if n in types}
        types |= {n: "*i32" for n in types if n.endswith(("argmax_ptr", "order_ptr"))}
        types |= {n: "*fp32" for n in types if n.endswith("_max_ptr")}
        constants = {n: v for n, v in {**sizes, **own}.items() if n in kernel.arg_names}
        loose = ("num_rows", "num_chunks")  # sizes of corrections are multiples of 16
        options = {"num_warps": warps} | ({"launch_pdl": True} if own.get("OVERLAPS") else {})
        compiled = compile_kernel(kernel, ASTSource, types, constants, options, loose)
        found[f"{kernel.__name__} {len(found)}"] = compiled
    return found


def copies() -> dict[str, dict[str, Any]]:
    """Kernels that find copies of the text and join them to trees of 31 and of 63 nodes."""
    floats = ("scores_ptr", "weights_ptr", "rates_ptr", "worths_ptr")
    types = dict.fromkeys(floats, "*fp32")
    types |= dict.fromkeys(
        ("text_ptr", "cells_ptr", "firsts_ptr", "ranks_ptr", "steps_ptr"), "*i32"
    )
    found = {}
    for nodes in (31, 63):
        width = power_of_two(nodes)
        sizes: dict[str, Any] = {"N": nodes, "NODES": width, "M": 8, "ROWS": 6}
        last = nodes + 6 * min(MAX_COPIED, nodes)
        sizes |= {"S": min(MAX_COPIED, nodes), "X": power_of_two(last), "CHUNK": 16, "LAST": last}
        sizes |= {"NUM_LENGTHS": NUM_LENGTHS, "NO_COPY": NO_COPY, "MAX_LOGIT": 8.0}
        sizes |= {
            "MIN_SCORE": -99.0,
            "UNIT": 2.0**-16,
            "PLACES": 128,
            "STEPS": 2,
            "LONGEST": MAX_MATCH,
        }
        warps = 1 if nodes < 32 else 4
        kernels = {copies_triton._find_kernel: 1, copies_triton._walk_kernel: warps}
        kernels |= {copies_triton._join_kernel: 8}
        for kernel, num_warps in kernels.items():
            of_kernel = {n: types.get(n, "*i64") for n in kernel.arg_names if n[-4:] == "_ptr"}
            constants = {n: v for n, v in sizes.items() if n in kernel.arg_names}
            loose = tuple(n for n in kernel.arg_names if not n.endswith("_ptr"))
            options = {"num_warps": num_warps}
            compiled = compile_kernel(kernel, ASTSource, of_kernel, constants, options, loose)
            found[f"{kernel.__name__} {nodes}"] = compiled
    return found


def _told(kind: Callable[[], dict[str, Any]]) -> dict[str, Any] | str:
    """Return what the kernels of a kind need, or the error of one that does not compile."""
    try:
        return kind()
    except Exception:
        return traceback.format_exc()


if __name__ == "__main__":
    kinds = (
        beams,
        copies,
        corrections,
        experts,
        plans,
        unpacking,
        fp8,
        fp8_of_experts,
        caches,
        verification,
        trees,
        rules,
    )
    print(json.dumps({kind.__name__: _told(kind) for kind in kinds}))
