"""The memory of an engine: the parts taken at its start, and the rest for KV blocks.

On a GPU the largest passes run once: KV blocks get the engine's share of the memory without the
weights, the peak of these passes and the graphs. On a CPU KV blocks have a bound; the system
manages the rest.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from peagle.attention import LayerKVCache
from peagle.config import EngineConfig, SamplingParams
from peagle.config.checks import require
from peagle.disk import size_text
from peagle.engine.drafting import Drafting, HeadDrafting
from peagle.engine.features import FEATURES_KEPT, FeatureRings
from peagle.engine.model_runner import ModelRunner
from peagle.engine.scheduler import Chunk
from peagle.engine.sequence import Sequence
from peagle.engine.step.pass_graphs import TOKEN_BUCKETS
from peagle.errors import UserError
from peagle.kernels.trees.beams import beam_slots
from peagle.kernels.trees.copies import longest_path
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel

CPU_CACHE_GIB = 2.0
TYPICAL_LEN = 2048
# Private pools and buffers of the CUDA graphs of decode steps.
GRAPH_BYTES = 512 * 2**20
# With prefix caching the cache is at most this many times the size that all sequences fill.
_KEPT_TIMES = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The division of an engine's memory, in bytes.

    Attributes:
        device: name of the GPU, or "cpu".
        total_bytes, free_bytes: memory of the GPU, and its free part with the weights loaded
            and before any KV; None on a CPU.
        usable_bytes: share of the GPU that this engine and all others may use; None on a CPU.
        drafter_bytes: weights of the drafter without tensors of the target.
        reserved_bytes: memory kept for activations and graphs; 0 on a CPU.
        budget_bytes: most memory of the KV blocks.
        target_block_bytes, drafter_block_bytes: one KV block of `block_size` slots, all layers.
        kv_type: type of the target's KV; the drafter's KV has the type of the activations.
        num_lookahead_slots: KV slots that a request holds beyond its tokens.
        corrections_bytes: the part of drafter_bytes that several corrections take, if there are.
    """

    device: str
    total_bytes: int | None
    free_bytes: int | None
    usable_bytes: int | None
    target_bytes: int
    drafter_bytes: int
    reserved_bytes: int
    budget_bytes: int
    target_block_bytes: int
    drafter_block_bytes: int
    kv_type: str
    num_blocks: int
    block_size: int
    num_lookahead_slots: int
    max_model_len: int
    max_num_seqs: int
    corrections_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one KV block of target and drafter."""
        return self.target_block_bytes + self.drafter_block_bytes

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of all KV blocks."""
        return self.num_blocks * self.block_bytes

    @property
    def num_slots(self) -> int:
        """Return the number of tokens that the KV cache holds."""
        return self.num_blocks * self.block_size

    @property
    def longest_context(self) -> int:
        """Return the most tokens, prompt and output, of a request that runs alone."""
        if self.num_slots >= self.max_model_len:
            return self.max_model_len  # positions beyond it have no slot
        return max(0, self.num_slots - self.num_lookahead_slots)

    @property
    def min_blocks(self) -> int:
        """Return the blocks of the smallest request: one token and its lookahead slots."""
        return self.blocks_for(1)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks of a request of so many tokens, with its lookahead slots."""
        slots = min(num_tokens + self.num_lookahead_slots, self.max_model_len)
        return -(-slots // self.block_size)

    def concurrency(self, num_tokens: int) -> int:
        """Return the number of requests of this length that run at once without shared blocks."""
        return min(self.max_num_seqs, self.num_blocks // self.blocks_for(num_tokens))

    def __str__(self) -> str:
        """Return the plan as a table of a few lines."""
        rows = []
        if self.total_bytes is not None:
            assert self.free_bytes is not None and self.usable_bytes is not None
            others = self.total_bytes - self.free_bytes - self.target_bytes - self.drafter_bytes
            shares = f"{size_text(self.usable_bytes)} of {size_text(self.total_bytes)}"
            rows += [("usable", shares), ("CUDA, others", size_text(max(others, 0)))]
        rows.append(("target weights", size_text(self.target_bytes)))
        block = size_text(self.block_bytes)
        if self.drafter_bytes or self.drafter_block_bytes:
            weights = size_text(self.drafter_bytes)
            if self.corrections_bytes:
                weights += f", {size_text(self.corrections_bytes)} of it its corrections"
            rows.append(("drafter weights", weights))
            block += f", {size_text(self.drafter_block_bytes)} of it the drafter's"
        if self.total_bytes is not None:
            rows.append(("activations, graphs", f"{size_text(self.reserved_bytes)} (measured)"))
        context = f"{self.longest_context:,} tokens"
        if self.longest_context < self.max_model_len:
            context += f": the KV cache ends before max_model_len ({self.max_model_len:,})"
        lengths = dict.fromkeys((self.max_model_len, min(TYPICAL_LEN, self.max_model_len)))
        requests = ", ".join(f"{self.concurrency(n):,} of {n:,}" for n in lengths)
        blocks = f"{self.num_blocks:,} blocks of {self.block_size:,} slots ({block})"
        rows += [
            ("KV cache", f"{size_text(self.kv_bytes)} of {self.kv_type}: {blocks}"),
            ("reserved ahead", f"{self.num_lookahead_slots:,} slots a request"),
            ("longest context", context),
            ("requests at once", f"{requests} tokens (max_num_seqs {self.max_num_seqs:,})"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join((f"memory on {self.device}", *(f"  {n:<{width}}  {t}" for n, t in rows)))


def make_memory_plan(
    target: TargetModel,
    drafter: Drafter | None,
    config: EngineConfig,
    *,
    max_model_len: int,
    num_lookahead_slots: int,
    peak_bytes: int,
    kept_bytes: int = 0,
    has_trees: bool = False,
) -> MemoryPlan:
    """Choose the number of KV blocks: as many as fit the memory and can be used.

    All sequences together use so many; with prefix caching a few times as many keep old prefixes.
    On a GPU the KV blocks may take, and at most `kv_cache_gib`,

        total * gpu_memory_utilization - (total - free) - peak - graphs - kept - one scrap block

    where the peak comes from `measure_peak`. Kept are drawn drafts (`drawn_bytes`), and the outputs
    (`output_bytes`) of passes over steps and prompts, of steps with trees, and of prompts that the
    head reads after the next step.

    Raises:
        UserError: not one request fits, or `num_kv_blocks` of them do not fit the GPU.
    """
    size = config.block_size
    target_block, drafter_block = (
        sum(LayerKVCache.bytes_per_block(size, *kv, dtype) for kv in shapes)
        for shapes, dtype in (
            (target.kv_shapes(), target.kv_dtype),
            (drafter_kv_shapes(drafter), target.dtype),
        )
    )
    block_bytes = target_block + drafter_block
    free = total = usable = None
    reserved = 0
    budget = int((CPU_CACHE_GIB if config.kv_cache_gib is None else config.kv_cache_gib) * 2**30)
    if (card := free_and_total(target.device)) is not None:
        free, total = card
        usable = int(total * config.gpu_memory_utilization)
        graphs = graph_bytes(peak_bytes, config, has_trees=has_trees)
        reserved = peak_bytes + graphs + kept_bytes
        left = max(0, usable - (total - free) - reserved - block_bytes)
        budget = left if config.kv_cache_gib is None else min(left, budget)
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        useful = -(-max_model_len // size) * config.max_num_seqs
        useful *= _KEPT_TIMES if config.enable_prefix_caching else 1
        num_blocks = min(budget // block_bytes, useful)
    else:
        budget = num_blocks * block_bytes
    seen: set[int] = set()
    corrections = None if drafter is None else drafter.correction
    if corrections is not None and not corrections.has_choice:
        corrections = None
    plan = MemoryPlan(
        device=device_name(target.device),
        total_bytes=total,
        free_bytes=free,
        usable_bytes=usable,
        target_bytes=storage_bytes(target.model, seen),
        drafter_bytes=0 if drafter is None else storage_bytes(drafter, seen),
        reserved_bytes=reserved,
        budget_bytes=budget,
        target_block_bytes=target_block,
        drafter_block_bytes=drafter_block,
        kv_type=target.kv_type,
        num_blocks=num_blocks,
        block_size=size,
        num_lookahead_slots=num_lookahead_slots,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        corrections_bytes=0 if corrections is None else storage_bytes(corrections, set()),
    )
    _check(plan, config)
    return plan


def lookahead_slots(
    k: int,
    num_nodes: int | None = None,
    *,
    has_copies: bool = False,
    beam: int = 0,
    is_pipelined: bool,
) -> int:
    """Return the KV slots that a request holds beyond its tokens.

    They are the K drafts that a step may accept, and the drafter's K - 1 mask slots beyond those;
    with a step in flight (`is_pipelined`, in CUDA graphs) also the K + 1 tokens that it may add.
    Each of a tree's `num_nodes` takes a slot, whatever its depth, and so does each node that an
    EAGLE-3 head reads beyond the accepted ones, `beam` of each depth. With copies a step may accept
    `MAX_COPIED` more, as far as there are nodes.
    """
    nodes = 0 if num_nodes is None else num_nodes
    most_new = 1 + longest_path(k, nodes, has_copies=has_copies)
    in_flight = most_new if is_pipelined else 0
    return in_flight + max(most_new + k + 1, nodes + 1, most_new + beam_slots(k, beam))


def drawn_bytes(drafter: Drafter, num_seqs: int, k: int) -> int:
    """Return the bytes of the drawn drafts that captured steps keep, see `DrawnDrafts`."""
    return num_seqs * k * drafter.config.draft_vocab_size * torch.float32.itemsize


def output_bytes(target: TargetModel, drafter: Drafter | None, num_rows: int) -> int:
    """Return the bytes of captured passes' outputs: hidden states and features of each row."""
    width = target.hidden_size + (0 if drafter is None else drafter.config.feature_size)
    return num_rows * width * target.dtype.itemsize


def graph_bytes(peak_bytes: int, config: EngineConfig, *, has_trees: bool) -> int:
    """Return the bytes of the graphs of decode steps, and of the largest captured pass.

    A pass over prompts takes at most its share, by tokens, of the peak of all passes. A step with
    trees has many rows, and logits for each of them: it may be that peak.
    """
    share = 1.0 if has_trees else min(1.0, TOKEN_BUCKETS[-1] / config.max_num_batched_tokens)
    return GRAPH_BYTES + int(share * peak_bytes)


def run_largest_passes(
    runner: ModelRunner,
    drafting: Drafting | None,
    features: FeatureRings,
    config: EngineConfig,
    *,
    num_speculative_tokens: int,
    num_resuming: int,
    num_nodes: int | None = None,
) -> None:
    """Run the largest prefill and the largest decode steps once, and drop their results.

    A GPU must keep free the peak of memory of these passes. The sequences use everything that takes
    memory: sampling, penalties, log-probabilities of the prompt, K drafts each, or trees of
    `num_nodes`. If drafting may pause, `num_resuming` of them have features to read. All of them
    share KV block 0, the only one that the caches need.
    """
    max_len, most = runner.max_model_len, config.max_num_seqs
    k = max(0, min(num_speculative_tokens if num_nodes is None else num_nodes, max_len - 2))
    params = SamplingParams(
        temperature=1.0,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        max_tokens=max_len,
        prompt_logprobs=0,
    )

    def sequence(seq_id: int, num_tokens: int) -> Sequence:
        made = Sequence(seq_id, [0] * num_tokens, params, seq_id, frozenset())
        made.num_speculative_tokens = num_speculative_tokens
        if isinstance(drafting, HeadDrafting) and num_nodes is not None:
            made.draws_chain = drafting.proposer.draws
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

    # The attention of a drafter with a window may begin behind the beginning of a prompt.
    has_window = isinstance(drafting, HeadDrafting) and drafting.proposer.drafter.reach is not None
    for start in (0, 1) if has_window else (0,):
        left, prompts = min(config.max_num_batched_tokens, most * max(1, max_len - 1)), []
        while left:
            prompts.append(sequence(len(prompts), min(left, max(1, max_len - 1))))
            left -= len(prompts[-1])
            prompts[-1].drafter_start = prompts[-1].num_drafter_tokens = start
        run([Chunk(prompt, len(prompt)) for prompt in prompts])
        for prompt in prompts:
            runner.sampler.release(prompt)
            features.release(prompt.seq_id)

    kept = max(1, min(FEATURES_KEPT, max_len - 3 * k - 5))  # leaves room for three full steps
    every = [sequence(i, kept + 1 if i < num_resuming else 1) for i in range(most)]
    for one in every:
        one.num_computed_tokens = len(one)
        one.token_ids += [0]
        if num_nodes is None:
            one.drafts = [0] * k
        else:  # siblings have different tokens
            one.drafts, one.draft_parents = list(range(k)), [0] * k
        one.num_drafter_tokens = len(one) - 1
    run([Chunk(one, 1, k) for one in every])
    # The second step has the first one's drafts, and their probabilities if they are drawn. After a
    # pause of drafting the drafter first reads the kept features.
    for one in every:
        one.num_speculative_tokens = num_speculative_tokens
    if isinstance(drafting, HeadDrafting):
        drafter = drafting.proposer.drafter
        for one in every[:num_resuming]:
            kept_NA = drafter.fc.weight.new_zeros(kept, drafter.config.feature_size)
            one.num_drafter_tokens, first = 0, one.num_computed_tokens - len(kept_NA)
            one.pending_features = features.open(one.seq_id, first, kept_NA)
            one.pending_features.put(kept_NA)
        drafting.catch_up(every)
    run([Chunk(one, 1, len(one.drafts)) for one in every])
    for one in every:
        runner.sampler.release(one)
        features.release(one.seq_id)


def measure_peak(run: Callable[[], None], device: torch.device, config: EngineConfig) -> int:
    """Return the peak of GPU bytes that `run` takes beyond the bytes that it leaves allocated.

    Raises:
        UserError: it takes more than is free.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        run()
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(device)
        raise UserError(
            f"The largest passes do not fit {device_name(device)}, which has {size_text(total)}, "
            f"{size_text(free)} of them free. {_advice(config)}"
        ) from None
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


@contextmanager
def refuse_too_large(
    what: str,
    folder: str | Path,
    device: torch.device,
    saving: str = "Quantise it (fp8, int8 or int4)",
) -> Iterator[None]:
    """Raise a UserError with the sizes if a GPU has no room for the weights that are loaded here.

    Args:
        what: "target" or "draft head".
        saving: the first advice of the error.
    """
    card = free_and_total(device)
    try:
        yield
    except torch.OutOfMemoryError:
        files = [file for file in Path(folder).glob("*.safetensors") if file.exists()]
        size = sum(file.stat().st_size for file in files)
        stored = f", and its files have {size_text(size)}" if size else ""
        free = available_ram() if card is None else card[0]
        raise UserError(
            f"The {what} {str(folder)!r} does not fit {device_name(device)}, which had "
            f"{size_text(free)} free{stored}. {saving}, take a smaller one or a larger card, or "
            "share it out: `peagle serve --engine vllm --tensor-parallel-size N`."
        ) from None


def free_and_total(device: torch.device) -> tuple[int, int] | None:
    """Return the free bytes of a GPU, and all of its bytes; None for a CPU.

    Torch first releases its unused memory.
    """
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


def available_ram() -> int:
    """Return about how many bytes of main memory programs can still take."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        available = sizes["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(available, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return available


def device_name(device: torch.device) -> str:
    """Return the product name of a GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def storage_bytes(module: nn.Module, seen: set[int]) -> int:
    """Return the bytes of a module's parameters and buffers, without storages in `seen`.

    It adds the module's storages to `seen`, so that tied and shared tensors count once.
    """
    total = 0
    for tensor in chain(module.parameters(), module.buffers()):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def drafter_kv_shapes(drafter: Drafter | None) -> list[tuple[int, int]]:
    """Return (key/value heads, head size) of each drafter layer."""
    if drafter is None:
        return []
    config = drafter.config
    return [(config.num_kv_heads, config.head_dim)] * config.num_layers


def _check(plan: MemoryPlan, config: EngineConfig) -> None:
    """Refuse a plan in which no request can run, or whose blocks do not fit the GPU."""
    asked, needed = config.num_kv_blocks, plan.min_blocks
    if asked is not None:
        size = (asked + 1) * plan.block_bytes
        if plan.free_bytes is not None and size > plan.free_bytes:
            raise UserError(
                f"num_kv_blocks is {asked}, which take {size_text(size)}; {plan.device} has "
                f"{size_text(plan.free_bytes)} free. Ask for fewer, or leave it out."
            )
        require(asked >= needed, "num_kv_blocks", asked, f"at least {needed}, those of one request")
    elif plan.num_blocks < needed:
        text = (
            f"A KV block takes {size_text(plan.block_bytes)} and one request at least {needed} of "
            f"them, {size_text(needed * plan.block_bytes)}; the KV cache may take "
            f"{size_text(plan.budget_bytes)}. "
        )
        bound = None if config.kv_cache_gib is None else int(config.kv_cache_gib * 2**30)
        if plan.total_bytes is None or plan.free_bytes is None or plan.usable_bytes is None:
            text += "Raise kv_cache_gib, or take a smaller dtype."
        elif plan.budget_bytes == bound:
            text += f"Raise kv_cache_gib ({config.kv_cache_gib:g}), or take a smaller dtype."
        else:
            used = plan.total_bytes - plan.free_bytes
            text += (
                f"Of the {size_text(plan.total_bytes)} of {plan.device} this engine may use "
                f"{size_text(plan.usable_bytes)}; {size_text(used)} are in use, "
                f"{size_text(plan.target_bytes + plan.drafter_bytes)} of them by its weights, and "
                f"{size_text(plan.reserved_bytes)} are kept for activations and graphs. "
                f"{_advice(config)}"
            )
        raise UserError(text)


def _advice(config: EngineConfig) -> str:
    # Linear layers with FP8 activations have their weights twice.
    fewer = "" if config.fp8_activations == "off" else "leave fp8_activations out, "
    return (
        f"Lower max_num_batched_tokens ({config.max_num_batched_tokens}) or max_num_seqs "
        f"({config.max_num_seqs}), raise gpu_memory_utilization "
        f"({config.gpu_memory_utilization:g}), {fewer}take a smaller dtype, or free the card."
    )
