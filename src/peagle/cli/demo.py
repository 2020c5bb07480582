"""`peagle demo`: three ways to decode the same prompts, watched and compared."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.bundled import BUNDLED, expand_bundled
from peagle.cli import demo_view, groups, options
from peagle.cli.demo_view import EAGLE3, PEAGLE, PLAIN, DemoView
from peagle.cli.flags import Flag, Given, group, pick, takes
from peagle.cli.options import Format, OutputFormat
from peagle.cli.settings import Layer, Settings
from peagle.config import SamplingParams, SpeculativeConfig
from peagle.errors import UserError
from peagle.evaluation.prompts import Prompt, load_prompt_set

if TYPE_CHECKING:
    from peagle.evaluation.compare import Measurement
    from peagle.llm import LLM

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

DEFAULT_LIMIT = 12


_K, _REVISION = "speculative.num_speculative_tokens", "speculative.revision"

_MODELS = group(
    "Model",
    Flag(
        "target",
        str,
        "The target, a folder or a hub id; needs --draft.",
        metavar="MODEL",
        default="the bundled code model",
    ),
    *pick(groups.MODEL, "revision"),
    Flag(
        "draft",
        str,
        "Its P-EAGLE head, a folder or a hub id.",
        metavar="MODEL",
        default="the bundled one",
    ),
    *pick(groups.MODEL, _REVISION),
    Flag(
        "eagle3",
        str,
        "Its EAGLE-3 head, a folder or a hub id (owner/name@revision).",
        metavar="MODEL",
        default="the bundled one; none with a target of your own",
    ),
)
_THREADS = Flag(
    "threads", int, "CPU threads.", default="1 for a small model, else up to one a core"
)


@takes(
    *_MODELS,
    *pick(groups.SPECULATION, _K),
    *pick(groups.SAMPLING, "sampling.max_tokens"),
    *pick(groups.ENGINE, "engine.dtype", "engine.device"),
    *group("Engine", _THREADS),
)
def demo(
    given: Given,
    limit: Annotated[int, typer.Option(help="HumanEval prompts to complete.")] = DEFAULT_LIMIT,
    output_format: Format = OutputFormat.TEXT,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="No colours; NO_COLOR=1 does the same.")
    ] = False,
) -> None:
    """Complete HumanEval prompts with plain decoding, EAGLE-3 and P-EAGLE, and compare.

    All three run in turn on each prompt, greedily, one prompt at a time.
    Accepted draft tokens are coloured; the others are the target's own.
    """
    prompts = load_prompt_set("humaneval", limit)
    settings = Settings(Layer(dict(given)))
    params, engine = settings.build("sampling"), settings.build("engine")
    target = given.value("target") or BUNDLED
    options.check_paths(target, given.value("draft"), given.value("eagle3"))
    configurations = _heads(given)
    from peagle.models.loading import resolve_model, with_local_head

    # Before the view, which would paint over the progress of a download.
    folder = resolve_model(target, given.value("revision"))
    configurations = {kind: with_local_head(one) for kind, one in configurations.items()}
    console = demo_view.make_console(no_color)
    view = demo_view.make_view(console, output_format)
    with view.loading():
        options.set_threads(given.value("threads"))
        options.quiet_libraries()
        from peagle.cli import demo_report
        from peagle.evaluation.compare import build, load_target, warm_up

        model = load_target(folder, dtype=engine.dtype, device=engine.device)
        _check_kinds(configurations, model.num_layers)
        llms = build(model, {PLAIN: None, **configurations}, max_num_seqs=1)
        warm_up(llms, [prompts[0].text])
    results = _complete(llms, prompts, params, view)
    k = configurations[PEAGLE].num_drafts
    report = demo_report.report(model, prompts, params, k, results)
    if output_format is OutputFormat.JSON:
        print(json.dumps(report, indent=2))
    else:
        demo_view.print_report(console, results, report)
        if "target" not in given:
            demo_view.print_next_steps(console)


def _complete(
    llms: dict[str, LLM], prompts: list[Prompt], params: SamplingParams, view: DemoView
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


def _heads(given: Given) -> dict[str, SpeculativeConfig]:
    """How each method drafts, in the order in which they run."""
    target, draft, eagle3 = (given.value(key) for key in ("target", "draft", "eagle3"))
    if (target := options.own_target(target)) is None:
        draft, eagle3 = draft or BUNDLED, eagle3 or BUNDLED
    elif draft is None:
        raise UserError(f"--target {target!r} was given without --draft: name its P-EAGLE head.")
    shared = {} if (k := given.value(_K)) is None else {"num_speculative_tokens": k}
    heads = {PEAGLE: SpeculativeConfig(model=draft, revision=given.value(_REVISION), **shared)}
    if eagle3:
        named = expand_bundled(eagle3, "eagle3")
        heads = {EAGLE3: SpeculativeConfig(model=named, **shared), **heads}
    return heads


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
