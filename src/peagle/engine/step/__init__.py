"""The captured decode step: CUDA graphs that verify, draft and read prompts."""
