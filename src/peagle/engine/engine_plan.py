"""The plan of an engine: decisions from its options and its head, before it allocates memory."""

from dataclasses import dataclass

import torch

from peagle.config import CandidateTrees, EngineConfig, SpeculativeConfig
from peagle.engine.depth import DepthPolicy, make_depth
from peagle.engine.head import load_head
from peagle.engine.memory_plan import (
    drawn_bytes,
    lookahead_slots,
    output_bytes,
    refuse_too_large,
)
from peagle.engine.step.graph_runner import buckets, mixed_buckets, runs_as_graphs
from peagle.engine.step.pass_graphs import TOKEN_BUCKETS
from peagle.engine.tree_record import TreeRecord
from peagle.kernels.trees.copies import longest_path
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel, check_length


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The drafting of an engine, the way it runs steps, and the sizes that follow.

    The number of KV blocks is not here: on a GPU the built engine measures its largest passes
    first (`make_memory_plan`).

    Attributes:
        drafter: the loaded head; None without one.
        max_model_len: tokens of the longest sequence.
        max_draft_len: positions up to which the drafter's KV matters; 0 without a head.
        num_speculative_tokens: most drafts of a request.
        trees: the shape of candidate trees; None if drafts are chains.
        tree_record: learns which nodes are accepted; None if drafts are chains.
        depth: chooses K of each step.
        is_pipelined: whether decode steps run as CUDA graphs, one of them in flight.
        num_resuming: most sequences that resume drafting in the same step.
        num_lookahead_slots: KV slots that a request holds beyond its tokens.
        kept_bytes: memory of drawn drafts, hidden states and features that graphs keep.
    """

    config: EngineConfig
    speculative: SpeculativeConfig | None
    drafter: Drafter | None
    max_model_len: int
    max_draft_len: int
    num_speculative_tokens: int
    trees: CandidateTrees | None
    tree_record: TreeRecord | None
    depth: DepthPolicy
    is_pipelined: bool
    num_resuming: int
    num_lookahead_slots: int
    kept_bytes: int

    @property
    def num_nodes(self) -> int | None:
        """Return the most nodes of a candidate tree; None if drafts are chains."""
        return None if self.trees is None else self.trees.max_nodes

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Return the layers of the target whose entering states the drafter reads."""
        return () if self.drafter is None else self.drafter.config.aux_layer_ids

    @property
    def max_path(self) -> int | None:
        """Return the most nodes on a path of a tree; None for chains."""
        if self.speculative is None or self.trees is None:
            return None
        depth, has_copies = self.trees.prediction_depth, self.speculative.copies_join_trees
        return longest_path(depth, self.trees.max_nodes, has_copies=has_copies)

    @property
    def synthetic_rates(self) -> tuple[float, ...] | None:
        """Return acceptance by position that replaces the drafts' own; None keeps their own."""
        return None if self.speculative is None else self.speculative.synthetic_acceptance_rates


def plan_engine(
    target: TargetModel,
    config: EngineConfig,
    speculative: SpeculativeConfig | None,
    drafter: Drafter | None = None,
) -> EnginePlan:
    """Load the head, and decide everything that needs no memory of the engine.

    Args:
        drafter: the head of `speculative`, if it is loaded already.

    Raises:
        UserError: the context is longer than the target's, or the head has another kind than asked,
            or no room on the GPU.
        CheckpointError: the head does not fit the target.
    """
    check_length(config.max_model_len, target.max_model_len)
    max_model_len = config.max_model_len or target.max_model_len
    if drafter is None and speculative is not None:
        with refuse_too_large("draft head", str(speculative.model), target.device):
            drafter = load_head(target, speculative)
    is_pipelined = runs_as_graphs(target.device, config)
    if speculative is not None and drafter is not None:
        parallel = drafter.config.is_parallel
        speculative = speculative.settled(is_captured=is_pipelined, parallel=parallel)
    max_draft_len, trained_depth = 0, None
    if drafter is not None and speculative is not None:
        longest = speculative.max_model_len or drafter.config.max_position_embeddings
        max_draft_len = min(longest, max_model_len)
        trained_depth = drafter.config.trained_depth
    k, trees = 0, None
    if speculative is not None:
        k, trees = speculative.k, speculative.trees
    beam = 0
    if drafter is not None and trees is not None and not drafter.config.is_parallel:
        beam = trees.num_parallel_trees
    record = None if trees is None else TreeRecord(trees)
    depth = make_depth(speculative, trained_depth, is_captured=is_pipelined, trees=record)
    kept_bytes = 0
    if is_pipelined:
        kept_bytes = _kept_bytes(target, drafter, config, speculative, max_model_len)
    return EnginePlan(
        config,
        speculative,
        drafter,
        max_model_len,
        max_draft_len,
        k,
        trees,
        record,
        depth,
        is_pipelined,
        num_resuming=0 if drafter is None else depth.most_resuming(config.max_num_seqs),
        num_lookahead_slots=lookahead_slots(
            k,
            trees.max_nodes if trees else None,
            has_copies=speculative is not None and speculative.copies_join_trees,
            beam=beam,
            is_pipelined=is_pipelined,
        ),
        kept_bytes=kept_bytes,
    )


def _kept_bytes(
    target: TargetModel,
    drafter: Drafter | None,
    config: EngineConfig,
    speculative: SpeculativeConfig | None,
    max_model_len: int,
) -> int:
    """Return the bytes that the graphs of steps and passes keep, and the texts of copies."""
    num_rows, num_bytes = buckets(config.max_num_seqs)[-1], 0
    num_outputs = sum(mixed_buckets(target))
    if speculative is not None and speculative.trees is not None:
        num_outputs += num_rows * (speculative.trees.max_nodes + 1)
    if drafter is not None:
        num_outputs += max(TOKEN_BUCKETS[-1], config.max_num_batched_tokens)
        if speculative is not None and speculative.draws:
            shape, k = speculative.trees, speculative.k
            num_drawn = k if shape is None else shape.num_drawn(shape.max_nodes)
            num_bytes = drawn_bytes(drafter, num_rows, num_drawn)
    if speculative is not None and (drafter is None or speculative.copies_join_trees):
        num_bytes += num_rows * max_model_len * torch.int32.itemsize
    return num_bytes + output_bytes(target, drafter, num_outputs)
