"""What `peagle tune` does once its options are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peagle.bundled import BUNDLED, BUNDLED_TARGET, expand_bundled
from peagle.cli import options
from peagle.cli.eval_models import shown
from peagle.cli.flags import Given
from peagle.cli.settings import Layer, Settings
from peagle.cli.setup import note
from peagle.cli.tune_request import TuneRequest
from peagle.cli.tune_view import TuneView
from peagle.errors import UserError
from peagle.evaluation.acceptance_file import weights_digest
from peagle.evaluation.compare import load_target
from peagle.evaluation.decoding_methods import DecodingMethod
from peagle.evaluation.dialogues import PromptSets
from peagle.evaluation.eval_run import LocalMethod, check_heads, provenance, target_digest
from peagle.evaluation.journal import Journal
from peagle.evaluation.prompt_sets import load
from peagle.evaluation.report import write_report
from peagle.evaluation.tuning.acceptance import AcceptanceByK, acceptance_of_file
from peagle.evaluation.tuning.grid import Grid
from peagle.evaluation.tuning.run import LOG_NAME, make_machine, measure_acceptance, shared_settings
from peagle.evaluation.tuning.tune import Tuned, measure_costs
from peagle.models.checkpoint import read_head_config
from peagle.models.checkpoint.files import write_json
from peagle.models.drafter_config import DrafterConfig
from peagle.models.loading import resolve_model
from peagle.models.target import TargetModel, load_tokenizer
from peagle.results import TUNE, TuneResults

MOST_K = 8


@dataclass(frozen=True, slots=True)
class TuneModels:
    """A target and a head that fits it.

    Attributes:
        target: loaded.
        name: as the user calls it.
        head: folder of the head.
        draft: as the user calls it.
        config: of the head.
        limits: fields of EngineConfig for every engine.
    """

    target: TargetModel
    name: str
    head: Path
    draft: str
    config: DrafterConfig
    limits: dict[str, Any]

    @property
    def dtype(self) -> str:
        """Of the target."""
        return str(self.target.dtype).removeprefix("torch.")


def run(given: Given, request: TuneRequest) -> TuneResults:
    """Measure, choose and write; returns what tune.json holds.

    Raises:
        UserError: a model, a file or an option is not usable.
    """
    draft = _draft(given)
    known = _known_acceptance(request, draft)
    sets = {name: load(name, request.limit) for name in request.sets}
    models = _load(given, draft)
    grid = _grid(request, known, models.config.trained_depth)
    chat = request.chat
    if chat is None:
        chat = bool(getattr(load_tokenizer(models.target.name), "chat_template", None))
    told = provenance(models.name, models.dtype, models.target.device)
    settings = {
        "draft": shown(draft),
        **shared_settings(sets, request.params, chat=chat, known=known),
        "k": grid.ks,
        "batch_sizes": grid.batches,
        "context": request.context,
        "steps": request.steps,
        "threads": given.value("threads"),
    }
    journal = Journal(
        request.output and request.output / LOG_NAME,
        settings | _identity(models, told["environment"]),
    )
    view = TuneView(len(grid.cells) * request.rounds)
    try:
        acceptance = known or _acceptance(models, grid, sets, request, journal, view, chat=chat)
        machine = make_machine(
            models.target,
            str(models.head),
            acceptance,
            sets,
            grid.ks,
            grid.batches[-1],
            context=request.context,
            steps=request.steps,
            temperature=request.params.temperature,
            **models.limits,
        )
        costs = measure_costs(machine, grid, request.rounds, journal, view.visited)
    except BaseException:
        if request.output is not None and len(journal):
            view.close()
            note("what was measured is kept; the same command goes on from there")
        raise
    finally:
        view.close()
    tuned = Tuned.of(
        grid,
        costs,
        acceptance,
        threshold=request.threshold,
        is_parallel=models.config.is_parallel,
        batch_rows=machine.batch_rows,
        is_padded=models.target.device.type == "cuda",
    )
    settings |= {"rounds": request.rounds, "threshold": request.threshold}
    settings |= {"fitted": [asdict(cell) for cell in sorted(grid.fitted)]}
    result = tuned.results(told, settings, draft)
    if request.output is not None:
        write_json(request.output / TUNE, result.to_json())
        note(f"report: {write_report(request.output)}")
    return result


def _known_acceptance(request: TuneRequest, draft: str) -> AcceptanceByK | None:
    if request.acceptance is None:
        return None
    return acceptance_of_file(
        request.acceptance,
        draft=shown(draft),
        method=request.method,
        temperature=request.params.temperature,
    )


def _load(given: Given, draft: str) -> TuneModels:
    engine = Settings(Layer(dict(given))).build("engine")
    options.set_threads(given.value("threads"))
    options.quiet_libraries()
    own = options.own_target(given.value("target"))
    folder = resolve_model(own or BUNDLED, given.value("revision"))
    head = resolve_model(draft, role="draft")
    target = load_target(folder, dtype=engine.dtype, device=engine.device)
    check_heads(target, [LocalMethod(DecodingMethod("--draft", draft), str(head))])
    config, _ = read_head_config(head, num_target_layers=target.num_layers)
    limits = {
        "kv_cache_gib": engine.kv_cache_gib,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
    }
    return TuneModels(target, shown(own or str(BUNDLED_TARGET)), head, draft, config, limits)


def _acceptance(
    models: TuneModels,
    grid: Grid,
    sets: PromptSets,
    request: TuneRequest,
    journal: Journal,
    view: TuneView,
    *,
    chat: bool,
) -> AcceptanceByK:
    """Measure it at the K that the model of costs is fitted to."""
    ks = sorted({cell.k for cell in grid.fitted if cell.k})
    view.say(f"acceptance at K = {', '.join(map(str, ks))}")
    return measure_acceptance(
        models.target,
        str(models.head),
        ks,
        sets,
        request.params,
        journal,
        chat=chat,
        watch=lambda k: view.say(f"acceptance at K = {k} is there"),
        **models.limits,
    )


def _draft(given: Given) -> str:
    draft, own = given.value("speculative.model"), options.own_target(given.value("target"))
    if draft is None and own is not None:
        raise UserError(f"--target {own!r} was given without --draft: name its draft head.")
    return expand_bundled(draft or BUNDLED, "draft")


def _grid(
    request: TuneRequest, acceptance: AcceptanceByK | None, trained_depth: int | None
) -> Grid:
    most = acceptance.most if acceptance is not None else trained_depth
    ks = request.ks or tuple(range(1, min(MOST_K if most is None else most, MOST_K) + 1))
    if acceptance is not None:
        acceptance.rates(ks[-1])  # refuses a K that is not known, before anything runs
    return Grid(request.batches, ks)


def _identity(models: TuneModels, machine: Mapping[str, Any]) -> dict[str, Any]:
    """What tells measurements of other models and machines apart."""
    return {
        "target_sha256": target_digest(models.target),
        "draft_sha256": weights_digest(models.head),
        "dtype": models.dtype,
        **{name: machine[name] for name in ("device", "cpu", "torch")},
    }
