"""Candidate trees: which drafts of a parallel pass to verify.

A tree has its root, the newest token, in row 0 and its nodes, the drafts, in the rows after it, a
parent always before its children. A chain is the tree whose nodes have one child each.

Nothing here waits for the device, and all sizes follow from shapes: a CUDA graph can hold it.

Shapes: B sequences, K slots (depths), V vocabulary, W nodes kept of a depth, C candidates of a
slot, N nodes of a tree, J = N + 1 rows, D most nodes on a path, T packed rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush

import torch
from torch import Tensor

from peagle.kernels.sampling.probabilities import at_least_float32

# children(column, tokens) -> (log-probabilities, tokens), both [B, W, C]: the candidates that may
# follow, in the slot of that column, W tokens of the slot before it, int64 [B, W].
Children = Callable[[int, Tensor], tuple[Tensor, Tensor]]
# Log-probabilities and tokens of candidates, most probable first.
Ranked = tuple[Sequence[float], Sequence[int]]
# after(b, column, token) -> what may follow a token of sequence b in the slot of that column, which
# for column 0 is the same after every token.
After = Callable[[int, int, int], Ranked]


def best_first_trees(
    logits_BKV: Tensor,
    depths_B: Tensor,
    *,
    num_parallel_trees: int,
    max_nodes: int,
    temperature: float,
    children: Children | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the N most probable paths of drafts as a tree, most probable first.

        score(x_1 .. x_j) = sum_i log softmax(logits_i / temperature)[x_i]

    No path scores above its beginning, so the N best are closed under parents, and the first n
    nodes of a tree are the tree of n nodes. Of paths of equal score the shorter comes first. The
    paths grow depth by depth, W = N of each depth kept, which loses none of the N best: every path
    of that depth that is left out has N better ones. A temperature below 1 makes deep paths of
    likely tokens rank higher.

    Args:
        logits_BKV: the logits of the K slots of one parallel pass.
        depths_B: int64, most nodes on a path of each sequence, up to K.
        num_parallel_trees: most children of the root.
        max_nodes: N.
        temperature: above 0; sharpens the scores.
        children: the candidates after each node; None takes the slot's candidates for every node.

    Returns:
        Token (index into V) and parent row of each node, int64 [B, N], and its path's score, float
        [B, N]. Where a tree can have fewer than N nodes (`count_nodes`), what stands beyond them
        means nothing.
    """
    num_slots, vocab_size = logits_BKV.shape[1:]
    width = max_nodes
    find = children or _of_slots(logits_BKV, width, temperature)
    first = min(num_parallel_trees, width, vocab_size)
    # More than `first`: siblings differ even where broken logits leave no other nodes.
    roots = log_probs(logits_BKV[:, 0], temperature).topk(min(width, vocab_size), -1)
    nothing_BW = roots.values.new_full((len(logits_BKV), width), -torch.inf)
    scores_BW, tokens_BW = nothing_BW.clone(), torch.zeros_like(nothing_BW, dtype=torch.int64)
    scores_BW[:, :first] = roots.values[:, :first]
    tokens_BW[:, : roots.indices.shape[1]] = roots.indices
    levels = [(scores_BW, tokens_BW, torch.full_like(tokens_BW, -1))]
    for column in range(1, num_slots):
        logprobs_BWC, next_BWC = find(column, tokens_BW)
        paths_BX = (scores_BW.unsqueeze(2) + logprobs_BWC).flatten(1)
        scores_BW, at_BW = paths_BX.topk(width, -1)
        scores_BW = torch.where((depths_B > column).unsqueeze(1), scores_BW, nothing_BW)
        tokens_BW = next_BWC.flatten(1).gather(1, at_BW)
        parents_BW = at_BW // next_BWC.shape[2] + (column - 1) * width
        levels.append((scores_BW, tokens_BW, parents_BW))

    return rank_paths(levels, max_nodes)


def rank_paths(
    levels: Sequence[tuple[Tensor, Tensor, Tensor]], max_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the N best of some paths as a tree, in the form of `best_first_trees`.

    Args:
        levels: of each depth the scores, tokens and parents of the paths that end there, [B, x]
            each. A parent is counted over the paths of all depths, and -1 is the root. No path
            scores above its beginning.
        max_nodes: N, at most the number of paths.
    """
    scores_BX, tokens_BX, parents_BX = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
    # Stable: a parent stands before its children in X, and so in the tree where they tie.
    sorted_BX, order_BX = scores_BX.sort(dim=-1, descending=True, stable=True)
    rank_BX = torch.empty_like(order_BX).scatter_(
        1, order_BX, torch.arange(order_BX.shape[1], device=order_BX.device).expand_as(order_BX)
    )
    nodes_BN = order_BX[:, :max_nodes]
    parents_BN = parents_BX.gather(1, nodes_BN)
    rows_BN = rank_BX.gather(1, parents_BN.clamp_min(0)) + 1
    rows_BN = torch.where(parents_BN < 0, 0, rows_BN)
    return tokens_BX.gather(1, nodes_BN), rows_BN, sorted_BX[:, :max_nodes]


def searched_trees(
    after: After, depths: Sequence[int], *, num_parallel_trees: int, max_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the trees of `best_first_trees`, which this one finds node by node: for a CPU.

    The best path of a heap goes into the tree, and its sibling and its first child into the heap,
    so that only nodes of the tree are asked for what may follow them.

    Args:
        after: at least N candidates after each token.
        depths: most nodes on a path of each sequence.
        num_parallel_trees, max_nodes: as there.
    """
    trees = []
    for b, depth in enumerate(depths):
        logprobs, tokens = after(b, 0, 0)
        roots = logprobs[:num_parallel_trees], tokens[:num_parallel_trees]
        tree = _search(roots, partial(after, b), depth, max_nodes)
        trees.append([[*of, *[0] * (max_nodes - len(of))] for of in tree])
    tokens, parents, scores = zip(*trees, strict=True)
    return torch.tensor(tokens), torch.tensor(parents), torch.tensor(scores, dtype=torch.float64)


def after_slots(logits_BKV: Tensor, count: int, temperature: float) -> After:
    """Return a function that finds the likeliest tokens of a slot, the same after every token."""
    count = min(count, logits_BKV.shape[2])
    best = log_probs(logits_BKV, temperature).topk(count, -1)
    values, tokens = best.values.tolist(), best.indices.tolist()
    return lambda b, column, _: (values[b][column], tokens[b][column])


def _search(
    roots: Ranked, after: Callable[[int, int], Ranked], depth: int, max_nodes: int
) -> tuple[list[int], list[int], list[float]]:
    """Return tokens, parents and scores of the nodes of one tree."""
    tokens, parents, scores = list[int](), list[int](), list[float]()
    rows: list[tuple[float, int, Ranked]] = []  # score, depth and candidates of each row
    heap: list[tuple[float, int, int, int]] = []  # score, depth, row of the parent, rank

    def push(row: int, rank: int) -> None:
        score, own_depth, (logprobs, _) = rows[row]
        if own_depth < depth and rank < len(logprobs):
            heappush(heap, (-score - logprobs[rank], own_depth, row, rank))

    def add_row(score: float, own_depth: int, candidates: Ranked) -> None:
        rows.append((score, own_depth, candidates))
        push(len(rows) - 1, 0)

    add_row(0.0, 0, roots)
    while heap:
        negative, above, row, rank = heappop(heap)
        token = rows[row][2][1][rank]
        tokens.append(token)
        parents.append(row)
        scores.append(-negative)
        if len(tokens) == max_nodes:
            break
        push(row, rank + 1)
        own_depth = above + 1
        add_row(-negative, own_depth, after(own_depth, token) if own_depth < depth else ((), ()))
    return tokens, parents, scores


def _of_slots(logits_BKV: Tensor, count: int, temperature: float) -> Children:
    """Return a function that finds the likeliest tokens of a slot, the same for every node."""
    logprobs_BKV = log_probs(logits_BKV, temperature)
    tops = logprobs_BKV.topk(min(count, logits_BKV.shape[2]), -1)

    def find(column: int, tokens_BW: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*tokens_BW.shape, tops.values.shape[2])
        scores_B1C, tokens_B1C = tops.values[:, column, None], tops.indices[:, column, None]
        return scores_B1C.expand(shape), tokens_B1C.expand(shape)

    return find


def log_probs(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature); broken logits are of no use to a tree."""
    logprobs = torch.log_softmax(at_least_float32(logits) / temperature, -1)
    return logprobs.nan_to_num(-torch.inf)


def count_nodes(depth: int, num_parallel_trees: int, max_nodes: int, vocab_size: int) -> int:
    """Return how many nodes a tree of `best_first_trees` has."""
    candidates = min(max_nodes, vocab_size)
    level = total = min(num_parallel_trees, candidates) if depth else 0
    for _ in range(1, depth):
        level = min(level * candidates, max_nodes)
        total += level
    return min(total, max_nodes)


def allocate_nodes(survival_BN: Tensor, num_nodes_B: Tensor, budget: int) -> Tensor:
    """Return how many nodes of each tree are verified if all trees share a budget, int64 [B].

    The nodes of all trees stand in one order, by survival, and the first ones that fit the budget
    are verified. A node counts for no more than any node before it in its tree, and of equal nodes
    the one of the lower index comes first: so each tree gives its first nodes, which are a tree.

    Args:
        survival_BN: the probability that a node is accepted.
        num_nodes_B: int64, nodes of each tree; a tree may have none.
        budget: nodes of all trees together.
    """
    num_nodes = survival_BN.shape[1]
    is_node_BN = torch.arange(num_nodes, device=survival_BN.device) < num_nodes_B.unsqueeze(1)
    worth_BN = survival_BN.cummin(1).values.masked_fill(~is_node_BN, -1.0)
    order_X = worth_BN.flatten().sort(descending=True, stable=True).indices
    fits_X = torch.arange(len(order_X), device=order_X.device) < budget
    taken_X = torch.zeros_like(fits_X).scatter_(0, order_X, fits_X)
    return (taken_X.view_as(is_node_BN) & is_node_BN).sum(1)
