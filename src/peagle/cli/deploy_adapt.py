"""`peagle deploy sagemaker adapt`: a better head for an endpoint, from what it captured."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

import typer

from peagle.cli.adapting import (
    ENGINE,
    PlaceOptions,
    TrainingOptions,
    adapted,
    figures,
    refuse,
    write_figures,
)
from peagle.cli.deploy_options import PLACE, Wait, leftovers_printed, new_stamp
from peagle.cli.flags import Given, pick_flags, spread, takes
from peagle.cli.groups import Format, OutputFormat
from peagle.cli.setup import note
from peagle.config.checks import require_writable_folder
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.deploy.aws import Clients
    from peagle.deploy.deployment import Deployment
    from peagle.deploy.models import ModelSource

ADAPT_EXAMPLES = """
Capture a share of the requests; after a day, a new correction of the head, if it is better:
  peagle deploy sagemaker update qwen3 --capture-share 0.2
  peagle deploy sagemaker adapt qwen3 --work qwen3-work --no-thinking

The managed container drafts without corrections: train the head, with data against forgetting:
  peagle deploy sagemaker adapt qwen3 --work qwen3-work --no-thinking --what head \\
      --old train.safetensors --minutes 30

Test the new head, and print the calls that would deploy it; then deploy the same head:
  peagle deploy sagemaker adapt qwen3 --work qwen3-work --no-thinking --print-calls
  peagle deploy sagemaker adapt qwen3 --work qwen3-work

Target and head that are here already; the traffic of two days, at most 4 GiB:
  peagle deploy sagemaker adapt qwen3 --work qwen3-work --no-thinking --since 2d --max-gib 4 \\
      --target ./Qwen3-8B --head ./head
"""
_CAPTURED, _MODELS, _ADAPTED, _REPORT = "captured", "models", "adapted", "report.json"


@dataclass(frozen=True)
class SourceOptions:
    """The endpoint, and where its traffic and its models come from."""

    endpoint: str = typer.Argument(
        ..., metavar="ENDPOINT", help="Name of the endpoint.", show_default=False
    )
    work: Path = typer.Option(
        ...,
        metavar="DIR",
        help="Folder for captured files, models and the new head. It is kept: a second run goes "
        "on.",
    )
    max_gib: float = typer.Option(1.0, help="Most of the captured files to read, the newest.")
    since: str | None = typer.Option(
        None,
        metavar="TIME",
        help="Leave out captured files that are older: 12h, 7d.",
        show_default="all",
    )
    target: str | None = typer.Option(
        None,
        help="The endpoint's target: a folder or a hub id.",
        show_default="fetched from where the endpoint has it",
    )
    head: str | None = typer.Option(
        None,
        help="The endpoint's present head: a folder or a hub id.",
        show_default="fetched from where the endpoint has it",
    )


@dataclass(frozen=True)
class EndpointOptions(TrainingOptions, SourceOptions):
    """The options of `deploy sagemaker adapt` outside the shared groups, as typed."""

    wait: Wait = True
    print_calls: bool = typer.Option(
        False, "--print-calls", help="Print the calls that deploy the head as JSON; make none."
    )
    output_format: Format = OutputFormat.TEXT


@takes(*pick_flags(PLACE, "region", "upload_to"), *ENGINE)
@spread
def adapt(given: Given, context: typer.Context, options: EndpointOptions) -> None:
    """Adapt an endpoint's head to the traffic it captured; deploy it if it proves to be better.

    This fetches what SageMaker wrote to S3, adapts and tests the head here as `peagle adapt` does,
    and updates the endpoint as `update` does. Run it where the target can be loaded. If the head
    does not pass, the status is 3, and nothing is uploaded or changed.
    """
    options.check(context)
    if not 0 < options.max_gib < math.inf:
        raise UserError(f"--max-gib is {options.max_gib:g}; expected a finite number above 0.")
    require_writable_folder(options.work, "--work")
    _check_overrides(options)
    from peagle.deploy import stack
    from peagle.deploy.aws import Clients
    from peagle.deploy.logs import seconds_ago
    from peagle.deploy.request import with_new_head
    from peagle.deploy.template import deployment_of

    seconds = None if options.since is None else seconds_ago(options.since)
    clients = Clients(given.value("region"))
    described = stack.stack_of(clients, options.endpoint)
    stack.require_updatable(described, options.endpoint, clients.region)
    base = deployment_of(stack.template_of(clients, options.endpoint), new_stamp())
    source = _source_of(base, described["StackId"], clients.region)
    result = _waiting(options.work, source)
    if result is None:
        result = _adapt(given, options, source, seconds, clients)
    new = options.work / _ADAPTED
    if result["refusal"]:
        _print(options, result | {"status": "refused"}, figures(result))
        refuse(result)
    # The endpoint may have changed while the head was adapted.
    present = stack.template_of(clients, options.endpoint)
    base = deployment_of(present, base.stamp)
    if base.draft != source.draft:
        raise UserError(
            f"The endpoint {options.endpoint!r} got another head meanwhile, and {str(new)!r} was "
            "compared with the one before; move it away, and run this again."
        )
    d = with_new_head(base, new, clients.region, given.value("upload_to"))
    assert d.draft is not None
    if options.print_calls:
        print("\n".join(figures(result)), file=sys.stderr)
        requests = stack.update_requests(d, base, present)
        print(json.dumps(stack.planned_calls(d, requests), indent=2))
        return
    with leftovers_printed(options.output_format):
        stack.update(clients, d, base, present, wait=options.wait)
    new = new.rename(options.work / f"deployed-{d.stamp}")
    result |= {
        "head": str(new),
        "status": "updated" if options.wait else "updating",
        "draft": d.draft.name,
        "roll_back": _command_back(base, clients.region),
    }
    look = f"peagle deploy sagemaker status {d.endpoint_name} --region {clients.region}"
    lines = [
        f"{result['status']}: {d.endpoint_name} in {clients.region} drafts with {d.draft.name}",
        f"Look:      {look}",
        f"Roll back: {result['roll_back']}",
    ]
    _print(options, result, [*figures(result), *lines])
    write_figures(options.work / _REPORT, result, "The result is on standard output.")


def _check_overrides(options: EndpointOptions) -> None:
    """Refuse values of --set that no head allows. Those of depths are checked with the head."""
    given = [one for one in options.overrides or () if not one.startswith("method.depth")]
    if given:
        import torch

        from peagle.training.adaptation import Adaptation

        head, target = options.work / "head", options.work / "target"  # not fetched yet
        place = options.what, head, target, torch.device("cpu"), options.seed, options.minutes
        adaptation = Adaptation(*place, overrides=given, with_correction=False)
        adaptation.configs(options.work, options.max_length)


def _print(options: EndpointOptions, result: Mapping[str, Any], lines: list[str]) -> None:
    if options.output_format is OutputFormat.JSON:
        print(json.dumps(result, indent=2))
    else:
        print("\n".join(lines or ["no head was adapted"]))


# ---- the endpoint ----


@dataclass(frozen=True, slots=True)
class _Source:
    """The traffic and the models of an endpoint.

    Attributes:
        captured: s3:// prefix of its captured files.
        target, draft: its models.
        k: its draft tokens.
        container: "managed" or "native".
        with_correction: whether its container drafts with the head's correction.
    """

    captured: str
    target: ModelSource
    draft: ModelSource
    k: int | None
    container: str
    with_correction: bool

    @property
    def draft_name(self) -> str:
        """Return the head's name with its revision."""
        return _full_name(self.draft)


def _full_name(model: ModelSource) -> str:
    return f"{model.name}@{model.revision}" if model.revision else model.name


def _source_of(base: Deployment, stack_id: str, region: str) -> _Source:
    """Return what is adapted; refuse an endpoint that has no head or captures nothing."""
    config, update = base.speculative_config, partial(_update_command, base.endpoint_name, region)
    if config is None or base.draft is None:
        raise UserError(
            f"The endpoint {base.endpoint_name!r} drafts without a head, so there is none to "
            f"adapt; give it one: {update('--draft', 'HEAD')}"
        )
    if base.capture is None:
        raise UserError(
            f"The endpoint {base.endpoint_name!r} captures nothing; switch that on, and run this "
            f"again after some traffic: {update('--capture-share', '0.2')}"
        )
    is_parallel = config.get("parallel_drafting") is not False
    with_correction = base.source == "native" and is_parallel and config.get("correction", True)
    account = stack_id.split(":")[4]
    uri = base.capture.uri.replace("${AWS::AccountId}", account)
    uri = uri.replace("${AWS::Region}", region)
    return _Source(
        f"{uri}/{base.endpoint_name}/",
        base.target,
        base.draft,
        base.num_speculative_tokens,
        base.source,
        with_correction,
    )


def _waiting(work: Path, source: _Source) -> dict[str, Any] | None:
    """Return the result of an earlier run whose head passed and was not deployed; None if none."""
    new, report = work / _ADAPTED, work / _REPORT
    if not new.exists():
        return None
    try:
        result = json.loads(report.read_text(encoding="utf-8"))
        is_of_present = result["adapted_from"] == source.draft_name and not result["refusal"]
    except (OSError, ValueError, LookupError, TypeError):
        is_of_present = False
    if not is_of_present:
        raise UserError(
            f"{str(report)!r} does not tell that {str(new)!r} was adapted from the endpoint's "
            f"present head, {source.draft_name}; move that folder away, or name another --work."
        )
    note(f"{str(new)!r} passed in an earlier run, and is deployed now; move it away to adapt anew")
    return result


def _adapt(
    given: Given,
    options: EndpointOptions,
    source: _Source,
    seconds: float | None,
    clients: Clients,
) -> dict[str, Any]:
    """Fetch traffic, of the last `seconds`, and models; adapt the head, and write the report."""
    from peagle.deploy.downloads import fetch_captured
    from peagle.deploy.stack import to_stderr

    if options.what == "correction" and not source.with_correction:
        raise UserError(
            f"The endpoint {options.endpoint!r} ({source.container} container) drafts without "
            "corrections, and --what is correction; expected --what head, with --old FILE."
        )
    since = None if seconds is None else datetime.fromtimestamp(max(0, time() - seconds), UTC)
    captured = options.work / _CAPTURED
    captured.mkdir(mode=0o700, parents=True, exist_ok=True)
    max_bytes = int(options.max_gib * 2**30)
    count = fetch_captured(
        source.captured, captured, clients, to_stderr, max_bytes=max_bytes, since=since
    )
    if not count:
        within = f" of the last {options.since}" if options.since else ""
        raise UserError(
            f"There are no captured files{within} under {source.captured}; files may take minutes "
            "to arrive after requests. Run this again after some traffic."
        )
    places = PlaceOptions(
        head=options.head or _fetched(source.draft, options.work, clients),
        target=options.target or _fetched(source.target, options.work, clients),
        traffic=captured,
        output=options.work / _ADAPTED,
        record_key_file=None,
    )
    own = Given({key: one for key, one in given.items() if key not in ("region", "upload_to")})
    result = adapted(own, places, options, k=source.k, with_correction=source.with_correction) | {
        "endpoint": options.endpoint,
        "adapted_from": source.draft_name,
    }
    advice = "Make room, then run the command again."
    if result["head"]:  # a second run would not know whose it is
        new = str(places.output)
        update = _update_command(options.endpoint, clients.region, "--draft", new)
        advice = (
            f"The new head is in {new!r}: deploy it with `{update}`, or make room and move it "
            "away, then run the command again."
        )
    write_figures(options.work / _REPORT, result, advice)
    return result


def _fetched(model: ModelSource, work: Path, clients: Clients) -> str:
    """Return the folder of a model, fetched from S3, or its hub id."""
    from peagle.deploy.downloads import fetch_model
    from peagle.deploy.models import split_uri
    from peagle.deploy.stack import to_stderr

    if model.kind == "hub":
        return _full_name(model)
    folder = work.absolute().joinpath(_MODELS, *split_uri(model.name))
    fetch_model(model.name, folder, clients, to_stderr)
    return str(folder)


def _command_back(base: Deployment, region: str) -> str:
    """Return the command that gives the endpoint its present head again."""
    assert base.draft is not None and base.speculative_config is not None
    config = dict(base.speculative_config)
    words = ["--draft", _full_name(base.draft)]
    if config.keys() - {"method", "num_speculative_tokens", "parallel_drafting"}:
        # --draft keeps K alone of the configuration.
        config |= {"model": base.draft.name}
        config |= {"revision": base.draft.revision} if base.draft.revision else {}
        words = ["--speculative-config", json.dumps(config)]
    return _update_command(base.endpoint_name, region, *words)


def _update_command(endpoint: str, region: str, *words: str) -> str:
    command = "peagle", "deploy", "sagemaker", "update", endpoint, "--region", region
    return shlex.join([*command, *words])
