"""The latency objective of a service. Reading it imports no torch."""

import re
from dataclasses import dataclass
from typing import Self

from peagle.errors import UserError
from peagle.results import RunFigures

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class LatencyObjective:
    """The most milliseconds to the first token and between tokens (None is any) at a percentile.

    The percentile, 50, 90 or 99, is over requests for TTFT and over tokens for ITL.
    """

    ttft_ms: float | None
    itl_ms: float | None
    percentile: int = 99

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "ttft=500ms,itl=50ms@p90"; a part may be missing, and "ttft=1s" is allowed.

        Raises:
            UserError: the text does not have this form.
        """
        bounds, at, percentile = text.replace(" ", "").lower().partition("@")
        parts = [re.fullmatch(r"(ttft|itl)=(\d+\.?\d*|\.\d+)(ms|s)", p) for p in bounds.split(",")]
        found = {p[1]: float(p[2]) * (1e3 if p[3] == "s" else 1.0) for p in parts if p}
        is_known = not at or percentile in {f"p{p}" for p in PERCENTILES}
        if len(found) < len(parts) or not all(found.values()) or not is_known:
            raise UserError(
                f"The objective is {text!r}; expected milliseconds and one of p50, p90 and p99, "
                "like ttft=500ms,itl=50ms@p90."
            )
        return cls(found.get("ttft"), found.get("itl"), int(percentile[1:]) if at else 99)

    def is_met(self, figures: RunFigures) -> bool:
        """Return whether these figures keep the objective; an unknown figure does not."""
        bounds = ((figures.ttft_s, self.ttft_ms), (figures.itl_s, self.itl_ms))
        values = [(getattr(own, f"p{self.percentile}"), most) for own, most in bounds if most]
        return all(value is not None and value * 1e3 <= most for value, most in values)
