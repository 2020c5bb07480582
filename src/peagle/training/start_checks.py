"""Checks of a run before it begins that need neither its target nor torch.

So `peagle train` refuses a mistake at once, not after a model has been loaded.
"""

from math import prod
from pathlib import Path
from typing import Any

from peagle.config import require_writable_folder
from peagle.disk import free_bytes, locked, size_text
from peagle.errors import CheckpointError, UserError
from peagle.model_folder import read_file_header, read_json, sha256_of
from peagle.model_shape import ModelShape
from peagle.training import checkpoint_facts
from peagle.training.config import TrainConfig

_MAX_AUX = 3  # states of the feature, where the configuration names no layers
_ENDS = ("embed_tokens.weight", "lm_head.weight")
_SAVED_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_start(config: TrainConfig, *, resume: bool) -> None:
    """Refuse a run that cannot begin.

    Raises:
        UserError: a path is not there; the output cannot be written, another process writes it, or
            it has too little room; an earlier run would be overwritten; there is none to resume, or
            it was made with another configuration or other data.
    """
    config.check_paths()
    require_writable_folder(config.output, "The output folder")
    if config.output.is_dir():
        with locked(config.output):
            pass  # what another process is writing is no earlier run
    checkpoint = config.output / "checkpoint"
    if resume:
        checkpoint_facts.require_checkpoint(checkpoint)
        _check_facts(config, checkpoint)
    else:
        checkpoint_facts.refuse_earlier_run(checkpoint)
    if (sizes := least_sizes(config)) is not None:
        require_room(config.output, *sizes, resume=resume)


def _check_facts(config: TrainConfig, checkpoint: Path) -> None:
    """Compare the files' facts with the checkpoint, whose other facts the trainer compares."""
    record, facts = checkpoint_facts.read_record(checkpoint), checkpoint_facts.config_facts(config)
    if not record:
        return  # damaged: the trainer says how
    data = config.data
    paths = {"train": data.train, "validation": data.validation}
    facts["data"] |= {name: path and sha256_of(path) for name, path in paths.items()}
    for name in facts.keys() & {"data", "correction"}:
        if isinstance(before := record.get(name), dict) and facts[name] is not None:
            facts[name] = before | facts[name]
    checkpoint_facts.require_same_facts(checkpoint, record, facts)
    checkpoint_facts.require_steps_left(checkpoint, record.get("step", 0), config.optimizer.steps)


# ---- room on the disk ----


def missing_room(output: Path, checkpoint: int, head: int, *, resume: bool = False) -> str:
    """Say how much more a run writes than is free; "" if it has room.

    New checkpoints and heads are written before old ones are deleted, so each counts twice, or
    once more where a run goes on.

    Args:
        output: folder of the run, which need not be there.
        checkpoint, head: bytes of each.
    """
    needed, free = (checkpoint + head) * (1 if resume else 2), free_bytes(output)
    if needed <= free:
        return ""
    return (
        f"A run writes {size_text(needed)} to {str(output)!r}, where {size_text(free)} are free; "
        "name another output, or free some."
    )


def require_room(output: Path, checkpoint: int, head: int, *, resume: bool) -> None:
    """Refuse a run with too little room, as `missing_room` finds it.

    Raises:
        UserError: it has.
    """
    if problem := missing_room(output, checkpoint, head, resume=resume):
        raise UserError(problem)


def least_sizes(config: TrainConfig) -> tuple[int, int] | None:
    """Return the least bytes of a checkpoint and of a head; None where files do not tell.

    Matrices alone count, which are nearly all of a head. A correction is small.
    """
    if config.correction.on is not None:
        return None
    try:
        if config.head.init is not None:
            header = read_file_header(config.head.init / "model.safetensors")
            counts = {name: prod(entry["shape"]) for name, entry in header.items()}
            in_ends = [counts.pop(name, 0) for name in _ENDS]
            in_layers = sum(counts.values())
        else:
            *in_ends, in_layers = _fresh_sizes(config)
    except (CheckpointError, OSError, ValueError, AttributeError, KeyError, TypeError):
        return None  # what loads the files says what is wrong with them
    ends = zip(_ENDS, in_ends, strict=True)
    frozen = sum(count for name, count in ends if name in config.head.frozen)
    states = 1 if config.optimizer.name == "muon" else 2
    trained = sum(in_ends) + in_layers - frozen
    moments = 2 * (trained - in_layers) + states * in_layers
    in_file = sum(in_ends) if not config.head.freezes_ends else 0
    size = _SAVED_BYTES[config.run.save_dtype]
    if (quantization := config.head.layer_quantization) is None:
        saved = size * (in_file + in_layers)
    else:
        # Some layers may have 8 bits where this counts 4.
        bits = 8 if quantization.type == "int8" else 4
        scales = 2 * in_layers // quantization.group_size
        saved = size * in_file + in_layers * bits // 8 + scales
    width = 4 if config.run.precision == "float32" else 2
    return 4 * (trained + moments) + width * frozen, saved


def _fresh_sizes(config: TrainConfig) -> tuple[int, int, int]:
    """Return the numbers in the embedding, in lm_head, and in the other matrices of a new head.

    Raises:
        CheckpointError, OSError, AttributeError, KeyError, TypeError: the target's config.json does
            not tell.
    """
    # Arithmetic with a size that the file lacks is a TypeError.
    model: Any = ModelShape.from_json(read_json(config.target / "config.json"))
    head, width = config.head, model.hidden_size
    size, vocabulary = head.hidden_size or width, model.vocab_size
    heads = head.num_attention_heads or model.num_heads
    kv_heads = head.num_kv_heads or min(model.num_kv_heads or heads, heads)
    inner = (head.head_dim or model.text.get("head_dim") or size // heads) * heads
    keys = 2 * inner // heads * kv_heads
    mlp = 3 * size * (head.intermediate_size or model.intermediate_size)
    # Layer 0 reads the embedding and the hidden state side by side.
    layers = head.num_layers * (size * (inner + keys) + inner * size + mlp) + size * (inner + keys)
    num_aux = len(head.aux_layer_ids or ()) or min(_MAX_AUX, model.num_layers)
    fc = num_aux * width * size
    kept = min(head.draft_vocab_size or vocabulary, vocabulary)
    return vocabulary * size, kept * size, layers + fc
