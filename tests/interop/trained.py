"""Heads trained for a minute with `peagle train`, kept below build/ for the next time."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_TARGET
from peagle.evaluation.prompts import load_prompt_set, read_prompts
from tests.interop.heads import SavedHead, longer_attention, longer_heads

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "interop"
PAIR2 = ROOT / "tests" / "fixtures" / "pair2"
# vLLM's attention on a CPU has no kernel for the 16 dimensions that the second pair's heads have.
HEAD_DIM = 32
CODE = "heldout_code"


@dataclass(frozen=True)
class Pair:
    """A target, and prompts of the kind that its heads are for.

    Attributes:
        prompts: a file, or the name of a prompt set.
        thinking: mode of its chat template; None for a target without one.
        num_joined: prompts of the file that are one text.
    """

    target: Path
    prompts: Path | str
    num_prompts: int
    thinking: bool | None = None
    num_joined: int = 1

    def texts(self, count: int) -> list[str]:
        each = self.num_joined
        read = load_prompt_set if isinstance(self.prompts, str) else read_prompts
        texts = [prompt.text for prompt in read(self.prompts)[: count * each]]
        return ["\n\n".join(texts[at : at + each]) for at in range(0, len(texts), each)]


def make_pair2(folder: Path) -> Path:
    """The second pair's target with longer attention heads."""
    source = PAIR2 / "target"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    tensors = {n: t.float() for n, t in load_file(source / "model.safetensors").items()}
    longer = longer_attention(tensors, config["head_dim"], HEAD_DIM)
    config |= {"head_dim": HEAD_DIM, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(longer, folder / "model.safetensors", {"format": "pt"})
    return folder


def pair2_head(folder: Path) -> Path:
    """The second pair's own head, for its target with longer attention heads."""
    return longer_heads(SavedHead.read(PAIR2 / "peagle"), HEAD_DIM).write(folder)


PAIRS = {
    "llama": Pair(BUNDLED_TARGET, CODE, 40),
    # Contexts beyond the longest sequences of training.
    "llama-long": Pair(BUNDLED_TARGET, CODE, 8, num_joined=4),
    "qwen3": Pair(BUILD / "qwen3" / "target", PAIR2 / "prompts.jsonl", 64, thinking=True),
}


def pair_of(name: str) -> Pair:
    """A pair whose target is there."""
    if name == "qwen3":
        make_pair2(PAIRS[name].target)
    return PAIRS[name]


@dataclass(frozen=True)
class Recipe:
    """The training of a head: its pair, steps, and the table [head] of its TOML file."""

    pair: str
    steps: int
    learning_rate: float
    head: Mapping[str, Any] = field(default_factory=dict)


RECIPES = {
    "llama-1": Recipe("llama", 50, 5e-3, {"num_layers": 1, "init": str(BUNDLED_EAGLE3)}),
    "qwen3-1": Recipe("qwen3", 50, 1e-2, {"num_layers": 1, "intermediate_size": 80}),
    "qwen3-4": Recipe("qwen3", 50, 1e-2, {"num_layers": 4, "intermediate_size": 80}),
    # Narrower than its target, Qwen3-style layers, and the other convention of the residual.
    "qwen3-narrow": Recipe(
        "qwen3",
        50,
        1e-2,
        {
            "num_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 80,
            "qk_norm": True,
            "norm_before_residual": True,
        },
    ),
}

_TOML = """\
target = {target}
output = "run"
[head]
{head}
[data]
train = {train}
max_length = 512
batch_tokens = 2048
length_multiple = 32
[method]
name = "peagle"
depth = 6
cod_floor = 0.4
[optimizer]
name = "muon"
steps = {steps}
learning_rate = {learning_rate}
warmup_ratio = 0.02
[run]
seed = 2
target_dtype = "float32"
"""


def trained(name: str) -> Path:
    """The folder of a trained head; trains it unless that was done before."""
    recipe = RECIPES[name]
    pair, data = pair_of(recipe.pair), _prepared(recipe.pair)
    toml = _TOML.format(
        target=json.dumps(str(pair.target)),
        head="\n".join(f"{key} = {json.dumps(value)}" for key, value in recipe.head.items()),
        train=json.dumps(str(data)),
        steps=recipe.steps,
        learning_rate=recipe.learning_rate,
    )
    folder = BUILD / f"{name}-{_digest(toml.encode())}"
    head = folder / "run" / "head"
    if not (head / "model.safetensors").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "head.toml").write_text(toml)
        _peagle("train", folder / "head.toml")
    return head


def _prepared(name: str) -> Path:
    """The target's answers, as training data."""
    pair = pair_of(name)
    texts = pair.texts(pair.num_prompts)
    weights = (pair.target / "model.safetensors").read_bytes()
    sizes = ["--max-new-tokens", 96, "--max-model-len", 768, "--kv-cache-gib", 0.1]
    digest = _digest(weights, json.dumps([texts, sizes]).encode())
    folder = BUILD / f"{name}-{digest}"
    done = folder / "train.safetensors"
    if not done.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        prompts, responses = folder / "prompts.jsonl", folder / "responses.jsonl"
        prompts.write_text("".join(json.dumps(text) + "\n" for text in texts))
        of_pair = ["--target", pair.target, *(["--thinking"] if pair.thinking else [])]
        _peagle("data", "regenerate", prompts, *of_pair, "-o", responses, *sizes)
        _peagle("data", "prepare", responses, *of_pair, "-o", done, "--max-length", 512)
    return done


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _peagle(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "peagle", *map(str, arguments)], check=True)
