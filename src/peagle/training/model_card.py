"""The model card of a head.

It says what the head's config.json, its tensors and the record of its training say, and nothing
else: what they leave out is called not recorded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCardData

from peagle.models.hub import DEFAULT_REVISION
from peagle.models.trained_depth import default_depth
from peagle.training.published_head import PublishedHead, TrainRecord

NOT_RECORDED = "not recorded"


def model_card(
    head: PublishedHead,
    repo: str,
    target: str,
    license: str,
    *,
    revision: str = DEFAULT_REVISION,
) -> str:
    """README.md of a head: metadata for the hub, then text.

    Args:
        head: what is known of it.
        repo: "owner/name" that it is published as; revision: the branch.
        target: hub id of its target.
        license: identifier of the head's licence, as the hub has it.
    """
    name = repo.partition("/")[2]
    tags = ["speculative-decoding", head.kind.lower(), "peagle", "vllm"]
    metadata = ModelCardData(
        base_model=target,
        library_name="peagle",
        license=license,
        pipeline_tag="text-generation",
        tags=[*tags, "speculators"] if head.format == "speculators" else tags,
    )
    return (
        "\n\n".join(
            [
                f"---\n{metadata.to_yaml().strip()}\n---",
                f"# {name}",
                _what_it_is(head, target),
                _table(_shape_rows(head, target)),
                _how_to_serve(head, repo, target, revision),
                _training_text(head.training),
                _acceptance_text(head.training),
            ]
        )
        + "\n"
    )


def _what_it_is(head: PublishedHead, target: str) -> str:
    kind, passes = "An EAGLE-3", "one after another"
    if head.config.is_parallel:
        kind, passes = "A P-EAGLE", "all in one pass"
    return (
        f"{kind} draft head for `{target}`, for speculative decoding: it proposes K tokens, "
        f"{passes}, and the target verifies them. It changes the speed of the target, not its "
        "output, and is of no use without it. The target has a licence of its own."
    )


def _shape_rows(head: PublishedHead, target: str) -> dict[str, str]:
    config, mark = head.config, head.fingerprint
    depth, tokenizer = config.trained_depth, mark.tokenizer_sha256
    return {
        "kind": "P-EAGLE (parallel drafting)" if config.is_parallel else "EAGLE-3 (autoregressive)",
        "target": f"`{target}` ({mark.num_layers} layers, width {mark.hidden_size:,})",
        "layers": f"{config.num_layers}, width {config.hidden_size:,}",
        "parameters": f"{head.parameters:,}, {head.dtype}",
        "K it was trained for": NOT_RECORDED if depth is None else str(depth),
        "draft vocabulary": f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens",
        "reads the states entering target layers": ", ".join(map(str, config.aux_layer_ids)),
        "longest context": f"{config.max_position_embeddings:,} tokens",
        "longest sequence it was trained on": (
            NOT_RECORDED if head.trained_length is None else f"{head.trained_length:,} tokens"
        ),
        "checkpoint": f"style of {head.format}, safetensors",
        "target's tokenizer.json, SHA-256": f"`{tokenizer}`" if tokenizer else NOT_RECORDED,
        "target's lm_head rows, SHA-256": f"`{mark.lm_head_sha256}`",
    }


def _how_to_serve(head: PublishedHead, repo: str, target: str, revision: str) -> str:
    depth = head.config.trained_depth
    k = default_depth(depth)
    pinned = repo if revision == DEFAULT_REVISION else f"{repo}@{revision}"
    settings: dict[str, Any] = {"method": "eagle3", "model": repo}
    if revision != DEFAULT_REVISION:
        settings["revision"] = revision
    settings["num_speculative_tokens"] = k
    if head.config.is_parallel:
        settings["parallel_drafting"] = True
    speculation = json.dumps(settings)
    why = (
        f"K = {k} is peagle's default; the K that the head was trained for is not recorded."
        if depth is None
        else f"K = {k} in the examples; the head was trained for K up to {depth}."
    )
    return (
        f"## Serve it\n\n{why} With peagle, which compares the target with the fingerprint in the "
        f"head and refuses another one:\n\n"
        f"```sh\npeagle serve {target} --draft {pinned} --num-speculative-tokens {k}\n```\n\n"
        f"With vLLM:\n\n```sh\nvllm serve {target} \\\n  --speculative-config '{speculation}'\n"
        "```\n\nOn SageMaker, in the environment of its vLLM container or of one that runs "
        f"`peagle serve --sagemaker`:\n\n```sh\nSM_VLLM_MODEL={target}\n"
        f"SM_VLLM_SPECULATIVE_CONFIG='{speculation}'\n```\n\n"
        "No run of this head in vLLM or on SageMaker is recorded."
    )


def _training_text(record: TrainRecord | None) -> str:
    if record is None:
        return "## Training\n\nNot recorded."
    method, checked = record.config.method, record.checked
    seconds, loss = record.seconds, checked and checked.loss
    versions = {name: getattr(record, name) for name in ("peagle", "torch", "transformers")}
    software = ", ".join(f"{name} {_plain(v)}" for name, v in versions.items() if v)
    rows = {
        "method": method and f"{method.name}, depth {method.depth}",
        "loss": method and method.loss,
        "steps": _count(record.steps),
        "epochs": None if record.epochs is None else f"{record.epochs:.2f}",
        "responses of the target trained on": _count(record.sequences),
        "data, SHA-256": record.data_sha256,
        "validation loss": None if loss is None else f"{loss:.4f}",
        "hardware": record.device,
        "duration": None if seconds is None else f"{seconds / 60:.1f} minutes",
        "software": software or None,
        "commit of peagle": record.commit,
    }
    shown = {name: _plain(value) if value else NOT_RECORDED for name, value in rows.items()}
    return f"## Training\n\n{_table(shown)}"


def _acceptance_text(record: TrainRecord | None) -> str:
    checked = record.checked if record else None
    if record is None or checked is None or not checked.acceptance_lengths:
        return "## Acceptance\n\nNot recorded."
    run = record.config.run
    at_step = "" if checked.step is None else f" at step {checked.step:,}"
    rows = {str(k): f"{v:.3f}" for k, v in enumerate(checked.acceptance_lengths, start=1)}
    return (
        f"## Acceptance\n\nAcceptance length (1 + accepted draft tokens / drafts) in the validation"
        f"{at_step} of the training: simulated as serving walks a response, at temperature 0, on "
        "the validation responses of the target, in their prompt format. "
        f"Types: target {_plain(run.target_dtype or NOT_RECORDED)}, head "
        f"{_plain(run.precision or NOT_RECORDED)}. Other prompts have other figures.\n\n"
        + _table(rows, "| K | acceptance length |")
    )


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _plain(text: str) -> str:
    """Text of a record as one cell: nothing in it ends the cell or becomes markup."""
    return re.sub(r"([\\`*_<>\[\]|#])", r"\\\1", " ".join(text.split()))


def _table(rows: Mapping[str, str], heading: str = "| | |") -> str:
    lines = [heading, "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows.items())])
