"""`peagle deploy sagemaker scale`: the number of an endpoint's instances."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from peagle.cli.deploy_options import EndpointName, Region, leftovers_printed, new_stamp
from peagle.cli.groups import Format, OutputFormat
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.deploy.aws import Clients
    from peagle.deploy.curve import Bounds
    from peagle.deploy.deployment import Autoscaling
    from peagle.deploy.status import EndpointState

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
_POLL_S = 15


class ScalingMetric(StrEnum):
    """The load of an instance that automatic scaling keeps at its target."""

    CONCURRENCY = "concurrency"
    INVOCATIONS = "invocations"


_UNITS = {
    ScalingMetric.CONCURRENCY: "requests at once",
    ScalingMetric.INVOCATIONS: "requests a minute",
}


def scale(
    endpoint: EndpointName,
    least: int | None = typer.Option(None, "--min", help="Fewest instances.", show_default="1"),
    most: int | None = typer.Option(None, "--max", help="Most instances."),
    target: float | None = typer.Option(
        None, metavar="NUMBER", help="Value of the metric that one instance should have."
    ),
    metric: ScalingMetric = typer.Option(
        ScalingMetric.CONCURRENCY, help="Requests at once, or requests a minute, on one instance."
    ),
    curve: Path | None = typer.Option(
        None,
        "--from",
        metavar="FILE",
        help="Target of a measured curve: throughput.json of `peagle bench`, or tune.json of "
        "`peagle tune`.",
    ),
    max_itl_ms: float | None = typer.Option(
        None, min=0.0, help="With --from: longest time between tokens."
    ),
    max_ttft_ms: float | None = typer.Option(
        None, min=0.0, help="With --from: longest time to the first token."
    ),
    percentile: int = typer.Option(
        90, help="With --from: percentile of these times: 50, 90 or 99."
    ),
    method: str | None = typer.Option(
        None, metavar="NAME", help="With --from: method of throughput.json."
    ),
    k: int | None = typer.Option(
        None, "-k", help="With --from: K of the curve.", show_default="the endpoint's"
    ),
    off: bool = typer.Option(False, "--off", help="End automatic scaling; the instances stay."),
    instances: int | None = typer.Option(
        None, help="Fixed number of instances, without automatic scaling."
    ),
    wait: bool = typer.Option(
        True, "--wait/--no-wait", help="With --instances: wait until they serve."
    ),
    print_calls: bool = typer.Option(
        False, "--print-calls", help="Print the calls as JSON, and make none of them."
    ),
    variant: str | None = typer.Option(
        None, help="Production variant.", show_default="the only one"
    ),
    region: Region = None,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Let an endpoint scale by its load, or give it a number of instances.

    The target of a measured curve is 70% of the largest concurrency at which latency holds, drafts
    pay and more requests still bring more speed; docs/operations.md says why.
    """
    if sum((off, instances is not None, most is not None)) != 1:
        raise UserError("Give --max (with --target or --from), --off or --instances, one of them.")
    if most is None and any(value is not None for value in (least, target, curve)):
        raise UserError("--min, --target and --from go with --max; leave them out.")
    if most is not None and (target is None) == (curve is None):
        have = "neither was" if target is None else "both were"
        raise UserError(f"Give --target or --from, one of them; {have} given.")
    if percentile not in (50, 90, 99):
        raise UserError(f"--percentile is {percentile}; expected 50, 90 or 99.")
    from peagle.deploy.aws import Clients
    from peagle.deploy.curve import Bounds
    from peagle.deploy.deployment import Autoscaling
    from peagle.deploy.request import check_autoscaling
    from peagle.deploy.status import describe
    from peagle.deploy.template import METRICS

    clients = Clients(region)
    current = describe(clients, endpoint)
    name = _variant(current, variant)
    if instances is not None:
        call = _count_call(current, name, instances)
        if print_calls:
            print(json.dumps([call], indent=2))
            return
        _set_count(clients, call, wait=wait)
        _print_result(endpoint, name, None, instances, output_format)
        return
    wanted: Autoscaling | None = None
    if not off:
        assert most is not None
        if curve is not None:
            bounds = Bounds(max_itl_ms, max_ttft_ms)
            target = _target(current, curve, k, method, percentile, bounds, metric)
        assert target is not None
        least = 1 if least is None else least
        wanted = check_autoscaling(Autoscaling(least, most, target, METRICS[metric]))
    elif current.autoscaling is None:
        raise UserError(f"The endpoint {endpoint!r} is not scaled automatically.")
    _change_scaling(clients, endpoint, wanted, output_format, print_calls=print_calls)
    if not print_calls:
        _print_result(endpoint, name, wanted, None, output_format)


def _change_scaling(
    clients: Clients,
    endpoint: str,
    wanted: Autoscaling | None,
    output_format: OutputFormat,
    *,
    print_calls: bool,
) -> None:
    """Change the scaling of an endpoint's stack, or print the calls that would change it."""
    from peagle.deploy import stack
    from peagle.deploy.template import deployment_of, with_autoscaling

    stack.require_updatable(stack.stack_of(clients, endpoint), endpoint, clients.region)
    present = stack.template_of(clients, endpoint)
    base = deployment_of(present, new_stamp())
    changed = with_autoscaling(present, wanted)
    if print_calls:
        calls = stack.planned_calls(base, [stack.change_set_request(base, changed)])
        print(json.dumps(calls, indent=2))
        return
    with leftovers_printed(output_format):
        stack.rescale(clients, base, changed, stack.to_stderr)


def _print_result(
    endpoint: str,
    variant: str,
    wanted: Autoscaling | None,
    instances: int | None,
    output_format: OutputFormat,
) -> None:
    from peagle.deploy.template import METRICS

    if output_format is OutputFormat.JSON:
        scaled = None if wanted is None else asdict(wanted)
        result = {"endpoint": endpoint, "variant": variant, "autoscaling": scaled}
        print(json.dumps(result | {"instances": instances}))
    elif wanted is not None:
        metric = next(name for name, full in METRICS.items() if full == wanted.metric)
        unit = _UNITS[ScalingMetric(metric)]
        print(f"{endpoint}: {_bounds(wanted)} at {wanted.target_value:g} {unit} on each")
    elif instances is not None:
        print(f"{endpoint}: {instances} instance{'s' * (instances != 1)} of {variant}")
    else:
        print(f"{endpoint}: no longer scaled automatically")


def _bounds(scaling: Autoscaling) -> str:
    return f"{scaling.min_instances} to {scaling.max_instances} instances"


def _variant(current: EndpointState, variant: str | None) -> str:
    """Return the name of the variant to scale."""
    from peagle.deploy.status import variants

    found = [one["name"] for one in variants(current)]
    if variant is None and len(found) == 1:
        return found[0]
    if variant is not None and variant in found:
        return variant
    raise UserError(
        f"The endpoint {current.endpoint_name!r} has the variants: {', '.join(found) or 'none'}. "
        "Choose one with --variant."
    )


def _count_call(current: EndpointState, variant: str, instances: int) -> dict[str, Any]:
    """Return the call that sets a variant's number of instances; updates of the stack keep it."""
    from peagle.deploy.stack import planned_call

    endpoint = current.endpoint_name
    if current.autoscaling is not None:
        raise UserError(
            f"The endpoint {endpoint!r} is scaled automatically ({_bounds(current.autoscaling)}) "
            "and would change the number again: set bounds with --min and --max, or end that with "
            "--off first."
        )
    if instances < 1:
        raise UserError(
            f"--instances is {instances}; expected at least 1. To stop paying, delete the endpoint."
        )
    if current.status != "InService":
        raise UserError(
            f"The endpoint {endpoint!r} is {current.status}: SageMaker changes the number of "
            f"instances of an endpoint in service alone. See: peagle deploy sagemaker status "
            f"{endpoint}"
        )
    wanted = [{"VariantName": variant, "DesiredInstanceCount": instances}]
    parameters = {"EndpointName": endpoint, "DesiredWeightsAndCapacities": wanted}
    return planned_call("sagemaker", "UpdateEndpointWeightsAndCapacities", parameters)


def _set_count(clients: Clients, call: dict[str, Any], *, wait: bool) -> None:
    from botocore.exceptions import BotoCoreError, ClientError, WaiterError

    from peagle.deploy.aws import explain

    name = call["parameters"]["EndpointName"]
    try:
        clients.request(call["service"], call["operation"], **call["parameters"])
        if wait:
            waiter = clients.client("sagemaker").get_waiter("endpoint_in_service")
            waiter.wait(EndpointName=name, WaiterConfig={"Delay": _POLL_S, "MaxAttempts": 240})
    except WaiterError:
        raise UserError(
            f"The endpoint {name!r} did not come into service with so many instances. See why: "
            f"peagle deploy sagemaker status {name}"
        ) from None
    except (BotoCoreError, ClientError) as error:
        raise explain(error) from None


def _target(
    current: EndpointState,
    path: Path,
    k: int | None,
    method: str | None,
    percentile: int,
    bounds: Bounds,
    metric: ScalingMetric,
) -> float:
    """Return the target of a measured curve, and print its reason to standard error."""
    from peagle.deploy.curve import TARGET_LOAD, capacity, read_curves
    from peagle.deploy.status import depth_of

    drafts = depth_of(current) if k is None else k
    found = capacity(read_curves(path, k=drafts, method=method, percentile=percentile), bounds)
    target = found.target(metric.value)
    print(
        f"{found.what}: one instance carries {found.concurrency} requests at once ({found.why}); "
        f"the target is {TARGET_LOAD:.0%} of that, {target:g} {_UNITS[metric]}",
        file=sys.stderr,
    )
    return target
