"""Counters of speculation and of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any

from peagle.kernels.drafts.step_state import Stamp


@dataclass(slots=True)
class SpeculationStats:
    """Counters of speculative decoding, taken before stop conditions trim the output (as in vLLM).

    Attributes:
        num_drafts: verified drafts (a draft is up to K tokens, or the tree of a step).
        num_draft_tokens: tokens in these drafts; for trees the verified nodes.
        num_accepted_tokens: tokens accepted.
        num_accepted_tokens_per_pos: drafts whose first i + 1 tokens were all accepted; for a tree
            a path to depth i + 1.
        num_accepted_text_tokens_per_pos: those of them whose token i + 1 the text alone drafted, no
            head; empty where no text drafts.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_accepted_text_tokens_per_pos: list[int] = field(default_factory=list)

    def record(
        self,
        num_drafted: int,
        num_accepted: int,
        depth: int | None = None,
        text_from: int | None = None,
    ) -> None:
        """Count one verified draft.

        Args:
            depth: depth of a tree, None for a chain.
            text_from: number of accepted tokens before those that the text alone drafted; None
                where no text drafts.
        """
        if num_drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        most = num_drafted if depth is None else depth
        _count(self.num_accepted_tokens_per_pos, most, range(num_accepted))
        if text_from is not None:
            _count(self.num_accepted_text_tokens_per_pos, most, range(text_from, num_accepted))

    def add(self, other: SpeculationStats) -> None:
        """Add another's counters to these."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        for name in _PER_POS:
            pairs = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            setattr(self, name, [sum(pair) for pair in pairs])

    def since(self, earlier: SpeculationStats) -> SpeculationStats:
        """Return the counts after `earlier`, an earlier copy of these counters."""
        pairs = (zip_longest(getattr(self, n), getattr(earlier, n), fillvalue=0) for n in _PER_POS)
        return SpeculationStats(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            *([now - then for now, then in own] for own in pairs),
        )

    @classmethod
    def pooled(cls, every: Iterable[SpeculationStats]) -> SpeculationStats:
        """Return the sum of several counters."""
        total = cls()
        for one in every:
            total.add(one)
        return total

    def copy(self) -> SpeculationStats:
        """Return a copy of the counters."""
        return replace(self, **{name: [*getattr(self, name)] for name in _PER_POS})

    def to_json(self) -> dict[str, Any]:
        """Return the counters by name; those of the text only where a text drafts."""
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        if not self.num_accepted_text_tokens_per_pos:
            del counts["num_accepted_text_tokens_per_pos"]
        return counts

    @property
    def acceptance_length(self) -> float:
        """Return 1 + accepted draft tokens / drafts; 1.0 without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_per_pos(self) -> list[float]:
        """Return the unconditional acceptance: P(the first i + 1 drafts are all accepted)."""
        return [count / self.num_drafts for count in self.num_accepted_tokens_per_pos]

    @property
    def shares_by_source(self) -> dict[str, list[float]]:
        """Return P(token i + 1 accepted, and drafted by the head, or by the text alone).

        The result has head_per_pos and text_per_pos; it is empty where no text drafts.
        """
        accepted, of_text = (getattr(self, name) for name in _PER_POS)
        if not of_text:
            return {}
        pairs = [*zip_longest(accepted, of_text, fillvalue=0)]
        return {
            "head_per_pos": [(count - text) / self.num_drafts for count, text in pairs],
            "text_per_pos": [text / self.num_drafts for _, text in pairs],
        }


_PER_POS = [f.name for f in fields(SpeculationStats) if f.name.endswith("_per_pos")]


def _count(per_pos: list[int], most: int, positions: Iterable[int]) -> None:
    """Count one more at each of the positions, in a list of at least `most`."""
    per_pos.extend([0] * (most - len(per_pos)))
    for position in positions:
        per_pos[position] += 1


NUM_CALIBRATION_BINS = 10


@dataclass(slots=True)
class Calibration:
    """Predicted and actual survival of nodes (`kernels.trees.survival`), by tenths of probability.

    Predictions are those from before the step that verified the nodes. They are counted for up to
    `engine.tree_record.TREES_A_STEP` trees of a step.

    Attributes:
        num_nodes: verified nodes whose survival was predicted within each tenth.
        predicted: sums of these predictions.
        accepted: number of accepted nodes among them.
    """

    num_nodes: list[float] = field(default_factory=lambda: [0.0] * NUM_CALIBRATION_BINS)
    predicted: list[float] = field(default_factory=lambda: [0.0] * NUM_CALIBRATION_BINS)
    accepted: list[float] = field(default_factory=lambda: [0.0] * NUM_CALIBRATION_BINS)

    @property
    def error(self) -> float | None:
        """Return the expected calibration error, 0 to 1; None without a verified node.

        sum_bins |predicted - accepted| / nodes
        """
        total = sum(self.num_nodes)
        if not total:
            return None
        pairs = zip(self.predicted, self.accepted, strict=True)
        return sum(abs(expected - found) for expected, found in pairs) / total

    def add(self, other: Calibration) -> None:
        """Add another's counts to these."""
        for f in fields(self):
            pairs = zip(getattr(self, f.name), getattr(other, f.name), strict=True)
            setattr(self, f.name, [one + more for one, more in pairs])

    def copy(self) -> Calibration:
        """Return a copy of the counts."""
        return Calibration([*self.num_nodes], [*self.predicted], [*self.accepted])


@dataclass(slots=True)
class GraphTimes:
    """The device's seconds in the parts of decode steps that ran as CUDA graphs.

    Steps whose target pass computed prompts too are left out.

    Attributes:
        target: the target's pass over newest and draft tokens.
        verify: acceptance, next tokens, new state.
        draft: the drafter, with the making of its batch.
    """

    num_steps: int = 0
    target: float = 0.0
    verify: float = 0.0
    draft: float = 0.0

    def add(self, stamps: Sequence[int]) -> float:
        """Count a step from its stamps (`drafts.step_state.Stamp`), nanoseconds; return seconds.

        The time between verification and drafting does not count: the head may read prompts.
        """
        begin, target_done, verified, drafting, drafted = stamps[: len(Stamp)]
        self.num_steps += 1
        parts_ns = target_done - begin, verified - target_done, drafted - drafting
        target_s, verify_s, draft_s = (part_ns * 1e-9 for part_ns in parts_ns)
        self.target += target_s
        self.verify += verify_s
        self.draft += draft_s
        return target_s + verify_s + draft_s


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state of an engine at one time; the counters run since the engine was made.

    Attributes:
        num_waiting, num_running: sequences now.
        num_free_kv_blocks: blocks without an owner; some may keep KV for later requests.
        num_preemptions: times that a sequence gave its blocks up and was computed again.
        num_prompt_tokens: tokens of the prompts admitted.
        num_cached_tokens: prompt tokens whose KV was cached.
        num_output_tokens: output tokens of all sequences.
        speculation: drafts made and accepted.
        step_times: times of the steps that ran as CUDA graphs, by the rows of the graph.
        eager_steps: decode steps that no CUDA graph could run, if there are graphs, by the first
            reason (`GraphRunner.obstacle`).
        decode_steps: decode steps by the K of the batch; for trees by nodes for each sequence.
        calibration: predicted and actual acceptance of trees' nodes.
    """

    num_waiting: int
    num_running: int
    num_kv_blocks: int
    num_free_kv_blocks: int
    num_steps: int
    num_finished: int
    num_cancelled: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    speculation: SpeculationStats
    step_times: dict[int, GraphTimes]
    eager_steps: dict[str, int] = field(default_factory=dict)
    decode_steps: dict[int, int] = field(default_factory=dict)
    calibration: Calibration = field(default_factory=Calibration)
