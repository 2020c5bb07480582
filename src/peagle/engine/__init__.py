"""The engine: continuous batching over a paged KV cache, prompts in chunks, one draft a step."""

from peagle.engine.engine import LLMEngine
from peagle.engine.sequence import Sequence, SequenceStatus
from peagle.engine.stats import Calibration, EngineStats, SpeculationStats
