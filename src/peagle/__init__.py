"""Parallel-drafting speculative decoding (P-EAGLE) for Hugging Face causal language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peagle.async_llm import AsyncLLM
    from peagle.config import (
        EngineConfig,
        SamplingParams,
        SpeculativeConfig,
        StructuredOutput,
        StructuredOutputsParams,
    )
    from peagle.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "EngineConfig",
    "SamplingParams",
    "SpeculativeConfig",
    "StructuredOutput",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> object:
    # Imported on first use, so that `peagle --help` starts without torch.
    if name == "LLM":
        from peagle.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from peagle.async_llm import AsyncLLM

        return AsyncLLM
    if name in __all__:
        from peagle import config

        return getattr(config, name)
    raise AttributeError(f"module 'peagle' has no attribute {name!r}")


def __dir__() -> list[str]:
    # The names that are imported on first use are completed and listed like the others.
    return sorted({*globals(), *__all__})
