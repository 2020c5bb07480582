"""The file of a correction, beside its head.

`correction.st` holds safetensors. Its name does not end in .safetensors, because vLLM reads every
file that does, and refuses a head with tensors that it does not know.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.disk import put_in_place
from peagle.errors import CheckpointError, UserError
from peagle.model_folder import parse_json
from peagle.models.checkpoint.files import save_tensors
from peagle.models.checkpoint.weights import head_digest
from peagle.models.correction import Correction, DraftCorrection
from peagle.models.drafter import Drafter, DrafterConfig

CORRECTION_NAME = "correction.st"
FORMAT_VERSION = 1
_BLENDS = (0.75, 0.5, 0.25)
_FORM = "gated"  # files of a version in between named other forms
_KEY = "peagle_correction"  # of the file's metadata
_SIZES = ("hidden_size", "vocab_size", "draft_vocab_size")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_OWN = "beside the head"
_REMEDY = (
    "Fit one with `peagle train --correction-on`, move it away, or set "
    '"correction": false in the speculative configuration.'
)


def head_identity(folder: str | Path, config: DrafterConfig) -> dict[str, Any]:
    """Return the facts that tie a correction to the head in `folder`: sizes and `head_digest`.

    Raises:
        CheckpointError: the head has no readable weights.
    """
    return {**{name: getattr(config, name) for name in _SIZES}, "sha256": head_digest(Path(folder))}


def save_correction(
    folder: str | Path,
    correction: Correction,
    head: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    record: Mapping[str, Any] | None = None,
) -> None:
    """Write the correction of the head in `folder` beside it, in place of an earlier one.

    Args:
        head: `head_identity` of the head that it was fitted on.
        dtype: type of the stored weights.
        record: where the correction comes from.

    Raises:
        UserError: it could not be written.
    """
    path = Path(folder) / CORRECTION_NAME
    facts = {"format_version": FORMAT_VERSION, "head": dict(head), "record": dict(record or {})}
    tensors = {
        name: value.detach().to(dtype).cpu().contiguous()
        for name, value in correction.state_dict().items()
    }
    _write(path, tensors, facts)


def _write(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    temporary = path.with_name(path.name + ".part")
    try:
        save_tensors(temporary, tensors, {_KEY: json.dumps(facts)})
        put_in_place(temporary, path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"The correction {str(path)!r} could not be written: {error}.") from None


def find_correction(folder: str | Path) -> Path | None:
    """Return the file of the correction beside the head in `folder`; None without one.

    Raises:
        CheckpointError: a folder has its name, or a link that leads to no file.
    """
    path = Path(folder) / CORRECTION_NAME
    if path.is_file():
        return path
    if os.path.lexists(path):
        found = "a folder" if path.is_dir() else "a link that leads to no file"
        raise CheckpointError(f"{str(path)!r} is {found}; expected a file. {_REMEDY}")
    return None


def copy_correction(source: Path, destination: Path, config: DrafterConfig) -> bool:
    """Copy the correction of a head that was written anew; False if the head has none.

    If the stored weights have changed by that, the copy names the new ones as its head's.

    Args:
        source, destination: folders of the head before and after.
        config: its shape.

    Raises:
        CheckpointError: the correction cannot be read.
        UserError: it could not be written.
    """
    if (path := find_correction(source)) is None:
        return False
    tensors, facts = _read(path)
    before, after = (head_identity(folder, config) for folder in (source, destination))
    if before != after and facts.get("head") == before:
        _write(destination / CORRECTION_NAME, tensors, {**facts, "head": after})
    else:
        shutil.copyfile(path, destination / CORRECTION_NAME)
    return True


def blend_back(folder: Path, before: Path) -> Iterator[float]:
    """Yield 1, then less and less: the share of its fit that the correction in `folder` keeps.

    Its weights are before + share (fit - before), with those of the head in `before`. A head
    without a correction counts as the fit with Wo = 0, whose term is 0. Nothing follows 1 where
    the shapes differ.
    """
    yield 1.0
    path, present = folder / CORRECTION_NAME, find_correction(before)
    fit, facts = _read(path)
    record = facts["record"]
    none = fit | {"down.weight": torch.zeros_like(fit["down.weight"])}
    old = none if present is None else _read(present)[0]
    if any(old[name].shape != value.shape for name, value in fit.items()):
        return
    for share in _BLENDS:
        blend = {
            name: old[name].float().lerp(value.float(), share).to(value.dtype)
            for name, value in fit.items()
        }
        _write(path, blend, facts | {"record": record | {"kept_share": share}})
        yield share


def load_correction(folder: str | Path, drafter: Drafter) -> DraftCorrection | None:
    """Return the correction beside the head in `folder`, ready for `drafter`; None without one.

    Raises:
        CheckpointError: as `read_correction`.
    """
    correction = read_correction(folder, drafter.config)
    if correction is None:
        return None
    weight = drafter.lm_head.weight
    correction.to(weight.device, weight.dtype)
    return DraftCorrection(correction, drafter.embed_tokens.weight, weight)


def load_corrections(
    folder: str | Path,
    drafter: Drafter,
    named: Mapping[str, str],
    *,
    with_own: bool,
    check_bytes: Callable[[int], None],
) -> DraftCorrection:
    """Return several corrections of the head in `folder`, ready for `drafter`.

    Number 0 is the one beside the head. If there is none, or without `with_own`, number 0 changes
    nothing.

    Args:
        named: the numbers 1, 2, ... by name: a file, or the folder with it.
        check_bytes: takes the size of all tables before they are made.

    Raises:
        CheckpointError: as `read_corrections`.
    """
    config, weight = drafter.config, drafter.lm_head.weight
    found = read_corrections(folder, config, named, with_own=with_own)
    every = list(found.values())
    rank, width = every[0].rank, every[0].width
    if _OWN not in found:
        every = [_without_effect(config.hidden_size, rank, width), *every]
    num_slots = 1 + max(len(one.slots) for one in every)  # as `DraftCorrection` has them
    num_values = (config.vocab_size + config.hidden_size + rank + num_slots) * width
    num_values += config.draft_vocab_size * rank
    check_bytes(len(every) * num_values * weight.dtype.itemsize)
    for one in every:
        one.to(weight.device, weight.dtype)
    return DraftCorrection(every, drafter.embed_tokens.weight, weight)


def read_corrections(
    folder: str | Path, config: DrafterConfig, named: Mapping[str, str], *, with_own: bool
) -> dict[str, Correction]:
    """Return the corrections of `load_corrections` as they are stored, without one of no effect.

    Args:
        config: the shape of the head in `folder`.

    Raises:
        CheckpointError: as `read_correction`; a file is missing, or ranks or widths differ.
    """
    own = read_correction(folder, config) if with_own else None
    found = {} if own is None else {_OWN: own}
    for name, source in named.items():
        path = Path(source).expanduser()
        path = path / CORRECTION_NAME if path.is_dir() else path
        try:
            found[repr(name)] = _read_of_head(path, folder, config)
        except CheckpointError as error:
            remedy = "Name one that was fitted on this head, or leave it out."
            text = str(error).replace(_REMEDY, remedy)
            raise CheckpointError(f"The correction {name!r}: {text}") from None
    for name, one in found.items():
        first, like = next(iter(found.items()))
        if (one.rank, one.width) != (like.rank, like.width):
            raise CheckpointError(
                f"The correction {name} has rank {one.rank} and width {one.width}; expected "
                f"{like.rank} and {like.width}, as the correction {first}. Fit it again with these."
            )
    return found


def _without_effect(hidden_size: int, rank: int, width: int) -> Correction:
    """Return a correction whose term is 0."""
    correction = Correction(hidden_size, rank=rank, width=width, num_slots=1)
    for parameter in correction.parameters():
        torch.nn.init.zeros_(parameter)
    return correction


def read_correction(folder: str | Path, config: DrafterConfig) -> Correction | None:
    """Return the correction beside the head in `folder`, as it is stored; None without one.

    Args:
        config: the shape of that head.

    Raises:
        CheckpointError: it is another head's, of other sizes, or not readable.
    """
    path = find_correction(folder)
    return None if path is None else _read_of_head(path, folder, config)


def _read_of_head(path: Path, folder: str | Path, config: DrafterConfig) -> Correction:
    """Return the correction in a file, of the head in `folder`."""
    if not config.is_parallel:
        raise CheckpointError(
            f"{str(path)!r}: {str(folder)!r} is an EAGLE-3 head, whose drafts see each other; "
            f"expected a P-EAGLE head. {_REMEDY}"
        )
    tensors, facts = _read(path)
    if (form := facts.get("form", _FORM)) != _FORM:
        raise CheckpointError(
            f"{str(path)!r} is a correction of the form {form!r}; expected {_FORM!r}, the only "
            f"one. {_REMEDY}"
        )
    version = facts.get("format_version")
    if type(version) is not int or version > FORMAT_VERSION:
        raise CheckpointError(
            f"{str(path)!r}: format_version is {version!r}; this peagle reads up to "
            f"{FORMAT_VERSION}. Upgrade peagle."
        )
    correction = _shaped(tensors, path)
    own, fitted = head_identity(folder, config), facts.get("head")
    if not isinstance(fitted, dict):
        raise CheckpointError(f"{str(path)!r}: head is {fitted!r}; expected an object. {_REMEDY}")
    head = "the head beside it" if path.parent == Path(folder) else f"the head {str(folder)!r}"
    for name, value in own.items():
        if fitted.get(name) != value:
            raise CheckpointError(
                f"{str(path)!r} was fitted on a head with {name} {fitted.get(name)!r}; {head} has "
                f"{value!r}. {_REMEDY}"
            )
    if (size := correction.up.out_features) != config.hidden_size:
        raise CheckpointError(
            f"{str(path)!r} holds tensors for a hidden_size of {size}; expected the head's, "
            f"{config.hidden_size}. {_REMEDY}"
        )
    correction.load_state_dict(tensors)
    return correction


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as reader:
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
            text = (reader.metadata() or {}).get(_KEY, "null")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{str(path)!r} is not readable as safetensors: {error}. {_REMEDY}"
        ) from None
    try:
        facts = parse_json(text.encode())
    except ValueError as error:
        raise CheckpointError(
            f"{str(path)!r}: {_KEY} is not readable: {error}. {_REMEDY}"
        ) from None
    if not isinstance(facts, dict):
        raise CheckpointError(
            f"{str(path)!r} does not say which head it corrects ({_KEY}). {_REMEDY}"
        )
    return tensors, facts


def _shaped(tensors: Mapping[str, Tensor], path: Path) -> Correction:
    """Return an empty correction of the shape of the tensors.

    Raises:
        CheckpointError: the tensors are not a correction's, do not fit together or hold values that
            are not finite.
    """
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    slots, up = (found.get(name, ()) for name in ("slots", "up.weight"))
    if not len(slots) == len(up) == 2 or 0 in (*slots, *up):
        raise CheckpointError(
            f"{str(path)!r} holds {found}; expected the tensors of a correction. {_REMEDY}"
        )
    (num_slots, width), (size, rank) = slots, up
    with torch.device("meta"):  # a broken file may name any size
        correction = Correction(size, rank=rank, width=width, num_slots=num_slots)
    expected = {name: tuple(value.shape) for name, value in correction.state_dict().items()}
    if found != expected:
        raise CheckpointError(f"{str(path)!r} holds {found}; expected {expected}. {_REMEDY}")
    for name, value in tensors.items():
        if value.dtype not in _DTYPES or not bool(value.isfinite().all()):
            raise CheckpointError(
                f"{str(path)!r}: {name} is {value.dtype} or holds values that are not finite; "
                f"expected finite numbers of {', '.join(map(str, _DTYPES))}. {_REMEDY}"
            )
    return correction.to_empty(device="cpu")
