"""Greedy outputs of transformers and of the engine, for the losslessness tests."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from peagle import LLM, SamplingParams
from peagle.models.target import TargetModel
from peagle.speculation import Drafts, TargetStep

PROMPTS = [[5, 9, 200, 31], [17] * 40, [3], list(range(20, 95)), [8, 8, 9, 9, 8, 8, 9, 9, 8, 8]]
NEW_TOKENS = 32


@cache
def reference_outputs(folder: Path, dtype: torch.dtype = torch.float64) -> list[list[int]]:
    """What transformers' own `generate` gives for PROMPTS, one at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=0,
            pad_token_id=0,
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


@cache
def load_target(folder: Path, dtype: torch.dtype = torch.float64) -> TargetModel:
    """The target, loaded once; engines may share it."""
    return TargetModel.load(folder, dtype=dtype)


def engine_outputs(
    folder: Path,
    speculative: dict[str, Any] | None,
    *,
    dtype: torch.dtype = torch.float64,
    right_share: float = 0.0,
    **options: Any,
) -> list[list[int]]:
    """What the engine gives for PROMPTS; with right_share > 0 some drafts are made right."""
    target = load_target(folder, dtype)
    llm = LLM(model=target, speculative_config=speculative, **options)
    if right_share:
        know_the_answers(llm, reference_outputs(folder, dtype), right_share)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS))
    assert llm.engine.scheduler.blocks.num_free_blocks == llm.engine.scheduler.blocks.num_blocks
    if right_share:
        assert llm.engine.stats.speculation.acceptance_length > 1.5
    return [output.token_ids for output in outputs]


def know_the_answers(llm: LLM, outputs: list[list[int]], right_share: float) -> None:
    """Replace each draft token by the right one with the given probability.

    Random heads are hardly ever right; this makes verification accept, and reject, at every
    position.
    """
    proposer: Any = llm.engine.drafting.proposer
    propose, rng = proposer.propose, random.Random(0)
    answers = [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)]

    def informed(step: TargetStep) -> Drafts:
        drafts = propose(step)
        tokens_BK = drafts.tokens_BK.clone()
        for b, history in enumerate(step.histories):
            (answer,) = (a for a in answers if a[: len(history)] == list(history))
            for j, token in enumerate(answer[len(history) :][: tokens_BK.shape[1]]):
                if rng.random() < right_share:
                    tokens_BK[b, j] = token
        return replace(drafts, tokens_BK=tokens_BK)

    proposer.propose = informed
