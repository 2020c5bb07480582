"""An examination from beginning to end, as `peagle doctor` asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from peagle.config import EngineConfig
from peagle.doctor.diagnosis import Progress
from peagle.doctor.examiner import Examiner
from peagle.doctor.findings import Cause, Examination
from peagle.doctor.questions import choose_texts, usual_style
from peagle.doctor.served import EndpointServing, EngineServing, Serving
from peagle.engine.placement import resolve_device, resolve_dtype
from peagle.errors import CheckpointError, UserError
from peagle.models.checkpoint import read_head_config
from peagle.models.drafter import DrafterConfig
from peagle.models.loading import resolve_model
from peagle.models.target import TargetModel, load_tokenizer
from peagle.models.trained_depth import default_depth

_MOST_DRAFTS = 16


@dataclass(frozen=True, slots=True)
class Order:
    """What to examine.

    Attributes:
        target, draft: folders or hub ids.
        revision, draft_revision: of hub ids.
        endpoint: URL of a server; None examines our engine in this process.
        endpoint_model: its name there; None takes the first.
        vllm: what serves a head of a target at a K in vLLM; None examines another serving side.
        num_speculative_tokens: K; None takes that of the server, else what the head was trained
            for.
        prompts: file; None takes bundled ones.
        plain: prompts are plain text, whatever the tokenizer has.
        chat_template, thinking: as the prompts are served.
        engine: dtype and device.
    """

    target: str
    draft: str
    revision: str | None = None
    draft_revision: str | None = None
    endpoint: str | None = None
    endpoint_model: str | None = None
    vllm: Callable[[Path, Path, int], Serving] | None = None
    num_speculative_tokens: int | None = None
    prompts: Path | None = None
    plain: bool = False
    chat_template: str | None = None
    thinking: bool | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)


def run_doctor(order: Order, progress: Progress = lambda text: None) -> Examination:
    """Examine a head, with its serving side.

    Raises:
        UserError: a folder is not there, the target does not load, options contradict each other,
            or the server cannot be reached. A broken head is no mistake but a finding.
    """
    k = order.num_speculative_tokens
    if k is not None and not 1 <= k <= _MOST_DRAFTS:
        raise UserError(f"K is {k}; expected 1 to {_MOST_DRAFTS} draft tokens.")
    endpoint = None
    if order.endpoint is not None:
        thinking = order.thinking
        variables = None if thinking is None else {"enable_thinking": thinking}
        endpoint = EndpointServing(order.endpoint, order.endpoint_model, variables)
    progress("loading the target")
    device = resolve_device(order.engine.device)
    target_folder = resolve_model(order.target, order.revision)
    try:
        folder = resolve_model(order.draft, order.draft_revision, role="draft")
    except CheckpointError as error:
        return _unreadable(error)
    tokenizer = load_tokenizer(target_folder)
    style = usual_style(
        tokenizer, plain=order.plain, chat_template=order.chat_template, thinking=order.thinking
    )
    texts = choose_texts(order.prompts, tokenizer)
    dtype = resolve_dtype(order.engine.dtype, device)
    target = TargetModel.load(target_folder, dtype=dtype, device=device)
    config = _config(folder, target)
    k = _num_drafts(k, config, endpoint)
    layers = config.aux_layer_ids if config else ()
    examiner = Examiner.of(target, tokenizer, style, texts, k, layers, progress)
    if order.vllm is not None:
        serving: Serving = order.vllm(target_folder, folder, k)
    else:
        serving = endpoint or EngineServing(target, folder, k)
    report = examiner.examine(folder, serving)
    report.figures = {
        "target": order.target,
        "draft": order.draft,
        "serving": serving.name,
        "dtype": str(dtype).removeprefix("torch."),
        "prompt_style": str(style),
        "num_speculative_tokens": k,
        **report.figures,
    }
    return report


def _config(folder: Path, target: TargetModel) -> DrafterConfig | None:
    """The head's shape, None where its files do not tell."""
    try:
        return read_head_config(folder, num_target_layers=target.num_layers)[0]
    except CheckpointError:
        return None


def _num_drafts(
    asked: int | None, config: DrafterConfig | None, endpoint: EndpointServing | None
) -> int:
    """K: as asked, else the server's, else the head's."""
    served = endpoint.num_drafts() if endpoint is not None else None
    trained = config.trained_depth if config is not None else None
    return min(asked or served or default_depth(trained), _MOST_DRAFTS)


def _unreadable(error: CheckpointError) -> Examination:
    report = Examination()
    report.check("files", "differs", str(error))
    report.blame(Cause("weights", "head", str(error), "Copy or fetch the head again."))
    return report
