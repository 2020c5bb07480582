"""GPU instance types of Amazon SageMaker, and whether a model fits one."""

import re
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from peagle.config.checks import near_names
from peagle.deploy.memory import MemoryNeeded, gib
from peagle.errors import UserError

# Share of a GPU's memory that vLLM and our engine use (vLLM's own default is 0.9 or 0.92).
DEFAULT_UTILIZATION = 0.9
# vLLM refuses bfloat16 (platforms/cuda.py) and MXFP4 (quantization/mxfp4.py) on GPUs of a lower
# compute capability. FP8 and NVFP4 weights come with bfloat16 ones.
_BF16_CAPABILITY = (8, 0)
_PRECISIONS_OF_ANY_GPU = ("", "fp16", "fp32", "int4", "int8")
# vLLM's options that spread a model over GPUs: parts of a layer, groups of layers, and copies.
PARALLEL_SIZES = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
_NAME = re.compile(r"ml\.[a-z][a-z0-9-]*\.(metal|[0-9]*x?large|medium|micro|small|nano)")
_WITHOUT_GPU = re.compile(r"ml\.([cmrt][0-9]|inf|trn|dl)")
_TOO_OLD = re.compile(r"ml\.p[23](dn)?\.")  # K80 and V100: CUDA 13 begins at 7.5
_SUGGESTED_FAMILIES = 3  # the cheapest one depends on the region


@dataclass(frozen=True, slots=True)
class InstanceType:
    """An instance type with NVIDIA GPUs.

    Attributes:
        name: "ml.g7e.2xlarge".
        gpu: product name of its GPUs.
        gpu_bytes: memory of one GPU.
        capability: CUDA compute capability of the GPUs.
        num_gpus: number of GPUs.
    """

    name: str
    gpu: str
    gpu_bytes: int
    capability: tuple[int, ...]
    num_gpus: int

    def __str__(self) -> str:
        """Return the GPUs for people: "1 x L40S with 44.7 GiB", "4 x L40S with 44.7 GiB each"."""
        each = " each" if self.num_gpus > 1 else ""
        return f"{self.num_gpus} x {self.gpu} with {gib(self.gpu_bytes)}{each}"


@cache
def sagemaker_facts() -> dict[str, Any]:
    """Return the content of sagemaker.toml."""
    return tomllib.loads(files("peagle.deploy").joinpath("sagemaker.toml").read_text("utf-8"))


# By GPU memory in all, the smallest first.
INSTANCE_TYPES: dict[str, InstanceType] = {
    kind.name: kind
    for kind in sorted(
        (
            InstanceType(
                f"ml.{family}.{size}",
                row["gpu"],
                row["gpu_mib"] << 20,
                tuple(row["capability"]),
                num_gpus,
            )
            for family, row in sagemaker_facts()["families"].items()
            for size, num_gpus in row["sizes"].items()
        ),
        key=lambda kind: kind.num_gpus * kind.gpu_bytes,
    )
}


def find_instance_type(name: str) -> InstanceType | None:
    """Return the instance type of this name; None, with a warning, if the table lacks it.

    Raises:
        UserError: it is no name of an instance type, or has no NVIDIA GPU.
    """
    if name in INSTANCE_TYPES:
        return INSTANCE_TYPES[name]
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
    near = near_names(name.lower(), INSTANCE_TYPES, 3, 0.75)
    if _NAME.fullmatch(name) is None:
        guess = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UserError(
            f"The instance type is {name!r}; expected a name like ml.g7e.2xlarge.{guess}"
        )
    guess = f" (near: {', '.join(near)})" if near else ""
    warnings.warn(
        f"peagle does not know the instance type {name}{guess}; it did not check whether the type "
        "exists and whether the model fits it.",
        stacklevel=2,
    )
    return None


def require_fits(
    instance_type: str, needed: MemoryNeeded | None, flags: Mapping[str, str]
) -> InstanceType | None:
    """Refuse an instance type that is too small, or whose GPUs cannot run the precision.

    One copy of the model takes tensor-parallel-size · pipeline-parallel-size GPUs, each 1 if
    another parallel size is given, and there are data-parallel-size copies. Without any of these
    options, a copy takes all GPUs of the instance, or as many as `needed` allows.

    Args:
        instance_type: "ml.g7e.2xlarge"; one that the table lacks passes with a warning.
        needed: None if the model's size is unknown; that passes with a warning.
        flags: options of vLLM, by name without dashes.

    Returns:
        The instance type; None if the table lacks it.

    Raises:
        UserError: not a name of an instance type, no GPU, too few GPUs, too little memory, or a
            precision that its GPUs do not have.
    """
    sizes = {name: int(flags[name]) for name in PARALLEL_SIZES if flags.get(name, "").isdecimal()}
    tensor, pipeline, copies = (sizes.get(name, 1) for name in PARALLEL_SIZES)
    one_copy = tensor * pipeline if sizes else None
    try:
        utilization = float(flags.get("gpu-memory-utilization", DEFAULT_UTILIZATION))
    except ValueError:
        utilization = DEFAULT_UTILIZATION  # vLLM says what is wrong with it
    instance = find_instance_type(instance_type)
    if instance is None:
        return None
    gpus = _gpus_of_copy(instance, needed, one_copy)
    if gpus > instance.num_gpus:
        raise UserError(
            f"One copy of the model is on {gpus} GPUs, and {instance.name} has {instance}. "
            "Lower tensor-parallel-size, or give a larger --instance-type."
        )
    if needed is None:
        warnings.warn(
            f"peagle did not check whether the model fits {instance.name} ({instance}): it does "
            "not know the model's size.",
            stacklevel=2,
        )
    elif not fits(instance, needed, one_copy, utilization=utilization):
        remedy = _remedy(instance, needed, one_copy, utilization)
        if not _has_precision(instance, needed.precision):
            have, want = (".".join(map(str, c)) for c in (instance.capability, _BF16_CAPABILITY))
            raise UserError(
                f"{instance.name} has {instance.gpu} GPUs of compute capability {have}, and the "
                f"model is of {needed.precision}, which needs {want} or later. {remedy}"
            )
        usable = gib(int(instance.gpu_bytes * utilization))
        raise UserError(
            f"The model does not fit {instance.name}: it needs {gib(needed.per_gpu(gpus))} on "
            f"{'one GPU' if gpus == 1 else f'each of {gpus} GPUs'} ({needed.describe(gpus)}). It "
            f"has {instance}, of which {usable} may be used ({utilization:.0%}). {remedy}"
        )
    if one_copy and copies * one_copy > instance.num_gpus:
        raise UserError(
            f"data-parallel-size is {copies}, and each copy of the model is on {one_copy} GPUs: "
            f"that is {copies * one_copy}, and {instance.name} has {instance}. Lower it, or give a "
            "larger --instance-type."
        )
    return instance


def fits(
    instance: InstanceType,
    needed: MemoryNeeded,
    gpus: int | None = None,
    *,
    utilization: float = DEFAULT_UTILIZATION,
) -> bool:
    """Return whether the instance has the GPUs, memory and precision for one copy on `gpus`."""
    gpus = _gpus_of_copy(instance, needed, gpus)
    return (
        gpus <= instance.num_gpus
        and _has_precision(instance, needed.precision)
        and needed.per_gpu(gpus) <= instance.gpu_bytes * utilization
    )


def fitting_types(
    needed: MemoryNeeded, gpus: int | None = None, *, utilization: float = DEFAULT_UTILIZATION
) -> list[InstanceType]:
    """Return the smallest instance type of each family that fits, ordered by GPU memory in all."""
    found: dict[str, InstanceType] = {}
    for instance in INSTANCE_TYPES.values():
        if fits(instance, needed, gpus, utilization=utilization):
            found.setdefault(instance.name.split(".")[1], instance)
    return list(found.values())


def _has_precision(instance: InstanceType, precision: str) -> bool:
    return precision in _PRECISIONS_OF_ANY_GPU or instance.capability >= _BF16_CAPABILITY


def _gpus_of_copy(instance: InstanceType, needed: MemoryNeeded | None, given: int | None) -> int:
    if given is not None:
        return given
    return min(instance.num_gpus, (needed and needed.max_gpus) or instance.num_gpus)


def _remedy(
    instance: InstanceType, needed: MemoryNeeded, gpus: int | None, utilization: float
) -> str:
    """Return the changes that would make the model fit, in a sentence."""
    ways = []
    larger = fitting_types(needed, gpus, utilization=utilization)
    if larger := sorted(larger, key=lambda kind: kind.num_gpus)[:_SUGGESTED_FAMILIES]:
        one_of = "one of " if len(larger) > 1 else ""
        names = ", ".join(f"{kind.name} ({kind})" for kind in larger)
        ways.append(f"give as --instance-type {one_of}{names}")
    if fits(instance, replace(needed, kv_parts=()), gpus, utilization=utilization):
        ways.append("lower max-model-len")
    halved = replace(needed, precision="fp16")
    if (
        needed.precision == "bf16"
        and needed.max_gpus is None
        and fits(instance, halved, gpus, utilization=utilization)
    ):
        ways.append("set dtype=half")
    text = ", or ".join(ways) or "no instance type known here fits, on so many GPUs"
    return f"{text[0].upper()}{text[1:]}."
