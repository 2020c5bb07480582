"""`--engine vllm` of the commands that measure: its options, and the command line of vLLM."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.cli import groups
from peagle.cli.flags import Given, pick
from peagle.config import SpeculativeConfig
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.backends.vllm.installation import VllmInstallation
    from peagle.backends.vllm.launch import VllmLaunch

OPTIONS = pick(groups.VLLM, "engine_name", "vllm_python", "tensor_parallel_size")
VllmFlags = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- FLAGS OF VLLM]",
        help="Flags that vLLM gets as they are.",
        show_default=False,
    ),
]
# Of EngineConfig: the fields that vLLM has too.
_ENGINE_KEYS = (
    *("dtype", "max_model_len", "max_num_batched_tokens", "kv_cache_gib"),
    *("gpu_memory_utilization", "enable_prefix_caching"),
)


def is_vllm(given: Given, flags: Sequence[str]) -> bool:
    """Return whether the options ask for vLLM.

    Raises:
        UserError: an option needs vLLM, and they do not.
    """
    if given.value("engine_name") == "vllm":
        return True
    refuse_vllm_options(given, list(flags))
    return False


def find(given: Given) -> VllmInstallation:
    """Return the installation of vLLM that the options name.

    Raises:
        UserError: it is not there.
    """
    from peagle.backends.vllm import installation

    return installation.find_vllm(given.value("vllm_python"))


def launch_for(
    given: Given, flags: Sequence[str], target: Path, head: str | Path | None, k: int, **more: Any
) -> VllmLaunch:
    """Return a launch of vLLM on a free port and under a key of its own.

    Prompts are computed anew each time unless the options say otherwise, as in engines of our own.

    Args:
        given: the options of the command.
        flags: of vLLM, as they are.
        target: folder of the target.
        head: folder of the head; None decodes plainly.
        k: draft tokens per step.
        **more: further fields of `VllmLaunch`.
    """
    from peagle.backends.vllm.launch import VllmLaunch

    engine = {name: given.value(f"engine.{name}") for name in _ENGINE_KEYS}
    engine["enable_prefix_caching"] = bool(engine["enable_prefix_caching"])
    speculative = None
    if head is not None:
        # The head was compared with its target already, or is about to be.
        speculative = SpeculativeConfig(
            model=str(head), num_speculative_tokens=k, check_target=False
        )
    return VllmLaunch(
        str(target),
        speculative,
        port=0,
        threads=given.value("threads"),
        tensor_parallel_size=given.value("tensor_parallel_size", 1),
        extra=tuple(flags),
        **{name: value for name, value in engine.items() if value is not None},
        **more,
    )


def say(text: str) -> None:
    """Print a line of progress to standard error."""
    print(f"peagle: {text}", file=sys.stderr, flush=True)


def refuse_vllm_options(given: Given, flags: list[str]) -> None:
    """Refuse options and flags of vLLM where another engine runs.

    Raises:
        UserError: naming the first.
    """
    for flag in groups.VLLM:
        if flag.key in given and flag.key != "engine_name":
            raise UserError(f"{flag.shown_name} was given; it needs --engine vllm.")
    if flags:
        raise UserError(
            f"{flags[0]!r} was given after --, where flags of vLLM stand; expected --engine vllm "
            "with them. Leave them out, or name that engine."
        )
