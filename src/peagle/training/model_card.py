"""The model card of a head, from the template model_card.md.

The card says what the head's config.json, its tensors and the record of its training say, and
nothing else: "not recorded" stands for what they leave out.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from peagle.models.head_json import default_depth
from peagle.models.hub import DEFAULT_REVISION
from peagle.training.published_head import PublishedHead, TrainRecord

_TEMPLATE = Path(__file__).with_name("model_card.md")
_Rows = list[tuple[str, str | None]]


def model_card(
    head: PublishedHead,
    repo: str,
    target: str,
    license: str,
    *,
    revision: str = DEFAULT_REVISION,
) -> str:
    """Return README.md of a head: metadata for the hub, then text.

    Args:
        head: what is known of it.
        repo: "owner/name" that it is published as; revision: the branch.
        target: hub id of its target.
        license: identifier of the head's licence, as the hub has it.
    """
    tags = ["speculative-decoding", head.kind.lower(), "peagle", "vllm"]
    metadata = ModelCardData(
        base_model=target,
        library_name="peagle",
        license=license,
        pipeline_tag="text-generation",
        tags=[*tags, "speculators"] if head.format == "speculators" else tags,
    )
    is_main, depth = revision == DEFAULT_REVISION, head.config.trained_depth
    k = default_depth(depth)
    speculation = {"method": "eagle3", "model": repo}
    speculation |= {} if is_main else {"revision": revision}
    speculation |= {"num_speculative_tokens": k}
    speculation |= {"parallel_drafting": True} if head.config.is_parallel else {}
    record = head.training or TrainRecord()
    lengths = enumerate(record.acceptance_lengths, start=1)
    card = ModelCard.from_template(
        metadata,
        template_path=str(_TEMPLATE),
        name=repo.partition("/")[2],
        config=head.config,
        target=target,
        shape=_shape_rows(head, target),
        depth=depth,
        k=k,
        pinned=repo if is_main else f"{repo}@{revision}",
        speculation=json.dumps(speculation),
        training=_training_rows(record) if head.training else [],
        acceptance=[(k, f"{length:.3f}") for k, length in lengths],
        at_step="" if record.step is None else f" at step {record.step:,}",
        target_dtype=_escape(record.target_dtype or "not recorded"),
        head_dtype=_escape(record.precision or "not recorded"),
    )
    return f"{card}\n"


def _shape_rows(head: PublishedHead, target: str) -> _Rows:
    config, mark = head.config, head.fingerprint
    depth, tokenizer = config.trained_depth, mark.tokenizer_sha256
    longest = head.trained_length
    drafting = "parallel drafting" if config.is_parallel else "autoregressive"
    return [
        ("kind", f"{head.kind} ({drafting})"),
        ("target", f"`{target}` ({mark.num_layers} layers, width {mark.hidden_size:,})"),
        ("layers", f"{config.num_layers}, width {config.hidden_size:,}"),
        ("parameters", f"{head.parameters:,}, {head.dtype}"),
        ("K it was trained for", None if depth is None else str(depth)),
        ("draft vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"),
        ("reads the states entering target layers", ", ".join(map(str, config.aux_layer_ids))),
        ("longest context", f"{config.max_position_embeddings:,} tokens"),
        ("longest sequence it was trained on", None if longest is None else f"{longest:,} tokens"),
        ("checkpoint", f"style of {head.format}, safetensors"),
        ("target's tokenizer.json, SHA-256", f"`{tokenizer}`" if tokenizer else None),
        ("target's lm_head rows, SHA-256", f"`{mark.lm_head_sha256}`"),
    ]


def _training_rows(record: TrainRecord) -> _Rows:
    versions = {name: getattr(record, name) for name in ("peagle", "torch", "transformers")}
    software = ", ".join(f"{name} {_escape(v)}" for name, v in versions.items() if v)

    def shown(value: Any, form: str = "{}") -> str | None:
        return None if value is None else _escape(form.format(value))

    return [
        ("method", shown(record.method and f"{record.method}, depth {record.depth}")),
        ("loss", shown(record.loss)),
        ("steps", shown(record.steps, "{:,}")),
        ("epochs", shown(record.epochs, "{:.2f}")),
        ("responses of the target trained on", shown(record.sequences, "{:,}")),
        ("data, SHA-256", shown(record.data_sha256)),
        ("validation loss", shown(record.validation_loss, "{:.4f}")),
        ("hardware", shown(record.device)),
        ("duration", shown(record.seconds and record.seconds / 60, "{:.1f} minutes")),
        ("software", software or None),
        ("commit of peagle", shown(record.commit)),
    ]


def _escape(text: str) -> str:
    """Text of a record as one cell of a table: nothing in it ends the cell or becomes markup."""
    return re.sub(r"([\\`*_<>\[\]|#])", r"\\\1", " ".join(text.split()))
