"""Conversations and responses to tokenised training data: checked, cut, deduplicated, split."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peagle.data.dataset import check_tokenizer, read_store
from peagle.data.readers import (
    STORE_KEY,
    read_records,
    read_side,
    side_file,
)
from peagle.data.samples import Dropped, Sample, SampleMaker
from peagle.errors import UserError
from peagle.models.checkpoint.files import save_tensors

SUFFIXES = (".safetensors", ".jsonl")
LEAST_RESPONSE = 2  # a shorter one has no token to draft


@dataclass(frozen=True, slots=True)
class Limits:
    """What samples must fulfil.

    Attributes:
        vocab_size: of the target; ids end before it.
        max_length: most tokens of a sample.
        truncate: cut longer samples there; otherwise they are dropped.
        validation_share: share of the conversations that goes to the validation file; above 0, each
            of the two files gets at least one conversation.
    """

    vocab_size: int
    max_length: int = 8192
    truncate: bool = True
    validation_share: float = 0.0

    def __post_init__(self) -> None:
        if self.max_length < LEAST_RESPONSE + 1:
            raise UserError(
                f"The length limit is {self.max_length}; expected at least {LEAST_RESPONSE + 1}."
            )
        if not 0 <= self.validation_share < 1:
            raise UserError(
                f"The validation share is {self.validation_share:g}; expected at least 0 and less "
                "than 1."
            )


@dataclass(slots=True)
class PrepareSummary:
    """What became of the records.

    Attributes:
        records: read.
        samples, tokens, supervised: written for training.
        validation_samples: written for validation.
        truncated: samples that were cut at the length limit, as far as they are written.
        duplicates: samples left out since an equal one was there.
        dropped: how many were left out, by reason.
        details: the first case of each reason, where there is more to say.
        unknown_tokenizer: files of token ids that do not say which tokenizer made them.
    """

    records: int = 0
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    validation_samples: int = 0
    truncated: int = 0
    duplicates: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)
    unknown_tokenizer: list[str] = field(default_factory=list)

    def drop(self, why: Dropped, where: str) -> None:
        """Count a sample that is left out."""
        self.dropped[why.reason] += 1
        self.details.setdefault(why.reason, f"{where}: {why.detail}" if why.detail else where)


class Collected:
    """Samples as flat tokens, each with a hash of its conversation (64 bits)."""

    def __init__(self) -> None:
        self.tokens, self.lens, self.prompt_lens = array("i"), array("q"), array("q")
        self.hashes = array("Q")

    def add(self, sample: Sample) -> None:
        """Put a sample behind the others."""
        digest = hashlib.sha256(sample.group.encode()).digest()
        self._add([*sample.prompt, *sample.response], len(sample.prompt), _number(digest))

    def _add(self, ids: Sequence[int], prompt_len: int, hash: int) -> None:
        self.tokens.extend(ids)
        self.lens.append(len(ids))
        self.prompt_lens.append(prompt_len)
        self.hashes.append(hash)

    def split(self, share: float) -> tuple[Collected, Collected]:
        """Samples for training and for validation, the latter a share of the conversations.

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
                f"The validation share is {share:g}, and all {len(self.lens)} samples are of one "
                "conversation; expected two or more, one for validation. Add conversations, or "
                "leave --validation and --validation-share out. Nothing was written."
            )
        limit = min(max(round(share * 2**64), least + 1), most)
        train, validation = Collected(), Collected()
        begin = 0
        for length, prompt_len, hash in zip(self.lens, self.prompt_lens, self.hashes, strict=True):
            side = validation if hash < limit else train
            side._add(self.tokens[begin : begin + length], prompt_len, hash)
            begin += length
        return train, validation

    def write(self, path: Path, metadata: dict[str, Any]) -> None:
        """Write a file that `ResponseDataset.load` reads; it appears whole or not at all."""
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            if path.suffix == ".safetensors":
                start_loc = torch.nn.functional.pad(torch.tensor(self.lens).cumsum(0), (1, 0))
                tensors = {
                    "tokens": torch.tensor(self.tokens, dtype=torch.int32),
                    "sequence_start_loc": start_loc,
                    "prompt_lens": torch.tensor(self.prompt_lens, dtype=torch.int32),
                }
                save_tensors(partial, tensors, {STORE_KEY: json.dumps(metadata)})
            else:
                with partial.open("w", encoding="utf-8") as lines:
                    lines.writelines(json.dumps(row) + "\n" for row in self._rows())
                side_file(path).write_text(json.dumps(metadata, indent=2) + "\n")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _rows(self) -> Iterator[dict[str, list[int]]]:
        begin = 0
        for length, prompt_len in zip(self.lens, self.prompt_lens, strict=True):
            middle, end = begin + prompt_len, begin + length
            yield {
                "prompt_token_ids": self.tokens[begin:middle].tolist(),
                "response_token_ids": self.tokens[middle:end].tolist(),
            }
            begin = end


def prepare(
    sources: Sequence[Path],
    maker: SampleMaker,
    limits: Limits,
    fingerprint: str,
    *,
    needs_thinking: bool = False,
) -> tuple[Collected, Collected, PrepareSummary]:
    """Samples of files for training and for validation.

    Args:
        sources: .jsonl, .parquet or .safetensors, or folders (`peagle.data.tables`).
        maker: makes samples of records.
        limits: what they must fulfil.
        fingerprint: of the tokenizer (`tokenizer_sha256`); files that name another are refused.
        needs_thinking: refuse conversations, since their template has a thinking mode that nobody
            chose.

    Raises:
        UserError: a file is not usable or was made with another tokenizer, a token is outside the
            vocabulary, no sample is left, or there is no second conversation for validation.
    """
    collected, report = Collected(), PrepareSummary()
    seen: set[bytes] = set()
    for source in sources:
        for sample, where in _samples_of(source, maker, report, fingerprint, needs_thinking):
            kept = _checked(sample, where, limits, report)
            if kept is None:
                continue
            digest = _digest(kept)
            if digest in seen:
                report.duplicates += 1
                continue
            seen.add(digest)
            report.truncated += len(kept.response) < len(sample.response)
            collected.add(kept)
    train, validation = collected.split(limits.validation_share)
    report.samples, report.validation_samples = len(train.lens), len(validation.lens)
    report.tokens = len(train.tokens)
    report.supervised = report.tokens - sum(train.prompt_lens)
    if not report.samples:
        reasons = ", ".join(f"{count} × {reason}" for reason, count in report.dropped.items())
        raise UserError(
            f"None of {report.records} records became a sample for training: "
            f"{reasons or 'the files are empty'}. Nothing was written."
        )
    return train, validation, report


def _samples_of(
    source: Path, maker: SampleMaker, report: PrepareSummary, fingerprint: str, needs_thinking: bool
) -> Iterator[tuple[Sample, str]]:
    if source.suffix == ".safetensors":
        dataset, metadata = read_store(source)
        check_tokenizer(source, metadata, fingerprint)
        _note_unknown(source, metadata, report)
        borders = dataset.start_loc.tolist()
        for index, prompt_len in enumerate(dataset.prompt_lens.tolist()):
            report.records += 1
            ids = dataset.tokens[borders[index] : borders[index + 1]].tolist()
            prompt = ids[:prompt_len]
            where = f"{source}, sequence {index + 1}"
            yield Sample(prompt, ids[prompt_len:], json.dumps(prompt)), where
        return
    metadata = read_side(source)
    check_tokenizer(source, metadata, fingerprint)
    for record in read_records(source):
        report.records += 1
        if "prompt_token_ids" in record.data or "input_ids" in record.data:
            _note_unknown(source, metadata, report)
        elif needs_thinking and maker.renders(record):
            raise UserError(
                f"{record.where} is a conversation, and the chat template has a thinking mode; say "
                "with --thinking or --no-thinking in which the head will serve."
            )
        for made in maker.samples(record):
            if isinstance(made, Dropped):
                report.drop(made, record.where)
            else:
                yield made, record.where


def _note_unknown(source: Path, metadata: dict[str, Any], report: PrepareSummary) -> None:
    if "tokenizer_sha256" not in metadata and str(source) not in report.unknown_tokenizer:
        report.unknown_tokenizer.append(str(source))


def _checked(sample: Sample, where: str, limits: Limits, report: PrepareSummary) -> Sample | None:
    """The sample within the length limit, None if it is dropped.

    Raises:
        UserError: a token is outside the vocabulary.
    """
    ids = sample.prompt + sample.response
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < limits.vocab_size:
            raise UserError(
                f"{where} holds token id {token}; the target's vocabulary is 0 to "
                f"{limits.vocab_size - 1}. The tokens must come from this target."
            )
    reason = ""
    if not sample.prompt:
        reason = "empty prompt"
    elif len(sample.response) < LEAST_RESPONSE:
        reason = f"response of less than {LEAST_RESPONSE} tokens"
    elif len(ids) > limits.max_length and not limits.truncate:
        reason = f"longer than {limits.max_length} tokens"
    elif limits.max_length - len(sample.prompt) < LEAST_RESPONSE:
        reason = f"prompt leaves no room for a response within {limits.max_length} tokens"
    if reason:
        report.drop(Dropped(reason), where)
        return None
    response = sample.response[: limits.max_length - len(sample.prompt)]
    return Sample(sample.prompt, response, sample.group)


def _digest(sample: Sample) -> bytes:
    ids = array("i", [len(sample.prompt), *sample.prompt, *sample.response])
    return hashlib.sha256(ids.tobytes()).digest()[:16]


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8])
