"""Ask a running `peagle serve` through the official client: pip install openai

    peagle serve &
    python examples/openai_client.py [http://127.0.0.1:8000/v1]

Any OpenAI client does; base_url is all that changes. The key is that of the server, if it has one.
"""

import asyncio
import os
import sys

from openai import AsyncOpenAI, OpenAI

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
KEY = os.environ.get("PEAGLE_API_KEY", "none")
PROMPT = "def fibonacci(n):\n"

# What peagle adds to the API goes into extra_body: here, to be told what became of the drafts.
REPORT = {"speculation": {"report": True}}


def drafting(usage) -> str:
    stats = usage.speculation
    return (
        f"--- {usage.completion_tokens} tokens, {stats['num_accepted_tokens']} of them drafted; "
        f"acceptance length {stats['acceptance_length']:.2f}\n"
    )


def complete(client: OpenAI, model: str) -> None:
    print("=== one answer")
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=48, temperature=0, extra_body=REPORT
    )
    print(PROMPT + answer.choices[0].text)
    print(drafting(answer.usage))


def stream(client: OpenAI, model: str) -> None:
    print("=== as it comes, accepted drafts in [brackets]")
    chunks = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=48, temperature=0, stream=True, extra_body=REPORT
    )
    for chunk in chunks:
        for text, is_accepted in getattr(chunk, "speculation", {}).get("tokens", ()):
            print(f"[{text}]" if is_accepted else text, end="", flush=True)
        usage = chunk.usage
    print(f"\n{drafting(usage)}")


async def stream_several(model: str) -> None:
    print("=== several at once, with and without drafts")
    async with AsyncOpenAI(base_url=BASE_URL, api_key=KEY) as client:

        async def one(name: str, **speculation: int) -> str:
            chunks = await client.completions.create(
                model=model, prompt=PROMPT, max_tokens=48, temperature=0, stream=True,
                extra_body={"speculation": {"report": True, **speculation}},
            )  # fmt: skip
            steps, text = 0, ""
            async for chunk in chunks:
                steps += bool(chunk.choices)
                text += chunk.choices[0].text if chunk.choices else ""
            print(f"{name:>8}: {steps} steps for {len(text)} characters")
            return text

        drafted, plain = await asyncio.gather(one("drafts"), one("none", num_speculative_tokens=0))
        print(f"--- the texts are {'equal' if drafted == plain else 'not equal'}")


with OpenAI(base_url=BASE_URL, api_key=KEY) as client:
    model = client.models.list().data[0].id
    complete(client, model)
    stream(client, model)
asyncio.run(stream_several(model))
