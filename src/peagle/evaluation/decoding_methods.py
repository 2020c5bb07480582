"""The decoding methods of a comparison."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from peagle.config import CandidateTrees, SpeculativeConfig
from peagle.config.checks import named_values
from peagle.errors import UserError
from peagle.model_folder import read_json
from peagle.models.head_json import is_parallel

PLAIN, NGRAM = "plain", "ngram"


@dataclass(frozen=True, slots=True)
class DecodingMethod:
    """A decoding method, with its name in tables."""

    name: str
    source: str = ""  # folder or hub id of the head as the user gave it; "" without a head
    folder: str = ""  # the place where the head was found; "" before that
    trained_length: int | None = None  # tokens of the longest sequence of training, if known
    trained_depth: int | None = None  # K that the head was trained for, if known
    trees: CandidateTrees | None = None  # shape of the head's trees; None drafts chains
    follows_k: bool = False  # whether the trees are as deep as the K to measure, up to their depth
    has_copies: bool = False  # whether copies of the text may join the trees

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "ngram" (prompt lookup) or "NAME=MODEL" (a head's folder or hub id).

        Raises:
            UserError: the text is neither.
        """
        if text == NGRAM:
            return cls(text)
        option = "--method: "
        ((name, source),) = named_values(
            [text], "ngram or NAME=MODEL", "peagle=./head", option
        ).items()
        if name in (PLAIN, NGRAM):
            raise UserError(f"{option}{text!r} calls a head {name!r}; give it another name.")
        return cls(name, source)

    @property
    def is_parallel(self) -> bool:
        """Return whether the head is a P-EAGLE head, by its config.json."""
        return is_parallel(read_json(Path(self.folder or self.source) / "config.json"))

    def with_trees(
        self, trees: CandidateTrees, *, follows_k: bool = False, has_copies: bool = False
    ) -> Self:
        """Return the method with trees, under a name of their width and size.

        Trees that copies of the text may join are named "…-text".
        """
        name = f"{self.name}-tree-w{trees.num_parallel_trees}-n{trees.max_nodes}"
        name += "-text" if has_copies else ""
        return replace(self, name=name, trees=trees, follows_k=follows_k, has_copies=has_copies)

    def depths(self, ks: Sequence[int]) -> Sequence[int]:
        """Return the K to measure: `ks` for chains, the depth of the trees for trees."""
        if self.trees is None:
            return ks
        most = self.trees.prediction_depth
        return sorted({min(k, most) for k in ks}) if self.follows_k else (most,)

    def trees_at(self, k: int) -> CandidateTrees | None:
        """Return the shape of the trees of depth k; None: the method drafts chains."""
        return self.trees and replace(self.trees, prediction_depth=k)

    def config(self, k: int, **options: Any) -> SpeculativeConfig | None:
        """Return the configuration that drafts k tokens a step; None for plain decoding.

        Further fields of SpeculativeConfig in `options` apply to heads alone, `drawn_chains_from`
        to trees of P-EAGLE heads.

        Raises:
            UserError: K or an option is out of range.
        """
        if self.name == PLAIN:
            return None
        if not self.source:
            return SpeculativeConfig(method="ngram", num_speculative_tokens=k)
        model = self.folder or self.source
        if self.trees is None or not self.is_parallel:
            options.pop("drawn_chains_from", None)
        if self.trees is not None:
            trees = self.trees_at(k)
            options |= {"parallel_drafting_spec": trees, "prompt_lookup": self.has_copies}
        return SpeculativeConfig(model=model, num_speculative_tokens=k, **options)
