"""Options of a certificate, which can be checked without torch."""

import math
from dataclasses import dataclass
from typing import Any

from peagle.errors import UserError


@dataclass(frozen=True, slots=True)
class Options:
    """The numbers of prompts, tokens and samples in the tests.

    Raises:
        UserError: a number is out of range.
    """

    prompts: int = 8  # prompts of the greedy part
    matrix_prompts: int = 3  # prompts of each case of the matrix; 0 leaves it out
    prompt_set: str = "humaneval"
    max_new_tokens: int = 48  # tokens of each greedy output
    samples: int = 1000  # outputs of each prompt in the sampled part; 0 leaves it out
    sampled_prompts: int = 2
    sampled_tokens: int = 3  # first tokens whose joint distribution is tested
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    draft_samplings: tuple[str, ...] = ("argmax", "probabilistic")  # for heads alone
    alpha: float = 0.001  # probability of a false alarm of the whole sampled part
    seed: int = 0

    def __post_init__(self) -> None:
        _require_least(
            self, prompts=1, matrix_prompts=0, max_new_tokens=8, samples=0, sampled_prompts=1,
            sampled_tokens=2, seed=0,
        )  # fmt: skip
        if not 0 < self.alpha < 1:
            raise UserError(f"alpha is {self.alpha}; expected a number between 0 and 1.")
        if self.temperature <= 0:
            raise UserError(
                f"The certificate's temperature is {self.temperature}; expected more than 0: "
                "greedy outputs are tested by themselves."
            )


@dataclass(frozen=True, slots=True)
class ServedOptions:
    """The numbers of prompts, tokens and samples in the tests of a server.

    Raises:
        UserError: a number is out of range.
    """

    prompts: int = 8  # short ones, and as many long ones, on each route
    prompt_set: str = "humaneval"
    max_new_tokens: int = 48  # tokens of each greedy answer
    asked_again: int = 2  # positions of each greedy answer that are asked again
    long_characters: int = 4000  # of a long prompt
    samples: int = 1000  # sampled answers of each prompt; 0 leaves them out
    sampled_prompts: int = 2
    alpha: float = 0.005  # of all sampled tests, by chi-square; simulated runs stay below 1%
    concurrency: int = 16  # other requests in flight under load
    # Largest gap of log-probabilities that rounding explains; bfloat16's, as in `near_tie_bound`.
    tolerance: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        _require_least(self, prompts=1, max_new_tokens=4, samples=0, concurrency=1, seed=0)
        if not 0 < self.tolerance < math.inf:
            raise UserError(
                f"--tolerance is {self.tolerance:g}; expected a gap above 0, like 0.25 for a model "
                "in bfloat16 or 0.001 for one in float32."
            )


def _require_least(options: Any, **least: int) -> None:
    for name, number in least.items():
        if getattr(options, name) < number:
            raise UserError(
                f"{name} of the certificate is {getattr(options, name)}; expected at least "
                f"{number}."
            )
