"""The checkpoint that a run resumes from: weights, optimizer and step, in safetensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from peagle.errors import UserError
from peagle.training.masters import Masters

_WEIGHTS = "weights."
_OPTIMIZER = "optimizer."


def save_state(
    folder: Path, masters: Masters, optimizers: Sequence[Optimizer], step: int, facts: dict
) -> None:
    """Write a checkpoint beside the last one, then put it in its place.

    An interrupt or a full disk while writing leaves the last checkpoint whole.

    Raises:
        UserError: it could not be written (a full disk for one).
    """
    tensors = {_WEIGHTS + n: p.detach().cpu().contiguous() for n, p in masters.state().items()}
    names = {id(p): n for n, p in masters.named()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                name = f"{_OPTIMIZER}{key}.{names[id(parameter)]}"
                tensors[name] = value.detach().cpu().contiguous()
    partial = folder.with_name(folder.name + ".part")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(tensors, partial / "state.safetensors", metadata={"step": str(step)})
        (partial / "state.json").write_text(json.dumps({"step": step, **facts}, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"The checkpoint {str(folder)!r} could not be written: {error}. "
            "The last one is whole; free some space and run again with --resume."
        ) from None
    previous = folder.with_name(folder.name + ".old")
    shutil.rmtree(previous, ignore_errors=True)
    if folder.exists():
        os.replace(folder, previous)
    os.replace(partial, folder)
    shutil.rmtree(previous, ignore_errors=True)


def load_state(folder: Path, masters: Masters, optimizers: Sequence[Optimizer], facts: dict) -> int:
    """Put a checkpoint into model and optimizer; returns the step to go on from.

    Raises:
        UserError: there is none, it is broken, or `facts` (what must not change) differ.
    """
    previous = folder.with_name(folder.name + ".old")
    if not folder.exists() and previous.exists():
        folder = previous  # interrupted between the two renames of `save_state`
    if not (folder / "state.json").is_file():
        raise UserError(
            f"There is no checkpoint to resume from in {str(folder)!r}; run without --resume."
        )
    record = json.loads((folder / "state.json").read_text())
    for name, value in facts.items():
        if record.get(name) != value:
            raise UserError(
                f"The checkpoint {str(folder)!r} was made with {name} {record.get(name)!r}, the "
                f"configuration says {value!r}. Restore it, or start anew in another output folder."
            )
    device = masters.drafter.fc.weight.device
    weights: dict[str, Tensor] = {}
    state: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(folder / "state.safetensors", framework="pt", device=str(device)) as reader:
            for name in reader.keys():  # noqa: SIM118 (not a mapping)
                tensor = reader.get_tensor(name)
                if name.startswith(_WEIGHTS):
                    weights[name.removeprefix(_WEIGHTS)] = tensor
                else:
                    key, parameter = name.removeprefix(_OPTIMIZER).split(".", 1)
                    state.setdefault(parameter, {})[key] = tensor
    except (SafetensorError, OSError) as error:
        raise UserError(f"The checkpoint {str(folder)!r} is not readable: {error}.") from None
    masters.load(weights)
    names = {id(p): n for n, p in masters.named()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if names[id(parameter)] in state:
                    optimizer.state[parameter] = state[names[id(parameter)]]
    return record["step"]
