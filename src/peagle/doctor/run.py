"""An examination from beginning to end, as `peagle doctor` runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from peagle.config import EngineConfig
from peagle.doctor.examiner import examine
from peagle.doctor.findings import Examination
from peagle.doctor.probed_target import ProbedTarget, Progress
from peagle.doctor.questions import choose_texts, usual_style
from peagle.doctor.served import EndpointServing, EngineServing, Serving
from peagle.engine.placement import resolve_device, resolve_dtype
from peagle.errors import CheckpointError, UserError
from peagle.evaluation.endpoint import EndpointBackend
from peagle.models.checkpoint import read_head_config
from peagle.models.loading import resolve_model
from peagle.models.target import TargetModel, load_tokenizer
from peagle.models.trained_depth import default_depth

_MOST_DRAFTS = 16


def run_doctor(
    target: str,
    draft: str,
    *,
    revision: str | None = None,
    draft_revision: str | None = None,
    endpoint: str | None = None,
    endpoint_model: str | None = None,
    vllm: Callable[[Path, Path, int], Serving] | None = None,
    num_speculative_tokens: int | None = None,
    prompts: Path | None = None,
    plain: bool = False,
    chat_template: str | None = None,
    thinking: bool | None = None,
    engine: EngineConfig,
    progress: Progress = lambda text: None,
) -> Examination:
    """Examine a head, with its serving side.

    Args:
        target, draft: folders or hub ids.
        revision, draft_revision: revisions of hub ids.
        endpoint: URL of a server; None examines our engine in this process.
        endpoint_model: its name there; None takes the first.
        vllm: makes what serves a head of a target at a K in vLLM; None examines another side.
        num_speculative_tokens: K; None takes that of the server, else what the head was trained
            for.
        prompts: file; None takes bundled ones.
        plain: prompts are plain text, whatever the tokenizer has.
        chat_template, thinking: as the prompts are served.
        engine: dtype and device.
        progress: gets a line about each step.

    Raises:
        UserError: a folder is not there, the target does not load, options contradict each other,
            or the server cannot be reached. A broken head is no mistake but a finding.
    """
    k = num_speculative_tokens
    if k is not None and not 1 <= k <= _MOST_DRAFTS:
        raise UserError(f"K is {k}; expected 1 to {_MOST_DRAFTS} draft tokens.")
    backend = None
    if endpoint is not None:
        template = {"chat_template_kwargs": {"enable_thinking": thinking}}
        extra = None if thinking is None else template
        backend = EndpointBackend(endpoint, endpoint_model, extra_body=extra)
    progress("loading the target")
    device = resolve_device(engine.device)
    target_folder = resolve_model(target, revision)
    try:
        folder = resolve_model(draft, draft_revision, role="draft")
    except CheckpointError as error:
        report = Examination()
        report.check("files", "differs", str(error))
        report.blame("weights", "head", str(error), "Copy or fetch the head again.")
        return report
    tokenizer = load_tokenizer(target_folder)
    style = usual_style(tokenizer, plain=plain, chat_template=chat_template, thinking=thinking)
    texts = choose_texts(prompts, tokenizer)
    dtype = resolve_dtype(engine.dtype, device)
    model = TargetModel.load(target_folder, dtype=dtype, device=device)
    try:
        config = read_head_config(folder, num_target_layers=model.num_layers)[0]
    except CheckpointError:  # the examination of the files says why
        config = None
    trained = default_depth(config.trained_depth if config else None)
    served = backend.num_speculative_tokens() if backend else None
    k = min(k or served or trained, _MOST_DRAFTS)
    layers = config.aux_layer_ids if config else ()
    probed = ProbedTarget.of(model, tokenizer, style, texts, k, layers, progress)
    if vllm is not None:
        serving: Serving = vllm(target_folder, folder, k)
    else:
        serving = EndpointServing(backend) if backend else EngineServing(model, folder, k)
    report = examine(probed, folder, serving)
    report.figures = {
        "target": target,
        "draft": draft,
        "serving": serving.name,
        "dtype": str(dtype).removeprefix("torch."),
        "prompt_style": str(style),
        "num_speculative_tokens": k,
        **report.figures,
    }
    return report
