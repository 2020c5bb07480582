"""The parts of an engine: the head that drafts, and how many KV blocks there are."""

from __future__ import annotations

import warnings
from collections.abc import Sequence as SequenceOf

import torch

from peagle.attention import AttentionBackend, LayerKVCache
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.engine.graph_runner import MAX_STOP_IDS, GraphRunner, StepSizes
from peagle.errors import UserError
from peagle.models.checkpoint import load_drafter, read_head_config
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.speculation import AutoregressiveProposer, ParallelProposer, Proposer

_CPU_CACHE_GIB = 2.0
_GPU_FREE_SHARE = 0.8
_KEPT_TIMES = 4


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
    head, _ = read_head_config(speculative.model, num_target_layers=target.num_layers)
    wanted = speculative.parallel_drafting
    if wanted is not None and wanted != head.is_parallel:
        kind = "a P-EAGLE" if head.is_parallel else "an autoregressive EAGLE-3"
        raise UserError(
            f"parallel_drafting is {wanted}, but {speculative.model!r} is {kind} head. "
            f"Set it to {head.is_parallel} or leave it out."
        )
    depth = head.trained_depth
    if depth is not None and speculative.num_speculative_tokens > depth:
        warnings.warn(
            f"num_speculative_tokens is {speculative.num_speculative_tokens}, but the head "
            f"{speculative.model!r} was trained for {depth}; deeper drafts seldom pass.",
            stacklevel=4,
        )
    return load_drafter(speculative.model, target, check_target=speculative.check_target)


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


def runs_as_graphs(
    device: torch.device,
    config: EngineConfig,
    speculative: SpeculativeConfig | None,
    drafter: Drafter | None,
) -> bool:
    """Whether decode steps run as CUDA graphs: plain ones, and those of P-EAGLE by argmax."""
    can_draft = speculative is None or (
        drafter is not None
        and drafter.config.is_parallel
        and speculative.draft_sampling == "argmax"
    )
    return device.type == "cuda" and not config.enforce_eager and can_draft


def make_graph_runner(
    target: TargetModel,
    drafter: Drafter | None,
    drafter_caches: list[LayerKVCache],
    config: EngineConfig,
    *,
    num_drafts: int,
    max_model_len: int,
    max_draft_len: int,
) -> GraphRunner:
    """The runner of decode steps for up to `config.max_num_seqs` sequences."""
    sizes = StepSizes(
        num_seqs=config.max_num_seqs,
        num_drafts=num_drafts,
        table_width=-(-max_model_len // config.block_size),
        num_stop_ids=MAX_STOP_IDS,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_draft_len=max_draft_len,
    )
    return GraphRunner(target, drafter, drafter_caches, sizes)


def drafter_kv_shapes(drafter: Drafter | None) -> list[tuple[int, int]]:
    """(key/value heads, head size) of each drafter layer."""
    if drafter is None:
        return []
    config = drafter.config
    return [(config.num_kv_heads, config.head_dim)] * config.num_layers


def num_kv_blocks(
    target: TargetModel, drafter: Drafter | None, config: EngineConfig, max_model_len: int
) -> int:
    """Blocks of the cache: what memory allows, at most what can be of use.

    All sequences together fill so many; with prefix caching a few times as many keep what was.

    Raises:
        UserError: not one fits.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    size = config.block_size
    block_bytes = sum(
        LayerKVCache.bytes_per_block(size, heads, dim, target.dtype)
        for heads, dim in target.kv_shapes() + drafter_kv_shapes(drafter)
    )
    budget = _cache_bytes(target.device, config)
    fitting = int(budget // block_bytes)
    if fitting < 1:
        raise UserError(
            f"A KV block takes {block_bytes / 2**20:.1f} MiB, the cache may take "
            f"{budget / 2**20:.1f} MiB. Raise kv_cache_gib."
        )
    useful = -(-max_model_len // size) * config.max_num_seqs
    return min(fitting, useful * _KEPT_TIMES if config.enable_prefix_caching else useful)


def _cache_bytes(device: torch.device, config: EngineConfig) -> float:
    if config.kv_cache_gib is not None:
        return config.kv_cache_gib * 2**30
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * _GPU_FREE_SHARE
    return _CPU_CACHE_GIB * 2**30
