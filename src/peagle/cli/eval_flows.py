"""What `peagle eval` does once its options are read: on an engine here, on a server, certifying."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.cli.eval_models import EvalModels
from peagle.cli.eval_request import EvalRequest
from peagle.cli.eval_view import EvalView, entry_text
from peagle.cli.setup import note
from peagle.cli.terminal import printable
from peagle.cli.vllm_engine import say
from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.evaluation.acceptance_file import AcceptanceFile, make_folder
from peagle.evaluation.comparisons import compare_entries
from peagle.evaluation.decoding import Request
from peagle.evaluation.endpoint import EndpointBackend
from peagle.evaluation.eval_run import (
    EvalPlan,
    LocalMethod,
    evaluate,
    evaluate_endpoint,
    on_engines,
    provenance,
    target_digest,
)
from peagle.evaluation.report.advice import acceptance_advice
from peagle.evaluation.vllm_server import ENGINE, vllm_backend
from peagle.models.checkpoint.files import write_json
from peagle.models.target import TargetModel
from peagle.models.target_ends import TargetEnds
from peagle.results import Entry

if TYPE_CHECKING:
    from peagle.backends.vllm.command import VllmLaunch
    from peagle.backends.vllm.installation import VllmInstallation

    Launched = Callable[[str, int], VllmLaunch]

_NAMED_URL = re.compile(r"(?:(?P<name>[\w.+-]+)=)?(?P<url>.+)")
_PROBE = [{"role": "user", "content": "Hi"}]


def on_engine(models: EvalModels[TargetModel], request: EvalRequest) -> None:
    """Measure every method on engines of our own."""
    plan, file = _plan_and_file(models, request, models.dtype)
    opened = on_engines(models.target, plan, **models.engine_options)

    def measure(view: EvalView) -> None:
        evaluate(models.methods, plan, file, view, opened)

    _measured(measure, file, request, models.dtype)


def on_vllm(
    models: EvalModels[TargetEnds],
    request: EvalRequest,
    installation: VllmInstallation,
    launched: Launched,
) -> None:
    """Measure every head on vLLM, which is started for each and every K.

    Args:
        models: what is measured.
        request: how.
        installation: of vLLM.
        launched: what vLLM is to serve, of a head and a K.
    """
    from peagle.backends.vllm.command import dtype_for

    first = launched(models.methods[0].folder, models.default_k)
    dtype = dtype_for(first, installation)
    dtype = models.dtype if dtype == "auto" else dtype
    plan, file = _plan_and_file(models, request, dtype)
    extra = _extra_body(request)

    def opened(one: LocalMethod, k: int) -> AbstractContextManager[EndpointBackend]:
        launch = launched(one.folder, k)
        return vllm_backend(launch, installation, say=say, extra_body=extra)

    def measure(view: EvalView) -> None:
        evaluate(models.methods, plan, file, view, opened, ENGINE)

    _measured(measure, file, request, dtype)


def _plan_and_file(
    models: EvalModels[Any], request: EvalRequest, dtype: str
) -> tuple[EvalPlan, AcceptanceFile]:
    """What is put to every method of these models, and where it is kept."""
    chat = models.has_template if request.chat_template is None else request.chat_template
    if request.thinking and not chat:
        raise UserError(f"{models.name} has no chat template, so there is no thinking mode to set.")
    plan = _plan(request, request.ks or (models.default_k,), chat=chat)
    who = provenance(models.name, dtype, models.target.device)
    return plan, AcceptanceFile(request.output, who, plan.settings(target_digest(models.target)))


def _extra_body(request: EvalRequest) -> dict[str, Any]:
    """Fields of every request to a server."""
    # Left out, top_p would be the model's own, and the figures not those of what was asked for.
    extra: dict[str, Any] = {"top_p": request.params.top_p}
    if request.thinking is not None:
        extra["chat_template_kwargs"] = {"enable_thinking": request.thinking}
    return extra


def on_endpoint(endpoint: str, model: str | None, request: EvalRequest) -> None:
    """Measure a server."""
    match = _NAMED_URL.fullmatch(endpoint)
    name, url = (match["name"], match["url"]) if match else (None, endpoint)
    backend = EndpointBackend(url, model, extra_body=_extra_body(request))
    plan = _plan(request, request.ks, chat=_converses(backend, request))
    file = AcceptanceFile(
        request.output, {**provenance(backend.model, ""), "endpoint": url}, plan.settings("")
    )

    def measure(view: EvalView) -> None:
        evaluate_endpoint(backend, name or "endpoint", plan, file, view)

    _measured(measure, file, request, "")


def certified(
    models: EvalModels[TargetModel], request: EvalRequest, options: Mapping[str, Any]
) -> bool:
    """Print the certificate of losslessness; whether there is no fault.

    Args:
        models: what is certified.
        request: K, the output folder and the format.
        options: fields of `certify.Options`.
    """
    from peagle.evaluation import certify

    if request.output is not None:
        make_folder(request.output)
    certificate = certify.run(
        models.target,
        models.folder,
        [one.loadable for one in models.methods],
        max(request.ks or (models.default_k,)),
        provenance=provenance(models.name, models.dtype, models.target.device),
        options=certify.Options(**options),
        watch=lambda line: print(f"peagle: {printable(line)}", file=sys.stderr, flush=True),
    )
    data = certificate.to_json()
    if request.output is not None:
        write_json(request.output / "certificate.json", data)
    text = json.dumps(data, indent=2) if request.as_json else certify.certificate_text(certificate)
    print(text)
    return certificate.passed


def _plan(request: EvalRequest, ks: tuple[int, ...], *, chat: bool) -> EvalPlan:
    return EvalPlan(
        request.prompts,
        ks,
        request.temperatures,
        request.params,
        request.draft_sampling,
        request.concurrency,
        chat,
        request.thinking,
    )


def _converses(backend: EndpointBackend, request: EvalRequest) -> bool:
    """Whether prompts go to the server as messages: as the request says, else if it answers one."""
    if request.chat_template is not None:
        return request.chat_template
    chat = backend.has_chat
    if chat is None:
        try:
            backend.run([Request("probe", _PROBE, SamplingParams(max_tokens=1))], 1)
            chat = True
        except UserError:
            chat = False
    if not chat and request.thinking is not None:
        raise UserError(f"{backend.model} at {backend.name} does not converse: no thinking mode.")
    return chat


def _measured(
    measure: Callable[[EvalView], None], file: AcceptanceFile, request: EvalRequest, dtype: str
) -> None:
    """Run it, show each entry as it comes, write the report."""
    count = 0

    def show(entry: Entry) -> None:
        nonlocal count
        text = entry_text(entry, dtype, chat=file.results.settings["chat_template"])
        print(("\n" if count else "") + text, flush=True)
        count += 1

    view = EvalView((lambda entry: None) if request.as_json else show)
    try:
        measure(view)
    except BaseException:
        view.close()
        if request.output is not None and file.entries:
            kept = len(file.entries)
            note(f"finished entries in {request.output}: {kept}; the same command goes on there")
        raise
    comparisons = compare_entries(file.entries, seed=request.params.seed or 0)
    advice = acceptance_advice(file.entries, comparisons)
    file.conclude(comparisons, advice)
    data = file.results.to_json()
    print(json.dumps(data, indent=2) if request.as_json else f"\nAdvice: {printable(advice)}")
    if request.output is not None:
        _report(request.output)


def _report(folder: Path) -> None:
    from peagle.evaluation.report import write_report

    note(f"the report is {write_report(folder)}")
