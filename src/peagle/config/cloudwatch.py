"""CloudWatch's names of acceptance: the server writes them, `peagle deploy` reads them.

Counters count an interval, not the time since the start. So their sums over any time and any number
of instances are right, and pooled ratios too: 1 + sum(NumAcceptedTokens) / sum(NumDrafts).
"""

NAMESPACE = "peagle"

# Dimensions, named as those of SageMaker's own metrics.
ENDPOINT = "EndpointName"
VARIANT = "VariantName"
MODEL = "ModelName"  # in place of both, where the environment names no endpoint

# SageMaker does not name the endpoint to a container: `create` sets these variables.
ENDPOINT_VARIABLE = "PEAGLE_ENDPOINT_NAME"
VARIANT_VARIABLE = "PEAGLE_VARIANT_NAME"

NUM_DRAFTS = "NumDrafts"
NUM_DRAFT_TOKENS = "NumDraftTokens"
NUM_ACCEPTED_TOKENS = "NumAcceptedTokens"
ACCEPTANCE_LENGTH = "AcceptanceLength"


def num_accepted_at(position: int) -> str:
    """Return the name of the count of drafts accepted up to this position (from 0)."""
    return f"NumAcceptedTokensPos{position}"


def acceptance_at(position: int) -> str:
    """Return the name of the unconditional acceptance at this position (from 0)."""
    return f"AcceptancePos{position}"
