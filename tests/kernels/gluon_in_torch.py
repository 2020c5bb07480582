"""Gluon's language in plain torch, one program after the other, so that its kernels run on a CPU.

Layouts mean nothing here: compiling proves those. What a kernel loads, computes and stores is what
it says, and its assembly is read instruction by instruction.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

GLUON = "triton.experimental.gluon"
SHARED = "peagle.kernels.linear.hopper_gluon"  # by all of our kernels
WORD = 1 << 32


class Pointer:
    """Places in a tensor's memory, a tensor or a number, counted in its elements."""

    def __init__(self, memory: Tensor, place: Any = 0) -> None:
        self.memory, self.place = memory, place
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.place + offset)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, self.place[index])

    def to(self, dtype: torch.dtype) -> Pointer:
        assert not bool((self.place * self.memory.itemsize % dtype.itemsize).any())
        place = self.place * self.memory.itemsize // dtype.itemsize
        return Pointer(self.memory.view(dtype), place)


class Shared:
    """A tensor in shared memory."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.shape = values, values.shape

    def index(self, i: int) -> Shared:
        return Shared(self.values[i])

    def slice(self, first: int, length: int, dim: int) -> Shared:
        return Shared(self.values.narrow(dim, first, length))

    def permute(self, order: list[int]) -> Shared:
        return Shared(self.values.permute(order))

    def load(self, layout: Any) -> Tensor:
        return self.values.clone()


def load(pointer: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> Any:
    place = torch.as_tensor(pointer.place)
    if mask is not None:
        place, mask = torch.broadcast_tensors(place, mask)
        place = torch.where(mask, place, 0)
    assert bool((place >= 0).all()) and bool((place < pointer.memory.numel()).all())
    is_byte = pointer.memory.itemsize == 1  # torch moves FP8 as bytes alone
    memory = pointer.memory.view(torch.uint8) if is_byte else pointer.memory
    values = memory[place] if mask is None else torch.where(mask, memory[place], other)
    return values.view(pointer.memory.dtype) if is_byte else values


def store(pointer: Pointer, values: Any, mask: Any = None) -> None:
    place, values = torch.broadcast_tensors(
        torch.as_tensor(pointer.place), torch.as_tensor(values, dtype=pointer.memory.dtype)
    )
    chosen = torch.ones_like(place, dtype=torch.bool) if mask is None else mask.expand(place.shape)
    pointer.memory[place[chosen]] = values[chosen]


def assembly(text: str, results: str, inputs: list[Tensor], types_: Any, *_: Any) -> Any:
    """Run instructions on words of 32 bits; results are halves of them, in bfloat16."""
    count = results.count("=h")
    registers = run_assembly(text, {f"${count + i}": value for i, value in enumerate(inputs)})
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in inputs))
    return [registers[f"${i}"].to(torch.bfloat16).expand(shape) for i in range(count)]


def run_assembly(text: str, words: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run instructions on words of 32 bits, by the names of registers; return all registers."""
    registers = {name: word.long() % WORD for name, word in words.items()}

    def value(name: str) -> Tensor:
        found = registers.get(name)
        return torch.tensor(int(name, 0)) if found is None else found

    for line in re.findall(r"^\s*([a-z].*);", text, re.MULTILINE):
        operation, _, rest = line.partition(" ")
        names = re.findall(r"[$\w]+", rest)
        if operation == "mov.b32" and "{" in rest:
            registers[names[0]], registers[names[1]] = halves(value(names[2]))
        else:
            registers[names[0]] = OPERATIONS[operation](*map(value, names[1:])) % WORD
    return registers


def halves(words: Tensor) -> tuple[Tensor, Tensor]:
    """The low and the high half of words as bfloat16."""
    pairs = words.to(torch.int32).unsqueeze(-1).view(torch.bfloat16)
    return pairs[..., 0], pairs[..., 1]


def multiply_halves(a: Tensor, b: Tensor) -> Tensor:
    both = [x * y for x, y in zip(halves(a), halves(b), strict=True)]
    return torch.stack(both, -1).view(torch.int32).squeeze(-1).long()


def look_up(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    """Bit 4a + 2b + c of the table, for each bit of the words."""
    out = torch.zeros_like(a)
    for i in range(8):
        if int(table) >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "lop3.b32": look_up,
    "mul.bf16x2": multiply_halves,
}


def least(a: Any, b: Any) -> Any:
    return torch.minimum(torch.as_tensor(a), torch.as_tensor(b)) if is_tensor(a, b) else min(a, b)


def most(a: Any, b: Any) -> Any:
    return torch.maximum(*map(torch.as_tensor, (a, b))) if is_tensor(a, b) else max(a, b)


def choose(condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b) if is_tensor(condition) else a if condition else b


def is_tensor(*values: Any) -> bool:
    return any(isinstance(value, Tensor) for value in values)


def multiply(a: Any, b: Any, acc: Tensor, use_acc: bool = True, **_: Any) -> Tensor:
    a, b = (tile.values if isinstance(tile, Shared) else tile for tile in (a, b))
    return a.float() @ b.float() + (acc if use_acc else 0)


def copy_into_shared(tile: Shared, pointer: Pointer, mask: Tensor) -> None:
    tile.values.copy_(load(pointer, mask))


def expect_bytes(barrier: Shared, size: int, pred: bool) -> None:
    barrier.values += int(pred)


def wait_for_bytes(barrier: Shared, phase: int) -> None:
    """Check that what is waited for is on its way, and not what comes after it."""
    assert int(barrier.values) and (int(barrier.values) - 1) % 2 == int(phase)


def load_box(box: Any, place: list[Any], barrier: Any, tile: Shared, is_there: bool) -> None:
    """Bring a box of a matrix; zeros where the matrix has no numbers."""
    if is_there:
        (row, column), (rows, columns) = map(int, place), box.block_shape
        found = box.base[row : row + rows, column : column + columns]
        tile.values.zero_()
        tile.values[: found.shape[0], : found.shape[1]] = found


def atomic_add(pointer: Pointer, amount: int, **_: Any) -> int:
    before = int(pointer.memory[pointer.place])
    pointer.memory[pointer.place] = before + amount
    return before


def language(grid: SimpleNamespace) -> Any:
    """What `gl` has, as far as our kernels use it."""
    layouts = (
        "BlockedLayout",
        "DotOperandLayout",
        "NVMMADistributedLayout",
        "NVMMASharedLayout",
        "SliceLayout",
        "SwizzledSharedLayout",
    )
    return SimpleNamespace(
        **{name: getattr(torch, name) for name in ("int32", "int64", "float32", "bfloat16")},
        uint8=torch.uint8,
        float8e4nv=torch.float8_e4m3fn,
        **dict.fromkeys((*layouts, "barrier"), nothing),
        constexpr=lambda value: value,
        pointer_type=lambda dtype: dtype,
        program_id=lambda axis: torch.tensor(grid.program[axis]),
        num_programs=lambda axis: grid.size[axis],
        num_warps=lambda: grid.num_warps,
        arange=lambda first, end, layout: torch.arange(first, end),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full_like=torch.full_like,
        exp=torch.exp,
        join=lambda a, b: torch.stack([a, b], -1),
        split=lambda values: values.unbind(-1),
        where=choose,
        minimum=least,
        maximum=most,
        load=load,
        store=store,
        atomic_add=atomic_add,
        static_range=range,
        convert_layout=lambda values, layout, assert_trivial=False: values,
        allocate_shared_memory=lambda dtype, shape, layout: Shared(torch.zeros(shape, dtype=dtype)),
        inline_asm_elementwise=assembly,
    )


def nothing(*_: Any, **__: Any) -> None:
    """Layouts, barriers and waits."""


def launcher_of(name: str, kernel: str) -> Callable[..., None]:
    """Return what launches a kernel of a module of Gluon as `launch` does, here."""
    grid = SimpleNamespace()
    gluon = SimpleNamespace(jit=lambda f=None, **_: f or (lambda g: g), language=language(grid))
    copies = SimpleNamespace(async_load=copy_into_shared, commit_group=nothing, wait_group=nothing)
    warpgroup = SimpleNamespace(
        fence_async_shared=nothing,
        tma=SimpleNamespace(async_load=load_box),
        mbarrier=SimpleNamespace(
            MBarrierLayout=nothing, init=nothing, expect=expect_bytes, wait=wait_for_bytes
        ),
        warpgroup_mma=multiply,
        warpgroup_mma_wait=lambda _, deps: deps if len(deps) > 1 else deps[0],
    )
    nvidia = f"{GLUON}.language.nvidia"
    modules: dict[str, Any] = {
        "triton.experimental": SimpleNamespace(gluon=gluon),
        GLUON: gluon,
        f"{nvidia}.ampere": SimpleNamespace(async_copy=copies, mma_v2=multiply),
        f"{nvidia}.hopper": warpgroup,
    }
    with patch.dict(sys.modules, modules):
        shared = SimpleNamespace(**_run(SHARED, {}))
        with patch.dict(sys.modules, {SHARED: shared}):
            module = _run(name, {"range": lambda *ends: range(*map(int, ends))})

    def launch(
        _: Any,
        size: tuple[int, ...],
        *arguments: Any,
        num_warps: int,
        maxnreg: int = 0,
        **options: Any,
    ) -> None:
        grid.size, grid.num_warps = size, num_warps
        values = [Pointer(memory_of(a)) if isinstance(a, Tensor) else a for a in arguments]
        for grid.program in product(*map(range, size)):
            module[kernel](*values, **options)

    return launch


def _run(name: str, module: dict[str, Any]) -> dict[str, Any]:
    """Run the source of a module of Gluon; return its names."""
    found = find_spec(name)
    assert found is not None and found.origin is not None
    source = Path(found.origin).read_text().replace("out.type.layout", "None")
    module["__name__"] = name
    exec(compile(source, found.origin, "exec"), module)
    return module


def memory_of(tensor: Tensor) -> Tensor:
    """All numbers that are stored from the first of a tensor on, in a row."""
    first = tensor.storage_offset()
    size = tensor.untyped_storage().nbytes() // tensor.itemsize - first
    return tensor.as_strided((size,), (1,), first)
