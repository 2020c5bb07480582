"""Make the mixture pair: a small Qwen3-MoE trained from scratch, its P-EAGLE head, and a check.

    python recipes/mixture_pair/make.py --output build/mixture_pair
    python recipes/mixture_pair/make.py --output build/mixture_pair --small   # a CPU, tiny sizes

The phases are text, target, responses, data, head and check. Each is a command in a process of its
own, with a log in `logs/`. Nothing is fetched, and nothing is written outside the output folder.
The last line of the output begins with RESULT and is one JSON object with all figures, which
`result.json` holds too.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "bundled_pair")]

from check import PRECISIONS, K, check_file  # noqa: E402
from sources import Source, clean, is_test, looks_written, stdlib_source, wanted_path  # noqa: E402
from tokenizer import tokenise  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from peagle.bundled import BUNDLED_TARGET  # noqa: E402
from peagle.environment import environment  # noqa: E402

ONE_IN = 20  # documents that one is kept of for validation
PIECE = 20_000  # characters of a document that is cut from a text
PROMPT_CHARACTERS = (60, 600)
LEAST_ACCEPTANCE_LENGTH = 1.5
# The share of the minutes at which a phase ends; compilation takes most of the check.
ENDS = {"target": 0.22, "responses": 0.37, "head": 0.62, "check": 1.0}
SAVING_S = 15.0  # of the target's phase, for start, validation and saving
GRACE_S = 20.0  # a command that was interrupted may still save what it has


@dataclass(frozen=True)
class Sizes:
    """How much is trained and checked."""

    num_documents: int | None  # None: all
    target: tuple[str, ...]  # options of pretrain.py
    num_prompts: int
    response_tokens: int
    head: tuple[str, ...]  # values of peagle.toml
    check: tuple[str, ...]  # options of check.py


FULL = Sizes(
    num_documents=None,
    target=("--batch", "32", "--seq-len", "512"),
    num_prompts=2048,
    response_tokens=160,
    head=(),
    check=("--prompts", "32", "--max-new-tokens", "128", "--concurrency", "4"),
)
SMALL = Sizes(
    num_documents=20,
    target=("--batch", "8", "--seq-len", "64", "--steps", "16"),
    num_prompts=16,
    response_tokens=16,
    head=("data.batch_tokens=512", "optimizer.steps=12", "run.validate_every=6"),
    check=("--prompts", "2", "--max-new-tokens", "8", "--concurrency", "2"),
)


# ---- text ----


def documents(corpus: Path | None) -> Iterator[dict[str, str]]:
    """Python files of the standard library and of this repository, and pieces of a text file."""
    library = stdlib_source()
    for source in (library, Source("peagle", "", library.verdict, ROOT / "src")):
        names = [n for n, size in source.files() if wanted_path(n, size) and not is_test(n)]
        for _, content in source.read(names):
            text = clean(content)
            if text is not None and looks_written(text):
                yield {"kind": "file", "text": text}
    if corpus is not None:
        data = corpus.read_bytes()
        text = (lzma.decompress(data) if corpus.suffix == ".xz" else data).decode()
        while text:
            end = text.find("\n", PIECE) + 1 or len(text)
            yield {"kind": "text", "text": text[:end]}
            text = text[end:]


def write_text(folder: Path, corpus: Path | None, sizes: Sizes) -> dict[str, Any]:
    """Write documents, tokens of the bundled tokenizer, and prompts for the target's responses."""
    for name in ("docs", "tokenizer"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for file in BUNDLED_TARGET.glob("tokenizer*.json"):
        shutil.copy(file, folder / "tokenizer")
    every = list(documents(corpus))
    random.Random(0).shuffle(every)
    every = every[: sizes.num_documents]
    splits = {"val": every[::ONE_IN], "train": [d for i, d in enumerate(every) if i % ONE_IN]}
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "tokenizer")
    counts = {}
    for name, docs in splits.items():
        path = folder / "docs" / f"{name}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in docs))
        counts[name] = tokenise(tokenizer, path, folder / f"{name}.u16")["tokens"]
    lines = [
        json.dumps({"id": str(number), "prompt": prompt}) + "\n"
        for number, prompt in enumerate(prompts(splits["train"], sizes.num_prompts))
    ]
    (folder / "prompts.jsonl").write_text("".join(lines))
    return {"documents": len(every), **{f"{name}_tokens": n for name, n in counts.items()}}


def prompts(docs: Sequence[dict[str, str]], count: int) -> list[str]:
    """Distinct pieces of documents that begin and end with a line."""
    source, found = random.Random(1), dict[str, None]()
    while len(found) < count:
        text = source.choice(docs)["text"]
        start = text.rfind("\n", 0, source.randrange(len(text))) + 1
        end = text.find("\n", start + source.randrange(*PROMPT_CHARACTERS)) + 1
        if 0 < end <= start + 2 * PROMPT_CHARACTERS[1]:
            found[text[start:end]] = None
    return list(found)


# ---- commands ----


class Phases:
    """Runs commands one after another, within the minutes."""

    def __init__(self, folder: Path, minutes: float) -> None:
        self.folder, self.limit_s = folder, 60 * minutes
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        # Compiled code stays in the folder, and no library asks the hub.
        cache = folder / "cache"
        self._environment = {
            **os.environ,
            "PEAGLE_CACHE": str(cache),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        }

    def left_s(self, phase: str) -> float:
        """Seconds until a phase is stopped."""
        return self.started + ENDS.get(phase, 1.0) * self.limit_s - time.perf_counter()

    def say(self, text: str) -> None:
        """Print progress with the seconds since the start."""
        print(f"[{time.perf_counter() - self.started:4.0f} s] {text}", flush=True)

    def begin(self, name: str, command: Sequence[object]) -> subprocess.Popen[bytes]:
        """Start a command whose output goes to its log."""
        self.say(f"{name}: begins")
        with (self.folder / "logs" / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *map(str, command)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )

    def finish(self, name: str, process: subprocess.Popen[bytes], phase: str) -> bool:
        """Wait for a command, and interrupt it where its phase ends; whether it ended by itself."""
        try:
            process.wait(max(1.0, self.left_s(phase)))
            return True
        except subprocess.TimeoutExpired:
            self.say(f"{name}: the time is over; it is interrupted")
            process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return False

    def run(self, name: str, *command: object, result: Path, phase: str = "check") -> None:
        """Run a command that makes `result`, whole or as far as it came until a phase ends.

        Raises:
            RuntimeError: it failed, or made nothing; the message ends with its log.
        """
        begun = time.perf_counter()
        process = self.begin(name, command)
        ended = self.finish(name, process, phase)
        self.seconds[name] = round(time.perf_counter() - begun, 1)
        if (ended and process.returncode) or not result.exists():
            raise RuntimeError(f"{name} failed (status {process.returncode}): {self.log(name)}")
        self.say(f"{name}: done in {self.seconds[name]} s; {self.log(name, 200)}")

    def log(self, name: str, most: int = 2000) -> str:
        """The end of a command's log."""
        text = (self.folder / "logs" / f"{name}.log").read_text(errors="replace")
        return text.replace("\r", "\n").strip()[-most:]


def peagle(*arguments: object) -> tuple[object, ...]:
    """The command line of a command of peagle."""
    return ("-m", "peagle", *arguments)


def train_target(phases: Phases, sizes: Sizes) -> None:
    """Pretrain the mixture with the bundled pair's script, which plans its steps by the minutes."""
    folder = phases.folder
    limits = ("--warmup", "100", "--lr", "4e-3", "--decay-share", "0.6")
    if "--steps" not in sizes.target:
        limits += ("--minutes", f"{(phases.left_s('target') - SAVING_S) / 60:.3f}")
    script = HERE.parent / "bundled_pair" / "pretrain.py"
    arguments = ("--config", HERE / "target.json", "--data", folder, "--out", folder)
    result = folder / "target_train.json"
    phases.run("target", script, *arguments, *sizes.target, *limits, result=result)


def make_responses(phases: Phases, sizes: Sizes, on_gpu: bool) -> None:
    """Let the target answer the prompts, greedily; many at a time, so that no graph is captured."""
    folder = phases.folder
    settings = folder / "engine.toml"
    settings.write_text("format_version = 1\n\n[engine]\nenforce_eager = true\n")
    options = ("--max-new-tokens", sizes.response_tokens, "--temperature", 0, "--raw")
    options += ("--config", settings, "--max-num-seqs", 512 if on_gpu else 8)
    options += ("--kv-cache-gib", 4 if on_gpu else 0.25, "--max-model-len", 768)
    files = (folder / "prompts.jsonl", "--target", folder / "target")
    output = folder / "responses.jsonl"
    command = peagle("data", "regenerate", *files, "-o", output, *options)
    phases.run("responses", *command, result=output, phase="responses")


def train_head(phases: Phases, sizes: Sizes) -> None:
    """Train the P-EAGLE head on the responses."""
    folder = phases.folder
    data = folder / "train.safetensors"
    options = ("--validation-share", 0.04, "--max-length", 384, "--raw", "--overwrite")
    source = (folder / "responses.jsonl", "--target", folder / "target")
    phases.run("data", *peagle("data", "prepare", *source, "-o", data, *options), result=data)
    values = (
        f"target={json.dumps(str(folder / 'target'))}",
        f"data.train={json.dumps(str(data))}",
        f"data.validation={json.dumps(str(folder / 'train.validation.safetensors'))}",
        *sizes.head,
    )
    given = [part for value in values for part in ("--set", value)]
    output = folder / "peagle"
    command = peagle("train", HERE / "peagle.toml", "--output", output, *given)
    phases.run("head", *command, result=output / "head" / "model.safetensors", phase="head")


def check_pair(phases: Phases, sizes: Sizes, on_gpu: bool) -> None:
    """Check every precision; on a GPU beside each other, because compilation takes the time."""
    begun = time.perf_counter()
    precisions = PRECISIONS[1:] if on_gpu else PRECISIONS  # float64 has no kernels
    groups = precisions if on_gpu else (",".join(precisions),)
    script = (HERE / "check.py", phases.folder, *sizes.check)
    running = {
        f"check-{one}" if on_gpu else "check": phases.begin(
            f"check-{one}" if on_gpu else "check", (*script, "--precision", one)
        )
        for one in groups
    }
    for name, process in running.items():
        phases.finish(name, process, "check")
        phases.say(f"{name}: status {process.returncode}; {phases.log(name, 600)}")
    phases.seconds["check"] = round(time.perf_counter() - begun, 1)


# ---- figures ----


def figures(folder: Path) -> dict[str, Any]:
    """The losses and the check, as far as their files are there."""
    found: dict[str, Any] = {}
    target = folder / "target_train.json"
    if target.exists():
        values = json.loads(target.read_text())
        names = ("parameters", "steps", "tokens", "train_loss", "val_loss", "tokens_per_second")
        found["target"] = {name: values[name] for name in names}
    metrics = folder / "peagle" / "metrics.jsonl"
    if metrics.exists():
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        found["head"] = [
            {"step": line["step"], "steps": line["steps"], "loss": round(line["loss"], 4)}
            | {"acceptance_lengths": [round(length, 3) for length in line["acceptance_lengths"]]}
            for line in lines
            if line["kind"] == "validation"
        ]
    checked = [check_file(folder, one) for one in PRECISIONS]
    found["check"] = [json.loads(path.read_text()) for path in checked if path.exists()]
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of all results")
    parser.add_argument("--corpus", type=Path, help="a text (.txt or .xz) to train on as well")
    parser.add_argument("--minutes", type=float, default=9.0, help="of all phases together")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    folder, sizes = args.output.resolve(), SMALL if args.small else FULL
    on_gpu = torch.cuda.is_available()
    phases = Phases(folder, args.minutes)
    result: dict[str, Any] = {"recipe": "mixture_pair", "small": args.small, "k": K}
    result |= {"environment": environment(torch.device("cuda") if on_gpu else None)}
    for old in (*folder.glob("check-*.json"), folder / "responses.jsonl"):
        old.unlink(missing_ok=True)
    for old in ("target", "peagle"):
        shutil.rmtree(folder / old, ignore_errors=True)
    error = None
    try:
        result["text"] = write_text(folder, args.corpus, sizes)
        phases.seconds["text"] = round(time.perf_counter() - phases.started, 1)
        phases.say(f"text: {result['text']}")
        train_target(phases, sizes)
        make_responses(phases, sizes, on_gpu)
        train_head(phases, sizes)
        check_pair(phases, sizes, on_gpu)
    except RuntimeError as failure:
        error = str(failure)
    result |= figures(folder) | {"seconds": phases.seconds, "error": error}
    checks = result["check"]
    expected = len(PRECISIONS) - on_gpu
    result["passed"] = len(checks) == expected and not any(one["faults"] for one in checks)
    if not args.small:
        lengths = [one["acceptance_length"] for one in checks]
        result["passed"] &= all(one > LEAST_ACCEPTANCE_LENGTH for one in lengths)
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print("RESULT " + json.dumps(result), flush=True)
    raise SystemExit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
