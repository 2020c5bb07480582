"""The most probable paths of drafts by an exact best-first search, one tree at a time."""

import heapq
from collections.abc import Callable

from torch import Tensor

Path = tuple[int, ...]


def exact_tree(logprobs_after: Callable[[Path], Tensor], depth: int, w: int, n: int) -> list[Path]:
    """Return the n most probable paths: each taken from a heap brings its sibling and first child.

    Args:
        logprobs_after: the log-probability of each token behind a path, [V].
        depth, w: most tokens of a path, and most first tokens.
    """
    heap: list[tuple[float, int, Path, float, list[tuple[float, int]], int]] = []

    def push(path: Path, score: float, ranked: list[tuple[float, int]], rank: int) -> None:
        if rank < (len(ranked) if path else min(w, len(ranked))):
            own, token = ranked[rank]
            entry = (-score - own, len(path) + 1, (*path, token), score, ranked, rank)
            heapq.heappush(heap, entry)

    def expand(path: Path, score: float) -> None:
        if len(path) < depth:
            values, tokens = (x.tolist() for x in logprobs_after(path).sort(descending=True))
            push(path, score, list(zip(values, tokens, strict=True)), 0)

    expand((), 0.0)
    found: list[Path] = []
    while heap and len(found) < n:
        negative, _, path, parent_score, ranked, rank = heapq.heappop(heap)
        found.append(path)
        push(path[:-1], parent_score, ranked, rank + 1)
        expand(path, -negative)
    return found


def paths_of(tokens: list[int], parents: list[int]) -> list[Path]:
    """Return the tokens on the path to each node of a tree."""
    rows: list[Path] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        rows.append((*rows[parent], token))
    return rows[1:]
