"""The memory of an engine, planned when it starts: what is taken, and what is left for KV blocks.

On a GPU: weights, then room for activations and graphs, and KV blocks in what remains of the share
that the engine may use. On a CPU: KV blocks up to a bound; the rest is the system's business.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from peagle.attention import LayerKVCache
from peagle.config import EngineConfig
from peagle.config.checks import require
from peagle.engine.features import FEATURES_KEPT
from peagle.errors import UserError
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel

CPU_CACHE_GIB = 2.0
TYPICAL_LEN = 2048
# Private pools of the CUDA graphs, buffers of the steps, workspaces of split attention.
GRAPH_BYTES = 512 * 2**20
# With prefix caching: blocks for so many times what all sequences together fill.
_KEPT_TIMES = 4
# Tensors of a layer as wide as its hidden state that are alive at once, float32 counted as two.
_HIDDEN_COPIES = 12
# Copies of the logits in their own type, and in float32 (probabilities, their order, sums).
_LOGITS_COPIES, _FLOAT32_COPIES = 2, 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory of an engine goes, in bytes.

    Attributes:
        device: the card's name, or "cpu".
        total_bytes, free_bytes: of the card, free with the weights loaded and before any KV; None
            on a CPU, which is not asked.
        usable_bytes: what of the card this engine and all others may use; None on a CPU.
        target_bytes: weights of the target.
        drafter_bytes: weights of the drafter, those left out that are the target's own tensors.
        reserved_bytes: for activations and graphs; 0 on a CPU.
        budget_bytes: what the KV blocks may take.
        target_block_bytes, drafter_block_bytes: one KV block, all layers.
        num_blocks, block_size: of the KV cache; of slots each.
        num_lookahead_slots: KV slots that a request holds beyond its tokens.
        max_model_len, max_num_seqs: as the engine has them.
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
    num_blocks: int
    block_size: int
    num_lookahead_slots: int
    max_model_len: int
    max_num_seqs: int

    @property
    def block_bytes(self) -> int:
        """One KV block of target and drafter."""
        return self.target_block_bytes + self.drafter_block_bytes

    @property
    def kv_bytes(self) -> int:
        """All KV blocks."""
        return self.num_blocks * self.block_bytes

    @property
    def num_slots(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.block_size

    @property
    def longest_context(self) -> int:
        """Tokens, prompt and output, that a request can have when it is alone."""
        if self.num_slots >= self.max_model_len:
            return self.max_model_len  # positions beyond it have no slot
        return max(0, self.num_slots - self.num_lookahead_slots)

    @property
    def typical_len(self) -> int:
        """A length that many requests have: TYPICAL_LEN, or the longest."""
        return min(TYPICAL_LEN, self.max_model_len)

    @property
    def typical_concurrency(self) -> int:
        """Requests of the typical length that run at once."""
        return self.concurrency(self.typical_len)

    @property
    def max_len_concurrency(self) -> int:
        """Requests of max_model_len tokens that run at once."""
        return self.concurrency(self.max_model_len)

    @property
    def min_blocks(self) -> int:
        """Blocks without which no request runs: one token and the slots ahead of it."""
        return self.blocks_for(1)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of a request of so many tokens, slots ahead included."""
        slots = min(num_tokens + self.num_lookahead_slots, self.max_model_len)
        return -(-slots // self.block_size)

    def concurrency(self, num_tokens: int) -> int:
        """Requests of so many tokens that run at once, sharing nothing; at most max_num_seqs."""
        return min(self.max_num_seqs, self.num_blocks // self.blocks_for(num_tokens))

    def __str__(self) -> str:
        """A table of a few lines."""
        rows = [*self._card_rows(), ("target weights", size_text(self.target_bytes))]
        if self.drafter_bytes or self.drafter_block_bytes:
            rows.append(("drafter weights", size_text(self.drafter_bytes)))
        if self.total_bytes is not None:
            rows.append(("activations, graphs", f"{size_text(self.reserved_bytes)} (estimate)"))
        lengths = dict.fromkeys((self.max_model_len, self.typical_len))
        rows += [
            ("KV cache", self._kv_text()),
            ("reserved ahead", f"{self.num_lookahead_slots:,} slots a request"),
            ("longest context", self._context_text()),
            ("requests at once", ", ".join(f"{self.concurrency(n):,} of {n:,}" for n in lengths)),
        ]
        rows[-1] = (rows[-1][0], f"{rows[-1][1]} tokens (max_num_seqs {self.max_num_seqs:,})")
        width = max(len(name) for name, _ in rows)
        return "\n".join((f"memory on {self.device}", *(f"  {n:<{width}}  {t}" for n, t in rows)))

    def _card_rows(self) -> list[tuple[str, str]]:
        if self.total_bytes is None or self.free_bytes is None or self.usable_bytes is None:
            return []
        others = self.total_bytes - self.free_bytes - self.target_bytes - self.drafter_bytes
        shares = f"{size_text(self.usable_bytes)} of {size_text(self.total_bytes)}"
        return [("usable", shares), ("CUDA, others", size_text(max(others, 0)))]

    def _kv_text(self) -> str:
        block = size_text(self.block_bytes)
        if self.drafter_block_bytes:
            block += f", {size_text(self.drafter_block_bytes)} of it the drafter's"
        count = f"{self.num_blocks:,} blocks of {self.block_size:,} slots"
        return f"{size_text(self.kv_bytes)}: {count} ({block})"

    def _context_text(self) -> str:
        text = f"{self.longest_context:,} tokens"
        if self.longest_context == self.max_model_len:
            return text
        return f"{text}: the KV cache ends before max_model_len ({self.max_model_len:,})"


def make_memory_plan(
    target: TargetModel,
    drafter: Drafter | None,
    config: EngineConfig,
    *,
    max_model_len: int,
    num_lookahead_slots: int,
    num_drafts: int,
    num_resuming: int = 0,
    reserved_bytes: int | None = None,
) -> MemoryPlan:
    """Choose the number of KV blocks: what memory allows, at most what can be of use.

    All sequences together fill so many; with prefix caching a few times as many keep what was. On
    a GPU the KV blocks may take, and at most `kv_cache_gib`,

        total * gpu_memory_utilization - (total - free) - reserved - one block of scrap

    Args:
        target: loaded.
        drafter: loaded; None without a head.
        config: sizes of the engine.
        max_model_len: longest sequence.
        num_lookahead_slots: KV slots that a request holds beyond its tokens.
        num_drafts: K.
        num_resuming: most sequences that begin to draft again together, after a load too high to
            draft; 0: there is no such load.
        reserved_bytes: for activations and graphs on a GPU; None estimates them.

    Raises:
        UserError: not one request fits, or `num_kv_blocks` of them do not fit the card.
    """
    size = config.block_size
    target_block = _block_bytes(target.kv_shapes(), size, target.dtype)
    drafter_block = _block_bytes(drafter_kv_shapes(drafter), size, target.dtype)
    block_bytes = target_block + drafter_block
    card = free_and_total(target.device)
    if card is None:
        reserved_bytes = 0
    elif reserved_bytes is None:
        reserved_bytes = estimate_reserved(
            target,
            drafter,
            config,
            max_model_len=max_model_len,
            num_drafts=num_drafts,
            num_resuming=num_resuming,
        )
    budget = _kv_budget(card, config, reserved_bytes + block_bytes)
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        useful = -(-max_model_len // size) * config.max_num_seqs
        useful *= _KEPT_TIMES if config.enable_prefix_caching else 1
        num_blocks = min(budget // block_bytes, useful)
    else:
        budget = num_blocks * block_bytes
    seen: set[int] = set()
    plan = MemoryPlan(
        device=device_name(target.device),
        total_bytes=None if card is None else card[1],
        free_bytes=None if card is None else card[0],
        usable_bytes=None if card is None else _usable_bytes(card[1], config),
        target_bytes=storage_bytes(target.model, seen),
        drafter_bytes=0 if drafter is None else storage_bytes(drafter, seen),
        reserved_bytes=reserved_bytes,
        budget_bytes=budget,
        target_block_bytes=target_block,
        drafter_block_bytes=drafter_block,
        num_blocks=num_blocks,
        block_size=size,
        num_lookahead_slots=num_lookahead_slots,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
    )
    _check(plan, config)
    return plan


def free_and_total(device: torch.device) -> tuple[int, int] | None:
    """Bytes of a card that nobody uses, and all of its bytes; None for a CPU.

    What torch holds but does not use is handed back first: it counts as free.
    """
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


def device_name(device: torch.device) -> str:
    """What the maker calls a card; "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def storage_bytes(module: nn.Module, seen: set[int]) -> int:
    """Bytes of the parameters and buffers of a module, storages in `seen` left out.

    Adds its own to `seen`: tied and shared tensors count once.
    """
    total = 0
    for tensor in chain(module.parameters(), module.buffers()):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def drafter_kv_shapes(drafter: Drafter | None) -> list[tuple[int, int]]:
    """(key/value heads, head size) of each drafter layer."""
    if drafter is None:
        return []
    config = drafter.config
    return [(config.num_kv_heads, config.head_dim)] * config.num_layers


def estimate_reserved(
    target: TargetModel,
    drafter: Drafter | None,
    config: EngineConfig,
    *,
    max_model_len: int,
    num_drafts: int,
    num_resuming: int = 0,
) -> int:
    """Bytes that a GPU needs beside weights and KV, about: the largest pass, and the graphs.

    rows * (the widest layer, features) + logits + counts of penalties + angles + GRAPH_BYTES,
    where rows is a chunk of prompts, or the rows of a decode step if those are more. Where drafting
    may pause, also the features kept of every sequence, and a pass over those of `num_resuming`.
    """
    itemsize = target.dtype.itemsize
    num_seqs = config.max_num_seqs
    logit_rows = num_seqs * (num_drafts + 1)
    chunk = min(config.max_num_batched_tokens, num_seqs * max_model_len)
    logit_bytes = itemsize * _LOGITS_COPIES + 4 * _FLOAT32_COPIES
    total = GRAPH_BYTES
    resumed_rows = num_resuming * FEATURES_KEPT
    total += max(chunk, logit_rows, resumed_rows) * _row_width(target, drafter) * itemsize
    total += logit_rows * target.vocab_size * logit_bytes
    total += num_seqs * target.vocab_size * 5  # an int32 and a flag a token
    if drafter is not None:
        positions = max(drafter.config.max_position_embeddings, max_model_len + 2 * num_drafts)
        total += 2 * positions * drafter.config.head_dim * itemsize  # cos and sin
        num_rings = num_seqs + 1 if num_resuming else 0
        total += num_rings * FEATURES_KEPT * drafter.config.feature_size * itemsize
    return total


def size_text(num_bytes: int) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} B"


def _row_width(target: TargetModel, drafter: Drafter | None) -> int:
    """Numbers that are alive at once for one row: in a layer, and what its features take."""
    text = target.model.config.get_text_config()
    kv_shapes = target.kv_shapes()
    head_dim = max(dim for _, dim in kv_shapes)
    kv_width = max(heads * dim for heads, dim in kv_shapes)
    hidden = target.hidden_size
    widest = _HIDDEN_COPIES * hidden
    # Queries, keys and values before and after RoPE.
    widest += 2 * (text.num_attention_heads * head_dim + 2 * kv_width) + _mlp_width(text, hidden)
    if drafter is None:
        return widest
    own = drafter.config
    heads = own.num_attention_heads + 2 * own.num_kv_heads
    drafting = _HIDDEN_COPIES * own.hidden_size + 2 * heads * own.head_dim
    drafting += 3 * own.intermediate_size
    # As they are tapped, side by side, and normed.
    return max(widest, drafting) + 3 * own.feature_size


def _mlp_width(text: Any, hidden_size: int) -> int:
    """Gate, up and their product; with experts, of each that a token goes to, in and out too."""
    dense = _largest(text, "intermediate_size") or 4 * hidden_size
    names = ("num_experts_per_tok", "experts_per_token", "top_k_experts")
    num_experts = max(_largest(text, name) for name in names)
    expert = _largest(text, "moe_intermediate_size") or dense
    return max(3 * dense, num_experts * (3 * expert + 2 * hidden_size))


def _largest(text: Any, name: str) -> int:
    """A size of a configuration, where layers differ the largest; 0 where there is none."""
    value = getattr(text, name, None)
    return max(value, default=0) if isinstance(value, list | tuple) else value or 0


def _block_bytes(shapes: SequenceOf[tuple[int, int]], size: int, dtype: torch.dtype) -> int:
    return sum(LayerKVCache.bytes_per_block(size, heads, dim, dtype) for heads, dim in shapes)


def _usable_bytes(total: int, config: EngineConfig) -> int:
    return int(total * config.gpu_memory_utilization)


def _kv_budget(card: tuple[int, int] | None, config: EngineConfig, reserved: int) -> int:
    asked = config.kv_cache_gib
    if card is None:
        return int((CPU_CACHE_GIB if asked is None else asked) * 2**30)
    free, total = card
    left = max(0, _usable_bytes(total, config) - (total - free) - reserved)
    return left if asked is None else min(left, int(asked * 2**30))


def _check(plan: MemoryPlan, config: EngineConfig) -> None:
    """Refuse a plan in which no request can run, or whose blocks do not fit the card."""
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
        raise UserError(_too_little(plan, config))


def _too_little(plan: MemoryPlan, config: EngineConfig) -> str:
    """That no request fits, with the numbers and what to do."""
    needed = plan.min_blocks
    text = (
        f"A KV block takes {size_text(plan.block_bytes)} and one request at least {needed} of "
        f"them, {size_text(needed * plan.block_bytes)}; the KV cache may take "
        f"{size_text(plan.budget_bytes)}. "
    )
    bound = None if config.kv_cache_gib is None else int(config.kv_cache_gib * 2**30)
    if plan.total_bytes is None or plan.free_bytes is None or plan.usable_bytes is None:
        return f"{text}Raise kv_cache_gib, or take a smaller dtype."
    if plan.budget_bytes == bound:
        return f"{text}Raise kv_cache_gib ({config.kv_cache_gib:g}), or take a smaller dtype."
    return (
        f"{text}Of the {size_text(plan.total_bytes)} of {plan.device} this engine may use "
        f"{size_text(plan.usable_bytes)}; {size_text(plan.total_bytes - plan.free_bytes)} are in "
        f"use, {size_text(plan.target_bytes + plan.drafter_bytes)} of them by its weights, and "
        f"{size_text(plan.reserved_bytes)} are kept for activations and graphs. Lower "
        f"max_num_batched_tokens ({config.max_num_batched_tokens}) or max_num_seqs "
        f"({config.max_num_seqs}), raise gpu_memory_utilization "
        f"({config.gpu_memory_utilization:g}), take a smaller dtype, or free the card."
    )
