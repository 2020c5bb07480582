"""`peagle eval`: how well drafts are accepted, and whether decoding is lossless."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from peagle.cli import groups, harness, vllm
from peagle.cli.flags import Given, pick, takes
from peagle.cli.groups import (
    Format,
    MoreHeads,
    OutputFormat,
    PromptLimit,
    Results,
    ShuffleSeed,
    Thinking,
    UseTemplate,
)
from peagle.cli.harness import Eagle3, Models, Sets
from peagle.cli.progress import ProgressLine
from peagle.cli.settings import whole_numbers
from peagle.cli.setup import check_paths, name_target, note, thinking_mode
from peagle.cli.tables import pivot_table
from peagle.cli.terminal import bright, printable
from peagle.cli.vllm import VllmFlags
from peagle.config import MAX_SPECULATIVE_TOKENS, SamplingParams, SpeculativeConfig
from peagle.errors import UserError
from peagle.evaluation.certify.options import Options
from peagle.evaluation.decoding_methods import NGRAM, DecodingMethod
from peagle.evaluation.eval_plan import EvalPlan
from peagle.evaluation.pivot import eval_pivot
from peagle.results import (
    ACCEPTANCE,
    AcceptanceResults,
    Entry,
    EntryKey,
    Slice,
    read_document,
)

if TYPE_CHECKING:
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
"""

_DRAFT_SAMPLING = "speculative.draft_sampling"
_WINDOW = "speculative.draft_window"
_TREES = "speculative.parallel_drafting_spec"
_NAMED_URL = re.compile(r"(?:(?P<name>[\w.+-]+)=)?(?P<url>.+)")


@takes(
    *pick(groups.MODEL, "target", "revision", "speculative.model"),
    *pick(groups.SPECULATION, _TREES, _DRAFT_SAMPLING, _WINDOW),
    *pick(groups.SAMPLING, "sampling.max_tokens", "sampling.top_k", "sampling.top_p"),
    *pick(groups.SAMPLING, "sampling.seed"),
    *pick(groups.ENGINE, "engine.dtype", "engine.quantization", "engine.kv_cache_dtype"),
    *pick(groups.ENGINE, "engine.device", "engine.max_model_len"),
    *pick(groups.ENGINE, "engine.kv_cache_gib", "engine.gpu_memory_utilization", "threads"),
    *vllm.OPTIONS,
)
def eval(
    given: Given,
    target_model: groups.Model = None,
    flags: VllmFlags = None,
    eagle3: Eagle3 = None,
    method: MoreHeads = None,
    ngram: bool = typer.Option(
        True, help="Measure prompt lookup too, the baseline that needs no head."
    ),
    sets: Sets = None,
    limit: PromptLimit = None,
    shuffle_seed: ShuffleSeed = None,
    prompt_column: str = typer.Option(
        "",
        metavar="NAME",
        help="Column with the prompt, in a data set of the hub.",
        show_default=False,
    ),
    k: str | None = typer.Option(
        None,
        "-k",
        "--num-speculative-tokens",
        metavar="K,...",
        help="Draft tokens per step; each K is a run of its own.",
        show_default="what every head was trained for, at most 7; a server's own with --endpoint",
    ),
    temperature: str = typer.Option("0", metavar="T,...", help="Temperatures; 0 is greedy."),
    concurrency: int = typer.Option(16, help="Number of requests in flight."),
    chat_template: UseTemplate = None,
    thinking: Thinking = None,
    endpoint: str | None = typer.Option(
        None,
        metavar="[NAME=]URL",
        help="Measure a server in place of an engine here; PEAGLE_API_KEY holds its key.",
    ),
    model: str | None = typer.Option(
        None, help="Name of the server's model.", show_default="the first that the server lists"
    ),
    certify: bool = typer.Option(
        False, "--certify", help="Only certify that decoding is lossless."
    ),
    samples: int | None = typer.Option(
        None,
        help="With --certify: outputs of a prompt, in the test of their distribution.",
        show_default="1000",
    ),
    output: Results = None,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Measure how well the drafts of a head are accepted, or certify that decoding is lossless.

    Acceptance length and acceptance by position, with 95% intervals over requests.
    In the report also by set, category, context length and output position.
    """
    target_model, flags = vllm.model_and_flags(target_model, flags)
    name_target(given, target_model)
    on_vllm = vllm.is_vllm(given, flags)
    if on_vllm and endpoint:
        raise UserError(
            "--engine vllm and --endpoint contradict each other; leave one of them out."
        )
    if certify and (endpoint or on_vllm):
        other = "--endpoint" if endpoint else "--engine vllm"
        raise UserError(f"--certify looks at engines here; leave {other} out.")
    if certify and given.value("engine.kv_cache_dtype", "auto") != "auto":
        raise UserError(
            "--certify compares with transformers, which does not round keys and values; leave "
            "--kv-cache-dtype out."
        )
    if certify and _WINDOW in given:
        raise UserError(
            f"--draft-window is {given.value(_WINDOW)}; --certify looks at outputs, which "
            "no window changes; leave it out."
        )
    if _TREES in given and on_vllm:
        source = given[_TREES].source
        raise UserError(f"{source} and --engine vllm: chains alone. Leave one of them out.")
    if samples is not None and not certify:
        raise UserError(f"--samples is {samples} without --certify; leave it out.")
    if model and not endpoint:
        raise UserError(
            f"--model is {model!r} without --endpoint; name a model here with --target {model}, or "
            f"as the first word: peagle eval {model}."
        )
    thinking = thinking_mode(thinking, chat_template)
    if not endpoint:
        check_paths(given.value("target"), given.value("speculative.model"), eagle3, method)
    temperatures = _temperatures(temperature)
    draft_sampling, window = given.value(_DRAFT_SAMPLING, "argmax"), given.value(_WINDOW)
    drafting = {"draft_sampling": draft_sampling, "draft_window": window}
    # Any head will do: only trees and how it drafts are checked.
    head = {"model": "head", "parallel_drafting_spec": given.value(_TREES)}
    SpeculativeConfig.parse({**head, **drafting})
    certificate = (
        _certificate_options(given, sets, limit, temperatures, samples) if certify else None
    )
    ks = () if k is None else whole_numbers("-k", k, MAX_SPECULATIVE_TOKENS)
    params = harness.sampling_params(given)
    if concurrency < 1:
        raise UserError(f"--concurrency is {concurrency}; expected at least 1 request in flight.")
    if on_vllm and draft_sampling != "argmax":
        raise UserError(
            f"--draft-sampling is {draft_sampling!r}; with --engine vllm drafts are "
            "measured as argmax. Leave it out."
        )
    if on_vllm and NGRAM in (method or ()):
        raise UserError("--method is 'ngram'; vLLM is measured with heads only. Leave it out.")
    if not endpoint:
        heads = harness.named_methods(given, eagle3, method or [], ngram=ngram and not on_vllm)
    if certificate is not None:
        harness.load_prompts([certificate.prompt_set], certificate.prompts)
        prompts = {}
    else:
        prompts = harness.load_prompts(sets, limit, shuffle_seed, prompt_column)
    plan = EvalPlan(
        prompts, temperatures, params, draft_sampling, concurrency, False, thinking, window
    )
    if certify:
        harness.check_output(output)
    else:
        harness.check_output(
            output,
            ACCEPTANCE,
            lambda path: read_document(path, AcceptanceResults).settings,
            {
                name: value
                for name, value in plan.settings("").items()
                if name != "target_sha256" and (name != "chat_template" or chat_template is False)
            },
        )
    # Left out, top_p would be the server's own, and the figures not those of the given options.
    extra = harness.template_fields(thinking, {"top_p": params.top_p})
    if endpoint:
        _refuse_models(given, eagle3, method)
        match = _NAMED_URL.fullmatch(endpoint)
        name, url = (match["name"], match["url"]) if match else (None, endpoint)
        from peagle.evaluation.endpoint import EndpointBackend

        server = EndpointBackend(url, model, extra_body=extra)
        chat = _converses(server, chat_template, thinking)
        arms = _server_arms(server, name or "endpoint", ks)
        provenance = {**harness.provenance(server.model, ""), "endpoint": url}
        target_sha256 = ""
    else:
        arms = []
        installation = vllm.find(given) if on_vllm else None
        found = harness.find_models(given, heads)
        models = harness.load_models(given, heads, found, whole=not on_vllm)
        ks = ks or (models.default_k,)
        if certificate is not None:
            if not _certify(models, max(ks), certificate, output, output_format):
                raise typer.Exit(1)
            return
        chat = models.has_template if chat_template is None else chat_template
        if thinking and not chat:
            raise UserError(
                f"{models.name} has no chat template, so there is no thinking mode to set."
            )
        if installation is not None:
            arms, dtype = _vllm_arms(given, flags, models, ks, installation, extra, concurrency)
        else:
            arms, dtype = _engine_arms(models, ks, drafting, concurrency, thinking)
        device = vllm.device_of(installation) if installation else models.target.device
        provenance = harness.provenance(models.name, dtype, device)
        target_sha256 = models.target_sha256
    from peagle.evaluation.eval_run import AcceptanceFile
    from peagle.evaluation.turns import sent_turns

    if not chat:
        harness.note_plain_prompts(prompts)
    plan = replace(plan, chat=chat)
    file = AcceptanceFile(output, provenance, plan.settings(target_sha256), sent_turns(prompts))
    text = _measure(arms, plan, file, output, output_format)
    harness.conclude(file.results, text, ACCEPTANCE, output, output_format)


# ---- options --------------------------------------------------------------------------------


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        temperatures = tuple(dict.fromkeys(float(one) for one in text.split(",")))
    except ValueError:
        raise UserError(f"--temperature is {text!r}; expected numbers like 0,0.7.") from None
    for one in temperatures:
        SamplingParams(temperature=one)
    return temperatures


def _refuse_models(given: Given, eagle3: str | None, method: list[str] | None) -> None:
    named = [given[key].source for key in given if not key.startswith("sampling.")]
    named += ["--eagle3"] * (eagle3 is not None) + ["--method"] * bool(method)
    if named:
        raise UserError(
            f"{named[0]} and --endpoint contradict each other: the server has its models and its "
            "engine already. Leave one of the two out."
        )


def _certificate_options(
    given: Given,
    sets: list[str] | None,
    limit: int | None,
    temperatures: Sequence[float],
    samples: int | None,
) -> Options:
    """Return the options of the certificate."""
    names = [name for one in sets or () for name in one.split(",")]
    if len(names) > 1:
        raise UserError(f"--set names {len(names)} sets; a certificate takes its prompts from one.")
    above = [one for one in temperatures if one]
    if len(above) > 1:
        raise UserError(f"--temperature is {above}; a certificate tests one above 0.")
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
    return Options(**{name: value for name, value in options.items() if value is not None})


# ---- backends -------------------------------------------------------------------------------


def _engine_arms(
    models: Models,
    ks: Sequence[int],
    drafting: dict[str, Any],
    concurrency: int,
    thinking: bool | None,
) -> tuple[list[EvalArm], str]:
    """Make arms of our own engine, which run one at a time; return the data type too."""
    from peagle.evaluation.engine_backend import open_engine
    from peagle.evaluation.eval_run import EvalArm

    options = {"max_num_seqs": concurrency, **models.engine_options}

    def opened(one: DecodingMethod, k: int) -> AbstractContextManager[Any]:
        config = one.config(k, **drafting if one.folder else {})
        return open_engine(models.target, config, thinking=thinking, **options)

    arms = [
        EvalArm(one, k, partial(opened, one, k)) for one in models.methods for k in one.depths(ks)
    ]
    return arms, models.dtype


def _vllm_arms(
    given: Given,
    flags: list[str],
    models: Models,
    ks: Sequence[int],
    installation: Any,
    extra: Mapping[str, Any],
    concurrency: int,
) -> tuple[list[EvalArm], str]:
    """Make arms that start vLLM for each head and K; return the data type that vLLM takes too."""
    from peagle.evaluation.eval_run import EvalArm
    from peagle.evaluation.vllm_server import ENGINE, vllm_backend

    note_once = cache(note)

    def opened(one: DecodingMethod, k: int) -> AbstractContextManager[Any]:
        return vllm_backend(
            launch(one, k), installation, say=vllm.say, note=note_once, extra_body=extra
        )

    def launch(one: DecodingMethod, k: int) -> Any:
        return vllm.launch_for(given, flags, models.folder, one.folder, k, max_num_seqs=concurrency)

    dtype = launch(models.methods[0], models.default_k).dtype_on(installation)
    arms = [EvalArm(one, k, partial(opened, one, k), ENGINE) for one in models.methods for k in ks]
    return arms, models.dtype if dtype == "auto" else dtype


def _server_arms(server: EndpointBackend, name: str, ks: Sequence[int]) -> list[EvalArm]:
    """Make an arm of a server at each K, or at its own K."""
    from peagle.evaluation.eval_run import EvalArm

    if ks and not server.is_ours:
        raise UserError(
            f"-k is {ks[0]}, but {server.name} decides on its own K; leave -k out, and serve "
            "it with that K instead."
        )
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


def _converses(server: EndpointBackend, chat_template: bool | None, thinking: bool | None) -> bool:
    """Decide whether the server gets messages: by the option, else by whether it answers one."""
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


# ---- measuring ------------------------------------------------------------------------------


def _measure(
    arms: Sequence[EvalArm],
    plan: EvalPlan,
    file: AcceptanceFile,
    output: Path | None,
    output_format: OutputFormat,
) -> str:
    """Measure every entry, show each as it comes, and return the pivot and the advice."""
    from peagle.evaluation.eval_run import evaluate
    from peagle.evaluation.intervals import compare_entries
    from peagle.evaluation.report.advice import acceptance_advice
    from peagle.evaluation.turns import entry_with_turns, eval_with_turns

    dtype = file.results.provenance.dtype

    def show(entry: Entry) -> None:
        if output_format is OutputFormat.TEXT:
            shown = entry_with_turns(entry, file.results.turns)
            print(entry_text(shown, dtype, chat=plan.chat) + "\n", flush=True)

    view = EvalView(show)
    with harness.resumable(view.close, output, file.entries):
        evaluate(arms, plan, file, view)
    comparisons = compare_entries(file.entries, seed=plan.params.seed or 0)
    advice = acceptance_advice(file.entries, comparisons)
    file.conclude(comparisons, advice)
    pivot = eval_pivot(eval_with_turns(file.results))
    several = len(pivot.sets) > 1
    table = f"acceptance length by set\n{pivot_table(pivot)}\n\n" if several else ""
    return f"{table}Advice: {printable(advice)}"


def _certify(
    models: Models,
    k: int,
    options: Options,
    output: Path | None,
    output_format: OutputFormat,
) -> bool:
    """Print the certificate of losslessness, and return whether it passed."""
    from peagle.evaluation.certify.run import certificate_text, run
    from peagle.evaluation.journal import make_folder
    from peagle.models.checkpoint.files import write_json

    if output is not None:
        make_folder(output)
    certificate = run(
        models.target,
        models.folder,
        models.methods,
        k,
        options,
        harness.provenance(models.name, models.dtype, models.target.device),
        lambda line: print(f"peagle: {printable(line)}", file=sys.stderr, flush=True),
    )
    if output is not None:
        write_json(output / "certificate.json", certificate.to_json())
    as_json = output_format is OutputFormat.JSON
    print(json.dumps(certificate.to_json(), indent=2) if as_json else certificate_text(certificate))
    return certificate.passed


_MOST_COLUMNS = 12
_LABEL = 18


class EvalView:
    """Print progress to standard error, and pass finished entries to `show`."""

    def __init__(self, show: Callable[[Entry], None]) -> None:
        self._show = show
        self._line = ProgressLine("request")
        self._done = self._total = 0

    def begin(self, key: EntryKey, num_requests: int) -> None:
        """Say which entry is begun."""
        self._line = ProgressLine("request")
        self._line.begin(f"{printable(str(key))}: {num_requests} requests")
        self._done, self._total = 0, num_requests

    def advance(self) -> None:
        """Count a request."""
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
    title += f", {entry.draft_sampling} drafts" if entry.temperature else ""
    prompts = "chat template" if chat else "plain prompts"
    server = "" if entry.engine == "peagle" else entry.engine
    where = "  ".join(filter(None, (dtype, prompts, entry.source, server)))
    lines = [bright(printable(title), sys.stdout) + printable(f"  {where}")]
    lines.append("  " + _summary(pooled))
    if pooled.acceptance_length is None:
        lines.append(f"  {entry.output_tokens_per_s:.1f} output tokens/s")
    lines += _positions(pooled)
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


def _positions(pooled: Slice) -> list[str]:
    depth = min(len(pooled.unconditional), _MOST_COLUMNS)
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
    return lines


def _row(label: str, values: Sequence[float | None]) -> str:
    return f"  {label:<{_LABEL}}" + "".join(f"{_share(value):>6}" for value in values)


def _share(value: float | None) -> str:
    """Return a share without its leading 0, or - if it is unknown."""
    return "-" if value is None else f"{value:.2f}".removeprefix("0")


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
