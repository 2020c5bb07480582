"""What a file of training data holds: counts, lengths, what is supervised, duplicates."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.data.dataset import read_store
from peagle.data.prepare import LEAST_RESPONSE
from peagle.data.readers import read_records, read_side
from peagle.data.samples import Dropped, Sample, SampleMaker
from peagle.errors import UserError

PERCENTILES = (50, 90, 99)
MOST_FREQUENT = (1000, 4000, 8000, 16000, 32000, 64000)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of sequences in tokens, by nearest rank.

    Attributes:
        p50, p90, p99, longest: so long are at most 50%, 90%, 99% and all.
    """

    p50: int
    p90: int
    p99: int
    longest: int

    @classmethod
    def of(cls, lens: Sequence[int]) -> Lengths:
        """Of at least one length."""
        ranked = sorted(lens)
        p50, p90, p99 = (ranked[math.ceil(p * len(ranked) / 100) - 1] for p in PERCENTILES)
        return cls(p50, p90, p99, ranked[-1])


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a file holds.

    Attributes:
        samples: sequences, as training reads them.
        tokens, supervised: of all sequences, and of their responses.
        length, prompt_length, response_length: of the sequences and their parts.
        duplicates: sequences that are equal to an earlier one.
        too_short: sequences that training leaves out: no prompt, or less than two response tokens.
        dropped: what is no sequence, by reason.
        distinct: different tokens among the supervised.
        largest_id: largest token id.
        coverage: share of the supervised tokens that the most frequent k of them make up, by k:
            what a draft vocabulary of that size can draft.
        shown: some of the sequences.
        metadata: where the file says it comes from.
    """

    samples: int
    tokens: int
    supervised: int
    length: Lengths
    prompt_length: Lengths
    response_length: Lengths
    duplicates: int
    too_short: int
    dropped: dict[str, int]
    distinct: int
    largest_id: int
    coverage: dict[int, float]
    shown: list[Sample]
    metadata: dict[str, Any]

    @property
    def supervised_share(self) -> float:
        """Share of the tokens that are supervised."""
        return self.supervised / self.tokens if self.tokens else 0.0


def inspect_data(
    path: Path, maker: SampleMaker, *, num_shown: int = 3, fingerprint: str | None = None
) -> Inspection:
    """Read a whole file that `peagle train` or `peagle data prepare` reads.

    Args:
        path: .jsonl, .parquet or .safetensors, or a folder (`peagle.data.tables`).
        maker: makes samples of records.
        num_shown: sequences to give back, spread over the file.
        fingerprint: of the tokenizer at hand; a file of another one is refused.

    Raises:
        UserError: the file is missing, damaged, empty, or of another tokenizer.
    """
    lens, prompt_lens = array("q"), array("q")
    counts: Counter[int] = Counter()
    dropped: Counter[str] = Counter()
    seen: set[bytes] = set()
    largest, shown = -1, _Spread(num_shown)
    for sample in _samples(path, maker, dropped):
        ids = sample.prompt + sample.response
        if ids and min(ids) < 0:
            raise UserError(f"{str(path)!r} holds token id {min(ids)}; expected none below 0.")
        lens.append(len(ids))
        prompt_lens.append(len(sample.prompt))
        counts.update(sample.response)
        seen.add(hashlib.sha256(repr((len(sample.prompt), ids)).encode()).digest()[:16])
        largest = max(largest, *ids) if ids else largest
        shown.add(sample)
    if not lens:
        raise UserError(f"{str(path)!r} holds no sequence{_why(dropped)}.")
    metadata = read_store(path)[1] if path.suffix == ".safetensors" else read_side(path)
    theirs = metadata.get("tokenizer_sha256")
    if fingerprint is not None and theirs is not None and theirs != fingerprint:
        raise UserError(
            f"{str(path)!r} was made with another tokenizer ({str(theirs)[:12]}...) than the "
            f"target's ({fingerprint[:12]}...); name the target that it was made for."
        )
    responses = [length - prompt for length, prompt in zip(lens, prompt_lens, strict=True)]
    pairs = zip(prompt_lens, responses, strict=True)
    return Inspection(
        samples=len(lens),
        tokens=sum(lens),
        supervised=sum(responses),
        length=Lengths.of(lens),
        prompt_length=Lengths.of(prompt_lens),
        response_length=Lengths.of(responses),
        duplicates=len(lens) - len(seen),
        too_short=sum(prompt < 1 or response < LEAST_RESPONSE for prompt, response in pairs),
        dropped=dict(dropped),
        distinct=len(counts),
        largest_id=largest,
        coverage=_coverage(counts),
        shown=shown.samples,
        metadata=metadata,
    )


class _Spread:
    """Keeps every 2^i-th of what passes, so that what is kept is spread over the whole."""

    def __init__(self, number: int) -> None:
        self._number, self._stride, self._passed = number, 1, 0
        self._kept: list[Sample] = []

    def add(self, sample: Sample) -> None:
        if self._number and self._passed % self._stride == 0:
            self._kept.append(sample)
            if len(self._kept) == 2 * self._number:
                self._kept = self._kept[::2]
                self._stride *= 2
        self._passed += 1

    @property
    def samples(self) -> list[Sample]:
        count = min(self._number, len(self._kept))
        return [self._kept[i * len(self._kept) // count] for i in range(count)]


def _samples(path: Path, maker: SampleMaker, dropped: Counter[str]) -> Iterator[Sample]:
    if path.suffix == ".safetensors":
        dataset, _ = read_store(path)
        borders = dataset.start_loc.tolist()
        for index, prompt_len in enumerate(dataset.prompt_lens.tolist()):
            ids = dataset.tokens[borders[index] : borders[index + 1]].tolist()
            yield Sample(ids[:prompt_len], ids[prompt_len:])
        return
    for record in read_records(path):
        for made in maker.samples(record):
            if isinstance(made, Dropped):
                dropped[made.reason] += 1
            else:
                yield made


def _why(dropped: Counter[str]) -> str:
    return ": " + ", ".join(f"{n} × {reason}" for reason, n in dropped.items()) if dropped else ""


def _coverage(counts: Counter[int]) -> dict[int, float]:
    """Shares of the most frequent k tokens, for the k below the number of different ones."""
    total = counts.total()
    ranked = sorted(counts.values(), reverse=True)
    sizes = [k for k in MOST_FREQUENT if k < len(ranked)] + [len(ranked)]
    return {k: sum(ranked[:k]) / total for k in sizes} if total else {}
