"""Measure what the head of the second pair accepts, in its own mode and in the others.

    python recipes/second_pair/record.py [tests/fixtures/pair2]

Writes `acceptance.json` into the folder: greedy, float32, over its first prompts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from peagle import LLM, SamplingParams
from peagle.chat import render_chat
from peagle.engine import SpeculationStats

FIXTURE = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "pair2"
MODES = ("thinking", "not thinking", "raw")
K, MAX_TOKENS, NUM_PROMPTS = 5, 96, 32


def load(folder: Path) -> LLM:
    """The pair in a folder, in float32."""
    config = {"model": str(folder / "peagle"), "num_speculative_tokens": K}
    return LLM(folder / "target", speculative_config=config, dtype="float32", max_num_seqs=16)


def measure(llm: LLM, prompts: list[str], mode: str) -> SpeculationStats:
    """Counters pooled over greedy answers to the prompts."""
    if mode == "raw":
        token_ids = [llm.tokenizer.encode(f"{prompt}\n") for prompt in prompts]
    else:
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        thinking = mode == "thinking"
        token_ids = [render_chat(llm.tokenizer, one, thinking=thinking) for one in messages]
    pooled = SpeculationStats()
    for output in llm.generate(token_ids, SamplingParams(max_tokens=MAX_TOKENS)):
        pooled.add(output.stats)
    return pooled


def prompts_of(folder: Path) -> list[str]:
    """The prompts that are measured."""
    lines = (folder / "prompts.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    return [json.loads(line)["prompt"] for line in lines]


def record(folder: Path) -> None:
    """Measure all modes and write them down."""
    llm, acceptance = load(folder), {}
    for mode in MODES:
        stats = measure(llm, prompts_of(folder), mode)
        acceptance[mode] = {
            "acceptance_length": round(stats.acceptance_length, 3),
            "unconditional": [round(share, 3) for share in stats.acceptance_per_pos],
        }
        print(f"{mode}: {acceptance[mode]}")
    facts = {"k": K, "temperature": 0.0, "dtype": "float32", "num_prompts": NUM_PROMPTS}
    facts |= {"max_tokens": MAX_TOKENS, "acceptance": acceptance}
    (folder / "acceptance.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]) if len(sys.argv) > 1 else FIXTURE)
