"""What the same engine gives without a server, and whether a served text may differ from it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.cli.setup import quiet_libraries
from peagle.evaluation.certify.reference import Reference, first_difference, load_reference
from peagle.evaluation.prompts import load_prompt_set

LENGTHS = (8, 16, 24, 32, 64)


@dataclass(frozen=True, slots=True)
class Job:
    """A request: a prompt and how much of an answer."""

    name: str
    prompt: str
    max_tokens: int


def prompts(limit: int | None = None) -> list[str]:
    """Texts of the bundled HumanEval prompts."""
    return [prompt.text for prompt in load_prompt_set("humaneval", limit)]


def mixed_jobs(count: int, seed: int = 0) -> list[Job]:
    """So many requests over all prompts, of mixed lengths, in a mixed order."""
    texts = prompts()
    rounds = ((i % len(texts), LENGTHS[(i + i // len(texts)) % len(LENGTHS)]) for i in range(count))
    jobs = [Job(f"{number}/{length}", texts[number], length) for number, length in rounds]
    random.Random(seed).shuffle(jobs)
    return jobs


def make_llm(threads: int = 1, **options: Any) -> LLM:
    """The bundled pair, as `peagle serve` runs it."""
    quiet_libraries()
    torch.set_num_threads(threads)
    draft = {"model": str(BUNDLED_PEAGLE), "num_speculative_tokens": 7}
    return LLM(speculative_config=draft, **options)


class Offline:
    """Offline outputs, by job, and the judge of served texts.

    Args:
        llm: greedy.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._outputs: dict[Job, Any] = {}

    def run(self, jobs: Sequence[Job]) -> None:
        """Complete what was not completed yet."""
        new = [job for job in dict.fromkeys(jobs) if job not in self._outputs]
        params = [SamplingParams(max_tokens=job.max_tokens) for job in new]
        outputs = self.llm.generate([job.prompt for job in new], params)
        self._outputs |= dict(zip(new, outputs))

    def text(self, job: Job) -> str:
        """The offline text."""
        return self._outputs[job].text

    def verdict(self, job: Job, text: str, finish_reason: str | None) -> str:
        """Whether a served text is the "same", another one after a "near-tie", or "different".

        A near-tie is where rounding alone explains the first difference. In float32 a batch of
        another shape moves logits by about 1e-6; where the two best of them are as close, as
        transformers computes them, either token may come.
        """
        expected = self._outputs[job]
        if (text, finish_reason) == (expected.text, expected.finish_reason):
            return "same"
        token_ids = self._as_far_as_shared(text, expected.token_ids)
        prompt_1T = torch.tensor([expected.prompt_token_ids + expected.token_ids])
        with torch.inference_mode():
            logits_TV = self._reference(prompt_1T).logits[0, len(expected.prompt_token_ids) - 1 :]
        if len(token_ids) == len(expected.token_ids):
            return "different"
        # The served token is the other one of the two best, if the text goes on with it.
        best = logits_TV[len(token_ids)].topk(2).indices.tolist()
        others = [token for token in best if token != expected.token_ids[len(token_ids)]]
        fitting = [t for t in others if text.startswith(self._decode([*token_ids, t]))]
        if not fitting:
            return "different"
        reference = Reference(expected.token_ids, logits_TV[:-1])
        difference = first_difference(job.name, [*token_ids, fitting[0]], reference)
        is_near_tie = difference is not None and difference.is_near_tie
        return "near-tie" if is_near_tie else "different"

    def _as_far_as_shared(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """The longest start of the tokens with which the text begins."""
        length = 0
        while length < len(token_ids) and text.startswith(self._decode(token_ids[: length + 1])):
            length += 1
        return list(token_ids[:length])

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: Any = self.llm.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        # A character may be cut in two.
        return text.rstrip("\ufffd")

    @cached_property
    def _reference(self) -> Any:
        return load_reference(str(BUNDLED_TARGET), torch.float32)
