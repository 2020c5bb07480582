"""Prepare training data: check, cut, deduplicate and split tokenised conversations."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peagle.data.dataset import check_tokenizer, read_data
from peagle.data.readers import STORE_KEY, DropCounts, Dropped, side_file
from peagle.data.samples import Sample, SampleMaker
from peagle.errors import UserError
from peagle.models.checkpoint.files import save_tensors, write_json

LEAST_RESPONSE = 2  # a shorter one has no token to draft


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that samples must keep.

    Attributes:
        vocab_size: vocabulary of the target; ids end before it.
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
class PrepareSummary(DropCounts):
    """Counts of what became of the records.

    Attributes:
        records: read.
        samples, tokens, supervised: written for training.
        validation_samples: written for validation.
        truncated: samples that were cut at the length limit, as far as they are written.
        duplicates: samples left out since an equal one was there.
        unknown_tokenizer: files of token ids that do not say which tokenizer made them.
    """

    records: int = 0
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    validation_samples: int = 0
    truncated: int = 0
    duplicates: int = 0
    unknown_tokenizer: list[str] = field(default_factory=list)


class Collected:
    """Samples as flat tokens, each with a hash of its conversation (64 bits)."""

    def __init__(self) -> None:
        self.tokens, self.lens, self.prompt_lens = array("i"), array("q"), array("q")
        self.hashes = array("Q")

    def add(self, sample: Sample) -> None:
        """Put a sample behind the others."""
        digest = hashlib.sha256(sample.group.encode()).digest()
        number = int.from_bytes(digest[:8])
        self._add([*sample.prompt, *sample.response], len(sample.prompt), number)

    def _add(self, ids: Sequence[int], prompt_len: int, hash: int) -> None:
        self.tokens.extend(ids)
        self.lens.append(len(ids))
        self.prompt_lens.append(prompt_len)
        self.hashes.append(hash)

    def __iter__(self) -> Iterator[tuple[array[int], int, int]]:
        """Token ids, length of the prompt, and hash of each sample."""
        begin = 0
        for length, prompt_len, hash in zip(self.lens, self.prompt_lens, self.hashes, strict=True):
            yield self.tokens[begin : begin + length], prompt_len, hash
            begin += length

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
        for ids, prompt_len, hash in self:
            (validation if hash < limit else train)._add(ids, prompt_len, hash)
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
                    for ids, size, _ in self:
                        row = {"prompt_token_ids": ids[:size].tolist()}
                        row["response_token_ids"] = ids[size:].tolist()
                        lines.write(json.dumps(row) + "\n")
                write_json(side_file(path), metadata)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def prepare(
    sources: Sequence[Path],
    maker: SampleMaker,
    limits: Limits,
    fingerprint: str,
    *,
    needs_thinking: bool = False,
) -> tuple[Collected, Collected, PrepareSummary]:
    """Return the samples of files for training and for validation, and counts.

    Args:
        sources: .jsonl, .parquet or .safetensors, or folders (`peagle.data.readers`).
        fingerprint: the tokenizer's hash (`tokenizer_sha256`); files with another are refused.
        needs_thinking: refuse conversations, because their template has a thinking mode and none
            was chosen.

    Raises:
        UserError: a file is not usable or was made with another tokenizer, a token is outside the
            vocabulary, no sample is left, or there is no second conversation for validation.
    """
    collected, report = Collected(), PrepareSummary()
    seen: set[bytes] = set()
    for source in sources:
        records, metadata = read_data(source)
        check_tokenizer(source, metadata, fingerprint)
        for record in records:
            report.records += 1
            if "prompt_token_ids" in record.data or "input_ids" in record.data:
                if (
                    "tokenizer_sha256" not in metadata
                    and str(source) not in report.unknown_tokenizer
                ):
                    report.unknown_tokenizer.append(str(source))
            elif needs_thinking and maker.renders(record):
                raise UserError(
                    f"{record.where} is a conversation, and the chat template has a thinking mode; "
                    "say with --thinking or --no-thinking in which the head will serve."
                )
            for made in maker.samples(record):
                kept = _within_limits(made, record.where, limits)
                if isinstance(kept, Dropped):
                    report.drop(kept, record.where)
                    continue
                assert isinstance(made, Sample)
                ids = array("i", [len(kept.prompt), *kept.prompt, *kept.response])
                digest = hashlib.sha256(ids.tobytes()).digest()[:16]
                if digest in seen:
                    report.duplicates += 1
                    continue
                seen.add(digest)
                report.truncated += len(kept.response) < len(made.response)
                collected.add(kept)
    train, validation = collected.split(limits.validation_share)
    report.samples, report.validation_samples = len(train.lens), len(validation.lens)
    report.tokens = len(train.tokens)
    report.supervised = report.tokens - sum(train.prompt_lens)
    if not report.samples:
        raise UserError(
            f"None of {report.records} records became a sample for training: "
            f"{'; '.join(report.reasons()) or 'the files are empty'}. Nothing was written."
        )
    return train, validation, report


def _within_limits(sample: Sample | Dropped, where: str, limits: Limits) -> Sample | Dropped:
    """Cut a sample at the length limit, or say why it is left out.

    Raises:
        UserError: a token is outside the vocabulary.
    """
    if isinstance(sample, Dropped):
        return sample
    ids = sample.prompt + sample.response
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < limits.vocab_size:
            raise UserError(
                f"{where} holds token id {token}; the target's vocabulary is 0 to "
                f"{limits.vocab_size - 1}. The tokens must come from this target."
            )
    if not sample.prompt:
        return Dropped("empty prompt")
    if len(sample.response) < LEAST_RESPONSE:
        return Dropped(f"response of less than {LEAST_RESPONSE} tokens")
    if len(ids) > limits.max_length and not limits.truncate:
        return Dropped(f"longer than {limits.max_length} tokens")
    if limits.max_length - len(sample.prompt) < LEAST_RESPONSE:
        return Dropped(f"prompt leaves no room for a response within {limits.max_length} tokens")
    response = sample.response[: limits.max_length - len(sample.prompt)]
    return Sample(sample.prompt, response, sample.group)
