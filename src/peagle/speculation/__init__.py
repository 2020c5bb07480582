"""Drafting and verification."""

from peagle.speculation.prompt_lookup import PromptLookup
from peagle.speculation.proposers import (
    AutoregressiveProposer,
    Drafts,
    HeadProposer,
    ParallelProposer,
    ProposerInput,
    TreeSlots,
)
from peagle.speculation.verification import SamplingTensors, Verified, verify

__all__ = [
    "AutoregressiveProposer",
    "Drafts",
    "HeadProposer",
    "ParallelProposer",
    "PromptLookup",
    "ProposerInput",
    "SamplingTensors",
    "TreeSlots",
    "Verified",
    "verify",
]
