"""Engines of the tiny target for the engine's tests, and ways to watch and steer their drafts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from peagle import LLM, SamplingParams
from peagle.attention import AttentionMetadata
from peagle.attention.torch_backend import TorchAttention, TorchPreparedAttention
from peagle.engine import Sequence as EngineSequence
from peagle.speculation import Drafts, ProposerInput

PROMPTS = [[5, 9, 200, 31], [17] * 12, [3], list(range(20, 55))]
K = 5
TREES = {"num_parallel_trees": 3, "prediction_depth": K, "max_nodes": 9}


class PaddedTorchAttention(TorchAttention):
    """Torch's attention for a captured step: the rows behind the last sequence are one more."""

    def __init__(self, **options: Any) -> None: ...

    def prepare(self, metadata: AttentionMetadata) -> TorchPreparedAttention:
        count, starts_B = metadata.slots_T.shape[0], metadata.context_starts_B
        padding = count - metadata.query_start_loc[-1:]
        return super().prepare(
            replace(
                metadata,
                query_start_loc=F.pad(metadata.query_start_loc, (0, 1), value=count),
                seq_lens_B=torch.cat([metadata.seq_lens_B, padding]),
                block_tables_BM=F.pad(metadata.block_tables_BM, (0, 0, 0, 1)),
                max_query_len=max(metadata.max_query_len, count),
                context_starts_B=None if starts_B is None else F.pad(starts_B, (0, 1)),
            )
        )


def config_of(name: str, heads: dict[bool, Path]) -> dict[str, Any] | None:
    """A speculative configuration: plain, ngram, trees, "eagle3 trees" or a head's chains.

    Chains may have a draft sampling.
    """
    kind, _, draft_sampling = name.partition(" ")
    if kind == "plain":
        return None
    if kind == "ngram":
        return {"method": "ngram", "num_speculative_tokens": K}
    if name in ("trees", "eagle3 trees"):
        own = {"parallel_drafting_spec": TREES, "prompt_lookup": False}
        return {"model": str(heads[kind == "trees"]), **own}
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
    position. Trees get random shapes too.
    """
    drafting: Any = llm.engine.drafting
    proposer, rng = drafting.proposer, random.Random(0)
    propose = proposer.propose

    def informed(step: ProposerInput) -> Drafts:
        drafts = propose(step)
        tokens_BK = drafts.tokens_BK.clone()
        following: list[list[int | None]] = []
        for b, history in enumerate(step.histories):
            (answer,) = (a for a in answers if a[: len(history)] == list(history))
            rest = answer[len(history) :][: min(num_right, step.num_draft_tokens[b])]
            following.append([t if share == 1 or rng.random() < share else None for t in rest])
        if drafts.parents_BK is not None:
            return replant(
                step, drafts, lambda b, path: next(iter(following[b][len(path) :]), None)
            )
        for b, tokens in enumerate(following):
            for j, token in enumerate(tokens):
                if token is not None:
                    tokens_BK[b, j] = token
        return replace(drafts, tokens_BK=tokens_BK)

    proposer.propose = informed


def look_before_contexts(proposer: Any) -> None:
    """Let attention read what stands before the context of a drafter, too."""
    propose = proposer.propose
    proposer.propose = lambda step: propose(replace(step, context_starts_B=None))


def replant(
    step: ProposerInput,
    drafts: Drafts,
    want: Callable[[int, list[int]], int | None],
    tokens: Sequence[int] = range(100),
) -> Drafts:
    """Trees of random shapes and tokens that hold what is wanted after a path, until it is None.

    They depend on the tokens before them alone.
    """
    assert drafts.parents_BK is not None
    tokens_BK, parents_BK = drafts.tokens_BK.clone(), drafts.parents_BK.clone()
    for b, history in enumerate(step.histories):
        rng, count = random.Random(repr(list(history))), drafts.lens[b]
        depths, parents, made = [0], list[int](), list[int]()
        for row in range(count):
            some = [
                r
                for r in range(row + 1)
                if depths[r] < step.num_draft_tokens[b] and parents.count(r) < len(tokens)
            ]
            parents.append(rng.choice(some[-3:] if rng.random() < 0.8 else some))
            depths.append(depths[parents[-1]] + 1)
            siblings = {t for t, parent in zip(made, parents) if parent == parents[-1]}
            made.append(rng.choice([t for t in tokens if t not in siblings]))
        row, path = 0, list[int]()
        while (token := want(b, path)) is not None:
            children = [r for r, parent in enumerate(parents, start=1) if parent == row]
            if not children:
                break
            row = next((r for r in children if made[r - 1] == token), rng.choice(children))
            made[row - 1] = token
            path.append(token)
        tokens_BK[b, :count] = torch.tensor(made, dtype=torch.int64)
        parents_BK[b, :count] = torch.tensor(parents, dtype=torch.int64)
    return replace(drafts, tokens_BK=tokens_BK, parents_BK=parents_BK)


def watch_drafts(llm: LLM) -> dict[tuple[int, ...], list[int]]:
    """The drafts of the head by the tokens that they follow, as they are made from now on."""
    drafting: Any = llm.engine.drafting
    proposer = drafting.proposer
    propose = proposer.propose
    seen: dict[tuple[int, ...], list[int]] = {}

    def watching(step: ProposerInput) -> Drafts:
        drafts = propose(step)
        for b, history in enumerate(step.histories):
            if step.num_draft_tokens[b]:
                seen[tuple(history)] = drafts.tokens_BK[b, : drafts.lens[b]].tolist()
        return drafts

    proposer.propose = watching
    return seen


def watch_steps(llm: LLM) -> dict[tuple[int, ...], list[int]]:
    """The drafts that steps leave, by the tokens that they follow, from now on."""
    engine: Any = llm.engine
    step = engine.step
    seen: dict[tuple[int, ...], list[int]] = {}

    def watching() -> Any:
        outputs = step()
        engine._complete_drafts()  # else the next step would begin with it
        for sequence in (output.sequence for output in outputs):
            if sequence.drafts and not sequence.is_finished:
                seen[tuple(sequence.token_ids)] = sequence.drafts
        return outputs

    engine.step = watching
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
