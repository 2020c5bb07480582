"""Ways to decode that stand side by side in a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peagle.config import SpeculativeConfig
from peagle.errors import UserError

PLAIN, NGRAM = "plain", "ngram"


@dataclass(frozen=True, slots=True)
class DecodingMethod:
    """One way to decode.

    Attributes:
        name: in tables.
        source: folder or hub id of the head; "" for plain decoding and prompt lookup.
    """

    name: str
    source: str = ""

    @classmethod
    def parse(cls, text: str) -> DecodingMethod:
        """Read "plain", "ngram" (prompt lookup) or "NAME=FOLDER" (a head, or its hub id).

        Raises:
            UserError: it is none of these.
        """
        name, equals, source = text.partition("=")
        if not equals and name in (PLAIN, NGRAM):
            return cls(name)
        if equals and name and source and name not in (PLAIN, NGRAM):
            return cls(name, source)
        raise UserError(
            f"The method is {text!r}; expected plain, ngram, or NAME=FOLDER with the folder or hub "
            "id of a head, like peagle=./head."
        )

    @property
    def is_plain(self) -> bool:
        """Nothing is drafted."""
        return self.name == PLAIN

    def config(self, k: int, **options: Any) -> SpeculativeConfig | None:
        """How an engine drafts so many tokens a step; None for plain decoding.

        Args:
            k: num_speculative_tokens.
            **options: further fields of SpeculativeConfig, for heads.

        Raises:
            UserError: K or an option is out of range.
        """
        if self.is_plain:
            return None
        if not self.source:
            return SpeculativeConfig(method="ngram", num_speculative_tokens=k)
        return SpeculativeConfig(model=self.source, num_speculative_tokens=k, **options)
