"""`peagle data synthesize | regenerate | prepare | inspect | features`: the data of training."""

import typer
from typer.core import TyperCommand, TyperGroup

from peagle.cli.data_features import FEATURES_EXAMPLES, features
from peagle.cli.data_inspect import INSPECT_EXAMPLES, inspect
from peagle.cli.data_prepare import PREPARE_EXAMPLES, prepare
from peagle.cli.data_regenerate import REGENERATE_EXAMPLES, regenerate
from peagle.cli.data_synthesize import SYNTHESIZE_EXAMPLES, synthesize
from peagle.cli.main import CONTEXT, with_examples

EXAMPLES = """
No prompts? The target writes them:
  peagle data synthesize --target ./Qwen3-0.6B --count 20000 --output prompts.jsonl

From prompts to training data, and a look at it:
  peagle data regenerate prompts.jsonl --target ./Qwen3-0.6B --output responses.jsonl
  peagle data prepare responses.jsonl --target ./Qwen3-0.6B --output train.safetensors
  peagle data inspect train.safetensors --target ./Qwen3-0.6B

What the target says about it, stored once for all epochs:
  peagle data features train.safetensors --target ./Qwen3-0.6B --output features

More about each:
  peagle data prepare --help
"""


data = typer.Typer(
    cls=with_examples(TyperGroup, EXAMPLES),
    add_completion=False,
    context_settings=CONTEXT,
    help="Make, prepare and inspect training data.",
)
for _function, _examples in (
    (synthesize, SYNTHESIZE_EXAMPLES),
    (regenerate, REGENERATE_EXAMPLES),
    (prepare, PREPARE_EXAMPLES),
    (inspect, INSPECT_EXAMPLES),
    (features, FEATURES_EXAMPLES),
):
    data.command(cls=with_examples(TyperCommand, _examples))(_function)
