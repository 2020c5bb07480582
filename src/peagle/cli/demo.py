"""`peagle demo`: three ways to decode the same prompts, watched and compared."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE
from peagle.cli import options
from peagle.cli.options import OutputFormat, default_of
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.errors import UserError
from peagle.evaluation.prompts import Prompt, load_prompt_set

if TYPE_CHECKING:
    from peagle.evaluation.compare import Measurement
    from peagle.llm import LLM, StreamChunk

EXAMPLES = """
The bundled pair; nothing is downloaded:
  peagle demo

More prompts, other drafts, a result for a program:
  peagle demo --limit 40 -k 5
  peagle demo --format json > demo.json

Models of your own:
  peagle demo --target ./Qwen3-0.6B --draft ./peagle-head --eagle3 ./eagle3-head
  peagle demo --target owner/model --draft owner/peagle-head --eagle3 owner/eagle3-head@v1
"""

PLAIN, EAGLE3, PEAGLE = "plain", "EAGLE-3", "P-EAGLE"
DEFAULT_LIMIT = 12


class View(Protocol):
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


def demo(
    limit: Annotated[int, typer.Option(help="HumanEval prompts to complete.")] = DEFAULT_LIMIT,
    output_format: options.Format = OutputFormat.TEXT,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="No colours; NO_COLOR=1 does the same.")
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The target, a folder or a hub id; needs --draft.",
            show_default="the bundled code model",
            rich_help_panel=options.MODEL,
        ),
    ] = None,
    revision: options.Revision = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Its P-EAGLE head, a folder or a hub id.",
            show_default="the bundled one",
            rich_help_panel=options.MODEL,
        ),
    ] = None,
    draft_revision: options.DraftRevision = None,
    eagle3: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Its EAGLE-3 head, a folder or a hub id (owner/name@revision).",
            show_default="the bundled one; none with a target of your own",
            rich_help_panel=options.MODEL,
        ),
    ] = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    max_new_tokens: options.MaxNewTokens = None,
    dtype: options.DType = None,
    device: options.Device = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="CPU threads.",
            show_default="1 with the bundled model, else torch's choice",
            rich_help_panel=options.ENGINE,
        ),
    ] = None,
) -> None:
    """Complete HumanEval prompts with plain decoding, EAGLE-3 and P-EAGLE, and compare.

    All three run in turn on each prompt, greedily, one prompt at a time.
    Accepted draft tokens are coloured; the others are the target's own.
    """
    prompts = load_prompt_set("humaneval", limit)
    params = SamplingParams(**options.given(max_tokens=max_new_tokens))
    engine = EngineConfig(max_num_seqs=1, **options.given(dtype=dtype, device=device))
    k = num_speculative_tokens
    if k is None:
        k = default_of(SpeculativeConfig, "num_speculative_tokens")
    name, heads = _models(target, draft, eagle3)
    configurations = {
        kind: SpeculativeConfig(
            model=head,
            revision=draft_revision if kind == PEAGLE else None,
            num_speculative_tokens=k,
        )
        for kind, head in heads.items()
    }
    from peagle.models.loading import resolve_model, with_local_head

    # Before the view, which would paint over the progress of a download.
    folder = resolve_model(name, revision)
    configurations = {kind: with_local_head(one) for kind, one in configurations.items()}
    from peagle.cli import demo_view

    console = demo_view.make_console(no_color)
    view = demo_view.make_view(console, output_format)
    with view.loading():
        # So small a model is as fast on one thread as on two, and far faster where others compute:
        # two threads wait for each other at every operation.
        options.set_threads(1 if threads is None and target is None else threads)
        options.quiet_libraries()
        from peagle.cli import demo_report
        from peagle.evaluation.compare import build, load_target, warm_up

        model = load_target(folder, dtype=engine.dtype, device=engine.device)
        _check_kinds(configurations, model.num_layers)
        llms = build(model, {PLAIN: None, **configurations}, max_num_seqs=engine.max_num_seqs)
        warm_up(llms, [prompts[0].text])
    results = _complete(llms, prompts, params, view)
    report = demo_report.report(model, prompts, params, k, results)
    if output_format is OutputFormat.JSON:
        print(json.dumps(report, indent=2))
    else:
        demo_view.print_report(console, results, report)


def _complete(
    llms: dict[str, LLM], prompts: list[Prompt], params: SamplingParams, view: View
) -> dict[str, Measurement]:
    from peagle.evaluation.compare import Measurement, measure

    results = {name: Measurement() for name in llms}
    with view.running(llms):
        for prompt in prompts:
            for name, llm in llms.items():
                view.begin(prompt, name)
                results[name].extend(measure(llm, [prompt.text], params, view.show))
                view.end(results)
    return results


def _models(
    target: str | None, draft: str | None, eagle3: str | None
) -> tuple[str, dict[str, str]]:
    """Names of the target and of the heads, these in the order in which they run."""
    if target is None:
        folder = options.target_or_bundled(None)
        return folder, {
            EAGLE3: eagle3 or options.bundled(BUNDLED_EAGLE3),
            PEAGLE: draft or options.bundled(BUNDLED_PEAGLE),
        }
    if draft is None:
        raise UserError(f"--target {target!r} was given without --draft: name its P-EAGLE head.")
    return target, {EAGLE3: eagle3, PEAGLE: draft} if eagle3 else {PEAGLE: draft}


def _check_kinds(configurations: dict[str, SpeculativeConfig], num_target_layers: int) -> None:
    """Refuse a head under the wrong name: the table would be a lie."""
    from peagle.models.checkpoint import read_head_config

    for kind, config in configurations.items():
        assert config.model is not None
        head, _ = read_head_config(config.model, num_target_layers=num_target_layers)
        if head.is_parallel != (kind == PEAGLE):
            option, other = ("--draft", EAGLE3) if kind == PEAGLE else ("--eagle3", PEAGLE)
            raise UserError(
                f"{option} is {config.model!r}; expected a head of {kind}, not of {other}."
            )
