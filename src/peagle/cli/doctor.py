"""`peagle doctor`: find out why a draft head accepts less than it should."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from peagle.cli import groups, vllm
from peagle.cli.flags import Given, pick_flags, takes
from peagle.cli.groups import Format, OutputFormat
from peagle.cli.harness import given_shape
from peagle.cli.progress import ProgressLine
from peagle.cli.setup import Setup
from peagle.cli.terminal import bright
from peagle.cli.vllm import VllmFlags
from peagle.errors import UserError
from peagle.evaluation.prompts import read_prompts

if TYPE_CHECKING:
    from peagle.doctor.findings import Examination
    from peagle.doctor.serving import Serving

EXAMPLES = """
The bundled pair, which is healthy (about a minute on a CPU):
  peagle doctor

A head of your own, in our engine; prompts as they will be served:
  peagle doctor --target ./Qwen3-0.6B --draft ./head --no-thinking
  peagle doctor --target ./base-model --draft ./head --plain --prompts prompts.jsonl

Whether an engine would start with candidate trees, and how many requests then run at once:
  peagle doctor --target ./Qwen3-0.6B --draft ./head --max-num-seqs 64 \
    --parallel-drafting-spec '{"num_parallel_trees": 8, "prediction_depth": 7, "max_nodes": 16}'

The same head behind a server (ours or vLLM's), as it is served there:
  peagle doctor --target ./Qwen3-0.6B --draft ./head --endpoint http://127.0.0.1:8000

In vLLM, which is started for it; what follows -- are flags of vLLM's own:
  peagle doctor --target ./Qwen3-0.6B --draft ./head --engine vllm

For a program: exit status 0 is healthy, 1 is not, 2 is a mistake in the call:
  peagle doctor --target ./Qwen3-0.6B --draft ./head --format json > doctor.json
"""

_SIZES = ("max_model_len", "max_num_seqs", "kv_cache_gib", "gpu_memory_utilization")
_MARKS = {"agrees": "ok", "differs": "!!", "not checked": "--"}


@takes(
    *groups.MODEL,
    *pick_flags(groups.SPECULATION, "speculative.num_speculative_tokens", groups.TREES),
    *pick_flags(groups.ENGINE, "engine.dtype", "engine.quantization", "engine.fp8_activations"),
    *pick_flags(groups.ENGINE, "engine.kv_cache_dtype"),
    *pick_flags(groups.ENGINE, "engine.device", "threads", *(f"engine.{name}" for name in _SIZES)),
    *vllm.OPTIONS,
)
def doctor(
    given: Given,
    flags: VllmFlags = None,
    endpoint: str | None = typer.Option(
        None,
        metavar="URL",
        help="URL of a server with OpenAI's interface that serves the head.",
        show_default="our engine, in this process",
    ),
    endpoint_model: str | None = typer.Option(
        None,
        metavar="NAME",
        help="Name of the model on that server.",
        show_default="the first listed",
    ),
    prompts: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="File of prompts of the kind that the head is for, one a line.",
        show_default="short ones of the bundled sets",
    ),
    plain: bool = typer.Option(
        False, "--plain", help="Send prompts as plain text, without the chat template."
    ),
    chat_template: str | None = typer.Option(
        None,
        help="Jinja file, or name of one of the tokenizer's templates.",
        show_default="the tokenizer's",
    ),
    thinking: bool | None = typer.Option(
        None,
        "--thinking/--no-thinking",
        help="Thinking mode of the prompts.",
        show_default="the template's",
    ),
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Find out why a draft head accepts less than it should.

    Looks through the files of the head, runs it as in training on fixed prompts, tries a repair for
    each known fault, and compares with the serving engine. Names the cause and the remedy. With
    candidate trees it starts our engine with them, and shows why the engine refuses them.
    """
    if endpoint_model is not None and endpoint is None:
        raise UserError("--endpoint-model was given without --endpoint; give both.")
    if flags and not flags[0].startswith("-"):
        raise UserError(
            f"{flags[0]!r} was given without an option; name a target with --target, a head with "
            "--draft."
        )
    on_vllm = vllm.is_vllm(given, flags or [])
    if on_vllm and endpoint is not None:
        raise UserError("--engine vllm and --endpoint contradict each other; leave one out.")
    if groups.TREES in given and (on_vllm or endpoint is not None):
        where = "--engine vllm" if on_vllm else "--endpoint"
        raise UserError(
            f"--parallel-drafting-spec was given with {where}; the doctor examines candidate trees "
            "in our engine. Leave one out."
        )
    given_shape(given)  # refuses "auto"
    sizes = {name: given.value(f"engine.{name}") for name in _SIZES if f"engine.{name}" in given}
    if sizes and groups.TREES not in given:
        flag = "--" + min(sizes).replace("_", "-")
        raise UserError(f"{flag} was given without --parallel-drafting-spec; give both.")
    setup = Setup(given)
    if setup.speculative is None or setup.speculative.model is None:
        raise UserError(f"There is no head to examine for {setup.target!r}. Name one with --draft.")
    setup.check_paths(chat_template)
    if prompts is not None:
        read_prompts(prompts)  # refuses a missing file before torch is imported
    setup.prepare()
    with ProgressLine("step") as line:
        in_vllm = None
        if on_vllm:
            in_vllm = _in_vllm(given, flags or [], chat_template, thinking, line.begin)
        from peagle.doctor.examiner import run_doctor

        report = run_doctor(
            setup.target,
            setup.speculative.model,
            revision=setup.settings.value("revision"),
            draft_revision=setup.speculative.revision,
            endpoint=endpoint,
            endpoint_model=endpoint_model,
            vllm=in_vllm,
            # The given K, and not the depth of the trees, which may exceed the head's.
            num_speculative_tokens=given.value("speculative.num_speculative_tokens"),
            trees=setup.speculative.parallel_drafting_spec,
            prompts=prompts,
            plain=plain,
            chat_template=chat_template,
            thinking=thinking,
            engine=setup.engine,
            progress=line.begin,
        )
    if output_format is OutputFormat.JSON:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print(_report_text(report))
    if not report.is_healthy:
        raise typer.Exit(1)


def _in_vllm(
    given: Given,
    flags: list[str],
    chat_template: str | None,
    thinking: bool | None,
    progress: Callable[[str], None],
) -> Callable[[Path, Path, int], Serving]:
    """Return a function that serves a head in vLLM."""
    from peagle.doctor.serving import VllmServing

    installation = vllm.find(given)
    template = {"chat_template_kwargs": {"enable_thinking": thinking}}
    extra_body = None if thinking is None else template

    def serving(target: Path, head: Path, k: int) -> Serving:
        launch = vllm.launch_for(
            given, flags, target, head, k, max_num_seqs=1, chat_template=chat_template
        )
        return VllmServing(launch, installation, extra_body, progress)

    return serving


def _report_text(report: Examination) -> str:
    """Return the report as text: checks, then the verdict."""
    places = {"head": "in the head", "prompts": "in the prompts", "serving": "where it is served"}
    width = max(len(check.name) for check in report.checks)
    lines = [
        f"{_MARKS[check.status]}  {check.name:{width}}  {check.text}" for check in report.checks
    ]
    if report.is_healthy:
        lines += ["", bright("Healthy: training side and serving side agree.", sys.stdout)]
    for number, cause in enumerate(report.causes, start=1):
        lines += [
            "",
            bright(f"Cause {number}: {cause.title}, {places[cause.where]}", sys.stdout),
            f"  shown by  {cause.evidence}",
            f"  remedy    {cause.remedy}",
        ]
    return "\n".join([*lines, "", f"Advice: {report.advice}"])
