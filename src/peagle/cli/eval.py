"""`peagle eval`: measure the acceptance of drafts, or certify that decoding is lossless."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import typer

from peagle.cli import groups, harness, vllm
from peagle.cli.flags import Given, pick_flags, spread, takes
from peagle.cli.harness import Eagle3, Models, Sets
from peagle.cli.progress import ProgressLine
from peagle.cli.settings import read_temperatures, whole_numbers
from peagle.cli.setup import check_paths, name_target, note, thinking_mode
from peagle.cli.tables import pivot_table, short_share
from peagle.cli.terminal import bright, printable
from peagle.cli.vllm import VllmFlags
from peagle.config import MAX_SPECULATIVE_TOKENS, SamplingParams, SpeculativeConfig
from peagle.config.checks import named_values
from peagle.errors import UserError
from peagle.evaluation.certify.options import Options, ServedOptions
from peagle.evaluation.decoding_methods import DecodingMethod
from peagle.evaluation.eval_plan import EvalPlan
from peagle.evaluation.pivot import eval_pivot
from peagle.evaluation.sources import by_source
from peagle.results import (
    ACCEPTANCE,
    CERTIFICATE,
    AcceptanceResults,
    Entry,
    EntryKey,
    ServedCertificate,
    Slice,
    read_document,
)

if TYPE_CHECKING:
    from peagle.backends.vllm.installation import VllmInstallation
    from peagle.backends.vllm.launch import VllmLaunch
    from peagle.evaluation.endpoint import EndpointBackend
    from peagle.evaluation.eval_run import AcceptanceFile, EvalArm
    from peagle.results import Entry

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

A head in vLLM, which is started for it; the words after -- are flags of vLLM's own:
  peagle eval --target ./Qwen3-0.6B --draft ./head -k 3,5 --engine vllm --set humaneval

A certificate that the output is that of the target alone; status 1 if it is not:
  peagle eval --certify

The same of a server, with a second one of the model without drafts:
  peagle eval --certify --endpoint http://one:8000 --reference-endpoint http://two:8000
"""


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """The options of `eval` outside the shared groups, as typed."""

    target_model: groups.Model = None
    flags: VllmFlags = None
    eagle3: Eagle3 = None
    method: groups.MoreHeads = None
    ngram: bool = typer.Option(
        True, help="Measure prompt lookup too, the baseline that needs no head."
    )
    sets: Sets = None
    limit: groups.PromptLimit = None
    shuffle_seed: groups.ShuffleSeed = None
    prompt_column: str = typer.Option(
        "",
        metavar="NAME",
        help="Column with the prompt, in a data set of the hub.",
        show_default=False,
    )
    k: str | None = typer.Option(
        None,
        "-k",
        "--num-speculative-tokens",
        metavar="K,...",
        help="Draft tokens per step; each K is a run of its own.",
        show_default="what every head was trained for, at most 7; a server's own with --endpoint",
    )
    temperature: str = typer.Option("0", metavar="T,...", help="Temperatures; 0 is greedy.")
    concurrency: int = typer.Option(16, help="Number of requests in flight.")
    chat_template: groups.UseTemplate = None
    thinking: groups.Thinking = None
    endpoint: str | None = typer.Option(
        None,
        metavar="[NAME=]URL",
        help="Measure a server in place of an engine here; PEAGLE_API_KEY holds its key.",
    )
    model: str | None = typer.Option(
        None, help="Name of the server's model.", show_default="the first that the server lists"
    )
    certify: bool = typer.Option(False, "--certify", help="Only certify that decoding is lossless.")
    samples: int | None = typer.Option(
        None,
        help="With --certify: outputs of a prompt, in the test of their distribution.",
        show_default="1000",
    )
    reference_endpoint: str | None = typer.Option(
        None,
        metavar="URL",
        help="With --certify --endpoint: a server of the same model without drafts.",
        show_default="our server without drafts; else the server itself, asked again",
    )
    tolerance: float | None = typer.Option(
        None,
        help="With --certify --endpoint: gap of log-probabilities of a near-tie.",
        show_default="0.25, of bfloat16",
    )
    output: groups.Results = None
    output_format: groups.Format = groups.OutputFormat.TEXT


@takes(
    *pick_flags(groups.MODEL, "target", "revision", "speculative.model"),
    *pick_flags(groups.SPECULATION, groups.TREES, groups.PROMPT_LOOKUP),
    *pick_flags(groups.SPECULATION, groups.DRAFT_SAMPLING, groups.DRAFT_WINDOW),
    *pick_flags(groups.SPECULATION, groups.DRAWN_FROM),
    *pick_flags(groups.SAMPLING, "sampling.max_tokens", "sampling.top_k", "sampling.top_p"),
    *pick_flags(groups.SAMPLING, "sampling.seed"),
    *pick_flags(groups.ENGINE, "engine.dtype", "engine.quantization", "engine.fp8_activations"),
    *pick_flags(groups.ENGINE, "engine.kv_cache_dtype"),
    *pick_flags(groups.ENGINE, "engine.device", "engine.max_model_len"),
    *pick_flags(groups.ENGINE, "engine.kv_cache_gib", "engine.gpu_memory_utilization", "threads"),
    *vllm.OPTIONS,
)
@spread
def eval(given: Given, options: EvalOptions) -> None:
    """Measure how well the drafts of a head are accepted, or certify that decoding is lossless.

    The result has acceptance length and acceptance by position, with 95% intervals over requests.
    The report also has them by set, category, context length and output position.
    """
    plan = _plan(given, options)
    if plan.certificate is not None:
        if isinstance(plan.certificate, ServedOptions):
            passed = _certify_server(plan, plan.certificate)
        else:
            passed = _certify(given, plan, plan.certificate)
        if not passed:
            raise typer.Exit(1)
        return
    file, text = _run(given, plan)
    harness.conclude(file.results, text, ACCEPTANCE, options.output, options.output_format)


# ---- the plan ----


@dataclass(frozen=True, slots=True)
class AcceptancePlan:
    """The measurements of `eval`, decided before a model is loaded.

    Attributes:
        flags: flags of vLLM.
        ks: K to measure; () takes the heads' trained K, or a server's own.
        heads: the methods here; () with a server.
        certificate: options of a certificate; None measures acceptance.
        requests: the requests of every method; their chat template is decided later.
    """

    options: EvalOptions
    flags: list[str]
    is_on_vllm: bool
    ks: tuple[int, ...]
    heads: list[DecodingMethod]
    certificate: Options | ServedOptions | None
    requests: EvalPlan

    @property
    def extra_body(self) -> dict[str, Any]:
        """Return the further fields of every request to a server."""
        # Without top_p the server would sample with its own, not with the given one.
        requests = self.requests
        return harness.template_fields(requests.thinking, {"top_p": requests.params.top_p})


def _plan(given: Given, options: EvalOptions) -> AcceptancePlan:
    """Check the options, and read the prompts that they name."""
    target_model, flags = vllm.model_and_flags(options.target_model, options.flags)
    name_target(given, target_model)
    is_on_vllm = vllm.is_vllm(given, flags)
    _refuse_contradictions(given, options, is_on_vllm)
    thinking = thinking_mode(options.thinking, options.chat_template)
    endpoint, eagle3, methods = options.endpoint, options.eagle3, options.method or []
    if endpoint is None:
        check_paths(given.value("target"), given.value("speculative.model"), eagle3, methods)
    temperatures = read_temperatures(options.temperature)
    draft_sampling, window, drawn_from = (
        given.value(groups.DRAFT_SAMPLING, "argmax"),
        given.value(groups.DRAFT_WINDOW),
        given.value(groups.DRAWN_FROM),
    )
    # Any head will do: only the trees, the draft sampling and the window are checked.
    head = {"model": "head", "parallel_drafting_spec": harness.given_shape(given)}
    head |= {"draft_sampling": draft_sampling, "draft_window": window}
    SpeculativeConfig.parse({**head, "drawn_chains_from": drawn_from})
    certificate = None
    if options.certify:
        choose = _certificate_options if endpoint is None else _served_options
        certificate = choose(given, options, temperatures)
    ks = () if options.k is None else whole_numbers("-k", options.k, MAX_SPECULATIVE_TOKENS)
    params, concurrency = harness.sampling_params(given), options.concurrency
    if concurrency < 1:
        raise UserError(f"--concurrency is {concurrency}; expected at least 1 request in flight.")
    if is_on_vllm:
        vllm.refuse_unmeasured(given, methods)
    heads = []
    if endpoint is None:
        ngram = options.ngram and not is_on_vllm
        heads = harness.named_methods(given, eagle3, methods, ngram=ngram)
    prompts = {}
    if certificate is not None:
        harness.load_prompts([certificate.prompt_set], certificate.prompts)
    else:
        chosen = options.sets, options.limit, options.shuffle_seed, options.prompt_column
        prompts = harness.load_prompts(*chosen)
    requests = EvalPlan(
        prompts,
        temperatures,
        params,
        draft_sampling,
        concurrency,
        False,
        thinking,
        window,
        drawn_from,
    )
    if certificate is not None:
        harness.check_output(options.output)
    else:
        open_yet = {"target_sha256"} | ({"chat_template"} - {options.chat_template is False})
        harness.check_output(
            options.output,
            ACCEPTANCE,
            lambda path: read_document(path, AcceptanceResults).settings,
            {name: of for name, of in requests.settings("").items() if name not in open_yet},
        )
    if endpoint is not None:
        _refuse_models(given, eagle3, methods)
    return AcceptancePlan(options, flags, is_on_vllm, ks, heads, certificate, requests)


def _refuse_contradictions(given: Given, options: EvalOptions, is_on_vllm: bool) -> None:
    """Refuse options that exclude each other."""
    endpoint, model, samples = options.endpoint, options.model, options.samples
    if is_on_vllm and endpoint is not None:
        raise UserError(
            "--engine vllm and --endpoint contradict each other; leave one of them out."
        )
    if options.certify and is_on_vllm:
        raise UserError(
            "--certify looks at engines here; leave --engine vllm out. Of a vLLM that runs, name "
            "the --endpoint."
        )
    for name in ("reference_endpoint", "tolerance"):
        value = getattr(options, name)
        if value is not None and not (options.certify and endpoint is not None):
            raise UserError(
                f"--{name.replace('_', '-')} is {value} without --certify --endpoint; leave it out."
            )
    if options.certify and given.value("engine.kv_cache_dtype", "auto") != "auto":
        raise UserError(
            "--certify compares with transformers, which does not round keys and values; leave "
            "--kv-cache-dtype out."
        )
    if options.certify and given.value("engine.fp8_activations", "off") != "off":
        raise UserError(
            "--certify compares with transformers over weights alone, whose activations are not "
            "rounded; leave --fp8-activations out."
        )
    if options.certify and groups.DRAFT_WINDOW in given:
        raise UserError(
            f"--draft-window is {given.value(groups.DRAFT_WINDOW)}; --certify looks at outputs, "
            "which no window changes; leave it out."
        )
    if options.certify and groups.DRAWN_FROM in given:
        raise UserError(
            f"--drawn-chains-from is {given.value(groups.DRAWN_FROM)}; --certify tests trees "
            "behind drawn chains and trees without them, at one temperature; leave it out."
        )
    if groups.TREES in given and is_on_vllm:
        source = given[groups.TREES].source
        raise UserError(f"{source} and --engine vllm: chains alone. Leave one of them out.")
    if samples is not None and not options.certify:
        raise UserError(f"--samples is {samples} without --certify; leave it out.")
    if model and endpoint is None:
        raise UserError(
            f"--model is {model!r} without --endpoint; name a model here with --target {model}, or "
            f"as the first word: peagle eval {model}."
        )


def _refuse_models(given: Given, eagle3: str | None, methods: Sequence[str]) -> None:
    named = [given[key].source for key in given if not key.startswith("sampling.")]
    named += ["--eagle3"] * (eagle3 is not None) + ["--method"] * bool(methods)
    if named:
        raise UserError(
            f"{named[0]} and --endpoint contradict each other: the server has its models and its "
            "engine already. Leave one of the two out."
        )


def _certificate_options(
    given: Given, asked: EvalOptions, temperatures: Sequence[float]
) -> Options:
    """Return the options of the certificate."""
    above = [one for one in temperatures if one]
    if len(above) > 1:
        raise UserError(f"--temperature is {above}; a certificate tests one above 0.")
    sampling = given.value(groups.DRAFT_SAMPLING)
    options = {
        "prompts": asked.limit,
        "prompt_set": _one_set(asked),
        "temperature": above[0] if above else None,
        "samples": asked.samples,
        "draft_samplings": None if sampling is None else (sampling,),
        "max_new_tokens": given.value("sampling.max_tokens"),
        **{name: given.value(f"sampling.{name}") for name in ("top_k", "top_p", "seed")},
    }
    return Options(**{name: value for name, value in options.items() if value is not None})


def _one_set(asked: EvalOptions) -> str | None:
    names = [name for one in asked.sets or () for name in one.split(",")]
    if len(names) > 1:
        raise UserError(f"--set names {len(names)} sets; a certificate takes its prompts from one.")
    return names[0] if names else None


def _served_options(
    given: Given, asked: EvalOptions, temperatures: Sequence[float]
) -> ServedOptions:
    """Return the options of the certificate of a server."""
    changed = {name: given.value(f"sampling.{name}") for name in ("top_k", "top_p")}
    changed["temperature"] = next((one for one in temperatures if one not in (0, 1)), None)
    for name, value in changed.items():
        if value is not None:
            raise UserError(
                f"--{name.replace('_', '-')} is {value}; a server's log-probabilities are those of "
                "its whole distribution at temperature 1. Leave it out."
            )
    options = {
        "prompts": asked.limit,
        "prompt_set": _one_set(asked),
        "samples": asked.samples,
        "concurrency": asked.concurrency,
        "tolerance": asked.tolerance,
        "max_new_tokens": given.value("sampling.max_tokens"),
        "seed": given.value("sampling.seed"),
    }
    return ServedOptions(**{name: value for name, value in options.items() if value is not None})


# ---- the run ----


def _run(given: Given, plan: AcceptancePlan) -> tuple[AcceptanceFile, str]:
    """Measure every entry; return the file with all entries, and the text still to print."""
    endpoint = plan.options.endpoint
    subject = _on_engines(given, plan) if endpoint is None else _on_server(plan, endpoint)
    arms, chat, provenance, target_sha256 = subject
    from peagle.evaluation.eval_run import AcceptanceFile
    from peagle.evaluation.turns import sent_turns

    prompts = plan.requests.sets
    if not chat:
        harness.note_plain_prompts(prompts)
    requests = replace(plan.requests, chat=chat)
    settings = requests.settings(target_sha256)
    file = AcceptanceFile(plan.options.output, provenance, settings, sent_turns(prompts))
    return file, _measure(arms, requests, file, plan.options)


# Arms, whether prompts go through the chat template, provenance, the target's hash or "".
Subject = tuple["list[EvalArm]", bool, dict[str, Any], str]


def _on_engines(given: Given, plan: AcceptancePlan) -> Subject:
    """Load the models, for engines here or for vLLM, and make their arms."""
    installation = vllm.find(given) if plan.is_on_vllm else None
    models = _load(given, plan)
    requests, chat = plan.requests, plan.options.chat_template
    chat = models.has_template if chat is None else chat
    if requests.thinking and not chat:
        raise UserError(f"{models.name} has no chat template, so there is no thinking mode to set.")
    if installation is None:
        arms, dtype, device = _engine_arms(plan, models), models.dtype, models.target.device
    else:
        arms, dtype = _vllm_arms(given, plan, models, installation)
        device = vllm.device_of(installation)
    return arms, chat, harness.provenance(models.name, dtype, device), models.target_sha256


def _load(given: Given, plan: AcceptancePlan) -> Models:
    found = harness.find_models(given, plan.heads, plan.ks)
    return harness.load_models(given, plan.heads, found, plan.ks, whole=not plan.is_on_vllm)


def _engine_arms(plan: AcceptancePlan, models: Models) -> list[EvalArm]:
    """Make arms of our own engine, which run one at a time."""
    from peagle.evaluation.engine_backend import open_engine
    from peagle.evaluation.eval_run import EvalArm

    requests, ks = plan.requests, plan.ks or (models.default_k,)
    drafting = {
        name: getattr(requests, name)
        for name in ("draft_sampling", "draft_window", "drawn_chains_from")
    }
    # The seed of requests that go without their own, see `EngineBackend.run`.
    options = {"max_num_seqs": requests.concurrency, "seed": requests.params.seed}
    options |= models.engine_options

    def opened(one: DecodingMethod, k: int) -> AbstractContextManager[Any]:
        config = one.config(k, **drafting if one.folder else {})
        return open_engine(models.target, config, thinking=requests.thinking, **options)

    return [
        EvalArm(one, k, partial(opened, one, k)) for one in models.methods for k in one.depths(ks)
    ]


def _vllm_arms(
    given: Given, plan: AcceptancePlan, models: Models, installation: VllmInstallation
) -> tuple[list[EvalArm], str]:
    """Make arms that start vLLM for each head and K; return them with vLLM's data type."""
    from peagle.evaluation.eval_run import EvalArm
    from peagle.evaluation.vllm_server import ENGINE, vllm_backend

    note_once, concurrency = cache(note), plan.requests.concurrency

    def opened(one: DecodingMethod, k: int) -> AbstractContextManager[Any]:
        return vllm_backend(
            launch(one, k), installation, say=vllm.say, note=note_once, extra_body=plan.extra_body
        )

    def launch(one: DecodingMethod, k: int) -> VllmLaunch:
        asked = given, plan.flags, models.folder, one.folder, k
        return vllm.launch_for(*asked, max_num_seqs=concurrency)

    dtype = launch(models.methods[0], models.default_k).dtype_on(installation)
    arms = [
        EvalArm(one, k, partial(opened, one, k), ENGINE)
        for one in models.methods
        for k in plan.ks or (models.default_k,)
    ]
    return arms, models.dtype if dtype == "auto" else dtype


def _on_server(plan: AcceptancePlan, endpoint: str) -> Subject:
    """Connect to the server, find out whether it converses, and make its arms."""
    from peagle.evaluation.endpoint import EndpointBackend

    name, url = _named_url(endpoint)
    server = EndpointBackend(url, plan.options.model, extra_body=plan.extra_body)
    chat = _converses(server, plan.options.chat_template, plan.requests.thinking)
    arms = _server_arms(server, name or "endpoint", plan.ks)
    return arms, chat, {**harness.provenance(server.model, ""), "endpoint": url}, ""


def _named_url(endpoint: str) -> tuple[str | None, str]:
    if "=" not in endpoint.partition("://")[0]:
        return None, endpoint
    example = "vllm=http://127.0.0.1:8000"
    ((name, url),) = named_values([endpoint], "[NAME=]URL", example, "--endpoint: ").items()
    return name, url


def _server_arms(server: EndpointBackend, name: str, ks: Sequence[int]) -> list[EvalArm]:
    """Make an arm of a server at each K, or at its own K."""
    from peagle.evaluation.eval_run import EvalArm

    _refuse_foreign_k(server, ks)
    method = DecodingMethod(name, server.model)
    return [
        EvalArm(
            method,
            server.num_speculative_tokens() or 0 if k is None else k,
            lambda: nullcontext(server),
            server.name,
            k,
        )
        for k in ks or (None,)
    ]


def _refuse_foreign_k(server: EndpointBackend, ks: Sequence[int]) -> None:
    if ks and not server.is_ours:
        raise UserError(
            f"-k is {ks[0]}, but {server.name} decides on its own K; leave -k out, and serve "
            "it with that K instead."
        )


def _converses(server: EndpointBackend, chat_template: bool | None, thinking: bool | None) -> bool:
    """Decide whether the server gets messages: by the option, else by its answer to one."""
    from peagle.evaluation.decoding import Request

    if chat_template is not None:
        return chat_template
    chat = server.has_chat
    if chat is None:
        probe = Request("probe", [{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=1))
        try:
            server.run([probe], 1)
            chat = True
        except UserError:
            chat = False
    if not chat and thinking is not None:
        raise UserError(f"{server.model} at {server.name} does not converse: no thinking mode.")
    return chat


def _measure(
    arms: Sequence[EvalArm], requests: EvalPlan, file: AcceptanceFile, options: EvalOptions
) -> str:
    """Measure every entry, show each as it comes, and return the pivot and the advice."""
    from peagle.evaluation.comparisons import compare_entries
    from peagle.evaluation.eval_run import evaluate
    from peagle.evaluation.report.advice import acceptance_advice
    from peagle.evaluation.turns import entry_with_turns, eval_with_turns

    dtype = file.results.provenance.dtype

    def show(entry: Entry) -> None:
        if options.output_format is groups.OutputFormat.TEXT:
            shown = entry_with_turns(entry, file.results.turns)
            print(entry_text(shown, dtype, chat=requests.chat) + "\n", flush=True)

    view = EvalView(show)
    with harness.resumable(view.close, options.output, file.entries):
        evaluate(arms, requests, file, view)
    comparisons = compare_entries(file.entries, seed=requests.params.seed or 0)
    advice = acceptance_advice(file.entries, comparisons)
    file.conclude(comparisons, advice)
    pivot = eval_pivot(eval_with_turns(file.results))
    several = len(pivot.sets) > 1
    table = f"acceptance length by set\n{pivot_table(pivot)}\n\n" if several else ""
    return f"{table}Advice: {printable(advice)}"


def _certify(given: Given, plan: AcceptancePlan, certificate: Options) -> bool:
    """Print the certificate of losslessness, and return whether it passed."""
    models = _load(given, plan)
    from peagle.evaluation.certify.run import certificate_text, run_certificate
    from peagle.evaluation.journal import make_folder
    from peagle.models.checkpoint.files import write_json

    output = plan.options.output
    if output is not None:
        make_folder(output)
    found = run_certificate(
        models.target,
        models.folder,
        models.methods,
        max(plan.ks or (models.default_k,)),
        certificate,
        harness.provenance(models.name, models.dtype, models.target.device),
        lambda line: print(f"peagle: {printable(line)}", file=sys.stderr, flush=True),
    )
    if output is not None:
        write_json(output / CERTIFICATE, found.to_json())
    as_json = plan.options.output_format is groups.OutputFormat.JSON
    print(json.dumps(found.to_json(), indent=2) if as_json else certificate_text(found))
    return found.passed


def _certify_server(plan: AcceptancePlan, certificate: ServedOptions) -> bool:
    """Print the certificate of a server, and return whether it passed."""
    from peagle.evaluation.certify.served import (
        ServedSubject,
        certify_server,
        long_prompts,
        served_text,
    )
    from peagle.evaluation.certify.server import ScoringServer
    from peagle.evaluation.endpoint import EndpointBackend
    from peagle.evaluation.journal import make_folder
    from peagle.models.checkpoint.files import write_json

    options, output = plan.options, plan.options.output
    template = harness.template_fields(plan.requests.thinking, {})
    backend = EndpointBackend(_named_url(options.endpoint or "")[1], options.model)
    _refuse_foreign_k(backend, plan.ks)
    server = ScoringServer(backend, template)
    reference = server
    if (url := options.reference_endpoint) is not None:
        second = EndpointBackend(url, backend.model, or_first=True, option="--reference-endpoint")
        reference = ScoringServer(second, template)
    if output is not None:
        make_folder(output)

    def save(found: ServedCertificate) -> None:
        if output is not None:
            write_json(output / CERTIFICATE, found.to_json())

    subject = ServedSubject(
        server,
        reference,
        0 if reference.backend.is_ours else None,
        certificate,
        max(plan.ks, default=None),
        lambda line: print(f"peagle: {printable(line)}", file=sys.stderr, flush=True),
        save,
    )
    chosen = harness.load_prompts([certificate.prompt_set], certificate.prompts)
    prompts = chosen[certificate.prompt_set]
    texts = [one.text for one in prompts]
    ids, longer = [one.id for one in prompts], long_prompts(texts, certificate.long_characters)
    kinds = {"short": [*zip(ids, texts)], "long": [*zip(ids, longer)]}
    about = {**harness.provenance(backend.model, ""), "endpoint": backend.name}
    found = certify_server(subject, kinds, about)
    if found.error:
        where = "" if output is None else f" What was found is in {str(output / CERTIFICATE)!r}."
        faults = f" {len(found.faults)} faults were found before." if found.faults else ""
        raise UserError(f"{found.error}{faults}{where}")
    as_json = options.output_format is groups.OutputFormat.JSON
    print(json.dumps(found.to_json(), indent=2) if as_json else printable(served_text(found)))
    return found.passed


# ---- the results ----

_MAX_COLUMNS = 12
_LABEL = 18


class EvalView:
    """Print progress to standard error, and pass finished entries to `show`."""

    def __init__(self, show: Callable[[Entry], None]) -> None:
        self._show = show
        self._line = ProgressLine("request")
        self._done = self._total = 0

    def begin(self, key: EntryKey, num_requests: int) -> None:
        """Show which entry begins."""
        self._line = ProgressLine("request")
        self._line.begin(f"{printable(str(key))}: {num_requests} requests")
        self._done, self._total = 0, num_requests

    def advance(self) -> None:
        """Count a finished request."""
        self._done += 1
        self._line.update(self._done, self._total, "")

    def close(self) -> None:
        """Remove the progress line."""
        self._line.__exit__()

    def end(self, entry: Entry, *, was_there: bool) -> None:
        """Remove the progress line and pass the entry on."""
        self.close()
        if was_there:
            name = printable(f"{entry.method}, K={entry.k}, temperature {entry.temperature:g}")
            print(f"peagle: {name}: measured before", file=sys.stderr)
        self._show(entry)


def entry_text(entry: Entry, dtype: str, *, chat: bool) -> str:
    """Return an entry as a table: figures of all prompts, and a line for every set and category."""
    pooled = entry.pooled
    k = entry.k or "unknown"
    title = f"{entry.method}  K={k}  temperature {entry.temperature:g}"
    drafts = f"{entry.draft_sampling} drafts"
    if entry.parallel_drafting_spec and entry.draft_sampling == "probabilistic":
        drafts = "argmax trees behind drawn chains"
    title += f", {drafts}" if entry.temperature else ""
    prompts = "chat template" if chat else "plain prompts"
    server = "" if entry.engine == "peagle" else entry.engine
    where = "  ".join(filter(None, (dtype, prompts, entry.source, server)))
    lines = [bright(printable(title), sys.stdout) + printable(f"  {where}")]
    lines.append("  " + _summary(pooled))
    if pooled.acceptance_length is None:
        lines.append(f"  {entry.output_tokens_per_s:.1f} output tokens/s")
    lines += _positions(entry)
    lines += _group_lines(entry.by_set, entry.by_category)
    lines += [printable(f"  note: {text}") for text in entry.notes]
    return "\n".join(lines)


def _summary(one: Slice) -> str:
    parts = [f"acceptance length {_length(one)}"]
    length, per_step = one.acceptance_length, one.tokens_per_step
    if length is not None and per_step is not None and abs(per_step - length) >= 0.005:
        parts.append(f"{per_step:.2f} tokens per step, those without a draft too")
    if one.loop_share:
        before = one.acceptance_length_before_loop
        shown = "" if before is None else f" (before that {before:.2f})"
        parts.append(f"{one.loop_share:.0%} of the outputs fall into a loop{shown}")
    parts.append(f"{one.num_requests} requests, {one.num_tokens:,} tokens")
    return "; ".join(parts)


def _length(one: Slice) -> str:
    if one.acceptance_length is None:
        return "unknown"
    if not one.num_drafts:
        return "1.00 (nothing was drafted)"
    interval = one.acceptance_length_ci
    shown = "" if interval is None else " [{:.2f}, {:.2f}]".format(*interval)
    return f"{one.acceptance_length:.2f}{shown}"


def _positions(entry: Entry) -> list[str]:
    pooled = entry.pooled
    depth = min(len(pooled.unconditional), _MAX_COLUMNS)
    if not depth:
        return []
    lines = [f"  {'position':<{_LABEL}}" + "".join(f"{i + 1:>6}" for i in range(depth))]
    for name, shares, intervals in (
        ("unconditional", pooled.unconditional, pooled.unconditional_ci),
        ("conditional", pooled.conditional, pooled.conditional_ci),
    ):
        lines.append(_row(name, shares[:depth]))
        if intervals is not None:
            for side, label in enumerate(("  95% from", "  95% to")):
                ends = [None if one is None else one[side] for one in intervals[:depth]]
                lines.append(_row(label, ends))
    for _, source, shares in by_source([entry]):
        lines.append(_row(f"by the {source}", shares[:depth]))
    return lines


def _row(label: str, values: Sequence[float | None]) -> str:
    return f"  {label:<{_LABEL}}" + "".join(f"{short_share(value):>6}" for value in values)


def _group_lines(by_set: Mapping[str, Slice], by_category: Mapping[str, Slice]) -> list[str]:
    """Return a line for each of several sets, and for each of several categories of a set."""
    lines: list[str] = []
    for name, whole in by_set.items():
        own = [other for other in by_category if other.startswith(f"{name}/")]
        if len(by_set) > 1 or len(own) > 1:
            lines.append(_group_line(name, whole))
        if len(own) > 1:
            lines += [_group_line(other, by_category[other]) for other in sorted(own)]
    return lines


def _group_line(name: str, one: Slice) -> str:
    return f"  {printable(name):<32} {_length(one):<20} {one.num_requests:>6} requests"
