"""The engine loop: requests in, tokens out, one step at a time."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle, islice

from peagle.attention import LayerKVCache, make_backend
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig, token_ids
from peagle.config.checks import require
from peagle.engine.block_manager import BlockManager
from peagle.engine.depth import AutomaticDepth, DecodeSeconds, LookupDepth
from peagle.engine.drafting import (
    HeadDrafting,
    LookupDrafting,
    draws_chain,
    fixes_k,
    has_copies,
    make_drafting,
)
from peagle.engine.engine_plan import plan_engine
from peagle.engine.features import FeatureRings
from peagle.engine.grammar import GrammarState, prepare_masks
from peagle.engine.memory_plan import (
    MemoryPlan,
    drafter_kv_shapes,
    make_memory_plan,
    measure_peak,
    run_largest_passes,
)
from peagle.engine.model_runner import ModelRunner, RunTarget, TargetPass
from peagle.engine.outputs import DraftTree, SequenceOutput
from peagle.engine.sampler import Sampler
from peagle.engine.scheduler import Chunk, Scheduler
from peagle.engine.sequence import Sequence, SequenceStatus
from peagle.engine.stats import Calibration, EngineStats, SpeculationStats
from peagle.engine.step.graph_runner import (
    RowDrafts,
    RowTokens,
    accelerate,
    buckets,
    graph_sizes,
    make_graph_runner,
)
from peagle.engine.step.pass_graphs import MAX_SEQUENCES, TOKEN_BUCKETS
from peagle.engine.step.pipeline import Pipeline
from peagle.errors import UserError
from peagle.kernels.sampling.logprobs import TokenLogprobs
from peagle.kernels.sampling.random import derive_seed
from peagle.kernels.trees.copies import only_text_has
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel

_COUNTERS = (
    "num_steps",
    "num_finished",
    "num_cancelled",
    "num_preemptions",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
)
_CHECK_SALT = b"peagle self-check"
# Made-up prompts: several that fill a pass together, one alone, and as many short ones as a pass
# takes, as if most of each were cached. The latter two would pad much of a graph.
_NUM_LONG, _ALONE, _SHORT = 5, 520, (64, 32, 32, 32)
# Prompt tokens of the pass that measures the head's reading: few, as under load.
_TIMED_TOKENS = 512
# Wait between two looks at grammars, while all sequences wait for theirs.
_GRAMMAR_WAIT_S = 0.002


class LLMEngine:
    """Schedules, runs and finishes sequences. Engines may share a target and take turns to step.

    Args:
        eos_token_ids: end-of-text ids of the target, from `peagle.models.end_tokens`.
        drafter: the head of `speculative`, if it is loaded already.

    Attributes:
        on_pass: called before each pass that no graph runs, with its number of tokens.

    Raises:
        UserError: the sizes do not fit the model or the memory.
        CheckpointError: the draft head does not fit the target.
    """

    def __init__(
        self,
        target: TargetModel,
        config: EngineConfig | None = None,
        speculative: SpeculativeConfig | None = None,
        eos_token_ids: Iterable[int] = (),
        drafter: Drafter | None = None,
    ) -> None:
        self._plan = plan = plan_engine(target, config or EngineConfig(), speculative, drafter)
        self.target = target
        self.config = config = plan.config
        self.speculative = speculative = plan.speculative
        self.max_model_len, self.max_draft_len = plan.max_model_len, plan.max_draft_len
        self.num_speculative_tokens = plan.num_speculative_tokens
        self.on_pass: Callable[[int], None] | None = None
        self._depth, self._tree_record = plan.depth, plan.tree_record
        if plan.is_pipelined and target.device.type == "cuda":
            drafting = plan.drafter, config.max_num_seqs, plan.depth, plan.trees, plan.max_path
            accelerate(target, *drafting)
        self._features = FeatureRings()
        if plan.drafter is not None and plan.num_resuming and plan.is_pipelined:
            width = plan.drafter.config.feature_size
            self._features.reserve(config.max_num_seqs, width, target.dtype, target.device)
        backend = make_backend(target.device)
        self.sampler = Sampler(
            target.vocab_size, target.device, config.max_num_seqs, plan.synthetic_rates
        )
        self.runner = ModelRunner(
            target,
            backend,
            self.sampler,
            block_size=config.block_size,
            max_model_len=plan.max_model_len,
        )
        self.drafting = drafting = make_drafting(
            plan.drafter,
            speculative,
            backend,
            self.sampler,
            self._features,
            max_model_len=plan.max_model_len,
            max_draft_len=plan.max_draft_len,
        )
        self._proposer = drafting.proposer if isinstance(drafting, HeadDrafting) else None
        if plan.tree_record is not None and self._proposer is not None:
            plan.tree_record.calibrates(
                self._proposer.survival, self._proposer.copy_rates, self._proposer.copy_rates_C
            )
        self.memory_plan = self._plan_memory()
        self._make_caches(self.memory_plan.num_blocks)
        self.scheduler = Scheduler(
            BlockManager(
                self.memory_plan.num_blocks,
                config.block_size,
                kv_identity=repr((str(target.kv_dtype), target.kv_scales)).encode(),
                enable_prefix_caching=config.enable_prefix_caching,
            ),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            num_lookahead_slots=plan.num_lookahead_slots,
            draft_window=None if plan.drafter is None else plan.drafter.reach,
            max_itl_ms=config.max_itl_ms,
            # Elsewhere the time of a prompt is that of its tokens.
            max_hold_ms=config.max_hold_ms if plan.is_pipelined else 0.0,
        )
        self._pipeline = self._make_pipeline() if plan.is_pipelined else None
        self._outputs: list[SequenceOutput] = []
        # Passes with emitted tokens and without drafts yet, each with its K.
        self._undrafted: list[tuple[TargetPass, int]] = []
        self.speculation_stats = SpeculationStats()
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._eager_steps: Counter[str] = Counter()
        self._decode_steps: Counter[int] = Counter()
        # Arguments of `DepthPolicy.record` for the step read last, until its seconds are known.
        self._untimed: tuple[int, list[int], int] | None = None
        # A tokenizer may have tokens for which its model has no logits.
        self.eos_token_ids = tuple(i for i in eos_token_ids if i < target.vocab_size)
        self._num_requests = 0
        self._constrained: list[Sequence] = []  # sequences whose outputs follow a grammar
        self._is_checking = False

    def _plan_memory(self) -> MemoryPlan:
        """Measure the largest passes on a GPU, and give the KV cache the remaining memory."""
        plan, target = self._plan, self.target

        def run() -> None:
            self._make_caches(num_blocks=1)
            run_largest_passes(
                self.runner,
                self.drafting,
                self._features,
                plan.config,
                num_speculative_tokens=plan.num_speculative_tokens,
                num_nodes=plan.num_nodes,
                num_resuming=plan.num_resuming,
            )

        peak_bytes = 0
        if target.device.type == "cuda":
            peak_bytes = measure_peak(run, target.device, plan.config)
            self._target_caches, self._drafter_caches = [], []
            if self._proposer is not None:
                self._proposer.caches = []
            target.drop_kv_caches()
        return make_memory_plan(
            target,
            plan.drafter,
            plan.config,
            max_model_len=plan.max_model_len,
            num_lookahead_slots=plan.num_lookahead_slots,
            peak_bytes=peak_bytes,
            kept_bytes=plan.kept_bytes,
            has_trees=plan.trees is not None,
        )

    def _make_caches(self, num_blocks: int) -> None:
        """Make the KV caches, and give them to the target and the drafter."""
        size, target = self.config.block_size, self.target
        self._target_caches = target.make_kv_caches(num_blocks, size)
        self._drafter_caches = [
            LayerKVCache(num_blocks, size, *shape, target.dtype, target.device)
            for shape in drafter_kv_shapes(self._plan.drafter)
        ]
        if self._proposer is not None:
            self._proposer.caches = self._drafter_caches
        self._claim_target()

    def _make_pipeline(self) -> Pipeline:
        """Capture the decode steps as graphs, and time them if K depends on their costs."""
        plan, config = self._plan, self.config
        graphs = make_graph_runner(
            self.runner,
            self._proposer,
            config.max_num_seqs,
            plan.synthetic_rates,
            depth=plan.depth,
            features=self._features,
            max_draft_len=plan.max_draft_len,
            speculative=self.speculative,
        )
        if isinstance(plan.depth, AutomaticDepth) and isinstance(self.drafting, HeadDrafting):
            most = min(config.max_num_batched_tokens, plan.max_draft_len, _TIMED_TOKENS)
            reading_s = self.drafting.time_reading(most)
            plan.depth.measure(buckets(config.max_num_seqs), graphs.time_step, reading_s)
        elif isinstance(plan.depth, LookupDepth) and self.target.device.type == "cuda":
            sizes = graph_sizes(config.max_num_seqs, plan.depth.possible)
            plan.depth.measure(sizes, graphs.time_step)
        self.scheduler.max_prompts = MAX_SEQUENCES
        if (of_prompts := self.runner.passes.graphs) is not None:
            most = config.max_num_batched_tokens
            self.scheduler.prompt_budget.limit(of_prompts.most_rows(most) or most)
        return Pipeline(
            graphs, self.scheduler, self._append_tokens, self._set_drafts, self._prepare_grammars
        )

    def add_request(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        grammar: GrammarState | None = None,
        leader: Sequence | None = None,
        cache_salt: bytes = b"",
    ) -> Sequence:
        """Queue a prompt for one output, whatever `params.n` is.

        Args:
            params: sampling parameters, with `bad_words` and `prediction` as token ids.
            priority: requests with a lower number go first.
            grammar: state at the start of the structure in `params`.
            leader: a sequence with the same prompt, for whose KV this one waits.
            cache_salt: only requests with the same salt share cached KV.

        Raises:
            UserError: the prompt is empty, holds ids outside the vocabulary, leaves no room for
                output, or could never fit the KV cache; or the engine or model does not support a
                parameter.
        """
        prompt = token_ids(list(prompt_token_ids), self.target.vocab_size, "prompt_token_ids")
        if not prompt:
            raise UserError("The prompt is empty; expected at least one token.")
        if len(prompt) >= self.max_model_len:
            raise UserError(
                f"The prompt has {len(prompt)} tokens; expected at most {self.max_model_len - 1}, "
                f"one fewer than the context of {self.max_model_len}. Shorten the prompt."
            )
        self._check_params(params)
        assert (grammar is None) == (params.structured_output is None)
        k = self.num_speculative_tokens
        if params.num_speculative_tokens is not None:
            k = params.num_speculative_tokens
        if not params.prompt_lookup and self.speculative and self.speculative.method == "ngram":
            k = 0
        seed = params.seed
        if seed is None:
            seed = derive_seed(self.config.seed, self._num_requests)
        sequence = Sequence(
            self._num_requests,
            prompt,
            params,
            seed,
            self.stop_token_ids(params),
            priority=priority,
            num_speculative_tokens=k,
            grammar=grammar,
            # A follower reuses blocks that its leader publishes.
            leader=leader if self.config.enable_prefix_caching else None,
            cache_salt=cache_salt,
            samples_prompt=self._pipeline is None,
            prediction=self._prediction(prompt, params),
            has_copies=has_copies(params, self.speculative),
            draws_chain=draws_chain(params, self.speculative),
            fixes_k=fixes_k(params, self.speculative),
            correction=self._correction(params.correction),
        )
        self._check_blocks(sequence)
        self._num_requests += 1
        self.scheduler.add(sequence)
        if grammar is not None:
            self._constrained.append(sequence)
        return sequence

    def _check_blocks(self, sequence: Sequence) -> None:
        """Refuse a request that the whole KV cache could not hold."""
        most, max_tokens = self.blocks.num_blocks, sequence.params.max_tokens
        needed = self.blocks.blocks_for(self.scheduler.most_slots(sequence))
        if needed <= most:
            return
        shortest = self.scheduler.slots_for(sequence.num_prompt_tokens + 1)
        remedy = f"Lower max_tokens ({max_tokens})"
        if self.blocks.blocks_for(shortest) > most:
            remedy = f"Shorten the prompt ({sequence.num_prompt_tokens} tokens)"
        is_counted = self.config.num_kv_blocks is not None
        larger = "num_kv_blocks" if is_counted else "kv_cache_gib or gpu_memory_utilization"
        raise UserError(
            f"The request needs {needed} KV blocks of {self.config.block_size} tokens, the cache "
            f"has {most}. {remedy}, or raise {larger}."
        )

    def _check_params(self, params: SamplingParams) -> None:
        vocab_size, most = self.target.vocab_size, self.num_speculative_tokens
        token_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
        token_ids(params.allowed_token_ids or (), vocab_size, "allowed_token_ids")
        token_ids([token for token, _ in params.logit_bias], vocab_size, "logit_bias")
        for word in params.bad_words:
            assert not isinstance(word, str), "`Requests` encodes texts"
            token_ids(word, vocab_size, "bad_words")
        k = params.num_speculative_tokens
        if k is not None and k > most:
            raise UserError(
                f"num_speculative_tokens of the request is {k}; the engine was made for at most "
                f"{most}. Ask for fewer, or set it in the speculative configuration."
            )

    @property
    def corrections(self) -> tuple[str, ...]:
        """Return the names of the corrections that requests may choose."""
        speculative = self.speculative
        return () if speculative is None else tuple(name for name, _ in speculative.corrections)

    def _correction(self, name: str | None) -> int:
        """Return the number of a correction; 0 is the default."""
        if name is None:
            return 0
        known = self.corrections
        expected = f"one of {', '.join(known)}" if known else "none, as the engine has no named one"
        require(name in known, "correction", name, expected)
        return 1 + known.index(name)

    def _prediction(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Return the end of a prompt and what the request predicts behind it, if it does."""
        given, most = params.prediction, self.max_model_len
        assert not isinstance(given, str), "`Requests` encodes texts"
        if not given:
            return []
        token_ids(given, self.target.vocab_size, "prediction")
        if len(given) > most:
            raise UserError(
                f"prediction has {len(given)} tokens; expected at most {most}, the context. "
                "Shorten it."
            )
        if self.speculative is None or not has_copies(params, self.speculative):
            raise UserError(
                "prediction was given, and no copies are drafted here: they need trees of a draft "
                "head (parallel_drafting_spec, or prompt_lookup true) that copies may join, or the "
                'method "ngram", and the full num_speculative_tokens. Start the engine so, or '
                "leave prediction out."
            )
        # The text ends as the prompt does: a prediction behind it is found from the first token on.
        end = prompt[-self.speculative.lookup_lengths[0] :]
        return [*end, *given][: most - len(prompt)]

    def stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return the ids that end an output: the request's, and the model's unless ignored."""
        return frozenset(
            (*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids))
        )

    def touch_caches(self) -> None:
        """Write to every page of the empty KV cache, so that a server does not grow under load.

        On a CPU the system allocates pages at the first write.
        """
        assert not self.has_unfinished
        for cache in (*self._target_caches, *self._drafter_caches):
            cache.keys.zero_()
            cache.values.zero_()

    def check(self) -> None:
        """Compute one token and forget it: neither counters, seeds nor cached prefixes change."""
        self._run_and_forget([1])

    def forget_drafter_kv(self) -> None:
        """Let no later sequence read KV that the head has written so far, as its weights changed.

        Sequences that run go on over theirs, and share none of it.
        """
        self.blocks.unpublish_all()
        for sequence in self.scheduler.running:
            sequence.has_old_drafter_kv = True

    def rehearse(self) -> None:
        """Run made-up prompts and forget them, so that no request waits while their passes compile.

        Each batch of prompts reaches another attention kernel. Without CUDA graphs nothing is
        compiled, and nothing runs.
        """
        if self._pipeline is None:
            return
        slots = self.blocks.num_blocks * self.config.block_size - self.scheduler.num_lookahead_slots
        longest = min(self.max_model_len, slots) - 2
        long = self.config.max_num_batched_tokens // _NUM_LONG + 1
        num_short = min(MAX_SEQUENCES, self.config.max_num_seqs)
        for lens in ([long] * _NUM_LONG, [_ALONE], islice(cycle(_SHORT), num_short)):
            if longest > 0:
                self._run_and_forget([min(length, longest) for length in lens])
        self.scheduler.prompt_budget.forget()  # these measurements include compilation
        self._pipeline.runner.times.clear()

    def _run_and_forget(self, prompt_lens: list[int]) -> None:
        """Give made-up prompts of these lengths one token each, and leave no trace of them."""
        assert not self.has_unfinished
        counts, drafts = dict(self._counts), self.speculation_stats.copy()
        eager, number = self._eager_steps.copy(), self._num_requests
        params, dice = SamplingParams(max_tokens=1, seed=0), random.Random(0)
        # The sampler knows its batch by these numbers, which no request has.
        self._num_requests = -len(prompt_lens)
        self._is_checking = True
        lookahead = self.scheduler.num_lookahead_slots
        num_blocks = sum(self.blocks.blocks_for(length + lookahead) for length in prompt_lens)
        with self.blocks.borrowed(num_blocks):
            for length in prompt_lens:  # unlike tokens: no prompt reuses the blocks of another
                tokens = dice.choices(range(self.target.vocab_size), k=length)
                self.add_request(tokens, params, cache_salt=_CHECK_SALT)
            while self.has_unfinished:
                self.step()
        self._counts, self.speculation_stats, self._num_requests = counts, drafts, number
        self._eager_steps, self._is_checking = eager, False

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Launch every kernel by itself inside the context, so that hooks of modules are called.

        No request may be running at the start or at the end.
        """
        assert not self.has_unfinished
        if self._pipeline is not None:
            self._pipeline.drain()
        passes = self.runner.passes
        kept = self._pipeline, passes.graphs
        self._pipeline = passes.graphs = None
        try:
            yield
        finally:
            self._pipeline, passes.graphs = kept

    @property
    def blocks(self) -> BlockManager:
        """Return the manager of the KV blocks."""
        return self.scheduler.blocks

    @property
    def has_unfinished(self) -> bool:
        """Return whether a step has work to do."""
        return self.scheduler.has_unfinished

    def step(self) -> list[SequenceOutput]:
        """Run one step of prompts and decoding sequences, in one pass or two; return its outputs.

        A sequence whose prompt is not yet computed has no output. A step first makes the drafts of
        the step before it, so that no token waits for the drafter.
        """
        self._claim_target()
        self._complete_drafts()
        load = self.scheduler.load
        self._depth.observe(load)
        self.scheduler.drafting_pauses = not self._depth(max(load, 1))
        outputs = self._outputs = []
        self._counts["num_steps"] += 1
        pipeline = self._pipeline
        if pipeline is not None and pipeline.go_on():
            self._count_read(pipeline)
        elif pipeline is not None and pipeline.must_drain():
            pipeline.drain()
            self._count_read(pipeline)
        elif self.scheduler.has_unfinished:
            self._schedule_and_run()
        return outputs

    def _schedule_and_run(self) -> None:
        self._prepare_grammars()
        if not self.scheduler.has_unfinished:
            return
        plan = self.scheduler.schedule()
        if not (plan.decode or plan.prefill):
            time.sleep(_GRAMMAR_WAIT_S)  # all sequences wait for their grammars
        self._counts["num_preemptions"] += len(plan.preempted)
        for sequence in plan.preempted:
            self._release(sequence)
        for sequence in plan.admitted:
            if not sequence.num_preemptions:
                sequence.admitted_s = time.perf_counter()
                self._counts["num_prompt_tokens"] += sequence.num_prompt_tokens
                self._counts["num_cached_tokens"] += sequence.num_cached_tokens or 0
        decoding = [chunk.sequence for chunk in plan.decode]
        # If the pass over a prompt's end samples nothing, the sequence decodes at once.
        every = decoding + [c.sequence for c in plan.prefill if _ends_prompt(c)]
        if is_mixed := self._can_mix(plan.prefill, every):
            decoding = every
        elif plan.prefill:
            self._run(plan.prefill)
            decoding += filter(_starts_to_decode, (chunk.sequence for chunk in plan.prefill))
        self._decode(decoding, plan.prefill, is_mixed=is_mixed)

    def _can_mix(self, prompts: list[Chunk], decoding: list[Sequence]) -> bool:
        """Return whether prompts can run in the target's pass of the sequences that decode.

        Prompts with log-probabilities cannot: the host waits for them, and broken ones end the
        sequence at once.
        """
        if self._pipeline is None or not prompts:
            return False
        if any(chunk.sequence.needs_every_token for chunk in prompts):
            return False
        num_tokens = sum(chunk.num_tokens for chunk in prompts)
        return self._pipeline.runner.can_mix(decoding, num_tokens)

    def _decode(self, sequences: list[Sequence], prompts: list[Chunk], *, is_mixed: bool) -> None:
        """Run a decode step, as a graph if one can run.

        A graph is launched behind the step in flight, whose results are then taken. If no graph can
        run, this step only finishes a step in flight, so that no sequence has two outputs.

        Args:
            prompts: chunks that ran before the step, or that run in its pass.
            is_mixed: whether the chunks run in its pass; a graph can run it then.
        """
        budget, pipeline = self.scheduler.prompt_budget, self._pipeline
        obstacle = None
        is_launched = was_in_flight = False
        if pipeline is not None:
            was_in_flight = pipeline.is_in_flight
            if sequences and not was_in_flight:
                self._catch_up(sequences, len(sequences))
            obstacle = pipeline.runner.obstacle(sequences)
            is_launched = bool(sequences) and obstacle is None
            if is_launched:
                run_prompts = partial(self._run, prompts) if is_mixed else None
                before_drafts = self._draft_for_passes if prompts else None
                is_alone = is_mixed or not prompts
                pipeline.launch(sequences, run_prompts, before_drafts, is_alone=is_alone)
            else:
                pipeline.drain()
            self._count_read(pipeline)
        budget.ran(sum(chunk.num_tokens for chunk in prompts))
        if is_launched or was_in_flight:
            return
        if not sequences:
            budget.pause()
            return
        if obstacle is not None:
            self._eager_steps[obstacle] += 1
            self._draft_for_passes()  # sequences whose prompts have just run go on in this step
        k, num_before = self._depth(len(sequences)), len(self._outputs)
        counts = [0] * len(sequences)
        if self.drafting is not None:
            counts = self.drafting.num_verified(sequences, k)
        self._run([Chunk(s, 1, count) for s, count in zip(sequences, counts, strict=True)])
        budget.gave()
        if (counted := self._count_step(k, self._outputs[num_before:])) is not None:
            self._depth.record(*counted, DecodeSeconds())

    def _count_read(self, pipeline: Pipeline) -> None:
        """Count the step whose tokens were taken, if it gave any."""
        if self._outputs:
            self.scheduler.prompt_budget.gave()
            self._untimed = self._count_step(pipeline.runner.last_k, self._outputs)

    def _count_step(
        self, k: int, outputs: list[SequenceOutput]
    ) -> tuple[int, list[int], int] | None:
        """Count a decode step; return its K, accepted drafts and sequences for the choice of K."""
        decoded = [output for output in outputs if output.new_token_ids]
        if not decoded or self._is_checking:
            return None
        self._decode_steps[k] += 1
        accepted = [o.num_accepted for o in decoded if not (k and o.begins_without_drafts)]
        return k, accepted, len(decoded)

    def _complete_drafts(self) -> None:
        """Draft for the passes of the last step, or take its graph's drafts and seconds."""
        self._draft_for_passes()
        pipeline = self._pipeline
        if pipeline is None:
            return
        pipeline.read_drafts()
        if self._untimed is not None:
            self._depth.record(*self._untimed, pipeline.runner.last_seconds)
            self._untimed = None

    def _prepare_grammars(self) -> None:
        """Find the tokens that grammars allow next; end sequences whose grammar failed."""
        self._constrained = [s for s in self._constrained if not s.is_finished]
        by_turn = sorted(
            self._constrained, key=lambda s: (s.status is not SequenceStatus.RUNNING, s.order)
        )
        constrained = [(s, s.grammar) for s in by_turn if s.grammar is not None]
        if constrained:
            prepare_masks(
                [grammar for _, grammar in constrained],
                [s.drafts for s, _ in constrained],
                [s.draft_parents for s, _ in constrained],
            )
        for sequence, grammar in constrained:
            if (failure := grammar.failure) is not None:
                self._fail(sequence, *failure)
                self._settle(sequence)

    def _run(self, chunks: list[Chunk], run_target: RunTarget | None = None) -> None:
        """Compute chunks, append new tokens to their sequences, and queue the pass for drafting."""
        if self.on_pass is not None:
            self.on_pass(sum(chunk.num_tokens + chunk.num_draft_tokens for chunk in chunks))
        self._catch_up([chunk.sequence for chunk in chunks], len(self.scheduler.running))
        done = self.runner.run(chunks, run_target)
        self._append(done)
        for chunk in chunks:
            if self.drafting is None or chunk.sequence.is_finished:
                self._settle(chunk.sequence)
        if self.drafting is None:
            return
        max_drafts = self.drafting.max_drafts
        waits = self._pipeline is None or max_drafts > 0
        self._undrafted.append((_kept(done) if waits else done, max_drafts))
        if not waits:  # the next graph adds to the kept features
            self._draft_for_passes()

    def _draft_for_passes(self) -> None:
        """Let the drafter read the last passes, and draft for the unfinished sequences."""
        for done, max_drafts in self._undrafted:
            assert self.drafting is not None
            sequences = [c.sequence for c in done.chunks if not c.sequence.is_finished]
            if sequences:
                self.drafting.max_drafts = max_drafts
                self.drafting.draft(done)
            for sequence in sequences:
                self._settle(sequence)
        self._undrafted = []

    def _catch_up(self, sequences: list[Sequence], num_sequences: int) -> None:
        """Let the drafter read the positions it missed, if K of so many sequences is above 0."""
        if self.drafting is not None:
            self.drafting.max_drafts = self._depth(num_sequences)
            self.drafting.catch_up(sequences)

    def _settle(self, sequence: Sequence) -> None:
        """Publish the settled blocks of a sequence, and retire it if it has ended."""
        self._publish(sequence)
        if sequence.is_finished:
            self._retire(sequence)

    def _append(self, done: TargetPass) -> None:
        """Append its new tokens to each sequence of a pass."""
        row = 0
        for chunk in done.chunks:
            sequence = chunk.sequence
            given = sequence.prompt_logprobs if sequence.is_prefilling else None
            sequence.num_computed_tokens += chunk.num_tokens
            is_broken = given is not None and not sequence.is_prefilling and given.has_nan
            if chunk.samples:
                assert done.sampled is not None
                is_broken |= done.sampled.is_broken[row]
                if not is_broken:
                    self._emit(
                        sequence,
                        done.sampled.new_token_ids[row],
                        chunk.num_draft_tokens,
                        done.sampled.num_accepted[row],
                        done.sampled.logprobs[row] or [],
                    )
                row += 1
            if is_broken:
                self._fail_broken(sequence)

    def _append_tokens(self, sequence: Sequence, report: RowTokens) -> None:
        """Append the tokens of a step that ran as a graph to a sequence."""
        sequence.num_computed_tokens += 1
        if report.new_token_ids[-1] < 0:
            self._fail_broken(sequence)
            self._settle(sequence)
            return
        drafted, accepted = report.num_drafted, report.num_accepted
        self._emit(sequence, report.new_token_ids, drafted, accepted, report.logprobs)
        if sequence.num_speculative_tokens:
            if sequence.pending_features is not None:  # drafting pauses: the step kept the feature
                sequence.pending_features.advance(1)
            else:
                sequence.num_drafter_tokens = min(sequence.num_computed_tokens, self.max_draft_len)
        self._settle(sequence)

    def _set_drafts(self, sequence: Sequence, report: RowDrafts) -> None:
        """Set the drafts of a step that ran as a graph on a sequence."""
        if sequence.num_speculative_tokens:
            sequence.drafts = report.token_ids
            sequence.draft_parents, sequence.draft_scores = report.parents, report.scores
            sequence.draft_worths, sequence.draft_cells = report.worths, report.cells

    def _emit(
        self,
        sequence: Sequence,
        new: list[int],
        num_drafted: int,
        num_accepted: int,
        logprobs: Iterable[TokenLogprobs],
    ) -> None:
        """Append verified tokens up to the end of the sequence."""
        sequence.num_computed_tokens += num_accepted
        drafts, parents = sequence.drafts[:num_drafted], sequence.draft_parents
        path = sequence.accepted_drafts(new[:num_accepted])
        text_from = self._text_from(sequence, path)
        tree = depth = None
        if num_drafted and parents is not None:
            tree = DraftTree.of(drafts, parents[:num_drafted])
            depth = tree.depth
        record = self._tree_record if not sequence.draws_chain else None
        if record is not None and record.looks and parents and not self._is_checking:
            # Trees without a verified node count too: the verified trees are the surer ones.
            worths, cells = sequence.draft_worths, sequence.draft_cells
            scores = sequence.draft_scores or []
            record.saw(scores, parents, path, num_drafted, worths, cells)
        for stats in (sequence.stats, self.speculation_stats):
            stats.record(num_drafted, num_accepted, depth, text_from)
        kept = sequence.append(new, self.max_model_len)
        kept_logprobs = list(islice(logprobs, len(kept)))
        sequence.logprobs += kept_logprobs
        self._counts["num_output_tokens"] += len(kept)
        accepted = min(num_accepted, len(kept))
        rejected = [draft for at, draft in enumerate(drafts) if at not in path]
        given = accepted, num_drafted, kept_logprobs, rejected, tree, text_from
        self._outputs.append(SequenceOutput(sequence, kept, *given))

    def _text_from(self, sequence: Sequence, path: SequenceOf[int]) -> int | None:
        """Return the number of accepted drafts before the first that the text alone has.

        The text alone drafts all that follows such a draft. None where no text drafts.
        """
        if isinstance(self.drafting, LookupDrafting):
            return 0
        cells = sequence.draft_cells
        if cells is None or not sequence.has_copies:
            return None
        return next((i for i, node in enumerate(path) if only_text_has(cells[node])), len(path))

    def _fail(self, sequence: Sequence, code: str, error: str) -> None:
        """End a sequence with an error; its output so far stays."""
        sequence.fail(code, error)
        self._outputs.append(SequenceOutput(sequence, [], 0, 0))

    def _fail_broken(self, sequence: Sequence) -> None:
        """End a sequence for which the target's logits are not finite."""
        error = (
            f"The target's logits are NaN or infinite after {len(sequence)} tokens of this request "
            f"({sequence.num_output_tokens} of them output), in {self.target.dtype}. Load the "
            "model in a type of wider range, or check its weights."
        )
        self._fail(sequence, "logits_not_finite", error)
        # Attention reads the rest of a block behind the next owner's tokens with weight 0, and
        # 0 * NaN is NaN.
        blocks = self.blocks.withdraw(sequence)
        for cache in (*self._target_caches, *self._drafter_caches):
            cache.wipe(blocks)

    def _publish(self, sequence: Sequence) -> None:
        """Publish the blocks whose slots are all settled, the drafter's slots too."""
        if self._is_checking or sequence.error is not None:
            return
        settled = read = min(sequence.num_computed_tokens, len(sequence) - 1)
        if sequence.num_drafter_tokens < self.max_draft_len:
            read = min(settled, sequence.num_drafter_tokens)
        self.blocks.publish(sequence, settled, read)

    def _retire(self, sequence: Sequence) -> None:
        self.scheduler.retire(sequence)
        self._release(sequence)
        if not self._is_checking:
            num_read = sequence.num_prompt_tokens - (sequence.num_cached_tokens or 0)
            if (window := self.scheduler.draft_window) is not None:
                num_read = min(num_read, window)
            self._depth.served(num_read, sequence.num_output_tokens)
        ended = "num_cancelled" if sequence.finish_reason == "cancelled" else "num_finished"
        self._counts[ended] += 1

    def _release(self, sequence: Sequence) -> None:
        """Free the sampler's and the drafter's memory of a sequence."""
        self.sampler.release(sequence)
        self._features.release(sequence.seq_id)
        sequence.pending_features = None

    def cancel(self, sequence: Sequence) -> None:
        """Stop a sequence and free its memory; a finished one stays unchanged."""
        self._end(sequence, "cancelled")

    def stop(self, sequence: Sequence, num_surplus: int) -> None:
        """End a sequence at a stop string: drop its last `num_surplus` tokens, free its blocks."""
        self._end(sequence, "stop")
        sequence.trim(num_surplus)
        self._counts["num_output_tokens"] -= num_surplus

    def _end(self, sequence: Sequence, reason: str) -> None:
        if not sequence.is_finished:
            if sequence.status is SequenceStatus.RUNNING:
                self._publish(sequence)
            sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, reason
            self._retire(sequence)

    @property
    def stats(self) -> EngineStats:
        """Return the engine's present state and its counters."""
        step_times = {} if self._pipeline is None else self._pipeline.runner.times
        trees = self._tree_record
        return EngineStats(
            num_waiting=len(self.scheduler.waiting),
            num_running=len(self.scheduler.running),
            num_kv_blocks=self.blocks.num_blocks,
            num_free_kv_blocks=self.blocks.num_free_blocks,
            speculation=self.speculation_stats.copy(),
            step_times={rows: replace(times) for rows, times in step_times.items()},
            eager_steps=dict(self._eager_steps),
            decode_steps=dict(self._decode_steps),
            calibration=Calibration() if trees is None else trees.calibration.copy(),
            **self._counts,
        )

    def _claim_target(self) -> None:
        """Give the target this engine's KV caches, taps and context; engines may share a target."""
        if self.target.kv_caches is not self._target_caches:
            self.target.tap_aux(self._plan.aux_layer_ids)
            self.target.set_kv_caches(self._target_caches)
            self.target.fix_rope(self.max_model_len)


def _kept(done: TargetPass) -> TargetPass:
    """Return a pass with features that no graph overwrites: short ones may be a graph's buffer."""
    if len(done.features_TA) > TOKEN_BUCKETS[-1] or not done.features_TA.is_cuda:
        return done
    return replace(done, features_TA=done.features_TA.clone())


def _ends_prompt(chunk: Chunk) -> bool:
    """Return whether a chunk is the last of a prompt whose pass samples nothing."""
    sequence = chunk.sequence
    end = sequence.num_computed_tokens + chunk.num_tokens
    return end == sequence.prefill_end and not sequence.samples_prompt


def _starts_to_decode(sequence: Sequence) -> bool:
    """Return whether a sequence of a prompt pass decodes in the step behind that pass."""
    is_ready = not (sequence.is_prefilling or sequence.waits_for_grammar)
    return is_ready and not (sequence.samples_prompt or sequence.is_finished)
