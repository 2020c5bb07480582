"""Complete prompts with the bundled code model and its P-EAGLE head.

    python examples/offline.py

Nothing is downloaded. For models of your own, give LLM the folder of the target and, as "model",
the folder of its head.
"""

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_PEAGLE

PROMPTS = [
    "def fibonacci(n):\n",
    'def read_lines(path):\n    """Return the lines of a text file."""\n',
]

# The P-EAGLE head drafts 7 tokens in one pass; the target verifies them all in one pass of its own.
# Leave speculative_config out to decode plainly: the output is the same, only slower.
llm = LLM(speculative_config={"model": str(BUNDLED_PEAGLE), "num_speculative_tokens": 7})

# Greedy. temperature=0.7, top_p=0.9, seed=1 would sample, from the target's own distribution.
params = SamplingParams(max_tokens=64)

# All prompts are decoded together.
for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
    print(f"{prompt}{output.text}\n")
    print(
        f"--- {len(output.token_ids)} tokens, {output.finish_reason}; acceptance length "
        f"{output.stats.acceptance_length:.2f} at K=7, temperature 0\n"
    )

# Text can also be read while it grows: a chunk is what one step added.
for chunk in llm.stream("class Stack:\n", params):
    print(chunk.text, end="", flush=True)
print()
