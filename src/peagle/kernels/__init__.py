"""Numerical kernels. Each has a plain-torch reference, which is also what runs on a CPU."""
