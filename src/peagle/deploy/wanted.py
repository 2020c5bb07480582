"""The `Deployment` that a request amounts to, for `create` and for `update`.

Nothing is created here, and mistakes are found here: unknown names, no role, an instance that is
too small, heads that do not fit. Only `create` and `update` look at the hub (of models, and
SageMaker's); `plan` gives functions that do not.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peagle.bundled import expand_bundled
from peagle.deploy import catalog, jumpstart
from peagle.deploy.catalog import CatalogEntry
from peagle.deploy.container import (
    SPECULATIVE,
    check_image,
    default_ami,
    environment,
    managed_image,
)
from peagle.deploy.deployment import (
    DEFAULT_STARTUP_TIMEOUT_S,
    MAX_NAME,
    STARTUP_TIMEOUTS_S,
    Deployment,
    Source,
    check_endpoint_name,
    role_account,
)
from peagle.deploy.heads import HeadFacts
from peagle.deploy.instances import find_instance_type, require_fits_flags
from peagle.deploy.jumpstart import HubDocument
from peagle.deploy.models import ModelSource, source_of
from peagle.deploy.request import (
    Lookups,
    Request,
    autoscaling_of,
    bucket_of,
    environment_of,
    role_of,
    tags_of,
    vpc_of,
)
from peagle.deploy.speculation import Asked, Defaults, decide, read_config
from peagle.errors import UserError


def new_deployment(request: Request, stamp: str, lookups: Lookups) -> Deployment:
    """The deployment that `create` makes.

    Args:
        request: what the user said.
        stamp: suffix of the names of what is made.
        lookups: the catalog, and whom to ask.

    Raises:
        UserError: anything that would fail later, as far as it can be known now.
    """
    entry = catalog.lookup(request.model, lookups.entries)
    target = _target(request, entry, lookups)
    role = role_of(request, lookups)
    name = check_endpoint_name(request.name or name_of(entry, target))
    source: Source = request.source or (entry.sources[0] if entry else "managed")
    document = None
    if source == "jumpstart":
        document, source = _from_hub(request, entry, source, lookups)
    elif entry is not None:
        entry.require_source(source)
    check_image(source, request.image)
    image = request.image or (document.image if document else managed_image(request.region))
    hub = document.model if document else None
    defaults = _defaults(entry, hub.environment if hub else {})
    instance_type = _instance_type(request, entry, document)
    draft, config = _speculation(request.speculative, source, defaults, target, entry, lookups)
    if entry is not None and entry.gated and not request.hf_token and hub is None:
        warnings.warn(
            f"{entry.target} is gated on the hub: accept its licence there, and give "
            "--pass-hf-token, or the container cannot fetch it.",
            stacklevel=2,
        )
    deployment = Deployment(
        endpoint_name=name,
        region=request.region,
        stamp=stamp,
        source=source,
        image=image,
        target=target,
        role=role,
        instance_type=instance_type,
        instance_count=1 if request.instance_count is None else request.instance_count,
        draft=draft,
        speculative_config=config,
        ami=request.ami or (document and document.ami) or default_ami(image),
        startup_timeout_s=_timeout(request, document),
        bucket=bucket_of(request, role),
        tags=tags_of(request.tags),
        kms_key=request.kms_key or "",
        vpc=vpc_of(request),
        environment={**(entry.environment if entry else {}), **environment_of(request, lookups)},
        vllm_flags=_flags(request, entry if hub is None else None, source, instance_type, {}),
        autoscaling=autoscaling_of(request.scaling, _k(config)),
        accept_eula=request.accept_eula,
        hub_model=hub,
    )
    return checked(deployment, lookups)


def changed_deployment(base: Deployment, request: Request, lookups: Lookups) -> Deployment:
    """The deployment that `update` makes of one that is there: what was said, else as it is.

    Raises:
        UserError: as `new_deployment`; another model where SageMaker's hub names it.
    """
    target, entry = base.target, None
    if request.model:
        entry = catalog.lookup(request.model, lookups.entries)
        target = _target(request, entry, lookups)
        if base.hub_model is not None:
            raise UserError(
                f"The endpoint {base.endpoint_name!r} serves what SageMaker's hub says; its model "
                "cannot be changed. Create another endpoint."
            )
    else:
        entry = catalog.lookup(target.name, lookups.entries)
    defaults = Defaults(base.draft, base.speculative_config or {}, None)
    if target != base.target or not base.speculation:
        defaults = _defaults(entry, {})
    asked = request.speculative
    draft, config = base.draft, base.speculative_config
    if asked != Asked() or target != base.target:
        draft, config = _speculation(asked, base.source, defaults, target, entry, lookups)
    image = request.image or base.image
    ami = request.ami or (default_ami(image) if request.image else base.ami)
    instance_type = request.instance_type or base.instance_type
    changes: dict[str, Any] = {
        "instance_count": request.instance_count,
        "startup_timeout_s": request.startup_timeout_s,
        "kms_key": request.kms_key,
        "role": request.role,
        "vpc": vpc_of(request),
        "autoscaling": autoscaling_of(request.scaling, _k(config)),
    }
    if request.role is not None:
        role_account(request.role)
    made = replace(
        base,
        target=target,
        draft=draft,
        speculative_config=config,
        image=image,
        ami=ami,
        instance_type=instance_type,
        bucket=bucket_of(request, request.role or base.role),
        tags={**base.tags, **tags_of(request.tags)},
        environment={**base.environment, **environment_of(request, lookups)},
        vllm_flags=_changed_flags(base, request, instance_type),
        **{key: value for key, value in changes.items() if value is not None},
    )
    return checked(made, lookups)


def checked(d: Deployment, lookups: Lookups) -> Deployment:
    """The deployment, if nothing is known that would fail.

    Raises:
        UserError: a number out of range, an instance that is too small, an impossible environment.
    """
    low, high = STARTUP_TIMEOUTS_S
    if not low <= d.startup_timeout_s <= high:
        raise UserError(
            f"--startup-timeout is {d.startup_timeout_s}; SageMaker allows {low} to {high} seconds."
        )
    if d.instance_count < 1:
        raise UserError(f"--instance-count is {d.instance_count}; expected at least 1.")
    if d.kms_key and re.fullmatch(r"[a-zA-Z0-9:/_-]{1,2048}", d.kms_key) is None:
        raise UserError(f"--kms-key is {d.kms_key!r}; expected the id, ARN or alias of a key.")
    _check_stages(d)
    environment(d)
    if d.hub_model is None:
        native = d.source == "native"
        draft = d.draft if d.speculation else None
        needed = catalog.needed_by(
            d.target,
            draft,
            d.vllm_flags,
            lookups.entries,
            native=native,
            read_size=lookups.read_size,
        )
        require_fits_flags(d.instance_type, needed, d.vllm_flags)
    return d


def _check_stages(d: Deployment) -> None:
    """vLLM hands hidden states over pipeline stages in its model runner V2 alone."""
    stages = d.vllm_flags.get("pipeline-parallel-size", "1")
    if stages != "1" and (d.speculative_config or {}).get("parallel_drafting"):
        raise UserError(
            f"pipeline-parallel-size is {stages}, and the head drafts in parallel, which vLLM does "
            "not do over several stages. Use tensor-parallel-size, or --no-speculation."
        )


# ---- the model and its head -----------------------------------------------------------------


def _target(request: Request, entry: CatalogEntry | None, lookups: Lookups) -> ModelSource:
    text = expand_bundled(request.model, "target")
    if entry is not None:
        return source_of(entry.target)
    if request.source == "jumpstart":
        return ModelSource("hub", text)  # a name of SageMaker's hub
    if re.fullmatch(r"[\w.-]+", text) and not os.path.isdir(text) and not text.startswith("."):
        catalog.find(text, lookups.entries)  # raises, with the nearest name
    return source_of(text)


def name_of(entry: CatalogEntry | None, target: ModelSource) -> str:
    """A name for the endpoint: the model's, of the characters that SageMaker takes."""
    name = re.sub(r"[^a-zA-Z0-9-]+", "-", entry.name if entry else target.short_name)
    return f"peagle-{name.strip('-').lower()}"[:MAX_NAME].rstrip("-")


def _defaults(entry: CatalogEntry | None, hub_environment: Mapping[str, str]) -> Defaults:
    """What the catalog, or the hub's document, knows of the head."""
    if told := hub_environment.get(SPECULATIVE):
        return Defaults(None, read_config(told, "the hub's document"), None)
    if entry is None or entry.draft is None:
        return Defaults()
    k = entry.num_speculative_tokens
    config = {} if k is None else {"num_speculative_tokens": k}
    return Defaults(source_of(entry.draft, "draft"), config, entry.max_speculative_tokens)


def _speculation(
    asked: Asked,
    source: Source,
    defaults: Defaults,
    target: ModelSource,
    entry: CatalogEntry | None,
    lookups: Lookups,
) -> tuple[ModelSource | None, dict[str, Any] | None]:
    known: list[HeadFacts] = []

    def read_head(draft: ModelSource) -> HeadFacts | None:
        if entry is not None and draft == defaults.draft and entry.origin == catalog.PACKAGED:
            # Our catalog has only P-EAGLE heads, each with its target.
            return HeadFacts(True, entry.max_speculative_tokens)
        facts = lookups.read_head(draft)
        known.extend([facts] if facts else [])
        return facts

    draft, config = decide(asked, source, defaults, read_head)
    if draft is not None and known:
        lookups.check_target(known[0], draft, target)
    if draft is None and config is None and asked.speculation is None and not defaults.draft:
        warnings.warn(
            f"No draft head is known for {target.name!r}: it is served without speculation. Name a "
            "head with --draft.",
            stacklevel=4,
        )
    return draft, config


def _from_hub(
    request: Request, entry: CatalogEntry | None, source: Source, lookups: Lookups
) -> tuple[HubDocument | None, Source]:
    """The hub's document; where the hub does not answer, the source that the catalog falls to."""
    if entry is not None:
        entry.require_source(source)
    model_id = entry.jumpstart_model_id if entry else request.model
    answer = lookups.ask_hub(str(model_id))
    if answer is not None:
        document = jumpstart.read_answer(answer, request.region, request.instance_type or "")
        jumpstart.check_eula(document, request.accept_eula)
        return document, source
    if entry is None or "managed" not in entry.sources:
        raise UserError(
            f"SageMaker's hub does not tell about {model_id!r} here, and there is no other way to "
            "deploy it. `plan` does not ask the hub; for `create`, credentials must allow "
            "sagemaker:DescribeHubContent. A new name in the hub goes into a catalog of your own, "
            "as jumpstart_model_id (`peagle catalog --help`)."
        )
    return None, "managed"


# ---- further options ------------------------------------------------------------------------


def _k(config: Mapping[str, Any] | None) -> int:
    return 0 if config is None else config["num_speculative_tokens"]


def _instance_type(
    request: Request, entry: CatalogEntry | None, document: HubDocument | None
) -> str:
    found = request.instance_type or (document and document.instance_type)
    found = found or (entry and entry.instance_types[0])
    if not found:
        raise UserError(
            f"No instance type: the catalog does not know {request.model!r}. Give one with "
            "--instance-type, like ml.g6e.2xlarge."
        )
    return found


def _timeout(request: Request, document: HubDocument | None) -> int:
    told = document.startup_timeout_s if document else None
    return request.startup_timeout_s or told or DEFAULT_STARTUP_TIMEOUT_S


def _flags(
    request: Request,
    entry: CatalogEntry | None,
    source: Source,
    instance_type: str,
    base: Mapping[str, str],
) -> dict[str, str]:
    """Options of vLLM; on several GPUs one copy is spread over them, or, in ours, one on each."""
    flags = {**(entry.vllm_flags if entry else {}), **base, **request.vllm_flags}
    instance = find_instance_type(instance_type)
    if source == "jumpstart" or instance is None or instance.num_gpus == 1:
        return flags
    name = "data-parallel-size" if source == "native" else "tensor-parallel-size"
    if not {name, "data-parallel-size", "pipeline-parallel-size"} & set(flags):
        flags[name] = str(instance.num_gpus)
    return flags


def _changed_flags(base: Deployment, request: Request, instance_type: str) -> dict[str, str]:
    kept = dict(base.vllm_flags)
    if instance_type != base.instance_type:
        old = find_instance_type(base.instance_type)
        for name in ("data-parallel-size", "tensor-parallel-size"):
            if old is not None and kept.get(name) == str(old.num_gpus):
                del kept[name]
        return _flags(request, None, base.source, instance_type, kept)
    return {**kept, **request.vllm_flags}
