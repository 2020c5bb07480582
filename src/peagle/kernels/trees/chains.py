"""Chains of drawn drafts that lead candidate trees.

A drawn draft passes by rejection sampling, as often as the head's distribution agrees with the
target's; a node of a tree passes if the target draws just that token. At a high temperature the
first is likelier, at a low one the second. A tree that a drawn chain leads has both: its first
nodes are the chain, and the others are the likeliest nodes that a head and a text have. Where the
chain is rejected, the token drawn in its place may be one of them, and the target's own tokens
decide behind it (`speculation.verification`).
"""

from __future__ import annotations

from collections.abc import Sequence

from peagle.kernels.trees.copies import NO_COPY, Tree
from peagle.kernels.trees.survival import DRAWN_SCORE, SURELY_VERIFIED


def merge_chain(tree: Tree, chain: Sequence[int], max_nodes: int) -> Tree:
    """Return a tree whose first nodes are a drawn chain, and then the nodes of another tree.

    Nodes of that tree that are on the chain's path are the chain's. The others keep their order,
    and the last ones are left out where there are more than `max_nodes` in all.

    Args:
        tree: parents stand before their children, and children of one node differ.
        chain: tokens of the drawn drafts. They get DRAWN_SCORE and are sure to be verified.
    """
    chain = chain[:max_nodes]
    rows = {node: row for row, node in enumerate(zip(tree.parents, tree.tokens, strict=True), 1)}
    new_rows, at = {0: 0}, 0
    for row, token in enumerate(chain, 1):
        at = rows.get((at, token), -1)
        new_rows[at] = row
    others = [node for node in range(len(tree.tokens)) if node + 1 not in new_rows]
    others = others[: max_nodes - len(chain)]
    new_rows |= {node + 1: row for row, node in enumerate(others, len(chain) + 1)}
    return Tree(
        [*chain, *(tree.tokens[node] for node in others)],
        [*range(len(chain)), *(new_rows[tree.parents[node]] for node in others)],
        [DRAWN_SCORE] * len(chain) + [tree.scores[node] for node in others],
        [SURELY_VERIFIED] * len(chain) + [tree.worths[node] for node in others],
        [NO_COPY] * len(chain) + [tree.cells[node] for node in others],
    )


def count_drawn(scores: Sequence[float] | None) -> int:
    """Return how many nodes of a tree are drafts of a drawn chain, by the scores of its nodes."""
    return sum(score > 0 for score in scores or ())
