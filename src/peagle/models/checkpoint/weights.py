"""The tensors of a head: read, compared with the shape that config.json promises, written."""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.disk import put_in_place, sync
from peagle.errors import CheckpointError
from peagle.model_folder import read_weight_map
from peagle.models.checkpoint.ends import EMBEDDING, FROM_TARGET_KEY, LM_HEAD
from peagle.models.checkpoint.files import save_tensors
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.quantization import is_packed

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_SHARDS = "model-*-of-*.safetensors"
_FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HASHED_ROWS = 4  # of each tensor
# Layers of the checkpoint that a layer of `Drafter` joins.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_MAP_TYPES = {"d2t": (torch.int64, torch.int32), "t2d": (torch.bool, torch.uint8)}


# ---- names and shapes ----


def split_tensors(drafter: Drafter) -> Iterator[tuple[str, Tensor]]:
    """Yield the head's tensors under their checkpoint names; fused projections are split."""
    for name, value in drafter.state_dict().items():
        parts = parts_in(name, value, drafter.config)
        rows = value.split([size for _, size in parts]) if len(parts) > 1 else [value]
        for (part_name, _), part in zip(parts, rows, strict=True):
            yield part_name, part


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a head."""
    with torch.device("meta"):
        drafter = Drafter(config)
    return {name: tuple(value.shape) for name, value in split_tensors(drafter)}


def parts_in(name: str, value: Tensor, config: DrafterConfig) -> list[tuple[str, int]]:
    """Return checkpoint names and row counts of a parameter; a fused one has several."""
    rows = {
        "q_proj": config.num_attention_heads * config.head_dim,
        **dict.fromkeys(("k_proj", "v_proj"), config.num_kv_heads * config.head_dim),
        **dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size),
    }
    for key, parts in FUSED.items():
        if f".{key}." in name:
            return [(name.replace(key, part), rows[part]) for part in parts]
    return [(name, value.shape[0])]


def fill(drafter: Drafter, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors, all of them there and of the right shape, into the head."""
    for name, parameter in drafter.state_dict().items():
        offset = 0
        for part_name, rows in parts_in(name, parameter, drafter.config):
            parameter[offset : offset + rows].copy_(tensors[part_name])
            offset += rows


# ---- checks ----


def check_tensors(
    tensors: dict[str, Tensor],
    config: DrafterConfig,
    source: str,
    from_target: Collection[str] = (),
) -> None:
    """Refuse tensors that do not make a head of `config`.

    `embed_tokens` and `lm_head` may be absent (they are then the target's, and so they are where
    `from_target` names them), and so may `t2d`, which follows from `d2t`. Maps of a head that keeps
    the whole vocabulary are dropped, and `mask_hidden`, which may be flat, gets its shape.

    Raises:
        CheckpointError: a tensor is missing, unknown, misshapen, of the wrong type or not finite.
    """
    if is_packed({name.rpartition(".")[2] for name in tensors}):
        raise CheckpointError(
            f"{source}: the head is stored quantised, and its config.json does not say how "
            "(quantization_config). Put the files of one export together."
        )
    expected = tensor_shapes(config)
    _drop_identity_maps(tensors, config, source)
    absent = _may_be_absent(config) | set(from_target)
    for name, shape in expected.items():
        if name not in tensors:
            if name in absent:
                continue
            raise CheckpointError(f"{source}: tensor {name!r} is missing.{_hint(name)}")
        if name == "mask_hidden" and tensors[name].numel() == torch.Size(shape).numel():
            tensors[name] = tensors[name].reshape(shape)
        _check_tensor(tensors[name], name, shape, source)
    if stored := sorted(set(from_target) & set(tensors)):
        raise CheckpointError(
            f"{source}: tensor {stored[0]!r} is stored, and peagle.{FROM_TARGET_KEY} in "
            "config.json says that it is the target's. Remove the name there if the head has its "
            "own."
        )
    if unknown := sorted(set(tensors) - set(expected)):
        raise CheckpointError(
            f"{source}: tensor {unknown[0]!r} is unknown to this head ({len(unknown)} in all). "
            "Its config.json and its weights do not belong together."
        )
    if config.is_pruned:
        _check_vocabulary_maps(tensors, config, source)


def _may_be_absent(config: DrafterConfig) -> set[str]:
    names = {"t2d"}
    if config.hidden_size == config.target_hidden_size:
        names.add(EMBEDDING)
        if not config.is_pruned:
            names.add(LM_HEAD)
    return names


def _hint(name: str) -> str:
    if name == "mask_hidden":
        return " It has a mask token, so it is a P-EAGLE head and needs its shared hidden state."
    if name.endswith("q_norm.weight"):
        return " Its config.json says that it is a Qwen3-style head, with a norm on each head."
    return ""


def _check_tensor(value: Tensor, name: str, shape: tuple[int, ...], source: str) -> None:
    if tuple(value.shape) != shape:
        raise CheckpointError(
            f"{source}: tensor {name!r} has shape {list(value.shape)}; expected {list(shape)}."
        )
    types = _MAP_TYPES.get(name, _FLOAT_TYPES)
    if value.dtype not in types:
        raise CheckpointError(
            f"{source}: tensor {name!r} has type {value.dtype}; expected "
            f"{', '.join(map(str, types))}."
        )
    if value.is_floating_point() and not bool(value.isfinite().all()):
        raise CheckpointError(
            f"{source}: tensor {name!r} holds NaN or infinite values: it was saved before it was "
            "filled, or it is damaged."
        )


def _drop_identity_maps(tensors: dict[str, Tensor], config: DrafterConfig, source: str) -> None:
    if config.is_pruned:
        return
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if (d2t is not None and bool(d2t.any())) or (t2d is not None and not bool(t2d.all())):
        raise CheckpointError(
            f"{source}: d2t and t2d select tokens, but draft_vocab_size is vocab_size "
            f"({config.vocab_size}). Its config.json and its weights do not belong together."
        )


def _check_vocabulary_maps(tensors: dict[str, Tensor], config: DrafterConfig, source: str) -> None:
    d2t, kept = tensors["d2t"], tensors.get("t2d")
    ids = d2t + torch.arange(config.draft_vocab_size)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) < len(ids):
        raise CheckpointError(
            f"{source}: d2t maps draft ids to target ids {int(ids.min())} to {int(ids.max())}; "
            f"expected distinct ids from 0 to {config.vocab_size - 1}."
        )
    if kept is not None and (int(kept.sum()) != len(ids) or not bool(kept[ids].all())):
        raise CheckpointError(f"{source}: d2t and t2d disagree about the draft vocabulary.")


# ---- files ----


def read_tensors(folder: Path) -> tuple[dict[str, Tensor], str]:
    """Read the tensors of a head under canonical names, and the file to name in messages.

    As in transformers: model.safetensors, else the shards of the index, else every safetensors
    file. `midlayer.` is an alias of `layers.0.`.

    Raises:
        CheckpointError: there are none, a shard is missing, or a file is not readable.
    """
    source, files, listed = _weight_files(folder)
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, value in _read_file(file, source):
            if tensors.setdefault(name, value) is not value:
                raise CheckpointError(f"{str(file)!r} holds tensor {name!r} a second time.")
    for name, file_name in listed.items():
        if _canonical(name) not in tensors:
            raise CheckpointError(f"{str(source)!r} lists tensor {name!r}, not in {file_name!r}.")
    return tensors, str(source)


def head_digest(folder: Path) -> str:
    """Return a hash of some rows of every tensor of a head, as they are stored.

    Both styles of a head have the same one: the maps of the vocabulary, which one of them may leave
    out, have no part in it.

    Raises:
        CheckpointError: as `read_tensors`.
    """
    source, files, _ = _weight_files(folder)
    parts: dict[str, bytes] = {}
    for file in files:
        with _opened(file, source) as reader:
            for name in set(reader.keys()) - set(_MAP_TYPES):
                rows = reader.get_slice(name)
                shape = rows.get_shape()
                if not shape:  # the one scale of a quantised weight
                    rows = reader.get_tensor(name).reshape(1)
                count = shape[0] if len(shape) > 1 else 1
                chosen = sorted(
                    {i * (count - 1) // (_HASHED_ROWS - 1) for i in range(_HASHED_ROWS)}
                )
                some = [rows[i : i + 1] if len(shape) > 1 else rows[:] for i in chosen]
                parts[_canonical(name)] = torch.cat(some).view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256()
    for name, part in sorted(parts.items()):
        digest.update(name.encode() + b"=" + part)
    return digest.hexdigest()


def _weight_files(folder: Path) -> tuple[Path, list[Path], dict[str, str]]:
    """Return what to name in messages, the files of a head, and the tensors that an index lists."""
    source = folder / WEIGHTS_NAME
    listed: dict[str, str] = {}
    if source.is_file():
        files = [source]
    elif (source := folder / INDEX_NAME).is_file():
        listed = read_weight_map(source)
        files = [folder / name for name in sorted(set(listed.values()))]
    else:
        source, files = folder, sorted(folder.glob("*.safetensors"))
    if not files:
        _refuse_without_weights(folder)
    return source, files, listed


def _canonical(name: str) -> str:
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _read_file(file: Path, source: Path) -> Iterator[tuple[str, Tensor]]:
    with _opened(file, source) as reader:
        for name in reader.keys():  # noqa: SIM118 (not a mapping)
            yield _canonical(name), reader.get_tensor(name)


@contextmanager
def _opened(file: Path, source: Path) -> Iterator[Any]:
    if not file.is_file():
        raise CheckpointError(f"{str(source)!r} names {file.name!r}, which is not there.")
    try:
        with safe_open(file, framework="pt") as reader:
            yield reader
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{str(file)!r} is not readable as safetensors: {error}.") from None


def _refuse_without_weights(folder: Path) -> None:
    pickles = sorted(p for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        raise CheckpointError(
            f"{str(pickles[0])!r} is a pickle, which can run code when it is read; expected "
            f"{WEIGHTS_NAME}. Save the tensors with safetensors."
        )
    raise CheckpointError(f"The draft head {str(folder)!r} has no {WEIGHTS_NAME}.")


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write tensors into a new file of the folder, which `replace_weights` puts in its place.

    The large write comes first, so that if it fails an older head in the folder is still whole;
    it is on the disk at return.
    """
    temporary = folder / (WEIGHTS_NAME + ".part")
    try:
        save_tensors(temporary, tensors, {"format": "pt"})
        sync(temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def replace_weights(folder: Path, temporary: Path) -> None:
    """Put new weights in the place of the folder's own, sharded ones included."""
    put_in_place(temporary, folder / WEIGHTS_NAME)
    remove_weights(folder, keep=WEIGHTS_NAME)


def remove_weights(folder: Path, *, keep: str = "") -> None:
    """Remove the weights of a head in the folder, but for the file `keep`."""
    for stale in (folder / WEIGHTS_NAME, folder / INDEX_NAME, *folder.glob(_SHARDS)):
        if stale.name != keep:
            stale.unlink(missing_ok=True)
