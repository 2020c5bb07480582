# pyright: reportMissingImports=false
"""The correction of a P-EAGLE head in vLLM's proposer.

vLLM has the final hidden states of all K slots of a request before it chooses a token of them
(`SpecDecodeBaseProposer._sample_draft_tokens`). There the slots are walked: each one's logits are
corrected by the token that the slot before drafted, and vLLM's own code chooses from them, an
argmax or a draw with its distribution. Only draws need logits spread over the target's vocabulary.

The tables of a correction come from the head's files: vLLM shares embedding and lm_head out over
the GPUs. Runs in vLLM's processes alone.

Shapes: R rows, K slots of each of B requests; D, W, r, V as in `models.correction`, DV draft
vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peagle.models.checkpoint import ANY_DEPTH, find_correction, read_correction, read_head
from peagle.models.correction import DraftCorrection
from peagle.models.drafter import spread_logits
from peagle.models.loading import resolve_model
from peagle.models.target_ends import TargetEnds

_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"


class Corrected(NamedTuple):
    """A correction and the draft vocabulary of its head.

    Attributes:
        correction: made ready for drafting.
        d2t: the map from draft ids, id + d2t[id], int64 [DV]; None where both vocabularies are one.
    """

    correction: DraftCorrection
    d2t: Tensor | None


def install() -> None:
    """Replace two methods of vLLM's proposer, once.

    Raises:
        ImportError, AttributeError: this vLLM has no such proposer.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Proposer

    load_model, choose = Proposer.load_model, Proposer._sample_draft_tokens
    _ = Proposer._sample_from_logits
    if hasattr(Proposer, "peagle_correction"):
        return
    Proposer.peagle_correction = Proposer.peagle_walks = None

    def load(self: Any, target_model: Any) -> None:
        load_model(self, target_model)
        self.peagle_walks = None  # their graphs read earlier weights
        if self.method == "eagle3" and self.parallel_drafting:
            self.peagle_correction = read_from_vllm(self)

    def choose_corrected(self: Any, hidden_RD: Tensor, metadata: Any) -> Any:
        if self.peagle_correction is None:
            return choose(self, hidden_RD, metadata)
        return walk(self, self.peagle_correction, hidden_RD, metadata)

    Proposer.load_model, Proposer._sample_draft_tokens = load, choose_corrected


def read_from_vllm(proposer: Any) -> Corrected | None:
    """Return the correction beside the head that a proposer has loaded; None without one.

    Raises:
        CheckpointError: it is another head's, or not readable.
    """
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.logger import init_logger

    logger = init_logger("vllm.peagle")
    draft, target = proposer.draft_model_config, proposer.vllm_config.model_config
    folder = Path(resolve_model(draft.model, draft.revision, role="draft"))
    is_first = get_tensor_model_parallel_rank() == 0
    if find_correction(folder) is None:
        if is_first:
            logger.info("peagle: %s has no correction; vLLM drafts as without peagle.", folder)
        return None
    head = read_head(folder, num_target_layers=ANY_DEPTH)
    correction = read_correction(folder, head.config)
    assert correction is not None
    correction.to(proposer.device, proposer.dtype)
    tensors, _ = head.read_tensors(folder)
    d2t = tensors.get("d2t")
    ids_V = None if d2t is None else torch.arange(len(d2t)) + d2t.cpu()
    embedding_VD, lm_head_VD = _ends(tensors, ids_V, target.model, target.revision)
    on = {"device": proposer.device, "dtype": proposer.dtype}
    ready = DraftCorrection(correction, embedding_VD.to(**on), lm_head_VD.to(**on))
    if is_first:
        sizes = correction.rank, correction.width
        logger.info("peagle: drafts are corrected by %s (rank %d, width %d).", folder, *sizes)
    return Corrected(ready, None if d2t is None else d2t.to(proposer.device, torch.int64))


def walk(
    proposer: Any, corrected: Corrected, hidden_RD: Tensor, metadata: Any
) -> tuple[Tensor, Tensor | None]:
    """Choose the drafts of all slots, one slot after the other.

    Args:
        proposer: vLLM's, whose model computes logits; it draws from them.
        hidden_RD: final, normed hidden states, the K slots of a request one behind the other.
        metadata: vLLM's sampling parameters of the requests.

    Returns:
        target ids [R], and the distributions that they were drawn from [R, V]; None for an argmax.
    """
    draws = proposer._enable_probabilistic_draft_probs and not metadata.all_greedy
    if not draws and has_kernels(hidden_RD.device):
        walks = proposer.peagle_walks
        drafts_R = None if walks is None else walks(hidden_RD)
        if drafts_R is None:
            drafts_R = draft_greedily(proposer, corrected, hidden_RD)
        return drafts_R, None
    correction, d2t = corrected
    logits_BKV, states_BKW = _begin(proposer, corrected, hidden_RD)
    ids_V = None if d2t is None else torch.arange(len(d2t), device=d2t.device) + d2t
    drafts, probs = list[Tensor](), list[Tensor]()
    for slot in range(logits_BKV.shape[1]):
        logits_BV = logits_BKV[:, slot]
        if slot:
            logits_BV = correction.add(logits_BV, states_BKW[:, slot], drafts[-1])
        if ids_V is not None:
            logits_BV = spread_logits(logits_BV, ids_V, len(correction.tokens_VW))
        drafts_B, probs_BV = proposer._sample_from_logits(logits_BV, metadata)
        drafts.append(drafts_B)
        if probs_BV is not None:
            probs.append(probs_BV)
    return torch.stack(drafts, 1).flatten(), torch.stack(probs, 1).flatten(0, 1) if probs else None


def has_kernels(device: torch.device) -> bool:
    """Return whether walks of argmax drafts take one launch a slot there."""
    return device.type == "cuda"


def draft_greedily(proposer: Any, corrected: Corrected, hidden_RD: Tensor) -> Tensor:
    """Return the argmax drafts of all slots, [R], with one launch a slot."""
    from peagle.kernels.drafts.correction_triton import WalkScratch, walk_chains

    logits_BKV, states_BKW = _begin(proposer, corrected, hidden_RD)
    weights = corrected.correction.weights
    drafts_BK = torch.empty(logits_BKV.shape[:2], dtype=torch.int64, device=logits_BKV.device)
    scratch = WalkScratch.allocate(len(drafts_BK), weights)
    walk_chains(logits_BKV, states_BKW, corrected.d2t, weights, scratch, drafts_BK)
    return drafts_BK.flatten()


def _begin(proposer: Any, corrected: Corrected, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a walk begins with: logits [B, K, DV] and states [B, K, W] of all slots."""
    model, (correction, d2t) = proposer.model, corrected
    if d2t is None:
        logits_RV = model.compute_logits(hidden_RD)
    else:
        logits_RV = model.logits_processor(model.lm_head, hidden_RD)
    hidden_BKD = hidden_RD.unflatten(0, (-1, proposer.num_speculative_tokens))
    logits_BKV = logits_RV.to(correction.weight_Vr.dtype).view(*hidden_BKD.shape[:2], -1)
    return logits_BKV, correction.start(hidden_BKD)


def _ends(
    tensors: Mapping[str, Tensor], ids_V: Tensor | None, target: str, revision: str | None
) -> tuple[Tensor, Tensor]:
    """Return embedding [V, D] and lm_head [DV, D] of a head, the target's where it has none.

    `ids_V` are the target ids of a pruned draft vocabulary.
    """
    if _EMBEDDING in tensors and _LM_HEAD in tensors:
        return tensors[_EMBEDDING], tensors[_LM_HEAD]
    ends = TargetEnds.load(resolve_model(target, revision))
    weight_VD = ends.lm_head_weight()
    if ids_V is not None:
        weight_VD = weight_VD[ids_V]
    return tensors.get(_EMBEDDING, ends.embedding_weight()), tensors.get(_LM_HEAD, weight_VD)
