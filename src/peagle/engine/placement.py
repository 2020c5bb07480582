"""The placement of a model: its device, its types, and the CPU threads of torch.

In a decode step every product of the model ends with all threads waiting for the slowest. A small
model's products are shorter than that wait, and if another program has one of the cores, every wait
lasts until the scheduler gives that core back. A thread pays for its waits only if it has many
bytes of weights to read.
"""

import os
import time
from pathlib import Path

import torch
from torch import nn

from peagle.config.checks import require
from peagle.config.engine import EngineConfig
from peagle.engine.memory_plan import refuse_too_large
from peagle.errors import UserError
from peagle.models.target import TargetModel

# At 10 GB/s a thread reads this much in 7 ms, many times the waits of a step.
BYTES_PER_THREAD = 64 * 2**20
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_CPU_TIMES = Path("/proc/stat")
_SHORTEST_S = 0.2  # seconds over which the use of cores can be measured

_is_set = False
_chosen: int | None = None


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the torch type of an EngineConfig dtype; "auto" is float32 on a CPU, else bfloat16."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


def resolve_device(name: str) -> torch.device:
    """Return the device of an EngineConfig; raise a UserError if torch does not have it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise UserError(
            f"device is {name!r}, which torch does not have here ({os.uname().sysname}); "
            'expected "auto", "cpu" or "cuda".'
        ) from None
    return device


def gpu_names() -> list[str]:
    """Return the GPUs that this process sees, in the form that CUDA_VISIBLE_DEVICES has.

    A process that gets one of them in that variable sees this GPU alone. The variable may already
    name some of the machine's GPUs, by number or by identifier; a number then counts all GPUs of
    the machine, not those that this process sees.
    """
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return (named if named[0] else list(map(str, range(count))))[:count]


def load_target(folder: str | Path, config: EngineConfig) -> TargetModel:
    """Load a target with the types and on the device of a configuration.

    Raises:
        UserError: the folder, a type or the device is not usable, or the device is too small.
        CheckpointError: it is not a causal LM that peagle supports, or its weights are broken.
    """
    _others.restart()
    device = resolve_device(config.device)
    is_twice = config.fp8_activations != "off"
    saving = {"saving": "Leave fp8_activations out (it keeps weights twice)"} if is_twice else {}
    with refuse_too_large("target", folder, device, **saving):
        return TargetModel.load(
            folder,
            dtype=resolve_dtype(config.dtype, device),
            device=device,
            quantization=config.quantization,
            fp8_activations=config.fp8_activations,
            kv_cache_dtype=config.kv_cache_dtype,
            max_model_len=config.max_model_len,
        )


def fix_threads(threads: int) -> None:
    """Set torch's number of CPU threads; no model changes it from then on."""
    require(threads >= 1, "--threads", threads, "at least 1")
    global _is_set
    _is_set = True
    torch.set_num_threads(threads)


def choose_threads(model: nn.Module) -> None:
    """Set torch's number of CPU threads for a model on a CPU, by `fast_threads`.

    The cores are those that other programs left free while the model was loaded. For a model on a
    GPU the number is one: the CPU computes little, and threads that wait for more work take cores
    from the threads that launch kernels, or serve.

    The number is the whole process's. It stays unchanged after `fix_threads`, if the environment
    sets OMP_NUM_THREADS or MKL_NUM_THREADS, and if a program has called torch.set_num_threads:
    torch then has a number that is neither its own default nor one from here.
    """
    global _chosen
    now = torch.get_num_threads()
    if _is_set or any(map(os.environ.get, THREAD_VARIABLES)) or now not in (_chosen, *_defaults()):
        return
    weights = (weight for weight in model.parameters() if weight.device.type == "cpu")
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    _chosen = fast_threads(weight_bytes, min(usable_cores(), _others.free_cores()))
    torch.set_num_threads(_chosen)


def fast_threads(weight_bytes: int, cores: int) -> int:
    """Return a thread for each `BYTES_PER_THREAD` of weights, at least one, at most `cores`."""
    return max(1, min(weight_bytes // BYTES_PER_THREAD, cores))


def usable_cores() -> int:
    """Return the cores that this process may use, by affinity and cgroup quota, one a real core."""
    quota = float("inf")
    try:
        limit, period = _CPU_MAX.read_text().split()
        quota = int(limit) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        pass
    return max(1, int(min(quota, *_defaults())))


class OtherPrograms:
    """The use that other programs make of the processors of this process."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Measure from now on."""
        self._since, self._busy_s, self._own_s = time.monotonic(), _busy_seconds(), _own_seconds()

    def busy_cores(self) -> float | None:
        """Return the processors that other programs kept busy; None after too short a time."""
        seconds = time.monotonic() - self._since
        if seconds < _SHORTEST_S:
            return None
        own = _own_seconds() - self._own_s
        return max(0.0, (_busy_seconds() - self._busy_s - own) / seconds)

    def free_cores(self) -> int:
        """Return the processors that other programs left free, rounded; at least one."""
        return max(1, round(_defaults()[0] - (self.busy_cores() or 0.0)))


def _busy_seconds() -> float:
    """Return the seconds that the processors of this process were in use; 0 if unknown."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    names, ticks = {f"cpu{number}" for number in usable}, 0
    try:
        for line in _CPU_TIMES.read_text().splitlines():
            name, *times = line.split()
            if name in names:
                # user, nice, system, idle, iowait, irq, softirq, steal
                ticks += sum(map(int, times[:3])) + sum(map(int, times[5:8]))
    except (OSError, ValueError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    own = os.times()
    return own.user + own.system


def _defaults() -> tuple[int, int]:
    """Return torch's two possible default numbers: all usable processors, and one a real core."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    processors = len(usable) if usable else os.cpu_count() or 1
    return processors, min(processors, _physical_cores() or processors)


def _physical_cores() -> int:
    """Return the cores of this machine, two threads of one counted once; 0 if unknown."""
    siblings = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    try:
        return len({file.read_text() for file in siblings})
    except OSError:
        return 0


_others = OtherPrograms()
