"""Facts of a config.json before anything is loaded: whether it is a head's, and the head's K."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from peagle.config import DEFAULT_K, CandidateTrees, SpeculativeConfig
from peagle.config.speculative import (
    AUTO,
    MAX_BEAM,
    MAX_BEAM_ROWS,
    NEVER,
    TREE_DEFAULTS,
)
from peagle.errors import CheckpointError, UserError
from peagle.model_folder import read_json

# Keys that only heads have, in the style of vLLM or of speculators.
_SURE_KEYS = (
    *("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", "peagle"),
    *("speculators_model_type", "speculators_config"),
)
# Keys that whole models of other kinds may have too.
_HEAD_KEYS = (
    *_SURE_KEYS,
    *("target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm"),
    *("mask_token_id", "pard_token", "ptd_token_id", "transformer_layer_config"),
)
_WHOLE_MODEL_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration")


def refuse_whole_model(data: Mapping[str, Any], source: str) -> None:
    """Refuse the config.json of a whole language model where a draft head is wanted.

    Args:
        data: the file.
        source: the file, or its folder, for the message.

    Raises:
        UserError: it names the architecture of a whole model, and has no key of a head.
    """
    named = data.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    if not isinstance(first, str) or not first.endswith(_WHOLE_MODEL_SUFFIXES):
        return
    if "eagle" in first.lower() or any(data.get(key) is not None for key in _HEAD_KEYS):
        return
    name = source.removesuffix("/config.json")
    raise UserError(
        f"{name!r} is a whole model ({first}), not a draft head. A draft head is a small network "
        "that was trained to guess the next tokens of one target from its hidden states. Name a "
        "head of your target instead (peagle train makes one), or draft without a head (--method "
        "ngram). If this model is what you want to run, name it with --target."
    )


def refuse_head(data: Mapping[str, Any], source: str) -> None:
    """Refuse the config.json of a draft head, in the folder `source`, where a target is wanted.

    Raises:
        UserError: it has a key that only heads have.
    """
    if any(data.get(key) is not None for key in _SURE_KEYS):
        raise UserError(
            f"{source!r} is a draft head, not a target. Name its target instead, and the head with "
            "--draft."
        )


# Searched in vLLM's order; all are written, equal, because its versions read different ones.
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
RECORD_NAME = "train.json"  # the record of a head's training, beside its weights
DEPTH_KEY = "num_speculative_tokens_trained"  # of the "peagle" object of config.json


def is_parallel(data: Any) -> bool:
    """Return whether a config.json belongs to a P-EAGLE head, which names a mask token."""
    if not isinstance(data, Mapping):
        return False
    kind = data.get("speculators_model_type")
    return kind == "peagle" or (kind is None and any(data.get(k) is not None for k in MASK_KEYS))


def is_parallel_head(folder: Path) -> bool | None:
    """Return whether the head in a folder is a P-EAGLE head; None where it has no config.json."""
    config = folder / "config.json"
    return is_parallel(read_json(config)) if config.is_file() else None


def default_k(trained: int | None) -> int:
    """Return K where none is given: the trained depth, at most 7; 7 where it is not known."""
    return min(trained or DEFAULT_K, DEFAULT_K)


def trained_depth(data: Mapping[str, Any]) -> Any:
    """Return the K that a config.json says its head was trained for; None where it does not say.

    Our own key comes first. Without the "peagle" object, the tokens that a file in the style of
    speculators proposes to draft are as many as that package trained.

    Args:
        data: the file, in either style. The value is returned as it stands there, unchecked.

    Raises:
        CheckpointError: the proposal methods are not a list of objects.
    """
    if own := data.get("peagle"):
        return own.get(DEPTH_KEY)
    proposal = data.get("speculators_config")
    if not proposal:
        return data.get("speculative_tokens")
    methods = (proposal.get("proposal_methods") if isinstance(proposal, Mapping) else None) or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], Mapping):
        raise CheckpointError(
            f"speculators_config.proposal_methods is {methods!r}; expected a list of objects."
        )
    return methods[0].get("speculative_tokens")


def kind_and_depth(folder: str | Path) -> tuple[bool, int | None]:
    """Return whether a head is a P-EAGLE head, and the K that it was trained for, if known.

    A file that cannot be read counts as a P-EAGLE head's: loading the head reports the fault.
    """
    data, depth = {}, None
    try:
        data = read_json(Path(folder) / "config.json")
        depth = trained_depth(data)
    except (OSError, ValueError, AttributeError, CheckpointError):
        pass
    return not data or is_parallel(data), depth if type(depth) is int and depth >= 1 else None


def with_depth(config: SpeculativeConfig, folder: str | Path) -> SpeculativeConfig:
    """Return the configuration with K filled in from the head in `folder` where none was given.

    K is then automatic up to what the head was trained for, or up to the nodes of candidate trees;
    a head drafts such trees where steps run as CUDA graphs (`SpeculativeConfig.settled`).
    A schedule of K, or synthetic rates, give K themselves; of trees a schedule gives the nodes, so
    their depth is still the head's. Drawn chains lead those of a P-EAGLE head from
    `DRAWN_CHAINS_FROM` on unless the configuration says otherwise.

    Raises:
        UserError: trees that the head cannot draft (`check_trees`).
    """
    schedule, shape = config.num_speculative_tokens_per_batch_size, config.parallel_drafting_spec
    is_open = schedule in (None, AUTO) and config.synthetic_acceptance_rates is None
    k, head = config.num_speculative_tokens, config.model
    if head is None or (shape is None and (k is not None or not is_open)):
        return config
    parallel, depth = kind_and_depth(folder)
    if shape in (None, AUTO):
        _check_drawn_chains(config.drawn_chains_from, head, parallel)
        if config.draft_sampling == "argmax":
            config = replace(config, parallel_drafting_spec=AUTO)
        if k is not None:
            check_tree_depth(CandidateTrees.parse({}, k), depth, head, k)
            return config
    else:
        trees = CandidateTrees.parse(shape, k or default_k(depth), parallel=parallel)
        check_trees(trees, head, parallel, depth, config.drawn_chains_from, k)
        config = config.with_trees(trees, parallel=parallel)
        if k is not None or (isinstance(shape, CandidateTrees) and not is_open):
            return config
        k = trees.prediction_depth
    return replace(
        config,
        num_speculative_tokens=k or default_k(depth),
        num_speculative_tokens_per_batch_size=AUTO if is_open else schedule,
    )


def check_trees(
    trees: CandidateTrees,
    head: str,
    parallel: bool,
    trained: int | None,
    drawn_chains_from: float | Literal["never"] | None,
    k: int | None,
) -> None:
    """Refuse trees that a head cannot draft.

    Args:
        head: its name, for the message.
        parallel: whether it is a P-EAGLE head.
        trained: as of `check_tree_depth`.
        drawn_chains_from: as of `SpeculativeConfig`.
        k: as of `check_tree_depth`.

    Raises:
        UserError: naming the value and the head, and what may be done.
    """
    check_tree_depth(trees, trained, head, k)
    if parallel:
        return
    beam, depth = trees.num_parallel_trees, trees.prediction_depth
    if beam > MAX_BEAM:
        raise UserError(
            f"parallel_drafting_spec.num_parallel_trees is {beam}; expected 1 to {MAX_BEAM}: the "
            f"nodes of each depth from which the EAGLE-3 head {head!r} goes on. {TREE_DEFAULTS}"
        )
    if beam * (depth - 1) > MAX_BEAM_ROWS:
        raise UserError(
            f"parallel_drafting_spec asks the EAGLE-3 head {head!r} to go on from {beam} nodes at "
            f"{depth - 1} depths; expected at most {MAX_BEAM_ROWS} nodes in all. Make "
            f"num_parallel_trees or prediction_depth smaller. {TREE_DEFAULTS}"
        )
    _check_drawn_chains(drawn_chains_from, head, parallel)


def _check_drawn_chains(first: float | Literal["never"] | None, head: str, parallel: bool) -> None:
    """Refuse drawn chains before the trees of an EAGLE-3 head."""
    if first not in (None, NEVER) and not parallel:
        raise UserError(
            f'drawn_chains_from is {first!r}, but {head!r} is an EAGLE-3 head; "never" '
            "or none is expected: no drawn chain leads its trees. Leave it out, or leave "
            'parallel_drafting_spec out and set draft_sampling to "probabilistic".'
        )


def check_tree_depth(
    trees: CandidateTrees, trained: int | None, head: str, k: int | None = None
) -> None:
    """Refuse trees that are deeper than the drafts that the head was trained for.

    Args:
        trained: as `trained_depth` returns it; None: unknown.
        head: its name, for the message.
        k: num_speculative_tokens where it was given; it is the depth, and the message names it.

    Raises:
        UserError: naming both depths and the default.
    """
    if trained is None or trees.prediction_depth <= trained:
        return
    name, remedy = "parallel_drafting_spec.prediction_depth", TREE_DEFAULTS
    if k is not None:
        name = "num_speculative_tokens"
        remedy = f"Left out, it is what the head was trained for, at most {DEFAULT_K}."
    raise UserError(
        f"{name} is {trees.prediction_depth}; expected at most {trained}, which the head {head!r} "
        f"was trained for. {remedy}"
    )
