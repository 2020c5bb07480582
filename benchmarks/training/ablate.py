"""Heads that differ in one thing, trained alike: which choice pays?

    python benchmarks/training/ablate.py recipes/bundled_pair/peagle.toml --output /tmp/ablation

Trains a head for each variant: a configuration with some keys changed, the same data in the
same order for as many steps. What counts is the simulated acceptance length of the last validation,
which walks the responses as serving does, over the target's whole vocabulary. One JSON object a
variant; a variant that is there already is not trained again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from peagle.training.config import TrainConfig
from peagle.training.trainer import Trainer

# Name: what is changed in the base. `twin` is the base with another seed: how much is noise.
VARIANTS: dict[str, list[str]] = {
    "base": [],
    "twin": ["run.seed=2"],
    "k5": ["method.depth=5"],
    "k10": ["method.depth=10"],
    "no-floor": ["method.cod_floor=0.0"],
    "floor-0.4": ["method.cod_floor=0.4"],
    "1-layer": ["head.num_layers=1"],
    "2-layers": ["head.num_layers=2"],
    "ce": ["method.loss=ce"],
    "tv": ["method.loss=tv"],
    "kl-tv": ["method.loss=kl_tv"],
    "frozen-embeddings": ["head.freeze_embeddings=true"],
    "r-0.5": ["method.cod_ratio=0.5"],
    "r-0.9": ["method.cod_ratio=0.9"],
    "decay-0.8": ["method.depth_decay=0.8"],
    "correction": ["correction.train=together"],
}
_SHOWN = (3, 5, 7)


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("config", type=Path, help="TOML file of the run that is varied")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="a list")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--minutes", type=float, help="begin no variant after so many")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    options = parser.parse_args()
    started = time.perf_counter()
    for name in options.variants.split(","):
        if options.minutes and time.perf_counter() - started > 60 * options.minutes:
            print(json.dumps({"variant": name, "left_out": "no time"}), flush=True)
            continue
        changes = [f"optimizer.steps={options.steps}", *options.changes, *VARIANTS[name]]
        config = TrainConfig.read(options.config, changes)
        config = config.model_copy(update={"output": (options.output / name).absolute()})
        if not (config.output / "train.json").is_file():
            Trainer(config).run()
        print(json.dumps(figures(name, config)), flush=True)


def figures(name: str, config: TrainConfig) -> dict[str, Any]:
    """What a variant gave."""
    record = json.loads((config.output / "train.json").read_text())
    last = record["validation"]
    lengths, sampled = last["acceptance_lengths"], last["sampled_acceptance_lengths"] or []
    alone = last.get("acceptance_lengths_alone", [])
    shown = [k for k in _SHOWN if k <= len(lengths)]
    return {
        "variant": name,
        "changes": VARIANTS[name],
        "steps": record["steps"],
        "seconds": round(record["seconds"], 1),
        "tokens": record["tokens"],
        "parameters": record["parameters"],
        "validation_loss": round(last["loss"], 4),
        "acceptance_length": {k: round(lengths[k - 1], 3) for k in shown},
        "acceptance_length_alone": {k: round(alone[k - 1], 3) for k in shown if alone},
        "sampled_acceptance_length": {k: round(sampled[k - 1], 3) for k in shown if sampled},
        "accuracy_by_depth": [round(value, 3) for value in last["accuracy"]],
        **{name: record[name] for name in ("device", "commit", "torch")},
    }


if __name__ == "__main__":
    main()
