"""The servers of a comparison: what each serves, how it is started, and how it ends."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traffic import NAME, ServerError, is_real

from peagle.backends.vllm.command import MODULE, as_flags, engine_arguments, vllm_environment
from peagle.backends.vllm.installation import VllmInstallation
from peagle.backends.vllm.launch import VllmLaunch, with_head
from peagle.client.counters import DraftCounts, read_counters
from peagle.config import SpeculativeConfig
from peagle.errors import UserError

BENCHMARKS = Path(__file__).resolve().parents[1]
VARIANTS = (
    *("vllm/k3", "vllm/k5", "vllm/k7", "vllm/eagle3-k3", "vllm/plain"),
    *("peagle/by-load", "peagle/k7", "peagle/plain"),
)
# Of real text, those that say most first.
REAL_VARIANTS = (
    *("vllm/eagle3-k3", "peagle/tree15", "peagle/k7", "vllm/eagle3-k7", "vllm/eagle3-k5"),
    *("vllm/k7", "vllm/k3", "vllm/k5", "vllm/plain", "peagle/plain", "peagle/k7-alone"),
    *("peagle/k3", "peagle/k5", "peagle/eagle3-k3", "peagle/eagle3-k5", "peagle/eagle3-k7"),
)
END_S = 15.0  # before whoever interrupts a comparison kills it
TREE_DEPTH = 7
_VARIANT = re.compile(
    r"(?P<side>peagle|vllm)/"
    r"(?:(?P<name>plain|by-load)|(?P<kind>eagle3-k|tree|k)(?P<k>[1-9]\d?)(?P<alone>-alone)?)"
)
# The rates of acceptance of a head do not depend on K; its length does. These are the K of --al.
K_OF_AL = {"peagle": 7, "eagle3": 3}


@dataclass(frozen=True, slots=True)
class Variant:
    """A server.

    Attributes:
        side: peagle or vllm.
        head: peagle, eagle3 or None.
        k: drafts of a step, or nodes of its trees.
        is_scheduled: K follows the load.
        is_tree: drafts are candidate trees.
        is_corrected: the head drafts with the correction beside it, if there is one.
    """

    side: str
    head: str | None
    k: int
    is_scheduled: bool = False
    is_tree: bool = False
    is_corrected: bool = True

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read a name like vllm/eagle3-k3.

        Raises:
            UserError: there is no such server.
        """
        found = _VARIANT.fullmatch(text)
        if found is not None:
            side, name, kind, alone = found.group("side", "name", "kind", "alone")
            is_there = side == "peagle" or kind != "tree"
            if not is_there or (alone and kind == "eagle3-k"):  # it has no correction
                found = None
        if found is None:
            known = ", ".join(dict.fromkeys((*VARIANTS, *REAL_VARIANTS)))
            raise UserError(f"No server {text!r}; there are {known}, and others of these forms.")
        if name == "plain":
            return cls(side, None, 0)
        if name == "by-load":
            return cls(side, "peagle", K_OF_AL["peagle"], is_scheduled=True)
        head = "eagle3" if kind == "eagle3-k" else "peagle"
        return cls(side, head, int(found["k"]), is_tree=kind == "tree", is_corrected=not alone)


def speculation(variant: Variant, args: argparse.Namespace) -> dict[str, Any] | None:
    """The speculative configuration, in vLLM's form; None decodes plainly."""
    if variant.head is None:
        return None
    config: dict[str, Any] = {
        "method": "eagle3",
        "model": str(args.model / variant.head),
        "num_speculative_tokens": variant.k,
    }
    if variant.is_tree:
        # With a depth every step verifies all nodes, as every step of a chain verifies K drafts.
        config["num_speculative_tokens"] = min(variant.k, TREE_DEPTH)
        config["parallel_drafting_spec"] = {"max_nodes": variant.k}
    if not is_real(args.model):
        config["rejection_sample_method"] = "synthetic"
        config["synthetic_acceptance_rates"] = synthetic_rates(variant, args)
    if not variant.is_corrected:
        config["correction"] = False
    if variant.is_scheduled:
        config["num_speculative_tokens_per_batch_size"] = args.schedule
    if variant.side == "peagle" and args.draft_window is not None:
        config["draft_window"] = args.draft_window
    return config


def synthetic_rates(variant: Variant, args: argparse.Namespace) -> list[float]:
    """Return the probabilities that at least 1 to K drafts of a head are accepted."""
    assert variant.head is not None
    sys.path.append(str(BENCHMARKS))
    from common import acceptance_rates

    length = args.al if variant.head == "peagle" else args.eagle3_al
    first = acceptance_rates(length, K_OF_AL[variant.head])[0]
    return [first**i for i in range(1, variant.k + 1)]


def peagle_command(
    variant: Variant, args: argparse.Namespace, port: int
) -> tuple[list[str], dict[str, str]]:
    """The command line of `peagle serve` from this checkout, and its variables."""
    config = speculation(variant, args)
    drafting = ["--speculative-config", json.dumps(config)] if config else ["--no-speculation"]
    argv = [
        *(sys.executable, "-m", "peagle", "serve", str(args.model / "target"), *drafting),
        *("--served-model-name", NAME, "--port", str(port), "--no-prefix-caching"),
        *("--max-num-seqs", str(args.max_num_seqs), "--max-model-len", str(args.max_model_len)),
        *shlex.split(args.peagle_args),
    ]
    # Keys and settings of the user's own would make it another server.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PEAGLE_")}
    paths = [str(BENCHMARKS.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return argv, kept | {"PYTHONPATH": os.pathsep.join(paths)}


def vllm_command(
    variant: Variant, args: argparse.Namespace, port: int, installation: VllmInstallation
) -> tuple[list[str], dict[str, str]]:
    """The command line of vLLM's server, without peagle's guard before it, and its variables."""
    config = speculation(variant, args)
    launch = with_head(
        VllmLaunch(
            target=str(args.model / "target"),
            speculative=None if config is None else SpeculativeConfig.parse(config),
            served_model_name=NAME,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            enable_prefix_caching=False,
        )
    )
    arguments = engine_arguments(launch, installation) | {"host": "127.0.0.1", "port": port}
    argv = [str(installation.python), "-m", MODULE, *as_flags(arguments)]
    return argv + shlex.split(args.vllm_args), os.environ | vllm_environment(launch, installation)


@contextmanager
def serving(
    argv: list[str], variables: dict[str, str], log: Path, health: str, start_s: float
) -> Iterator[None]:
    """Run a server until the block ends, its engines included.

    Raises:
        ServerError: it ended, or was not ready in time.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            argv,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + start_s
        while not answers(health):
            if process.poll() is not None or time.monotonic() > end:
                raise ServerError(f"it is not ready; {log} says why")
            time.sleep(0.25)
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what is left of it holds memory of the card
        process.wait()


def answers(url: str) -> bool:
    """Whether a server answers with status 200."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


def drafts(url: str) -> DraftCounts | None:
    """Return a server's counters of drafts, None where it has none.

    Raises:
        ServerError: it does not answer.
    """
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            return read_counters(answer.read().decode(), NAME).drafts
    except OSError as error:
        raise ServerError(f"its /metrics does not answer: {error}") from None
