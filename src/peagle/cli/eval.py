"""`peagle eval`: how well drafts are accepted, and whether decoding is lossless."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from peagle.cli import groups, vllm_engine
from peagle.cli.eval_request import EvalRequest
from peagle.cli.flags import Given, pick, takes
from peagle.cli.options import (
    DEFAULT_LIMIT,
    Format,
    MoreHeads,
    OutputFormat,
    PromptLimit,
    Results,
    ShuffleSeed,
    Thinking,
    UseTemplate,
    check_paths,
    thinking_mode,
)
from peagle.cli.settings import Layer, Settings
from peagle.cli.values import whole_numbers
from peagle.cli.vllm_engine import VllmFlags
from peagle.config import MAX_SPECULATIVE_TOKENS, SamplingParams, SpeculativeConfig
from peagle.errors import UserError
from peagle.evaluation.prompts import Prompt

T = TypeVar("T", int, float)

EXAMPLES = """
The bundled pair on a few prompts, with EAGLE-3 and prompt lookup beside it:
  peagle eval

A head of your own on three sets, at three K and two temperatures; a report of it in out/:
  peagle eval --target ./Qwen3-0.6B --draft ./head --set humaneval,mt_bench,gsm8k \\
      -k 3,5,7 --temperature 0,0.7 --output out

Two heads side by side; prompts of your own; long outputs:
  peagle eval --target ./Qwen3-0.6B --draft ./head --method older=./head-v1 --set prompts.jsonl
  peagle eval --target ./Qwen3-0.6B --draft ./head --set long_output --max-new-tokens 4096

A server, ours or one with vLLM's counters:
  peagle eval --endpoint http://127.0.0.1:8000 --set mt_bench --concurrency 8

A head in vLLM, which is started for it; what follows -- are flags of vLLM's own:
  peagle eval --target ./Qwen3-0.6B --draft ./head -k 3,5 --engine vllm --set humaneval

A certificate that the output is that of the target alone; status 1 if it is not:
  peagle eval --certify
"""

DEFAULT_SET = "humaneval"
_DRAFT_SAMPLING = "speculative.draft_sampling"


@takes(
    *pick(groups.MODEL, "target", "revision", "speculative.model"),
    *pick(groups.SPECULATION, "speculative.draft_sampling"),
    *pick(groups.SAMPLING, "sampling.max_tokens", "sampling.top_k", "sampling.top_p"),
    *pick(groups.SAMPLING, "sampling.seed"),
    *pick(groups.ENGINE, "engine.dtype", "engine.device", "engine.max_model_len"),
    *pick(groups.ENGINE, "engine.kv_cache_gib", "engine.gpu_memory_utilization", "threads"),
    *vllm_engine.OPTIONS,
)
def eval(
    given: Given,
    flags: VllmFlags = None,
    eagle3: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="An EAGLE-3 head beside it, a folder or a hub id.",
            show_default="the bundled one; none with a target of your own",
        ),
    ] = None,
    method: MoreHeads = None,
    ngram: Annotated[
        bool, typer.Option(help="Prompt lookup, the baseline that needs no head.")
    ] = True,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME,...",
            help="Prompt sets: bundled or of the hub by name, files (JSONL, text); the bundled "
            "ones are humaneval, mt_bench, gsm8k, heldout_code, summarization, "
            "question_answering, structured_json and long_output.",
            show_default=DEFAULT_SET,
        ),
    ] = None,
    limit: PromptLimit = None,
    shuffle_seed: ShuffleSeed = None,
    prompt_column: Annotated[
        str, typer.Option(metavar="NAME", help="Of a data set of the hub.", show_default=False)
    ] = "",
    k: Annotated[
        str | None,
        typer.Option(
            "-k",
            "--num-speculative-tokens",
            metavar="K,...",
            help="Draft tokens per step; each K is a run of its own.",
            show_default="what every head was trained for, at most 7; a server's own with "
            "--endpoint",
        ),
    ] = None,
    temperature: Annotated[
        str, typer.Option(metavar="T,...", help="Temperatures; 0 is greedy.")
    ] = "0",
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 16,
    chat_template: UseTemplate = None,
    thinking: Thinking = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="[NAME=]URL",
            help="Measure a server in place of an engine here; PEAGLE_API_KEY holds its key.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The server's model.", show_default="the first that it lists"),
    ] = None,
    certify: Annotated[
        bool, typer.Option("--certify", help="Only certify that decoding is lossless.")
    ] = False,
    samples: Annotated[
        int | None,
        typer.Option(
            help="With --certify: outputs of a prompt, in the test of their distribution.",
            show_default="1000",
        ),
    ] = None,
    output: Results = None,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Measure how well the drafts of a head are accepted, or certify that decoding is lossless.

    Acceptance length and acceptance by position, with 95% intervals over requests.
    In the report also by set, category, context length and output position.
    """
    on_vllm = vllm_engine.is_vllm(given, flags or [])
    if on_vllm and endpoint:
        raise UserError(
            "--engine vllm and --endpoint contradict each other; leave one of them out."
        )
    if certify and (endpoint or on_vllm):
        what = "--endpoint" if endpoint else "--engine vllm"
        raise UserError(f"--certify looks at engines here; leave {what} out.")
    if samples is not None and not certify:
        raise UserError(f"--samples is {samples} without --certify; leave it out.")
    if model and not endpoint:
        raise UserError(f"--model is {model!r} without --endpoint; --target names a model here.")
    thinking = thinking_mode(thinking, chat_template)
    if not endpoint:
        check_paths(given.value("target"), given.value("speculative.model"), eagle3, method)
    settings = Settings(Layer(dict(given)))
    certificate = _certificate_options(given, sets, limit, temperature, samples) if certify else {}
    request = EvalRequest(
        prompts={} if certify else _prompt_sets(sets, limit, shuffle_seed, prompt_column),
        ks=_ks(k, given.value(_DRAFT_SAMPLING, "argmax")),
        temperatures=_temperatures(temperature),
        params=_with_seed(settings.build("sampling")),
        draft_sampling=given.value(_DRAFT_SAMPLING, "argmax"),
        concurrency=concurrency,
        chat_template=chat_template,
        thinking=thinking,
        output=output,
        as_json=output_format is OutputFormat.JSON,
    )
    if concurrency < 1:
        raise UserError(f"--concurrency is {concurrency}; expected at least 1 request in flight.")
    if endpoint:
        _refuse_models(given, eagle3, method)
        from peagle.cli.eval_flows import on_endpoint

        on_endpoint(endpoint, model, request)
        return
    if on_vllm:
        _on_vllm(given, settings, flags or [], eagle3, method or [], request)
        return
    from peagle.cli.eval_flows import certified, on_engine
    from peagle.cli.eval_models import load_models

    models = load_models(given, settings, eagle3, method or [], ngram=ngram)
    if not certify:
        on_engine(models, request)
    elif not certified(models, request, certificate):
        raise typer.Exit(1)


def _on_vllm(
    given: Given,
    settings: Settings,
    flags: list[str],
    eagle3: str | None,
    methods: list[str],
    request: EvalRequest,
) -> None:
    """Measure the heads on vLLM."""
    if request.draft_sampling != "argmax":
        raise UserError(
            f"--draft-sampling is {request.draft_sampling!r}; with --engine vllm drafts are "
            "measured as argmax. Leave it out."
        )
    from peagle.backends.vllm.installation import find_vllm

    installation = find_vllm(given.value("vllm_python"))
    from peagle.cli import eval_flows
    from peagle.cli.eval_models import find_models

    models = find_models(given, settings, eagle3, methods)
    size = {"max_num_seqs": request.concurrency}
    eval_flows.on_vllm(
        models,
        request,
        installation,
        lambda head, k: vllm_engine.launch_for(given, flags, models.folder, head, k, **size),
    )


def _refuse_models(given: Given, eagle3: str | None, method: list[str] | None) -> None:
    """A server has its models already."""
    named = [given[key].source for key in given if not key.startswith("sampling.")]
    named += ["--eagle3"] * (eagle3 is not None) + ["--method"] * bool(method)
    if named:
        raise UserError(
            f"{named[0]} and --endpoint contradict each other: the server has its models and its "
            "engine already. Leave one of the two out."
        )


def _certificate_options(
    given: Given, sets: list[str] | None, limit: int | None, temperature: str, samples: int | None
) -> dict[str, object]:
    """What was given of the certificate's options, by their names there."""
    names = [name for one in sets or () for name in one.split(",")]
    if len(names) > 1:
        raise UserError(f"--set names {len(names)} sets; a certificate takes its prompts from one.")
    above = [one for one in _temperatures(temperature) if one]
    if len(above) > 1:
        raise UserError(f"--temperature is {temperature!r}; a certificate tests one above 0.")
    sampling = given.value(_DRAFT_SAMPLING)
    options = {
        "prompts": limit,
        "prompt_set": names[0] if names else None,
        "temperature": above[0] if above else None,
        "samples": samples,
        "draft_samplings": None if sampling is None else (sampling,),
        "max_new_tokens": given.value("sampling.max_tokens"),
        **{name: given.value(f"sampling.{name}") for name in ("top_k", "top_p", "seed")},
    }
    return {name: value for name, value in options.items() if value is not None}


def _prompt_sets(
    names: list[str] | None, limit: int | None, shuffle_seed: int | None, column: str
) -> dict[str, list[Prompt]]:
    """The prompts by the name of their set."""
    from peagle.evaluation.prompt_sets import load

    if not names:
        names, limit = [DEFAULT_SET], limit or (DEFAULT_LIMIT if limit is None else limit)
    # A file's name may hold commas.
    split = [one for name in names for one in ([name] if Path(name).exists() else name.split(","))]
    if twice := [name for name in split if split.count(name) > 1]:
        raise UserError(f"--set names {twice[0]!r} twice; name it once.")
    return {name: load(name, limit, shuffle_seed, prompt_column=column) for name in split}


def _ks(text: str | None, draft_sampling: str) -> tuple[int, ...]:
    """The K asked for; () where none was."""
    ks = () if text is None else whole_numbers("-k", text, MAX_SPECULATIVE_TOKENS)
    # Any method will do: only how drafts are drawn is looked at.
    SpeculativeConfig(method="ngram", draft_sampling=draft_sampling)  # type: ignore[arg-type]
    return ks


def _temperatures(text: str) -> tuple[float, ...]:
    temperatures = _numbers("--temperature", text, float, "numbers like 0,0.7")
    for one in temperatures:
        SamplingParams(temperature=one)
    return temperatures


def _with_seed(params: SamplingParams) -> SamplingParams:
    return params if params.seed is not None else replace(params, seed=0)


def _numbers(flag: str, text: str, kind: Callable[[str], T], expected: str) -> tuple[T, ...]:
    """Numbers between commas, each once."""
    try:
        return tuple(dict.fromkeys(kind(one) for one in text.split(",")))
    except ValueError:
        raise UserError(f"{flag} is {text!r}; expected {expected}.") from None
