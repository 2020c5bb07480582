"""The parts of an engine: the head that drafts, the profiling pass, the graphs of decode steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from peagle.attention import AttentionBackend, LayerKVCache
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.engine.drafting import DepthPolicy, Drafting, HeadDrafting, LookupDrafting
from peagle.engine.features import FEATURES_KEPT, FeatureRings
from peagle.engine.graph_runner import MAX_STOP_IDS, GraphRunner, graph_sizes
from peagle.engine.model_runner import ModelRunner
from peagle.engine.pass_graphs import make_capturer, make_drafter_graphs, make_target_graphs
from peagle.engine.sampler import Sampler
from peagle.engine.scheduler import Chunk
from peagle.engine.sequence import Sequence
from peagle.errors import UserError
from peagle.models.acceleration import accelerate_drafter, accelerate_target
from peagle.models.checkpoint import load_drafter, read_head_config, trained_length
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.speculation import AutoregressiveProposer, ParallelProposer, PromptLookup


def load_head(target: TargetModel, speculative: SpeculativeConfig | None) -> Drafter | None:
    """Return the draft head of a configuration, None if it has none.

    Raises:
        UserError: parallel_drafting contradicts the kind of head.
        CheckpointError: the head does not fit the target.
    """
    if speculative is None or speculative.model is None:
        return None
    head, facts = read_head_config(speculative.model, num_target_layers=target.num_layers)
    parallel = speculative.parallel_drafting
    if parallel is not None and parallel != head.is_parallel:
        kind = "a P-EAGLE" if head.is_parallel else "an autoregressive EAGLE-3"
        raise UserError(
            f"parallel_drafting is {parallel}, but {speculative.model!r} is {kind} head. "
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


def make_drafting(
    drafter: Drafter | None,
    speculative: SpeculativeConfig | None,
    backend: AttentionBackend,
    sampler: Sampler,
    features: FeatureRings,
    *,
    max_model_len: int,
    max_draft_len: int,
) -> Drafting | None:
    """Return what drafts after a target pass, with a head or from the text; None decodes plainly.

    A head's proposer has no KV caches yet.
    """
    if speculative is None:
        return None
    if drafter is None:
        lookup = PromptLookup(speculative.prompt_lookup_max, speculative.prompt_lookup_min)
        return LookupDrafting(lookup, max_model_len)
    make_proposer = ParallelProposer if drafter.config.is_parallel else AutoregressiveProposer
    proposer = make_proposer(
        drafter,
        backend,
        [],
        max_model_len=max_model_len,
        draft_sampling=speculative.draft_sampling,
    )
    vocab_size = sampler.vocab_size
    return HeadDrafting(proposer, sampler, vocab_size, max_model_len, max_draft_len, features)


def runs_as_graphs(
    device: torch.device,
    config: EngineConfig,
    speculative: SpeculativeConfig | None,
    drafter: Drafter | None,
) -> bool:
    """Return whether decode steps run as CUDA graphs: plain ones, and argmax drafts of a head."""
    can_draft = speculative is None or (
        drafter is not None and speculative.draft_sampling == "argmax"
    )
    return device.type == "cuda" and not config.enforce_eager and can_draft


def most_resuming(depth: DepthPolicy, max_num_seqs: int) -> int:
    """Return how many sequences at most begin to draft again together; 0 where K is never 0."""
    depths = [depth(n) for n in range(1, max_num_seqs + 1)]
    return 0 if all(depths) else max((n for n, k in enumerate(depths, 1) if k), default=1)


def accelerate(
    target: TargetModel,
    drafter: Drafter | None,
    max_num_seqs: int,
    depth: Callable[[int], int],
) -> None:
    """Fuse and compile the modules that the graphs run; `depth` as in `GraphRunner`."""
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


def run_largest_passes(
    runner: ModelRunner,
    drafting: Drafting | None,
    features: FeatureRings,
    config: EngineConfig,
    *,
    num_drafts: int,
    num_resuming: int,
) -> None:
    """Run the largest prefill and the largest decode steps once, and drop what they compute.

    The peak of memory meanwhile is what a GPU must keep free for passes. The sequences ask for all
    that takes memory: sampling, penalties, log-probabilities of the prompt, K drafts each. Where
    drafting may pause, `num_resuming` of them have features to read. All of them share KV block 0,
    the only one that the caches need.
    """
    max_len, most = runner.max_model_len, config.max_num_seqs
    k = max(0, min(num_drafts, max_len - 2))
    params = SamplingParams(
        temperature=1.0,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        max_tokens=max_len,
        prompt_logprobs=0,
    )

    def sequence(seq_id: int, num_tokens: int) -> Sequence:
        made = Sequence(
            seq_id,
            [0] * num_tokens,
            params,
            seq_id,
            frozenset(),
            num_speculative_tokens=num_drafts,
        )
        made.block_table = [0] * -(-max_len // runner.block_size)
        return made

    def run(chunks: list[Chunk]) -> None:
        done = runner.run(chunks)
        assert done.sampled is not None
        for chunk, accepted in zip(chunks, done.sampled.num_accepted, strict=True):
            chunk.sequence.num_computed_tokens += chunk.num_tokens + accepted
            missing = chunk.sequence.num_computed_tokens + 1 - len(chunk.sequence)
            chunk.sequence.token_ids += [0] * missing
        if drafting is not None:
            drafting.draft(done)

    left, prompts = min(config.max_num_batched_tokens, most * max(1, max_len - 1)), []
    while left:
        prompts.append(sequence(len(prompts), min(left, max(1, max_len - 1))))
        left -= len(prompts[-1])
    run([Chunk(prompt, len(prompt)) for prompt in prompts])
    for prompt in prompts:
        runner.sampler.release(prompt)
        features.release(prompt.seq_id)

    kept = max(1, min(FEATURES_KEPT, max_len - 2 * k - 4))
    every = [sequence(i, kept if i < num_resuming else 1) for i in range(most)]
    for one in every:
        one.num_computed_tokens = len(one)
        one.token_ids += [0]
        one.drafts = [0] * k
        one.num_drafter_tokens = len(one) - 1
    run([Chunk(one, 1, k) for one in every])
    # The second step has the first one's drafts, whose probabilities take memory where they are
    # drawn, and the drafter reads kept features.
    for one in every[:num_resuming]:
        assert isinstance(drafting, HeadDrafting)
        drafter = drafting.proposer.drafter
        weight, width = drafter.fc.weight, drafter.config.feature_size
        kept_NA = weight.new_zeros(min(FEATURES_KEPT, one.num_computed_tokens), width)
        one.num_drafter_tokens, first = 0, one.num_computed_tokens - len(kept_NA)
        one.pending_features = features.open(one.seq_id, first, kept_NA)
        one.pending_features.put(kept_NA)
    run([Chunk(one, 1, len(one.drafts)) for one in every])
    for one in every:
        runner.sampler.release(one)
        features.release(one.seq_id)


def make_graph_runner(
    runner: ModelRunner,
    drafting: Drafting | None,
    config: EngineConfig,
    speculative: SpeculativeConfig | None,
    *,
    depth: DepthPolicy,
    features: FeatureRings,
    max_draft_len: int,
) -> GraphRunner:
    """Return the runner of decode steps for up to `config.max_num_seqs` sequences.

    On a GPU this makes all graphs, and gives `runner` and the proposer those of short prompts.
    """
    from peagle.engine.decode_step import DecodeStep, StepBuffers, StepSizes

    target, max_model_len = runner.target, runner.max_model_len
    proposer = drafting.proposer if isinstance(drafting, HeadDrafting) else None
    table_width = -(-max_model_len // config.block_size)
    capture = make_capturer(target.device)

    def make_step(size: tuple[int, int], greedy: bool) -> DecodeStep:
        sizes = StepSizes(
            *size,
            table_width=table_width,
            num_stop_ids=MAX_STOP_IDS,
            block_size=config.block_size,
            max_model_len=max_model_len,
            max_draft_len=max_draft_len,
            synthetic_rates=speculative.synthetic_acceptance_rates if speculative else None,
        )
        return DecodeStep(
            target,
            proposer if sizes.num_drafts else None,
            StepBuffers(sizes, target.device),
            greedy=greedy,
            kept_SCA=None if sizes.num_drafts else features.rows_SCA,
        )

    graphs = GraphRunner(
        make_step,
        config.max_num_seqs,
        target.vocab_size,
        depth,
        capture,
        None if features.rows_SCA is None else features,
    )
    if target.device.type == "cuda":
        graphs.capture_all()
        runner.graphs = make_target_graphs(target, runner.backend, capture, table_width)
        if proposer is not None:
            proposer.graphs = make_drafter_graphs(proposer, capture, table_width)
    return graphs


def make_caches(
    shapes: list[tuple[int, int]],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[LayerKVCache]:
    """Return one KV cache a layer of (key/value heads, head size)."""
    return [LayerKVCache(num_blocks, block_size, h, d, dtype, device) for h, d in shapes]
