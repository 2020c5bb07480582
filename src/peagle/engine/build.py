"""The parts of an engine: the head that drafts, and how many KV blocks there are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch

from peagle.attention import AttentionBackend, LayerKVCache
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.engine.capture import make_capturer
from peagle.engine.depth import DepthPolicy
from peagle.engine.drafting import Drafting, HeadDrafting, LookupDrafting
from peagle.engine.features import FeatureRings
from peagle.engine.graph_runner import MAX_STOP_IDS, GraphRunner, StepSizes, graph_sizes
from peagle.engine.model_runner import ModelRunner
from peagle.engine.sampler import Sampler
from peagle.engine.target_graphs import DrafterGraphs, TargetGraphs
from peagle.errors import UserError
from peagle.models.acceleration import accelerate_drafter, accelerate_target
from peagle.models.checkpoint import load_drafter, read_head_config, trained_length
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.speculation import (
    AutoregressiveProposer,
    ParallelProposer,
    PromptLookup,
    Proposer,
)
from peagle.speculation.proposers import HeadProposer


def resolve_max_model_len(target: TargetModel, config: EngineConfig) -> int:
    """The longest sequence.

    Raises:
        UserError: more was asked for than the target's positions.
    """
    limit, asked = target.max_model_len, config.max_model_len
    if asked is not None and asked > limit:
        raise UserError(
            f"max_model_len is {asked}; the target's positions end at {limit}. "
            "Ask for at most that."
        )
    return asked or limit


def resolve_max_draft_len(
    drafter: Drafter | None, speculative: SpeculativeConfig | None, max_model_len: int
) -> int:
    """Positions up to which the head drafts; 0 without one."""
    if drafter is None or speculative is None:
        return 0
    asked = speculative.max_model_len
    return min(asked or drafter.config.max_position_embeddings, max_model_len)


def load_head(target: TargetModel, speculative: SpeculativeConfig | None) -> Drafter | None:
    """The draft head of a configuration, None if it has none.

    Raises:
        UserError: parallel_drafting contradicts the kind of head.
        CheckpointError: the head does not fit the target.
    """
    if speculative is None or speculative.model is None:
        return None
    head, facts = read_head_config(speculative.model, num_target_layers=target.num_layers)
    wanted = speculative.parallel_drafting
    if wanted is not None and wanted != head.is_parallel:
        kind = "a P-EAGLE" if head.is_parallel else "an autoregressive EAGLE-3"
        raise UserError(
            f"parallel_drafting is {wanted}, but {speculative.model!r} is {kind} head. "
            f"Set it to {head.is_parallel} or leave it out."
        )
    depth = head.trained_depth
    if depth is not None and speculative.num_drafts > depth:
        warnings.warn(
            f"num_speculative_tokens is {speculative.num_drafts}, but the head "
            f"{speculative.model!r} was trained for {depth}; deeper drafts seldom pass.",
            stacklevel=4,
        )
    drafter = load_drafter(speculative.model, target, check_target=speculative.check_target)
    window = speculative.draft_window
    drafter.window = trained_length(facts) if window is None else window or None
    return drafter


def make_proposer(
    drafter: Drafter,
    speculative: SpeculativeConfig,
    backend: AttentionBackend,
    caches: SequenceOf[LayerKVCache],
    max_model_len: int,
) -> Proposer:
    """The proposer of the head's kind."""
    kind = ParallelProposer if drafter.config.is_parallel else AutoregressiveProposer
    return kind(
        drafter,
        backend,
        caches,
        max_model_len=max_model_len,
        draft_sampling=speculative.draft_sampling,
    )


def make_drafting(
    target: TargetModel,
    drafter: Drafter | None,
    speculative: SpeculativeConfig | None,
    backend: AttentionBackend,
    caches: SequenceOf[LayerKVCache],
    sampler: Sampler,
    features: FeatureRings,
    *,
    max_model_len: int,
    max_draft_len: int,
) -> Drafting | None:
    """What drafts after a target pass, with a head or from the text; None decodes plainly."""
    if speculative is None:
        return None
    vocab_size = target.vocab_size
    if drafter is None:
        lookup = PromptLookup(speculative.prompt_lookup_max, speculative.prompt_lookup_min)
        return LookupDrafting(lookup, vocab_size, max_model_len)
    proposer = make_proposer(drafter, speculative, backend, caches, max_model_len)
    return HeadDrafting(proposer, sampler, vocab_size, max_model_len, max_draft_len, features)


def runs_as_graphs(
    device: torch.device,
    config: EngineConfig,
    speculative: SpeculativeConfig | None,
    drafter: Drafter | None,
) -> bool:
    """Whether decode steps run as CUDA graphs: plain ones, and with argmax drafts of a head."""
    can_draft = speculative is None or (
        drafter is not None and speculative.draft_sampling == "argmax"
    )
    return device.type == "cuda" and not config.enforce_eager and can_draft


def depth_of(speculative: SpeculativeConfig | None) -> DepthPolicy:
    """K where so many sequences run together."""
    return DepthPolicy(speculative.tokens_for if speculative else lambda num_sequences: 0)


def most_resuming(depth: DepthPolicy, drafter: Drafter | None, max_num_seqs: int) -> int:
    """Most sequences that begin to draft again together; 0 where a head drafts at any load."""
    depths = [depth(n) for n in range(1, max_num_seqs + 1)]
    if drafter is None or all(depths):
        return 0
    return max((n for n, k in enumerate(depths, 1) if k), default=1)


def accelerate(
    target: TargetModel,
    drafter: Drafter | None,
    max_num_seqs: int,
    depth: Callable[[int], int],
) -> None:
    """Fuse and compile what the graphs run; `depth` as in `GraphRunner`."""
    sizes = graph_sizes(max_num_seqs, depth)
    accelerate_target(target, [rows * (k + 1) for rows, k in sizes])
    sizes = [(rows, k) for rows, k in sizes if k]
    if drafter is None or not sizes:
        return
    target_rows = [rows * (k + 1) for rows, k in sizes]
    all_drafts, single = [rows * k for rows, k in sizes], [rows for rows, _ in sizes]
    parallel = drafter.config.is_parallel
    accelerate_drafter(
        drafter,
        [2 * drafts for drafts in all_drafts] if parallel else [*target_rows, *single],
        num_feature_rows=target_rows,
        num_logit_rows=all_drafts if parallel else single,
    )


def make_graph_runner(
    runner: ModelRunner,
    drafting: Drafting | None,
    drafter_caches: list[LayerKVCache],
    config: EngineConfig,
    speculative: SpeculativeConfig | None,
    *,
    depth: DepthPolicy,
    features: FeatureRings,
    max_model_len: int,
    max_draft_len: int,
) -> GraphRunner:
    """The runner of decode steps for up to `config.max_num_seqs` sequences.

    On a card all graphs are made now, those of short prompts too, which `runner` and the proposer
    get. `features` has room for all sequences then if `depth` may be 0 while there is a head.
    """
    target, proposer = runner.target, getattr(drafting, "proposer", None)
    table_width = -(-max_model_len // config.block_size)
    sizes = StepSizes(
        num_seqs=config.max_num_seqs,
        num_drafts=speculative.num_drafts if speculative else 0,
        table_width=table_width,
        num_stop_ids=MAX_STOP_IDS,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_draft_len=max_draft_len,
        synthetic_rates=speculative.synthetic_acceptance_rates if speculative else None,
    )
    capture = make_capturer(target.device)
    drafter = proposer.drafter if isinstance(proposer, HeadProposer) else None
    kept = None
    if drafter is not None and most_resuming(depth, drafter, config.max_num_seqs):
        width = drafter.config.feature_size
        features.reserve(config.max_num_seqs, width, target.dtype, target.device)
        kept = features
    graphs = GraphRunner(target, drafter, drafter_caches, sizes, depth, capture, kept)
    if target.device.type == "cuda":
        graphs.capture_all()
        runner.graphs = TargetGraphs(target, runner.backend, capture, table_width)
        if isinstance(proposer, HeadProposer):
            proposer.graphs = DrafterGraphs(proposer, capture, table_width)
    return graphs
