"""What the demo found, as one JSON object."""

from __future__ import annotations

from typing import Any

from peagle.cli.demo_view import PLAIN
from peagle.config import SamplingParams
from peagle.environment import environment
from peagle.evaluation.acceptance import acceptance_figures
from peagle.evaluation.compare import Measurement
from peagle.evaluation.prompts import Prompt
from peagle.models.target import TargetModel


def report(
    target: TargetModel,
    prompts: list[Prompt],
    params: SamplingParams,
    num_speculative_tokens: int,
    results: dict[str, Measurement],
) -> dict[str, Any]:
    """All results of a demo.

    Args:
        target: the model.
        prompts: what was completed.
        params: how.
        num_speculative_tokens: K.
        results: a measurement a method; "plain" is what the others are compared with.
    """
    plain = results[PLAIN]
    differences = {
        name: [
            prompt.id
            for prompt, ours, expected in zip(
                prompts, result.token_ids, plain.token_ids, strict=True
            )
            if ours != expected
        ]
        for name, result in results.items()
    }
    return {
        "prompt_set": "humaneval",
        "num_prompts": len(prompts),
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "num_speculative_tokens": num_speculative_tokens,
        "dtype": str(target.dtype).removeprefix("torch."),
        "concurrency": 1,
        "environment": environment(target.device),
        "methods": [
            {
                "name": name,
                "num_speculative_tokens": 0 if name == PLAIN else num_speculative_tokens,
                "seconds": result.seconds,
                "tokens_per_s": result.tokens_per_s,
                "speed_up": result.tokens_per_s / plain.tokens_per_s,
                **acceptance_figures(result.completions),
                "different_outputs": differences[name],
            }
            for name, result in results.items()
        ],
        "identical_outputs": not any(differences.values()),
        "num_different_outputs": len({id for ids in differences.values() for id in ids}),
        "outputs": [
            {
                "id": prompt.id,
                "prompt": prompt.text,
                "text": completion.output.text,
                "token_ids": completion.output.token_ids,
                "finish_reason": completion.output.finish_reason,
            }
            for prompt, completion in zip(prompts, plain.completions, strict=True)
        ],
    }
