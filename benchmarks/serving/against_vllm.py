"""`peagle serve` against `vllm serve` on one card, with the same client and the same requests.

    python benchmarks/serving/against_vllm.py prepare --model /dev/shm/qwen3-8b
    python benchmarks/serving/against_vllm.py run --model /dev/shm/qwen3-8b
    python benchmarks/serving/against_vllm.py table against_vllm.jsonl --plot against_vllm.svg

`prepare` writes a target and both heads with random weights, and a tokenizer of as many words.
`run` starts one server after the other. The client is vLLM's `vllm bench serve`. Each result is
a line of --results at once; what is there already is not measured again. `table` puts files of
several runs together. Acceptance is SYNTHETIC, the same on both sides. Outputs are greedy, prefixes
are not cached, and a request writes exactly as many tokens as its mix says.

A server is peagle/ or vllm/ and one of: plain; kN, the P-EAGLE head with N drafts; eagle3-kN, the
EAGLE-3 head; by-load (peagle alone), the P-EAGLE head with --schedule.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import socket
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

from comparison import (
    Row,
    append_row,
    arrivals,
    check_card,
    draw,
    read_rows,
    table,
)
from traffic import NAME, Client, Load, ServerError, num_requests, requests

from peagle.backends.vllm.command import (
    MODULE,
    as_flags,
    engine_arguments,
    environment,
)
from peagle.backends.vllm.installation import VllmInstallation, find_vllm
from peagle.backends.vllm.launch import VllmLaunch, with_head
from peagle.client.counters import read_counters
from peagle.config import SpeculativeConfig
from peagle.errors import UserError

BENCHMARKS = Path(__file__).resolve().parents[1]
VARIANTS = (
    *("vllm/k3", "vllm/k5", "vllm/k7", "vllm/eagle3-k3", "vllm/plain"),
    *("peagle/by-load", "peagle/k7", "peagle/plain"),
)
LOADS = (
    *(f"128/256:c{c}" for c in (1, 16, 64, 128)),
    *(f"1024/128:c{c}" for c in (1, 16, 64, 128)),
    *("4096/256:c1", "4096/256:c16", "sharegpt:c128", "sharegpt:r0.5", "sharegpt:r0.8"),
)
END_S = 30.0
# The rates of acceptance of a head do not depend on K; its length does. These are the K of --al.
K_OF_AL = {"peagle": 7, "eagle3": 3}
WHERE = """
import json, torch
from peagle.environment import environment
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
print(json.dumps(environment(device)))
"""


@dataclass(frozen=True, slots=True)
class Variant:
    """A server: `side` is peagle or vllm, `head` peagle, eagle3 or None, `k` its drafts."""

    side: str
    head: str | None
    k: int
    is_scheduled: bool = False

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read a name like vllm/eagle3-k3.

        Raises:
            UserError: there is no such server.
        """
        found = re.fullmatch(r"(peagle|vllm)/(?:(plain)|(by-load)|(eagle3-)?k([1-9]\d?))", text)
        if found is None or (found[1] == "vllm" and found[3]):
            raise UserError(f"No server {text!r}; there are {', '.join(VARIANTS)}, and other K.")
        if found[2]:
            return cls(found[1], None, 0)
        if found[3]:
            return cls(found[1], "peagle", K_OF_AL["peagle"], is_scheduled=True)
        return cls(found[1], "eagle3" if found[4] else "peagle", int(found[5]))


# ---- the command line -----------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    prepare, run, show = (commands.add_parser(name) for name in ("prepare", "run", "table"))
    for one in (prepare, run):
        one.add_argument("--model", type=Path, required=True, help="folder of target and heads")
    prepare.add_argument("--shape", default="qwen3-8b", help="of benchmarks/shapes.py (qwen3-8b)")
    prepare.add_argument("--device", default="auto", help="where weights are made (auto)")
    prepare.add_argument("--dtype", default="auto", help="type of the weights (auto)")
    run.add_argument("--variants", default=",".join(VARIANTS), help="servers, a list")
    run.add_argument("--loads", default=",".join(LOADS), help="MIX:cN or MIX:rX, a list")
    run.add_argument("--results", type=Path, default=Path("against_vllm.jsonl"))
    run.add_argument("--logs", type=Path, default=Path("against_vllm_logs"), help="folder of logs")
    run.add_argument("--vllm-python", help="python of vLLM's environment (where peagle looks)")
    run.add_argument("--al", type=float, default=3.94, help="of the P-EAGLE head at K = 7 (3.94)")
    run.add_argument("--eagle3-al", type=float, default=2.65, help="EAGLE-3, K = 3 (2.65)")
    run.add_argument(
        "--schedule",
        type=json.loads,
        default=[[1, 16, 7], [17, 32, 5], [33, 128, 4]],
        help="K of by-load by the sequences that run, in JSON",
    )
    run.add_argument("--saturation", type=float, help="requests/s (the most vLLM had, closed loop)")
    run.add_argument("--goodput", default="ttft:500 tpot:20", help="limits (ttft:500 tpot:20)")
    run.add_argument("--rounds", type=int, default=4, help="requests over those in flight (4)")
    run.add_argument("--seconds", type=float, default=30.0, help="of Poisson arrivals (30)")
    run.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals (0)")
    run.add_argument("--max-num-seqs", type=int, default=128, help="of both servers (128)")
    run.add_argument("--max-model-len", type=int, default=8192, help="of both servers (8192)")
    run.add_argument("--start-s", type=float, default=900.0, help="seconds to wait (900)")
    run.add_argument("--peagle-args", default="", help="further flags of peagle serve")
    run.add_argument("--vllm-args", default="", help="further flags of vllm serve")
    show.add_argument("results", type=Path, nargs="+", help="files of `run`")
    show.add_argument("--plot", type=Path, help="SVG or PNG to write")
    return parser.parse_args()


def main() -> int:
    """Run a command; returns the exit status."""
    args = parse_args()
    if args.command == "prepare":
        return prepare(args)
    if args.command == "run":
        return run(args)
    rows = [row for path in args.results for row in read_rows(path)]
    if not rows:
        raise UserError(f"{str(args.results[0])!r} has no results.")
    for path in args.results:
        check_card(read_rows(path), rows[0]["environment"]["device"], path)
    print(table(rows), end="")
    if args.plot:
        draw(rows, args.plot)
    return 0


def prepare(args: argparse.Namespace) -> int:
    """Write the model and its heads, unless they are there."""
    sys.path.append(str(BENCHMARKS))
    from checkpoints import write_checkpoint
    from shapes import SHAPES, make_head

    from peagle.engine.placement import resolve_device, resolve_dtype

    if (shape := SHAPES.get(args.shape)) is None:
        raise UserError(f"--shape is {args.shape!r}; expected one of {', '.join(SHAPES)}.")
    device = resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, device)
    target = args.model / "target"
    if not (target / "config.json").is_file():
        write_checkpoint(shape, target, dtype, device)
    for method in K_OF_AL:
        make_head(shape, method, args.model / method, dtype, device)
    return 0


# ---- a run ----------------------------------------------------------------------------------


def check_values(args: argparse.Namespace) -> None:
    """Refuse values that measure nothing, or that would end a run in its middle."""
    for name, value in vars(args).items():
        if isinstance(value, int | float) and name != "seed" and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} is {value}; expected more than 0.")
    for limit in args.goodput.split():
        if not re.fullmatch(r"(ttft|tpot|e2el):\d+(\.\d+)?", limit):
            raise UserError(
                f"--goodput is {args.goodput!r}; expected limits in ms of ttft, tpot or e2el, like "
                "'ttft:500 tpot:20'."
            )
    for name, head in (("al", "peagle"), ("eagle3_al", "eagle3")):
        if not 1 <= (length := getattr(args, name)) <= (most := K_OF_AL[head] + 1):
            raise UserError(f"--{name.replace('_', '-')} is {length}; expected 1 to {most}.")


def run(args: argparse.Namespace) -> int:
    """Measure what the results do not hold yet; status 1 if a server failed."""
    check_values(args)
    variants = {name: Variant.parse(name) for name in args.variants.split(",")}
    loads = [Load.parse(text) for text in args.loads.split(",")]
    loads.sort(key=lambda load: load.concurrency is None)  # arrivals follow from closed loops
    for folder in ("target", *(v.head for v in variants.values() if v.head)):
        if not (args.model / folder / "config.json").is_file():
            raise UserError(f"--model is {str(args.model)!r}, without {folder}; run prepare first.")
    installation = find_vllm(args.vllm_python)
    facts = where()
    rows = read_rows(args.results) if args.results.exists() else []
    check_card(rows, facts["device"], args.results)
    is_vllm_first = next(iter(variants.values())).side == "vllm"
    closed = {load.mix for load in loads if load.concurrency and is_vllm_first}
    for load in loads:
        if load.mix not in closed:
            arrivals_of(load, rows, args)  # it has to be known
    args.logs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end with it
    failed = False
    with Client(installation, args.logs / "client.log") as client:
        for name, variant in variants.items():
            done = {row["load"] for row in rows if row["variant"] == name}
            if todo := [load for load in loads if str(load) not in done]:
                try:
                    measure(name, variant, todo, client, rows, facts, args)
                except ServerError as error:
                    print(f"error: {name}: {error}", file=sys.stderr, flush=True)
                    failed = True
    return int(failed)


def where() -> dict[str, Any]:
    """Return the card and the versions."""
    # In another process: one that asks for a card's name may take memory of the card.
    found = subprocess.run([sys.executable, "-c", WHERE], stdout=subprocess.PIPE, check=True)
    return json.loads(found.stdout)


def measure(
    name: str,
    variant: Variant,
    loads: list[Load],
    client: Client,
    rows: list[Row],
    facts: dict[str, Any],
    args: argparse.Namespace,
) -> None:
    """Start a server once, and add a row for each load to `rows` and to the file."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    if variant.side == "vllm":
        argv, variables = vllm_command(variant, args, port, client.installation)
        server = f"vLLM {client.installation.version}"
    else:
        argv, variables = peagle_command(variant, args, port)
        server = f"peagle {facts['peagle']}"
    config = json.loads((args.model / "target" / "config.json").read_text())
    log = args.logs / f"{name.replace('/', '-')}.log"
    print(f"# {name}: {shlex.join(argv)}", flush=True)
    with serving(argv, variables, log, f"{url}/health", args.start_s):
        for load in loads:
            rate = arrivals_of(load, rows, args)
            count = num_requests(load, rate, args)
            made = requests(load.mix, count, config["vocab_size"], args.seed)
            before = drafts(url)
            result = client.bench(load, rate, made, url, args)
            after = drafts(url)
            tokens = None
            if before and after and (steps := after.since(before)).num_drafts:
                tokens = 1 + steps.num_accepted_tokens / steps.num_drafts
            row: Row = {
                "variant": name,
                "load": str(load),
                "mix": load.mix,
                "concurrency": load.concurrency,
                "rate": rate,
                "tokens_a_step": tokens,
                "result": result,
                "goodput": args.goodput.split(),
                "seed": args.seed,
                "server": server,
                "model": args.model.name,
                "command": shlex.join(argv),
                "environment": facts,
            }
            append_row(args.results, row)
            rows.append(row)
            print(f"{name} {load} {result['output_throughput']:.1f} tokens/s", flush=True)


def arrivals_of(load: Load, rows: list[Row], args: argparse.Namespace) -> float | None:
    """Return the arrivals a second of a load, None for a closed loop."""
    if load.share is None:
        return None
    return arrivals(rows, str(load), load.mix, load.share, args.saturation)


def drafts(url: str) -> Any:
    """A server's counters of drafts, None where it has none."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        return read_counters(answer.read().decode(), NAME).drafts


# ---- servers --------------------------------------------------------------------------------


def speculation(variant: Variant, args: argparse.Namespace) -> dict[str, Any] | None:
    """The speculative configuration, in the form that both servers take; None decodes plainly."""
    if variant.head is None:
        return None
    sys.path.append(str(BENCHMARKS))
    from common import acceptance_rates

    length = args.al if variant.head == "peagle" else args.eagle3_al
    first = acceptance_rates(length, K_OF_AL[variant.head])[0]
    config: dict[str, Any] = {
        "method": "eagle3",
        "model": str(args.model / variant.head),
        "num_speculative_tokens": variant.k,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [first**i for i in range(1, variant.k + 1)],
    }
    if variant.is_scheduled:
        config["num_speculative_tokens_per_batch_size"] = args.schedule
    return config


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
    return argv + shlex.split(args.vllm_args), os.environ | environment(launch, installation)


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


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
