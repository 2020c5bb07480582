"""Statistics of a file of training data: counts, lengths, supervised tokens, duplicates."""

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from peagle.data.dataset import check_tokenizer, read_data
from peagle.data.limits import MIN_RESPONSE
from peagle.data.readers import DropCounts, Dropped
from peagle.data.samples import Sample, SampleMaker
from peagle.errors import UserError

_MOST_FREQUENT = (1000, 4000, 8000, 16000, 32000, 64000)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens, by nearest rank: at most 50%, 90%, 99% and all sequences are so long."""

    p50: int
    p90: int
    p99: int
    longest: int

    @classmethod
    def of(cls, lens: Sequence[int]) -> Self:
        """Return the percentiles of at least one length."""
        ranked = sorted(lens)
        return cls(*(ranked[math.ceil(p * len(ranked) / 100) - 1] for p in (50, 90, 99, 100)))


@dataclass(frozen=True, slots=True)
class Inspection:
    """Statistics of a file.

    Attributes:
        samples: sequences, as training reads them.
        answers: answers in them; a sequence may have several.
        tokens, supervised: tokens of all sequences, and of their answers.
        length, prompt_length, response_length: lengths of the sequences, of what comes before each
            answer, and of the answers.
        duplicates: sequences that are equal to an earlier one.
        too_short: answers that training leaves out: no prompt, or less than two tokens.
        dropped, details: records that are no sequence, by reason; the first case of each.
        distinct: different tokens among the supervised.
        largest_id: largest token id.
        coverage: share of the supervised tokens that the most frequent k tokens make up, by k:
            the share that a draft vocabulary of that size can draft.
        shown: some of the sequences.
        metadata: provenance of the file.
    """

    samples: int
    answers: int
    tokens: int
    supervised: int
    length: Lengths
    prompt_length: Lengths
    response_length: Lengths
    duplicates: int
    too_short: int
    dropped: dict[str, int]
    details: dict[str, str]
    distinct: int
    largest_id: int
    coverage: dict[int, float]
    shown: list[Sample]
    metadata: dict[str, Any]

    @property
    def supervised_share(self) -> float:
        """Return the share of the tokens that are supervised."""
        return self.supervised / self.tokens if self.tokens else 0.0


def inspect_data(
    path: Path, maker: SampleMaker, *, num_shown: int = 3, fingerprint: str | None = None
) -> Inspection:
    """Read a whole file that `peagle train` or `peagle data prepare` reads.

    `num_shown` sequences, spread over the file, are given back. A file of another tokenizer than
    `fingerprint`'s is refused.

    Raises:
        UserError: the file is missing, damaged, empty, or of another tokenizer.
    """
    lens, prompt_lens, responses = array("q"), array("q"), array("q")
    counts: Counter[int] = Counter()
    dropped = DropCounts()
    seen: set[bytes] = set()
    largest, kept, stride = -1, list[Sample](), 1
    records, metadata = read_data(path)
    found = ((record, made) for record in records for made in maker.samples(record))
    for record, sample in found:
        if isinstance(sample, Dropped):
            dropped.drop(sample, record.where)
            continue
        ids, answers = sample.ids, sample.answers
        if ids and min(ids) < 0:
            raise UserError(f"{str(path)!r} holds token id {min(ids)}; expected none below 0.")
        # Every stride-th sample is kept, and the stride doubles when there are too many.
        if num_shown and len(lens) % stride == 0:
            kept.append(sample)
            if len(kept) == 2 * num_shown:
                kept, stride = kept[::2], 2 * stride
        lens.append(len(ids))
        for begin, end in answers:
            prompt_lens.append(begin)
            responses.append(end - begin)
            counts.update(ids[begin:end])
        seen.add(hashlib.sha256(repr((answers, ids)).encode()).digest()[:16])
        largest = max(largest, *ids) if ids else largest
    if not lens:
        why = "; ".join(dropped.reasons())
        raise UserError(f"{str(path)!r} holds no sequence{why and ': ' + why}.")
    if fingerprint is not None:
        check_tokenizer(path, metadata, fingerprint)
    pairs = zip(prompt_lens, responses, strict=True)
    ranked, total = sorted(counts.values(), reverse=True), counts.total()
    sizes = [k for k in _MOST_FREQUENT if k < len(ranked)] + [len(ranked)]
    shown = min(num_shown, len(kept))
    return Inspection(
        samples=len(lens),
        answers=len(responses),
        tokens=sum(lens),
        supervised=sum(responses),
        length=Lengths.of(lens),
        prompt_length=Lengths.of(prompt_lens),
        response_length=Lengths.of(responses),
        duplicates=len(lens) - len(seen),
        too_short=sum(prompt < 1 or response < MIN_RESPONSE for prompt, response in pairs),
        dropped=dict(dropped.dropped),
        details=dropped.details,
        distinct=len(counts),
        largest_id=largest,
        coverage={k: sum(ranked[:k]) / total for k in sizes} if total else {},
        shown=[kept[i * len(kept) // shown] for i in range(shown)],
        metadata=metadata,
    )
