"""What the demo shows: text that grows in a terminal, lines elsewhere, a table at the end."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from peagle.cli.options import OutputFormat
from peagle.cli.terminal import command_prefix, printable
from peagle.evaluation.prompts import Prompt

if TYPE_CHECKING:
    # torch takes seconds to import, and the spinner should turn by then.
    from peagle.evaluation.compare import Measurement
    from peagle.llm import LLM, StreamChunk

PLAIN, EAGLE3, PEAGLE = "plain", "EAGLE-3", "P-EAGLE"
FRAMES_PER_S = 30
MAX_PANEL_LINES = 22
_LINES_BELOW = 10  # the table of the results so far, and the line of the prompt


def make_console(no_color: bool) -> Console:
    """Standard output; NO_COLOR counts too."""
    return Console(no_color=True if no_color else None, highlight=False)


def make_view(console: Console, output_format: OutputFormat) -> DemoView:
    """What fits the output: nothing beside JSON, a live picture in a terminal, else lines."""
    if output_format is OutputFormat.JSON:
        return SilentView()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console)
    return LineView(console)


class DemoView(Protocol):
    """What the user sees while the demo runs."""

    def loading(self) -> AbstractContextManager[Any]:
        """While the models are loaded and warmed up."""
        ...

    def running(self, llms: dict[str, LLM]) -> AbstractContextManager[Any]:
        """While prompts are completed."""
        ...

    def begin(self, prompt: Prompt, method: str) -> None:
        """A method starts on a prompt."""
        ...

    def show(self, chunk: StreamChunk) -> None:
        """New tokens."""
        ...

    def end(self, results: dict[str, Measurement]) -> None:
        """The method is done with the prompt; results so far."""
        ...


class SilentView:
    """Shows nothing."""

    def loading(self) -> AbstractContextManager[Any]:
        """Nothing."""
        return nullcontext()

    def running(self, llms: dict[str, LLM]) -> AbstractContextManager[Any]:
        """Nothing."""
        return nullcontext()

    def begin(self, prompt: Prompt, method: str) -> None:
        """Nothing."""

    def show(self, chunk: StreamChunk) -> None:
        """Nothing."""

    def end(self, results: dict[str, Measurement]) -> None:
        """Nothing."""


class LineView(SilentView):
    """One line a prompt."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.prompt: Prompt | None = None

    def begin(self, prompt: Prompt, method: str) -> None:
        """Remember the prompt."""
        self.prompt = prompt

    def end(self, results: dict[str, Measurement]) -> None:
        """Print the prompt's line once the last method is done with it."""
        done = {len(result.completions) for result in results.values()}
        if len(done) > 1:
            return
        assert self.prompt is not None
        speeds = ", ".join(f"{name} {r.tokens_per_s:.0f}" for name, r in results.items())
        self.console.print(f"{self.prompt.id:14} tokens/s so far: {speeds}")


class LiveView(SilentView):
    """The text as it grows, accepted draft tokens coloured, over the results so far."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.accepted_style = "underline" if console.no_color else "bold green"
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._llms: dict[str, LLM] = {}
        self._results: dict[str, Measurement] = {}
        self._method = ""
        self._title = ""
        self._prompt = self._output = Text()
        self._last_frame = 0.0

    def loading(self) -> AbstractContextManager[Any]:
        """A spinner."""
        return self.console.status("Loading the models and warming up")

    def running(self, llms: dict[str, LLM]) -> AbstractContextManager[Any]:
        """Start the picture; the last text stays on the screen when it is left."""
        self._llms = llms
        return self

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        if error[0] is None:
            self.console.print(self._panel(self._output))

    def begin(self, prompt: Prompt, method: str) -> None:
        """Start a text."""
        from peagle.engine.detokenizer import IncrementalDetokenizer

        self._method = method
        self._title = f"{prompt.id}, {method}"
        self._prompt = Text(printable(prompt.text), style="dim")
        self._output = Text()
        self._detokenizer = IncrementalDetokenizer(self._llms[method].tokenizer)
        self._frame(force=True)

    def show(self, chunk: StreamChunk) -> None:
        """Add tokens to the text."""
        drafted, own = (
            chunk.token_ids[: chunk.num_accepted],
            chunk.token_ids[chunk.num_accepted :],
        )
        is_last = chunk.output is not None
        self._output.append(printable(self._detokenizer.add(drafted)), self.accepted_style)
        self._output.append(printable(self._detokenizer.add(own, final=is_last)))
        self._frame(force=is_last)

    def end(self, results: dict[str, Measurement]) -> None:
        """Take the results."""
        self._results = results

    def _frame(self, *, force: bool) -> None:
        now = time.monotonic()
        if not force and now - self._last_frame < 1 / FRAMES_PER_S:
            return
        lines = max(4, min(MAX_PANEL_LINES, self.console.height - _LINES_BELOW))
        text = self._prompt + self._output
        shown = text.wrap(self.console, self.console.width - 4)[-lines:]
        panel = self._panel(Text("\n").join(shown), height=lines + 2)
        self._live.update(Group(panel, results_table(self._results)), refresh=True)
        self._last_frame = time.monotonic()

    def _panel(self, text: Text, height: int | None = None) -> Panel:
        legend = Text.assemble(
            ("accepted draft tokens", f"not dim {self.accepted_style}"), " and the target's own"
        )
        has_drafts = self._method != PLAIN
        return Panel(
            text,
            title=self._title,
            title_align="left",
            subtitle=legend if has_drafts else None,
            subtitle_align="right",
            height=height,
            border_style="dim",
        )


def results_table(results: dict[str, Measurement]) -> Table:
    """The results so far, a row a method."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("acceptance\nlength", justify="right")
    table.add_column("accepted by position, %", justify="left")
    table.add_column("tokens/s", justify="right")
    table.add_column("speed-up", justify="right")
    for name, result in results.items():
        if not result.completions:
            continue
        stats, speed = result.stats, result.tokens_per_s
        positions = " ".join(f"{100 * share:2.0f}" for share in stats.acceptance_per_pos)
        table.add_row(
            name,
            f"{stats.acceptance_length:.2f}" if stats.num_drafts else "",
            positions,
            f"{speed:.0f}",
            f"{speed / results[PLAIN].tokens_per_s:.2f}x",
            style="bold" if name == PEAGLE else None,
        )
    return table


def print_report(console: Console, results: dict[str, Measurement], report: dict[str, Any]) -> None:
    """Print the table, whether the outputs are the same, and what the figures mean."""
    console.print(results_table(results))
    console.print(_identity(results, report))
    for line in _facts(report):
        console.print(line, style="dim")


def print_next_steps(console: Console) -> None:
    """Print commands that the user can type next, as they work in this folder."""
    peagle = command_prefix()
    console.print("\nNext:")
    for arguments, meaning in (
        ("generate --prompt 'def fibonacci(n):'", "complete a prompt of yours"),
        ("serve", "serve OpenAI's API, with a page at http://127.0.0.1:8000"),
        ("eval --limit 8", "measure how many draft tokens are accepted"),
        ("--help", "see every command"),
    ):
        # Text, not markup: a folder's name may hold brackets.
        line = Text(f"  {peagle} {arguments}").append(f"  # {meaning}", style="dim")
        console.print(line, soft_wrap=True)


def _facts(report: dict[str, Any]) -> list[str]:
    machine = report["environment"]
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    hardware = f"{threads} of {machine['cpu']}"
    if machine["device"] != "cpu":
        hardware = machine["device"]
    return [
        f"{report['num_prompts']} HumanEval prompts, one at a time, up to "
        f"{report['max_new_tokens']} new tokens each. K={report['num_speculative_tokens']}, "
        f"temperature {report['temperature']:g}, {report['dtype']}; {hardware}, "
        f"torch {machine['torch']}.",
        "Acceptance length: 1 + accepted draft tokens / drafts. By position: share of drafts "
        "whose first 1, 2, ... K tokens were all accepted (unconditional).",
        "tokens/s: output tokens by time in the engine, prompt passes included, display left out.",
    ]


def _identity(results: dict[str, Measurement], report: dict[str, Any]) -> Text:
    count, total = report["num_different_outputs"], report["num_prompts"]
    names = ", ".join(results)
    if count == 0:
        return Text(
            f"Identical outputs, token by token: {names}, on {total} of {total} prompts.",
            style="green",
        )
    which = sorted({id for method in report["methods"] for id in method["different_outputs"]})
    reason = ""
    if report["dtype"] != "float64":
        reason = " In this dtype two tokens can be tied up to rounding; see --dtype float64."
    return Text(
        f"Outputs differ ({names}) on {count} of {total} prompts: {', '.join(which)}.{reason}",
        style="yellow",
    )
