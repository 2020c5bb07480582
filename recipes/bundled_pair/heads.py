"""Train the heads side by side on one GPU, each for the same time.

Small models leave a large GPU idle between kernels, so the runs share it. A trial of all runs
together measures the pace; from it follow the steps that fit the minutes, and with them a
learning-rate schedule that ends where the time does.

    python recipes/bundled_pair/heads.py --minutes 20 peagle.toml eagle3.toml eagle3_4l.toml
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
PACE_WINDOWS = 5


def start(config: str, output: Path, log: Path, settings: list[str]) -> subprocess.Popen[bytes]:
    """Start one training run in a process of its own."""
    command = [sys.executable, "-m", "peagle", "train", str(HERE / config), "--format", "json"]
    command += ["--output", str(output)]
    for setting in settings:
        command += ["--set", setting]
    return subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT)


def trial_steps(log: Path, seconds: float) -> int:
    """Steps that fit `seconds` at the pace of a trial's last windows."""
    reports = []
    for line in log.read_text().splitlines():
        if line.startswith("{") and line.endswith("}"):
            reports.append(json.loads(line))
    if not reports:
        sys.exit(f"the trial reported nothing:\n{log.read_text()[-3000:]}")
    speed = median(r["tokens_per_s"] for r in reports[-PACE_WINDOWS:])
    tokens_per_step = reports[-1]["tokens_per_step"]
    return int(seconds * speed / tokens_per_step)


def main() -> None:
    """Measure, plan, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--minutes", type=float, required=True, help="of the final runs")
    parser.add_argument("--trial-seconds", type=float, default=100)
    parser.add_argument("--output", type=Path, default=HERE / "../../build/pair")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for every run")
    options = parser.parse_args()
    configs = {Path(config).stem: config for config in options.configs}
    logs = options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)

    trial = options.output / "trial"
    settings = [*options.set, "run.log_every=10"]
    runs = [start(c, trial / n, logs / f"{n}.trial.log", settings) for n, c in configs.items()]
    time.sleep(options.trial_seconds)
    for run in runs:
        run.kill()
        run.wait()
    shutil.rmtree(trial, ignore_errors=True)
    steps = {n: trial_steps(logs / f"{n}.trial.log", options.minutes * 60) for n in configs}
    print("steps:", json.dumps(steps), flush=True)

    started = time.perf_counter()
    final = {
        n: start(
            c,
            options.output / n,
            logs / f"{n}.log",
            [*options.set, f"optimizer.steps={steps[n]}"],
        )
        for n, c in configs.items()
    }
    failed = [name for name, run in final.items() if run.wait() != 0]
    print(f"trained in {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
    if failed:
        sys.exit(f"{failed[0]} failed:\n{(logs / f'{failed[0]}.log').read_text()[-3000:]}")


if __name__ == "__main__":
    main()
