"""One request inside the engine: its tokens, its KV and its drafts."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum, auto

from torch import Tensor

from peagle.config import SamplingParams
from peagle.engine.features import FeatureRing
from peagle.engine.grammar import GrammarState
from peagle.engine.stats import SpeculationStats
from peagle.kernels.paths import path_nodes
from peagle.kernels.sampling.logprobs import PromptLogprobs, TokenLogprobs
from peagle.kernels.trees.chains import count_drawn
from peagle.kernels.trees.copies import TextIndex


class SequenceStatus(Enum):
    """The state of a sequence."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


_FINISHED = SequenceStatus.FINISHED  # read many times a step; a member's name costs a search


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt, its output so far, its KV blocks and its pending drafts.

    With N tokens, of which the newest was just emitted, the target has computed N - 1, and the
    drafter's slots 0..N-2 are written (slot p reads token p + 1).

    Attributes:
        seq_id: number of the sequence in the engine, by arrival.
        token_ids: prompt, then output.
        params: sampling parameters; `seed` is the seed of its random numbers.
        priority: sequences with a lower number go first.
        num_speculative_tokens: most drafts of a step; with 0 the request never drafts.
        grammar: state of the grammar that the output must follow; None without one.
        leader: a sequence with the same prompt whose KV this one waits for.
        cache_salt: only sequences of the same salt share KV blocks.
        samples_prompt: whether the pass over a prompt's end gives the first token; else that pass
            leaves the last token to the first decode step.
        block_hashes: hashes of the full blocks so far, see BlockManager.
        num_published_blocks: blocks that others may share; the first `num_read_blocks` of them
            keep their hashes when the drafter reads more.
        num_computed_tokens: tokens whose KV the target has written.
        num_drafter_tokens: slots that the drafter has written, or leaves out at the beginning.
        has_old_drafter_kv: the drafter had other weights when it wrote some of these slots: their
            blocks are not shared.
        drafter_start: first slot that the drafter's attention may read; above 0 behind a hole, and
            if the drafter reads only the end of a prompt.
        pending_features: features that the drafter has not read; None if it has read all.
        drafts: tokens that the next step verifies; `draft_probs_KV` is their q, None for argmax.
            Preemption keeps them, so that it changes no output.
        draft_parents: row of each draft's parent in a tree, see `kernels.trees.growth`, with the
            score of each draft's path in `draft_scores`; None for a chain. The drafts of a drawn
            chain come first, and have DRAWN_SCORE.
        draft_worths: how probable it is that each node is accepted, and `draft_cells` which rate of
            copies it had (`kernels.trees.copies`); None where the tree has no copies.
        prediction: the end of the prompt and, behind it, the output that the request predicts; in
            no KV and no hash.
        text_indices: of the text and of the prediction; empty until copies are looked for.
        has_copies: whether copies of the text may be its drafts.
        draws_chain: whether a chain of drawn drafts leads its trees.
        fixes_k: whether its K does not follow the K of the batch.
        correction: number of the correction of its drafts, where the head has several.
        num_cached_tokens: prompt tokens whose KV the cache held when it was first admitted.
        num_preemptions: number of times that the sequence lost its blocks.
        admitted_s: time of its first admission, by `time.perf_counter`.
        logprobs, prompt_logprobs: log-probabilities of output and prompt so far, if requested.
        finish_reason: "stop", "length", "cancelled" or "error" once finished; `error` and
            `error_code` have the reason for "error".
    """

    seq_id: int
    token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    priority: int = 0
    num_speculative_tokens: int = 0
    grammar: GrammarState | None = None
    leader: Sequence | None = None
    cache_salt: bytes = b""
    samples_prompt: bool = True
    num_prompt_tokens: int = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    num_read_blocks: int = 0
    num_computed_tokens: int = 0
    num_drafter_tokens: int = 0
    drafter_start: int = 0
    has_old_drafter_kv: bool = False
    pending_features: FeatureRing | None = None
    drafts: list[int] = field(default_factory=list)
    draft_parents: list[int] | None = None
    draft_scores: list[float] | None = None
    draft_worths: list[float] | None = None
    draft_cells: list[int] | None = None
    prediction: list[int] = field(default_factory=list)
    text_indices: list[TextIndex] = field(default_factory=list)
    draft_probs_KV: Tensor | None = None
    has_copies: bool = False
    draws_chain: bool = False
    fixes_k: bool = False
    correction: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    admitted_s: float | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = field(init=False, default=None)
    finish_reason: str | None = None
    error: str | None = None
    error_code: str | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        if (num_top := self.params.prompt_logprobs) is not None:
            self.prompt_logprobs = PromptLogprobs(self.prompt_token_ids, num_top)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is _FINISHED

    @property
    def prefill_end(self) -> int:
        """Return the number of tokens to compute before decoding."""
        samples = self.samples_prompt and not self.num_output_tokens
        return len(self.token_ids) - (not samples)

    def accepted_drafts(self, accepted: list[int]) -> SequenceOf[int]:
        """Return which drafts a step accepted, by the accepted tokens."""
        if self.draft_parents is None:
            return range(len(accepted))
        return path_nodes(self.draft_parents, self.drafts, accepted)

    @property
    def num_drawn(self) -> int:
        """Return how many of its first drafts may have been drawn."""
        return len(self.drafts) if self.draft_parents is None else count_drawn(self.draft_scores)

    @property
    def is_prefilling(self) -> bool:
        """Return whether `prefill_end` tokens are not all computed yet."""
        return self.num_computed_tokens < self.prefill_end

    @property
    def waits_for_grammar(self) -> bool:
        """Return whether the grammar's masks of the next step are still missing."""
        return self.grammar is not None and not self.grammar.is_prepared_for(
            self.drafts, self.draft_parents
        )

    @property
    def needs_every_token(self) -> bool:
        """Return whether the target must run the whole prompt even if its KV is cached."""
        given = self.prompt_logprobs
        return given is not None and len(given) < self.num_prompt_tokens

    @property
    def waits_for_leader(self) -> bool:
        """Return whether the leader has not yet computed the prompt that both share."""
        leader = self.leader
        return leader is not None and not (leader.is_finished or leader.num_output_tokens)

    @property
    def can_begin(self) -> bool:
        """Return whether neither a leader nor a grammar keeps a waiting sequence from running."""
        return not (self.waits_for_leader or self.waits_for_grammar)

    @property
    def order(self) -> tuple[int, int]:
        """Return the key of the scheduling order: priority, then arrival."""
        return self.priority, self.seq_id

    def append(self, token_ids: list[int], max_model_len: int) -> list[int]:
        """Add new tokens up to the first stop condition; return the kept ones.

        A stop id is kept as the last token. At the end this sets `status` and `finish_reason`. If
        the grammar fails, the sequence ends with an error before the token that the grammar
        refused.
        """
        room = max(
            1, min(self.params.max_tokens - self.num_output_tokens, max_model_len - len(self))
        )
        kept = token_ids[:room]
        if not self.stop_token_ids.isdisjoint(kept):
            end = next(i for i, token in enumerate(kept) if token in self.stop_token_ids)
            kept, self.finish_reason = kept[: end + 1], "stop"
        elif len(kept) == room:
            self.finish_reason = "length"
        if self.grammar is not None:
            kept = kept[: self.grammar.accept(kept)]
            if self.grammar.error is not None and (failure := self.grammar.failure) is not None:
                self.fail(*failure)
        self.token_ids += kept
        if self.finish_reason:
            self.status = SequenceStatus.FINISHED
        return kept

    def fail(self, code: str, error: str) -> None:
        """End the sequence with an error; its output so far stays."""
        self.status, self.finish_reason = SequenceStatus.FINISHED, "error"
        self.error_code, self.error = code, error

    def trim(self, num_surplus: int) -> None:
        """Drop the last tokens of a finished output, which follow a stop string."""
        del self.token_ids[len(self.token_ids) - num_surplus :]
        del self.logprobs[self.num_output_tokens :]
        self.finish_reason = "stop"
        self.error = self.error_code = None  # the failure came after the stop string

    def forget_computed(self) -> None:
        """Forget the KV, whose blocks are gone; keep tokens and drafts."""
        self.num_computed_tokens = self.num_drafter_tokens = self.drafter_start = 0
        self.num_published_blocks = self.num_read_blocks = 0
        self.pending_features = None
        self.has_old_drafter_kv = False
