"""Triton's interpreter without work whose result it throws away.

`tests/kernels/test_light_interpreter.py` holds that kernels compute what they computed.
"""

import importlib
import importlib.util
import inspect
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

_KNOWN = "3.9."  # the Triton whose parts are replaced
_MAX_CONSTANTS = 4096  # kept ones, and elements of each
# Of operands of one type: numpy's operation, and whether each may point (`operands` below).
_SUMS = {
    "__add__": (np.add, True, True),
    "__sub__": (np.subtract, True, False),
    "__mul__": (np.multiply, False, False),
}
_COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
_BITS = {"__and__": np.bitwise_and, "__or__": np.bitwise_or, "__xor__": np.bitwise_xor}


def lighten() -> None:
    """Kernels compute what they computed, in less than a fifth of the time.

    Left out: the 64-bit copy of every sum and product of integers that looks for an overflow, which
    is reported in debug mode alone; putting `triton.language` into the interpreter's hands again
    for every kernel, and back after it (nothing but kernels uses it where they are interpreted); a
    new table of numpy's types for every tensor, a new type for every value, and a new value for
    every constant. Another Triton than the known one is left as it is. Once or often, it is the
    same.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    if not importlib.import_module("triton").__version__.startswith(_KNOWN):
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    if hasattr(interpreter, "is_light"):
        return
    interpreter.is_light = True
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    core: Any = importlib.import_module("triton.language.core")
    _keep_types(core, interpreter)
    constants = _keep_constants(core, interpreter)
    _spread_lightly(core, interpreter)
    _lighten_values(core, interpreter)
    _patch_once(core, interpreter, _operators(core, interpreter, constants))
    _launch_lightly(interpreter)


def _keep_types(core: Any, interpreter: Any) -> None:
    """One object for each type of a block; questions about types by a look into a set."""
    constexpr, dtype, block_type = core.constexpr, core.dtype, core.block_type
    unwrap_any, make_block = core._unwrap_if_constexpr, block_type.__init__
    plain = {int, float, bool, str, type(None), core.tensor, dtype}
    blocks: dict[Any, Any] = {}

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is constexpr else unwrap_any(value)

    def kept(cls: Any, element_ty: Any, shape: Any) -> Any:
        if cls is not block_type:
            return object.__new__(cls)
        sizes = tuple([unwrap(size) for size in unwrap(shape)])
        block = blocks.get((element_ty.name, sizes))
        if block is None or block.element_ty is not element_ty:
            block = object.__new__(cls)
            make_block(block, element_ty, shape)
            block.sizes = sizes
            blocks[element_ty.name, sizes] = block
        return block

    def made(self: Any, element_ty: Any, shape: Any) -> None:
        if type(self) is not block_type:
            make_block(self, element_ty, shape)

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        others = self.__dict__.setdefault("others", {})
        block = others.get(scalar_ty.name)
        if block is None or block.element_ty is not scalar_ty:
            block = others[scalar_ty.name] = block_type(scalar_ty, self.shape)
        return block

    def to_ir(self: Any, builder: Any) -> Any:
        return self

    def equal(self: Any, other: Any) -> bool:
        if self is other:
            return True
        other = unwrap(other)
        return isinstance(other, dtype) and self.name == other.name

    core._unwrap_if_constexpr = unwrap
    block_type.__new__, block_type.__init__ = kept, made
    block_type.with_element_ty, block_type.to_ir = with_element_ty, to_ir
    dtype.__eq__ = equal
    for name, members in (
        ("is_floating", dtype.FP_TYPES),
        ("is_standard_floating", dtype.STANDARD_FP_TYPES),
        ("is_int_signed", dtype.SINT_TYPES),
        ("is_int_unsigned", dtype.UINT_TYPES),
        ("is_int", dtype.SINT_TYPES + dtype.UINT_TYPES),
    ):
        setattr(dtype, name, _asks(frozenset(members)))
    interpreter._get_np_dtype = _once_a_type(interpreter._get_np_dtype)


def _asks(names: frozenset[str]) -> Any:
    return lambda self: self.name in names


def _once_a_type(np_dtype: Any) -> Any:
    known: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        scalar = dtype.scalar  # a block holds what its elements are
        if scalar.name not in known:
            known[scalar.name] = np_dtype(scalar)
        return known[scalar.name]

    return look_up


def _keep_constants(core: Any, interpreter: Any) -> dict[Any, Any]:
    """The number in `tensor + 1` is made and spread once, what becomes of two types found once."""
    tensor = core.tensor
    semantic: Any = type(interpreter.interpreter_semantic)
    check = semantic.binary_op_type_checking_impl
    conversions: dict[Any, list[Any]] = {}
    kept: dict[Any, Any] = {}

    def operands(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        rest = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        is_left, is_right = type(lhs) is tensor, type(rhs) is tensor
        if is_left and is_right:
            key = lhs.dtype.name, rhs.dtype.name, rest
            wanted = conversions.get(key)
            if wanted is None:
                pair = check(self, lhs, rhs, *rest)
                names = key[:2]
                conversions[key] = [
                    None if value.dtype.name == name else value.dtype
                    for value, name in zip(pair, names)
                ]
                return pair
            left, right = wanted
            return self.broadcast_impl_value(
                lhs if left is None else self.cast(lhs, left),
                rhs if right is None else self.cast(rhs, right),
            )
        number, given = (rhs, lhs) if is_left else (lhs, rhs)
        is_known = type(given) is tensor and type(number) in (int, float, bool)
        if not is_known or (type(number) is float and not number):  # zero has two signs
            return check(self, lhs, rhs, *rest)
        key = is_left, number, type(number), given.type.name, rest
        constant = kept.get(key)
        if constant is not None:
            return (given, constant) if is_left else (constant, given)
        pair = check(self, lhs, rhs, *rest)
        same, constant = pair if is_left else reversed(pair)
        if same is given and number == number and constant.numel.value <= _MAX_CONSTANTS:
            if len(kept) >= _MAX_CONSTANTS:
                kept.clear()
            constant.handle.data.setflags(write=False)
            kept[key] = constant
        return pair

    semantic.binary_op_type_checking_impl = operands
    return kept


def _operators(core: Any, interpreter: Any, constants: dict[Any, Any]) -> dict[str, Any]:
    """Operators of tensors: each makes one from what computes in general.

    Operands of one type, or one and a constant that is kept, go to numpy at once, which spreads
    them as Triton does where shapes fit. So do places behind a pointer, and new axes.
    """
    tensor, handle_of, constexpr = core.tensor, interpreter.TensorHandle, core.constexpr
    pointer_type, dtype = core.pointer_type, core.dtype
    integers = frozenset(dtype.SINT_TYPES + dtype.UINT_TYPES)
    numbers = (integers - {"int1"}) | {"fp16", "fp32", "fp64"}  # bfloat16 is held as integers
    types: dict[Any, Any] = {}

    def joined(own: Any, other: Any) -> Any:
        """The type of what the shapes of both make, with the elements of the first, or None."""
        key = own.name, other.name
        if key not in types:
            ours, theirs = getattr(own, "sizes", None), getattr(other, "sizes", None)
            if theirs is None or ours == theirs:
                types[key] = own
            elif ours is None:
                types[key] = other.with_element_ty(own)
            elif len(ours) == len(theirs) and all(
                1 in (a, b) or a == b for a, b in zip(ours, theirs)
            ):
                sizes = [b if a == 1 else a for a, b in zip(ours, theirs)]
                types[key] = core.block_type(own.element_ty, sizes)
            else:
                types[key] = None
        return types[key]

    def direct(compute: Any, names: frozenset[str], rest: Any, is_comparison: bool) -> Any:
        def make(general: Callable[..., Any]) -> Callable[..., Any]:
            def operate(self: Any, other: Any) -> Any:
                kind, found_type = type(other), self.type
                if kind is constexpr:
                    other = other.value
                    kind = type(other)
                if self.dtype.name not in names:
                    if points and kind is tensor and type(self.dtype) is pointer_type:
                        return behind(self, other) or general(self, other)
                    return general(self, other)
                if kind is tensor:
                    right = other
                    if other.type is not found_type:
                        # Triton spreads a truth value as the type that it was loaded as.
                        is_one = other.dtype is self.dtype and self.dtype.name != "int1"
                        found_type = joined(found_type, other.type) if is_one else None
                        if found_type is None:
                            return general(self, other)
                else:
                    is_number = kind is int or kind is float or kind is bool
                    key = True, other, kind, found_type.name, rest
                    right = constants.get(key) if is_number else None
                    if right is None:
                        return general(self, other)
                handle, data = self.handle, self.handle.data
                if data.dtype is not right.handle.data.dtype:  # a truth value, held as an integer
                    return general(self, other)
                data = compute(data, right.handle.data)
                if is_comparison:
                    found_type = found_type.with_element_ty(core.int1)
                return tensor(handle_of(data, handle.dtype.scalar), found_type)

            points = compute is np.add
            return operate

        return make

    def behind(pointer: Any, places: Any) -> Any:
        found_type = joined(pointer.type, places.type)
        if found_type is None or places.dtype.name not in ("int32", "int64"):
            return None
        handle = pointer.handle
        num_bytes = max(1, handle.get_element_ty().primitive_bitwidth // 8)
        data = handle.data + num_bytes * places.handle.data.astype(np.uint64)
        return tensor(handle_of(data, handle.dtype), found_type)

    def with_axes(general: Callable[..., Any]) -> Callable[..., Any]:
        def get(self: Any, slices: Any) -> Any:
            if type(slices) is not tuple or not self.type.is_block():
                return general(self, slices)
            if any(one is not None and one != slice(None) for one in slices):
                return general(self, slices)
            handle = self.handle
            key = self.type.name, tuple([one is None for one in slices])
            if key not in types:
                types[key] = general(self, slices).type
            return tensor(handle_of(handle.data[slices], handle.dtype.scalar), types[key])

        return get

    plain = False, False, True, False
    return {
        **{
            name: direct(compute, numbers, (*points, True, False), False)
            for name, (compute, *points) in _SUMS.items()
        },
        **{name: direct(compute, numbers, plain, True) for name, compute in _COMPARISONS.items()},
        **{name: direct(compute, integers, plain, False) for name, compute in _BITS.items()},
        "__getitem__": with_axes,
    }


def _spread_lightly(core: Any, interpreter: Any) -> None:
    """Shapes are compared as plain tuples; a value of the wanted type is not asked what it is."""
    tensor, handle_of = core.tensor, interpreter.TensorHandle
    semantic: Any = type(interpreter.interpreter_semantic)
    builder: Any = type(interpreter.interpreter_builder)
    broadcast, cast = semantic.broadcast_impl_value, semantic.cast
    create_splat = builder.create_splat
    integers = {"int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
    floats = {"fp16", "fp32", "fp64"}  # bfloat16 is held as integers
    converts = dict.fromkeys(integers - {"int1"}, integers)
    converts |= {"fp32": integers | floats, "fp64": integers | {"fp32", "fp64"}}

    def spread(self: Any, scalar: Any, block: Any) -> Any:
        block = block.with_element_ty(scalar.type)
        return tensor(self.builder.create_splat(block, scalar.handle), block)

    def together(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        lhs_ty, rhs_ty = lhs.type, rhs.type
        left, right = getattr(lhs_ty, "sizes", None), getattr(rhs_ty, "sizes", None)
        if left == right:
            return lhs, rhs
        if left is None:
            return spread(self, lhs, rhs_ty), rhs
        if right is None:
            return lhs, spread(self, rhs, lhs_ty)
        if len(left) != len(right):
            return broadcast(self, lhs, rhs)
        sizes = tuple([r if size == 1 else size for size, r in zip(left, right)])
        if any(r not in (1, size) for size, r in zip(sizes, right)):
            return broadcast(self, lhs, rhs)
        return stretched(self, lhs, sizes), stretched(self, rhs, sizes)

    def stretched(self: Any, value: Any, sizes: tuple[int, ...]) -> Any:
        if value.type.sizes == sizes:
            return value
        handle = self.builder.create_broadcast(value.handle, sizes)
        return tensor(handle, core.block_type(value.dtype, list(sizes)))

    def converted(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        if input.dtype is dst_ty:
            return input
        is_plain = dst_ty.name in converts and input.dtype.name in converts[dst_ty.name]
        if not is_plain or fp_downcast_rounding is not None:
            return cast(self, input, dst_ty, fp_downcast_rounding)
        data = input.handle.data.astype(interpreter._get_np_dtype(dst_ty))
        return tensor(handle_of(data, dst_ty), input.type.with_element_ty(dst_ty))

    def splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        if arg.dtype.is_block():
            return create_splat(self, ret_ty, arg)
        data = np.full(ret_ty.sizes, arg.data, dtype=interpreter._get_np_dtype(arg.dtype))
        return handle_of(data, arg.dtype.scalar)

    semantic.broadcast_impl_value, semantic.cast = together, converted
    builder.create_splat = splat


def _lighten_values(core: Any, interpreter: Any) -> None:
    """Values of a type share its shape; handles are made without a dataclass's detours."""
    constexpr, handle_of = core.constexpr, interpreter.TensorHandle
    check_size, pointer_type = handle_of.__post_init__, core.pointer_type

    def make(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type = handle, type
        try:
            self.dtype, self.shape, self.numel = type.facts
        except AttributeError:
            sizes = type.shape if type.is_block() else ()
            shape = core.tuple([constexpr(size) for size in sizes])
            type.facts = type.scalar, shape, constexpr(math.prod(sizes))
            self.dtype, self.shape, self.numel = type.facts

    def hold(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if type(dtype) is not pointer_type and data.itemsize * 8 > dtype.primitive_bitwidth:
            check_size(self)

    core.tensor.__init__ = make
    handle_of.__init__ = hold


def _patch_once(core: Any, interpreter: Any, operators: dict[str, Any]) -> None:
    """Patch `triton.language` once for each module of kernels, for good."""
    patch_lang, semantic = interpreter._patch_lang, interpreter.interpreter_semantic
    is_builtin, wrapper = core.is_builtin, core.builtin(lambda: None).__code__
    nothing = SimpleNamespace(restore=lambda: None)
    modules: set[int] = set()

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = member
        while is_builtin(inner) and getattr(inner, "__code__", None) is wrapper:
            inner = inner.__wrapped__  # it is given what the wrapper asks for

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        is_operator = obj is core.tensor and name in operators
        scope.set_attr(obj, name, operators[name](call) if is_operator else call)

    def patch(fn: FunctionType) -> Any:
        module = id(fn.__globals__)
        if module not in modules:
            modules.add(module)
            kept_modules.append(fn.__globals__)
            patch_lang(fn)
        return nothing

    kept_modules: list[Any] = []  # so that no other gets the id of one
    interpreter._patch_attr = patch_attr
    interpreter._patch_lang = patch


def _launch_lightly(interpreter: Any) -> None:
    """The signature of a kernel is read once."""
    names = ("getfullargspec", "get_annotations")
    once = {name: lru_cache(maxsize=None)(getattr(inspect, name)) for name in names}
    interpreter.inspect = SimpleNamespace(**{**vars(inspect), **once})
