"""Training a tiny target by the recipe, in one process or several (for `run_together`)."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peagle.training.distributed import ONE_PROCESS, Processes

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 64


def scripts() -> None:
    """Let the recipe's scripts be imported by their names, as they import each other."""
    for name in ("bundled_pair", "benchmark_pair"):
        folder = str(ROOT / "recipes" / name)
        if folder not in sys.path:
            sys.path.append(folder)


def write_data(folder: Path) -> None:
    """A configuration and tokens."""
    config = json.loads((ROOT / "recipes/benchmark_pair/target.json").read_text())
    config |= {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    (folder / "tiny.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    for name, count in (("train", 4000), ("val", 400)):
        rng.integers(1, VOCAB, count).astype("<u2").tofile(folder / f"{name}.u16")


def train(processes: Processes | None, folder: Path, steps: int, **changes: Any) -> dict[str, Any]:
    """The gradients of a first step, and losses and weights after some."""
    scripts()
    import pretrain

    torch.set_num_threads(1)
    settings = {"steps": steps, "minutes": None, "batch": 8, "seq_len": 16, "optimizer": "muon"}
    settings |= {"lr": 1e-2, "warmup": 2, "decay_share": 0.5, "weight_decay": 0.1, "clip": 1.0}
    config = pretrain.TrainConfig(**{**settings, "z_loss": 1e-3, "seed": 3, **changes})
    model = pretrain.build_model(folder / "tiny.json", config.seed)
    trainer = pretrain.Trainer(model, config, folder, time.perf_counter(), processes or ONE_PROCESS)
    gradients: dict[str, np.ndarray] = {}

    def keep(*_: object) -> None:
        if not gradients:
            gradients.update({n: p.grad.numpy().copy() for n, p in model.named_parameters()})

    # Where the optimizer steps, gradients are averaged and clipped.
    trainer.optimizers[0].register_step_pre_hook(keep)
    summary = trainer.run()
    weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return {"gradients": gradients, "weights": weights, "summary": summary}
