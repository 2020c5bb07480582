"""The losslessness certificate: that drafts change nothing in what the target says."""

from peagle.evaluation.certify.certificate import certificate_text
from peagle.evaluation.certify.run import Options, run

__all__ = ["Options", "certificate_text", "run"]
