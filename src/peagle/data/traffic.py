"""Recorded traffic in the order of time, and the newest part of it that is held out."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from peagle.data.dataset import check_tokenizer, read_data
from peagle.data.limits import MIN_RESPONSE, Limits
from peagle.data.prepare import (
    Collected,
    PrepareSummary,
    check_ids,
    check_recorded_target,
    kept_answers,
    require_no_rendering,
)
from peagle.data.readers import DropCounts, Dropped, check_traffic
from peagle.data.samples import Sample, SampleMaker


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A prompt and its output.

    `conversation` is equal for turns of one conversation. `temperature` is as recorded.
    """

    prompt: list[int]
    response: list[int]
    conversation: str
    temperature: object = None


def read_traffic(
    folder: Path,
    limits: Limits,
    fingerprint: str,
    maker: SampleMaker,
    *,
    lm_head: str | None,
    cipher: Any = None,
) -> tuple[list[RecordedTurn], DropCounts]:
    """Return the turns of recorded traffic, the oldest first, and counts of unusable records.

    A turn belongs to the conversation of an earlier one if its prompt begins with the whole prompt
    of that one; so do turns of equal prompts. A chat template that renders earlier turns anew may
    hide that.

    Args:
        folder: as `peagle serve --record` or SageMaker's data capture writes it.
        limits: only its vocabulary counts.
        maker: tokenises captured text; records of our server have token ids.
        fingerprint, lm_head, cipher: as for `peagle.data.prepare.prepare`.

    Raises:
        UserError: the folder holds no records, or records of another tokenizer or target; or
            conversations, and the thinking mode of their template was not chosen.
    """
    check_traffic(folder)
    counts, lacks_thinking = DropCounts(), maker.lacks_thinking
    found: list[tuple[str, Sample, object]] = []
    for record in read_data(folder, cipher)[0]:
        check_tokenizer(record.where, record.data, fingerprint)
        check_recorded_target(record, lm_head)
        if lacks_thinking:
            require_no_rendering(record, maker)
        for made in maker.samples(record):
            if isinstance(made, Sample) and not (made.begin and len(made.response) >= MIN_RESPONSE):
                made = Dropped(f"no prompt, or an output of less than {MIN_RESPONSE} tokens")
            if isinstance(made, Dropped):
                counts.drop(made, record.where)
                continue
            check_ids(made.ids, record.where, limits)
            time = str(record.data.get("time", ""))
            found.append((time, made, record.data.get("temperature")))
    found.sort(key=lambda one: one[0])  # servers write files of their own, at the same time
    names = _conversations([sample.prompt for _, sample, _ in found])
    turns = [
        RecordedTurn(sample.prompt, sample.response, name, temperature)
        for (_, sample, temperature), name in zip(found, names, strict=True)
    ]
    return turns, counts


def _conversations(prompts: Sequence[Sequence[int]]) -> list[str]:
    """Name the conversation of each prompt: that of the longest other one that it begins with."""
    names, known = [""] * len(prompts), {}
    for index in sorted(range(len(prompts)), key=lambda index: len(prompts[index])):
        digest, found = 0, None
        for token in prompts[index]:
            digest = hash((digest, token))
            found = known.get(digest, found)
        names[index] = known[digest] = found or str(digest)
    return names


def hold_out(
    turns: Sequence[RecordedTurn], share: float
) -> tuple[list[RecordedTurn], list[RecordedTurn]]:
    """Split turns, the oldest first, into those to learn from and the newest, which are held out.

    Whole conversations are held out, those with the newest last turns, until they have `share` of
    all turns: no conversation is on both sides.
    """
    newest = dict.fromkeys(turn.conversation for turn in reversed(turns))
    sizes = dict.fromkeys(newest, 0)
    for turn in turns:
        sizes[turn.conversation] += 1
    wanted, held = ceil(share * len(turns) - 1e-9), set()
    for name in newest:
        if wanted <= 0:
            break
        held.add(name)
        wanted -= sizes[name]
    sides: tuple[list[RecordedTurn], list[RecordedTurn]] = ([], [])
    for turn in turns:
        sides[turn.conversation in held].append(turn)
    return sides


def collect(turns: Sequence[RecordedTurn], limits: Limits) -> Collected:
    """Return turns as samples to train on, each output once, cut at the length limit."""
    collected, report, seen = Collected(), PrepareSummary(), set[bytes]()
    for turn in turns:
        sample = Sample.answered(turn.prompt, turn.response, turn.conversation)
        if answers := list(kept_answers(sample, "", limits, seen, report)):
            collected.add(Sample.of(sample.ids, answers, sample.group), turn.temperature)
    return collected


def turns_of(collected: Collected) -> list[RecordedTurn]:
    """Return the first prompt and answer of each sample."""
    turns = []
    for ids, mask, hash in zip(collected.tokens, collected.masks, collected.hashes, strict=True):
        begin = mask.index(1)
        end = mask.find(0, begin)
        turns.append(
            RecordedTurn(
                ids[:begin].tolist(), ids[begin : end if end > 0 else None].tolist(), str(hash)
            )
        )
    return turns
