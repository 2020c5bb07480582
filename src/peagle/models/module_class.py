"""Classes of modules that compute otherwise, and are what they were in all else."""

from functools import cache

from torch import nn


@cache
def class_with(first: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """Make the class of modules of a kind that have the `forward` of another class.

    It is one for all modules of the kind, so that they share compiled graphs.
    """
    name = f"{first.__name__}{kind.__name__}"
    return type(name, (first, kind), {"__module__": kind.__module__})
