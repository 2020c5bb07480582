"""A conversation of two turns with the bundled code model, which was not trained to converse.

    python examples/chat.py

The bundled model has no chat template, so this example brings one; models made for conversations
have their own, and `chat_template` is left out.
"""

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_PEAGLE

TEMPLATE = """\
{%- for message in messages -%}
{{ '# ' + message.role + '\\n' + message.content + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '# assistant\\n' }}{%- endif -%}
"""

llm = LLM(speculative_config={"model": str(BUNDLED_PEAGLE), "num_speculative_tokens": 7})
params = SamplingParams(max_tokens=32)

messages = []
for question in ("def fibonacci(n):", "def factorial(n):"):
    messages = [*messages, {"role": "user", "content": question}]
    (turn,) = llm.chat(messages, params, chat_template=TEMPLATE)
    print(f"{question}\n{turn.answer}")
    print(f"--- acceptance length {turn.output.stats.acceptance_length:.2f} at K=7\n")
    messages = turn.messages  # with the answer, without its reasoning: the next turn goes on here
