"""Launching Triton kernels from typed code."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """kernel[grid](...): type checkers take a jitted function for a plain one."""
    kernel[grid](*arguments, **options)
