"""Put the trained pair into the package and write its model cards.

    python recipes/bundled_pair/bundle.py [--pair build/pair] [--figures figures.json]

`figures.json` holds what `benchmarks/acceptance.py` printed, one JSON object a line; without it the
cards carry no acceptance.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BUNDLED = HERE.parents[1] / "src" / "peagle" / "bundled"
TARGET_FILES = ("config.json", "generation_config.json", "model.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
LIMIT_BYTES = 16_000_000


def copy(source: Path, destination: Path, names: tuple[str, ...]) -> None:
    """Copy the files that are there."""
    destination.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def card(title: str, base: str, facts: dict[str, Any], text: str) -> str:
    """A model card: front matter for hubs, a paragraph, a table of facts."""
    lines = ["---", "license: apache-2.0", "library_name: peagle"]
    lines += [f"base_model: {base}"] if base else []
    lines += ["---", "", f"# {title}", "", text, "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items() if value is not None]
    return "\n".join(lines) + "\n"


def target_card(record: dict[str, Any], manifest: dict[str, Any]) -> str:
    """The card of the target."""
    names, *rows = manifest["packages"]
    packages = [row for row in rows if row[names.index("split")] == "train"]
    facts = {
        "parameters": f"{record['parameters']:,}",
        "data": f"{len(packages)} Python packages and the standard library under permissive "
        "licences, public-domain PEPs (`recipes/bundled_pair/manifest.json`); HumanEval, MT-Bench "
        "and GSM8K prompts removed by 13-gram overlap",
        "steps": f"{record['steps']:,} ({record['tokens']:,} tokens)",
        "loss": f"{record['train_loss']:.4f} training, {record['val_loss']:.4f} on "
        "held-out packages (per token)",
        "hardware": f"{record['hardware']}, {record['seconds'] / 60:.1f} minutes",
        "software": ", ".join(f"{name} {v}" for name, v in record["versions"].items()),
        "commit": record["commit"],
        "command": f"`{record['command']}`",
    }
    return card(
        "A small code model for demonstrations",
        "",
        facts,
        "A Llama of 16 narrow layers, trained from scratch on Python source. It completes code "
        "that looks like code, and falls into loops when decoded greedily; it is here to show "
        "speculative decoding on any machine, not to program.",
    )


def head_card(title: str, record: dict[str, Any], figures: list[dict[str, Any]]) -> str:
    """The card of a draft head."""
    config, method = record["config"], record["config"]["method"]
    validation = record["best"]["validation"] if record.get("best") else record["validation"]
    facts: dict[str, Any] = {
        "parameters": f"{record['parameters']:,}",
        "layers": config["head"]["num_layers"],
        "data": f"{record['sequences']:,} responses of the target to prompts from its training "
        "packages, greedy and sampled",
        "steps": f"{record['steps']:,} ({record['epochs']:.1f} epochs)",
        "note": record.get("note"),
        "depth trained": method["depth"],
        "validation loss": f"{validation['loss']:.4f} ({method['loss']})",
        "simulated acceptance length": f"{validation['acceptance_lengths'][6]:.3f} at K = 7, "
        "greedy, on held-out responses",
        "hardware": f"{record['device']}, {record['seconds'] / 60:.1f} minutes",
        "software": f"torch {record['torch']}, transformers {record['transformers']}, "
        f"peagle {record['peagle']}",
        "commit": record["commit"],
    }
    for figure in figures:
        facts[figure["name"]] = figure["value"]
    return card(
        title,
        "the bundled target",
        facts,
        "A draft head for the bundled code model, in the form that vLLM loads.",
    )


def main() -> None:
    """Copy and describe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", type=Path, default=HERE / "../../build/pair")
    parser.add_argument("--figures", type=Path)
    options = parser.parse_args()
    pair: Path = options.pair
    figures = json.loads(options.figures.read_text()) if options.figures else {}

    copy(pair / "target", BUNDLED / "target", TARGET_FILES + TOKENIZER_FILES)
    manifest = json.loads((HERE / "manifest.json").read_text())
    record = json.loads((pair / "target_train.json").read_text())
    (BUNDLED / "target" / "README.md").write_text(target_card(record, manifest))
    for name, title in (("peagle", "P-EAGLE"), ("eagle3", "EAGLE-3")):
        if not (pair / name / "head").is_dir():
            print(f"no {title} head in {pair}")
            continue
        files = ("config.json", "model.safetensors", "correction.st")
        copy(pair / name / "head", BUNDLED / name, files)
        record = json.loads((pair / name / "train.json").read_text())
        text = head_card(f"{title} head of the bundled code model", record, figures.get(name, []))
        (BUNDLED / name / "README.md").write_text(text)
    size = sum(p.stat().st_size for p in BUNDLED.rglob("*.safetensors"))
    print(f"weights: {size / 1e6:.2f} MB of {LIMIT_BYTES / 1e6:.0f} MB")
    if size > LIMIT_BYTES:
        raise SystemExit("the weights are over the limit")


if __name__ == "__main__":
    main()
