"""The rows of a candidate tree: how deep they are, who sees whom, and the accepted path.

A tree has its root, the newest token, in row 0 and its nodes, the drafts, in the rows after it, a
parent always before its children.

Shapes: B sequences, N nodes of a tree, J = N + 1 rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.kernels.upload import upload_together


def row_depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of every row of a tree. The root is first and has depth 0."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


def path_nodes(parents: Sequence[int], tokens: Sequence[int], path: Iterable[int]) -> list[int]:
    """Return the nodes of a tree on the path of some tokens, from the root on."""
    found, row = [], 0
    for token in path:
        node = row  # children stand behind their parent
        while parents[node] != row or tokens[node] != token:
            node += 1
        found.append(node)
        row = node + 1
    return found


@dataclass(frozen=True, slots=True)
class TreePaths:
    """The paths from the root to every row of a tree.

    Attributes:
        parents_BN: int64, the row of each node's parent.
        visible_BJ: int64, bit i of row j says that row i is on the path to row j, which ends it.
        depths_BJ: int64, nodes on the path; 0 for the root.
        depth: D, known to the host.
    """

    parents_BN: Tensor
    visible_BJ: Tensor
    depths_BJ: Tensor
    depth: int

    @classmethod
    def of(cls, parents_BN: Tensor, depth: int) -> TreePaths:
        """Follow the parents, at most `depth` times; J may be 64 at most."""
        num_rows = parents_BN.shape[1] + 1
        assert num_rows <= 64, "a path is the bits of one word"
        parents_BJ = torch.nn.functional.pad(parents_BN, (1, 0))
        own_J = 1 << torch.arange(num_rows, device=parents_BN.device)
        visible_BJ = own_J.expand_as(parents_BJ)
        is_node_J = (own_J != 1).long()
        depths_BJ = is_node_J.expand_as(parents_BJ)
        for _ in range(depth):
            visible_BJ = own_J | visible_BJ.gather(1, parents_BJ)
            depths_BJ = is_node_J * (1 + depths_BJ.gather(1, parents_BJ))
        return cls(parents_BN, visible_BJ, depths_BJ, depth)

    @classmethod
    def of_lists(cls, trees: Sequence[Sequence[int]]) -> TreePaths:
        """Return `of` for trees that the host knows; missing nodes are children of the root."""
        most = max(map(len, trees))
        parents = [[*tree, *[0] * (most - len(tree))] for tree in trees]
        depths = [row_depths(tree) for tree in parents]
        visible = [[1] for _ in parents]
        for words, tree in zip(visible, parents, strict=True):
            for row, parent in enumerate(tree, start=1):
                words.append(words[parent] | 1 << row)
        visible_BJ = torch.tensor(visible, dtype=torch.uint64).view(torch.int64)
        return cls(torch.tensor(parents), visible_BJ, torch.tensor(depths), max(map(max, depths)))

    def to(self, device: torch.device | str) -> TreePaths:
        """Return the same paths on a device."""
        tensors = self.parents_BN, self.visible_BJ, self.depths_BJ
        parents_BN, visible_BJ, depths_BJ = upload_together(tensors, device)
        return TreePaths(parents_BN, visible_BJ, depths_BJ, self.depth)

    def reached(self, tokens_BJ: Tensor, drafts_BN: Tensor, num_draft_tokens_B: Tensor) -> Tensor:
        """Return which rows a descent comes to that goes to the child equal to a row's token.

        Args:
            tokens_BJ: the target's own tokens of the rows.
            drafts_BN: the nodes; columns at or above `num_draft_tokens_B` hold none.

        Returns:
            bool [B, J]; the root is always reached.
        """
        column_N = torch.arange(drafts_BN.shape[1], device=drafts_BN.device)
        passes_BN = tokens_BJ.gather(1, self.parents_BN) == drafts_BN
        passes_BN = passes_BN & (column_N < num_draft_tokens_B.unsqueeze(1))
        refused_B = (~passes_BN * (1 << (column_N + 1))).sum(-1)
        return (self.visible_BJ & refused_B.unsqueeze(1)) == 0


def path_rows(reached_BJ: Tensor) -> Tensor:
    """Return the rows of each sequence in a new order: first the rows on one path, root to end.

    Args:
        reached_BJ: bool, the rows of the path. A path's rows ascend, since parents come first.
    """
    return (~reached_BJ).byte().argsort(dim=-1, stable=True)
