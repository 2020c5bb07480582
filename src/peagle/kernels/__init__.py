"""Numerical kernels. Each has a plain-torch reference, which also runs on a CPU.

`x.py` holds the reference or the launch, `x_triton.py` (`x_gluon.py`) the kernels.
"""
