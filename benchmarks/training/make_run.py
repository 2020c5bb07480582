"""A training run with random stored features: `peagle train` at the shapes of a target, without it.

    python benchmarks/training/make_run.py --output /tmp/run --length 8192
    peagle train /tmp/run/head.toml --format json

Writes a target's config, tokenizer, embedding and lm_head with random numbers, responses of random
tokens, all of one length, their features and hidden states as `peagle data features` stores them,
and head.toml. What is measured is the whole command: reading, copies, step, clipping, optimizer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from peagle.data.dataset import ResponseDataset
from peagle.data.feature_writer import FeatureWriter
from peagle.data.features import StoreFacts
from peagle.models.target import default_aux_layer_ids
from peagle.models.target_ends import TargetEnds

sys.path.insert(0, str(Path(__file__).parents[1]))
from shapes import SHAPES, make_tokenizer

CONFIG = """\
target = "target"
output = "out"

[head]
num_layers = {layers}
draft_vocab_size = {draft}

[data]
train = "responses.safetensors"
features = "features"
max_length = {length}
batch_tokens = {batch_tokens}

[method]
depth = 8
cod_ratio = 0.7
cod_floor = 0.2

[optimizer]
steps = {steps}
learning_rate = 1e-5

[run]
log_every = {log_every}
save_every = 1000000
segments = {segments}
"""


class RandomBody:
    """Random hidden states in place of a target's layers; its ends are real."""

    def __init__(self, ends: TargetEnds, device: torch.device) -> None:
        self._ends, self.device = ends, device
        self._width = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ends, name)

    def tap_aux(self, layer_ids: tuple[int, ...]) -> None:
        self._width = len(layer_ids) * self._ends.hidden_size

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Any) -> tuple[Tensor, Tensor]:
        sizes = (self._ends.hidden_size, self._width)
        hidden, features = (
            torch.randn(len(tokens_T), size, device=self.device, dtype=torch.bfloat16)
            for size in sizes
        )
        return hidden, features


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--batch-tokens", type=int, help="default: one sequence")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--log-every", type=int, default=5)
    parser.add_argument("--segments", default="1")
    options = parser.parse_args()
    shape, output = SHAPES[options.shape], options.output
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    target = output / "target"
    target.mkdir(parents=True)
    config = AutoConfig.for_model(
        shape.model_type, **shape.config, tie_word_embeddings=False, eos_token_id=0
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(target)
    size = (config.vocab_size, config.hidden_size)
    make_tokenizer(config.vocab_size).save_pretrained(target)
    ends = {
        name: torch.randn(size, device=device, dtype=torch.bfloat16).mul_(0.02).cpu()
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    save_file(ends, target / "model.safetensors", metadata={"format": "pt"})

    count, length = options.sequences, options.length
    tokens = torch.randint(1, shape.draft_vocab_size, (count * length,), dtype=torch.int32)
    start_loc = torch.arange(count + 1) * length
    prompt_lens = torch.ones(count, dtype=torch.int64)
    save_file(
        {"tokens": tokens, "sequence_start_loc": start_loc, "prompt_lens": prompt_lens},
        output / "responses.safetensors",
    )
    dataset = ResponseDataset.of_prompts(tokens, start_loc, prompt_lens)
    body: Any = RandomBody(TargetEnds.load(target, dtype=torch.bfloat16, device=device), device)
    layers = default_aux_layer_ids(config.num_hidden_layers)
    facts = StoreFacts.of(dataset, body, layers, "bf16", "bfloat16", 1 << 30)
    FeatureWriter(output / "features", dataset, facts).write(body, batch_tokens=length)
    text = CONFIG.format(
        layers=shape.peagle_layers,
        draft=shape.draft_vocab_size,
        length=length,
        batch_tokens=options.batch_tokens or length,
        steps=options.steps,
        log_every=options.log_every,
        segments=f'"{options.segments}"' if options.segments == "auto" else options.segments,
    )
    (output / "head.toml").write_text(text)
    print(f"peagle train {output / 'head.toml'} --format json")


if __name__ == "__main__":
    main()
