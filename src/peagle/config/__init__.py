"""Configuration: frozen dataclasses, each default written once, each value checked when made."""

from peagle.config.checks import (
    require_folder,
    require_writable_file,
    require_writable_folder,
    token_ids,
)
from peagle.config.engine import DType, EngineConfig
from peagle.config.sampling import (
    MAX_LOGPROBS,
    MAX_OUTPUTS,
    MAX_SEED,
    MAX_STOP_STRINGS,
    SamplingParams,
    StructuredOutputsParams,
)
from peagle.config.speculative import (
    DEFAULT_K,
    MAX_SPECULATIVE_TOKENS,
    MAX_TREE_NODES,
    RUNTIME_KEYS,
    CandidateTrees,
    DraftSampling,
    Method,
    SpeculativeConfig,
    TreeShape,
    speculative_keys,
)
from peagle.config.structured import StructuredOutput

__all__ = [
    "DEFAULT_K",
    "MAX_LOGPROBS",
    "MAX_OUTPUTS",
    "MAX_SEED",
    "MAX_SPECULATIVE_TOKENS",
    "MAX_STOP_STRINGS",
    "MAX_TREE_NODES",
    "RUNTIME_KEYS",
    "CandidateTrees",
    "DType",
    "DraftSampling",
    "EngineConfig",
    "Method",
    "SamplingParams",
    "SpeculativeConfig",
    "StructuredOutput",
    "StructuredOutputsParams",
    "TreeShape",
    "require_folder",
    "require_writable_file",
    "require_writable_folder",
    "speculative_keys",
    "token_ids",
]
