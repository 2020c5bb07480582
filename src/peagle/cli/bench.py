"""`peagle bench`: throughput and latency by method, K and concurrency."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from peagle.cli import groups, harness, vllm
from peagle.cli.flags import Given, group, pick_flags, spread, takes
from peagle.cli.harness import Eagle3, Models, Sets
from peagle.cli.mix import Share, apply_mix, read_mix
from peagle.cli.progress import ProgressLine, time_text
from peagle.cli.settings import Layer, Settings, json_object, positive_number, whole_numbers
from peagle.cli.setup import check_paths, name_target, note, quiet_libraries, thinking_mode
from peagle.cli.tables import names_of, pivot_table, short_share, text_table, two_digits
from peagle.cli.terminal import printable
from peagle.cli.vllm import VllmFlags
from peagle.config import MAX_SPECULATIVE_TOKENS
from peagle.config.checks import named_values
from peagle.errors import UserError
from peagle.evaluation.decoding_methods import PLAIN, DecodingMethod
from peagle.evaluation.journal import BENCH_LOG, Journal, read_settings, weights_digest
from peagle.evaluation.objective import LatencyObjective
from peagle.evaluation.pivot import bench_pivot
from peagle.evaluation.sources import by_source
from peagle.results import THROUGHPUT

if TYPE_CHECKING:
    from peagle.backends.vllm.installation import VllmInstallation
    from peagle.config import SamplingParams
    from peagle.evaluation.decoding import Request
    from peagle.evaluation.endpoint import EndpointBackend
    from peagle.evaluation.prompts import Prompt
    from peagle.evaluation.sweep import Arm, Sweep, SweepProgress
    from peagle.results import BestK, Cell, ThroughputResults, TouchedExperts, TrainingRecord, Turns

EXAMPLES = """
The bundled pair: plain decoding, EAGLE-3 and P-EAGLE; a few minutes on a laptop:
  peagle bench

Models of your own, three K by four concurrencies, a report in out/; run again, it goes on there:
  peagle bench --target ./Qwen3-0.6B --draft ./head --eagle3 ./eagle3-head -k 3,5,7 \\
      --concurrency 1,4,16,64 --set humaneval,mt_bench --output out

Requests per second that keep a latency; fixed lengths; prompt lookup and another head beside:
  peagle bench --objective ttft=500ms,itl=50ms@p90 --ignore-eos --max-new-tokens 256
  peagle bench --target ./Qwen3-0.6B --draft ./head --method ngram --method older=./head-v1

The cost of a million output tokens at your price, and the instances for 20 requests per second:
  peagle bench --price-per-hour 4.50 --requests-per-second 20

Both turns of MT-Bench, the second behind the answer to the first:
  peagle bench --set mt_bench --turns all

The same in vLLM, which is started for plain decoding and for each head and K, one after another:
  peagle bench --target ./Qwen3-0.6B --draft ./head --eagle3 ./eagle3-head -k 3,7 --engine vllm

One request in 4 with a penalty, one in 8 with log-probabilities, as a file says:
  peagle bench --concurrency 16 --mix mix.json

Servers with OpenAI's interface, alone or beside the engine here; one called plain or eagle3 is what
the others are compared with:
  peagle bench --endpoint peagle=http://127.0.0.1:8000 --endpoint vllm=http://127.0.0.1:8001
  peagle bench --target ./Qwen3-0.6B --draft ./head --endpoint vllm=http://127.0.0.1:8001
"""

_DEFAULT_KS = (3, 5, 7)
# Settings that may change when a sweep goes on: they add measurements or change their judgement.
_MAY_DIFFER = ("concurrency", "repeats", "warm_up", "objective")
_OF_ENGINES = ("target", "revision", "speculative", "engine.", "threads")
_PREFIX_CACHING = group(
    "Engine",
    """
    --prefix-caching = engine.enable_prefix_caching
        Keep the KV of prompts for later ones; without, every repeat computes its prompts.
    """,
)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of `bench` outside the shared groups, as typed."""

    target_model: groups.Model = None
    flags: VllmFlags = None
    eagle3: Eagle3 = None
    method: groups.MoreHeads = None
    endpoint: list[str] | None = typer.Option(
        None,
        metavar="NAME=URL",
        help="A server with OpenAI's interface, under a name of yours; may be given several "
        "times. PEAGLE_API_KEY or OPENAI_API_KEY holds its key.",
    )
    model: list[str] | None = typer.Option(
        None,
        metavar="NAME=MODEL",
        help="Name of the model at the endpoint NAME.",
        show_default="the first that the server lists",
    )
    extra_body: str | None = typer.Option(
        None,
        metavar="JSON",
        help="Further fields of every request to endpoints.",
        show_default=False,
    )
    mix: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="JSON file that says which requests ask for penalties, log-probabilities, schemas or "
        "other sampling parameters.",
        show_default="all requests are alike",
    )
    k: str | None = typer.Option(
        None,
        "-k",
        "--num-speculative-tokens",
        metavar="K,...",
        help="Draft tokens per step.",
        show_default="3,5,7, none above what every head was trained for",
    )
    concurrency: str = typer.Option(
        "1,4,16", metavar="C,...", help="Numbers of requests in flight."
    )
    sets: Sets = None
    limit: groups.PromptLimit = None
    shuffle_seed: groups.ShuffleSeed = None
    turns: str = typer.Option(
        "1",
        metavar="N",
        help="Turns to send of each prompt that has several, or all; each follows the answer to "
        "the turn before.",
    )
    chat_template: groups.UseTemplate = None
    thinking: groups.Thinking = None
    repeats: int = typer.Option(3, help="Measurements of each configuration.")
    warm_up: int = typer.Option(1, help="Short runs of each before the first measurement.")
    objective: str | None = typer.Option(
        None,
        metavar="BOUNDS",
        help="Latency to be kept, like ttft=500ms,itl=50ms@p90; tells the most requests per "
        "second at which each method keeps it.",
        show_default="none",
    )
    price_per_hour: str | None = typer.Option(
        None,
        metavar="PRICE",
        help="What an hour of this machine costs you, in any currency; tells the cost of a million "
        "output tokens.",
        show_default="none",
    )
    requests_per_second: str | None = typer.Option(
        None,
        metavar="N",
        help="Requests per second that you want to serve; tells how many instances like this "
        "machine are needed.",
        show_default="none",
    )
    output: groups.Results = None
    output_format: groups.Format = groups.OutputFormat.TEXT


@takes(
    *pick_flags(groups.MODEL, "target", "revision", "speculative.model"),
    *pick_flags(groups.SPECULATION, groups.TREES, groups.PROMPT_LOOKUP),
    *pick_flags(groups.SPECULATION, groups.DRAFT_SAMPLING, groups.DRAWN_FROM, groups.DRAFT_WINDOW),
    *pick_flags(groups.SAMPLING, "sampling.max_tokens", "sampling.temperature", "sampling.top_k"),
    *pick_flags(groups.SAMPLING, "sampling.top_p", "sampling.seed"),
    *pick_flags(groups.FINER_SAMPLING, "sampling.ignore_eos"),
    *pick_flags(groups.ENGINE, "engine.dtype", "engine.quantization", "engine.fp8_activations"),
    *pick_flags(groups.ENGINE, "engine.kv_cache_dtype"),
    *pick_flags(groups.ENGINE, "engine.device", "engine.max_model_len"),
    *pick_flags(groups.ENGINE, "engine.max_num_batched_tokens", "engine.kv_cache_gib"),
    *pick_flags(groups.ENGINE, "engine.gpu_memory_utilization", "threads"),
    *_PREFIX_CACHING,
    *vllm.OPTIONS,
)
@spread
def bench(given: Given, options: BenchOptions) -> None:
    """Measure throughput and latency by method, K and concurrency.

    A prompt sends its first turn, or as many turns as --turns says. All configurations
    take turns, so that a machine that slows down favours none. The result has medians and spreads
    over repeats, the speed-up over plain decoding and over EAGLE-3, and the best K by load. Several
    sets have one table of acceptance length and speed-up by method, K and set. For a mixture of
    experts the result also has the distinct experts that a decode step touches in a layer.
    """
    results = _run(given, _plan(given, options))
    text = bench_text(results)
    harness.conclude(results, text, THROUGHPUT, options.output, options.output_format)


# ---- the plan ----


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The measurements of `bench`, decided before a model is loaded.

    Attributes:
        flags: flags of vLLM.
        ks: K to measure; () takes a few that the heads were trained for.
        num_turns: turns that a prompt sends; None sends all.
        extra_body: further fields of every request to a server, as given.
        endpoints: the URL of each server, and its model if one is named.
        heads: the methods here; [] if only servers are measured.
    """

    options: BenchOptions
    flags: list[str]
    is_on_vllm: bool
    ks: tuple[int, ...]
    loads: tuple[int, ...]
    num_turns: int | None
    price_per_hour: float | None
    requests_per_second: float | None
    thinking: bool | None
    objective: LatencyObjective | None
    extra_body: dict[str, Any]
    endpoints: dict[str, tuple[str, str | None]]
    params: SamplingParams
    shares: list[Share]
    heads: list[DecodingMethod]
    prompts: dict[str, list[Prompt]]

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the results, without the chat template."""
        params = self.params
        return {
            "sets": {name: len(own) for name, own in self.prompts.items()},
            "max_new_tokens": params.max_tokens,
            **{name: getattr(params, name) for name in ("ignore_eos", "temperature", "top_k")},
            **{name: getattr(params, name) for name in ("top_p", "seed")},
            "concurrency": list(self.loads),
            "repeats": self.options.repeats,
            "warm_up": self.options.warm_up,
            "objective": None if self.objective is None else asdict(self.objective),
            **({"mix": [share.entry for share in self.shares]} if self.shares else {}),
            **{"thinking": self.thinking, "extra_body": self.extra_body},
        }


def _plan(given: Given, options: BenchOptions) -> BenchPlan:
    """Check the options, and read the prompts that they name."""
    target_model, flags = vllm.model_and_flags(options.target_model, options.flags)
    name_target(given, target_model)
    ks = () if options.k is None else whole_numbers("-k", options.k, MAX_SPECULATIVE_TOKENS)
    loads = whole_numbers("--concurrency", options.concurrency, 4096)
    for name, value, least in (("repeats", options.repeats, 1), ("warm-up", options.warm_up, 0)):
        if value < least:
            raise UserError(f"--{name} is {value}; expected at least {least}.")
    num_turns = None if options.turns == "all" else _whole_turns(options.turns)
    price = positive_number("--price-per-hour", options.price_per_hour, "4.50")
    wanted = positive_number("--requests-per-second", options.requests_per_second, "20")
    thinking = thinking_mode(options.thinking, options.chat_template)
    objective = LatencyObjective.parse(options.objective) if options.objective else None
    extra = options.extra_body
    fields = {} if extra is None else json_object(extra, '{"top_k": 20}')
    endpoints = _endpoints(options.endpoint, options.model)
    is_on_vllm = vllm.is_vllm(given, flags)
    if extra is not None and not (endpoints or is_on_vllm):
        raise UserError(
            f"--extra-body is {extra}, which has no effect without a server; add --endpoint "
            "NAME=URL, or leave --extra-body out."
        )
    if is_on_vllm and groups.TREES in given:
        raise UserError(
            f"{given[groups.TREES].source} and --engine vllm: vLLM drafts chains alone."
        )
    eagle3, methods = options.eagle3, options.method or []
    if is_on_vllm:
        vllm.refuse_unmeasured(given, methods)
    check_paths(given.value("target"), given.value("speculative.model"), eagle3, methods)
    params = Settings(Layer(dict(given))).build("sampling")
    shares = read_mix(options.mix) if options.mix else []
    has_engines = any(key.startswith(_OF_ENGINES) for key in given) or eagle3 or methods
    heads = []
    if has_engines or is_on_vllm or not endpoints:
        heads = harness.named_methods(given, eagle3, methods, ngram=False)
    prompts = harness.load_prompts(options.sets, options.limit, options.shuffle_seed)
    plan = BenchPlan(
        *(options, flags, is_on_vllm, ks, loads, num_turns, price, wanted, thinking, objective),
        *(fields, endpoints, params, shares, heads, prompts),
    )
    known = {name: value for name, value in plan.settings.items() if name not in _MAY_DIFFER}
    harness.check_output(options.output, BENCH_LOG, read_settings, known)
    return plan


def _endpoints(
    urls: Sequence[str] | None, models: Sequence[str] | None
) -> dict[str, tuple[str, str | None]]:
    """Return the URL of each server, and the model if one is named."""
    if models and not urls and "=" not in models[0]:
        raise UserError(
            f"--model is {models[0]!r} without --endpoint; name a model here with --target "
            f"{models[0]}, or as the first word: peagle bench {models[0]}."
        )
    url, model = "vllm=http://127.0.0.1:8000", "vllm=Qwen/Qwen3-8B"
    found = named_values(urls or (), "NAME=URL", url, "--endpoint: ")
    names = named_values(models or (), "NAME=MODEL", model, "--model: ")
    if unknown := sorted(set(names) - set(found)):
        raise UserError(f"--model names the endpoint {unknown[0]!r}; there is no such one.")
    return {name: (url, names.get(name)) for name, url in found.items()}


# ---- the run ----


def _run(given: Given, plan: BenchPlan) -> ThroughputResults:
    """Load the models, and measure what the output folder lacks."""
    found = harness.find_models(given, plan.heads, plan.ks) if plan.heads else None
    quiet_libraries()
    from peagle.evaluation.endpoint import EndpointBackend
    from peagle.evaluation.report.advice import throughput_advice
    from peagle.evaluation.sweep import Sweep
    from peagle.evaluation.throughput import summarize
    from peagle.evaluation.touched_experts import count_experts
    from peagle.evaluation.turns import bench_with_turns, sent_turns

    sent = sent_turns(plan.prompts, plan.num_turns)
    extra = harness.template_fields(plan.thinking, plan.extra_body)
    servers = {
        name: EndpointBackend(url, model, extra_body=extra, report=False)
        for name, (url, model) in plan.endpoints.items()
    }
    note_once = cache(note)
    if found is None:
        models, arms, identity = None, [], {}
        served = dict.fromkeys(server.model for server in servers.values())
        provenance = harness.provenance(", ".join(served), "")
    else:
        installation = vllm.find(given) if plan.is_on_vllm else None
        whole = not plan.is_on_vllm
        models = harness.load_models(given, plan.heads, found, plan.ks, whole=whole)
        if installation is None:
            device = models.target.device
            arms, identity, dtype = _engine_arms(given, plan, models)
        else:
            device = vllm.device_of(installation)
            arms, identity, dtype = _vllm_arms(given, plan, models, installation, note_once)
        provenance = harness.provenance(models.name, dtype, device)
    arms += _server_arms(servers, arms)
    chat = _is_chat(plan.options.chat_template, models, servers)
    if not chat:
        harness.note_plain_prompts(plan.prompts)
    requests = {name: _requests(own, plan, chat) for name, own in plan.prompts.items()}
    sweep = Sweep(arms, requests, plan.loads, plan.options.repeats, plan.options.warm_up)
    settings = plan.settings | {"chat_template": chat}
    log = _open_journal(plan.options.output, sweep, sent, provenance, settings, identity)
    view = BenchView(on_gpu=any(arm.device and arm.device.type == "cuda" for arm in arms))
    with harness.resumable(view.close, plan.options.output, log):
        measured = sweep.run(log, view)
        experts = count_experts(sweep, log)
    results = summarize(
        measured,
        plan.objective,
        provenance=provenance,
        settings=settings,
        training={} if models is None else _training(models),
        experts=experts,
        turns=sent,
        price_per_hour=plan.price_per_hour,
        requests_per_second=plan.requests_per_second,
    )
    advice = throughput_advice(bench_with_turns(results))
    backends = dict.fromkeys(arm.backend for arm in arms)
    for text in dict.fromkeys(text for one in backends for text in getattr(one, "notes", ())):
        note_once(text)
    return results.model_copy(update={"advice": advice})


# ---- arms ----


def _ks(plan: BenchPlan, models: Models) -> Sequence[int]:
    """Return the K to measure: the given ones, else a few that every head was trained for."""
    return plan.ks or sorted({min(k, models.default_k) for k in _DEFAULT_KS})


def _engine_arms(
    given: Given, plan: BenchPlan, models: Models
) -> tuple[list[Arm], dict[str, Any], str]:
    """Build engines of plain decoding and every method at every K.

    Return their identity and the data type, too.
    """
    import torch

    from peagle.evaluation.engine_backend import EngineBackend, build_llms
    from peagle.evaluation.sweep import Arm

    head_options = Settings(Layer(dict(given))).section("speculative")
    head_options.pop("model", None)
    heads = [(one, k) for one in models.methods for k in one.depths(_ks(plan, models))]
    every = [(DecodingMethod(PLAIN), 0), *heads]
    # A method with trees has them in its own configuration.
    own = groups.TREES, groups.PROMPT_LOOKUP
    options = {n: value for n, value in head_options.items() if f"speculative.{n}" not in own}
    configurations = {
        f"{one.name} K={k}": one.config(k, **options if one.folder else {}) for one, k in every
    }
    sizes = {"max_num_seqs": max(plan.loads), **models.engine_options}
    note(f"building {len(every)} engines on {models.name}")
    seed = {} if plan.params.seed is None else {"seed": plan.params.seed}
    llms = build_llms(models.target, configurations, **{**seed, **sizes})
    device = models.target.device
    arms = [
        Arm(one.name, one.source, k, EngineBackend(llm, thinking=plan.thinking), device)
        for (one, k), llm in zip(every, llms.values(), strict=True)
    ]
    options = {**sizes, **head_options, "threads": torch.get_num_threads()}
    return arms, _identity(models, "peagle", options), models.dtype


def _vllm_arms(
    given: Given,
    plan: BenchPlan,
    models: Models,
    installation: VllmInstallation,
    note_once: Callable[[str], None],
) -> tuple[list[Arm], dict[str, Any], str]:
    """Make arms that start vLLM for plain decoding and for every method at every K.

    Return their identity, and the data type that vLLM takes, too.
    """
    from peagle.evaluation.sweep import Arm
    from peagle.evaluation.vllm_server import ENGINE, VllmOnDemand, vllm_backend

    device, most_in_flight = vllm.device_of(installation), max(plan.loads)
    extra = harness.template_fields(plan.thinking, plan.extra_body)
    arms: list[Arm] = []
    heads = [(one, k) for one in models.methods for k in _ks(plan, models)]
    for one, k in [(DecodingMethod(PLAIN), 0), *heads]:
        asked = given, plan.flags, models.folder, one.folder or None, k
        launch = vllm.launch_for(*asked, max_num_seqs=most_in_flight)
        more = {"say": vllm.say, "note": note_once, "extra_body": extra}
        start = partial(vllm_backend, launch, installation, **more)
        backend = VllmOnDemand(start)
        arms.append(Arm(one.name, one.source, k, backend, device, backend.close))
    dtype = launch.dtype_on(installation)
    options = {"version": installation.version, "flags": list(plan.flags)}
    options |= {"threads": given.value("threads")}
    options |= {"max_num_seqs": most_in_flight, **models.engine_options}
    identity = _identity(models, ENGINE, options)
    return arms, identity, models.dtype if dtype == "auto" else dtype


def _identity(models: Models, engine: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return digests and options that identify the models and the engine of measurements."""
    return {
        "target_sha256": models.target_sha256,
        "heads_sha256": {one.name: weights_digest(one.folder) for one in models.methods},
        "engines": {engine: options},
    }


def _server_arms(servers: Mapping[str, EndpointBackend], engines: Sequence[Arm]) -> list[Arm]:
    """Make one arm of each server, at the K that it reports."""
    from peagle.evaluation.sweep import Arm

    if double := sorted({arm.method for arm in engines} & set(servers)):
        raise UserError(
            f"A method here is called {double[0]!r} like --endpoint {double[0]}=...; give the "
            "endpoint another name."
        )
    return [
        Arm(name, "", server.num_speculative_tokens() or 0, server)
        for name, server in servers.items()
    ]


def _training(models: Models) -> dict[str, TrainingRecord]:
    """Read the record of each head's training, where it has one."""
    from peagle.evaluation.training_record import read_training_record

    records = {one.name: read_training_record(one.folder) for one in models.methods if one.folder}
    return {name: record for name, record in records.items() if record is not None}


# ---- requests ----


def _whole_turns(text: str) -> int:
    """Read the number of turns to send."""
    if re.fullmatch(r"\d{1,6}", text) is None or not int(text):
        raise UserError(f"--turns is {text!r}; expected a whole number of at least 1, or all.")
    return int(text)


def _requests(prompts: Sequence[Prompt], plan: BenchPlan, chat: bool) -> list[Request]:
    """Make a request of each prompt, with its first turns and its share of the mix."""
    from peagle.evaluation.decoding import Request

    requests = [
        Request(
            prompt.id,
            prompt.messages if chat else prompt.text,
            plan.params,
            prompt.turns[1 : plan.num_turns],
            prompt.tools,
        )
        for prompt in prompts
    ]
    return apply_mix(requests, plan.shares)


def _is_chat(
    chosen: bool | None, models: Models | None, servers: Mapping[str, EndpointBackend]
) -> bool:
    """Decide whether all methods get their prompts in a chat template."""
    if chosen is not None:
        return chosen
    if models is not None:
        return models.has_template
    # A server that does not report it counts as a chat server.
    return all(server.has_chat is not False for server in servers.values())


def _open_journal(
    output: Path | None,
    sweep: Sweep,
    sent: Mapping[str, Turns],
    provenance: Mapping[str, Any],
    settings: Mapping[str, Any],
    identity: Mapping[str, Any],
) -> Journal:
    """Open the journal of the output folder with its earlier measurements."""
    machine = provenance["environment"]
    shared = {name: provenance[name] for name in ("target", "dtype")}
    shared |= {name: value for name, value in settings.items() if name not in _MAY_DIFFER}
    shared |= {f"turns of {name}": one.sent for name, one in sent.items()}
    for name, requests in sweep.sets.items():
        further = [request.later_turns for request in requests if request.later_turns]
        further += [request.tools for request in requests if request.tools]
        prompts = json.dumps([request.prompt for request in requests] + further)
        shared[f"prompts of {name}"] = sha256(prompts.encode()).hexdigest()
    shared |= {"heads_sha256": {}, "engines": {}, **identity}
    shared |= {name: machine[name] for name in ("peagle", "torch", "device", "cpu")}
    log = Journal(output and output / BENCH_LOG, shared, extensible=("heads_sha256", "engines"))
    if len(log):
        note(f"{len(log)} measurements are there already")
    return log


class BenchView:
    """Print the progress of a sweep, and the first failed request, to standard error."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._line = ProgressLine("run")
        self._has_problem = False
        self._is_on_gpu = on_gpu
        self._warmed = 0.0

    def __call__(self, progress: SweepProgress) -> None:
        if progress.problem and not self._has_problem:
            self._has_problem = True
            self._line.print(f"a request failed: {printable(progress.problem)}")
        if progress.figures is None:
            self._line.begin(self._warming(progress))
            return
        text = f"{progress.point}: {progress.figures.output_tokens_per_s:.1f} tokens/s"
        line = f"run {progress.done}/{progress.total}  {text}"
        self._line.update(progress.done, progress.total, text, line=line)

    def _warming(self, progress: SweepProgress) -> str:
        """Say which engine warms up, and how long that took before or may take."""
        now, point = time.monotonic(), progress.point
        number, of = progress.warm_up
        if number > 1:
            known = f"the one before took {time_text(now - self._warmed)}"
        elif point.engine == "vllm":
            known = "vLLM starts for it, which may take minutes"
        elif self._is_on_gpu:
            known = "kernels compile first, which may take minutes"
        else:
            from peagle.evaluation.engine_backend import WARM_UP_TOKENS

            known = f"it writes {WARM_UP_TOKENS} tokens for each request in flight"
        self._warmed = now
        k = f" K={point.k}" if point.k else ""
        engine = f"{point.method}{k} on {point.engine}, concurrency {point.concurrency}"
        return f"warm-up {number} of {of}: {engine}; {known}"

    def close(self) -> None:
        """Remove the progress line."""
        self._line.__exit__()


def bench_text(result: ThroughputResults) -> str:
    """Return the tables of a sweep."""
    from peagle.evaluation.turns import bench_with_turns, name_turns

    sizes = {name_turns(name, result.turns): n for name, n in result.settings["sets"].items()}
    result = bench_with_turns(result)
    cells, names = result.cells, names_of(result.cells)
    blocks: list[str] = []
    for name in dict.fromkeys(cell.set for cell in cells):
        own = [cell for cell in cells if cell.set == name]
        repeats = len(own[0].repeats)
        of = f"medians of {repeats} runs" if repeats > 1 else "one run"
        blocks.append(f"{name}, {sizes[name]} prompts, {of}")
        blocks.append(text_table(_HEADER, [_row(cell, names) for cell in own]))
    if rows := [*by_source(cells)]:
        depth = max(len(shares) for *_, shares in rows)
        header = "method", "K", "c", "set", "drafted by", *map(str, range(1, depth + 1))
        lines = [
            [names[c.method, c.engine], str(c.k or "-"), str(c.concurrency), c.set, source]
            + [short_share(share) for share in shares]
            + [""] * (depth - len(shares))
            for c, source, shares in rows
        ]
        blocks += ["accepted tokens by position and source", text_table(header, lines)]
    pivot = bench_pivot(result)
    if len(pivot.sets) > 1:
        blocks += ["acceptance length and speed-up by set", pivot_table(pivot)]
    if result.price_per_hour or result.requests_per_second:
        blocks.append(_costs(result))
    blocks += _verdicts(result)
    blocks += [f"doubtful (?): {text}" for text in doubts_of(result)]
    blocks.append(f"Advice: {printable(result.advice)}")
    return "\n".join(blocks)


def doubts_of(result: ThroughputResults) -> list[str]:
    """Return a line for each doubt about figures of a sweep."""
    names = names_of(result.cells)
    lines = list(result.doubts)
    for cell in result.cells:
        k = f" K={cell.k}" if cell.k else ""
        where = f"{names[cell.method, cell.engine]}{k} at {cell.concurrency} on {cell.set}"
        lines += [f"{where}: {doubt}" for doubt in cell.doubts]
    return lines


_HEADER = (
    *("method", "K", "c", "tokens/s", "least-most", "x plain", "x eagle3", "AL", "TTFT p50"),
    *("p99", "ITL p50", "p99 ms", "req/s", "linear", "GPU", "experts"),
    "errors",
)


def _row(cell: Cell, names: Mapping[tuple[str, str], str]) -> list[str]:
    median = cell.median
    speed = median.output_tokens_per_s
    least, most = cell.spread.output_tokens_per_s or (speed, speed)
    return [
        names[cell.method, cell.engine],
        str(cell.k or "-"),
        str(cell.concurrency),
        f"{speed:.1f}",
        f"{least:.0f}-{most:.0f}",
        two_digits(cell.speed_up_over_plain) + "?" * bool(cell.doubts),
        two_digits(cell.speed_up_over_eagle3),
        two_digits(median.acceptance_length),
        _ms(median.ttft_s.p50),
        _ms(median.ttft_s.p99),
        _ms(median.itl_s.p50),
        _ms(median.itl_s.p99),
        two_digits(median.requests_per_s),
        two_digits(cell.linearity),
        _share(median.gpu_busy),
        _experts(cell.experts),
        f"{median.errors:g}" if any(one.errors for one in cell.repeats) else "",
    ]


def _costs(result: ThroughputResults) -> str:
    """Return the cost and the instances of each method with its best K, by set and load."""
    from peagle.evaluation.report.series import best_cells_of_all
    from peagle.evaluation.report.text import money, objective

    def amount(value: float | None) -> str:
        return "-" if value is None else money(value)

    price, wanted = result.price_per_hour, result.requests_per_second
    names = names_of(result.cells)
    titles = [f"a million output tokens at {price:g} an hour"] if price else []
    titles += [f"instances for {wanted:g} requests/s"] if wanted else []
    rows = [
        [
            *(names[cell.method, cell.engine], cell.set),
            *(str(cell.k or "-"), str(cell.concurrency)),
            *(amount(cell.cost_per_million_tokens), two_digits(cell.median.requests_per_s)),
            *(str(cell.instances or "-"), amount(result.cost_per_hour(cell))),
            "" if cell.meets_objective is None else objective(cell.meets_objective),
        ]
        for cell in best_cells_of_all(result.cells)
    ]
    header = ("method", "set", "K", "c", "1M tokens", "req/s", "instances", "an hour", "objective")
    return f"{', and '.join(titles)}; each method with its best K\n{text_table(header, rows)}"


def _verdicts(result: ThroughputResults) -> list[str]:
    """Return lines with the best K of each method by load, and the goodput."""
    lines: list[str] = []
    names = names_of(result.cells)
    keys = dict.fromkeys((one.method, one.engine, one.set) for one in result.best_k)
    for *key, name in keys:
        own = [one for one in result.best_k if [one.method, one.engine, one.set] == [*key, name]]
        tried = {one.k for one in result.cells if [one.method, one.engine] == key}
        if len(tried) < 2:
            continue
        best = ", ".join(f"{one.k} at {one.concurrency}{_ties(one)}" for one in own)
        method = names[key[0], key[1]]
        lines.append(f"best K of {method} on {name}, by concurrency: {best}")
    if result.settings["objective"] is not None:
        kept = sorted(result.goodput, key=lambda one: -(one.requests_per_s or 0.0))
        for one in kept:
            k = f" K={one.k}" if one.k else ""
            lines.append(
                f"goodput of {names[one.method, one.engine]}{k} on {one.set}: "
                f"{one.requests_per_s or 0.0:.2f} requests/s at concurrency {one.concurrency}"
            )
        if not kept:
            lines.append("no method keeps the objective at any concurrency")
    return lines


def _ties(best: BestK) -> str:
    """Name the other K whose speed is within the spread of the best one's repeats."""
    others = [str(k) for k in best.tied_k if k != best.k]
    return f" (tied: {', '.join(others)})" if others else ""


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def _experts(touched: TouchedExperts | None) -> str:
    """Return "distinct experts of a layer and step/experts of a layer"; "-" if unknown."""
    return "-" if touched is None else f"{touched.mean:.1f}/{touched.num_experts}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
