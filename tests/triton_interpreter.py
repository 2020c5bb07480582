"""Triton's interpreter without work whose result it throws away."""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

_CHANGED = ("interpreter_builder", "_patch_lang", "_get_np_dtype")


def lighten() -> None:
    """Kernels compute what they computed, in less than half the time.

    Left out: the 64-bit copy of every sum and product of integers that looks for an overflow, which
    is reported in debug mode alone; putting `triton.language` into the interpreter's hands again
    for every function that a kernel calls; a new table of numpy's types for every tensor. An
    interpreter built otherwise than this knows of is left as it is. Once or often, it is the same.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    if not all(hasattr(interpreter, name) for name in _CHANGED):
        return
    builder = interpreter.interpreter_builder
    if not getattr(builder.options, "debug", True):
        builder.options = replace(builder.options, sanitize_overflow=False)
    if not hasattr(interpreter._patch_lang, "__wrapped__"):
        interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
        interpreter._get_np_dtype = _once_a_type(interpreter._get_np_dtype)


def _once_a_launch(patch_lang: Any) -> Any:
    """Patch `triton.language` once for each module of a launch, and put it back at its end."""
    scopes: dict[int, Any] = {}

    def patch(fn: Any) -> Any:
        is_launch = not scopes
        module = id(fn.__globals__)
        if module not in scopes:
            scopes[module] = patch_lang(fn)
        return SimpleNamespace(restore=restore if is_launch else lambda: None)

    def restore() -> None:
        for scope in reversed(scopes.values()):
            scope.restore()
        scopes.clear()

    patch.__wrapped__ = patch_lang  # type: ignore[attr-defined]
    return patch


def _once_a_type(np_dtype: Any) -> Any:
    known: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        scalar = dtype.scalar  # a block holds what its elements are
        if scalar.name not in known:
            known[scalar.name] = np_dtype(scalar)
        return known[scalar.name]

    return look_up
