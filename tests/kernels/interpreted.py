"""What Triton's interpreter makes of operations on all types, as JSON: `python -m` this module.

Every value is written down with its type, its shape and its bytes, every refusal with its words.
"""

import itertools
import json
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
import numpy as np
import torch
import triton
import triton.language as tl

TYPES = {
    tl.int1: torch.bool,
    tl.int8: torch.int8,
    tl.int32: torch.int32,
    tl.int64: torch.int64,
    tl.uint8: torch.uint8,
    tl.uint32: torch.uint32,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name)
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor"),
        *("lshift", "rshift", "lt", "le", "gt", "ge", "eq", "ne"),
    )
} | {
    "maximum": lambda x, y: tl.maximum(x, y),
    "where": lambda x, y: tl.where(x > y, x, y),
    "first where": lambda x, y: tl.where(x == x, x, y),
}
NUMBERS = (0, 1, -1, 3, 300, 2**31, 2**40, True, False, 0.0, -0.0, 1.5, -2.0, 1e-42, 1e300)
NUMBERS += (float("inf"), float("nan"))
FOUND: dict[str, list[Any]] = {}
PLACES = [0]  # where the memory is that pointers are into


def keep(label: str, compute: Callable[[], Any]) -> None:
    try:
        value = compute()
    except Exception as error:
        FOUND.setdefault(label, []).append([type(error).__name__, str(error)])
        return
    for one in value if isinstance(value, (list, tuple)) else [value]:
        data = one.handle.data
        if one.dtype.is_ptr():
            data = data - PLACES[0]
        fact = [str(one.dtype.name), [int(unwrapped(size)) for size in one.shape], one.type.name]
        fact += [one.numel.value, one.handle.dtype.name, list(data.shape), data.dtype.str]
        FOUND.setdefault(label, []).append([*fact, data.tobytes().hex()])


def unwrapped(size: Any) -> int:
    return getattr(size, "value", size)


@triton.jit
def twice(x):
    return x + x


@triton.jit
def add_pairs(x, y):
    return x * 3 + y


# The interpreter hands what is neither a number nor a tensor to a kernel as it is.
@triton.jit
def of_pairs(label, x_ptr, y_ptr, SIZE: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, SIZE))
    y = tl.load(y_ptr + tl.arange(0, SIZE))
    one = tl.load(y_ptr + 3)
    for name, operation in OPERATIONS.items():
        keep(f"{label} {name}", lambda operation=operation: operation(x, y))
        keep(f"{label} {name} scalar", lambda operation=operation: operation(x, one))
        keep(f"{label} scalar {name}", lambda operation=operation: operation(one, x))


@triton.jit
def of_numbers(label, x_ptr, SIZE: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, SIZE))
    one = tl.load(x_ptr + 2)
    for number, name in itertools.product(NUMBERS, OPERATIONS):
        for value in (x, one):
            for do in (
                lambda a=value, b=number, name=name: OPERATIONS[name](a, b),
                lambda a=value, b=number, name=name: OPERATIONS[name](b, a),
            ):
                keep(f"{label} {name} {number!r}", do)
    for to in TYPES:
        keep(f"{label} to {to}", lambda to=to: x.to(to))
        keep(f"{label} one to {to}", lambda to=to: one.to(to))
        keep(f"{label} as {to}", lambda to=to: x.to(to, bitcast=True))
        keep(f"{label} zeros of {to}", lambda to=to: tl.full((2, SIZE), 2, to) + x[None, :])


@triton.jit
def of_shapes(label, x_ptr, y_ptr, SIZE: tl.constexpr):
    row = tl.load(x_ptr + tl.arange(0, SIZE))
    place = tl.arange(0, SIZE)[:, None] * 2 + tl.arange(0, 2)[None, :]
    PLACES[0] = y_ptr.handle.data[0]
    table = tl.load(y_ptr + place, mask=place < SIZE + 3, other=1)
    keep(f"{label} place", lambda: y_ptr + place)
    keep(f"{label} place one", lambda: y_ptr + tl.program_id(0) + 2)
    keep(f"{label} place few", lambda: (y_ptr + tl.arange(0, SIZE)) + tl.load(y_ptr + 1))
    keep(
        f"{label} place cross",
        lambda: (y_ptr + tl.arange(0, SIZE)[:, None]) + tl.arange(0, 2)[None],
    )
    keep(
        f"{label} place sum", lambda: (y_ptr + tl.arange(0, 2)[None]) + tl.arange(0, SIZE)[:, None]
    )
    keep(f"{label} place misfit", lambda: (y_ptr + tl.arange(0, 2)) + tl.arange(0, SIZE))
    keep(f"{label} axes", lambda: (row[None, :], row[:, None], row[None, :, None], table[:, None]))
    keep(f"{label} no axes", lambda: row[0])
    keep(f"{label} many axes", lambda: row[:, :])
    keep(f"{label} place back", lambda: (y_ptr + place) - 1)
    keep(f"{label} bare", lambda: tl.load(y_ptr + place, mask=place < 3))
    for name, operation in OPERATIONS.items():
        keep(f"{label} {name} column", lambda operation=operation: operation(row[:, None], table))
        keep(
            f"{label} {name} cross", lambda operation=operation: operation(row[:, None], row[None])
        )
        keep(f"{label} {name} misfit", lambda operation=operation: operation(row, table))
        keep(
            f"{label} {name} other rank",
            lambda operation=operation: operation(table[:, :, None], table),
        )
    for axis in (0, 1):
        keep(f"{label} sum", lambda axis=axis: tl.sum(table, axis))
        keep(f"{label} max", lambda axis=axis: tl.max(table, axis, return_indices=True))
        keep(f"{label} argmin", lambda axis=axis: tl.argmin(table, axis))
        keep(f"{label} cumsum", lambda axis=axis: tl.cumsum(table, axis))
        keep(f"{label} reduce", lambda axis=axis: tl.reduce(table, axis, add_pairs))
    keep(f"{label} sum of all", lambda: tl.sum(table) + 1)
    keep(f"{label} reshape", lambda: tl.reshape(table, (2, SIZE)) * 2)
    keep(f"{label} turned", lambda: tl.trans(table) - row[None, :])
    keep(f"{label} spread", lambda: tl.broadcast_to(row[None, :], (4, SIZE)))
    keep(f"{label} dot", lambda: tl.dot(table.to(tl.float32), tl.trans(table).to(tl.float32)))
    keep(f"{label} sorted", lambda: tl.sort(row))
    keep(f"{label} called", lambda: twice(row) + twice(tl.program_id(0)))
    keep(f"{label} negative", lambda: -table)
    keep(f"{label} not", lambda: ~table)
    keep(f"{label} chain", lambda: (table > 0) & (table < 5) | (row[:, None] == 1))
    keep(f"{label} truths", lambda: (row == 1) | ((tl.load(y_ptr) > 0) & (row == row)))
    for name in ("abs", "exp", "sqrt", "floor", "log"):
        keep(f"{label} {name}", lambda name=name: getattr(tl, name)(table))
    keep(f"{label} fma", lambda: tl.fma(table, table, row[:, None]))
    keep(f"{label} clamp", lambda: tl.clamp(table, 0.5, 2.0))


def values(dtype: torch.dtype, seed: int) -> torch.Tensor:
    drawn = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, 16))
    if dtype in (torch.uint8, torch.uint32):
        drawn = drawn.abs()
    return torch.where(drawn.abs() < 1, 1.0, drawn).to(dtype)  # nothing is divided by zero


def run() -> dict[str, list[Any]]:
    """What is found, with numbers twice, so that what an interpreter keeps is used."""
    FOUND.clear()
    with np.errstate(all="ignore"):
        for label, kernel, arguments in launches():
            for again in ("", "again ") if kernel is of_numbers else ("",):
                kernel[(1,)](again + label, *arguments, SIZE=8)
    return dict(FOUND)


def launches() -> Iterator[tuple[str, Any, list[torch.Tensor]]]:
    for x in TYPES:
        data = values(TYPES[x], 0)
        yield f"{x}", of_numbers, [data]
        for y in TYPES:
            yield f"{x} {y}", of_pairs, [data, values(TYPES[y], 1)]
    for x, y in [(tl.int32, tl.int64), (tl.float32, tl.float32), (tl.bfloat16, tl.float32)]:
        yield f"{x} {y}", of_shapes, [values(TYPES[x], 0), values(TYPES[y], 1)]


if __name__ == "__main__":
    print(json.dumps(run()))
