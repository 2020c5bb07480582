"""The speculative configuration of a deployment, from options and a head's files."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from peagle.config import CandidateTrees, SpeculativeConfig
from peagle.config.checks import unique_keys
from peagle.config.speculative import AUTO, MAX_SPECULATIVE_TOKENS
from peagle.deploy.deployment import MODEL_FOLDER, ContainerSource
from peagle.deploy.model_files import HeadFacts
from peagle.deploy.models import ModelSource, source_of
from peagle.errors import UserError
from peagle.models.head_json import check_trees, default_k

_DEFAULT_METHOD = "eagle3"
_K = "num_speculative_tokens"
_TREES = "parallel_drafting_spec"
_SCHEDULE = "num_speculative_tokens_per_batch_size"
# Fields of our engine that vLLM does not have.
_NOT_OF_VLLM = (
    *("check_target", "correction", "draft_sampling", "draft_window", "drawn_chains_from"),
    *("corrections", "prompt_lookup"),
)


@dataclass(frozen=True, slots=True)
class SpeculationFlags:
    """--speculation, --draft, -k, --speculative-config (JSON text) and --parallel-drafting-spec.

    None if not given.
    """

    speculation: bool | None = None
    draft: str | None = None
    num_speculative_tokens: int | None = None
    config: str | None = None
    trees: Mapping[str, Any] | str | None = None


@dataclass(frozen=True, slots=True)
class Defaults:
    """The values without options, from the catalog or the present deployment.

    Attributes:
        draft: the head; None without one.
        config: vLLM's form without "model"; {} if unknown.
        max_tokens: K up to which the head drafts well; None if unknown.
    """

    draft: ModelSource | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class WantedDrafts:
    """How options and defaults want to draft, before the files of the head are read.

    Attributes:
        draft: the head; None without one.
        config: vLLM's form without "model"; without K where nothing gives it.
        is_k_given: the user gave K.
    """

    draft: ModelSource | None
    config: dict[str, Any]
    is_k_given: bool


def wanted_drafts(options: SpeculationFlags, defaults: Defaults) -> WantedDrafts | None:
    """Return how the options want to draft; None decodes without drafts.

    Raises:
        UserError: options that contradict each other, or no head.
    """
    given = [options.draft, options.num_speculative_tokens, options.config, options.trees]
    if options.speculation is False:
        if any(value is not None for value in given):
            raise UserError("--no-speculation contradicts the other options of speculation.")
        return None
    config = {} if options.config is None else read_config(options.config, "--speculative-config")
    draft = _named_draft(options, config)
    if options.config is None and draft is None:
        merged = dict(defaults.config)
    else:  # K is the only default that holds for another head too
        merged = {key: value for key, value in defaults.config.items() if key == _K} | config
    if options.trees is not None:
        if _TREES in config:
            raise UserError(
                f"--parallel-drafting-spec and --speculative-config both give {_TREES}; leave one "
                "of them out."
            )
        merged[_TREES] = options.trees
    needs_head = merged.get("method", _DEFAULT_METHOD) != "ngram"
    if draft is None and needs_head:
        draft = defaults.draft
    if draft is None and needs_head and "model" not in merged:
        if options.speculation or any(value is not None for value in given):
            raise UserError(
                "No draft head is known for this model, and none was named. Name one with --draft "
                "(a hub id, s3:// or a folder), or take --no-speculation."
            )
        return None
    if options.num_speculative_tokens is not None:
        merged[_K] = options.num_speculative_tokens
    merged.setdefault("method", _DEFAULT_METHOD)
    k = merged.get(_K, 1)
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_SPECULATIVE_TOKENS:
        raise UserError(
            f"{_K} is {k!r}; expected a whole number from 1 to {MAX_SPECULATIVE_TOKENS}. To decode "
            "without drafts, take --no-speculation."
        )
    return WantedDrafts(draft, merged, options.num_speculative_tokens is not None or _K in config)


def configure_drafts(
    wanted: WantedDrafts, source: ContainerSource, defaults: Defaults, facts: HeadFacts | None
) -> dict[str, Any]:
    """Return vLLM's configuration without "model", with what the head's files say.

    Args:
        source: source of the container.
        facts: of the head; None if its files are not readable.

    Raises:
        UserError: the head is of another kind, or the container cannot draft so.
    """
    draft, merged = wanted.draft, dict(wanted.config)
    depth = facts.trained_depth if facts else None
    if depth is None and draft == defaults.draft:
        depth = defaults.max_tokens
    merged.setdefault(_K, default_k(depth))
    if merged.get(_TREES, AUTO) != AUTO and source == "native":
        default = merged[_K] if wanted.is_k_given or depth is None else min(merged[_K], depth)
        parallel, name = facts is None or facts.is_parallel, "" if draft is None else draft.name
        trees = CandidateTrees.parse(merged[_TREES], default, parallel=parallel)
        k = merged[_K] if wanted.is_k_given else None
        check_trees(trees, name, parallel, depth, merged.get("drawn_chains_from"), k)
        if not wanted.is_k_given:
            merged[_K] = trees.prediction_depth
    if draft is not None:
        merged["parallel_drafting"] = _is_parallel(merged.get("parallel_drafting"), draft, facts)
        if depth is not None and merged[_K] > depth:
            warnings.warn(
                f"{_K} is {merged[_K]}, but the head {draft.name!r} was trained for {depth}; "
                "deeper drafts are seldom accepted.",
                stacklevel=3,
            )
    _check_container(merged, source, draft)
    return merged


def read_config(text: str, source: str) -> dict[str, Any]:
    """Return a speculative configuration in vLLM's form; UserError for other text.

    `source` names the text in messages.
    """
    try:
        data = json.loads(text, object_pairs_hook=unique_keys(source))
    except json.JSONDecodeError as error:
        raise UserError(f"{source} is not JSON: {error}.") from None
    if not isinstance(data, dict):
        raise UserError(f"{source} is {text!r}; expected a JSON object.")
    return {key: value for key, value in data.items() if value is not None}


def _named_draft(options: SpeculationFlags, config: dict[str, Any]) -> ModelSource | None:
    """Take the head that the user named out of the configuration."""
    model, revision = config.pop("model", None), config.pop("revision", None)
    if model is None:
        return None if options.draft is None else source_of(options.draft, "draft")
    if options.draft is not None:
        raise UserError(
            f"--draft is {options.draft!r} and --speculative-config names the model {model!r}; "
            "leave one of them out."
        )
    found = source_of(str(model), "draft")
    return found if revision is None else replace(found, revision=str(revision))


def _is_parallel(asked: bool | None, draft: ModelSource, facts: HeadFacts | None) -> bool:
    """Return `parallel_drafting` by the head's kind, which no container finds out by itself."""
    if facts is None:
        return True if asked is None else asked
    if asked not in (None, facts.is_parallel):
        why = "a P-EAGLE head" if facts.is_parallel else "an EAGLE-3 head: it has no mask_hidden"
        raise UserError(
            f"parallel_drafting is {json.dumps(asked)}, but {draft.name!r} is {why}. Set it to "
            f"{json.dumps(facts.is_parallel)}, or leave it out."
        )
    return facts.is_parallel


def _check_container(
    config: Mapping[str, Any], source: ContainerSource, draft: ModelSource | None
) -> None:
    """Refuse what a source's container cannot do; the engine's own parser knows it for ours."""
    if source == "native":
        model = {} if draft is None else {"model": MODEL_FOLDER}
        SpeculativeConfig.parse({**model, **config})
        return
    if _TREES in config:
        raise UserError(
            f"{_TREES} is {config[_TREES]!r}: it asks for candidate trees, which the managed vLLM "
            "container does not have (it drafts one chain of num_speculative_tokens). Leave it "
            "out, or take --source native."
        )
    if _SCHEDULE in config and config.get("parallel_drafting"):
        raise UserError(
            f"{_SCHEDULE} is {config[_SCHEDULE]!r}: vLLM fails with a schedule of K and a head "
            "that drafts in parallel. Leave it out, or take --source native."
        )
    if ours := [key for key in _NOT_OF_VLLM if key in config]:
        raise UserError(
            f"--speculative-config has the key {ours[0]!r}, which vLLM does not know; leave it "
            "out, or take --source native."
        )
