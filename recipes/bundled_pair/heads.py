"""Train the heads side by side, each for the same time on a GPU of its own.

A trial of all runs together measures the pace; from it follow the steps that fit the minutes, and
with them a learning-rate schedule that ends where the time does. With fewer GPUs than heads they
come in turns, as many at a time as there are GPUs. `--resume` goes on with runs that were cut
short, at the steps planned before (`steps.json`).

    python recipes/bundled_pair/heads.py --minutes 7 peagle.toml eagle3.toml eagle3_4l.toml
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from peagle.engine.placement import gpu_names

HERE = Path(__file__).parent
PACE_WINDOWS = 5


def start(
    config: str,
    gpu: str,
    output: Path,
    log: Path,
    settings: list[str],
    flags: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start one training run in a process of its own, which sees one GPU."""
    command = [
        sys.executable,
        "-m",
        "peagle",
        "train",
        str(HERE / config),
        "--format",
        "json",
        *flags,
    ]
    command += ["--output", str(output)]
    for setting in settings:
        command += ["--set", setting]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    return subprocess.Popen(
        command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env=environment
    )


def reports(log: Path) -> list[dict[str, Any]]:
    """The whole lines of progress in a log."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(x) for x in lines if x.startswith("{") and x.endswith("}")]


def measure_pace(runs: dict[str, subprocess.Popen[bytes]], logs: dict[str, Path]) -> None:
    """Let all runs go on together until each has reported long enough, then end them."""
    while any(len(reports(log)) < 3 * PACE_WINDOWS for log in logs.values()):
        for name, run in runs.items():
            if run.poll() is not None:
                sys.exit(f"the trial of {name} ended:\n{logs[name].read_text()[-3000:]}")
        time.sleep(1)
    for run in runs.values():
        run.kill()
        run.wait()


def steps_within(log: Path, seconds: float) -> int:
    """Steps that fit `seconds` at the pace of a trial's last windows."""
    last = reports(log)[-PACE_WINDOWS:]
    speed = median(r["tokens_per_s"] for r in last)
    return int(seconds * speed / last[-1]["tokens_per_step"])


def plan_steps(
    configs: dict[str, str], gpus: dict[str, str], options: argparse.Namespace, logs: Path
) -> dict[str, int]:
    """Steps of each run, from a trial of all of them."""
    trial = options.output / "trial"
    trial_logs = {n: logs / f"{n}.trial.log" for n in configs}
    settings = [*options.set, f"run.log_every={options.trial_log_every}"]
    trials = {n: start(c, gpus[n], trial / n, trial_logs[n], settings) for n, c in configs.items()}
    measure_pace(trials, trial_logs)
    shutil.rmtree(trial, ignore_errors=True)
    return {n: max(1, steps_within(trial_logs[n], options.minutes * 60)) for n in configs}


def main() -> None:
    """Train all runs, as many at a time as there are GPUs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--minutes", type=float, required=True, help="of the final runs")
    parser.add_argument("--output", type=Path, default=HERE / "../../build/pair")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for every run")
    parser.add_argument("--trial-log-every", type=int, default=10, help="steps of a trial's window")
    parser.add_argument("--resume", action="store_true", help="go on with runs cut short")
    options = parser.parse_args()
    configs = {Path(config).stem: config for config in options.configs}
    (options.output / "logs").mkdir(parents=True, exist_ok=True)
    names, count = [*configs], max(1, len(gpu_names()))
    for first in range(0, len(names), count):
        train({name: configs[name] for name in names[first : first + count]}, options)


def train(configs: dict[str, str], options: argparse.Namespace) -> None:
    """Measure, plan and train some runs side by side, a GPU each."""
    if options.resume:
        done = [name for name in configs if (options.output / name / "train.json").exists()]
        configs = {name: config for name, config in configs.items() if name not in done}
    gpus = dict(zip(configs, gpu_names() or [""] * len(configs), strict=False))
    logs = options.output / "logs"
    planned = options.output / "steps.json"
    steps = json.loads(planned.read_text()) if options.resume and planned.exists() else {}
    if not set(configs) <= set(steps):
        steps |= plan_steps(configs, gpus, options, logs)
        planned.write_text(json.dumps(steps) + "\n")
    print("steps:", json.dumps({name: steps[name] for name in configs}), flush=True)

    started = time.perf_counter()
    final = {}
    for n, c in configs.items():
        begun = options.resume and (options.output / n / "checkpoint").exists()
        settings = [*options.set, f"optimizer.steps={steps[n]}"]
        final[n] = start(
            c, gpus[n], options.output / n, logs / f"{n}.log", settings, ["--resume"] * begun
        )
    failed = [name for name, run in final.items() if run.wait() != 0]
    print(f"trained in {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
    if failed:
        sys.exit(f"{failed[0]} failed:\n{(logs / f'{failed[0]}.log').read_text()[-3000:]}")


if __name__ == "__main__":
    main()
