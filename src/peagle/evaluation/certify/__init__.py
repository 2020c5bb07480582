"""The losslessness certificate: that drafts change nothing in what the target says."""

from peagle.evaluation.certify.certificate import Certificate
from peagle.evaluation.certify.run import Options, run

__all__ = ["Certificate", "Options", "run"]
