"""The draft vocabulary: the tokens that a head can draft, and how much of the text they cover.

A small vocabulary makes the head's last layer small. A target token outside it is a sure rejection,
so coverage bounds acceptance from above.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from peagle.data.dataset import ResponseDataset
from peagle.errors import UserError
from peagle.models.drafter import Drafter
from peagle.models.end_tokens import eos_token_ids
from peagle.models.target_facts import TargetFacts

# Shares of the training responses for which the report says how large a vocabulary they take.
COVERAGES = (0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class Coverage:
    """The number of response tokens, and how many of them are in the draft vocabulary."""

    num_tokens: int
    num_inside: int

    @property
    def share(self) -> float:
        """Return the tokens inside over all tokens."""
        return self.num_inside / max(1, self.num_tokens)

    def to_json(self) -> dict[str, Any]:
        """Return the coverage as a JSON object."""
        return asdict(self) | {"share": self.share}


@dataclass(frozen=True, slots=True)
class VocabularyReport:
    """Coverage of the responses by a draft vocabulary.

    Attributes:
        size, vocab_size: tokens of the head and of the target.
        num_unseen: tokens of the head that the training responses never use.
        training, validation: coverage of the responses.
        sizes: number of most frequent tokens that make up each share of the training responses.
    """

    size: int
    vocab_size: int
    num_unseen: int
    training: Coverage
    validation: Coverage | None
    sizes: dict[float, int]

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "size": self.size,
            "vocab_size": self.vocab_size,
            "num_unseen": self.num_unseen,
            "training": self.training.to_json(),
            "validation": self.validation.to_json() if self.validation else None,
            "size_for_share": {f"{share:g}": size for share, size in self.sizes.items()},
        }

    def __str__(self) -> str:
        covered = f"{_percent(self.training.share)} of the training responses"
        if self.validation is not None:
            covered += f", {_percent(self.validation.share)} of the validation"
        sizes = ", ".join(f"{_percent(share)}: {size:,}" for share, size in self.sizes.items())
        return (
            f"draft vocabulary: {self.size:,} of {self.vocab_size:,} tokens cover {covered} "
            f"(most frequent tokens for {sizes})"
        )


def always_kept(
    target: TargetFacts,
    tokenizer: PreTrainedTokenizerBase,
    *,
    special_tokens: bool,
    mask_token_id: int | None,
) -> set[int]:
    """Return the tokens of every draft vocabulary, however rare: the tokens that end the text.

    `special_tokens` adds all special tokens but the mask token, which is never drafted.
    """
    ids = {*eos_token_ids(target.name, tokenizer)}
    if special_tokens:
        added = tokenizer.added_tokens_decoder
        ids |= {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        ids.discard(mask_token_id)
    return {i for i in ids if i < target.vocab_size}


def choose_draft_vocabulary(counts: Tensor, size: int, always: Collection[int] = ()) -> Tensor:
    """Return the `size` most frequent tokens, `always` included; ascending ids, int64 [size].

    `counts` [V] says how often each token occurs. Of equally frequent tokens the lower id is kept.

    Raises:
        UserError: `always` does not fit.
    """
    if len(always) > size:
        raise UserError(
            f"head.draft_vocab_size is {size}; expected room for the {len(always)} tokens that are "
            "kept in any case (ends of text, special tokens)."
        )
    rank = counts.cpu().clone()
    rank[list(always)] = rank.max() + 1
    return rank.argsort(descending=True, stable=True)[:size].sort().values


def vocabulary_report(
    drafter: Drafter, training: ResponseDataset, validation: ResponseDataset | None = None
) -> VocabularyReport | None:
    """Measure the coverage of the head's vocabulary; None where it is the target's."""
    config = drafter.config
    if not config.is_pruned:
        return None
    ids = drafter.target_ids().cpu()
    counts = training.response_token_counts(config.vocab_size)
    others = validation.response_token_counts(config.vocab_size) if validation else None
    return VocabularyReport(
        size=config.draft_vocab_size,
        vocab_size=config.vocab_size,
        num_unseen=int((counts[ids] == 0).sum()),
        training=_coverage(counts, ids),
        validation=_coverage(others, ids) if others is not None else None,
        sizes=_sizes(counts),
    )


def _coverage(counts: Tensor, ids: Tensor) -> Coverage:
    return Coverage(num_tokens=int(counts.sum()), num_inside=int(counts[ids].sum()))


def _sizes(counts: Tensor) -> dict[float, int]:
    covered = counts.sort(descending=True).values.cumsum(0).double() / max(1, int(counts.sum()))
    wanted = torch.tensor(COVERAGES, dtype=torch.float64)
    return dict(zip(COVERAGES, (torch.searchsorted(covered, wanted) + 1).tolist(), strict=True))


def _percent(share: float) -> str:
    """Return a share as three figures, never rounded up to all."""
    return f"{int(share * 10_000) / 100:g}%"
