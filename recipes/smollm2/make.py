"""Make the heads of SmolLM2-135M-Instruct: the model writes and answers the prompts itself.

    python recipes/smollm2/make.py TARGET --output build/smollm2
    python recipes/smollm2/make.py TARGET --output build/trial --prompts 64 --minutes 0.2

README.md lists the phases. A phase is skipped where its outputs are there. The last line is one
JSON object with the minutes of each phase, which `minutes.json` keeps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "benchmark_pair"))

from jobs import Job, gpus, run_jobs  # noqa: E402

NUM_SHARDS = 8
AT_ONCE = 4  # that generate on a GPU: a small model leaves most of it idle
KV_CACHE_GIB = 10  # of each of them
TEMPERATURES = (0.0, 0.7)
PARTS = 4  # of a shard, which are prepared side by side
ANSWER_TOKENS = 384
VALIDATION_SHARE = 0.01


class Maker:
    """The phases, in one folder.

    Args:
        target: folder of the model.
        folder: takes all that is made.
        places: the GPUs, as `jobs.run_jobs` takes them.
        overrides: KEY=VALUE of the training configurations.
    """

    def __init__(
        self, target: str, folder: Path, places: Sequence[str], overrides: Sequence[str] = ()
    ) -> None:
        self._target, self._folder, self._places = target, folder, list(places)
        self._overrides = overrides
        self._record = folder / "minutes.json"
        self.minutes: dict[str, float] = {}
        if self._record.is_file():
            self.minutes = json.loads(self._record.read_text(encoding="utf-8"))

    def prompts(self, count: int) -> None:
        """Let the model write prompts, another seed in each shard."""
        jobs = [
            self._peagle(
                f"prompts-{shard}",
                *("data", "synthesize", "--count", count // NUM_SHARDS, "--seed", shard),
                *("--target", self._target, "--no-speculation", "--kv-cache-gib", KV_CACHE_GIB),
                *("--output", self._prompts(shard), "--format", "json"),
            )
            for shard in range(NUM_SHARDS)
        ]
        files = [self._prompts(shard) for shard in range(NUM_SHARDS)]
        self._run("prompts", jobs, files, self._places * AT_ONCE)

    def answers(self) -> None:
        """Let the model answer them."""
        jobs = [
            self._peagle(
                f"answers-{shard}",
                *("data", "regenerate", self._prompts(shard), "--target", self._target),
                *("--temperature", TEMPERATURES[shard % 2], "--seed", shard, "--no-speculation"),
                *("--max-new-tokens", ANSWER_TOKENS, "--max-model-len", 2048),
                *("--kv-cache-gib", KV_CACHE_GIB),
                *("--output", self._answers(shard), "--format", "json"),
            )
            for shard in range(NUM_SHARDS)
        ]
        files = [self._answers(shard) for shard in range(NUM_SHARDS)]
        self._run("answers", jobs, files, self._places * AT_ONCE)

    def data(self) -> None:
        """Tokenise the answers, in parts side by side, and put them together."""
        prepare = ("data", "prepare", "--target", self._target, "--overwrite", "--output")
        parts, jobs = list[Path](), list[Job]()
        for shard in range(NUM_SHARDS):
            if not self._answers(shard).is_file():
                continue  # an earlier run has put all together
            # Not `splitlines`, which also cuts at separators that JSON leaves in its texts.
            lines = self._answers(shard).read_text(encoding="utf-8").split("\n")[:-1]
            for part in range(PARTS):
                path = self._folder / "parts" / f"{shard}-{part}.jsonl"
                path.parent.mkdir(exist_ok=True)
                text = "".join(f"{line}\n" for line in lines[part::PARTS])
                path.write_text(text, encoding="utf-8", newline="\n")
                # Where the answers come from, which the heads' model cards tell.
                shutil.copy(f"{self._answers(shard)}.meta.json", f"{path}.meta.json")
                parts.append(path.with_suffix(".safetensors"))
                jobs.append(self._peagle(f"data-{path.stem}", *prepare, parts[-1], path))
        output = self._folder / "data.safetensors"
        self._run("parts", jobs, parts, places=[""] * NUM_SHARDS * PARTS)
        share = "--validation-share", VALIDATION_SHARE
        job = self._peagle("data", *prepare, output, *share, *parts)
        self._run("data", [job], [output, output.with_suffix(".validation.safetensors")])

    def heads(self, minutes: float, *, free_head: bool) -> None:
        """Train the heads."""
        wanted = ["peagle", "eagle3", *(["free"] if free_head else [])]
        sets = self._sets(f"run.minutes={minutes}")
        jobs = [
            self._peagle(
                name, "train", HERE / f"{name}.toml", *sets, "--output", self._folder / name
            )
            for name in wanted
        ]
        self._run("heads", jobs, [self._folder / name / "head" / "config.json" for name in wanted])

    def correction(self) -> None:
        """Fit the correction on the P-EAGLE head."""
        head = self._folder / "peagle" / "head"
        words = ["train", HERE / "correction.toml", *self._sets(), "--correction-on", head]
        job = self._peagle("correction", *words, "--output", self._folder / "correction")
        self._run("correction", [job], [head / "correction.st"])

    def _sets(self, *more: str) -> list[str]:
        data = self._folder / "data.safetensors"
        values = [
            f"target={self._target}",
            f"data.train={data}",
            f"data.validation={data.with_suffix('.validation.safetensors')}",
            *more,
            *self._overrides,
        ]
        return [word for value in values for word in ("--set", value)]

    def _prompts(self, shard: int) -> Path:
        return self._folder / f"prompts-{shard}.jsonl"

    def _answers(self, shard: int) -> Path:
        return self._folder / f"answers-{shard}.jsonl"

    def _peagle(self, name: str, *words: object) -> Job:
        return Job(name, (sys.executable, "-m", "peagle", *map(str, words)))

    def _run(
        self,
        phase: str,
        jobs: Sequence[Job],
        outputs: Sequence[Path],
        places: Sequence[str] | None = None,
    ) -> None:
        """Run a phase that is not recorded as done; end where one of its commands fails."""
        if phase in self.minutes and all(path.exists() for path in outputs):
            return
        start_s = time.monotonic()
        codes = run_jobs(jobs, places or self._places, self._folder / "logs", float("inf"))
        if any(codes.values()):
            sys.exit(f"error: phase {phase} failed; {self._folder / 'logs'} has what it printed.")
        self.minutes[phase] = round((time.monotonic() - start_s) / 60, 2)
        self._record.write_text(json.dumps(self.minutes, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Run it."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("target", help="folder of SmolLM2-135M-Instruct")
    options.add_argument("--output", type=Path, default=Path("build/smollm2"))
    options.add_argument("--prompts", type=int, default=190_000, help="number of prompts (190000)")
    options.add_argument("--minutes", type=float, default=8.0, help="training of each head (8)")
    options.add_argument("--free-head", action="store_true", help="train the free head too")
    options.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of the training files"
    )
    args = options.parse_args()
    folder = args.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    maker = Maker(str(Path(args.target).resolve()), folder, gpus(), args.set)
    maker.prompts(args.prompts)
    maker.answers()
    maker.data()
    maker.heads(args.minutes, free_head=args.free_head)
    maker.correction()
    print(json.dumps({"folder": str(folder), "minutes": maker.minutes}))


if __name__ == "__main__":
    main()
