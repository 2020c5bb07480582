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
from peagle.speculation.verification import SamplingTensors
