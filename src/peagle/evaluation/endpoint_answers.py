"""The answer of a server with OpenAI's interface, read into texts, times, tokens and drafts."""

import math
from dataclasses import dataclass

from peagle.client.answers import (
    DraftReport,
    ForeignAnswer,
    StreamedAnswer,
    Usage,
    error_message,
    read_whole,
)
from peagle.client.counters import DraftCounts
from peagle.engine import SpeculationStats
from peagle.evaluation.decoding import Answer, DecodeCounts
from peagle.evaluation.http_client import Reply

PROBLEMS = {
    "refused": "no connection",
    "unanswered": "the server closed the connection without an answer",
    "cut": "the answer ended in the middle",
    "timeout": "no whole answer in time",
    "dropped": "dropped",
}


@dataclass(slots=True)
class _OutputPart:
    """The output of one step of the server, as far as events tell steps apart."""

    seconds: float
    text: str = ""
    answer: str = ""
    num_tokens: int = 0
    step: DecodeCounts | None = None


def read_answer(reply: Reply) -> Answer:
    """Read the answer to a completion or a chat completion, streamed or whole.

    The tokens of a chunk come from our server's reports or from usage in every chunk
    (`continuous_usage_stats`). Without either, the tokens of the whole answer are divided by the
    characters of the chunks. Reasoning counts as output; `text` leaves it out where the server
    separates it.

    Raises:
        ForeignAnswer: the answer is no completion.
    """
    if reply.problem and not reply.events:
        return Answer(seconds=reply.seconds, error=PROBLEMS[reply.problem])
    if reply.status != 200:
        return Answer(seconds=reply.seconds, error=f"{reply.status}: {error_message(reply.body)}")
    if reply.headers.get("content-type", "").startswith("text/event-stream"):
        return _streamed(reply)
    return _whole(reply)


def stats_of(drafts: DraftCounts | None) -> SpeculationStats | None:
    """Return counts of drafts as the counters of an engine; None without any."""
    if drafts is None:
        return None
    return SpeculationStats(
        drafts.num_drafts,
        drafts.num_draft_tokens,
        drafts.num_accepted_tokens,
        [*drafts.num_accepted_tokens_per_pos],
        [*drafts.num_accepted_text_tokens_per_pos],
    )


def _whole(reply: Reply) -> Answer:
    """Read an answer in one part: its first token is its last."""
    event = read_whole(reply.body)
    if not event.choices:
        raise ForeignAnswer(reply.body, is_object=True)
    choice, usage = event.choices[0], event.usage or Usage()
    text = choice.reasoning + choice.text
    count = usage.num_tokens or int(bool(text))
    return Answer(
        text=choice.text,
        finish_reason=choice.finish_reason,
        num_prompt_tokens=usage.num_prompt_tokens,
        num_tokens=count,
        chunks=[(reply.seconds, count)],
        seconds=reply.seconds,
        texts=[text],
        stats=stats_of(usage.drafts),
    )


def _streamed(reply: Reply) -> Answer:
    """Read the events of a stream."""
    answer = StreamedAnswer()
    read = [(when - reply.sent_s, answer.read(data)) for when, data in reply.events]
    events = [(seconds, event) for seconds, event in read if event is not None]
    written = [event for _, event in events if event.choices]
    # Some servers put the usage of the whole answer into the last chunk that has text.
    has_usage = bool(written) and all(event.usage for event in written)
    has_steps = any(event.report for event in written)
    parts: list[_OutputPart] = []
    usage = Usage()
    error = ""
    so_far = 0  # tokens of the chunks so far, by their usage
    for seconds, event in events:
        error = event.error or error
        usage = event.usage or usage
        if not event.choices:
            continue
        choice = event.choices[0]
        text = choice.reasoning + choice.text
        part = _OutputPart(seconds)
        if has_steps:
            report = event.report or DraftReport()
            part.num_tokens = len(report.tokens)
            part.step = DecodeCounts(
                part.num_tokens,
                report.num_drafted,
                report.num_accepted,
                report.draft_depth,
                report.text_from,
            )
        elif has_usage:
            count = max(usage.num_tokens or 0, so_far)
            part.num_tokens, so_far = count - so_far, count
        # An event without tokens of its own belongs to the step before it.
        is_new = part.num_tokens if has_steps or has_usage else text
        if is_new or (text and not parts):
            parts.append(part)
        if text:
            parts[-1].text += text
            parts[-1].answer += choice.text
    if not error and (reply.problem or not answer.is_whole):
        error = PROBLEMS[reply.problem or "cut"]
    count = usage.num_tokens
    if not has_steps and not has_usage:
        _allocate_tokens(parts, len(parts) if count is None else count)
    steps = [part.step for part in parts if part.step is not None]
    return Answer(
        text="".join(part.answer for part in parts),
        finish_reason="" if error else answer.finish_reasons.get(0, ""),
        num_prompt_tokens=usage.num_prompt_tokens,
        num_tokens=sum(part.num_tokens for part in parts) if count is None else count,
        chunks=[(part.seconds, part.num_tokens) for part in parts],
        seconds=reply.seconds,
        texts=[part.text for part in parts],
        steps=steps if steps and len(steps) == len(parts) else None,
        stats=stats_of(usage.drafts),
        error=error,
    )


def _allocate_tokens(parts: list[_OutputPart], count: int) -> None:
    """Divide tokens among parts by their characters; the first has at least one."""
    total = sum(len(part.text) for part in parts)
    so_far = given = 0
    for part in parts:
        so_far += len(part.text)
        due = math.ceil(count * so_far / total)
        part.num_tokens, given = due - given, due
