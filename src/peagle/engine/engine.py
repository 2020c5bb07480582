"""The engine loop: requests in, tokens out, one scheduled batch a step."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from peagle.attention import LayerKVCache, TorchAttention
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig, token_ids
from peagle.engine.block_manager import BlockManager
from peagle.engine.model_runner import ModelRunner, make_caches
from peagle.engine.scheduler import Scheduler
from peagle.engine.sequence import Sequence, SpeculationStats
from peagle.errors import UserError
from peagle.kernels.random import Purpose, uniform
from peagle.models.checkpoint import load_drafter, read_head_config
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.speculation.proposers import (
    AutoregressiveProposer,
    ParallelProposer,
    PromptLookupProposer,
    Proposer,
)

_CPU_CACHE_GIB = 2.0
_GPU_FREE_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step added to one sequence.

    Attributes:
        sequence: the sequence, with its output so far.
        new_token_ids: the tokens added.
        num_accepted: how many of them came from the draft (the first ones).
        num_drafted: draft tokens that the step verified.
    """

    sequence: Sequence
    new_token_ids: list[int]
    num_accepted: int
    num_drafted: int


class LLMEngine:
    """Schedules, runs and finishes sequences.

    Args:
        target: the loaded target; engines may share one, as long as they step one at a time.
        config: sizes of the engine.
        speculative: how to draft; None decodes plainly.

    Raises:
        UserError: the sizes do not fit the model or the memory.
        CheckpointError: the draft head does not fit the target.
    """

    def __init__(
        self,
        target: TargetModel,
        config: EngineConfig | None = None,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        self.target = target
        self.config = config or EngineConfig()
        self.speculative = speculative
        self.max_model_len = self._max_model_len()
        drafter = self._load_drafter()
        self._aux_layer_ids = drafter.config.aux_layer_ids if drafter else ()
        num_drafts = speculative.num_speculative_tokens if speculative else 0
        # A step may accept K drafts past max_tokens before it is trimmed, and the drafter stands
        # K - 1 mask slots beyond those.
        lookahead = 2 * (num_drafts + 1)
        num_blocks = self._num_blocks(drafter, lookahead)
        backend = TorchAttention()
        shapes = target.kv_shapes()
        self._target_caches = self._caches(shapes, num_blocks)
        self._claim_target()
        self.runner = ModelRunner(
            target,
            backend,
            self._proposer(drafter, backend, num_blocks),
            block_size=self.config.block_size,
            max_model_len=self.max_model_len,
        )
        self.scheduler = Scheduler(
            BlockManager(num_blocks, self.config.block_size),
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_lookahead_slots=lookahead,
        )
        self.stats = SpeculationStats()
        self._eos_token_ids = target.eos_token_ids()
        self._num_requests = 0

    def add_request(self, prompt_token_ids: Iterable[int], params: SamplingParams) -> Sequence:
        """Queue a prompt.

        Raises:
            UserError: the prompt is empty, holds ids outside the vocabulary, leaves no room for
                output, or could never fit the KV cache.
        """
        prompt = token_ids(list(prompt_token_ids), self.target.vocab_size, "prompt_token_ids")
        if not prompt:
            raise UserError("The prompt is empty; expected at least one token.")
        if len(prompt) >= self.max_model_len:
            raise UserError(
                f"The prompt has {len(prompt)} tokens; expected at most {self.max_model_len - 1}, "
                f"one fewer than the context of {self.max_model_len}. Shorten the prompt."
            )
        stop = set(token_ids(params.stop_token_ids, self.target.vocab_size, "stop_token_ids"))
        if not params.ignore_eos:
            stop |= set(self._eos_token_ids)
        sequence = Sequence(self._num_requests, prompt, params, self._seed(params), frozenset(stop))
        needed = self.scheduler.blocks.blocks_for(self.scheduler.slots_needed(sequence))
        if needed > self.scheduler.blocks.num_blocks:
            raise UserError(
                f"The request needs {needed} KV blocks of {self.config.block_size} tokens, the "
                f"cache has {self.scheduler.blocks.num_blocks}. Lower max_tokens "
                f"({params.max_tokens}) or raise kv_cache_gib."
            )
        self._num_requests += 1
        self.scheduler.add(sequence)
        return sequence

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do something."""
        return self.scheduler.has_unfinished

    def step(self) -> list[StepOutput]:
        """Run one scheduled batch and return what it added to each sequence."""
        self._claim_target()
        batch = self.scheduler.schedule()
        result = self.runner.run_target(batch)
        outputs = []
        for row, sequence in enumerate(batch.sequences):
            drafted, accepted = result.num_drafted[row], result.num_accepted[row]
            for stats in (sequence.stats, self.stats):
                stats.record(drafted, accepted)
            kept = sequence.append(result.new_token_ids[row], self.max_model_len)
            outputs.append(StepOutput(sequence, kept, min(accepted, len(kept)), drafted))
        if not all(s.is_finished for s in batch.sequences):
            self.runner.propose(batch.sequences, result.target_step)
        self.scheduler.retire_finished()
        return outputs

    def cancel(self, sequence: Sequence) -> None:
        """Stop a sequence and free what it holds; finished ones are left alone."""
        self.scheduler.cancel(sequence)

    def stop(self, sequence: Sequence, num_surplus: int) -> None:
        """End a sequence at a stop string: drop its last `num_surplus` tokens, free its blocks."""
        self.cancel(sequence)
        sequence.trim(num_surplus)

    def _claim_target(self) -> None:
        """Give the target this engine's KV caches, taps and context; another may have used it."""
        if self.target.kv_caches is not self._target_caches:
            self.target.tap_aux(self._aux_layer_ids)
            self.target.set_kv_caches(self._target_caches)
            self.target.fix_rope(self.max_model_len)

    def _seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        draw = uniform(
            torch.tensor(self.config.seed), torch.tensor(self._num_requests), Purpose.SAMPLE
        )
        return int(draw.item() * 2**53)

    def _max_model_len(self) -> int:
        limit, asked = self.target.max_model_len, self.config.max_model_len
        if asked is not None and asked > limit:
            raise UserError(
                f"max_model_len is {asked}; the target's positions end at {limit}. "
                "Ask for at most that."
            )
        return asked or limit

    def _load_drafter(self) -> Drafter | None:
        speculative = self.speculative
        if speculative is None or speculative.model is None:
            return None
        head, _ = read_head_config(speculative.model, num_target_layers=self.target.num_layers)
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
                stacklevel=3,
            )
        return load_drafter(speculative.model, self.target, check_target=speculative.check_target)

    def _proposer(
        self, drafter: Drafter | None, backend: TorchAttention, num_blocks: int
    ) -> Proposer | None:
        speculative = self.speculative
        if speculative is None:
            return None
        if drafter is None:
            return PromptLookupProposer(
                speculative.num_speculative_tokens,
                speculative.prompt_lookup_max,
                speculative.prompt_lookup_min,
            )
        kind = ParallelProposer if drafter.config.is_parallel else AutoregressiveProposer
        return kind(
            drafter,
            backend,
            self._caches(_drafter_kv_shapes(drafter), num_blocks),
            num_speculative_tokens=speculative.num_speculative_tokens,
            max_model_len=self.max_model_len,
            draft_sampling=speculative.draft_sampling,
        )

    def _caches(self, shapes: list[tuple[int, int]], num_blocks: int) -> list[LayerKVCache]:
        target = self.target
        return make_caches(shapes, num_blocks, self.config.block_size, target.dtype, target.device)

    def _num_blocks(self, drafter: Drafter | None, lookahead: int) -> int:
        config, size = self.config, self.config.block_size
        per_sequence = -(-(self.max_model_len + lookahead) // size)
        shapes = self.target.kv_shapes() + (_drafter_kv_shapes(drafter) if drafter else [])
        block_bytes = sum(
            LayerKVCache.bytes_per_block(size, heads, dim, self.target.dtype)
            for heads, dim in shapes
        )
        if config.num_kv_blocks is not None:
            return config.num_kv_blocks
        budget = self._cache_bytes()
        fitting = int(budget // block_bytes)
        if fitting < 1:
            raise UserError(
                f"A KV block takes {block_bytes / 2**20:.1f} MiB, the cache may take "
                f"{budget / 2**20:.1f} MiB. Raise kv_cache_gib."
            )
        return min(fitting, per_sequence * config.max_num_seqs)

    def _cache_bytes(self) -> float:
        if self.config.kv_cache_gib is not None:
            return self.config.kv_cache_gib * 2**30
        if self.target.device.type == "cuda":
            return torch.cuda.mem_get_info(self.target.device)[0] * _GPU_FREE_SHARE
        return _CPU_CACHE_GIB * 2**30


def _drafter_kv_shapes(drafter: Drafter) -> list[tuple[int, int]]:
    config = drafter.config
    return [(config.num_kv_heads, config.head_dim)] * config.num_layers


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch type of an EngineConfig dtype; "auto" is float32 on a CPU, bfloat16 on a GPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


def resolve_device(name: str) -> torch.device:
    """The device of an EngineConfig.

    Raises:
        UserError: it is not one that torch has here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise UserError(
            f"device is {name!r}, which torch does not have here ({os.uname().sysname}); "
            'expected "auto", "cpu" or "cuda".'
        ) from None
    return device
