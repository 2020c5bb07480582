"""Three clients on one engine: each has its own stream, all are decoded together.

    python examples/async_streams.py

A line is what one step gave one client; their lines take turns.
"""

import asyncio

from peagle import AsyncLLM, SamplingParams
from peagle.bundled import BUNDLED_PEAGLE

REQUESTS = {
    "greedy": ("def fibonacci(n):\n", SamplingParams(max_tokens=24)),
    "sampled": ("class Stack:\n", SamplingParams(max_tokens=24, temperature=0.8, seed=1)),
    "short": ("import os\n", SamplingParams(max_tokens=8)),
}


async def client(llm: AsyncLLM, name: str, prompt: str, params: SamplingParams) -> str:
    async for chunk in llm.stream(prompt, params):
        print(f"{name:>8} | +{len(chunk.token_ids)} {chunk.text!r}")
        if chunk.output is not None:
            output = chunk.output
    seconds = output.time_to_first_token_s
    return (
        f"{name:>8} | {len(output.token_ids)} tokens, the first after {seconds:.2f} s; "
        f"acceptance length {output.stats.acceptance_length:.2f} at K=7"
    )


async def main() -> None:
    head = {"model": str(BUNDLED_PEAGLE), "num_speculative_tokens": 7}
    async with AsyncLLM(speculative_config=head) as llm:
        # A client that leaves its stream early, or is cancelled, takes its request with it.
        clients = (client(llm, name, *request) for name, request in REQUESTS.items())
        print("\n" + "\n".join(await asyncio.gather(*clients)))


asyncio.run(main())
