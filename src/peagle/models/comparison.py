"""How far the outputs of a module may move when another kernel computes them."""

import torch
from torch import Tensor

# Largest `relative_difference` of a module's outputs: other kernels round otherwise.
_TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
_TOLERANCE = 1e-5  # float64 too: some norms compute in float32 whatever comes in


def relative_difference(after: Tensor, before: Tensor) -> float:
    """|after - before| / |before|; 0 where both are zero."""
    difference = (after.double() - before.double()).norm()
    return float(difference / before.double().norm()) if difference != 0 else 0.0


def tolerance(dtype: torch.dtype) -> float:
    """Return the `relative_difference` up to which outputs of a type count as the same."""
    return _TOLERANCES.get(dtype, _TOLERANCE)
