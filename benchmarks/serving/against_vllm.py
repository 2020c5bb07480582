"""`peagle serve` against `vllm serve` on one card, with the same client and the same requests.

    python benchmarks/serving/against_vllm.py prepare --model /dev/shm/smollm2 --pair smollm2
    python benchmarks/serving/against_vllm.py run --model /dev/shm/smollm2
    python benchmarks/serving/against_vllm.py prepare --model /dev/shm/qwen3-8b
    python benchmarks/serving/against_vllm.py run --model /dev/shm/qwen3-8b
    python benchmarks/serving/against_vllm.py table against_vllm.jsonl --plot against_vllm.svg

With --pair `prepare` writes the target and both heads of a pair that the package names, in the form
that vLLM loads, and prompts.jsonl: HumanEval and MT-Bench through the chat template. The client
sends single prompts, so of MT-Bench these are the first turns. Acceptance is real, an output ends
with the end of its text, and has at most 256 tokens. Without --pair `prepare` writes a target and
both heads with random weights, and a tokenizer of as many words. Acceptance is then SYNTHETIC, the
same on both sides, and a request writes exactly as many tokens as its mix says.

`run` starts one server after the other. The client is vLLM's `vllm bench serve`. Each result is
a line of --results at once; what is there already is not measured again. `table` puts files of
several runs together. Outputs are greedy, and prefixes are not cached.

A server is peagle/ or vllm/ and one of: plain; kN, the P-EAGLE head with N drafts; kN-alone, the
head without its correction; by-load, the P-EAGLE head with --schedule; eagle3-kN, the EAGLE-3 head.
Of peagle alone there is treeN, the head's candidate trees of N nodes. vLLM has corrections and
schedules by peagle's plugin.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

from comparison import PROMPTS, Row, append_row, arrivals, check_card, draw, read_rows, table
from contenders import (
    BENCHMARKS,
    K_OF_AL,
    REAL_VARIANTS,
    VARIANTS,
    Variant,
    drafts,
    peagle_command,
    serving,
    vllm_command,
)
from script import check_positive, run_guarded
from traffic import (
    LEAST_PROMPTS,
    LEAST_REQUESTS,
    PROMPTS_FILE,
    Client,
    Load,
    ServerError,
    is_real,
    num_requests,
    random_requests,
    real_requests,
)

from peagle.backends.vllm.installation import find_vllm
from peagle.bundled import PAIR_NAMES, expand_bundled
from peagle.errors import UserError

LOADS = (
    *(f"128/256:c{c}" for c in (1, 16, 64, 128)),
    *(f"1024/128:c{c}" for c in (1, 16, 64, 128)),
    *("4096/256:c1", "4096/256:c16", "sharegpt:c128", "sharegpt:r0.5", "sharegpt:r0.8"),
)
REAL_LOADS = tuple(f"{PROMPTS}:c{c}" for c in (1, 4, 16, 64))
REAL_SETS, REAL_TOKENS = ("humaneval", "mt_bench"), 256
WHERE = """
import json, torch
from peagle.environment import environment
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
print(json.dumps(environment(device)))
"""


# ---- the command line ----


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    prepare, run, show = (commands.add_parser(name) for name in ("prepare", "run", "table"))
    for one in (prepare, run):
        one.add_argument("--model", type=Path, required=True, help="folder of target and heads")
    prepare.add_argument(
        "--pair", choices=PAIR_NAMES, help="real weights and prompts (random weights)"
    )
    prepare.add_argument("--target", help="folder of the pair's target (the pair's, fetched)")
    prepare.add_argument("--shape", default="qwen3-8b", help="of benchmarks/shapes.py (qwen3-8b)")
    prepare.add_argument("--device", default="auto", help="where weights are made (auto)")
    prepare.add_argument("--dtype", default="auto", help="type of the weights (auto)")
    run.add_argument("--variants", help="servers, a list (all that make sense)")
    run.add_argument("--loads", help="MIX:cN or MIX:rX, a list (all that make sense)")
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
    run.add_argument("--draft-window", type=int, help="tokens that peagle's heads look back (all)")
    run.add_argument("--saturation", type=float, help="requests/s (the most vLLM had, closed loop)")
    run.add_argument("--goodput", default="ttft:500 tpot:20", help="limits (ttft:500 tpot:20)")
    run.add_argument("--rounds", type=int, default=4, help="requests over those in flight (4)")
    least = f"{LEAST_REQUESTS}; {LEAST_PROMPTS} of real text"
    run.add_argument("--least-requests", type=int, help=f"of a load ({least})")
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
    if is_real(args.model) != bool(args.pair) and (args.model / "target").exists():
        held = "a real pair" if is_real(args.model) else "random weights"
        raise UserError(f"--model is {str(args.model)!r}, which holds {held}; take another folder.")
    if args.pair:
        prepare_pair(args.pair, args.target or args.pair, args.model)
        return 0
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


def prepare_pair(name: str, target_name: str, model: Path) -> None:
    """Write the prompts, the target and the heads of a pair, unless they are there."""
    from peagle.models.checkpoint.whole import whole_head
    from peagle.models.loading import resolve_model
    from peagle.models.target import load_tokenizer

    target = resolve_model(target_name)
    tokenizer = load_tokenizer(target)
    model.mkdir(parents=True, exist_ok=True)
    made = ({"prompt": one, "output_tokens": REAL_TOKENS} for one in real_prompts(tokenizer))
    lines = (json.dumps(one) + "\n" for one in made)
    (model / PROMPTS_FILE).write_text("".join(lines), encoding="utf-8")
    copy_once(target, model / "target")
    for method in K_OF_AL:
        head = expand_bundled(f"{name}-eagle3" if method == "eagle3" else name, "draft")
        copy_once(whole_head(head, target), model / method)


def real_prompts(tokenizer: Any) -> list[str]:
    """Return the first turns of the sets, through the chat template where there is one.

    The sets take turns, so that the first requests are of all of them.
    """
    from peagle.evaluation.prompts import load_prompt_set

    sets = [load_prompt_set(name) for name in REAL_SETS]
    texts = [one.text for some in zip_longest(*sets) for one in some if one is not None]
    if not tokenizer.chat_template:
        return texts
    talks = [[{"role": "user", "content": text}] for text in texts]
    return tokenizer.apply_chat_template(talks, tokenize=False, add_generation_prompt=True)


def copy_once(source: Path, destination: Path) -> None:
    """Copy a folder, unless it is there; an interrupted copy leaves none."""
    if destination.exists():
        return
    partial = destination.with_name(f"{destination.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    partial.rename(destination)


# ---- a run ----


def check_values(args: argparse.Namespace) -> None:
    """Refuse values that measure nothing, or that would end a run in its middle."""
    check_positive(args)
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
    real = is_real(args.model)
    names = args.variants.split(",") if args.variants else (REAL_VARIANTS if real else VARIANTS)
    variants = {name: Variant.parse(name) for name in names}
    texts = args.loads.split(",") if args.loads else (REAL_LOADS if real else LOADS)
    loads = [Load.parse(text) for text in texts]
    loads.sort(key=lambda load: load.concurrency is None)  # arrivals follow from closed loops
    for folder in ("target", *(v.head for v in variants.values() if v.head)):
        if not (args.model / folder / "config.json").is_file():
            raise UserError(f"--model is {str(args.model)!r}, without {folder}; run prepare first.")
    check_fit(variants, loads, args.model)
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


def check_fit(variants: dict[str, Variant], loads: list[Load], model: Path) -> None:
    """Refuse real text for random weights, random words for a real pair, and trees by chance.

    Raises:
        UserError: such a load or server was asked for.
    """
    real = is_real(model)
    held = "a real pair" if real else "random weights"
    for load in loads:
        if (load.mix == PROMPTS) != real:
            expected = f"{PROMPTS}:cN or {PROMPTS}:rX" if real else "another mix"
            raise UserError(
                f"The load is {str(load)!r}, and --model holds {held}; take {expected}."
            )
    for name, variant in variants.items():
        if not real and (variant.is_tree or not variant.is_corrected):
            raise UserError(f"The server {name} needs a real pair; run prepare with --pair.")


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
            if load.mix == PROMPTS:
                made = real_requests(args.model, count)
            else:
                made = random_requests(load.mix, count, config["vocab_size"], args.seed)
            # The client's own warm-up sends one prompt many times, and its drafts are counted.
            client.bench(load, rate, made[: load.concurrency or LEAST_REQUESTS], url, args)
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


if __name__ == "__main__":
    run_guarded(main)
