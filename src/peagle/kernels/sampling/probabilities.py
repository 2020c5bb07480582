"""Logits to target probabilities, and drawing from probabilities.

Shapes: N rows, V vocabulary.
"""

import torch
from torch import Tensor


def probs_from_logits(
    logits_NV: Tensor, temperature_N: Tensor, top_k_N: Tensor, top_p_N: Tensor
) -> Tensor:
    """Compute the probabilities that the request's sampling parameters ask for.

    softmax(logits / temperature), cut to the top_k most likely tokens, then to the smallest set of
    most likely tokens whose sum reaches top_p, and renormalised. Temperature 0 gives a one-hot row
    at the argmax.

    Args:
        logits_NV: target logits.
        temperature_N: 0 is greedy.
        top_k_N: int64; 0 keeps all.
        top_p_N: 1 keeps all.

    Returns:
        [N, V] in at least float32; every row sums to 1.
    """
    logits_NV = at_least_float32(logits_NV)
    greedy_N = temperature_N == 0
    probs_NV = tempered_probs(logits_NV, temperature_N)
    cut_N = (top_k_N > 0) | (top_p_N < 1)
    if bool(cut_N.any()):
        # The other rows stay as they are to the last bit: batch-mates must not change a request.
        probs_NV = torch.where(cut_N.unsqueeze(1), _cut(probs_NV, top_k_N, top_p_N), probs_NV)
    if bool(greedy_N.any()):
        best_NV = torch.zeros_like(probs_NV).scatter_(1, logits_NV.argmax(-1, keepdim=True), 1.0)
        probs_NV = torch.where(greedy_N.unsqueeze(1), best_NV, probs_NV)
    return probs_NV


def tempered_probs(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """softmax(logits / temperature), of the logits themselves where the temperature is 0.

    Does not wait for the device. Returns [N, V] in the type of the logits.
    """
    # Shifted and clamped, so that no temperature, however small or large, makes inf / inf.
    limits = torch.finfo(logits_NV.dtype)
    scale_N = torch.where(temperature_N == 0, 1.0, temperature_N).to(logits_NV.dtype)
    shifted_NV = logits_NV - logits_NV.amax(-1, keepdim=True)
    return torch.softmax(shifted_NV / scale_N.clamp(limits.tiny, limits.max).unsqueeze(1), dim=-1)


def at_least_float32(logits_NV: Tensor) -> Tensor:
    """float64 logits as they are, others in float32."""
    return logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()


def _cut(probs_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    vocab_size = probs_NV.shape[1]
    sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocab_size, device=probs_NV.device)
    k_N1 = torch.where(top_k_N > 0, top_k_N, vocab_size).unsqueeze(1)
    sorted_NV = sorted_NV.masked_fill(rank_V >= k_N1, 0.0)
    sorted_NV = sorted_NV / sorted_NV.sum(-1, keepdim=True)
    # A token stays while the tokens before it have not reached top_p: the first always stays.
    # top_p = 1 keeps every token even where rounding makes the sum reach 1 early.
    before_NV = sorted_NV.cumsum(-1) - sorted_NV
    p_N1 = top_p_N.to(probs_NV.dtype).unsqueeze(1)
    sorted_NV = sorted_NV.masked_fill((before_NV >= p_N1) & (p_N1 < 1) & (rank_V > 0), 0.0)
    sorted_NV = sorted_NV / sorted_NV.sum(-1, keepdim=True)
    return torch.zeros_like(probs_NV).scatter_(1, order_NV, sorted_NV)


def sample_from_weights(weights_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Draw one index per row with probability proportional to its weight (inverse CDF).

    Args:
        weights_NV: non-negative; every row has a positive sum.
        uniform_N: float64 in [0, 1).

    Returns:
        int64 [N]; an index of weight zero is never drawn.
    """
    cumulative_NV = weights_NV.double().cumsum(-1)
    threshold_N1 = uniform_N.unsqueeze(1) * cumulative_NV[:, -1:]
    index_N = torch.searchsorted(cumulative_NV, threshold_N1, right=True).squeeze(1)
    # u * total may round up to total: then the last token that has weight is the answer.
    last_N = weights_NV.shape[1] - 1 - (weights_NV > 0).flip(-1).byte().argmax(-1)
    return torch.minimum(index_N, last_N)
