"""The engine: continuous batching over a paged KV cache, one target pass and one draft a step."""

from peagle.engine.engine import LLMEngine, StepOutput
from peagle.engine.sequence import Sequence, SequenceStatus, SpeculationStats

__all__ = ["LLMEngine", "Sequence", "SequenceStatus", "SpeculationStats", "StepOutput"]
