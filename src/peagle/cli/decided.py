"""The values that a setup's defaults get on this machine, without loading a target."""

import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peagle.bundled import expand_bundled
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.errors import CheckpointError
from peagle.model_folder import read_file_header, read_json
from peagle.model_shape import ModelShape
from peagle.models.head_json import is_parallel_head


def decided(
    target: str, engine: EngineConfig, speculative: SpeculativeConfig | None, threads: int | None
) -> dict[str, Any]:
    """Return the device, the type, K and the trees, the CPU threads and the longest sequence.

    A value that depends on the target is None for a target that is not in a folder here.
    """
    from peagle.engine.placement import resolve_device, resolve_dtype
    from peagle.engine.step.graph_runner import runs_as_graphs

    device = resolve_device(engine.device)
    if speculative is not None and speculative.model is not None:
        parallel = is_parallel_head(Path(expand_bundled(speculative.model, "draft")).expanduser())
        is_captured = runs_as_graphs(device, engine)
        speculative = speculative.settled(is_captured=is_captured, parallel=parallel is not False)
    trees = None if speculative is None else speculative.trees
    dtype = resolve_dtype(engine.dtype, device)
    folder = Path(target).expanduser()
    return {
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "num_speculative_tokens": 0 if speculative is None else speculative.num_speculative_tokens,
        "parallel_drafting_spec": None if trees is None else asdict(trees),
        "threads": threads or _threads(folder, device.type, dtype.itemsize),
        "max_model_len": engine.max_model_len or _longest(folder),
    }


def _threads(folder: Path, device: str, value_bytes: int) -> int | None:
    """Return the CPU threads that torch gets; on a CPU they follow the size of the weights."""
    from peagle.engine.placement import THREAD_VARIABLES, fast_threads, usable_cores

    for name in THREAD_VARIABLES:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    if device != "cpu":
        return 1
    try:
        headers = [read_file_header(file) for file in folder.glob("*.safetensors")]
    except (OSError, ValueError):
        return None
    values = sum(math.prod(one["shape"]) for header in headers for one in header.values())
    return fast_threads(values * value_bytes, usable_cores()) if headers else None


def _longest(folder: Path) -> int | None:
    try:
        return ModelShape.from_json(read_json(folder / "config.json")).max_model_len
    except (OSError, CheckpointError):
        return None
