"""What a head's files say, and what was found wrong with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from peagle.doctor.findings import Cause, Check, Status
from peagle.doctor.head import Reading
from peagle.models.target import TargetModel


@dataclass(slots=True)
class HeadFiles:
    """What the files of a head say, as far as they are understood.

    Attributes:
        folder: of the head.
        target: what it drafts for.
        data: config.json, mended.
        tensors: by canonical name, mended.
        reading: how the mended head is to be run.
        mask_ids: what the keys for the mask token say, without repeats.
        window: a sliding window that config.json sets.
        kept_ids: the tokens that t2d keeps, where they are as many as the draft vocabulary.
        loads: nothing had to be mended that keeps a runtime from loading the head.
        lost_weights: some have to be exported again; no repair makes up for them.
        checks, causes: what was found.
    """

    folder: Path
    target: TargetModel
    data: dict[str, Any]
    tensors: dict[str, Tensor]
    reading: Reading = field(default_factory=Reading)
    mask_ids: list[int] = field(default_factory=list)
    window: int | None = None
    kept_ids: Tensor | None = None
    loads: bool = True
    lost_weights: bool = False
    checks: list[Check] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)

    def check(self, name: str, status: Status, text: str) -> None:
        """Note a check."""
        self.checks.append(Check(name, status, text))

    def blame(self, cause: str, evidence: str, remedy: str) -> None:
        """Note a check that failed and its cause."""
        self.causes.append(Cause(cause, "head", evidence, remedy))

    @property
    def layers(self) -> dict[str, Any]:
        """The keys of the layers: nested in the speculators style."""
        return self.data.get("transformer_layer_config") or self.data
