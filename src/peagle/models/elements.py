"""(anchor, depth) elements, which P-EAGLE heads train on: their sampling and their attention.

Element (a, d) stands at position a + d. At depth 0 its token is x[a+1] and its feature g[a]; deeper
it is the mask token with the shared hidden state. It predicts x[a+d+2] (arXiv 2602.01469; the
conditional drop of elements, COD, is the paper's).

An example: five tokens, of which x[1] to x[4] are the response, K = 3 and everything kept.
Position 0 to 4 each give a depth-0 element. Those with a target inside the response are

    (0,0) -> x[2]   (1,0) -> x[3]   (2,0) -> x[4]
    (0,1) -> x[3]   (1,1) -> x[4]
    (0,2) -> x[4]

Shapes: B rows (one sequence each), N positions of a row, E elements of a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

PADDING_ROW = -1


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of a batch, all [B, E].

    Attributes:
        anchors, depths: which element.
        documents: elements see only their own document; -1 is padding, which no element sees.
        supervised: the element counts in the loss.
    """

    anchors: Tensor
    depths: Tensor
    documents: Tensor
    supervised: Tensor

    @property
    def positions(self) -> Tensor:
        """Return the position ids, anchor + depth."""
        return self.anchors + self.depths


def may_attend(
    query_anchor: Tensor,
    query_depth: Tensor,
    query_document: Tensor,
    key_anchor: Tensor,
    key_depth: Tensor,
    key_document: Tensor,
) -> Tensor:
    """Apply the attention rule elementwise: may the query element see the key element?

    Same document, and the key is a depth-0 element at or before the query's anchor, or an element
    of the query's own chain at or above its depth. Serving attends in the same way.
    """
    context = (key_depth == 0) & (key_anchor <= query_anchor)
    chain = (key_anchor == query_anchor) & (key_depth <= query_depth)
    return (query_document == key_document) & (context | chain)


def attention_mask(queries: Elements, keys: Elements) -> Tensor:
    """Apply `may_attend` to every pair, bool [B, 1, Eq, Ek]."""
    q = (x.unsqueeze(-1) for x in (queries.anchors, queries.depths, queries.documents))
    k = (x.unsqueeze(-2) for x in (keys.anchors, keys.depths, keys.documents))
    return may_attend(*q, *k).unsqueeze(1)


def supervised_depth(loss_mask_BN: Tensor) -> Tensor:
    """Return the deepest supervised element of each anchor, int64 [B, N]; -1 where none counts.

    Element (a, d) counts iff x[a+1] to x[a+d+2] all lie in one answer: in one run of the mask.

    Args:
        loss_mask_BN: bool, the tokens of answers; false at the first token of every document.
    """
    loss_mask_T = loss_mask_BN.flatten()
    position_T = torch.arange(len(loss_mask_T), device=loss_mask_T.device)
    others = (~loss_mask_T).nonzero().flatten()
    others = torch.nn.functional.pad(others, (0, 1), value=len(loss_mask_T))
    end_T = others[torch.searchsorted(others, position_T, right=True)]
    deepest_T = torch.where(loss_mask_T, end_T - position_T - 2, -1)  # found at x[a+1]
    return torch.nn.functional.pad(deepest_T[1:], (0, 1), value=-1).view_as(loss_mask_BN)


def depth_counts(num_anchors: int | Tensor, num_depths: int, ratio: float, floor: float) -> list:
    """Count the anchors kept at depths 1 to K - 1: round(n * max(ratio^d, floor)).

    Args:
        num_anchors: n, a number or a tensor of them.
        num_depths: K.
        ratio: r; 1 keeps everything.
        floor: r_min, which keeps the deep positions from starving.
    """
    shares = [max(ratio**depth, floor) for depth in range(1, num_depths)]
    if isinstance(num_anchors, Tensor):
        return [(num_anchors * share).round().long() for share in shares]
    return [round(num_anchors * share) for share in shares]


def sample_elements(
    deepest_BN: Tensor,
    num_depths: int,
    *,
    ratio: float = 0.8,
    floor: float = 0.0,
    generator: torch.Generator | None = None,
    multiple: int = 1,
    max_anchors: int | None = None,
    documents_BN: Tensor | None = None,
    scores_BN: Tensor | None = None,
) -> Elements:
    """Sample the elements of a batch by conditional drop (COD).

    Depth 0 holds every position. One random order of a row's supervised anchors decides all
    depths: depth d keeps its first n * max(ratio^d, floor) anchors, so that the anchors of a depth
    are a random subset of the anchors above them, and every chain is whole. A row with fewer
    anchors leaves its other elements unsupervised.

    Args:
        deepest_BN: from `supervised_depth`.
        num_depths: K.
        ratio, floor: see `depth_counts`.
        generator: a generator on the device of `deepest_BN`.
        multiple: pad E to a multiple of this.
        max_anchors: most supervised anchors of a row, which E follows; None is N.
        documents_BN: document of each position, -1 where padded; None is one document a row.
        scores_BN: uniform random numbers that decide the order, in place of the generator's.

    Returns:
        the elements, depth by depth, anchors ascending within a depth.
    """
    device, (batch, length) = deepest_BN.device, deepest_BN.shape
    is_anchor_BN = deepest_BN >= 0
    if scores_BN is None:
        scores_BN = torch.rand(batch, length, generator=generator, device=device)
    order_BN = torch.where(is_anchor_BN, scores_BN, 2.0).argsort(dim=1)
    kept = depth_counts(is_anchor_BN.sum(1), num_depths, ratio, floor)
    room = depth_counts(min(max_anchors or length, length), num_depths, ratio, floor)

    anchors = [torch.arange(length, device=device).expand(batch, length)]
    supervised = [is_anchor_BN]
    for depth, (kept_B, size) in enumerate(zip(kept, room, strict=True), start=1):
        rank = torch.arange(size, device=device)
        anchor_BE, position_BE = order_BN[:, :size].sort(dim=1)
        counts_BE = (rank < kept_B.unsqueeze(1)).gather(1, position_BE)
        anchors.append(anchor_BE)
        supervised.append(counts_BE & (deepest_BN.gather(1, anchor_BE) >= depth))
    depths = [torch.full_like(a, depth) for depth, a in enumerate(anchors)]
    joined = [torch.cat(parts, dim=1) for parts in (anchors, depths, supervised)]
    padding = -joined[0].shape[1] % multiple
    padded = [torch.nn.functional.pad(x, (0, padding)) for x in joined]
    if documents_BN is None:
        documents = torch.zeros_like(padded[0])
    else:
        documents = documents_BN.gather(1, padded[0])
    if padding:
        documents[:, -padding:] = PADDING_ROW
    return Elements(padded[0], padded[1], documents, padded[2])
