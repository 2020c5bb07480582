"""`peagle tune`: measure the cost of drafts on this machine, and choose K by batch size."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from peagle.bundled import expand_bundled, pair_of
from peagle.cli import groups, harness
from peagle.cli.flags import Given, pick_flags, spread, takes
from peagle.cli.groups import DEFAULT_LIMIT, Format, OutputFormat, Results, UseTemplate
from peagle.cli.progress import ProgressLine
from peagle.cli.settings import whole_numbers
from peagle.cli.setup import check_paths, name_target
from peagle.cli.terminal import bright, printable
from peagle.config import MAX_SPECULATIVE_TOKENS, CandidateTrees, SamplingParams
from peagle.config.speculative import MAX_TREE_NODES
from peagle.errors import UserError
from peagle.evaluation.decoding_methods import DecodingMethod
from peagle.evaluation.journal import TUNE_LOG, Journal, read_settings, weights_digest
from peagle.evaluation.sources import by_source
from peagle.evaluation.tuning.schedule import k_at

if TYPE_CHECKING:
    from peagle.evaluation.prompts import Prompt
    from peagle.evaluation.tuning.acceptance import AcceptanceByK
    from peagle.evaluation.tuning.machine import CostPoint
    from peagle.evaluation.tuning.tune import Grid
    from peagle.results import BreakEven, Prediction, TunedAcceptance, TunedExperts, TuneResults

EXAMPLES = """
The bundled pair on this machine; about two minutes:
  peagle tune --threads 1

A head of your own, with the acceptance that peagle eval measured; a report in out/:
  peagle eval --target ./Qwen3-0.6B --draft ./head -k 1,3,7 --output out
  peagle tune --target ./Qwen3-0.6B --draft ./head -k 1-7 --acceptance out --output out

Larger batches and longer contexts, K from a list:
  peagle tune --target ./Qwen3-0.6B --draft ./head -k 1,3,5,7 --batch-sizes 1,4,16,32,64 \\
      --context 2048

Candidate trees of 7, 16 and 32 nodes beside chains:
  peagle tune --target ./Qwen3-0.6B --draft ./head --max-nodes 7,16,32

Interrupted? The same command with the same --output goes on where it was.
What it prints goes into --speculative-config of peagle serve.
"""

_MAX_K = 8
_MEMORY_LIMITS = ("kv_cache_gib", "gpu_memory_utilization")


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options that only `tune` has, as typed."""

    target_model: groups.Model = None
    k: str | None = typer.Option(
        None,
        "-k",
        "--num-speculative-tokens",
        metavar="K,...",
        help="Draft tokens per step to choose from, like 1-8 or 1,3,5,7; no drafts (K = 0) is "
        "always among them.",
        show_default="1 to what the head was trained for, at most 8",
    )
    max_nodes: str | None = typer.Option(
        None,
        metavar="N,...",
        help="Nodes of candidate trees to measure beside chains, like 7,16,32.",
        show_default="no trees",
    )
    batch_sizes: str = typer.Option(
        "1,2,4,8,16", metavar="B,...", help="Numbers of sequences that decode together."
    )
    acceptance: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="The acceptance.json of peagle eval, or its folder.",
        show_default="measured here, on --set",
    )
    method: str | None = typer.Option(
        None,
        metavar="NAME",
        help="Method of that file whose acceptance is taken.",
        show_default="that of --draft",
    )
    sets: str = typer.Option(
        harness.DEFAULT_SET, "--set", metavar="NAME,...", help="Prompt sets, as in peagle eval."
    )
    limit: int = typer.Option(DEFAULT_LIMIT, help="Prompts of each set.")
    chat_template: UseTemplate = None
    context: int = typer.Option(256, help="Tokens of a sequence whose steps are timed.")
    steps: int = typer.Option(8, help="Decode steps timed in one visit to a batch size and K.")
    rounds: int = typer.Option(
        5,
        help="Visits to each batch size and K, of which the fastest counts; a busy machine "
        "needs more.",
    )
    threshold: float = typer.Option(
        0.03, help="Gain in speed below which neighbouring sizes keep one K."
    )
    output: Results = None
    output_format: Format = OutputFormat.TEXT


@takes(
    *pick_flags(groups.MODEL, "target", "revision", "speculative.model"),
    *pick_flags(groups.SAMPLING, "sampling.max_tokens", "sampling.temperature", "sampling.seed"),
    *pick_flags(groups.ENGINE, "engine.dtype", "engine.quantization", "engine.fp8_activations"),
    *pick_flags(groups.ENGINE, "engine.kv_cache_dtype"),
    *pick_flags(groups.ENGINE, "engine.device", "engine.kv_cache_gib"),
    *pick_flags(groups.ENGINE, "engine.gpu_memory_utilization", "threads"),
)
@spread
def tune(given: Given, options: TuneOptions) -> None:
    """Choose K by batch size for this machine and head.

    Measures the cost of a decode step by batch size and K, joins it with acceptance, predicts
    tokens/s (checked on cells that it was not fitted to) and prints a schedule of K by batch size,
    K = 0 where drafts do not pay, with the acceptance length from which they would. A step of a
    mixture of experts is priced by the distinct experts that it touches, too. With --max-nodes it
    measures candidate trees, and says at which batch sizes they are faster than every K.
    """
    results = _run(given, _plan(given, options))
    from peagle.results import TUNE

    harness.conclude(results, tuning_text(results), TUNE, options.output, options.output_format)


# ---- the plan ----


@dataclass(frozen=True, slots=True)
class TunePlan:
    """The measurements of `tune`, decided before a model is loaded.

    Attributes:
        ks: the K to choose from; () takes every K that the head allows.
        tree_sizes: nodes of the candidate trees.
        acceptance: acceptance from a file; None measures it.
        settings: settings of the results, as far as they are known.
    """

    options: TuneOptions
    params: SamplingParams
    ks: tuple[int, ...]
    tree_sizes: tuple[int, ...]
    batches: tuple[int, ...]
    head: DecodingMethod
    found: harness.Found
    prompts: dict[str, list[Prompt]]
    acceptance: AcceptanceByK | None
    settings: dict[str, Any]


def _plan(given: Given, options: TuneOptions) -> TunePlan:
    """Check the options, and find the prompts, the models and the acceptance that they name."""
    name_target(given, options.target_model)
    params = harness.sampling_params(given)
    acceptance, method, max_nodes = options.acceptance, options.method, options.max_nodes
    ks = () if options.k is None else whole_numbers("-k", options.k, MAX_SPECULATIVE_TOKENS)
    sizes = () if max_nodes is None else whole_numbers("--max-nodes", max_nodes, MAX_TREE_NODES)
    if sizes and acceptance is not None:
        raise UserError(
            "--max-nodes and --acceptance were given; the acceptance of trees is measured here, "
            "and that of chains has to be of the same prompts. Leave one of them out."
        )
    batches = whole_numbers("--batch-sizes", options.batch_sizes, 4096)
    for name in ("context", "steps", "rounds"):
        if (number := getattr(options, name)) < 1:
            raise UserError(f"--{name} is {number}; expected at least 1.")
    if options.threshold < 0:
        raise UserError(
            f"--threshold is {options.threshold}; expected at least 0, like 0.03 for 3%."
        )
    if method is not None and acceptance is None:
        raise UserError(f"--method is {method!r}: it chooses from a file; add --acceptance.")
    draft, pair = given.value("speculative.model"), pair_of(given.value("target"))
    if draft:  # a target without a head is refused for that
        check_paths(given.value("target"), draft)
    if acceptance is not None and not acceptance.exists():
        raise UserError(f"--acceptance {str(acceptance)!r} is not readable: it is not there.")
    if draft is None and pair is None:
        raise UserError(
            f"--target {given.value('target')!r} was given without --draft: name its draft head."
        )
    draft = expand_bundled(draft or str(pair), "draft")
    prompts = harness.load_prompts([options.sets], options.limit)
    settings: dict[str, Any] = {
        "draft": harness.display_name(draft),
        "sets": {name: len(own) for name, own in prompts.items()},
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "batch_sizes": batches,
        "max_nodes": sizes,
        "context": options.context,
        "steps": options.steps,
        "threads": given.value("threads"),
    }
    harness.check_output(options.output, TUNE_LOG, read_settings, settings)
    head = DecodingMethod("", draft)
    found = harness.find_models(given, [head])
    known = None
    if acceptance is not None:
        from peagle.evaluation.tuning.acceptance import acceptance_of_file

        name, temperature = settings["draft"], params.temperature
        known = acceptance_of_file(acceptance, draft=name, method=method, temperature=temperature)
    return TunePlan(options, params, ks, sizes, batches, head, found, prompts, known, settings)


# ---- the run ----


def _run(given: Given, plan: TunePlan) -> TuneResults:
    """Load the models, measure what the output folder lacks, and choose K."""
    from peagle.evaluation.tuning.acceptance import (
        measure_acceptance,
        measure_tree_acceptance,
    )
    from peagle.evaluation.tuning.machine import EngineMachine, contexts
    from peagle.evaluation.tuning.model import Shape
    from peagle.evaluation.tuning.trees import measure_tree_steps, tree_shapes, tuned_trees
    from peagle.evaluation.tuning.tune import measure_costs, recall_experts, tune_results
    from peagle.models.checkpoint import read_head

    options, params, known = plan.options, plan.params, plan.acceptance
    models = harness.load_models(given, [plan.head], plan.found)
    target, (head,) = models.target, models.methods
    config = read_head(head.folder, num_target_layers=target.num_layers).config
    shapes = tree_shapes(plan.tree_sizes, config)
    grid = _grid(plan.batches, plan.ks, known, head.trained_depth)
    chat = models.has_template if options.chat_template is None else options.chat_template
    provenance = harness.provenance(models.name, models.dtype, target.device)
    settings = plan.settings | {
        "chat_template": chat,
        "acceptance": known and {str(k): list(rates) for k, rates in known.per_pos.items()},
        "k": grid.ks,
    }
    machine = provenance["environment"]
    identity = {
        "target_sha256": models.target_sha256,
        "draft_sha256": weights_digest(head.folder),
        "dtype": models.dtype,
        **{name: machine[name] for name in ("device", "cpu", "torch")},
    }
    journal = Journal(options.output and options.output / TUNE_LOG, settings | identity)
    view = TuneView((len(grid.points) + len(grid.batches) * len(shapes)) * options.rounds)
    limits = {name: of for name, of in models.engine_options.items() if name in _MEMORY_LIMITS}

    def measured(measure: Callable[..., Any], what: Any, **more: Any) -> Any:
        prompts = plan.prompts, params, journal
        return measure(target, head.folder, what, *prompts, chat=chat, **more, **limits)

    with harness.resumable(view.close, options.output, journal):
        if known is None:
            # Acceptance is measured at the K that the model of costs is fitted to.
            fitted_ks = sorted({point.k for point in grid.fitted if point.k})
            view.say(f"acceptance at K = {', '.join(map(str, fitted_ks))}")
            known = measured(measure_acceptance, fitted_ks, watch=view.say_of("at K = {}"))
        of_trees = view.say_of("of trees of {} nodes")
        acceptances = measured(measure_tree_acceptance, shapes, watch=of_trees)
        timed = EngineMachine(
            target,
            head.folder,
            known,
            grid.ks,
            contexts(target, plan.prompts, grid.batches[-1], options.context),
            context=options.context,
            steps=options.steps,
            temperature=params.temperature,
            trees=shapes,
            **limits,
        )
        visits = options.rounds, journal
        costs = measure_costs(
            timed.measure, grid, *visits, view.visited, interleave_k=timed.changes_k_cheaply
        )
        experts = recall_experts(timed.count_experts, journal)
        seconds = measure_tree_steps(
            timed.measure_trees, shapes, grid.batches, *visits, view.visited_trees
        )
    settings |= {"rounds": options.rounds, "threshold": options.threshold}
    settings["fitted"] = [asdict(point) for point in sorted(grid.fitted)]
    is_padded = target.device.type == "cuda"
    return tune_results(
        grid,
        costs,
        known,
        Shape(known.lengths(), config.is_parallel, timed.batch_rows, is_padded, experts),
        draft=plan.head.source,
        threshold=options.threshold,
        provenance=provenance,
        settings=settings,
        trees=lambda chains: tuned_trees(shapes, acceptances, seconds, chains, options.threshold),
    )


def _grid(
    batches: tuple[int, ...],
    ks: tuple[int, ...],
    acceptance: AcceptanceByK | None,
    trained_depth: int | None,
) -> Grid:
    """Return the batch sizes at every K, by default from 1 to the head's largest."""
    from peagle.evaluation.tuning.tune import Grid

    most = acceptance.most if acceptance is not None else trained_depth
    ks = ks or tuple(range(1, min(_MAX_K if most is None else most, _MAX_K) + 1))
    if acceptance is not None:
        acceptance.rates(ks[-1])  # refuses a K that is not known, before anything runs
    return Grid(batches, ks)


_MAX_COLUMNS = 10
NOISY_SPREAD = 0.15


class TuneView:
    """Print the progress of the measurements to standard error."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._line = ProgressLine("cost")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._line.print(text)

    def say_of(self, what: str) -> Callable[[int], None]:
        """Return a function that reports a finished acceptance; `what` formats its number."""
        return lambda number: self.say(f"acceptance {what.format(number)} is there")

    def visited(self, cell: CostPoint, was_there: bool) -> None:
        """Count a visit to a batch size and K."""
        self._visited(f"batch {cell.batch}, K = {cell.k}", was_there)

    def visited_trees(self, batch: int, shape: CandidateTrees, was_there: bool) -> None:
        """Count a visit to a batch size with candidate trees."""
        self._visited(f"batch {batch}, trees of {shape.max_nodes} nodes", was_there)

    def _visited(self, text: str, was_there: bool) -> None:
        self._done += 1
        text += ", measured before" * was_there
        line = f"cost {self._done}/{self._total}  {text}"
        self._line.update(self._done, self._total, text, line=line)

    def close(self) -> None:
        """Remove the progress line."""
        self._line.__exit__()


def tuning_text(result: TuneResults) -> str:
    """Return tune.json as text: speeds, break-even, the check and the schedule."""
    settings, told = result.settings, result.provenance
    title = f"{told.target} with {settings['draft']}, {told.dtype}, "
    title += f"{told.environment['device']}, context {settings['context']}, "
    title += f"temperature {settings['temperature']:g}"
    return "\n".join(
        [
            bright(printable(title), sys.stdout),
            "",
            *_acceptance(result.acceptance),
            "",
            *_speeds(result),
            *_check(result),
            *_experts(result.costs.experts),
            "",
            *_break_even(result),
            "",
            *_schedule(result),
            *_trees(result),
        ]
    )


def _acceptance(acceptance: TunedAcceptance) -> list[str]:
    lengths = acceptance.acceptance_length
    measured = ", ".join(map(str, acceptance.measured_k))
    where = "measured here" if acceptance.source == "measured" else "of acceptance.json"
    return [
        f"Acceptance length by K ({where} at K = {measured}, else interpolated)",
        *_table(
            "K", {"": [f"{length:.2f}" for length in lengths.values()]}, list(map(str, lengths))
        ),
    ]


def _speeds(result: TuneResults) -> list[str]:
    speeds = result.predictions
    batches, ks = _axes(speeds)
    at = {(one.batch, one.k): one for one in speeds}
    rows = {}
    for batch in batches:
        measured = {k: (at[batch, k].measured_tokens_per_s or 0.0) for k in ks}
        chosen = k_at(result.schedule, batch)
        rows[str(batch)] = [f"{measured[k]:,.0f}{'*' if k == chosen else ' '}" for k in ks]
    heading = "Tokens/s by batch size and K, from measured steps (* K of the schedule below)"
    return [heading, *_table("batch", rows, [f"{k} " for k in ks])]


def _check(result: TuneResults) -> list[str]:
    check, spread = result.check, result.costs.spread or 0.0
    lines = ["No cell was left to check the predictions on."]
    if check.num_unfitted:
        fitted = len(result.predictions) - check.num_unfitted
        lines = [
            f"Predicted from {fitted} of these cells, {check.within_10_percent} of the other "
            f"{check.num_unfitted} are within 10% ({check.share:.0%}), the worst is off by "
            f"{check.worst:.0%}."
        ]
    if spread > NOISY_SPREAD:
        lines.append(
            f"The machine was busy: a usual visit took {spread:.0%} longer than the fastest. Raise "
            "--rounds."
        )
    return lines


def _experts(experts: TunedExperts | None) -> list[str]:
    """Return the distinct experts that steps of a mixture touch; no line for a dense target."""
    if experts is None:
        return []
    at = {(batch, k): f"{found:.0f}/{even:.0f}" for batch, k, found, even in experts.touched}
    ks = sorted({k for _, k in at})
    rows = {str(batch): [at[batch, k] for k in ks] for batch in sorted({b for b, _ in at})}
    heading = "Distinct experts that a step touches in a layer, measured/under even routing, of "
    return ["", f"{heading}{experts.num_experts}", *_table("batch", rows, list(map(str, ks)))]


def _break_even(result: TuneResults) -> list[str]:
    batches, ks = _axes(result.break_even)
    at = {(one.batch, one.k): one.acceptance_length for one in result.break_even}
    rows = {str(batch): [f"{at[batch, k]:.2f}" for k in ks] for batch in batches}
    heading = "Acceptance length from which drafting is faster than not drafting"
    return [heading, *_table("batch", rows, [str(k) for k in ks])]


def _schedule(result: TuneResults) -> list[str]:
    lines = [f"K by batch size (K changes where that gains more than {result.threshold:.0%})"]
    for first, last, k in result.schedule:
        sizes = str(first) if first == last else f"{first} to {last}"
        lines.append(f"  {sizes:>9}  K = {k}{'' if k else ' (no drafts)'}")
    configs = result.speculative_config
    ours, theirs = configs["peagle"], configs["vllm"]
    if ours is None or theirs is None:
        return [*lines, "", "Drafts do not pay here at any batch size: serve without a head."]
    lines += ["", "For --speculative-config of peagle serve:", f"  '{_json(ours)}'"]
    lines += ["The same for vLLM:", f"  '{_json(theirs)}'"]
    if len(result.schedule) == 1 or "parallel_drafting" not in theirs:
        return lines
    lines.append(
        "vLLM needs peagle's plugin for it (peagle serve --engine vllm). Without, the best K:"
    )
    single = configs["vllm_single_k"]
    return [*lines, "  0: leave the head out" if single is None else f"  '{_json(single)}'"]


def _trees(result: TuneResults) -> list[str]:
    """Return the speeds of candidate trees, and where they win; no line without trees."""
    if not result.trees:
        return []
    rows: dict[str, list[str]] = {"length": []}
    for one in result.trees:
        rows["length"].append(f"{one.acceptance_length:.2f} ")
        for batch, speed in one.tokens_per_s:
            mark = "*" if batch in one.wins_at else " "
            rows.setdefault(str(batch), []).append(f"{speed:,.0f}{mark}")
    heading = "Candidate trees by nodes: acceptance length, and tokens/s by batch size "
    heading += f"(* over {result.threshold:.0%} above every K)"
    columns = [f"{one.parallel_drafting_spec['max_nodes']} " for one in result.trees]
    lines = ["", heading, *_table("batch", rows, columns)]
    for one, source, shares in by_source(result.trees):
        nodes = one.parallel_drafting_spec["max_nodes"]
        lines.append(f"Accepted tokens of {nodes} nodes by position, drafted by the {source}")
        positions = [str(i) for i in range(1, len(shares) + 1)]
        lines += _table("", {"": [f"{share:.2f}" for share in shares]}, positions)
    config = result.speculative_config.get("peagle_trees")
    if config is None:
        return [*lines, "Chains or no drafts are as fast at every batch size."]
    sizes = sorted(batch for one in result.trees for batch in one.wins_at)
    where = f"Trees win at batch sizes {', '.join(map(str, sizes))}"
    lines.append(f"{where}. For --speculative-config of peagle serve at such loads:")
    return [*lines, f"  '{_json(config)}'"]


def _json(config: Mapping[str, Any]) -> str:
    return printable(json.dumps(config))


def _axes(cells: Sequence[Prediction | BreakEven]) -> tuple[list[int], list[int]]:
    return sorted({one.batch for one in cells}), sorted({one.k for one in cells})


def _table(corner: str, rows: Mapping[str, Sequence[str]], columns: Sequence[str]) -> list[str]:
    """Return the lines of a table, split into pieces of `_MAX_COLUMNS`."""
    lines = []
    for start in range(0, len(columns), _MAX_COLUMNS):
        part = slice(start, start + _MAX_COLUMNS)
        lines.append(f"  {corner:>6}" + "".join(f"{one:>9}" for one in columns[part]))
        lines += [
            f"  {name:>6}" + "".join(f"{value:>9}" for value in values[part])
            for name, values in rows.items()
        ]
    return lines
