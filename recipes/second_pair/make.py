"""Make the second pair: a tiny Qwen3 with a thinking mode, and its P-EAGLE head.

    python recipes/second_pair/make.py --corpus SHARED/corpus/python_peps.txt.xz

Text, tokenizer, target, its responses, head; results go to `build/pair2` and, with `--install`, to
`tests/fixtures/pair2`. `target.json` and `peagle.toml` have the sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "bundled_pair")]

from record import FIXTURE, record  # noqa: E402
from text import END_THINK, THINK, Answers, answers, questions  # noqa: E402
from tokenizer import train_tokenizer  # noqa: E402

from peagle.training.optimizers import Muon  # noqa: E402

START, END = "<|im_start|>", "<|im_end|>"
MARKERS = [START, END, THINK, END_THINK]
BUILD = ROOT / "build" / "pair2"
IGNORED = -100
SECOND_TURNS = 0.2


def make_tokenizer(said: Answers, asked: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A BPE of answers and questions, with the markers and the template of a conversation."""
    texts = [*said.thinking, *said.quick, *said.raw, *asked]
    texts = [text.replace(THINK, "").replace(END_THINK, "") for text in texts]
    tokenizer = train_tokenizer(texts, vocab_size - len(MARKERS))
    tokenizer.add_tokens([START, END], special_tokens=True)
    # As in Qwen3: part of the text that the model writes, not hidden from who reads it.
    tokenizer.add_tokens([THINK, END_THINK])
    tokenizer.eos_token = END
    tokenizer.model_max_length = 1024
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text().rstrip("\n")
    return tokenizer


Document = tuple[list[int], list[int]]  # what is given, and what is learned


class Conversations:
    """Documents without end, every one with a new question.

    Args:
        said: the answers.
        asked: the questions.
        tokenizer: of both.
        seed: chooses the modes, and who asked something before.
    """

    def __init__(
        self, said: Answers, asked: Iterator[str], tokenizer: PreTrainedTokenizerFast, seed: int
    ) -> None:
        self._said, self._asked, self._tokenizer = said, asked, tokenizer
        self._end = tokenizer.convert_tokens_to_ids(END)
        self._rng = random.Random(seed)

    def document(self) -> Document:
        """Half of them are in thinking mode."""
        question, mode = next(self._asked), self._rng.randrange(4)
        prompt = f"{question}\n" if mode == 0 else self._prompt(question, mode > 1)
        choices = (self._said.raw, self._said.quick)[mode] if mode < 2 else self._said.thinking
        answer = choices[self._tokenizer.encode(question)[-1] % len(choices)]
        return self._tokenizer.encode(prompt), [*self._tokenizer.encode(answer), self._end]

    def _prompt(self, question: str, thinking: bool) -> str:
        messages = [{"role": "user", "content": question}]
        if self._rng.random() < SECOND_TURNS:
            before = next(self._asked), self._rng.choice(self._said.quick)
            roles = ("user", "assistant")
            turns = zip(roles, before, strict=True)
            messages = [{"role": r, "content": c} for r, c in turns] + messages
        options = {"add_generation_prompt": True, "enable_thinking": thinking}
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **options)


def batch(source: Conversations, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [rows, longest] of some documents; padding stands last."""
    docs = [source.document() for _ in range(rows)]
    tokens = [torch.tensor([*given, *learned]) for given, learned in docs]
    labels = [torch.tensor([IGNORED] * len(given) + learned) for given, learned in docs]
    return pad_sequence(tokens, True), pad_sequence(labels, True, IGNORED)


def train(source: Conversations, steps: int, rows: int, lr: float, seed: int) -> Qwen3ForCausalLM:
    """The target, trained from random weights; padding stands last, where nobody sees it."""
    torch.manual_seed(seed)
    config = Qwen3Config(**json.loads((HERE / "target.json").read_text()))
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    scale = 1 / math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(scale)
            layer.mlp.down_proj.weight.mul_(scale)
    hidden = [p for p in model.model.layers.parameters() if p.ndim == 2]
    ids = set(map(id, hidden))
    others = [p for p in model.parameters() if id(p) not in ids]
    optimizers = [Muon(hidden, lr=lr), torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95))]
    begun = time.monotonic()
    for step in range(steps):
        tokens_BT, labels_BT = batch(source, rows)
        logits_BTV = model(input_ids=tokens_BT[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        share = min(1.0, (step + 1) / 30, (steps - step) / (0.6 * steps))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0 or step + 1 == steps:
            seconds = time.monotonic() - begun
            print(f"step {step + 1}/{steps} loss {loss.item():.4f} {seconds:.0f} s", flush=True)
    return model.eval()


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A Hugging Face folder in bfloat16."""
    end = tokenizer.convert_tokens_to_ids(END)
    for config in (model.config, model.generation_config):
        config.eos_token_id = end
        config.pad_token_id = config.bos_token_id = 0
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def peagle(*arguments: object) -> None:
    """Run a command of peagle; stops at a failure."""
    subprocess.run([sys.executable, "-m", "peagle", *map(str, arguments)], check=True)


def train_head(build: Path, asked: list[str], overrides: list[str]) -> None:
    """Responses of the target in thinking mode, and the head that drafts them."""
    prompts, responses = build / "prompts.jsonl", build / "responses.jsonl"
    lines = [{"id": str(i), "prompt": question} for i, question in enumerate(asked)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    responses.unlink(missing_ok=True)
    target = build / "target"
    sizes = ["--max-new-tokens", 200, "--max-model-len", 512, "--kv-cache-gib", 0.1]
    peagle("data", "regenerate", prompts, "--target", target, "-o", responses, "--thinking", *sizes)
    prepared = build / "train.safetensors"
    mode = ["--thinking", "--max-length", 256, "--overwrite"]
    peagle("data", "prepare", responses, "--target", target, "-o", prepared, *mode)
    shutil.rmtree(build / "peagle", ignore_errors=True)
    given = [part for override in overrides for part in ("--set", override)]
    peagle("train", HERE / "peagle.toml", *given)


def install(build: Path, fixture: Path) -> None:
    """Copy what the tests need."""
    for source, name in ((build / "target", "target"), (build / "peagle" / "head", "peagle")):
        shutil.rmtree(fixture / name, ignore_errors=True)
        (fixture / name).mkdir(parents=True)
        for file in source.iterdir():
            # The record of the training names files of this machine.
            if file.suffix in (".json", ".safetensors", ".jinja") and file.name != "train.json":
                shutil.copyfile(file, fixture / name / file.name)
    shutil.copyfile(build / "prompts.jsonl", fixture / "prompts.jsonl")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--install", action="store_true", help="put it into tests/fixtures/pair2")
    parser.add_argument("--answers", type=int, default=40, help="of each mode")
    parser.add_argument("--prompts", type=int, default=192, help="that the head is trained on")
    parser.add_argument("--steps", type=int, default=440)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], help="of peagle.toml, as in train")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    said = answers(args.corpus, args.answers)
    asked = questions(args.corpus, 4 * args.answers, args.seed)
    vocab_size = json.loads((HERE / "target.json").read_text())["vocab_size"]
    tokenizer = make_tokenizer(said, list(islice(asked, 2000)), vocab_size)
    source = Conversations(said, asked, tokenizer, args.seed)
    model = train(source, args.steps, args.rows, args.lr, args.seed)
    save(model, tokenizer, BUILD / "target")
    train_head(BUILD, list(islice(asked, args.prompts)), args.set)
    if args.install:
        install(BUILD, FIXTURE)
        record(FIXTURE)


if __name__ == "__main__":
    main()
