"""The load that one instance carries, from a measured curve of speed over concurrency.

The curve is throughput.json of `peagle bench --output` or tune.json of `peagle tune --output`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peagle.errors import UserError
from peagle.results import (
    Cell,
    Percentiles,
    ThroughputResults,
    TuneResults,
    parse_document,
    read_json_object,
)

# The share of an instance's capacity that autoscaling aims at: a new instance takes about as long
# to start as a rush takes to come, and target tracking holds an average, which some exceed.
TARGET_LOAD = 0.7
# More requests at once must bring this share of the speed of that many more instances.
MIN_KNEE_GAIN = 0.25
_PLAIN = "plain"  # bench's method without drafts


@dataclass(frozen=True, slots=True)
class Bounds:
    """The longest times that a user accepts, in milliseconds; None for no bound."""

    itl_ms: float | None = None
    ttft_ms: float | None = None


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Speed and latency at one concurrency; None is unknown."""

    concurrency: int
    tokens_per_s: float  # of all requests
    requests_per_s: float | None = None
    itl_ms: float | None = None
    ttft_ms: float | None = None
    speed_up: float | None = None  # of drafts, over decoding without them
    meets: bool | None = None  # whether it kept the measurement's own objective


@dataclass(frozen=True, slots=True)
class Curve:
    """Points by ascending concurrency; `what` and `latency` name the measurement."""

    points: tuple[CurvePoint, ...]
    what: str
    latency: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """The load that one instance carries, why it carries no more, and the name of the curve."""

    concurrency: int
    requests_per_s: float | None
    why: str
    what: str

    def target(self, metric: str) -> float:
        """Return the value of a metric that autoscaling keeps, with head room.

        The metric is "concurrency", requests at once on an instance, or "invocations", requests per
        minute and instance; for the latter, a curve without requests per second is a UserError.
        """
        if metric == "concurrency":
            return max(1.0, float(int(TARGET_LOAD * self.concurrency)))
        if self.requests_per_s is None:
            raise UserError(
                "tune.json does not say how many requests a second an instance answers: their "
                "length decides that. Use throughput.json of `peagle bench --output`, or "
                "--metric concurrency."
            )
        return max(1.0, round(TARGET_LOAD * 60 * self.requests_per_s, 1))


def capacity(curves: Sequence[Curve], bounds: Bounds) -> Capacity:
    """Return the largest concurrency up to which all rules hold; of several curves the smallest.

    From the smallest concurrency measured upwards, each must
    1. keep the bounds, or without any the objective of the measurement;
    2. be faster with drafts than without (break-even), if both were measured: beyond it, drafts
       cost speed, and another instance serves better;
    3. still gain: going from c to c' requests must bring at least MIN_KNEE_GAIN of the speed that
       c' / c times as many instances would. Beyond that knee requests only wait for each other.
    The first concurrency that fails ends the curve; nothing is assumed between measured points.

    Raises:
        UserError: not even the smallest concurrency holds, or a bound needs times that were not
            measured.
    """
    return min((_capacity_of(curve, bounds) for curve in curves), key=lambda one: one.concurrency)


def _capacity_of(curve: Curve, bounds: Bounds) -> Capacity:
    best, why = curve.points[0], ""
    if problem := _problem(best, bounds, curve):
        raise UserError(
            f"{curve.what}: at the smallest concurrency measured, {best.concurrency}, {problem}. "
            "More instances do not help there: loosen the bound, take a faster instance type, or "
            "measure at a smaller concurrency."
        )
    for point in curve.points[1:]:
        if why := _problem(point, bounds, curve) or _knee(best, point):
            why = f"at {point.concurrency} {why}"
            break
        best = point
    why = why or "it is the largest measured"
    return Capacity(best.concurrency, best.requests_per_s, why, curve.what)


def _problem(point: CurvePoint, bounds: Bounds, curve: Curve) -> str:
    has_bounds = bounds.itl_ms is not None or bounds.ttft_ms is not None
    for name, most, found in (
        ("between tokens", bounds.itl_ms, point.itl_ms),
        ("to the first token", bounds.ttft_ms, point.ttft_ms),
    ):
        if most is None:
            continue
        if found is None:
            raise UserError(
                f"{curve.what} has no times {name}; a bound on them needs throughput.json of "
                "`peagle bench --output`."
            )
        if found > most:
            return f"the time {name} is {found:.1f} ms ({curve.latency}), above {most:g} ms"
    if not has_bounds and point.meets is False:
        return "the latency objective of the measurement is missed"
    if point.speed_up is not None and point.speed_up < 1:
        return f"drafts no longer pay: {point.speed_up:.2f} times the speed without them"
    return ""


def _knee(before: CurvePoint, point: CurvePoint) -> str:
    more = point.concurrency / before.concurrency - 1
    gained = point.tokens_per_s / before.tokens_per_s - 1
    if gained >= MIN_KNEE_GAIN * more:
        return ""
    return f"{more:.0%} more requests bring only {gained:+.0%} tokens/s"


# ---- files ----


def read_curves(
    path: Path, *, k: int | None, method: str | None = None, percentile: int = 90
) -> list[Curve]:
    """Return the curves of a file that were measured as the endpoint drafts.

    Args:
        path: throughput.json or tune.json.
        k: the endpoint's K, 0 without drafts; None if unknown: the file must then have a single K.
        method: name of a method in throughput.json; None if only one method drafts with this K.
        percentile: percentile of latencies: 50, 90 or 99.

    Raises:
        UserError: the file is not readable, is neither, or has no such measurement.
    """
    path = path.expanduser()
    data = read_json_object(path)
    if data.get("cells"):
        results = parse_document(path, data, ThroughputResults)
        curves = _of_throughput(path, results.cells, k, method, percentile)
    elif data.get("predictions"):
        curves = _of_tune(path, parse_document(path, data, TuneResults), k)
    else:
        raise UserError(
            f"{path} holds no cells and no predictions: it is neither throughput.json of `peagle "
            "bench --output` nor tune.json of `peagle tune --output`."
        )
    for curve in curves:
        if any(not point.tokens_per_s for point in curve.points):
            raise UserError(f"{curve.what}: a speed is 0 tokens/s. Measure it again.")
    return curves


def _of_throughput(
    path: Path, every: Sequence[Cell], k: int | None, method: str | None, percentile: int
) -> list[Curve]:
    arms = sorted({(cell.method, cell.k or 0) for cell in every})
    fitting = _fitting(arms, k, method)
    if len(fitting) != 1:
        have = ", ".join(f"{name} with K = {arm_k}" for name, arm_k in arms)
        what = "nothing" if not fitting else "more than one method"
        raise UserError(
            f"{path} has {what} that was measured as the endpoint drafts"
            f"{'' if k is None else f' (K = {k})'}; it has: {have}. Choose with --method and -k, "
            "or measure it with bench."
        )
    name, arm_k = fitting[0]
    cells = [cell for cell in every if (cell.method, cell.k or 0) == (name, arm_k)]
    curves = []
    for key in sorted({(cell.set, cell.engine) for cell in cells}):
        points = [_point(c, percentile) for c in cells if (c.set, c.engine) == key]
        points.sort(key=lambda point: point.concurrency)
        what = f"{path}, {name} with K = {arm_k} on {key[0] or 'its prompts'}"
        curves.append(Curve(tuple(points), what, f"P{percentile}"))
    return curves


def _fitting(
    arms: Sequence[tuple[str, int]], k: int | None, method: str | None
) -> list[tuple[str, int]]:
    named = [arm for arm in arms if method is None or arm[0] == method]
    fitting = [arm for arm in named if (arm[1] == k if k is not None else arm[1])]
    # A server that does not tell its K has K = 0 in the file: only its name chooses it.
    return fitting or [arm for arm in named if method not in (None, _PLAIN) and not arm[1]]


def _point(cell: Cell, percentile: int) -> CurvePoint:
    def milliseconds(seconds: Percentiles) -> float | None:
        value = getattr(seconds, f"p{percentile}")
        return None if value is None else 1000 * value

    return CurvePoint(
        cell.concurrency,
        cell.median.output_tokens_per_s,
        cell.median.requests_per_s,
        milliseconds(cell.median.itl_s),
        milliseconds(cell.median.ttft_s),
        None if cell.method == _PLAIN else cell.speed_up_over_plain,
        cell.meets_objective,
    )


def _of_tune(path: Path, results: TuneResults, k: int | None) -> list[Curve]:
    """Return the curve of mean latencies: each of b requests gets tokens/s over b."""
    chosen = results.best_single_k if k is None else k
    speeds = {
        (one.batch, one.k): one.measured_tokens_per_s or one.predicted_tokens_per_s
        for one in results.predictions
    }
    points = [
        CurvePoint(
            batch,
            speed,
            itl_ms=1000 * batch / speed if speed else None,
            speed_up=speed / plain if chosen and (plain := speeds.get((batch, 0))) else None,
        )
        for (batch, at_k), speed in sorted(speeds.items())
        if at_k == chosen
    ]
    if not points:
        ks = ", ".join(str(one) for one in sorted({at_k for _, at_k in speeds}))
        raise UserError(f"{path} has no speeds at K = {chosen}; it has K: {ks}. Choose with -k.")
    return [Curve(tuple(points), f"{path}, K = {chosen}", "mean")]
