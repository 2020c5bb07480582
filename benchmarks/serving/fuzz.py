"""Broken bodies to all POST routes: an answer each, never a 5xx, errors in OpenAI's form.

Seeded. A body that was answered badly is told with its number: --only NUMBER sends it alone.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load import Answer, Client, fault_in, run_clients
from mutations import Case, make_case
from served import Served

CLIENTS = 8
# What a body may ask for stays small, whatever becomes of its max_tokens.
OPTIONS = ("--max-model-len", "128", "--max-num-seqs", "16", "--compile-timeout-s", "2")
TEMPLATE = """\
{%- for message in messages -%}{{ '# ' + message.role + '\\n' + message.content + '\\n' }}
{%- endfor -%}{%- for tool in tools or [] -%}{{ tool.function.name }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '# assistant\\n' }}{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class Bad:
    """A case that was not answered as it should have been."""

    case: Case
    problem: str

    def __str__(self) -> str:
        shown = repr(self.case.body[:300])
        return (
            f"#{self.case.number} {self.case.path} ({self.case.mutation}): {self.problem}: {shown}"
        )


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--bodies", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", type=int, help="the number of one body, to see what it does")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what missed its bound."""
    return asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder, "chat.jinja")
        template.write_text(TEMPLATE)
        options = (*OPTIONS, "--chat-template", str(template))
        async with Served(*options, threads=args.threads) as server:
            engines = server.engine_pids()
            numbers = range(args.bodies) if args.only is None else [args.only]
            figures, missed = await attack(server.client, args.seed, numbers)
            load = await server.wait_idle(30)
            health = await server.client.get("/health")
            after = await server.client.complete("def f():", max_tokens=4)
            if engines != server.engine_pids():
                missed.append(f"the engine was restarted; the log ends:\n{server.log()}")
    if health.status != 200 or not after.is_complete:
        missed.append(f"unwell at the end: health {health.status}, completion {after.status}")
    missed += [f"{name} is {value} at the end" for name, value in load.items() if value]
    return figures, missed


async def attack(client: Client, seed: int, numbers: Any) -> tuple[dict[str, Any], list[str]]:
    """Send the cases of these numbers; figures, and the cases that were answered badly."""

    async def work(number: int) -> tuple[Case, Answer]:
        case = make_case(seed, number)
        return case, await client.send("POST", case.path, case.body, case.headers)

    results = await run_clients(CLIENTS, numbers, work)
    bad = [Bad(case, fault) for case, answer in results if (fault := problem_of(case, answer))]
    kinds = Counter(one.problem.partition(":")[0] for one in bad)
    figures = {
        "bodies": len(results),
        "seed": seed,
        "statuses": dict(sorted(Counter(answer.status for _, answer in results).items())),
        "by_mutation": dict(Counter(case.mutation for case, _ in results).most_common()),
        "slowest_s": round(max(answer.seconds for _, answer in results), 2),
        "bad": [str(one) for one in bad[:20]],
    }
    return figures, [f"{count} of {kind}, see bad" for kind, count in kinds.items()]


def problem_of(case: Case, answer: Answer) -> str:
    """What is wrong with an answer to a body that may be wrong; "" if nothing is."""
    if case.mutation == "untouched" and not answer.is_complete:
        return f"a valid body refused: {answer.status} {answer.body[:200]!r}"
    return fault_in(answer)
