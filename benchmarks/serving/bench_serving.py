"""Load tests of `peagle serve`: each starts the server it needs, on loopback, and stops it.

    python benchmarks/serving/bench_serving.py soak
    python benchmarks/serving/bench_serving.py overhead --repeats 7
    python benchmarks/serving/bench_serving.py cancel --minutes 5
    python benchmarks/serving/bench_serving.py abuse --only unread_health --seconds 60

soak      200 clients, 2,000 requests: none lost, all as offline, no memory that grows
overhead  tokens/s of the served engine against the offline engine at concurrency 16
cancel    clients that leave at random moments: nothing of them stays behind
kill      the engine process is killed: clients are told, the server restarts or exits
hang      the engine process is stopped: it is seen and ended, clients are told, another one serves
drain     SIGTERM under load: what runs finishes, what is new is refused, status 0
slow      a client that reads slowly and 1,000 idle connections, beside 8 normal ones
latency   time to the first token at idle and under Poisson arrivals, speculation on and off
fuzz      10,000 broken bodies: an answer each, never a 5xx
swaps     swaps of the head under load: no request lost, no output changed, few tokens late
recording    what recording adds to a step at 64 streams
corrections  what corrections chosen by request add to a step of the engine
abuse     one client attacks in 28 ways: others stream on, probes are answered, memory returns

Runs on the bundled pair; swaps, recording and corrections on any. Prints one line, RESULT and a
JSON object, some a table before it; status 1 if a bound is missed, or noise leaves it undecided.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys

from script import check_positive, run_guarded

from peagle.engine.placement import resolve_device
from peagle.environment import environment

EXPERIMENTS = (
    *("soak", "overhead", "cancel", "kill", "hang", "drain", "slow", "latency", "fuzz", "abuse"),
    *("swaps", "recording", "corrections"),
)


def main() -> int:
    """Run an experiment; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="experiment", required=True)
    modules = {name: importlib.import_module(name) for name in EXPERIMENTS}
    for name, module in modules.items():
        raw, text = argparse.RawDescriptionHelpFormatter, module.__doc__ or ""
        options = commands.add_parser(
            name, help=text.partition("\n")[0], description=text, formatter_class=raw
        )
        options.add_argument("--threads", type=int, default=1, help="CPU threads of an engine (1)")
        module.add_options(options)
    args = parser.parse_args()
    check_positive(args)
    figures, missed = modules[args.experiment].run(args)
    result = {
        "experiment": args.experiment,
        "passed": not missed,
        "missed": missed,
        **figures,
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(resolve_device("auto")),
    }
    print("RESULT", json.dumps(result), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    run_guarded(main)
