"""What transformers alone says: greedy outputs under rules, and exact next-token distributions.

Nothing of our engine is used here but the tokenizer's ids: the model runs with its own attention,
penalties and minimum lengths are those of `generate`, the rest are textbook formulas.

Shapes: N output tokens, B contexts, T their length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from peagle.config import SamplingParams
from peagle.evaluation.identity import Reference, load_reference, near_tie_bound

_BATCH_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class _OutputPenalties(LogitsProcessor):
    """logit - presence * [in the output] - frequency * (times in the output)."""

    prompt_len: int
    presence: float
    frequency: float

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.zeros_like(scores)
        output = input_ids[:, self.prompt_len :]
        counts.scatter_add_(1, output, torch.ones_like(output, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts


class TargetReference:
    """The target as transformers runs it.

    Args:
        folder: of the target.
        dtype: of its weights.
        device: where it runs.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype, device: str) -> None:
        self.model: Any = load_reference(folder, dtype, device)
        self.bound = near_tie_bound(dtype)
        ids = self.model.generation_config.eos_token_id
        self.end_ids: list[int] = [] if ids is None else [ids] if isinstance(ids, int) else [*ids]

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], params: SamplingParams) -> Reference:
        """What `generate` gives under max_tokens, min_tokens, stop_token_ids and penalties.

        The logits are those that each token was chosen from, after the rules.
        """
        prompt_1T = torch.tensor([list(prompt)], device=self.model.device)
        penalties = params.presence_penalty, params.frequency_penalty
        own = [_OutputPenalties(len(prompt), *penalties)] if any(penalties) else []
        generated = self.model.generate(
            prompt_1T,
            attention_mask=torch.ones_like(prompt_1T),
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens or None,
            eos_token_id=[*self.end_ids, *params.stop_token_ids] or None,
            repetition_penalty=params.repetition_penalty,
            logits_processor=LogitsProcessorList(own),
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        token_ids = generated.sequences[0, len(prompt) :].tolist()
        return Reference(token_ids, torch.cat(generated.scores))

    @torch.inference_mode()
    def scored(self, prompt: Sequence[int], token_ids: Sequence[int]) -> Reference:
        """Any output, with the raw logits that each of its tokens could be chosen from."""
        text_1T = torch.tensor([[*prompt, *token_ids]], device=self.model.device)
        logits_NV = self.model(text_1T).logits[0, len(prompt) - 1 : -1]
        return Reference(list(token_ids), logits_NV)

    @torch.inference_mode()
    def next_token_probs(self, contexts: Sequence[Sequence[int]], params: SamplingParams) -> Tensor:
        """p(next token | context) after temperature, top-k and top-p, float64 [B, V] on the host.

        Args:
            contexts: all of one length.
            params: how tokens are sampled; its other rules are not applied.
        """
        ids_BT = torch.tensor([list(one) for one in contexts], device=self.model.device)
        size = max(1, _BATCH_TOKENS // ids_BT.shape[1])
        logits = [self.model(part, logits_to_keep=1).logits[:, -1] for part in ids_BT.split(size)]
        return probabilities(torch.cat(logits).double().cpu(), params)


def probabilities(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """softmax(logits / temperature), cut to the top_k likeliest, then to the smallest set of mass
    top_p; each cut is followed by a renormalisation.
    """
    probs_BV = torch.softmax(logits_BV / params.temperature, -1)
    ranked_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    if params.top_k:
        ranked_BV[:, params.top_k :] = 0
        ranked_BV /= ranked_BV.sum(-1, keepdim=True)
    if params.top_p < 1:
        before_BV = ranked_BV.cumsum(-1) - ranked_BV
        ranked_BV[before_BV >= params.top_p] = 0
        ranked_BV /= ranked_BV.sum(-1, keepdim=True)
    return torch.zeros_like(ranked_BV).scatter_(1, order_BV, ranked_BV)
