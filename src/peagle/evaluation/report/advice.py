"""Advice on the results, in sentences: the same in text output, in JSON and in the report.

Nothing is recommended on a difference that the measurements do not show: where intervals or the
ranges of repeats overlap, the sentence says so and names the simpler choice.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

from peagle.evaluation.decoding_methods import NGRAM, PLAIN
from peagle.evaluation.report.files import Results
from peagle.evaluation.report.series import Cast, best_cells, series_of, sets_of
from peagle.evaluation.report.text import depth, figure, interval, listed, method_name, set_name
from peagle.evaluation.throughput import tied_fastest
from peagle.results import Cell, Comparison, Entry, ThroughputResults, TrainingRecord

_NO_HEAD = "prompt lookup, which needs no head (--method ngram)"


def advice_of(results: Results) -> list[str]:
    """Return the advice of eval and of bench, as far as there are results of them."""
    found = []
    if file := results.acceptance:
        found.append(acceptance_advice(file.entries, file.comparisons))
    found += [throughput_advice(results.throughput)] if results.throughput else []
    return [one for one in found if one]


# ---- acceptance ----


def acceptance_advice(entries: Sequence[Entry], comparisons: Sequence[Comparison]) -> str:
    """Return advice on the first head of `peagle eval`, at the lowest temperature and largest K."""
    heads = [one for one in entries if one.pooled.num_drafts and one.method != NGRAM]
    if not heads:
        return "No head drafted anything here, so that none is judged."
    own = [entry for entry in heads if entry.method == heads[0].method]
    coldest = min(entry.temperature for entry in own)
    entry = max((e for e in own if e.temperature == coldest), key=lambda e: e.depth)
    name = method_name(entry.method)
    said = _little({name: entry.training})
    key = entry.method, entry.k, entry.temperature, entry.engine
    for one in comparisons:
        if (one.method, one.k, one.temperature, one.engine) == key:
            said.append(_compared(one))
    if not said:
        said.append(
            f"{name} has an acceptance length of {figure(entry.pooled.length)} ({depth(entry.k)}), "
            "and was compared with nothing: peagle bench tells what it is worth in speed."
        )
    return " ".join(said)


def _little(training: dict[str, TrainingRecord | None]) -> list[str]:
    """Return a sentence on each head that was trained too little to be judged."""
    return [
        f"{name} was trained too little to be judged, for {record}: train it further."
        for name, record in training.items()
        if record is not None and record.is_little
    ]


def _compared(one: Comparison) -> str:
    """Say whether a head is better or worse than another method, or that no difference shows."""
    lookup = one.over == NGRAM
    name, other = method_name(one.method), "prompt lookup" if lookup else method_name(one.over)
    what = "tokens a step" if one.measure == "tokens_per_step" else "acceptance length"
    if one.ci is None:
        return f"{name} and {other} were compared on too few requests for an interval."
    shown = (
        f"({one.difference:+.2f} {what}, 95% interval {interval(one.ci)}, paired over "
        f"{one.num_requests} requests)"
    )
    if one.ci[0] > 0:
        return f"{name} is better than {other} {shown}."
    if one.ci[1] < 0:
        do = f"use {_NO_HEAD}, on such prompts" if lookup else f"keep {other}"
        return f"{name} is worse than {other} {shown}: {do}."
    do = f"take {_NO_HEAD}" if lookup else "take the one that is cheaper to run or already in use"
    return f"No difference between {name} and {other} is shown {shown}: {do}."


# ---- throughput ----


def throughput_advice(file: ThroughputResults) -> str:
    """Return the advice of `peagle bench`: the simplest of the fastest methods at each load.

    Each method takes part with its best K. Of the methods that tie with the fastest
    (`tied_fastest`) the simplest is advised: plain decoding, then prompt lookup, then a head.
    """
    if not file.cells:
        return ""
    said = _little({method_name(name): record for name, record in file.training.items()})
    cast = Cast.of(Results(throughput=file))
    name = sets_of(file.cells)[0]
    by_key = {key: best_cells(file.cells, key, name) for key in cast.among(file.cells)}
    every = [cell for cells in by_key.values() for cell in cells]
    loads = sorted({cell.concurrency for cell in every if file.is_sound(cell)})
    said += [f"No speed here is a result: {doubt}. Measure anew." for doubt in file.doubts]
    if unsound := sorted({cell.concurrency for cell in every} - {*loads}):
        if not file.doubts:
            shown = listed([str(load) for load in unsound])
            said.append(f"At {shown} together nothing is advised: see what is doubtful there.")
        if not loads:
            return " ".join(said)
    choices = []
    for load in loads:
        here = [cell for cells in by_key.values() for cell in cells if cell.concurrency == load]
        choices.append((load, *_choice(here, file.cells, cast)))
    parts = []
    for (chosen, tied), group in groupby(choices, key=lambda one: one[1:]):
        at = [load for load, *_ in group]
        where = f"{at[0]}" if len(at) == 1 else f"{at[0]} to {at[-1]}"
        ties = f" ({listed(list(tied))} {'ties' if len(tied) == 1 else 'tie'})" if tied else ""
        parts.append(f"{chosen} at {where} together{ties}")
    said.append(f"On {set_name(name)} take {'; '.join(parts)}.")
    if all(len(cell.repeats) < 2 for cell in file.cells):
        said.append("Every cell was run once, so that ties cannot be told: raise --repeats.")
    return " ".join(said)


def _choice(here: Sequence[Cell], cells: Iterable[Cell], cast: Cast) -> tuple[str, tuple[str, ...]]:
    """Return the best method and K at one load, and the methods and K that tie with it."""
    order = {PLAIN: 0, NGRAM: 1}
    chosen, *others = sorted(
        tied_fastest(here),
        key=lambda cell: (order.get(cell.method, 2), series_of(cell) != cast.hero),
    )
    load = chosen.method, chosen.engine, chosen.set, chosen.concurrency
    own = [c for c in cells if c.k and (c.method, c.engine, c.set, c.concurrency) == load]
    larger = sorted(c.k for c in tied_fastest(own) if c.k and c.k != chosen.k) if own else []
    return _words(chosen, cast), (*map(depth, larger), *(_words(cell, cast) for cell in others))


def _words(cell: Cell, cast: Cast) -> str:
    name = cast.name_of(cell)
    name = name[0].lower() + name[1:] if cell.method in (PLAIN, NGRAM) else name
    return f"{name} with {depth(cell.k)}" if cell.k else name
