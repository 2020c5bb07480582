"""Traffic of a comparison of servers: lengths of requests, when they come, and the client."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from comparison import PROMPTS, Row, read_client_result

from peagle.backends.vllm.command import SAFE_ENVIRONMENT
from peagle.backends.vllm.installation import VllmInstallation
from peagle.errors import UserError

NAME = "model"  # the clients' name for what is served
PROMPTS_FILE = "prompts.jsonl"  # in the folder of a real pair
# A load has no fewer requests. What the drafts of real text are worth depends on the prompts.
LEAST_REQUESTS, LEAST_PROMPTS = 8, 48

# ShareGPT as Kwon et al. (2023, the paper on vLLM) describe it: mean tokens of prompts and outputs.
# The spread and the bounds are ours.
SHAREGPT_MEANS, SHAREGPT_SIGMA, SHAREGPT_BOUNDS = (161.0, 338.0), 1.0, (4, 1024)
_MIX, _TRAFFIC = r"[1-9]\d*/[1-9]\d*|sharegpt|prompts", r"c(?P<c>[1-9]\d*)|r(?P<r>\d*\.?\d+)"
_LOAD = re.compile(rf"(?P<mix>{_MIX}):(?:{_TRAFFIC})")


# vLLM's client, in one process for all loads: to import it takes longer than many loads.
CLIENT = """
import argparse, json, sys
answers, sys.stdout = sys.stdout, sys.stderr
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
for line in sys.stdin:
    main(parser.parse_args(json.loads(line)))
    print("done", file=answers, flush=True)
"""


class ServerError(Exception):
    """A server did not start or does not answer; the message names the log."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one mix.

    Attributes:
        mix: "P/O" has P prompt and O output tokens a request, "sharegpt" has log-normal lengths,
            and "prompts" is the real text of a pair's folder.
        concurrency: requests in flight of a closed loop; None: they come as a Poisson process.
        share: arrivals a second, over what vLLM can answer.
    """

    mix: str
    concurrency: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> Load:
        """Read MIX:cN, a closed loop, or MIX:rX, Poisson arrivals.

        Raises:
            UserError: it is neither.
        """
        found = _LOAD.fullmatch(text)
        if found is None or (found["r"] and not float(found["r"])):
            raise UserError(
                f"The load is {text!r}; expected MIX:cN (N requests in flight) or MIX:rX (Poisson "
                "arrivals at X of vLLM's saturation rate), with MIX like 128/256, sharegpt or "
                "prompts."
            )
        if found["c"]:
            return cls(found["mix"], concurrency=int(found["c"]))
        return cls(found["mix"], share=float(found["r"]))

    def __str__(self) -> str:
        end = f"r{self.share:g}" if self.concurrency is None else f"c{self.concurrency}"
        return f"{self.mix}:{end}"


def is_real(model: Path) -> bool:
    """Return whether a folder holds a real pair, with prompts, and not random weights."""
    return (model / PROMPTS_FILE).is_file()


def real_requests(model: Path, count: int) -> list[dict[str, Any]]:
    """Return the first requests of a real pair's folder; where it has fewer, they begin anew."""
    lines = (model / PROMPTS_FILE).read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in islice(cycle(lines), count)]


def random_requests(mix: str, count: int, vocab_size: int, seed: int) -> list[dict[str, Any]]:
    """Return requests of random words, each a token of `shapes.make_tokenizer`.

    The same arguments give the same requests, and more of them begin with the same ones.
    """
    source = random.Random(f"{mix} {seed}")
    words = range(vocab_size // 150, vocab_size * 2 // 3)
    made = []
    for _ in range(count):
        prompt, output = _lengths(mix, source)
        text = " ".join(f"w{word}" for word in source.choices(words, k=prompt))
        made.append({"prompt": text, "output_tokens": output})
    return made


def _lengths(mix: str, source: random.Random) -> tuple[int, int]:
    """Tokens of a prompt and of its output."""
    if mix != "sharegpt":
        prompt, output = map(int, mix.split("/"))
        return prompt, output
    low, high = SHAREGPT_BOUNDS
    drawn = [
        source.lognormvariate(math.log(mean) - SHAREGPT_SIGMA**2 / 2, SHAREGPT_SIGMA)
        for mean in SHAREGPT_MEANS
    ]
    return tuple(min(max(round(length), low), high) for length in drawn)  # type: ignore[return-value]


def num_requests(load: Load, rate: float | None, args: argparse.Namespace) -> int:
    """Return so many rounds of a closed loop, or so many seconds of arrivals, in requests."""
    count = args.rounds * load.concurrency if load.concurrency else (rate or 0) * args.seconds
    least = args.least_requests or (LEAST_PROMPTS if load.mix == PROMPTS else LEAST_REQUESTS)
    return max(least, round(count))


# ---- the client ----


class Client:
    """`vllm bench serve` in a process of its own, for `with`.

    Args:
        installation: vLLM's.
        log: gets all that it prints.

    Raises:
        UserError: that environment has no pandas.
    """

    def __init__(self, installation: VllmInstallation, log: Path) -> None:
        self.installation, self._log = installation, log
        self._process: subprocess.Popen[str]
        probe = [str(installation.python), "-c", "import pandas"]
        if subprocess.run(probe, capture_output=True).returncode:
            raise UserError(
                f"{installation} has no pandas, which its client reads requests with: "
                f"{installation.python} -m pip install pandas"
            )

    def __enter__(self) -> Client:
        # No proxy between it and the server.
        own = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [str(self.installation.python), "-c", CLIENT],
                env=os.environ | SAFE_ENVIRONMENT | own,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with suppress(BrokenPipeError):
            self._process.communicate()

    def bench(
        self, load: Load, rate: float | None, made: list[Any], url: str, args: argparse.Namespace
    ) -> Row:
        """Send the requests of a load, and return the figures.

        Raises:
            UserError: the client ended.
            ServerError: no request was answered.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            lines = (json.dumps(one) + "\n" for one in made)
            (folder / "requests.jsonl").write_text("".join(lines), encoding="utf-8")
            words = client_words(load, rate, len(made), url, folder, args)
            with suppress(BrokenPipeError):
                print(json.dumps(words), file=self._process.stdin, flush=True)
            if "done\n" not in self._process.stdout:  # reads on up to that line
                raise UserError(f"vLLM's client ended; {self._log} says why.")
            result = read_client_result(folder / "result.json")
        if not result["completed"]:
            raise ServerError(f"no request of {load} was answered; {self._log} says why")
        return result


def client_words(
    load: Load, rate: float | None, count: int, url: str, folder: Path, args: argparse.Namespace
) -> list[str]:
    """Return the arguments of `vllm bench serve` for a load."""
    if load.concurrency:
        traffic = ["--max-concurrency", str(load.concurrency)]
    else:
        traffic = ["--request-rate", str(rate)]
    return [
        *("--base-url", url, "--model", NAME, "--tokenizer", str(args.model / "target")),
        *("--dataset-name", "custom", "--dataset-path", str(folder / "requests.jsonl")),
        *("--custom-output-len", "-1", "--skip-chat-template", "--disable-shuffle"),
        *("--num-prompts", str(count), "--ready-check-timeout-sec", "0"),
        *traffic,
        *("--temperature", "0", "--seed", str(args.seed), "--disable-tqdm"),
        *(() if load.mix == PROMPTS else ("--ignore-eos",)),
        *("--percentile-metrics", "ttft,itl,tpot,e2el", "--metric-percentiles", "50,99"),
        *("--goodput", *args.goodput.split()),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "result.json"),
    ]
