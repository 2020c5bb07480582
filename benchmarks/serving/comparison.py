"""The results of a comparison of servers: their file, one table, one picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peagle.errors import UserError

Row = dict[str, Any]
PROMPTS = "prompts"  # the mix of loads of real text
# What is kept of the file that `vllm bench serve --save-result` writes (vLLM 0.26 to 0.32).
COUNTS = ("completed", "failed", "total_input_tokens", "total_output_tokens")
RATES = ("duration", "request_throughput", "request_goodput", "output_throughput")
TIMES = tuple(f"p{p}_{name}_ms" for name in ("ttft", "itl", "tpot", "e2el") for p in (50, 99))
FIELDS = {"variant", "load", "mix", "concurrency", "rate", "result", "environment"}
HEADER = (
    *("load", "server", "tokens/s", "over the best of vLLM", "goodput, requests/s"),
    *("TTFT p50, ms", "p99", "ITL p50, ms", "p99", "TPOT p50, ms", "p99"),
    *("tokens a step", "failed"),
)
BEST_HEADER = ("load", "best of peagle", "tokens/s", "best of vLLM", "tokens/s", "ratio")


def read_client_result(path: Path) -> Row:
    """Return the figures of one load from the client's file.

    Raises:
        UserError: the file is missing or has other fields.
    """
    names = (*COUNTS, *RATES, *TIMES)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"The client's result {str(path)!r} is not readable: {error}.") from None
    if missing := [name for name in names if name not in found]:
        raise UserError(f"The client's result {str(path)!r} has no {missing[0]}; another vLLM?")
    return {name: found[name] for name in names}


def read_rows(path: Path) -> list[Row]:
    """Return the results in a file, one a line.

    Raises:
        UserError: there is no such file, or a line is no result.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"The results {str(path)!r} are not readable: {error.strerror}.") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not row.keys() >= FIELDS:
                raise ValueError
        except (ValueError, AttributeError):
            raise UserError(f"Line {number} of {str(path)!r} is no result; remove it.") from None
        rows.append(row)
    return rows


def append_row(path: Path, row: Row) -> None:
    """Add one line, so that a run that is cut off loses nothing."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def check_card(rows: Sequence[Row], device: str, path: Path) -> None:
    """Refuse results of several cards in one comparison.

    Raises:
        UserError: a row was measured on another device.
    """
    for row in rows:
        if (other := row["environment"]["device"]) != device:
            raise UserError(
                f"{str(path)!r} has results of {other!r}, and this is {device!r}: times of two "
                "cards do not compare. Take another file."
            )


def arrivals(rows: Sequence[Row], load: str, mix: str, share: float, most: float | None) -> float:
    """Return the arrivals a second of a Poisson load: `share` of what vLLM can answer.

    That is `most`, or what the first row of this load had, or the most requests a second that a
    closed loop of this mix had with vLLM.

    Raises:
        UserError: there is none of them.
    """
    if most is not None:
        return share * most
    if fixed := [row["rate"] for row in rows if row["load"] == load]:
        return fixed[0]
    closed = [row for row in rows if row["mix"] == mix and row["concurrency"] and _is_vllm(row)]
    if not closed:
        raise UserError(
            f"The load {load} needs vLLM's saturation rate: run a vLLM server with {mix}:cN first, "
            "or give --saturation."
        )
    return share * max(row["result"]["request_throughput"] for row in closed)


def table(rows: Sequence[Row]) -> str:
    """Return two Markdown tables, by load; ratios compare tokens/s of closed loops.

    The first has all servers, the second the best of each side.
    """
    first = rows[0]
    facts = first["environment"]
    limits = " and ".join(f"{k} at most {v} ms" for k, v in (_pair(x) for x in first["goodput"]))
    commits = ", ".join(sorted({str(row["environment"]["commit"]) for row in rows}))
    servers = ", ".join(sorted({row["server"] for row in rows}))
    lines = [
        f"{first['model']}, {_acceptance(rows)}; {facts['device']}; {servers}; "
        f"commit {commits}. Goodput: {limits}.",
        "",
        *_header(HEADER),
    ]
    best = _header(BEST_HEADER)
    for name, group in _by_load(rows).items():
        theirs = max(filter(_is_vllm, group), key=_speed, default=None)
        ours = max((row for row in group if not _is_vllm(row)), key=_speed, default=None)
        if ours and theirs and ours["concurrency"]:
            pair = [cell for one in (ours, theirs) for cell in (one["variant"], _speed(one))]
            best.append(_cells(name, *pair, f"{_speed(ours) / _speed(theirs):.2f}"))
        for row in group:
            found = row["result"]
            ratio = ""
            if row["concurrency"] and theirs:
                ratio = f"{_speed(row) / _speed(theirs):.2f}"
            cells = [
                *(name, row["variant"], _speed(row), ratio),
                f"{found['request_goodput']:.2f}",
                *(f"{found[f'p{p}_ttft_ms']:.1f}" for p in (50, 99)),
                *(f"{found[f'p{p}_{of}_ms']:.2f}" for of in ("itl", "tpot") for p in (50, 99)),
                "" if row["tokens_a_step"] is None else f"{row['tokens_a_step']:.2f}",
                found["failed"],
            ]
            lines.append(_cells(*cells))
    return "\n".join([*lines, *(["", *best] if best[2:] else [])]) + "\n"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw tokens/s over requests in flight, and p99 over arrivals, a line for each server.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError(
            "matplotlib is not installed: pip install '.[report]' in the repository."
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [
        (mix, x, y, label)
        for x, y, label in (
            ("concurrency", "output_throughput", "tokens/s"),
            ("rate", "p99_ttft_ms", "TTFT p99, ms"),
            ("rate", "p99_itl_ms", "ITL p99, ms"),
        )
        for mix in dict.fromkeys(row["mix"] for row in rows if row[x])
    ]
    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "peagle"})
    columns = min(3, len(panels))
    height = -(-len(panels) // columns)
    size = (4.2 * columns, 3.4 * height)
    figure = plt.figure(figsize=size, layout="constrained")
    first = rows[0]
    figure.suptitle(f"{first['model']}, {first['environment']['device']}, {_acceptance(rows)}")
    variants = sorted({row["variant"] for row in rows})
    for place, (mix, x, y, label) in enumerate(panels, start=1):
        axes = figure.add_subplot(height, columns, place)
        for number, variant in enumerate(variants):
            points = sorted(
                (row[x], row["result"][y])
                for row in rows
                if row["mix"] == mix and row[x] and row["variant"] == variant
            )
            style = "--" if variant.startswith("vllm/") else "-"
            xs, ys = [one for one, _ in points], [one for _, one in points]
            axes.plot(xs, ys, style, marker="o", markersize=4, color=f"C{number}", label=variant)
        axes.set_title(mix)
        axes.set_xlabel("requests in flight" if x == "concurrency" else "arrivals a second")
        if x == "concurrency":
            ticks = sorted({row[x] for row in rows if row["mix"] == mix and row[x]})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _acceptance(rows: Sequence[Row]) -> str:
    """Say where the weights and the acceptance come from.

    Raises:
        UserError: there are rows of real text and others.
    """
    kinds = {row["mix"] == PROMPTS for row in rows}
    if len(kinds) > 1:
        raise UserError("The results are of real text and of random weights; name files of one.")
    if kinds.pop():
        return "real acceptance"
    return "random weights, SYNTHETIC acceptance"


def _header(names: Sequence[str]) -> list[str]:
    return [_cells(*names), "|" + "---|" * len(names)]


def _cells(*cells: object) -> str:
    """Return a line of a table; speeds have no digits behind the point."""
    return f"| {' | '.join(f'{x:,.0f}' if isinstance(x, float) else str(x) for x in cells)} |"


def _speed(row: Row) -> float:
    return row["result"]["output_throughput"]


def _is_vllm(row: Row) -> bool:
    return row["variant"].startswith("vllm/")


def _pair(limit: str) -> tuple[str, str]:
    name, _, value = limit.partition(":")
    return name.upper(), value


def _by_load(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by load, Poisson arrivals by their rate too."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        rate = f" ({row['rate']:.3g} a second)" if row["rate"] else ""
        groups.setdefault(row["load"] + rate, []).append(row)
    return groups
