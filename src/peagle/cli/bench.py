"""`peagle bench`: throughput and latency by method, K and concurrency."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.cli import groups, options, vllm_engine
from peagle.cli.bench_arms import (
    DEFAULT_KS,
    Endpoints,
    Engines,
    connect,
    endpoint_arms,
    in_vllm,
    load_engines,
)
from peagle.cli.flags import Flag, Given, group, pick, takes
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
)
from peagle.cli.settings import Layer, Settings
from peagle.cli.setup import note
from peagle.cli.values import json_object, whole_numbers
from peagle.cli.vllm_engine import VllmFlags
from peagle.config import MAX_SPECULATIVE_TOKENS
from peagle.errors import UserError
from peagle.evaluation.prompts import Prompt

if TYPE_CHECKING:
    from peagle.config import SamplingParams
    from peagle.evaluation.decoding import Request
    from peagle.evaluation.endpoint import EndpointBackend
    from peagle.evaluation.sweep import Sweep, SweepPoint
    from peagle.evaluation.timing import Figures, LatencyObjective
    from peagle.results import ThroughputResults

EXAMPLES = """
The bundled pair: plain decoding, EAGLE-3 and P-EAGLE; a few minutes on a laptop:
  peagle bench

Models of your own, three K by four concurrencies, a report in out/; run again, it goes on there:
  peagle bench --target ./Qwen3-0.6B --draft ./head --eagle3 ./eagle3-head -k 3,5,7 \\
      --concurrency 1,4,16,64 --set humaneval,mt_bench --output out

Requests per second that keep a latency; fixed lengths; prompt lookup and another head beside:
  peagle bench --objective ttft=500ms,itl=50ms@p90 --ignore-eos --max-new-tokens 256
  peagle bench --target ./Qwen3-0.6B --draft ./head --method ngram --method older=./head-v1

The same head in vLLM beside, which is started for it; it needs one K:
  peagle bench --target ./Qwen3-0.6B --draft ./head -k 5 --engine vllm

Servers with OpenAI's interface, alone or beside the engine here; one called plain or eagle3 is what
the others are compared with:
  peagle bench --endpoint peagle=http://127.0.0.1:8000 --endpoint vllm=http://127.0.0.1:8001
  peagle bench --target ./Qwen3-0.6B --draft ./head --endpoint vllm=http://127.0.0.1:8001
"""

# Of a sweep that goes on: more of the same may be measured, and judged otherwise.
_MAY_DIFFER = ("concurrency", "repeats", "warm_up", "objective")
_OF_ENGINES = ("target", "revision", "speculative", "engine.", "threads")
_PREFIX_CACHING = Flag(
    "engine.enable_prefix_caching",
    bool,
    "Keep the KV of prompts for later ones; without, every repeat computes its prompts.",
    "--prefix-caching",
)


@takes(
    *pick(groups.MODEL, "target", "revision", "speculative.model"),
    *pick(groups.SPECULATION, "speculative.draft_sampling"),
    *pick(groups.SAMPLING, "sampling.max_tokens", "sampling.temperature", "sampling.top_k"),
    *pick(groups.SAMPLING, "sampling.top_p", "sampling.seed"),
    *pick(groups.FINER_SAMPLING, "sampling.ignore_eos"),
    *pick(groups.ENGINE, "engine.dtype", "engine.device", "engine.max_model_len"),
    *pick(groups.ENGINE, "engine.max_num_batched_tokens", "engine.kv_cache_gib"),
    *pick(groups.ENGINE, "engine.gpu_memory_utilization", "threads"),
    *group("Engine", _PREFIX_CACHING),
    *vllm_engine.OPTIONS,
)
def bench(
    given: Given,
    flags: VllmFlags = None,
    eagle3: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="An EAGLE-3 head to compare with, a folder or a hub id.",
            show_default="the bundled one; none with a target of your own",
        ),
    ] = None,
    method: MoreHeads = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL",
            help="A server with OpenAI's interface, under a name of yours; may be given several "
            "times. PEAGLE_API_KEY or OPENAI_API_KEY holds its key.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MODEL",
            help="What the endpoint of this name is asked for.",
            show_default="the first that it lists",
        ),
    ] = None,
    extra_body: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="Further fields of every request to endpoints.", show_default=False
        ),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(
            "-k",
            "--num-speculative-tokens",
            metavar="K,...",
            help="Draft tokens per step.",
            show_default="3,5,7, none above what every head was trained for",
        ),
    ] = None,
    concurrency: Annotated[
        str, typer.Option(metavar="C,...", help="Requests in flight.")
    ] = "1,4,16",
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME,...",
            help="Prompt sets: bundled or of the hub by name, or files, as in peagle eval; of "
            "several turns the first.",
            show_default="humaneval",
        ),
    ] = None,
    limit: PromptLimit = None,
    shuffle_seed: ShuffleSeed = None,
    chat_template: UseTemplate = None,
    thinking: Thinking = None,
    repeats: Annotated[int, typer.Option(help="Measurements of each configuration.")] = 3,
    warm_up: Annotated[
        int, typer.Option(help="Short runs of each before the first measurement.")
    ] = 1,
    objective: Annotated[
        str | None,
        typer.Option(
            metavar="BOUNDS",
            help="Latency to be kept, like ttft=500ms,itl=50ms@p90; tells the most requests per "
            "second at which each method keeps it.",
            show_default="none",
        ),
    ] = None,
    output: Results = None,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Measure throughput and latency by method, K and concurrency.

    All configurations take turns, so that a machine that slows down favours none; medians and
    spreads over repeats, speed-up over plain decoding and over EAGLE-3, the best K by load.
    """
    ks = [] if k is None else [*whole_numbers("-k", k, MAX_SPECULATIVE_TOKENS)]
    loads = whole_numbers("--concurrency", concurrency, 4096)
    for name, value, least in (("--repeats", repeats, 1), ("--warm-up", warm_up, 0)):
        if value < least:
            raise UserError(f"{name} is {value}; expected at least {least}.")
    thinking = options.thinking_mode(thinking, chat_template)
    extra = json_object(extra_body, '{"top_k": 20}') if extra_body else {}
    endpoints = Endpoints.of(endpoint or [], model or [])
    on_vllm = vllm_engine.is_vllm(given, flags or [])
    if on_vllm:
        _check_vllm(ks, endpoints)
    options.check_paths(given.value("target"), given.value("speculative.model"), eagle3, method)
    settings = Settings(Layer(dict(given)))
    params = settings.build("sampling")
    prompts = _prompts(sets, limit, shuffle_seed)
    options.quiet_libraries()
    from peagle.evaluation.eval_run import provenance
    from peagle.evaluation.report.advice import throughput_advice
    from peagle.evaluation.sweep import Sweep
    from peagle.evaluation.throughput import summarize
    from peagle.evaluation.timing import LatencyObjective
    from peagle.evaluation.vllm_server import ENGINE

    bounds = LatencyObjective.parse(objective) if objective else None
    servers = connect(endpoints, thinking, extra)
    engines: Engines | None = None
    here = [key for key in given if key.startswith(_OF_ENGINES)]
    if here or eagle3 or method or on_vllm or not servers:
        most = max(loads)
        engines = load_engines(given, settings, eagle3, method or [], ks, most, thinking)
    with ExitStack() as stack:
        if on_vllm:
            assert engines is not None
            vllm = in_vllm(given, flags or [], engines, ks[0], max(loads), thinking, extra)
            servers[ENGINE] = stack.enter_context(vllm)
        arms = [*(engines.arms if engines else ()), *endpoint_arms(servers)]
        _check_names(engines, servers)
        is_chat = _is_chat(chat_template, engines, servers)
        requests = {name: _requests(own, params, is_chat) for name, own in prompts.items()}
        sweep = Sweep(arms, requests, loads, repeats, warm_up)
        if engines is not None:
            who = provenance(engines.target, engines.dtype, engines.device)
        else:
            who = provenance(_served(servers), "")
        shape = {"chat_template": is_chat, "thinking": thinking, "extra_body": extra}
        settings_used = _settings(sweep, params, bounds) | shape
        identity = engines.identity if engines else {}
        result = summarize(
            _measure(sweep, who, settings_used, identity, output),
            bounds,
            provenance=who,
            settings=settings_used,
            training=engines.training if engines else {},
        )
        result = result.model_copy(update={"advice": throughput_advice(result)})
    for server in servers.values():
        for text in server.notes:
            note(text)
    _finish(result, output, output_format)


def _check_vllm(ks: Sequence[int], endpoints: Endpoints) -> None:
    if len(ks) != 1:
        raise UserError(
            f"--engine vllm serves one K, and -k has {len(ks) or len(DEFAULT_KS)}; give one, like "
            "-k 5."
        )
    if "vllm" in endpoints.urls:
        raise UserError(
            "--engine vllm and --endpoint vllm=... have one name; give the endpoint another."
        )


def _settings(
    sweep: Sweep, params: SamplingParams, objective: LatencyObjective | None
) -> dict[str, Any]:
    sampling = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "seed")}
    return {
        "sets": {name: len(requests) for name, requests in sweep.sets.items()},
        "max_new_tokens": params.max_tokens,
        "ignore_eos": params.ignore_eos,
        **sampling,
        "concurrency": list(sweep.concurrencies),
        "repeats": sweep.repeats,
        "warm_up": sweep.warm_up,
        "objective": None if objective is None else asdict(objective),
    }


def _measure(
    sweep: Sweep,
    who: Mapping[str, Any],
    settings: Mapping[str, Any],
    identity: Mapping[str, Any],
    output: Path | None,
) -> dict[SweepPoint, list[Figures]]:
    """Run a sweep, or go on with the one in the output folder.

    Raises:
        UserError: that one is of other models, settings or of another machine.
    """
    from peagle.cli.bench_view import Ticker
    from peagle.evaluation.journal import Journal
    from peagle.evaluation.sweep import LOG_NAME

    where = who["environment"]
    same = {name: who[name] for name in ("target", "dtype")}
    same |= {name: v for name, v in settings.items() if name not in _MAY_DIFFER}
    same |= {f"prompts of {name}": _digest(own) for name, own in sweep.sets.items()}
    same |= identity
    same |= {name: where[name] for name in ("peagle", "torch", "device", "cpu", "threads")}
    log = Journal(output and output / LOG_NAME, same)
    if len(log):
        note(f"{len(log)} measurements are there already")
    ticker = Ticker()
    try:
        return sweep.run(log, ticker)
    except KeyboardInterrupt:
        if output is not None:
            note(f"{len(log)} measurements are kept; the same command goes on with them")
        raise
    finally:
        ticker.close()


def _finish(result: ThroughputResults, output: Path | None, output_format: OutputFormat) -> None:
    from peagle.cli.bench_view import result_text

    report: Path | None = None
    if output is not None:
        from peagle.evaluation.report import write_report
        from peagle.models.checkpoint.files import write_json
        from peagle.results import THROUGHPUT

        write_json(output / THROUGHPUT, result.to_json())
        report = write_report(output)
    if output_format is OutputFormat.JSON:
        print(json.dumps(result.to_json(), indent=2))
        return
    print(result_text(result))
    if report is not None:
        print(f"{report}")


# ---- what is sent ---------------------------------------------------------------------------


def _prompts(
    sets: Sequence[str] | None, limit: int | None, seed: int | None
) -> dict[str, list[Prompt]]:
    from peagle.evaluation import prompt_sets

    names = [name for text in sets or () for name in text.split(",")]
    if not all(names):
        raise UserError(f"--set is {','.join(sets or ())!r}; expected names with commas between.")
    if not names:
        names, limit = ["humaneval"], DEFAULT_LIMIT if limit is None else limit
    return {name: prompt_sets.load(name, limit, seed) for name in dict.fromkeys(names)}


def _requests(prompts: Sequence[Prompt], params: SamplingParams, is_chat: bool) -> list[Request]:
    from peagle.evaluation.decoding import Request

    def first(prompt: Prompt) -> Any:
        return [{"role": "user", "content": prompt.text}] if is_chat else prompt.text

    return [Request(prompt.id, first(prompt), params) for prompt in prompts]


def _digest(requests: Sequence[Request]) -> str:
    """What tells a set from another of the same name."""
    from hashlib import sha256

    return sha256(json.dumps([request.prompt for request in requests]).encode()).hexdigest()


def _is_chat(
    asked: bool | None, engines: Engines | None, servers: Mapping[str, EndpointBackend]
) -> bool:
    """Whether prompts go behind a chat template: all methods get the same ones."""
    if asked is not None:
        return asked
    if engines is not None:
        return engines.has_template
    # A server that does not say is asked for what most are there for.
    return all(server.has_chat is not False for server in servers.values())


def _check_names(engines: Engines | None, servers: Mapping[str, EndpointBackend]) -> None:
    taken = {arm.method for arm in engines.arms} if engines else set()
    if double := sorted(taken & set(servers)):
        raise UserError(
            f"A method here is called {double[0]!r} like --endpoint {double[0]}=...; give the "
            "endpoint another name."
        )


def _served(servers: Mapping[str, EndpointBackend]) -> str:
    return ", ".join(dict.fromkeys(server.model for server in servers.values()))
