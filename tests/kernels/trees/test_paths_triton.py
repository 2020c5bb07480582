"""Rows and paths of trees in packed batches against those of torch."""

import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from peagle.kernels.drafts.batches import TargetBatch
from peagle.kernels.paths import TreePaths, path_rows
from tests.kernels.devices import DEVICES

pytest.importorskip("triton")

from peagle.kernels.trees.paths_triton import Descent, descend, place_rows


def random_trees(rng: random.Random, num_seqs: int, n: int, depth: int) -> Tensor:
    """Parents of random trees in which no path is too long."""
    trees = []
    for _ in range(num_seqs):
        depths, parents = [0], list[int]()
        for _ in range(n):
            parent = rng.choice([row for row, d in enumerate(depths) if d < depth])
            parents.append(parent)
            depths.append(depths[parent] + 1)
        trees.append(parents)
    return torch.tensor(trees)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("n", "depth", "sizes"), [(7, 3, [7, 0, 4]), (63, 7, [63, 20]), (1, 1, [1])]
)
def test_rows_and_paths_are_those_of_torch(
    device: str, n: int, depth: int, sizes: list[int]
) -> None:
    """A sequence that does not run has no rows; rows behind the last one are padding."""
    rng, generator = random.Random(n), torch.Generator().manual_seed(n)
    num_seqs, num_rows = len(sizes) + 1, (len(sizes) + 1) * (n + 1) + 3
    num_draft_tokens = torch.tensor([*sizes, n])
    running = torch.tensor([1] * len(sizes) + [0])
    counts = torch.where(running != 0, num_draft_tokens + 1, 0)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    parents, total = random_trees(rng, num_seqs, n, depth), int(starts[-1])
    drafts, first = torch.arange(num_seqs * n).view(num_seqs, n), torch.arange(num_seqs) * 100
    paths = TreePaths.of(parents, depth)

    batch = TargetBatch.allocate(num_seqs, num_rows, "cpu")
    batch.query_start_loc.copy_(starts)
    # The target goes to the deepest node; other tokens are no drafts.
    own = torch.full((num_rows,), -9)
    for b, count in enumerate(counts.tolist()):
        row = int(paths.depths_BJ[b, :count].argmax()) if count else 0
        while row:
            parent = int(parents[b, row - 1])
            own[starts[b] + parent] = drafts[b, row - 1]
            row = parent
    for rows in (batch.tokens_R, batch.slots_R, batch.positions_R):
        rows.copy_(torch.randperm(num_rows, generator=generator) + 5)
    expected_tokens = batch.tokens_R.clone()
    slots, rows_X = batch.slots_R.clone(), torch.arange(num_rows + 1)

    on = TargetBatch(*(getattr(batch, one.name).to(device) for one in fields(batch)))
    visible, depths = (torch.full((num_rows,), 9, device=device) for _ in range(2))
    parents_on = torch.stack((parents, parents), 1).to(device)[:, 0]  # rows of a larger tensor
    place_rows(parents_on, first.to(device), on, visible, depths)
    out = Descent.allocate(torch.zeros(num_seqs, dtype=torch.int64, device=device), depth, num_rows)
    out.rows_X.fill_(-1)[-1] = num_rows
    own_on = own.to(device, copy=True)
    drafts_on, num_draft_tokens_on, running_on = (
        x.to(device) for x in (drafts, num_draft_tokens, running)
    )
    descend(own_on, drafts_on, parents_on, num_draft_tokens_on, running_on, on, out)

    for b, count in enumerate(counts.tolist()):
        at = slice(int(starts[b]), int(starts[b]) + count)
        assert torch.equal(visible[at].cpu(), paths.visible_BJ[b, :count])
        assert torch.equal(depths[at].cpu(), paths.depths_BJ[b, :count])
        assert torch.equal(on.positions_R[at].cpu(), first[b] + paths.depths_BJ[b, :count])
        if not count:
            assert out.num_accepted_B[b] == 0
            assert torch.equal(out.from_BD[b], out.to_BD[b])
            continue
        tree = TreePaths.of(parents[b : b + 1], depth)
        tokens = torch.zeros(1, n + 1, dtype=torch.int64)
        tokens[0, :count] = own[at]
        reached = tree.reached(tokens, drafts[b : b + 1], num_draft_tokens[b : b + 1])
        order = path_rows(reached)[0, :count]
        accepted = int(reached.sum()) - 1
        assert out.num_accepted_B[b] == accepted == paths.depths_BJ[b, :count].max()
        assert torch.equal(out.path_BD[b, :accepted].cpu(), drafts[b, order[1 : accepted + 1] - 1])
        path, chain = slots[at][order[1 : accepted + 1]], slots[at][1 : accepted + 1]
        assert torch.equal(out.from_BD[b, :accepted].cpu(), path)
        assert torch.equal(out.to_BD[b, :accepted].cpu(), chain)
        assert torch.equal(out.from_BD[b, accepted:], out.to_BD[b, accepted:])
        rows_X[at] = starts[b] + order
    for rows in (visible, depths, on.positions_R):
        assert (rows[total:] == 0).all()
    assert torch.equal(out.rows_X.cpu(), rows_X)
    assert torch.equal(on.tokens_R.cpu(), expected_tokens[rows_X[:-1]])
    assert torch.equal(own_on.cpu(), own[rows_X[:-1]])
