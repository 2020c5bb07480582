"""The gate of an adapted head: acceptance on held-out traffic and on old data, old head and new.

The target answers held-out prompts greedily with each head. A head that learns from outputs of
other prompts may gain too, so another test shows whether outputs belong to their prompts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from peagle.config import SamplingParams
from peagle.data.traffic import RecordedTurn
from peagle.evaluation.acceptance import counts_of
from peagle.evaluation.engine_backend import time_requests
from peagle.intervals import Counts, paired_difference
from peagle.llm import LLM
from peagle.results import Interval

MIN_CONVERSATIONS = 10  # held out, for a verdict
MAX_MEASURED = 128  # requests of each kind
MAX_TOKENS = 128  # of a measured output
_COMPARED_TOKENS = 16  # at the start of an output, where its prompt decides most
_MAX_COMPARED, _MIN_COMPARED = 64, 8  # outputs
_MIN_OWN_SHARE = 0.75  # exchanged outputs have 0.5


def measured(turns: Sequence[RecordedTurn]) -> list[RecordedTurn]:
    """Return the newest turns, as many as are measured; turns of equal prompts count once."""
    return list({tuple(turn.prompt): turn for turn in turns}.values())[-MAX_MEASURED:]


def accepted_drafts(llm: LLM, turns: Sequence[RecordedTurn]) -> dict[str, tuple[int, int]]:
    """Return (accepted draft tokens, drafts) of each conversation, before the loops of outputs.

    The target answers the prompts greedily, in as many tokens as were recorded, at most
    `MAX_TOKENS`.

    Raises:
        UserError: the engine refuses a prompt.
    """
    lengths = [min(len(turn.response), MAX_TOKENS) for turn in turns]
    params = [SamplingParams(max_tokens=length, temperature=0.0) for length in lengths]
    run = time_requests(llm, [turn.prompt for turn in turns], params)
    found: dict[str, tuple[int, int]] = {}
    for turn, answer in zip(turns, run.answers, strict=True):
        before = counts_of(answer).before_loop
        assert before is not None
        accepted, drafts = found.get(turn.conversation, (0, 0))
        accepted += before[0].num_accepted_tokens
        found[turn.conversation] = accepted, drafts + before[0].num_drafts
    return found


@dataclass(frozen=True, slots=True)
class AcceptanceChange:
    """Acceptance lengths of two heads on the same requests, and the gain with its interval.

    `ci` is the paired 95% interval, None where too few conversations have drafts.
    """

    before: float
    after: float
    ci: Interval | None
    num_conversations: int

    @classmethod
    def of(
        cls,
        before: Mapping[str, tuple[int, int]],
        after: Mapping[str, tuple[int, int]],
        *,
        seed: int = 0,
    ) -> "AcceptanceChange":
        """Compare what `accepted_drafts` returned of the old head and of the new one."""
        old, new = (_counts(one[name] for name in sorted(before)) for one in (before, after))
        bears = (old[:, 1] > 0) & (new[:, 1] > 0)  # others loop before the first draft
        old, new = old[bears], new[bears]
        _, interval = paired_difference(new, old, seed=seed)
        return cls(_length(old), _length(new), interval, len(old))

    @property
    def gain(self) -> float:
        """Return the acceptance length of the new head less that of the old one."""
        return self.after - self.before

    @property
    def loss(self) -> float:
        """Return the share of the old acceptance length that is lost; below 0 for a gain."""
        return -self.gain / self.before

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return {
            "acceptance_length_before": self.before,
            "acceptance_length_after": self.after,
            "gain": self.gain,
            "gain_ci": self.ci,
            "num_conversations": self.num_conversations,
        }


def _counts(pairs: Iterable[tuple[int, int]]) -> Counts:
    return np.array(list(pairs), dtype=np.int64).reshape(-1, 2)


def _length(counts_N2: Counts) -> float:
    accepted, drafts = counts_N2.sum(axis=0).tolist()
    return 1 + accepted / max(1, drafts)


def refusal(held_out: AcceptanceChange, old: AcceptanceChange | None, max_loss: float) -> str:
    """Return the reason to keep the old head, a sentence; "" if the new one passes."""
    if held_out.ci is None or held_out.ci[0] <= 0:
        ends = "unknown" if held_out.ci is None else "{:+.3f} to {:+.3f}".format(*held_out.ci)
        return (
            f"The gain in acceptance length on held-out traffic is {held_out.gain:+.3f}, 95% "
            f"interval {ends}; expected one wholly above 0. Record more traffic, or train longer."
        )
    if old is not None and old.loss >= max_loss:
        return (
            f"The acceptance length on old data fell from {old.before:.3f} to {old.after:.3f}, by "
            f"{old.loss:.1%}; expected less than --max-loss, {max_loss:.1%}. Raise --old-share, or "
            "train shorter."
        )
    return ""


@dataclass(frozen=True, slots=True)
class OwnOutputs:
    """Outputs of traffic that were compared, and those likelier behind their own prompts."""

    own: int
    compared: int

    @property
    def refusal(self) -> str:
        """Return the reason to learn nothing from the traffic, a sentence; "" without one.

        Where nearly all outputs begin alike there is nothing to exchange, and none.
        """
        if self.compared < _MIN_COMPARED or self.own >= _MIN_OWN_SHARE * self.compared:
            return ""
        return (
            f"Only {self.own} of {self.compared} recorded outputs are likelier behind their own "
            f"prompts than behind others; expected at least {_MIN_OWN_SHARE:.0%}, as of outputs "
            "that this target wrote for these prompts. Record the traffic anew."
        )


def own_outputs(llm: LLM, turns: Sequence[RecordedTurn]) -> OwnOutputs:
    """Compare how likely the target finds outputs behind their own prompts and behind others.

    Some turns of all the traffic are taken. The other prompt is that of the turn half of them
    later. Outputs count up to their first 16 tokens; those that begin with the same tokens are
    left out, and so are prompts behind which the context has no room for them.

    Raises:
        UserError: the engine refuses a prompt.
    """
    longest = llm.engine.max_model_len - _COMPARED_TOKENS - 1
    fitting = [turn for turn in turns if len(turn.prompt) <= longest]
    distinct = list({tuple(turn.prompt): turn for turn in fitting}.values())
    step = max(1, len(distinct) // _MAX_COMPARED)
    chosen = list(islice(distinct[::step], _MAX_COMPARED))
    others = chosen[len(chosen) // 2 :] + chosen[: len(chosen) // 2]
    starts = [turn.response[:_COMPARED_TOKENS] for turn in chosen]
    prompts = [
        one.prompt + start
        for side in (chosen, others)
        for one, start in zip(side, starts, strict=True)
    ]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    sums = []
    for output, start in zip(llm.generate(prompts, params), starts * 2, strict=True):
        assert output.prompt_logprobs is not None
        given = list(output.prompt_logprobs)[-len(start) :]
        sums.append(sum(one.logprob for one in given if one is not None))
    pairs = [
        (own, other)
        for turn, swapped, own, other in zip(
            chosen, others, sums[: len(chosen)], sums[len(chosen) :], strict=True
        )
        if turn.response[:_COMPARED_TOKENS] != swapped.response[:_COMPARED_TOKENS]
    ]
    return OwnOutputs(sum(own > other for own, other in pairs), len(pairs))
