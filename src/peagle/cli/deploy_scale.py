"""`peagle deploy sagemaker scale`: how many instances an endpoint has."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.cli.deploy_errors import leftovers_told
from peagle.cli.deploy_invoke import EndpointName, Region
from peagle.cli.options import Format, OutputFormat
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.deploy.calls import Call
    from peagle.deploy.curve import Bounds
    from peagle.deploy.deployment import Autoscaling, Current
    from peagle.deploy.plan import Step

SCALE_EXAMPLES = """
Between 1 and 4 instances, 16 requests at once on each:
  peagle deploy sagemaker scale qwen3 --min 1 --max 4 --target 16

As many requests as a measured curve says, with at most 25 ms between tokens (P90):
  peagle deploy sagemaker scale qwen3 --max 4 --from bench/throughput.json --max-itl-ms 25
  peagle deploy sagemaker scale qwen3 --max 4 --from tuned/tune.json

The same calls, printed and not made; no scaling any more; three instances:
  peagle deploy sagemaker scale qwen3 --max 4 --target 16 --print-calls
  peagle deploy sagemaker scale qwen3 --off
  peagle deploy sagemaker scale qwen3 --instances 3
"""
_WAIT_S = 3600


class ScalingMetric(StrEnum):
    """What an instance should have so much of."""

    CONCURRENCY = "concurrency"
    INVOCATIONS = "invocations"


_UNITS = {
    ScalingMetric.CONCURRENCY: "requests at once",
    ScalingMetric.INVOCATIONS: "requests a minute",
}


def scale(
    endpoint: EndpointName,
    least: Annotated[
        int | None, typer.Option("--min", help="Fewest instances.", show_default="1")
    ] = None,
    most: Annotated[int | None, typer.Option("--max", help="Most instances.")] = None,
    target: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Of the metric, on one instance.")
    ] = None,
    metric: Annotated[
        ScalingMetric,
        typer.Option(help="Requests at once, or requests a minute, on one instance."),
    ] = ScalingMetric.CONCURRENCY,
    curve: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Target of a measured curve: throughput.json of `peagle bench`, or tune.json of "
            "`peagle tune`.",
        ),
    ] = None,
    max_itl_ms: Annotated[
        float | None, typer.Option(min=0.0, help="With --from: most time between tokens.")
    ] = None,
    max_ttft_ms: Annotated[
        float | None, typer.Option(min=0.0, help="With --from: most time to the first token.")
    ] = None,
    percentile: Annotated[
        int, typer.Option(help="With --from: of these times; 50, 90 or 99.")
    ] = 90,
    method: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --from: of throughput.json's methods.")
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("-k", help="With --from: K of the curve.", show_default="the endpoint's"),
    ] = None,
    off: Annotated[
        bool, typer.Option("--off", help="End automatic scaling; the instances stay.")
    ] = False,
    instances: Annotated[
        int | None, typer.Option(help="Have so many, without automatic scaling.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="With --instances: until they serve.")
    ] = True,
    print_calls: Annotated[
        bool, typer.Option("--print-calls", help="Print the calls as JSON, and make none of them.")
    ] = False,
    variant: Annotated[
        str | None, typer.Option(help="Production variant.", show_default="the only one")
    ] = None,
    region: Region = None,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Let an endpoint scale by its load, or give it a number of instances.

    The target of a measured curve is 70% of the largest concurrency at which latency holds, drafts
    pay and more requests still bring more speed; docs/operations.md says why.
    """
    _check(off=off, most=most, least=least, instances=instances, target=target, curve=curve)
    if percentile not in (50, 90, 99):
        raise UserError(f"--percentile is {percentile}; expected 50, 90 or 99.")
    from peagle.deploy.aws import Clients
    from peagle.deploy.curve import Bounds
    from peagle.deploy.deployment import Autoscaling
    from peagle.deploy.endpoints import describe
    from peagle.deploy.scaling import METRICS, scaling_calls

    clients = Clients(region)
    current = describe(clients, endpoint)
    name, count = _variant(current, variant)
    wanted: Autoscaling | None = None
    if off:
        steps, done = _off(current, name), "no longer scaled automatically"
    elif instances is not None:
        steps = _count(current, name, instances, count, wait=wait)
        done = f"{instances} instance{'s' * (instances != 1)} of {name}"
    else:
        assert most is not None
        if curve is not None:
            bounds = Bounds(max_itl_ms, max_ttft_ms)
            target = _target(current, curve, k, method, percentile, bounds, metric)
        assert target is not None
        wanted = Autoscaling(1 if least is None else least, most, target, METRICS[metric])
        steps = scaling_calls(endpoint, name, wanted, current.autoscaling, current.scaling_policies)
        done = f"{_said(wanted)} at {target:g} {_UNITS[metric]} on each"
    if print_calls:
        print(json.dumps([_json(step) for step in steps], indent=2))
        return
    from peagle.deploy.apply import apply

    with leftovers_told(output_format):
        apply(steps, clients)
    if output_format is OutputFormat.JSON:
        scaled = None if wanted is None else asdict(wanted)
        told = {"endpoint": endpoint, "variant": name, "autoscaling": scaled}
        print(json.dumps(told | {"instances": instances}))
    else:
        print(f"{endpoint}: {done}")


def _check(
    *,
    off: bool,
    most: int | None,
    least: int | None,
    instances: int | None,
    target: float | None,
    curve: Path | None,
) -> None:
    if sum((off, instances is not None, most is not None)) != 1:
        raise UserError("Give --max (with --target or --from), --off or --instances, one of them.")
    if most is None and any(value is not None for value in (least, target, curve)):
        raise UserError("--min, --target and --from go with --max; leave them out.")
    if most is not None and (target is None) == (curve is None):
        have = "neither was" if target is None else "both were"
        raise UserError(f"Give --target or --from, one of them; {have} given.")


def _said(wanted: Autoscaling) -> str:
    return f"{wanted.min_instances} to {wanted.max_instances} instances"


def _json(step: Step) -> object:
    from peagle.deploy.plan import shown

    return shown(step)


def _variant(current: Current, variant: str | None) -> tuple[str, int | None]:
    """Name of a variant, and the instances that are wanted of it now."""
    from peagle.deploy.status import variants

    found = {one["name"]: one["wanted"] for one in variants(current)}
    if variant is None and len(found) == 1:
        return next(iter(found.items()))
    if variant is not None and variant in found:
        return variant, found[variant]
    raise UserError(
        f"The endpoint {current.endpoint_name!r} has the variants: {', '.join(found) or 'none'}. "
        "Choose one with --variant."
    )


def _off(current: Current, variant: str) -> list[Call]:
    from peagle.deploy.scaling import unscale_calls

    if current.autoscaling is None:
        raise UserError(f"The endpoint {current.endpoint_name!r} is not scaled automatically.")
    return unscale_calls(current.endpoint_name, variant, current.scaling_policies)


def _count(
    current: Current, variant: str, instances: int, now: int | None, *, wait: bool
) -> list[Step]:
    from peagle.deploy.endpoints import require_updatable
    from peagle.deploy.plan import Wait
    from peagle.deploy.scaling import count_call

    endpoint = current.endpoint_name
    if current.autoscaling is not None:
        raise UserError(
            f"The endpoint {endpoint!r} is scaled automatically ({_said(current.autoscaling)}) and "
            "would change the number again: set bounds with --min and --max, or end that with "
            "--off first."
        )
    require_updatable(current)
    call = count_call(endpoint, variant, instances, now)
    return [call, Wait(endpoint, _WAIT_S)] if wait else [call]


def _target(
    current: Current,
    path: Path,
    k: int | None,
    method: str | None,
    percentile: int,
    bounds: Bounds,
    metric: ScalingMetric,
) -> float:
    """Of a measured curve; why it is that much goes to standard error."""
    from peagle.deploy.curve import HEADROOM, capacity, read_curves
    from peagle.deploy.status import depth_of

    drafts = depth_of(current) if k is None else k
    found = capacity(read_curves(path, k=drafts, method=method, percentile=percentile), bounds)
    target = found.target(metric.value)
    print(
        f"{found.what}: one instance carries {found.concurrency} requests at once ({found.why}); "
        f"the target is {HEADROOM:.0%} of that, {target:g} {_UNITS[metric]}",
        file=sys.stderr,
    )
    return target
