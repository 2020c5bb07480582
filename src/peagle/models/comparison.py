"""How far outputs may move when another kernel, or another batch, computes them."""

import torch
from torch import Tensor

# Largest `relative_difference` of a module's outputs: other kernels round otherwise.
_TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
_TOLERANCE = 1e-5  # float64 too: some norms compute in float32 whatever comes in
NEAR_TIE = 1e-4
# Logits of 16-bit models are themselves rounded: in bfloat16 two of size 8 to 16 are 0.0625 apart
# or equal.
_NEAR_TIES = {torch.bfloat16: 0.25, torch.float16: 2**-5, torch.float64: 1e-9}


def relative_difference(after: Tensor, before: Tensor) -> float:
    """|after - before| / |before|; 0 where both are zero."""
    difference = (after.double() - before.double()).norm()
    return float(difference / before.double().norm()) if difference != 0 else 0.0


def tolerance(dtype: torch.dtype) -> float:
    """Return the `relative_difference` up to which outputs of a type count as the same."""
    return _TOLERANCES.get(dtype, _TOLERANCE)


def near_tie_bound(dtype: torch.dtype) -> float:
    """Return the largest gap between two logits whose order rounding can reverse."""
    return _NEAR_TIES.get(dtype, NEAR_TIE)
