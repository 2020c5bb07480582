"""What the benchmark scripts share: options of the models, and the facts beside every figure."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.cli.setup import quiet_libraries
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.engine.placement import load_target
from peagle.environment import environment
from peagle.errors import UserError
from peagle.evaluation.decoding import Request
from peagle.evaluation.engine_backend import EngineBackend
from peagle.evaluation.prompts import PROMPT_SETS
from peagle.models.target import TargetModel

METHODS = ("plain", "eagle3", "peagle", "ngram")


def parser(description: str | None, *, methods: str) -> argparse.ArgumentParser:
    """Options of the models and of the run.

    Args:
        description: of the script.
        methods: those that run unless told otherwise.
    """
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    models = result.add_argument_group("models")
    models.add_argument("--target", default=str(BUNDLED_TARGET), help="folder of the target")
    models.add_argument("--peagle", default=str(BUNDLED_PEAGLE), help="folder of a P-EAGLE head")
    models.add_argument("--eagle3", default=str(BUNDLED_EAGLE3), help="folder of an EAGLE-3 head")
    models.add_argument(
        "--head",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a further head, to be named in --methods; may be repeated",
    )
    models.add_argument(
        "--methods", default=methods, help=f"of {', '.join(METHODS)} and the names of --head"
    )
    models.add_argument("--dtype", default="auto")
    models.add_argument("--device", default="auto")
    models.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    result.add_argument("--output", type=Path, help="file for the result, instead of printing it")
    return result


def add_prompts(result: argparse.ArgumentParser, *, limit: int | None) -> None:
    """Options of the prompts."""
    result.add_argument("--set", default="humaneval", choices=PROMPT_SETS, help="prompt set")
    result.add_argument("--limit", type=int, default=limit, help="the first so many prompts")
    result.add_argument("--max-new-tokens", type=int, default=128)


def methods_of(args: argparse.Namespace) -> dict[str, str | None]:
    """The methods asked for and the folders of their heads."""
    folders: dict[str, str | None] = {"plain": None, "ngram": None}
    folders |= {"peagle": args.peagle, "eagle3": args.eagle3}
    for item in args.head:
        name, equals, folder = item.partition("=")
        if not (name and equals and folder):
            raise UserError(f"--head is {item!r}; expected NAME=FOLDER.")
        folders[name] = folder
    names = [name.strip() for name in args.methods.split(",")]
    for name in names:
        if name not in folders:
            raise UserError(f"No method {name!r}; there are {', '.join(folders)}.")
    return {name: folders[name] for name in names}


def speculative(name: str, folder: str | None, k: int, **options: Any) -> SpeculativeConfig | None:
    """The configuration of a method at K drafts; None for plain decoding."""
    if name == "plain":
        return None
    if folder is None:
        return SpeculativeConfig(method="ngram", num_speculative_tokens=k)
    return SpeculativeConfig(model=folder, num_speculative_tokens=k, **options)


def acceptance_rates(acceptance_length: float, k: int) -> list[float]:
    """P(at least i drafts pass) = p^i with 1 + p + ... + p^K = the acceptance length."""
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        if 1 + sum(p**i for i in range(1, k + 1)) < acceptance_length:
            low = p
        else:
            high = p
    return [low**i for i in range(1, k + 1)]


def concurrencies(text: str) -> list[int]:
    """Read --conc, numbers of sequences that run together."""
    try:
        found = [int(one) for one in text.split(",")]
    except ValueError:
        raise UserError(f"--conc is {text!r}; expected numbers, like 1,4,16.") from None
    if min(found) < 1:
        raise UserError(f"--conc is {found}; expected numbers of at least 1.")
    return found


def start(args: argparse.Namespace) -> TargetModel:
    """Set the threads and load the target."""
    quiet_libraries()
    if args.threads:
        torch.set_num_threads(args.threads)
    return load_target(args.target, EngineConfig(dtype=args.dtype, device=args.device))


def finish(args: argparse.Namespace, target: TargetModel, **results: Any) -> None:
    """Write or print one JSON object: the command, the machine, the results."""
    result = {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(target.device),
        "target": args.target,
        "dtype": str(target.dtype).removeprefix("torch."),
        **results,
    }
    write_result(result, args.output)


def write_result(result: dict[str, Any], output: Path | None) -> None:
    """Write one JSON object to a file, whose folder is made, or print it."""
    text = json.dumps(result, indent=2)
    if output is None:
        print(text)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n", encoding="utf-8")


def run_guarded(main: Callable[[], None]) -> None:
    """Run a script; a mistake in its input is one line and status 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def take_turns(
    backends: Mapping[str, EngineBackend],
    requests: Sequence[Request],
    concurrency: int,
    repeats: int,
    clock: Callable[[], float],
) -> Iterator[tuple[str, Any, float]]:
    """Run all requests with every backend, in turn; give its name, its run and the seconds.

    A first round, which warms up, is not given. The wall clock runs from the first request on: the
    time in which chat templates are rendered says nothing of an engine.
    """
    for number in range(repeats + 1):
        # Another one begins each round: whoever comes after a slow one may be slower for it.
        shift = number % len(backends)
        for name in [*backends][shift:] + [*backends][:shift]:
            start = clock()
            run = backends[name].run(requests, concurrency)
            seconds = run.seconds if clock is time.perf_counter else clock() - start
            if number:
                yield name, run, seconds
        print(f"# {concurrency} in flight, round {number}", file=sys.stderr, flush=True)
