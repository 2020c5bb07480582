"""Make the bundled code model write JSON that fits a schema, with drafting on.

    pip install '.[grammar]'
    python examples/structured.py

The model was never taught to fill in forms: what it says is nonsense, its shape is right.
"""

import json

from peagle import LLM, SamplingParams, StructuredOutput
from peagle.bundled import BUNDLED_PEAGLE

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z_]{3,20}$"},
        "arguments": {"type": "array", "items": {"enum": ["x", "y", "n"]}, "maxItems": 3},
        "returns": {"enum": ["int", "str", "list", "None"]},
        "is_pure": {"type": "boolean"},
    },
    "required": ["name", "arguments", "returns", "is_pure"],
    "additionalProperties": False,
}
PROMPTS = ["def largest(x, y):\n    ...\n\n# The same as JSON:\n", "# A function as JSON:\n"]

llm = LLM(speculative_config={"model": str(BUNDLED_PEAGLE), "num_speculative_tokens": 7})

# The grammar masks the target's choices and the drafts alike: none is wasted on what cannot come.
# Other shapes: StructuredOutput.json_object(), .regex(...), .ebnf(...).
# Without `compact` a small model fills the room that JSON leaves for blanks.
structure = StructuredOutput.json_schema(SCHEMA, compact=True)
params = SamplingParams(max_tokens=96, structured_output=structure)

for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
    function = json.loads(output.text)
    print(f"{prompt}{output.text}\n")
    print(f"--- a function {function['name']!r} that returns {function['returns']}")
    print(
        f"--- {len(output.token_ids)} tokens; acceptance length "
        f"{output.stats.acceptance_length:.2f} at K=7, temperature 0\n"
    )
