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
    RUNTIME_KEYS,
    CandidateTrees,
    SpeculativeConfig,
    TreeShape,
    speculative_keys,
)
from peagle.config.structured import StructuredOutput
