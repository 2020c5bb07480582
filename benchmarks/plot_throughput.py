"""A plot of tokens per second over concurrency, from the lines that throughput.py printed.

    python benchmarks/plot_throughput.py results.txt --out docs/throughput.svg

Needs matplotlib (pip install '.[report]').
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import run_guarded

from peagle.errors import UserError

# vLLM 0.26.0 on the same kind of card, by method and K: tokens per second at concurrency 1, 4, 16
# and 64, with the same shapes, lengths and made-up acceptance.
VLLM = {
    ("none", 0): (148, 573, 2196, 7185),
    ("eagle3", 3): (281, 1089, 3967, 11065),
    ("eagle3", 7): (247, 903, 3396, 8038),
    ("peagle", 7): (470, 1654, 5742, 10720),
}
CONCURRENCY = (1, 4, 16, 64)
NAMES = {"none": "no speculation", "eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
COLOURS = {"none": "#6b7280", "eagle3": "#d97706", "peagle": "#2563eb"}


def main() -> None:
    """Draw it."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("results", type=Path, help="file with RESULT lines")
    options.add_argument("--out", type=Path, required=True, help="SVG or PNG to write")
    args = options.parse_args()
    draw(read_results(args.results), args.out)


def read_results(path: Path) -> list[dict[str, Any]]:
    """The results in a file, one for each RESULT line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{str(path)!r} is not readable: {error.strerror}.") from None
    found = [json.loads(line.removeprefix("RESULT ")) for line in lines if line[:7] == "RESULT "]
    if not found:
        raise UserError(f"{str(path)!r} has no RESULT line; expected what throughput.py prints.")
    return found


def draw(results: list[dict[str, Any]], out: Path) -> None:
    """One line a result, vLLM's dashed."""
    try:
        import matplotlib
    except ImportError:
        raise UserError(
            "matplotlib is not installed: pip install '.[report]' in the repository."
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "peagle"})
    figure, (speeds, ratios) = plt.subplots(1, 2, figsize=(9.6, 4), layout="constrained")
    for (method, _), tps in VLLM.items():
        speeds.plot(CONCURRENCY, tps, "--", color=COLOURS[method], alpha=0.5, linewidth=1.2)
    for result in results:
        sizes = sorted(map(int, result["tps"]))
        tps = [result["tps"][str(size)] for size in sizes]
        method, k = result["method"], result["k"]
        style: dict[str, Any] = {
            "marker": "o",
            "markersize": 4,
            "color": COLOURS[method],
            "linestyle": ":" if result.get("k_per_batch_size") else "-",
            "alpha": 0.6 if (method, k) == ("eagle3", 7) else 1.0,
        }
        label = NAMES[method] + (f", K={k}" if k else "")
        label += " at most, by load" if result.get("k_per_batch_size") else ""
        speeds.plot(sizes, tps, label=label, **style)
        theirs = dict(zip(CONCURRENCY, VLLM[method, k], strict=True))
        shared = [size for size in sizes if size in theirs]
        ours = [result["tps"][str(size)] / theirs[size] for size in shared]
        ratios.plot(shared, ours, **style)
    speeds.plot([], [], "--", color="#6b7280", alpha=0.5, label="vLLM 0.26, the same")
    speeds.set_yscale("log", base=2)
    ticks = [128 * 2**i for i in range(8)]
    speeds.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    speeds.set_ylabel("tokens per second")
    speeds.legend(frameon=False, fontsize=8, loc="upper left")
    ratios.axhline(1, color="#6b7280", linestyle="--", linewidth=1.2, alpha=0.5)
    ratios.set_ylabel("over vLLM's, same method and K")
    for axes in (speeds, ratios):
        axes.set_xscale("log", base=2)
        axes.set_xticks(CONCURRENCY, [str(size) for size in CONCURRENCY])
        axes.set_xlabel("sequences together")
        axes.grid(alpha=0.25)
    figure.suptitle("Qwen3-8B shapes, one H100, random weights, SYNTHETIC acceptance", fontsize=10)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


if __name__ == "__main__":
    run_guarded(main)
