"""The results of a request: chunks while it runs, an output when it is finished."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, NamedTuple

from peagle.engine.sequence import Sequence
from peagle.engine.stats import SpeculationStats
from peagle.kernels.paths import path_nodes, row_depths
from peagle.kernels.sampling.logprobs import TokenLogprobs


class DraftTree(NamedTuple):
    """The drafts of a step that are a tree, see `kernels.trees.growth`.

    Attributes:
        tokens: tokens of the nodes, the likeliest first.
        parents: the row of each node's parent; row 0 is the newest token, row i + 1 is node i.
        depth: most nodes on a path.
    """

    tokens: list[int]
    parents: list[int]
    depth: int

    @staticmethod
    def of(tokens: list[int], parents: list[int]) -> DraftTree:
        """Return the tree of these nodes."""
        return DraftTree(tokens, parents, max(row_depths(parents)))

    def path(self, tokens: Iterable[int]) -> list[int]:
        """Return the nodes on the path of these tokens, from the newest token on."""
        return path_nodes(self.parents, self.tokens, tokens)


class SequenceOutput(NamedTuple):
    """One step's addition to one sequence; the fields are those of `StreamChunk`.

    Steps make many of both, and a named tuple takes a third of the time of a frozen dataclass.
    """

    sequence: Sequence
    new_token_ids: list[int]
    num_accepted: int
    num_drafted: int
    logprobs: SequenceOf[TokenLogprobs] = ()
    rejected_token_ids: SequenceOf[int] = ()
    draft_tree: DraftTree | None = None
    text_from: int | None = None

    @property
    def begins_without_drafts(self) -> bool:
        """Return whether this is the first step of a drafting sequence, which has no drafts yet."""
        if self.num_drafted or not self.sequence.num_speculative_tokens:
            return False
        return len(self.new_token_ids) == self.sequence.num_output_tokens


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished output of a prompt.

    It also has the attributes of vLLM's RequestOutput, and is part of its own `outputs`, with the
    attributes of vLLM's CompletionOutput. `LLM.generate` sets `prompt`, `request_id` and `others`.

    Attributes:
        text: the output, without the end-of-text token or the stop string.
        token_ids: output tokens, the stop token or the tokens of the stop string included.
        finish_reason: "stop" or "length"; "error" with the reason in `error`.
        stats: drafts made and accepted.
        elapsed_s: seconds from the request to the last token.
        index: number of this output among the outputs of its prompt, 0 to n - 1.
        time_to_first_token_s: seconds from the request to the first token.
        queue_time_s: seconds from the request to the start of its prompt.
        num_cached_tokens: prompt tokens whose KV was cached.
        num_preemptions: number of times that it lost its blocks and was computed again.
        logprobs: log-probabilities of the output tokens; None unless requested.
        prompt_logprobs: log-probabilities of the prompt tokens, None for the first; None unless
            requested. From `LLM.generate` a list.
        stop_reason: the stop string, or the id out of `stop_token_ids`, that ended the output; None
            if the model's own end of text, or a length, ended it.
        error: message of the error, if `finish_reason` is "error".
        error_code: "logits_not_finite", "grammar_too_slow" or "grammar_failed" with an error.
        prompt: the text of the prompt; None if it was given as token ids.
        request_id: number of the prompt among all prompts of this LLM.
        others: the further outputs of the same prompt, if `n` is above 1.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    stats: SpeculationStats
    elapsed_s: float
    index: int = 0
    time_to_first_token_s: float = 0.0
    queue_time_s: float = 0.0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: SequenceOf[TokenLogprobs | None] | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_code: str | None = None
    prompt: str | None = None
    request_id: str = ""
    others: tuple[RequestOutput, ...] = ()

    @property
    def outputs(self) -> list[RequestOutput]:
        """Return the `n` outputs of the prompt: this one, then the others."""
        return [self, *self.others]

    @property
    def cumulative_logprob(self) -> float | None:
        """Return the sum of the log-probabilities of the output tokens; None unless requested."""
        return None if self.logprobs is None else sum(one.logprob for one in self.logprobs)

    @property
    def finished(self) -> bool:
        """Return True, because an output exists only after its end."""
        return True

    @property
    def metrics(self) -> None:
        """Return None, as vLLM does by default; `elapsed_s` and others have measurements."""
        return None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with the fields of `peagle generate --format json` without the id.

        It has an index if the prompt has several outputs, and the requested log-probabilities. JSON
        has no -inf: an impossible token's log-probability is null.
        """
        fields: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            **self.stats.to_json(),
            "acceptance_length": self.stats.acceptance_length,
            "num_cached_tokens": self.num_cached_tokens,
            "num_preemptions": self.num_preemptions,
            "queue_time_s": self.queue_time_s,
            "time_to_first_token_s": self.time_to_first_token_s,
            "elapsed_s": self.elapsed_s,
        }

        def number(logprob: float) -> float | None:
            return logprob if math.isfinite(logprob) else None

        for name in ("logprobs", "prompt_logprobs"):
            if (values := getattr(self, name)) is not None:
                fields[name] = [
                    {
                        "token_id": one.token_id,
                        "logprob": number(one.logprob),
                        "rank": one.rank,
                        "top": [[token_id, number(logprob)] for token_id, logprob in one.top],
                    }
                    for one in values
                    if one is not None
                ]
        if self.error is not None:
            fields |= {"error": self.error, "error_code": self.error_code}
        return fields


class StreamChunk(NamedTuple):
    """One step's addition to one output.

    Attributes:
        index: number of the prompt in the list given.
        text: new text; may be empty while a character is incomplete.
        num_accepted: number of new tokens that are accepted drafts; they come first.
        num_drafted: draft tokens that the step verified, 0 in a prompt pass.
        output: the finished output in its last chunk; None in earlier ones.
        output_index: number of the output among the outputs of its prompt, 0 to n - 1.
        logprobs: log-probabilities of the new tokens, if requested.
        rejected_token_ids: draft tokens that the step rejected.
        draft_tree: the draft tokens that the step verified, if they were a tree.
        text_from: number of accepted drafts before those that the text alone drafted, no head; None
            where no text drafts.
    """

    index: int
    text: str
    token_ids: list[int]
    num_accepted: int
    num_drafted: int
    output: RequestOutput | None
    output_index: int = 0
    logprobs: SequenceOf[TokenLogprobs] = ()
    rejected_token_ids: SequenceOf[int] = ()
    draft_tree: DraftTree | None = None
    text_from: int | None = None

    @property
    def draft_depth(self) -> int | None:
        """Return the most draft tokens on a path of the tree; None for a chain."""
        return None if self.draft_tree is None else self.draft_tree.depth
