"""`peagle tune`: the cost of drafts on this machine, and K by batch size."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.bundled import BUNDLED, expand_bundled
from peagle.cli import groups, harness
from peagle.cli.flags import Given, pick, takes
from peagle.cli.options import (
    DEFAULT_LIMIT,
    Format,
    OutputFormat,
    Results,
    UseTemplate,
    check_paths,
    own_target,
)
from peagle.cli.values import whole_numbers
from peagle.config import MAX_SPECULATIVE_TOKENS
from peagle.errors import UserError
from peagle.evaluation.decoding_methods import DecodingMethod

if TYPE_CHECKING:
    from peagle.evaluation.tuning.acceptance import AcceptanceByK
    from peagle.evaluation.tuning.tune import Grid

EXAMPLES = """
The bundled pair on this machine; about two minutes:
  peagle tune --threads 1

A head of your own, with the acceptance that peagle eval measured; a report in out/:
  peagle eval --target ./Qwen3-0.6B --draft ./head -k 1,3,7 --output out
  peagle tune --target ./Qwen3-0.6B --draft ./head -k 1-7 --acceptance out --output out

Larger batches and longer contexts, K from a list:
  peagle tune --target ./Qwen3-0.6B --draft ./head -k 1,3,5,7 --batch-sizes 1,4,16,32,64 \\
      --context 2048

Interrupted? The same command with the same --output goes on where it was.
What it prints goes into --speculative-config of peagle serve.
"""

_MOST_K = 8


@takes(
    *pick(groups.MODEL, "target", "revision", "speculative.model"),
    *pick(groups.SAMPLING, "sampling.max_tokens", "sampling.temperature", "sampling.seed"),
    *pick(groups.ENGINE, "engine.dtype", "engine.device", "engine.kv_cache_gib"),
    *pick(groups.ENGINE, "engine.gpu_memory_utilization", "threads"),
)
def tune(
    given: Given,
    k: Annotated[
        str | None,
        typer.Option(
            "-k",
            "--num-speculative-tokens",
            metavar="K,...",
            help="Draft tokens per step to choose from, like 1-8 or 1,3,5,7; no drafts (K = 0) is "
            "always among them.",
            show_default="1 to what the head was trained for, at most 8",
        ),
    ] = None,
    batch_sizes: Annotated[
        str, typer.Option(metavar="B,...", help="Numbers of sequences that decode together.")
    ] = "1,2,4,8,16",
    acceptance: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The acceptance.json of peagle eval, or its folder.",
            show_default="measured here, on --set",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Method of that file whose acceptance is taken.",
            show_default="that of --draft",
        ),
    ] = None,
    sets: Annotated[
        str, typer.Option("--set", metavar="NAME,...", help="Prompt sets, as in peagle eval.")
    ] = harness.DEFAULT_SET,
    limit: Annotated[int, typer.Option(help="Prompts of each set.")] = DEFAULT_LIMIT,
    chat_template: UseTemplate = None,
    context: Annotated[int, typer.Option(help="Tokens of a sequence whose steps are timed.")] = 256,
    steps: Annotated[
        int, typer.Option(help="Decode steps timed in one visit to a batch size and K.")
    ] = 8,
    rounds: Annotated[
        int,
        typer.Option(
            help="Visits to each batch size and K, of which the fastest counts; a busy machine "
            "needs more."
        ),
    ] = 5,
    threshold: Annotated[
        float, typer.Option(help="Gain in speed below which neighbouring sizes keep one K.")
    ] = 0.03,
    output: Results = None,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Choose K by batch size for this machine and head.

    Measures the cost of a decode step by batch size and K, joins it with acceptance, predicts
    tokens/s (checked on cells that it was not fitted to) and prints a schedule of K by batch size,
    K = 0 where drafts do not pay, with the acceptance length from which they would.
    """
    params = harness.sampling_params(given)
    ks = () if k is None else whole_numbers("-k", k, MAX_SPECULATIVE_TOKENS)
    batches = whole_numbers("--batch-sizes", batch_sizes, 4096)
    for flag, number in (("--context", context), ("--steps", steps), ("--rounds", rounds)):
        if number < 1:
            raise UserError(f"{flag} is {number}; expected at least 1.")
    if threshold < 0:
        raise UserError(f"--threshold is {threshold}; expected at least 0, like 0.03 for 3%.")
    if method is not None and acceptance is None:
        raise UserError(f"--method is {method!r}: it chooses from a file; add --acceptance.")
    draft, own = given.value("speculative.model"), own_target(given.value("target"))
    if draft:  # a target without one is refused for that
        check_paths(given.value("target"), draft)
    if acceptance is not None and not acceptance.exists():
        raise UserError(f"--acceptance {str(acceptance)!r} is not readable: it is not there.")
    if draft is None and own is not None:
        raise UserError(f"--target {own!r} was given without --draft: name its draft head.")
    draft = expand_bundled(draft or BUNDLED, "draft")
    prompts = harness.load_prompts([sets], limit)
    from peagle.cli.tune_view import TuneView, result_text
    from peagle.evaluation.journal import Journal, weights_digest
    from peagle.evaluation.tuning.acceptance import acceptance_of_file, measure_acceptance
    from peagle.evaluation.tuning.machine import EngineMachine, contexts
    from peagle.evaluation.tuning.model import Shape
    from peagle.evaluation.tuning.tune import LOG_NAME, measure_costs, tune_results
    from peagle.models.checkpoint import read_head_config
    from peagle.results import TUNE

    name = harness.display_name(draft)
    known = None
    if acceptance is not None:
        known = acceptance_of_file(
            acceptance, draft=name, method=method, temperature=params.temperature
        )
    models = harness.load_models(given, [DecodingMethod("", draft)])
    target, (head,) = models.target, models.methods
    grid = _grid(batches, ks, known, head.trained_depth)
    chat = models.has_template if chat_template is None else chat_template
    provenance = harness.provenance(models.name, models.dtype, target.device)
    settings: dict[str, Any] = {
        "draft": name,
        "sets": {name: len(own) for name, own in prompts.items()},
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "chat_template": chat,
        "acceptance": known and {str(k): list(rates) for k, rates in known.per_pos.items()},
        "k": grid.ks,
        "batch_sizes": grid.batches,
        "context": context,
        "steps": steps,
        "threads": given.value("threads"),
    }
    machine = provenance["environment"]
    identity = {
        "target_sha256": models.target_sha256,
        "draft_sha256": weights_digest(head.folder),
        "dtype": models.dtype,
        **{name: machine[name] for name in ("device", "cpu", "torch")},
    }
    journal = Journal(output and output / LOG_NAME, settings | identity)
    view = TuneView(len(grid.points) * rounds)
    limits = {
        name: value
        for name, value in models.engine_options.items()
        if name in ("kv_cache_gib", "gpu_memory_utilization")
    }
    with harness.resumable(view, output, journal):
        if known is None:
            # At the K that the model of costs is fitted to.
            fitted_ks = sorted({point.k for point in grid.fitted if point.k})
            view.say(f"acceptance at K = {', '.join(map(str, fitted_ks))}")
            known = measure_acceptance(
                target,
                head.folder,
                fitted_ks,
                prompts,
                params,
                journal,
                chat=chat,
                watch=lambda k: view.say(f"acceptance at K = {k} is there"),
                **limits,
            )
        timed = EngineMachine(
            target,
            head.folder,
            known,
            grid.ks,
            contexts(target, prompts, grid.batches[-1], context),
            context=context,
            steps=steps,
            temperature=params.temperature,
            **limits,
        )
        costs = measure_costs(
            timed.measure,
            grid,
            rounds,
            journal,
            view.visited,
            interleave_k=timed.changes_k_cheaply,
        )
    config, _ = read_head_config(head.folder, num_target_layers=target.num_layers)
    settings |= {"rounds": rounds, "threshold": threshold}
    settings["fitted"] = [asdict(point) for point in sorted(grid.fitted)]
    is_padded = target.device.type == "cuda"
    results = tune_results(
        grid,
        costs,
        known,
        Shape(known.lengths(), config.is_parallel, timed.batch_rows, is_padded),
        draft=draft,
        threshold=threshold,
        provenance=provenance,
        settings=settings,
    )
    harness.conclude(results, result_text(results), TUNE, output, output_format)


def _grid(
    batches: tuple[int, ...],
    ks: tuple[int, ...],
    acceptance: AcceptanceByK | None,
    trained_depth: int | None,
) -> Grid:
    """The batch sizes at every K; by default 1 to what the acceptance or the head allows."""
    from peagle.evaluation.tuning.tune import Grid

    most = acceptance.most if acceptance is not None else trained_depth
    ks = ks or tuple(range(1, min(_MOST_K if most is None else most, _MOST_K) + 1))
    if acceptance is not None:
        acceptance.rates(ks[-1])  # refuses a K that is not known, before anything runs
    return Grid(batches, ks)
