"""Train the heads side by side on one GPU, each for the same time.

Small models leave a large GPU idle between kernels, so the runs share it. A trial of every run at
once measures the pace; from it follow the steps that fit the minutes, and with them a learning-rate
schedule that ends where the time does.

    python recipes/bundled_pair/heads.py --minutes 20 peagle.toml eagle3.toml eagle3_4l.toml
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
TRIAL_STEPS = 240


def start(config: str, output: Path, log: Path, *settings: str) -> subprocess.Popen[bytes]:
    """Start one training run in a process of its own."""
    command = [sys.executable, "-m", "peagle", "train", str(HERE / config), "--format", "json"]
    command += ["--output", str(output)]
    for setting in settings:
        command += ["--set", setting]
    return subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT)


def wait(runs: dict[str, subprocess.Popen[bytes]], logs: Path) -> None:
    """Wait for every run; stop all when one fails."""
    for name, run in runs.items():
        if run.wait() != 0:
            for other in runs.values():
                other.kill()
            sys.exit(f"{name} failed:\n{(logs / f'{name}.log').read_text()[-3000:]}")


def pace(output: Path) -> float:
    """Seconds a step in the second half of a trial, compilation left out."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    reports = [r for r in map(json.loads, lines) if r["kind"] == "train"]
    later = reports[len(reports) // 2 :]
    speed = sum(r["tokens_per_s"] for r in later) / len(later)
    return json.loads((output / "train.json").read_text())["tokens_per_step"] / speed


def main() -> None:
    """Measure, plan, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--minutes", type=float, required=True, help="of the final runs")
    parser.add_argument("--output", type=Path, default=HERE / "../../build/pair")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for every run")
    options = parser.parse_args()
    names = [Path(config).stem for config in options.configs]
    logs = options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)

    trial = options.output / "trial"
    settings = [f"optimizer.steps={TRIAL_STEPS}", "run.log_every=20", "run.validate_every=10000"]
    runs = {
        n: start(c, trial / n, logs / f"{n}.log", *options.set, *settings)
        for n, c in zip(names, options.configs, strict=True)
    }
    wait(runs, logs)
    steps = {n: int(options.minutes * 60 / pace(trial / n)) for n in names}
    print("steps:", json.dumps(steps), flush=True)

    started = time.perf_counter()
    runs = {
        n: start(
            c, options.output / n, logs / f"{n}.log", *options.set, f"optimizer.steps={steps[n]}"
        )
        for n, c in zip(names, options.configs, strict=True)
    }
    wait(runs, logs)
    print(f"trained in {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
