"""GPU instance types of Amazon SageMaker, and whether a model fits one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from peagle.deploy.memory import MemoryNeeded, gib
from peagle.errors import UserError

MIB = 2**20
# Share of a GPU's memory that vLLM and our engine use (vLLM's own default is 0.9 or 0.92).
DEFAULT_UTILIZATION = 0.9


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of NVIDIA GPU.

    Attributes:
        name: of the product.
        memory_bytes: of one.
        capability: CUDA compute capability.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class InstanceType:
    """An instance type with GPUs.

    Attributes:
        name: "ml.g7e.2xlarge".
        gpu: what kind it has.
        num_gpus: how many.
    """

    name: str
    gpu: Gpu
    num_gpus: int

    @property
    def memory_bytes(self) -> int:
        """Of all its GPUs."""
        return self.num_gpus * self.gpu.memory_bytes

    @property
    def shown(self) -> str:
        """For people: "1 x L40S with 44.7 GiB", "4 x L40S with 44.7 GiB each"."""
        each = " each" if self.num_gpus > 1 else ""
        return f"{self.num_gpus} x {self.gpu.name} with {gib(self.gpu.memory_bytes)}{each}"


# Memory and number of GPUs as EC2's DescribeInstanceTypes tells them for the type without "ml.";
# compute capabilities of NVIDIA's table "CUDA GPU Compute Capability". SageMaker hosts all of them:
# ProductionVariantInstanceType of its service model. Left out, as that call was not seen for it:
# ml.p6e-gb200.36xlarge.
_T4 = Gpu("T4", 16384 * MIB, (7, 5))
_A10G = Gpu("A10G", 22888 * MIB, (8, 6))
_L4 = Gpu("L4", 22888 * MIB, (8, 9))
_L40S = Gpu("L40S", 45776 * MIB, (8, 9))
_RTX_4500 = Gpu("RTX PRO 4500", 32768 * MIB, (12, 0))
_RTX_6000 = Gpu("RTX PRO 6000", 98304 * MIB, (12, 0))
_A100_40 = Gpu("A100", 40960 * MIB, (8, 0))
_A100_80 = Gpu("A100", 81920 * MIB, (8, 0))
_H100 = Gpu("H100", 81920 * MIB, (9, 0))
_H200 = Gpu("H200", 144384 * MIB, (9, 0))
_B200 = Gpu("B200", 183359 * MIB, (10, 0))
_B300 = Gpu("B300", 275040 * MIB, (10, 3))

_SMALL = {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "16xlarge": 1}
_G6_SIZES = {**_SMALL, "12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
_G7_SIZES = {"2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 2, "24xlarge": 4, "48xlarge": 8}
_FAMILIES: dict[str, tuple[Gpu, dict[str, int]]] = {
    "g4dn": (_T4, {**_SMALL, "12xlarge": 4}),
    "g6": (_L4, _G6_SIZES),
    "g5": (_A10G, _G6_SIZES),
    "g7": (_RTX_4500, _G7_SIZES),
    "g6e": (_L40S, _G6_SIZES),
    "g7e": (_RTX_6000, _G7_SIZES),
    "p4d": (_A100_40, {"24xlarge": 8}),
    "p4de": (_A100_80, {"24xlarge": 8}),
    "p5": (_H100, {"4xlarge": 1, "48xlarge": 8}),
    "p5e": (_H200, {"48xlarge": 8}),
    "p5en": (_H200, {"48xlarge": 8}),
    "p6-b200": (_B200, {"48xlarge": 8}),
    "p6-b300": (_B300, {"48xlarge": 8}),
}
# By GPU memory in all, the smallest first.
INSTANCE_TYPES: dict[str, InstanceType] = {
    kind.name: kind
    for kind in sorted(
        (
            InstanceType(f"ml.{family}.{size}", gpu, num_gpus)
            for family, (gpu, sizes) in _FAMILIES.items()
            for size, num_gpus in sizes.items()
        ),
        key=lambda kind: kind.memory_bytes,
    )
}

_FORM = re.compile(r"ml\.[a-z][a-z0-9-]*\.(metal|[0-9]*x?large|medium|micro|small|nano)")
_WITHOUT_GPU = re.compile(r"ml\.([cmrt][0-9]|inf|trn|dl)")
_TOO_OLD = re.compile(r"ml\.p[23](dn)?\.")  # K80 and V100: CUDA 13 begins at 7.5
# Compute capability below which vLLM refuses a precision: for bfloat16 its platforms/cuda.py, for
# MXFP4 its quantization/mxfp4.py. FP8 and NVFP4 weights come with bfloat16 for the rest.
_BF16_CAPABILITY = (8, 0)
_TENSOR, _PIPELINE, _DATA = _SIZES = (
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "data-parallel-size",
)
_SUGGESTED = 3  # families: which one is the cheapest depends on the region
_ANY_GPU = ("", "fp16", "fp32", "int4", "int8")


def find_instance_type(name: str) -> InstanceType | None:
    """The instance type of this name; None, with a warning, for one that is not in the table.

    Raises:
        UserError: it is no name of an instance type, or has no NVIDIA GPU.
    """
    if name in INSTANCE_TYPES:
        return INSTANCE_TYPES[name]
    near = get_close_matches(name.lower(), INSTANCE_TYPES, 3, 0.75)
    if _WITHOUT_GPU.match(name):
        raise UserError(
            f"The instance type is {name!r}, which has no NVIDIA GPU; the containers need one. "
            "Give one with GPUs, like ml.g6e.xlarge or ml.g7e.2xlarge."
        )
    if _TOO_OLD.match(name):
        raise UserError(
            f"The instance type is {name!r}, whose GPUs are older than compute capability 7.5, "
            "which the containers need. Give a newer one, like ml.g6e.xlarge or ml.g7e.2xlarge."
        )
    if _FORM.fullmatch(name) is None:
        guess = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UserError(
            f"The instance type is {name!r}; expected a name like ml.g7e.2xlarge.{guess}"
        )
    guess = f" (near: {', '.join(near)})" if near else ""
    warnings.warn(
        f"The instance type {name} is not known here{guess}; whether it exists, and whether the "
        "model fits it, was not checked.",
        stacklevel=2,
    )
    return None


def require_fits(
    instance_type: str,
    needed: MemoryNeeded | None,
    tensor_parallel_size: int | None = None,
    *,
    utilization: float = DEFAULT_UTILIZATION,
) -> InstanceType | None:
    """Refuse an instance type that is too small, or whose GPUs cannot run the precision.

    Args:
        instance_type: "ml.g7e.2xlarge"; one that is not in the table passes with a warning.
        needed: None where the model's size is not known, which passes with a warning.
        tensor_parallel_size: GPUs that share one copy of the model; None takes all that the
            instance has, or as many as `needed` allows.
        utilization: share of each GPU's memory that the engine may use.

    Returns:
        The instance type, None where it is not in the table.

    Raises:
        UserError: not a name of an instance type, no GPU, too few GPUs, too little memory, a
            precision that its GPUs do not have.
    """
    instance = find_instance_type(instance_type)
    if instance is None:
        return None
    gpus = _gpus_used(instance, needed, tensor_parallel_size)
    if gpus > instance.num_gpus:
        raise UserError(
            f"One copy of the model is on {gpus} GPUs, and {instance.name} has {instance.shown}. "
            "Lower tensor-parallel-size, or give a larger --instance-type."
        )
    if needed is None:
        warnings.warn(
            f"Whether the model fits {instance.name} ({instance.shown}) was not checked: its size "
            "is not known here.",
            stacklevel=2,
        )
        return instance
    if not has_precision(instance.gpu, needed.precision):
        raise UserError(
            f"{instance.name} has {instance.gpu.name} GPUs of compute capability "
            f"{_version(instance.gpu.capability)}, and the model is of {needed.precision}, which "
            f"needs {_version(_BF16_CAPABILITY)} or later. "
            f"{_remedy(instance, needed, tensor_parallel_size, utilization)}"
        )
    if not fits(instance, needed, tensor_parallel_size, utilization=utilization):
        raise UserError(
            f"The model does not fit {instance.name}: it needs {gib(needed.per_gpu(gpus))} on "
            f"{'one GPU' if gpus == 1 else f'each of {gpus} GPUs'} ({needed.told(gpus)}). It has "
            f"{instance.shown}, of which {gib(int(instance.gpu.memory_bytes * utilization))} may "
            f"be used ({utilization:.0%}). "
            f"{_remedy(instance, needed, tensor_parallel_size, utilization)}"
        )
    return instance


def require_fits_flags(
    instance_type: str, needed: MemoryNeeded | None, flags: Mapping[str, str]
) -> InstanceType | None:
    """`require_fits` with what options of vLLM, by name without dashes, say of GPUs and memory.

    One copy of the model is on tensor-parallel-size · pipeline-parallel-size GPUs, 1 each where
    another of the parallel sizes is given, and there are data-parallel-size copies.

    Raises:
        UserError: as `require_fits`; or all copies need more GPUs than there are.
    """
    sizes = {name: int(flags.get(name, "")) for name in _SIZES if flags.get(name, "").isdecimal()}
    one_copy = sizes.get(_TENSOR, 1) * sizes.get(_PIPELINE, 1) if sizes else None
    try:
        utilization = float(flags.get("gpu-memory-utilization", DEFAULT_UTILIZATION))
    except ValueError:
        utilization = DEFAULT_UTILIZATION  # vLLM says what is wrong with it
    instance = require_fits(instance_type, needed, one_copy, utilization=utilization)
    copies = sizes.get(_DATA, 1)
    if instance and one_copy and copies * one_copy > instance.num_gpus:
        raise UserError(
            f"{_DATA} is {copies}, and each copy of the model is on {one_copy} GPUs: that is "
            f"{copies * one_copy}, and {instance.name} has {instance.shown}. Lower it, or give a "
            "larger --instance-type."
        )
    return instance


def fits(
    instance: InstanceType,
    needed: MemoryNeeded,
    tensor_parallel_size: int | None = None,
    *,
    utilization: float = DEFAULT_UTILIZATION,
) -> bool:
    """Whether the instance has the GPUs, the memory and the precision."""
    gpus = _gpus_used(instance, needed, tensor_parallel_size)
    return (
        gpus <= instance.num_gpus
        and has_precision(instance.gpu, needed.precision)
        and needed.per_gpu(gpus) <= instance.gpu.memory_bytes * utilization
    )


def has_precision(gpu: Gpu, precision: str) -> bool:
    """Whether vLLM, and our engine, run weights of this precision on the GPU."""
    return precision in _ANY_GPU or gpu.capability >= _BF16_CAPABILITY


def that_fit(
    needed: MemoryNeeded,
    tensor_parallel_size: int | None = None,
    *,
    utilization: float = DEFAULT_UTILIZATION,
) -> list[InstanceType]:
    """The instance types that fit, of each family the smallest, by GPU memory in all."""
    found: dict[str, InstanceType] = {}
    for instance in INSTANCE_TYPES.values():
        if fits(instance, needed, tensor_parallel_size, utilization=utilization):
            found.setdefault(instance.name.split(".")[1], instance)
    return list(found.values())


def _gpus_used(instance: InstanceType, needed: MemoryNeeded | None, given: int | None) -> int:
    if given is not None:
        return given
    return min(instance.num_gpus, (needed and needed.max_gpus) or instance.num_gpus)


def _remedy(
    instance: InstanceType, needed: MemoryNeeded, gpus: int | None, utilization: float
) -> str:
    without_kv = replace(needed, kv_parts=())
    shorter = fits(instance, without_kv, gpus, utilization=utilization)
    halved = replace(needed, precision="fp16")
    half = needed.max_gpus is None and fits(instance, halved, gpus, utilization=utilization)
    larger = that_fit(needed, gpus, utilization=utilization)
    larger = sorted(larger, key=lambda kind: kind.num_gpus)[:_SUGGESTED]
    names = ", ".join(f"{kind.name} ({kind.shown})" for kind in larger)
    one_of = "one of " if len(larger) > 1 else ""
    ways = [
        *([f"give as --instance-type {one_of}{names}"] if larger else []),
        *(["lower max-model-len"] if shorter else []),
        *(["set dtype=half"] if half and needed.precision == "bf16" else []),
    ]
    text = ", or ".join(ways) or "no instance type known here fits, on so many GPUs"
    return f"{text[0].upper()}{text[1:]}."


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
