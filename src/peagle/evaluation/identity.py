"""Greedy output against transformers' own `generate`, token by token.

In float64 there must be no difference. In float32 the shape of a batch moves logits by about 1e-6,
so a difference is excused only where the reference itself was that undecided: a near-tie. In
bfloat16 rounding moves them by more, and the bound is wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from peagle.results import Difference

NEAR_TIE = 1e-4
# Logits of 16-bit models are themselves rounded: two of size 8 to 16 are 0.0625 apart or equal.
NEAR_TIE_BFLOAT16 = 0.25
NEAR_TIE_FLOAT16 = 2**-5
NEAR_TIE_FLOAT64 = 1e-9


@dataclass(frozen=True, slots=True)
class Reference:
    """What transformers generated for one prompt.

    Attributes:
        token_ids: the output, its end-of-text token included.
        logits_NV: the logits that each of them was chosen from.
    """

    token_ids: list[int]
    logits_NV: Tensor


def load_reference(folder: str | Path, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """The target as transformers runs it, with its own attention."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False
    )
    return model.to(device).eval()


@torch.inference_mode()
def reference_output(
    model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int
) -> Reference:
    """Let transformers complete one prompt, greedily."""
    prompt_1T = torch.tensor([list(prompt)], device=model.device)
    generate: Any = model.generate
    generated = generate(
        prompt_1T,
        attention_mask=torch.ones_like(prompt_1T),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    token_ids = generated.sequences[0, prompt_1T.shape[1] :].tolist()
    return Reference(token_ids, torch.cat(generated.logits))


def near_tie_bound(dtype: torch.dtype) -> float:
    """Largest gap between two logits that rounding can turn round."""
    bounds = {
        torch.bfloat16: NEAR_TIE_BFLOAT16,
        torch.float16: NEAR_TIE_FLOAT16,
        torch.float64: NEAR_TIE_FLOAT64,
    }
    return bounds.get(dtype, NEAR_TIE)


def first_difference(
    prompt: str, token_ids: Sequence[int], reference: Reference, bound: float = NEAR_TIE
) -> Difference | None:
    """Where `token_ids` first leaves the reference; None if they are the same.

    Args:
        prompt: its id.
        token_ids: our output.
        reference: that of transformers.
        bound: of near-ties.
    """
    expected = reference.token_ids
    if list(token_ids) == expected:
        return None
    shared = min(len(expected), len(token_ids))
    at = next((i for i in range(shared) if expected[i] != token_ids[i]), shared)
    theirs = expected[at] if at < len(expected) else None
    ours = token_ids[at] if at < len(token_ids) else None
    found = Difference(prompt=prompt, position=at, reference_token=theirs, token=ours, bound=bound)
    if theirs is None or ours is None:
        return found
    logits_V = reference.logits_NV[at].double()
    best = logits_V.topk(2).values
    gaps = {"gap": logits_V[theirs] - logits_V[ours], "top2_gap": best[0] - best[1]}
    return found.model_copy(update={name: float(gap) for name, gap in gaps.items()})
