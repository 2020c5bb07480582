"""Prepare training data: check, cut, deduplicate and split tokenised conversations."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peagle.data.dataset import ResponseDataset, check_tokenizer, read_data, row_of, write_store
from peagle.data.limits import MIN_RESPONSE, Limits
from peagle.data.origins import AnswerOrigin, answer_origins, joined_origins
from peagle.data.readers import DropCounts, Dropped, Record, side_file
from peagle.data.samples import Sample, SampleMaker, continues
from peagle.disk import needing_room, put_in_place
from peagle.errors import UserError
from peagle.models.checkpoint.files import write_json


@dataclass(slots=True)
class PrepareSummary(DropCounts):
    """Counts of the records by their outcome.

    Attributes:
        records: read.
        samples, answers, tokens, supervised: written for training.
        validation_samples, validation_answers: written for validation.
        truncated: answers that were cut at the length limit, as far as they are written.
        duplicates: answers left out since an equal one, behind an equal prompt, was there.
        unknown_tokenizer: files of token ids that do not say which tokenizer made them.
        origins: where all answers come from, () if that is not known of some.
    """

    records: int = 0
    samples: int = 0
    answers: int = 0
    tokens: int = 0
    supervised: int = 0
    validation_samples: int = 0
    validation_answers: int = 0
    truncated: int = 0
    duplicates: int = 0
    unknown_tokenizer: list[str] = field(default_factory=list)
    origins: tuple[AnswerOrigin, ...] = ()


class Collected:
    """Samples with a hash of their conversation.

    A sample goes on with the newest one of its conversation where its prompt begins with all of
    that: `peagle data regenerate` writes each answer of a conversation into a record of its own,
    and answers at several temperatures by turns.

    Attributes:
        tokens: token ids of each sample.
        masks: for each token 1 if it is supervised, else 0.
        hashes: the conversation of each sample, 64 bits.
    """

    def __init__(self) -> None:
        self.tokens: list[array[int]] = []
        self.masks: list[bytearray] = []
        self.hashes = array("Q")
        # The newest sample, by the hash of its conversation and its temperature.
        self._newest: dict[tuple[int, str], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, other: Collected, order: Iterable[int]) -> None:
        """Put samples of another collection behind the others, by their numbers there."""
        for index in order:
            self._append(other.tokens[index], other.masks[index], other.hashes[index])

    def add(self, sample: Sample, temperature: object = None) -> None:
        """Put a sample behind the others, or behind the newest one of its conversation.

        Samples of different temperatures, as their records name them, do not go on with each other.
        """
        digest = hashlib.sha256(sample.group.encode()).digest()
        conversation = int.from_bytes(digest[:8])
        key = conversation, str(temperature)
        last, prompt = self._newest.get(key), array("i", sample.ids[: sample.begin])
        if last is not None and continues(self.tokens[last], prompt):
            begin = len(self.tokens[last])
            self.tokens[last].extend(sample.ids[begin:])
            self.masks[last].extend(sample.loss_mask[begin:])
            return
        self._newest[key] = len(self)
        self._append(array("i", sample.ids), sample.loss_mask, conversation)

    def _append(self, ids: array[int], mask: bytearray, hash: int) -> None:
        self.tokens.append(ids)
        self.masks.append(mask)
        self.hashes.append(hash)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all samples."""
        return sum(map(len, self.tokens))

    @property
    def num_supervised(self) -> int:
        """Return the number of tokens of all answers."""
        return sum(mask.count(1) for mask in self.masks)

    @property
    def num_answers(self) -> int:
        """Return the number of answers of all samples; each has a prompt before it."""
        return sum(mask.count(b"\0\1") for mask in self.masks)

    def split(self, share: float) -> tuple[Collected, Collected]:
        """Split the samples: a share of the conversations is for validation, the rest for training.

        The hash of a conversation decides, so that no conversation is on both sides, today or
        tomorrow. Where the share would leave one side empty, the conversation with the next hash
        goes there.

        Raises:
            UserError: there is a share, and no second conversation to give.
        """
        if not share or not self.hashes:
            return self, Collected()
        least, most = min(self.hashes), max(self.hashes)
        if least == most:
            raise UserError(
                f"The validation share is {share:g}, and all {len(self)} samples are of one "
                "conversation; expected two or more, one for validation. Add conversations, or "
                "leave --validation and --validation-share out. Nothing was written."
            )
        limit = min(max(round(share * 2**64), least + 1), most)
        train, validation = Collected(), Collected()
        for ids, mask, hash in zip(self.tokens, self.masks, self.hashes, strict=True):
            (validation if hash < limit else train)._append(ids, mask, hash)
        return train, validation

    def write(self, path: Path, metadata: dict[str, Any]) -> None:
        """Write a file that `ResponseDataset.load` reads; it appears whole or not at all.

        Raises:
            UserError: the disk is full.
        """
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        advice = "No part of it was kept. Make room, then run the same command again."
        try:
            with needing_room(path, advice):
                if path.suffix == ".safetensors":
                    write_store(partial, self._dataset(), metadata)
                else:
                    with partial.open("w", encoding="utf-8") as lines:
                        for ids, mask in zip(self.tokens, self.masks, strict=True):
                            lines.write(json.dumps(row_of(ids.tolist(), mask)) + "\n")
                    write_json(side_file(path), metadata)
                put_in_place(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _dataset(self) -> ResponseDataset:
        lens = torch.tensor([0, *map(len, self.tokens)])
        tokens, mask = bytearray(b"".join(self.tokens)), bytearray(b"".join(self.masks))
        return ResponseDataset(
            torch.frombuffer(tokens, dtype=torch.int32) if tokens else torch.tensor([]).int(),
            lens.cumsum(0),
            torch.frombuffer(mask, dtype=torch.bool) if mask else torch.tensor([]).bool(),
        )


def prepare(
    sources: Sequence[Path],
    maker: SampleMaker,
    limits: Limits,
    fingerprint: str,
    *,
    needs_thinking: bool = False,
    lm_head: str | None = None,
    cipher: Any = None,
) -> tuple[Collected, Collected, PrepareSummary]:
    """Return the samples of files for training and for validation, and counts.

    Args:
        sources: .jsonl, .parquet or .safetensors, or folders (`peagle.data.readers`).
        fingerprint: the tokenizer's hash (`tokenizer_sha256`); files with another are refused.
        needs_thinking: refuse conversations, because their template has a thinking mode and none
            was chosen.
        lm_head: `lm_head_sha256` of the target; recorded traffic of another target is refused.
        cipher: reads encrypted records (`peagle.data.recorded`).

    Raises:
        UserError: a file is not usable or of another tokenizer or target, a token is outside the
            vocabulary, no sample is left, or there is no second conversation for validation.
    """
    collected, report = Collected(), PrepareSummary()
    seen: set[bytes] = set()
    origins = []
    for source in sources:
        records, metadata = read_data(source, cipher)
        origins.append(answer_origins(metadata))
        check_tokenizer(source, metadata, fingerprint)
        for record in records:
            report.records += 1
            check_tokenizer(record.where, record.data, fingerprint)
            check_recorded_target(record, lm_head)
            if "prompt_token_ids" in record.data or "input_ids" in record.data:
                if (
                    "tokenizer_sha256" not in {*metadata, *record.data}
                    and str(source) not in report.unknown_tokenizer
                ):
                    report.unknown_tokenizer.append(str(source))
            elif needs_thinking:
                require_no_rendering(record, maker)
            for made in maker.samples(record):
                if isinstance(made, Dropped):
                    report.drop(made, record.where)
                    continue
                check_ids(made.ids, record.where, limits)
                answers = list(kept_answers(made, record.where, limits, seen, report))
                if answers:
                    kept = Sample.of(made.ids, answers, made.group)
                    collected.add(kept, record.data.get("temperature"))
    train, validation = collected.split(limits.validation_share)
    report.origins = joined_origins(origins)
    report.samples, report.validation_samples = len(train), len(validation)
    report.answers, report.validation_answers = train.num_answers, validation.num_answers
    report.tokens, report.supervised = train.num_tokens, train.num_supervised
    if not report.samples:
        raise UserError(
            f"None of {report.records} records became a sample for training: "
            f"{'; '.join(report.reasons()) or 'the files are empty'}. Nothing was written."
        )
    return train, validation, report


def require_no_rendering(record: Record, maker: SampleMaker) -> None:
    """Refuse a conversation whose template has a thinking mode that nobody chose.

    Raises:
        UserError: the record is one.
    """
    if record.fault is None and maker.renders(record):
        raise UserError(
            f"{record.where} is a conversation, and the chat template has a thinking mode; "
            "say with --thinking or --no-thinking in which the head will serve."
        )


def check_recorded_target(record: Record, lm_head: str | None) -> None:
    """Refuse a record of a server that had another target.

    Args:
        lm_head: as for `prepare`; None compares nothing.

    Raises:
        UserError: it had.
    """
    theirs = record.data.get("lm_head_sha256")
    if None not in (theirs, lm_head) and theirs != lm_head:
        raise UserError(
            f"{record.where} was recorded from another target (lm_head {str(theirs)[:12]}..., that "
            f"of --target is {str(lm_head)[:12]}...); name the target that was served."
        )


def check_ids(ids: list[int], where: str, limits: Limits) -> None:
    """Refuse token ids outside the vocabulary.

    Raises:
        UserError: naming one.
    """
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < limits.vocab_size:
            raise UserError(
                f"{where} holds token id {token}; the target's vocabulary is 0 to "
                f"{limits.vocab_size - 1}. The tokens must come from this target."
            )


def kept_answers(
    sample: Sample, where: str, limits: Limits, seen: set[bytes], report: PrepareSummary
) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of the answers that are new and within the limits; report the others.

    `seen` gets a digest of each: of the answer, its prompt, and the border between them.
    """
    ids, digest, hashed = array("i", sample.ids), hashlib.sha256(), 0
    for begin, end in sample.answers:
        if isinstance(kept_end := _cut(begin, end, limits), Dropped):
            report.drop(kept_end, where)
            continue
        digest.update(ids[hashed:kept_end].tobytes())
        hashed = kept_end
        own = digest.copy()
        own.update(begin.to_bytes(8, "little"))
        if (key := own.digest()[:16]) in seen:
            report.duplicates += 1
            continue
        seen.add(key)
        report.truncated += kept_end < end
        yield begin, kept_end


def _cut(begin: int, end: int, limits: Limits) -> int | Dropped:
    """Return where an answer ends within the length limit, or say why it is left out."""
    if not begin:
        return Dropped("empty prompt")
    if end - begin < MIN_RESPONSE:
        return Dropped(f"response of less than {MIN_RESPONSE} tokens")
    if end > limits.max_length and not limits.truncate:
        return Dropped(f"longer than {limits.max_length} tokens")
    if limits.max_length - begin < MIN_RESPONSE:
        return Dropped(f"prompt leaves no room for a response within {limits.max_length} tokens")
    return min(end, limits.max_length)
