"""Copies: what stood behind earlier occurrences of a path in the text, as nodes of its tree.

Prompt lookup (Saxena, 2023) drafts what stood behind the latest occurrence of the newest tokens.
Here a copy may begin at the root of a tree or behind one of its nodes, and its tokens compete with
the head's for the nodes that are verified. What competes is the probability of being accepted. A
copied token passes, where its parent does, with a rate that depends on two things alone: how many
tokens match before it, and whether the head drafted it too. `engine.tree_record` learns the rates.

A request may bring a prediction of its output. It stands behind the end of the prompt in a text of
its own, so that the search finds it from the first token on.

A tree has its root, the newest token, in row 0 and its nodes in the rows after it, a parent always
before its children.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

NO_COPY = -1
# The least number of matching tokens of each class of lengths but the first.
_LENGTHS = (3, 4, 6, 9, 16)
NUM_LENGTHS = len(_LENGTHS) + 1
MAX_MATCH = _LENGTHS[-1]  # tokens beyond it tell nothing more
# Whether the head has the copied token too: not at all, behind a likelier one, or as its likeliest.
NOT_DRAFTED, DRAFTED, LIKELIEST = range(3)
# Rates of the classes of lengths before any copy was verified, by what the head has.
PRIOR_RATES = (
    *(0.15, 0.22, 0.45, 0.65, 0.63, 0.87),
    *(0.25, 0.30, 0.42, 0.50, 0.60, 0.88),
    *(0.80, 0.88, 0.88, 0.90, 0.94, 0.98),
)
MAX_COPIED = 32  # tokens of one copy
# The root and the likeliest nodes, behind which a copy may begin.
SEARCHED_ROWS = 6


class Match(NamedTuple):
    """An occurrence of the end of a path in a text.

    Attributes:
        row: the row of the tree in which the path ends.
        length: tokens that match.
        text: the tokens of the text.
        start: place of the token behind the match.
    """

    row: int
    length: int
    text: Sequence[int]
    start: int


class Tree(NamedTuple):
    """A tree whose nodes may be copies.

    Attributes:
        tokens, parents: token and parent's row of each node.
        scores: the head's score of the node's path (`trees.growth`); of a node that only the text
            has, the logarithm of its worth.
        worths: the probability that the node is accepted; never above the parent's.
        cells: which rate a copied node had; NO_COPY for the others.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    worths: list[float]
    cells: list[int]


def longest_path(depth: int, max_nodes: int, *, has_copies: bool) -> int:
    """Return the most nodes on a path of a tree whose head drafts so deep."""
    return min(depth + MAX_COPIED, max_nodes) if has_copies else depth


def rate_cell(length: int, drafted: int) -> int:
    """Return which rate a copied token has, behind so many tokens that match."""
    return drafted * NUM_LENGTHS + sum(length >= least for least in _LENGTHS)


def only_text_has(cell: int) -> bool:
    """Return whether the text drafts a node of this cell and the head does not."""
    return NO_COPY < cell < NUM_LENGTHS


class TextIndex:
    """The places of every run of `shortest` tokens in a text that grows.

    Args:
        text: the tokens, a list that grows.
        longest, shortest: most tokens that are compared, at most MAX_MATCH, and fewest that are a
            match.
        is_prediction: of equally long matches the first counts, behind which most is left; else the
            latest.
    """

    # Of a run that occurs more often, so many places are compared, in this order.
    _MAX_PLACES, _MAX_PREDICTED = 64, 1024

    def __init__(
        self, text: Sequence[int], longest: int, shortest: int, *, is_prediction: bool = False
    ) -> None:
        self.text, self.longest, self.shortest = text, longest, shortest
        self._is_prediction = is_prediction
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._known = 0

    def extend(self) -> None:
        """Learn the runs that end in the text's new tokens; the text before them is as it was."""
        text = self.text
        for end in range(max(self._known, self.shortest - 1), len(text)):
            run = tuple(text[end + 1 - self.shortest : end + 1])
            self._ends.setdefault(run, []).append(end)
        self._known = max(self._known, len(text))

    def find(self, path: Sequence[int]) -> tuple[int, int] | None:
        """Return length and start of the longest match of the end of a path.

        Something stands behind a match, so the text's own end is none.
        """
        text, end = self.text, path[-self.longest :]
        best, places = None, self._ends.get(tuple(end[-self.shortest :]), [])
        if self._is_prediction:
            places = places[: self._MAX_PREDICTED]
        else:
            places = places[: -self._MAX_PLACES - 1 : -1]
        for at in places:
            if at == len(text) - 1:
                continue
            length, most = self.shortest, min(len(end), at + 1)
            while length < most and text[at - length] == end[-1 - length]:
                length += 1
            if best is None or length > best[0]:
                best = length, at + 1
                if length == self.longest:
                    break
        return best


def find_matches(
    indices: Sequence[TextIndex], tokens: Sequence[int], parents: Sequence[int], rows: int
) -> list[Match]:
    """Return the matches of the paths to the first rows of a tree, which go on from a text's end.

    Args:
        indices: of that text, then of its prediction, if any. Of equally long matches that in the
            prediction counts.
    """
    first = indices[0]
    paths = [list(first.text[-first.longest :])]
    for token, parent in zip(tokens[: rows - 1], parents, strict=False):
        paths.append([*paths[parent], token])
    matches: list[Match] = []
    for row, path in enumerate(paths):
        found = ((index.text, match) for index in reversed(indices) if (match := index.find(path)))
        best = max(found, key=lambda one: one[1][0], default=None)
        if best is not None:
            text, (length, start) = best
            matches.append(Match(row, length, text, start))
    return matches


def copied_tokens(text: Sequence[int], start: int, count: int) -> list[int]:
    """Return the tokens from a place on; behind its end the text repeats what stands from there."""
    left = len(text) - start
    return [text[start + step % left] for step in range(count)]


def join_copies(
    tree: Tree,
    matches: Sequence[Match],
    rates: Sequence[float],
    *,
    max_nodes: int,
) -> Tree:
    """Return the nodes of a tree and of the copies that are worth most, most first.

    A copied token is worth the rate of its cell times what the token before it is worth; where the
    head has the token too, the head's worth if that is more. A node that several have is one node,
    worth the most of them. Of equal nodes the tree's own come first, then those of earlier matches.

    Args:
        tree: the head's nodes, most probable first.
        matches: where copies begin.
        rates: the rate of each cell.
        max_nodes: most nodes of the result.
    """
    rows = {(parent, token): row for row, (parent, token) in enumerate(zip(*tree[1::-1]), 1)}
    likeliest = dict(reversed([(parent, row) for row, parent in enumerate(tree.parents, 1)]))
    num_own = len(tree.tokens)
    # A copy ends where its tokens are worth less than enough nodes of the tree.
    least = sorted(tree.worths)[-max_nodes] if num_own >= max_nodes else 0.0
    tokens, parents, cells = list(tree.tokens), list(tree.parents), list(tree.cells)
    scores, worths = list(tree.scores), list(tree.worths)
    for row, length, text, start in matches:
        worth = tree.worths[row - 1] if row else 1.0
        for step, token in enumerate(copied_tokens(text, start, MAX_COPIED)):
            child = rows.get((row, token), 0)
            drafted = NOT_DRAFTED
            if 0 < child <= num_own:
                drafted = LIKELIEST if likeliest[row] == child else DRAFTED
            cell = rate_cell(length + step, drafted)
            worth *= rates[cell]
            if drafted:
                worth = max(worth, tree.worths[child - 1])
            if worth <= least:
                break
            if not child:
                tokens.append(token)
                parents.append(row)
                scores.append(0.0)
                worths.append(worth)
                cells.append(cell)
                child = rows[row, token] = len(tokens)
            if worth > worths[child - 1] or cells[child - 1] == NO_COPY:
                worths[child - 1], cells[child - 1] = worth, cell
            row = child
    order = sorted(range(len(tokens)), key=lambda node: -worths[node])[:max_nodes]
    new_rows = {0: 0} | {node + 1: row for row, node in enumerate(order, 1)}
    for node in range(num_own, len(tokens)):
        scores[node] = math.log(worths[node])
    return Tree(
        [tokens[node] for node in order],
        [new_rows[parents[node]] for node in order],
        [scores[node] for node in order],
        [worths[node] for node in order],
        [cells[node] for node in order],
    )
