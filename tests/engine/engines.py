"""Engines of the tiny target for the engine's tests, and ways to watch and steer their drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peagle import LLM, SamplingParams
from peagle.engine import Sequence as EngineSequence
from peagle.speculation import Drafts, TargetStep

PROMPTS = [[5, 9, 200, 31], [17] * 12, [3], list(range(20, 55))]
K = 5


def config_of(name: str, heads: dict[bool, Path]) -> dict[str, Any] | None:
    """A speculative configuration: plain, ngram, peagle or eagle3, maybe with a draft sampling."""
    kind, _, draft_sampling = name.partition(" ")
    if kind == "plain":
        return None
    if kind == "ngram":
        return {"method": "ngram", "num_speculative_tokens": K}
    config = {"model": str(heads[kind == "peagle"]), "num_speculative_tokens": K}
    return {**config, "draft_sampling": draft_sampling or "argmax"}


def make_llm(folder: Path, speculative: dict[str, Any] | None = None, **options: Any) -> LLM:
    return LLM(folder, speculative_config=speculative, dtype="float64", **options)


def assert_idle(llm: LLM) -> None:
    blocks = llm.engine.scheduler.blocks
    assert not llm.engine.has_unfinished
    assert blocks.num_free_blocks == blocks.num_blocks


def know_the_answer(
    llm: LLM, answers: Sequence[list[int]], num_right: int = K, share: float = 1.0
) -> None:
    """Replace the first drafts by the right ones, or a random share of them.

    Random heads are hardly ever right; this makes verification accept, and reject, at every
    position.
    """
    drafting: Any = llm.engine.drafting
    proposer, rng = drafting.proposer, random.Random(0)
    propose = proposer.propose

    def informed(step: TargetStep) -> Drafts:
        drafts = propose(step)
        tokens_BK = drafts.tokens_BK.clone()
        for b, history in enumerate(step.histories):
            (answer,) = (a for a in answers if a[: len(history)] == list(history))
            for j, token in enumerate(answer[len(history) :][: min(num_right, step.num_drafts[b])]):
                if share == 1 or rng.random() < share:
                    tokens_BK[b, j] = token
        return replace(drafts, tokens_BK=tokens_BK)

    proposer.propose = informed


def watch_drafts(llm: LLM) -> dict[tuple[int, ...], list[int]]:
    """The drafts of the head by the tokens that they follow, as they are made from now on."""
    drafting: Any = llm.engine.drafting
    proposer = drafting.proposer
    propose = proposer.propose
    seen: dict[tuple[int, ...], list[int]] = {}

    def watching(step: TargetStep) -> Drafts:
        drafts = propose(step)
        for b, history in enumerate(step.histories):
            if step.num_drafts[b]:
                seen[tuple(history)] = drafts.tokens_BK[b, : step.num_drafts[b]].tolist()
        return drafts

    proposer.propose = watching
    return seen


def drive(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    before_step: Callable[[int, list[EngineSequence]], None] = lambda step, sequences: None,
) -> list[EngineSequence]:
    """Run prompts to their end, with something done before every step."""
    all_params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    engine = llm.engine
    sequences = [engine.add_request(p, one) for p, one in zip(prompts, all_params, strict=True)]
    step = 0
    while engine.has_unfinished:
        before_step(step, sequences)
        if engine.has_unfinished:
            engine.step()
        step += 1
    assert_idle(llm)
    return sequences
