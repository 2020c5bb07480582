"""The benchmark model in one sitting on one machine: target, responses, heads, evaluation.

    python recipes/benchmark_pair/sitting.py all --data DATA --work /tmp/pair --out OUT
    python recipes/benchmark_pair/sitting.py pretrain --minutes 6 --work /tmp/pair

Every phase may be run by itself and does nothing where it is done already; interrupted, most go on
where they were (README.md). `--small` is the whole chain with tiny sizes, for a machine without a
GPU.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
BUNDLED = HERE.parent / "bundled_pair"
sys.path[:0] = [str(HERE), str(BUNDLED)]

import evaluate  # noqa: E402
from jobs import Job, gpus, run_jobs  # noqa: E402
from prompts import windows  # noqa: E402

# Minutes of each phase, written before the sitting; budget.md tells what is in them.
BUDGET = {
    "setup": 0.3,
    "pretrain": 4.5,
    "responses": 2.2,
    "heads": 5.8,
    "correction": 1.8,
    "evaluate": 10.2,
    "tune": 1.9,
    "package": 0.3,
}
# What starts before the clock of a script: the interpreter, torch, the processes of torchrun.
START_S = 15
# Enough to tell targets apart; the exact pass over all of it takes as long as 40 steps.
VALIDATION_TOKENS = 400_000
# Of the heads' minutes: a trial and what is compiled for it, then the start of the runs.
TRIAL_MINUTES = 1.8
CORRECTION = {"correction.steps": 700, "data.batch_tokens": 32_768, "run.validate_every": 350}
SMALL_TARGET = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@dataclass
class Sitting:
    """Where a sitting happens.

    Attributes:
        data: what `README.md` says is made beforehand.
        work: receives everything.
        out: receives what is carried home; None: nothing is.
        minutes: of the phase at hand, in place of its budget.
        small: tiny sizes.
        processes: that train the target; None is one a GPU.
        heads: configurations of the heads to train.
    """

    data: Path
    work: Path
    out: Path | None
    minutes: float | None
    small: bool
    processes: int | None
    heads: list[str]
    started: float = field(default_factory=time.monotonic)

    def say(self, message: str) -> None:
        """A line with the time since the start."""
        print(f"[{time.monotonic() - self.started:6.1f} s] {message}", flush=True)

    def seconds(self, phase: str) -> float:
        """Budget of a phase."""
        return 60 * (BUDGET[phase] if self.minutes is None else self.minutes)

    def run(self, name: str, *command: object, spare_s: float = 120) -> None:
        """Run a script of a phase, which sees all GPUs and keeps to its minutes by itself.

        Raises:
            SystemExit: it failed, or was interrupted `spare_s` after its minutes.
        """
        job = Job(name, tuple(map(str, command)))
        places, seconds = [",".join(gpus())], self.seconds(name) + spare_s
        if run_jobs([job], places, self.work / "logs", seconds, self.say)[name] != 0:
            raise SystemExit(f"{name} is not done: see {self.work / 'logs' / name}.log")


def setup(sitting: Sitting) -> None:
    """Unpack tokens and prompts."""
    work, data = sitting.work, sitting.data
    if (work / "response_prompts.npz").exists():
        return
    work.mkdir(parents=True, exist_ok=True)
    shutil.copytree(data / "tokenizer", work / "tokenizer", dirs_exist_ok=True)
    raw = lzma.decompress((data / "train.u16.xz").read_bytes())
    (work / "train.u16").write_bytes(raw)
    np.fromfile(data / "val.u16", "<u2")[:VALIDATION_TOKENS].tofile(work / "val.u16")
    with np.load(data / "response_prompts.npz") as positions:
        begins = {name: positions[name] for name in positions.files}
    if sitting.small:
        begins = {name: begin[:8] for name, begin in begins.items()}
    prompts = windows(np.frombuffer(raw, "<u2"), begins)
    # Last, and whole: it says that the rest is there.
    np.savez(work / "partial.npz", **prompts)
    (work / "partial.npz").replace(work / "response_prompts.npz")
    counts = {name: len(rows) for name, rows in prompts.items()}
    sitting.say(f"{len(raw) // 2:,} tokens to train on, prompts {counts}")


def pretrain(sitting: Sitting) -> None:
    """Train the target on all GPUs."""
    work = sitting.work
    if (work / "target_train.json").exists():
        return
    config = json.loads((HERE / "target.json").read_text())
    config |= SMALL_TARGET if sitting.small else {}
    (work / "target.json").write_text(json.dumps(config, indent=1))
    count = sitting.processes or len(gpus())
    command: list[object] = [sys.executable]
    if count > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
    command += [BUNDLED / "pretrain.py", "--config", work / "target.json"]
    command += ["--data", work, "--out", work]
    if sitting.small:
        command += ["--steps", 100, "--batch", 8, "--seq-len", 64, "--lr", 1e-2, "--warmup", 5]
    else:
        command += ["--minutes", round((sitting.seconds("pretrain") - START_S) / 60, 2)]
        # 65,536 tokens a GPU: about 60 GB.
        command += ["--batch", 32 * count, "--seq-len", 2048, "--lr", 4e-3, "--warmup", 100]
    sitting.run("pretrain", *command)
    made = json.loads((work / "target_train.json").read_text())
    kept = ("parameters", "steps", "tokens", "train_loss", "val_loss", "tokens_per_second")
    sitting.say(f"target: { ({name: made[name] for name in kept}) }")


def responses(sitting: Sitting) -> None:
    """Let the target answer the prompts, every GPU a share of them."""
    work = sitting.work
    if (work / "responses.json").exists():
        return
    command: list[object] = [sys.executable, BUNDLED / "respond.py", "--data", work]
    command += ["--out", work]
    if sitting.small:
        command += ["--batch", 8, "--max-new", 48, "--val", 6]
    else:
        # The batches at hand at the end, and the writing, take as long as the start does.
        command += ["--minutes", round((sitting.seconds("responses") - 2 * START_S) / 60, 2)]
        command += ["--dtype", "bfloat16", "--batch", 2048, "--show"]
        command += ["--temperatures", 0, "--shares", 1, "--keep-loop", 64]
    sitting.run("responses", *command)
    made = json.loads((work / "responses.json").read_text())
    sitting.say(f"responses: { ({n: v for n, v in made.items() if isinstance(v, (int, float))}) }")


def heads(sitting: Sitting) -> None:
    """Train the heads side by side, for equal times."""
    work = sitting.work
    names = [Path(head).stem for head in sitting.heads]
    if all((work / name / "train.json").exists() for name in names):
        return
    turns = math.ceil(len(names) / max(1, len(gpus())))
    minutes = sitting.seconds("heads") / 60 / turns - TRIAL_MINUTES
    if sitting.small:
        minutes = 0.2
    command: list[object] = [sys.executable, BUNDLED / "heads.py"]
    command += [HERE / head for head in sitting.heads]
    command += ["--minutes", round(minutes, 2), "--output", work, "--resume"]
    command += ["--trial-log-every", 1 if sitting.small else 2]
    sitting.run("heads", *command, *_settings(sitting))
    for name in names:
        made = json.loads((work / name / "train.json").read_text())
        best = made["best"]
        sitting.say(
            f"{name}: {made['steps']} steps, validation's acceptance length at K = {best['k']} "
            f"{best['acceptance_length']:.2f}"
        )


def _settings(sitting: Sitting, **others: object) -> list[object]:
    """What differs from the configurations of the heads."""
    work = sitting.work
    settings: dict[str, object] = {
        "target": work / "target",
        "data.train": work / "responses.safetensors",
        "data.validation": work / "responses_val.safetensors",
        **others,
    }
    if sitting.small:
        settings |= {"data.max_length": 384, "data.batch_tokens": 512, "head.draft_vocab_size": 512}
        settings |= {"run.validate_every": 1000, "method.depth": 4}
        settings |= {"correction.steps": 3} if others else {}
    given = ([f"--set={key}={json.dumps(v, default=str)}"] for key, v in settings.items())
    return [word for words in given for word in words]


def correction(sitting: Sitting) -> None:
    """Fit a correction on the P-EAGLE head; the head stays without one in `alone`."""
    work = sitting.work
    head, alone = work / "peagle" / "head", work / "alone" / "head"
    if (head / "correction.st").exists():
        return
    shutil.copytree(head, alone, dirs_exist_ok=True)
    command = [sys.executable, "-m", "peagle", "train", HERE / "peagle.toml", "--format", "json"]
    command += ["--correction-on", head, "--output", work / "peagle"]
    sitting.run("correction", *command, *_settings(sitting, **CORRECTION))
    record = json.loads((work / "peagle" / "correction" / "train.json").read_text())
    best = record["best"]
    sitting.say(f"correction: acceptance length at K = {best['k']} {best['acceptance_length']:.2f}")


def measure(sitting: Sitting) -> None:
    """Measure acceptance and throughput, one command on each GPU at a time."""
    _measure(sitting, "evaluate", evaluate.measurements(sitting.work, small=sitting.small))


def tune(sitting: Sitting) -> None:
    """Let `peagle tune` measure what a step costs, with nothing beside it."""
    _measure(sitting, "tune", [evaluate.tuning(sitting.work, small=sitting.small)])


def _measure(sitting: Sitting, phase: str, jobs: list[Job]) -> None:
    seconds = 3600 if sitting.small and sitting.minutes is None else sitting.seconds(phase)
    due = [job for job in jobs if not evaluate.is_done(sitting.work, job)]
    run_jobs(due, gpus(), sitting.work / "logs", seconds, sitting.say)
    left = [job.name for job in due if not evaluate.is_done(sitting.work, job)]
    if left:
        sitting.say(f"not whole: {', '.join(left)}; what they have is in the report")


def package(sitting: Sitting) -> None:
    """Write the one report and lay out what is carried home."""
    report = evaluate.merge(sitting.work)
    sitting.say(f"the report is {report / 'report.html'}")
    if sitting.out is not None:
        for file in evaluate.pack(sitting.work, sitting.out):
            sitting.say(f"{file} {file.stat().st_size:,} bytes")


PHASES: dict[str, Callable[[Sitting], None]] = {
    "setup": setup,
    "pretrain": pretrain,
    "responses": responses,
    "heads": heads,
    "correction": correction,
    "evaluate": measure,
    "tune": tune,
    "package": package,
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("phases", nargs="+", choices=[*PHASES, "all"], metavar="PHASE")
    parser.add_argument("--data", type=Path, default=Path("build/benchmark_data"))
    parser.add_argument("--work", type=Path, default=Path("build/benchmark_pair"))
    parser.add_argument("--out", type=Path, help="folder for what is carried home")
    parser.add_argument("--minutes", type=float, help="of each phase, in place of its budget")
    parser.add_argument("--processes", type=int, help="that train the target; one a GPU")
    parser.add_argument("--heads", default=",".join(f"{name}.toml" for name in evaluate.HEADS))
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    wanted = list(PHASES) if "all" in args.phases else args.phases
    sitting = Sitting(
        args.data.resolve(),
        args.work.resolve(),
        args.out,
        args.minutes,
        args.small,
        args.processes,
        args.heads.split(","),
    )
    for phase in wanted:
        begun = time.monotonic()
        sitting.say(f"{phase}: {sitting.seconds(phase) / 60:g} minutes")
        PHASES[phase](sitting)
        sitting.say(f"{phase} took {(time.monotonic() - begun) / 60:.2f} minutes")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on")
