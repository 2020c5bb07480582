"""The draft vocabulary of a head: its maps d2t and t2d, and what its rows and drafts say of them.

Shapes: DV draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.doctor.head_files import HeadFiles
from peagle.models.drafter import DrafterConfig

# Draft rows whose nearest target row is looked for.
_ROWS = 512


def mend_maps(files: HeadFiles, config: DrafterConfig) -> None:
    """Examine d2t and t2d, and leave maps that select distinct tokens of the vocabulary."""
    tensors, size, vocab = files.tensors, config.draft_vocab_size, config.vocab_size
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if not config.is_pruned:
        if (d2t is not None and bool(d2t.any())) or (t2d is not None and not bool(t2d.all())):
            files.loads = False
            _blame(files, "d2t and t2d select tokens, but draft_vocab_size is vocab_size")
        return
    kept = None if t2d is None or t2d.numel() != vocab else t2d.bool().nonzero().flatten()
    ids = None if d2t is None or d2t.numel() != size else d2t.long() + torch.arange(size)
    problem = _problem(ids, kept, config)
    if problem:
        files.loads = False
        files.check("draft vocabulary", "differs", problem)
        _blame(files, problem)
    else:
        files.check("draft vocabulary", "agrees", f"{size} of {vocab} tokens; d2t and t2d agree")
    if not _is_map(ids, config):
        ids = kept if kept is not None and len(kept) == size else torch.arange(size)
    assert ids is not None
    tensors["d2t"] = ids - torch.arange(size)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    if kept is not None and len(kept) == size:
        files.kept_ids = kept


def _blame(files: HeadFiles, problem: str) -> None:
    files.blame("draft_vocabulary", problem, "Export d2t and t2d again from the trained head.")


def _is_map(ids: Tensor | None, config: DrafterConfig) -> bool:
    if ids is None:
        return False
    inside = int(ids.min()) >= 0 and int(ids.max()) < config.vocab_size
    return inside and len(ids.unique()) == len(ids)


def _problem(ids: Tensor | None, kept: Tensor | None, config: DrafterConfig) -> str:
    """What is wrong with the maps by themselves; "" if nothing."""
    if ids is None:
        return f"d2t is missing or not of draft_vocab_size ({config.draft_vocab_size})"
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.vocab_size:
        return f"d2t leads to target ids {low} to {high}, the vocabulary ends before that"
    if len(ids.unique()) < len(ids):
        return f"d2t leads to {len(ids.unique())} distinct tokens; expected {len(ids)}"
    if kept is not None and set(kept.tolist()) != set(ids.tolist()):
        shared = len(set(kept.tolist()) & set(ids.tolist()))
        return f"d2t and t2d share {shared} of {len(ids)} tokens; expected all"
    if bool((ids.diff() <= 0).any()):
        return "the target ids of d2t do not ascend"
    return ""


def nearest_rows(head_rows: Tensor, target_rows: Tensor, chosen: Tensor) -> Tensor:
    """The target row of highest cosine to each chosen row of a head's embedding or lm_head."""
    rows = F.normalize(head_rows[chosen].float(), dim=1)
    found = [
        (rows @ F.normalize(part.float(), dim=1).T).max(dim=1) for part in target_rows.split(16384)
    ]
    best = torch.stack([values for values, _ in found]).argmax(0)
    indices = torch.stack([i + 16384 * n for n, (_, i) in enumerate(found)])
    return indices.gather(0, best.unsqueeze(0)).squeeze(0)


def by_rows(ids: Tensor, lm_head: Tensor, target_rows: Tensor, drafts: Tensor) -> Tensor | None:
    """A map by which the rows of lm_head that drafts use are the target's nearest ones.

    Heads start from the target's rows and stay near them; a map that leads elsewhere was made for
    another head.

    Args:
        ids: target id of every draft id, [DV].
        lm_head: of the head, [DV, D].
        target_rows: of the target's lm_head, [V, D].
        drafts: draft ids as the head drafts them.

    Returns:
        the map [DV], which may name tokens twice; None where the widths differ.
    """
    if lm_head.shape[1] != target_rows.shape[1]:
        return None
    used, counts = drafts.unique(return_counts=True)
    chosen = used[counts.argsort(descending=True)][:_ROWS]
    mended = ids.clone()
    mended[chosen] = nearest_rows(lm_head, target_rows.cpu(), chosen)
    return mended


def by_drafts(ids: Tensor, drafts: Tensor, truth: Tensor) -> Tensor:
    """A map by which each draft id stands for the token that the target said most often there.

    Args:
        ids: target id of every draft id, for those that are drafted less than three times.
        drafts: draft ids; truth: what the target said in their places.
    """
    mended = ids.clone()
    for draft in drafts.unique().tolist():
        said = truth[drafts == draft]
        if len(said) >= 3:
            mended[draft] = said.mode().values
    return mended
