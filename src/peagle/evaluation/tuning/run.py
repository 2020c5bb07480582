"""The pieces of `peagle tune` on an engine here: acceptance of a head, and a machine to measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from peagle.config import SamplingParams, SpeculativeConfig
from peagle.engine import SpeculationStats
from peagle.evaluation.compare import build, release
from peagle.evaluation.dialogues import PromptSets, ask
from peagle.evaluation.journal import Journal
from peagle.evaluation.local import EngineBackend
from peagle.evaluation.tuning.acceptance import AcceptanceByK
from peagle.evaluation.tuning.machine import EngineMachine
from peagle.models.checkpoint import read_head_config
from peagle.models.target import TargetModel, load_tokenizer

LOG_NAME = "tune_cells.jsonl"
CONCURRENCY = 8


def measure_acceptance(
    target: TargetModel,
    head: str,
    ks: Sequence[int],
    sets: PromptSets,
    params: SamplingParams,
    journal: Journal,
    *,
    chat: bool,
    watch: Callable[[int], None] = lambda k: None,
    **engine_options: Any,
) -> AcceptanceByK:
    """Acceptance of a head on prompts, each K in a run of its own.

    Args:
        target: loaded.
        head: folder.
        ks: to run with.
        sets: prompts by the name of their set.
        params: how they are sampled; the seed is not None.
        journal: gets the counters of each K as it is finished.
        chat: prompts go behind the chat template.
        watch: called after each K.
        **engine_options: fields of EngineConfig.

    Raises:
        UserError: no prompt has an answer, or an option is not usable.
    """
    per_pos: dict[int, list[float]] = {}
    for k in ks:
        rates = journal.get(f"acceptance k={k}")
        if rates is None:
            config = SpeculativeConfig(model=head, num_speculative_tokens=k)
            options = {"max_num_seqs": CONCURRENCY, **engine_options}
            backend = EngineBackend(build(target, {"head": config}, **options)["head"])
            answers = ask(backend, sets, params, CONCURRENCY, chat=chat).observations
            known = [one.answer.stats for one in answers if one.answer.stats is not None]
            rates = unconditional(SpeculationStats.pooled(known), k)
            journal.add(f"acceptance k={k}", rates)
            del backend
            release(target)
        per_pos[k] = rates
        watch(k)
    return AcceptanceByK(per_pos)


def unconditional(stats: SpeculationStats, k: int) -> list[float]:
    """P(the first i drafts are all accepted) for i = 1 to K; 0 where nothing was drafted."""
    rates = stats.acceptance_per_pos if stats.num_drafts else []
    return [*rates, *[0.0] * (k - len(rates))]


def make_machine(
    target: TargetModel,
    head: str,
    acceptance: AcceptanceByK,
    sets: PromptSets,
    ks: Sequence[int],
    largest_batch: int,
    *,
    context: int,
    steps: int,
    temperature: float,
    **engine_options: Any,
) -> EngineMachine:
    """Engines that accept as many drafts as the head's acceptance says, whatever the text.

    Arguments as `EngineMachine` and `measure_acceptance`.

    Raises:
        UserError: as `EngineMachine`.
    """
    config, _ = read_head_config(head, num_target_layers=target.num_layers)
    configurations: dict[int, SpeculativeConfig | None] = {0: None}
    for k in ks:
        configurations[k] = SpeculativeConfig(
            model=head,
            num_speculative_tokens=k,
            synthetic_acceptance_rates=acceptance.rates(k),
        )
    return EngineMachine(
        target,
        configurations,
        contexts(target, sets, largest_batch, context),
        context=context,
        steps=steps,
        longest=min(target.max_model_len, config.max_position_embeddings),
        temperature=temperature,
        **engine_options,
    )


def contexts(target: TargetModel, sets: PromptSets, count: int, length: int) -> list[list[int]]:
    """Token ids of `count` texts of `length` tokens: the prompts in a row, begun at many places."""
    tokenizer = load_tokenizer(target.name)
    text = "\n".join(turn for prompts in sets.values() for one in prompts for turn in one.turns)
    ids = tokenizer.encode(text, add_special_tokens=False)
    starts = (number * len(ids) // count for number in range(count))
    return [[ids[(start + i) % len(ids)] for i in range(length)] for start in starts]


def shared_settings(
    sets: PromptSets, params: SamplingParams, *, chat: bool, known: AcceptanceByK | None
) -> dict[str, Any]:
    """What measurements of one journal share, beside models and the sizes of the grid."""
    return {
        "sets": {name: len(prompts) for name, prompts in sets.items()},
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "chat_template": chat,
        "acceptance": {str(k): list(rates) for k, rates in known.per_pos.items()}
        if known
        else None,
    }
