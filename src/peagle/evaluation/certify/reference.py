"""Output of transformers alone, the first token at which another output leaves it, and exact
next-token distributions.

Nothing of our engine is used here but the tokenizer's ids: the model runs with its own attention,
`generate` applies penalties and minimum lengths, textbook formulas do the rest.

In float64 there must be no difference. In float32 the shape of a batch moves logits by about 1e-6,
so a difference is excused only at a near-tie, where two logits of the reference are as close. In
16-bit types rounding moves logits by more, and the bound is wider.

Shapes: N output tokens, B contexts, T their length, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from peagle.config import SamplingParams
from peagle.config.speculative import Quantization
from peagle.models.comparison import NEAR_TIE, near_tie_bound
from peagle.models.end_tokens import eos_token_ids
from peagle.models.packed_loading import load_packed
from peagle.models.quantization import quantization_of
from peagle.models.quantize import quantize_model
from peagle.models.target import fit_experts, load_tokenizer
from peagle.models.target_facts import load_config
from peagle.results import Difference

_BATCH_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Reference:
    """Output of transformers for one prompt, and the logits that each token was chosen from."""

    token_ids: list[int]
    logits_NV: Tensor


def first_difference(
    prompt: str, token_ids: Sequence[int], reference: Reference, bound: float = NEAR_TIE
) -> Difference | None:
    """Return where our output first leaves the reference; None if they are the same.

    `prompt` is the id of the prompt, `bound` the largest gap of a near-tie.
    """
    expected = reference.token_ids
    if list(token_ids) == expected:
        return None
    shared = min(len(expected), len(token_ids))
    at = next((i for i in range(shared) if expected[i] != token_ids[i]), shared)
    theirs = expected[at] if at < len(expected) else None
    ours = token_ids[at] if at < len(token_ids) else None
    gaps = [math.inf, math.inf]
    if theirs is not None and ours is not None:
        logits_V = reference.logits_NV[at].double()
        best = logits_V.topk(2).values
        gaps = [float(logits_V[theirs] - logits_V[ours]), float(best[0] - best[1])]
    # No rounding ends an output, or takes a token whose logit is minus infinity.
    gap, top2_gap = (one if math.isfinite(one) else None for one in gaps)
    return Difference(
        prompt=prompt,
        position=at,
        reference_token=theirs,
        token=ours,
        gap=gap,
        top2_gap=top2_gap,
        bound=bound,
    )


def load_reference(
    folder: str | Path,
    dtype: torch.dtype,
    device: str = "cpu",
    quantization: Quantization | None = None,
) -> PreTrainedModel:
    """Load the target with transformers and its own attention, as plain numbers of `dtype`.

    Weights that are stored quantised are unpacked; with `quantization` plain ones are rounded.
    """
    place, config = torch.device(device), load_config(Path(folder))
    stored = quantization_of(config)
    model: Any
    if stored is not None:
        model = load_packed(Path(folder), config, stored, dtype, place, unpack=True)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
        if quantization is not None:
            quantize_model(model, quantization, place, unpack=True)
    fit_experts(model)
    return model.to(device).eval()


@dataclass(frozen=True, slots=True)
class _OutputPenalties(LogitsProcessor):
    """Compute logit - presence * [in the output] - frequency * (times in the output)."""

    prompt_len: int
    presence: float
    frequency: float

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.zeros_like(scores)
        output = input_ids[:, self.prompt_len :]
        counts.scatter_add_(1, output, torch.ones_like(output, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts


class TargetReference:
    """The target in `folder`, run by transformers; `bound` is the largest gap of a near-tie.

    The arguments are those of `load_reference`.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype,
        device: str = "cpu",
        quantization: Quantization | None = None,
    ) -> None:
        self.model: Any = load_reference(folder, dtype, device, quantization)
        self.bound = near_tie_bound(dtype)
        self.end_ids = eos_token_ids(folder, load_tokenizer(folder))

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], params: SamplingParams) -> Reference:
        """Return the output of `generate` under lengths, stop tokens and penalties of `params`.

        The logits are after all rules: each token is the likeliest of its logits.
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
        """Return the given output with the target's raw logits before each of its tokens."""
        text_1T = torch.tensor([[*prompt, *token_ids]], device=self.model.device)
        logits_NV = self.model(text_1T).logits[0, len(prompt) - 1 : -1]
        return Reference(list(token_ids), logits_NV)

    @torch.inference_mode()
    def next_token_probs(self, contexts: Sequence[Sequence[int]], params: SamplingParams) -> Tensor:
        """Return p(next token | context) after temperature, top-k and top-p, float64 [B, V].

        All contexts have one length. Other parameters are not applied.
        """
        ids_BT = torch.tensor([list(one) for one in contexts], device=self.model.device)
        size = max(1, _BATCH_TOKENS // ids_BT.shape[1])
        logits = [self.model(part, logits_to_keep=1).logits[:, -1] for part in ids_BT.split(size)]
        return probabilities(torch.cat(logits).double().cpu(), params)


def probabilities(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """Return softmax(logits / temperature) after top-k and top-p.

    The cut to the `top_k` likeliest comes first, then the cut to the smallest set of mass `top_p`;
    the rest is renormalised after each.
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
