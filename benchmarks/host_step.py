"""What the host does in a decode step of many sequences, without the device: microseconds.

    python benchmarks/host_step.py --sequences 64 --k 7

The engine's own loop (`Pipeline`, `LLMEngine`, `Requests`, detokenisation) over steps whose reports
are made up: every step accepts some of K drafts, tokens are those of real text. While such a step
is read the device runs the next one: what stands here must be less than a step of the device.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence as SequenceOf
from statistics import median
from typing import Any

from common import run_guarded

from peagle.config import SamplingParams
from peagle.engine.depth import DecodeSeconds
from peagle.engine.sequence import Sequence
from peagle.engine.step.graph_runner import RowDrafts, RowTokens
from peagle.engine.step.pipeline import Pipeline
from peagle.environment import environment
from peagle.evaluation.prompts import load_prompt_set
from peagle.llm import LLM


class MadeUpSteps:
    """Stands for `GraphRunner`: reports without a device.

    Args:
        text: tokens that outputs are made of.
        k: K.

    Attributes:
        draws: whether drafts are drawn.
        last_k, last_seconds: K and no times.
    """

    draws = False

    def __init__(self, text: list[int], k: int) -> None:
        self._text, self._k = text, k
        self._random = random.Random(0)
        self._sequences: list[Sequence] = []
        self.last_k, self.last_seconds = k, DecodeSeconds()

    def obstacle(self, sequences: SequenceOf[Sequence]) -> str | None:
        return None

    def can_mix(self, sequences: SequenceOf[Sequence], num_tokens: int) -> bool:
        return False

    def is_tight(self, num_sequences: int) -> bool:
        return True

    def needs_results(self, sequences: SequenceOf[Sequence]) -> bool:
        return False

    def launch(
        self,
        sequences: SequenceOf[Sequence],
        meanwhile: None,
        run_prompts: None,
        before_drafts: None,
    ) -> MadeUpSteps:
        self._sequences = list(sequences)
        return self

    def clear(self) -> None: ...

    def go_on(self, meanwhile: None) -> MadeUpSteps:
        return self

    @property
    def sequences(self) -> list[Sequence]:
        return self._sequences

    def read(self, flight: MadeUpSteps) -> list[RowTokens]:
        return [self._tokens() for _ in self._sequences]

    def read_drafts(self, flight: MadeUpSteps, *, follows: bool) -> list[RowDrafts]:
        return [RowDrafts(self._some(self._k)) for _ in self._sequences]

    def _tokens(self) -> RowTokens:
        accepted = self._random.randrange(self._k + 1)
        return RowTokens(self._k, accepted, self._some(accepted + 1))

    def _some(self, count: int) -> list[int]:
        at = self._random.randrange(len(self._text) - 20)
        return self._text[at : at + count]


def main() -> None:
    """Run it."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--sequences", type=int, default=64, help="that decode together (64)")
    options.add_argument("--k", type=int, default=7, help="drafts a step (7)")
    options.add_argument("--steps", type=int, default=300, help="timed (300)")
    args = options.parse_args()
    llm = LLM(
        speculative_config={"method": "ngram", "num_speculative_tokens": args.k},
        max_num_seqs=args.sequences,
    )
    engine, requests = llm.engine, llm.requests
    text = llm.tokenizer(load_prompt_set("humaneval", 1)[0].text * 8)["input_ids"]
    params = SamplingParams(max_tokens=(args.steps + 12) * (args.k + 1), ignore_eos=True)
    for index in range(args.sequences):
        requests.add(index, "def f(x):\n", params)
    while any(s.is_prefilling for s in engine.scheduler.running) or engine.scheduler.waiting:
        requests.step()
    steps = MadeUpSteps(text, args.k)
    taking: Any = engine._append_tokens, engine._set_drafts, engine._prepare_grammars
    device: Any = steps
    engine._pipeline = Pipeline(device, engine.scheduler, *taking)
    tokens, seconds = 0, list[float]()
    for number in range(args.steps + 5):
        start = time.perf_counter()
        chunks = requests.step()
        if number >= 5:  # the first ones start the pipeline and warm up
            seconds.append(time.perf_counter() - start)
            tokens += sum(len(chunk.token_ids) for chunk in chunks)
    found = {
        "sequences": args.sequences,
        "k": args.k,
        "tokens_a_step": round(tokens / args.steps, 1),
        "step_us": round(median(seconds) * 1e6, 1),
        "sequence_us": round(median(seconds) * 1e6 / args.sequences, 2),
        "environment": environment(llm.target.device),
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    run_guarded(main)
