"""Build a `Deployment` from the options of `create` and `update`.

Nothing here creates anything. Mistakes are found before anything is created: unknown names, no
role, an instance that is too small, heads that do not fit.
"""

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from peagle.bundled import expand_bundled
from peagle.deploy import catalog, model_files
from peagle.deploy.catalog import CatalogEntry
from peagle.deploy.container import choose_image, container_environment, default_ami
from peagle.deploy.curve import Bounds, capacity, read_curves
from peagle.deploy.deployment import (
    CONTAINERS,
    MAX_NAME,
    STARTUP_TIMEOUTS_S,
    Autoscaling,
    Capture,
    ContainerSource,
    Deployment,
    Secret,
    Transfer,
    Vpc,
    account_of,
    check_endpoint_name,
)
from peagle.deploy.instances import PARALLEL_SIZES, find_instance_type, require_fits
from peagle.deploy.memory import MemoryNeeded, facts_of_folder, token_count
from peagle.deploy.model_files import HeadFacts
from peagle.deploy.models import ModelSource, s3_prefix, source_of
from peagle.deploy.speculation import Defaults, SpeculationFlags, configure_drafts, wanted_drafts
from peagle.errors import UserError

ROLE_VARIABLE = "SAGEMAKER_ROLE"
_TAG = re.compile(r"[\w\s.:/=+@-]*")
_OWN_TAGS = ("aws:", "peagle:")
_KEY = re.compile(r"[a-zA-Z0-9:/_-]{1,2048}")
# Bounds of VpcConfig and of tags in SageMaker's service model.
_MAX_SUBNETS, _MAX_GROUPS, _MAX_TAGS = 16, 5, 46


@dataclass(frozen=True, slots=True)
class DeploymentRequest:
    """The options of a user; an option that was not given is None, "" or empty.

    Attributes:
        model: a catalog name, a hub id, an s3:// prefix or a folder; "" keeps it in an update.
        region: AWS region; "" if unknown.
        name: name of the endpoint; "" makes one from the model's name.
        source: the container: "managed" or "native".
        image, ami, role, kms_key, alarm_topic, instance_type, instance_count, startup_timeout_s,
            vllm_flags: see `Deployment`.
        upload_to: s3:// prefix for uploads.
        speculation: options of speculation.
        tags, env: "NAME=VALUE" each; a variable without "=" takes its value in this process.
        subnets, security_groups: ids of the VPC.
        hf_token: token that the container gets as HF_TOKEN.
        min_instances, max_instances: bounds of automatic scaling; None for the latter turns it off.
        scale_target: requests at once on an instance that automatic scaling aims at.
        scale_from: file of a measured curve, which gives that target instead.
        capture_share, capture_to, capture_kms_key: see `Capture`; a share of 0 ends the capture.
    """

    model: str
    region: str = ""
    name: str = ""
    source: str | None = None
    image: str | None = None
    ami: str | None = None
    role: str | None = None
    kms_key: str | None = None
    alarm_topic: str | None = None
    upload_to: str | None = None
    speculation: SpeculationFlags = field(default_factory=SpeculationFlags)
    instance_type: str | None = None
    instance_count: int | None = None
    startup_timeout_s: int | None = None
    tags: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    vllm_flags: Mapping[str, str] = field(default_factory=dict)
    hf_token: str | None = None
    min_instances: int = 1
    max_instances: int | None = None
    scale_target: float | None = None
    scale_from: Path | None = None
    capture_share: float | None = None
    capture_to: str | None = None
    capture_kms_key: str | None = None


@dataclass(frozen=True, slots=True)
class Lookups:
    """The catalog, and access to models on the hub and in S3.

    Attributes:
        entries: the catalog.
        s3: boto3's client of S3; None reads local files alone, and adds a note for the others.
        notes: gets a line for each model that was not read.
    """

    entries: dict[str, CatalogEntry]
    s3: Any = None
    notes: list[str] = field(default_factory=list)

    def read_head(self, draft: ModelSource) -> HeadFacts | None:
        """Return facts from a head's files; None for a remote head without a client of S3."""
        if draft.kind == "local" or self.s3 is not None:
            return model_files.head_facts(draft, self.s3)
        self.notes.append(
            f"peagle did not read the head {draft.name!r}, and takes it for a P-EAGLE head."
        )
        return None

    def check_target(self, facts: HeadFacts, draft: ModelSource, target: ModelSource) -> None:
        """Raise a UserError for a head of another target, if peagle can read the target."""
        if target.kind == "local" or self.s3 is not None:
            model_files.check_target(facts, draft, target, self.s3)

    def memory_needed(self, d: Deployment) -> MemoryNeeded | None:
        """Return the memory of target and head with the options of vLLM; None if unknown."""
        return catalog.needed_by(
            d.target,
            d.draft,
            d.vllm_flags,
            self.entries,
            native=d.source == "native",
            read_facts=model_files.facts_of_hub if self.s3 is not None else None,
        )


@dataclass(frozen=True)
class KnownModel:
    """A target, and the catalog's entry for it."""

    entry: CatalogEntry | None
    target: ModelSource

    @cached_property
    def head(self) -> Defaults:
        """Return the catalog's head and K for this target; empty `Defaults` if it has none."""
        entry = self.entry
        if entry is None or entry.draft is None:
            return Defaults()
        config = {"num_speculative_tokens": entry.num_speculative_tokens}
        return Defaults(source_of(entry.draft, "draft"), config, entry.max_speculative_tokens)


def new_deployment(request: DeploymentRequest, stamp: str, lookups: Lookups) -> Deployment:
    """Return the deployment that `create` makes; `stamp` makes its names unique.

    Raises:
        UserError: an option, the model, the head or the instance would make the deployment fail.
    """
    entry = catalog.lookup(request.model, lookups.entries)
    target = _target(request.model, entry, lookups)
    known = KnownModel(entry, target)
    source = _source(request.source, entry)
    image, ami = choose_image(source, request.image, request.region)
    instance_type = request.instance_type or (entry.instance_types[0] if entry else "")
    if not instance_type:
        raise UserError(
            f"No instance type: the catalog does not know {request.model!r}. Give one with "
            "--instance-type, like ml.g6e.2xlarge."
        )
    flags = {**(entry.vllm_flags if entry else {}), **request.vllm_flags}
    draft, config = _speculation(request, source, known.head, known, flags, lookups)
    if entry is not None and entry.gated and not request.hf_token:
        warnings.warn(
            f"{entry.target} is gated on the hub: accept its licence there, and give "
            "--pass-hf-token, or the container cannot fetch it.",
            stacklevel=2,
        )
    role = request.role or os.environ.get(ROLE_VARIABLE, "")
    if role:
        account_of(role)  # refuses text that is no ARN
    base = Deployment(
        endpoint_name=check_endpoint_name(request.name or _name_of(entry, target)),
        stamp=stamp,
        source=source,
        image=image,
        target=target,
        role=role,
        instance_type=instance_type,
        draft=draft,
        speculative_config=config,
        ami=ami,
        environment=entry.environment if entry else {},
        vllm_flags=_spread(flags, source, instance_type),
    )
    return _complete(base, request, lookups)


def changed_deployment(
    base: Deployment, request: DeploymentRequest, lookups: Lookups
) -> Deployment:
    """Return the present deployment with the changes of `update`; the rest stays.

    Raises:
        UserError: as for `new_deployment`.
    """
    target = base.target
    entry = catalog.lookup(request.model or target.name, lookups.entries)
    if request.model:
        target = _target(request.model, entry, lookups)
    instance_type = request.instance_type or base.instance_type
    flags = {**_respread(base, instance_type, request.vllm_flags), **request.vllm_flags}
    draft, config = base.draft, base.speculative_config
    is_context_given = config is not None and "max-model-len" in request.vllm_flags
    if request.speculation != SpeculationFlags() or target != base.target or is_context_given:
        is_kept = target == base.target and config is not None
        known = KnownModel(entry, target)
        head = Defaults(draft, config or {}) if is_kept else known.head
        draft, config = _speculation(request, base.source, head, known, flags, lookups)
    if request.role is not None:
        account_of(request.role)
    changed = replace(
        base,
        target=target,
        draft=draft,
        speculative_config=config,
        sets_count=request.instance_count is not None,
        vllm_flags=flags,
    )
    return _complete(changed, request, lookups)


def _complete(base: Deployment, request: DeploymentRequest, lookups: Lookups) -> Deployment:
    """Return the checked deployment with all options and its places in S3."""
    d = _with_options(base, request)
    _check(d)
    require_fits(d.instance_type, lookups.memory_needed(d), d.vllm_flags)
    bucket = _bucket(request, d.role)
    placed = _placed(replace(d, capture=_capture(d, request, bucket)), bucket)
    container_environment(placed)  # refuses variables
    return placed


def with_new_head(base: Deployment, folder: Path, region: str, upload_to: str | None) -> Deployment:
    """Return the present deployment with a head from a folder, uploaded; all else stays.

    The files of the present head stay in S3 until another head takes this one's place.

    Args:
        base: the present deployment, with a head.
        folder: a head of the same kind.
        region, upload_to: as for `DeploymentRequest`.

    Raises:
        UserError: --upload-to is no prefix.
    """
    assert base.draft is not None
    bucket = _bucket(DeploymentRequest("", region, upload_to=upload_to), base.role)
    d = _placed(replace(base, draft=ModelSource("local", str(folder.resolve()))), bucket)
    kept = tuple(uri for uri in base.uploads if uri == base.draft.name)
    d = replace(d, uploads=(*d.uploads, *kept))
    container_environment(d)  # refuses variables
    return d


# ---- the model, its container and its head ----


def _target(model: str, entry: CatalogEntry | None, lookups: Lookups) -> ModelSource:
    if entry is not None:
        return source_of(entry.target)
    text = expand_bundled(model, "target")
    if re.fullmatch(r"[\w.-]+", text) and not os.path.isdir(text) and not text.startswith("."):
        catalog.find(text, lookups.entries)  # raises, with the nearest name
    return source_of(text)


def _source(given: str | None, entry: CatalogEntry | None) -> ContainerSource:
    source: ContainerSource | None = next((s for s in CONTAINERS if s == given), None)
    if given is not None and source is None:
        raise UserError(
            f"--source is {given!r}; expected one of {', '.join(CONTAINERS)}. (JumpStart's models "
            "deploy in SageMaker Studio, by the id that `peagle catalog NAME` shows.)"
        )
    if entry is None:
        return source or "managed"
    if source is not None and source not in entry.sources:
        raise UserError(
            f"{entry.name} cannot be deployed with --source {source}. Give --source "
            f"{' or '.join(entry.sources)}."
        )
    return source or entry.sources[0]


def _speculation(
    request: DeploymentRequest,
    source: ContainerSource,
    defaults: Defaults,
    known: KnownModel,
    flags: Mapping[str, str],
    lookups: Lookups,
) -> tuple[ModelSource | None, dict[str, Any] | None]:
    """Return the head and vLLM's configuration of it; (None, None) without speculation."""
    wanted = wanted_drafts(request.speculation, defaults)
    if wanted is None:
        if request.speculation.speculation is None:
            _warn_without_head(known)
        return None, None
    draft, entry, read = wanted.draft, known.entry, None
    if draft is None:
        facts = None
    elif entry is not None and entry.origin == catalog.PACKAGED and draft == known.head.draft:
        # The package's catalog has P-EAGLE heads only, each with its target.
        facts = HeadFacts(True, entry.max_speculative_tokens)
    else:
        facts = read = lookups.read_head(draft)
    config = configure_drafts(wanted, source, defaults, facts)
    if draft is not None and read is not None:
        lookups.check_target(read, draft, known.target)
        if source == "managed":
            _warn_beyond_training(read, draft, _context(known.target, flags))
    return draft, config


def _warn_without_head(known: KnownModel) -> None:
    """Warn that nothing is drafted; refuse an entry whose head is not on the hub."""
    entry = known.entry
    if entry is not None and entry.is_head_in_jumpstart:
        raise UserError(
            f"{entry.name} has no head on the hub: only SageMaker JumpStart has it. Name a "
            "head of your own with --draft (a hub id, s3:// or a folder) or "
            "--speculative-config, take --no-speculation, or deploy JumpStart's in SageMaker "
            f"Studio as {entry.jumpstart_model_id!r}."
        )
    warnings.warn(
        f"No draft head is known for {known.target.name!r}: it is served without speculation. Name "
        "a head with --draft.",
        stacklevel=5,
    )


def _context(target: ModelSource, flags: Mapping[str, str]) -> int | None:
    """Return the tokens of the longest request that the container takes; None if unknown."""
    if asked := token_count(flags.get("max-model-len", "")):
        return asked
    return facts_of_folder(Path(target.name)).max_model_len if target.kind == "local" else None


def _warn_beyond_training(facts: HeadFacts, draft: ModelSource, context: int | None) -> None:
    """Warn of contexts longer than the head's training texts, if its config.json sets no window."""
    longest = facts.trained_length
    if not facts.is_parallel or facts.has_windows or longest is None:
        return
    if context is not None and context <= longest:
        return
    asked = "not given" if context is None else context
    warnings.warn(
        f"max-model-len is {asked}, but the head {draft.name!r} was trained on texts of up to "
        f"{longest} tokens, and its config.json has no window: vLLM accepts far fewer drafts "
        "beyond them. Give the layers a window there (layer_types, sliding_window), give "
        f"`-- --max-model-len {longest}`, or create the endpoint with --source native, whose "
        "engine lets the head look back over no more tokens than that.",
        stacklevel=5,
    )


def _name_of(entry: CatalogEntry | None, target: ModelSource) -> str:
    """Return a name for the endpoint: the model's name in the characters that SageMaker takes."""
    name = re.sub(r"[^a-zA-Z0-9-]+", "-", entry.name if entry else target.short_name)
    return f"peagle-{name.strip('-').lower()}"[:MAX_NAME].rstrip("-")


def _spread(
    flags: Mapping[str, str], source: ContainerSource, instance_type: str
) -> dict[str, str]:
    """Return the options with one that uses all GPUs: vLLM splits a model, our engine copies it."""
    instance = find_instance_type(instance_type)
    if instance is None or instance.num_gpus == 1 or set(PARALLEL_SIZES) & set(flags):
        return dict(flags)
    name = "data-parallel-size" if source == "native" else "tensor-parallel-size"
    return {**flags, name: str(instance.num_gpus)}


def _respread(base: Deployment, instance_type: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the present options of vLLM with the number of GPUs of another instance type."""
    kept = dict(base.vllm_flags)
    if instance_type == base.instance_type:
        return kept
    old = find_instance_type(base.instance_type)
    for name in ("data-parallel-size", "tensor-parallel-size"):
        if old is not None and kept.get(name) == str(old.num_gpus):
            del kept[name]
    return _spread({**kept, **given}, base.source, instance_type)


# ---- options that need no look-up ----


def _with_options(d: Deployment, request: DeploymentRequest) -> Deployment:
    """Return the deployment with the options that need no look-up."""
    options: dict[str, Any] = {
        "image": request.image,
        "ami": request.ami or (default_ami(request.image) if request.image else None),
        "instance_type": request.instance_type,
        "instance_count": request.instance_count,
        "startup_timeout_s": request.startup_timeout_s,
        "kms_key": request.kms_key,
        "role": request.role or None,
        "vpc": _vpc(request),
        "autoscaling": _autoscaling(request, d.speculative_config),
        "alarm_topic": request.alarm_topic,
    }
    return replace(
        d,
        tags={**d.tags, **_tags(request.tags)},
        environment={**d.environment, **_environment(request)},
        **{key: value for key, value in options.items() if value is not None},
    )


def _vpc(request: DeploymentRequest) -> Vpc | None:
    subnets, groups = request.subnets, request.security_groups
    if not subnets and not groups:
        return None
    if not (1 <= len(subnets) <= _MAX_SUBNETS and 1 <= len(groups) <= _MAX_GROUPS):
        raise UserError(
            f"The VPC has {len(subnets)} subnets and {len(groups)} security groups; expected 1 to "
            f"{_MAX_SUBNETS} of --subnet and 1 to {_MAX_GROUPS} of --security-group."
        )
    return Vpc(subnets, groups)


def _tags(pairs: tuple[str, ...]) -> dict[str, str]:
    tags: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        fits = 1 <= len(key) <= 128 and len(value) <= 256 and _TAG.fullmatch(key + value)
        if not equals or not fits or key.startswith(_OWN_TAGS):
            raise UserError(
                f"--tag is {pair!r}; expected KEY=VALUE of letters, digits, spaces and _.:/=+-@, "
                f"and a key that does not begin with {' or '.join(_OWN_TAGS)}."
            )
        tags[key] = value
    if len(tags) > _MAX_TAGS:
        raise UserError(f"There are {len(tags)} tags; expected at most {_MAX_TAGS}.")
    return tags


def _environment(request: DeploymentRequest) -> dict[str, str]:
    """Return the user's variables as secrets: even DATABASE_URL may hold a password."""
    found: dict[str, str] = {}
    for pair in request.env:
        name, equals, value = pair.partition("=")
        if not equals:
            if name not in os.environ:
                raise UserError(
                    f"--env names {name!r}, which is not set here; expected NAME=VALUE, or the "
                    "name of a variable that is."
                )
            value = os.environ[name]
        found[name] = Secret(value)
    if request.hf_token:
        found["HF_TOKEN"] = Secret(request.hf_token)
    return found


def _autoscaling(
    request: DeploymentRequest, config: Mapping[str, Any] | None
) -> Autoscaling | None:
    """Return the bounds and the target of scaling; a curve gives it at the deployment's K."""
    least, most, target = request.min_instances, request.max_instances, request.scale_target
    if most is None:
        return None
    if target is not None and request.scale_from is not None:
        raise UserError("--scale-target and --scale-from contradict each other; leave one out.")
    if request.scale_from is not None:
        k = 0 if config is None else config["num_speculative_tokens"]
        target = capacity(read_curves(request.scale_from, k=k), Bounds()).target("concurrency")
    if target is None:
        raise UserError(
            "--max-instances is given without a target: give --scale-from a measured curve "
            "(tune.json of `peagle tune`), or the requests at once on an instance with "
            "--scale-target."
        )
    return check_autoscaling(Autoscaling(least, most, target))


def check_autoscaling(wanted: Autoscaling) -> Autoscaling:
    """Return `wanted`; raise a UserError if a bound or the target is out of range."""
    least, most = wanted.min_instances, wanted.max_instances
    if not 1 <= least <= most:
        raise UserError(
            f"The fewest instances are {least} and the most {most}; expected 1 <= fewest <= most. "
            "(An endpoint without instances would refuse requests: delete it instead.)"
        )
    if not wanted.target_value > 0:
        raise UserError(f"The target is {wanted.target_value}; expected a number above 0.")
    return wanted


# ---- the whole deployment ----


def _check(d: Deployment) -> None:
    """Refuse values that SageMaker or vLLM would refuse."""
    low, high = STARTUP_TIMEOUTS_S
    if not low <= d.startup_timeout_s <= high:
        raise UserError(
            f"--startup-timeout is {d.startup_timeout_s}; SageMaker allows {low} to {high} seconds."
        )
    if d.instance_count < 1:
        raise UserError(f"--instance-count is {d.instance_count}; expected at least 1.")
    if d.kms_key and _KEY.fullmatch(d.kms_key) is None:
        raise UserError(f"--kms-key is {d.kms_key!r}; expected the id, ARN or alias of a key.")
    stages = d.vllm_flags.get("pipeline-parallel-size", "1")
    if stages != "1" and (d.speculative_config or {}).get("parallel_drafting"):
        # vLLM hands hidden states over pipeline stages in its model runner V2 alone.
        raise UserError(
            f"pipeline-parallel-size is {stages}, and the head drafts in parallel, which vLLM does "
            "not do over several stages. Use tensor-parallel-size, or --no-speculation."
        )


def _bucket(request: DeploymentRequest, role: str) -> str:
    """Return the prefix for uploads: --upload-to, else SageMaker's bucket of the role's account."""
    if request.upload_to:
        return s3_prefix(request.upload_to, "--upload-to")
    account = account_of(role) if role else "${AWS::AccountId}"
    return f"s3://sagemaker-{request.region or '${AWS::Region}'}-{account}/"


def _capture(d: Deployment, request: DeploymentRequest, bucket: str) -> Capture | None:
    """Return what is captured: the present capture with the options that were given."""
    old = d.capture or Capture(0, f"{bucket}peagle/{d.endpoint_name}/capture")
    share, to, key = request.capture_share, request.capture_to, request.capture_kms_key
    percent = (
        old.percent
        if share is None
        else next((p for p in range(101) if abs(p - share * 100) < 1e-6), -1)
    )
    if percent < 0:
        raise UserError(
            f"--capture-share is {share}; expected a share of 0 to 1 in whole percent, like 0.2."
        )
    if not percent and (to or key):
        raise UserError(
            f"{'--capture-to' if to else '--capture-kms-key'} is given, but nothing is captured: "
            "give --capture-share too, like 0.2."
        )
    if key and _KEY.fullmatch(key) is None:
        raise UserError(f"--capture-kms-key is {key!r}; expected the ARN, id or alias of a key.")
    uri = s3_prefix(to, "--capture-to").rstrip("/") if to else old.uri
    return Capture(percent, uri, old.kms_key if key is None else key) if percent else None


def _placed(d: Deployment, bucket: str) -> Deployment:
    """Return the deployment with its models on the hub or in S3, and the transfers to S3.

    A container mounts one prefix of S3, so a head from S3 lies below its target's prefix.
    """
    own = f"peagle/{d.endpoint_name}/{d.stamp}/"
    target, draft = d.target, d.draft
    transfers: list[Transfer] = []
    if target.kind == "local":
        moved = ModelSource("s3", f"{bucket}{own}target/")
        transfers.append(Transfer(target, moved.name, d.kms_key))
        target = moved
    if draft is not None and draft.kind != "hub":
        root = target.name if target.kind == "s3" else bucket
        is_below = target.kind == "hub" or draft.name.startswith(root)
        if draft.kind == "local" or not is_below:
            moved = ModelSource("s3", f"{root}{own}draft/")
            transfers.append(Transfer(draft, moved.name, d.kms_key))
            draft = moved
    models = [m.name for m in (target, draft) if m is not None]
    made = [transfer.uri for transfer in transfers]
    uploads = dict.fromkeys([u for u in d.uploads if u in models] + made)
    return replace(
        d, target=target, draft=draft, uploads=tuple(uploads), transfers=tuple(transfers)
    )


def require_role(d: Deployment) -> None:
    """Refuse a deployment without a role."""
    if not d.role:
        raise UserError(
            "No role: SageMaker needs the ARN of an IAM role that may read the image and the "
            f"model. Give --role, or set {ROLE_VARIABLE}."
        )
