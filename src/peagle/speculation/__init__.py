"""Drafting and verification."""

from peagle.speculation.proposers import Drafts, Proposer, TargetStep
from peagle.speculation.verification import SamplingTensors, Verified, verify

__all__ = ["Drafts", "Proposer", "SamplingTensors", "TargetStep", "Verified", "verify"]
