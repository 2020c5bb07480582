"""Which way to compile a layer for a number of tokens: measured once, then kept on disk.

Autotuned matrix products win at few tokens and lose at many, and where the border lies depends on
the shapes and the card: so both are timed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast, get_args

import torch

Mode = Literal["default", "max-autotune-no-cudagraphs"]
AUTOTUNED: Mode = "max-autotune-no-cudagraphs"
MODES: tuple[Mode, ...] = get_args(Mode)
CACHE_VARIABLE = "PEAGLE_CACHE"
# Where Inductor and Triton keep things, and our folders for it.
_KEPT = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
_FORMAT_VERSION = 1
# The other mode must win by this much: a tie is decided for the one that compiles sooner.
_MARGIN = 1.01
_FLUSH_BYTES = 256 << 20  # larger than the second-level cache of any card


def cache_folder() -> Path:
    """Where results are kept: $PEAGLE_CACHE, else ~/.cache/peagle."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "peagle"


def keep_compiled_code() -> None:
    """Let Inductor and Triton keep code and autotuning results below `cache_folder()`.

    To be called before either compiles anything: both then look in one place, whoever compiles
    first. A variable that the user has set stays as it is. A folder that cannot be written is no
    error: the libraries' own places are used.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = cache_folder()
    try:
        for name in _KEPT.values():
            (folder / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"Compiled code is not kept in {str(folder)!r}: {error}.", stacklevel=3)
        return
    for variable, name in _KEPT.items():
        # Importing Inductor sets its variable to the default: that is nobody's wish.
        if os.environ.get(variable) in (None, default_cache_dir()):
            os.environ[variable] = str(folder / name)


class ModeStore:
    """Choices on disk, one small JSON file each, so that processes do not overwrite each other's.

    Args:
        folder: None is `cache_folder() / "modes"`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder() / "modes"

    def get(self, key: Mapping[str, Any]) -> Mode | None:
        """The choice kept for `key`; None where there is none that can be read."""
        path = self._path(key)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["format_version"] != _FORMAT_VERSION or found["key"] != _plain(key):
                raise ValueError("it is of another version or for something else")
            if found["mode"] not in MODES:
                raise ValueError(f"the mode is {found['mode']!r}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"{str(path)!r} is ignored and will be made anew: {error}.", stacklevel=2)
            return None
        return cast(Mode, found["mode"])

    def put(self, key: Mapping[str, Any], mode: Mode, seconds: Mapping[Mode, float]) -> None:
        """Keep a choice and the times behind it. A disk that cannot be written is no error."""
        content = {
            "format_version": _FORMAT_VERSION,
            "key": _plain(key),
            "mode": mode,
            "seconds": dict(seconds),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Written aside and moved into place: nobody ever reads half a file.
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(content, file, indent=1)
                os.replace(name, self._path(key))
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            warnings.warn(f"The choice of a compile mode is not kept: {error}.", stacklevel=2)

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps(_plain(key), sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def choose_mode(
    bucket: int,
    *,
    shapes: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
    measure: Callable[[Mode], float],
    store: ModeStore | None = None,
) -> Mode:
    """The faster mode for `bucket` tokens, as kept on disk, or as measured now.

    Args:
        bucket: tokens of a pass.
        shapes: what the layer is made of, as JSON can say it.
        dtype: of the weights.
        device: a card is known by its name, a CPU by its instruction set.
        measure: seconds of the layer in a mode; called for each of them if nothing is kept.
        store: where choices are kept; None is the usual place.
    """
    store = store or ModeStore()
    key = {
        "bucket": bucket,
        "shapes": shapes,
        "dtype": str(dtype).removeprefix("torch."),
        "device": _device_name(device),
        "torch": torch.__version__,
        "triton": _triton_version(),
    }
    kept = store.get(key)
    if kept is not None:
        return kept
    seconds: dict[Mode, float] = {mode: measure(mode) for mode in MODES}
    best = min(MODES, key=lambda mode: seconds[mode])
    mode: Mode = "default" if seconds["default"] <= _MARGIN * seconds[best] else best
    store.put(key, mode, seconds)
    return mode


def time_call(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median seconds of a call after a warm-up; on a card, of its CUDA graph with cold caches.

    A graph leaves out what the host does between kernels, as decoding does.
    """
    if device.type != "cuda":
        call()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return median(times)
    return _time_graph(capture(call), device, repeats)


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the call, after two runs to warm up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def _time_graph(graph: torch.cuda.CUDAGraph, device: torch.device, repeats: int) -> float:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
    events = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize(device)
    return median(start.elapsed_time(end) for start, end in events) / 1000


def _plain(key: Mapping[str, Any]) -> Any:
    """The key as JSON gives it back (tuples become lists)."""
    return json.loads(json.dumps(key))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{device.type} {platform.machine()} {capability} {torch.get_num_threads()} threads"


def _triton_version() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None
