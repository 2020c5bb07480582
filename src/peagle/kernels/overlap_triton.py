"""Kernels that begin before the launch before them is done: programmatic dependent launch.

`launch.overlapping` launches such a kernel. It waits before it writes anything, or reads what the
launch before may write, and lets the next launch begin then. So older launches are always done.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """Wait until the launch before this one is done, and let the next one begin."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
