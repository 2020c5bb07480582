"""Models by folder, by GGUF file or by hub id: found, and checked before anything is loaded."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from peagle.bundled import Role, expand_bundled
from peagle.config import SpeculativeConfig, require_folder
from peagle.errors import CheckpointError, UserError
from peagle.model_folder import check_json, read_file_header, read_json, read_weight_map
from peagle.models.gguf_header import is_gguf, read_gguf_header
from peagle.models.head_json import refuse_head, refuse_whole_model, with_depth

_ROLE_NAMES: dict[Role, str] = {
    "target": "The target model",
    "draft": "The draft head",
    "eagle3": "The EAGLE-3 head",
}


def resolve_model(
    name_or_path: str | os.PathLike[str], revision: str | None = None, *, role: Role = "target"
) -> Path:
    """Return the folder of a model, fetched from the hub where the name is not a path.

    The folder of a GGUF file is in the cache, where it is converted first if need be. "bundled" is
    the model that ships (see `peagle.bundled.expand_bundled`). A name that starts with ".", "/" or
    "~", or that exists here, is a path; of the others, "owner/name" and "owner/name@revision" are
    hub ids. Safetensors files are checked for completeness wherever they come from.

    Args:
        name_or_path: the folder, the GGUF file of a target, the hub id or "bundled"; a Path is
            never a hub id.
        revision: branch, tag or commit of a hub id; None takes "main".
        role: the use of the model, for messages.

    Raises:
        UserError: no such folder or repository, no access, no network, no space, no such revision;
            or a whole model where a head is wanted, or a head where a target is.
        CheckpointError: no safetensors, weights that are incomplete or damaged, code instead of a
            known architecture; a GGUF file that cannot be read.
    """
    what, text = _ROLE_NAMES[role], os.fspath(name_or_path)
    folder = find_model(name_or_path, role)
    if folder is not None:
        is_file = folder.is_file()
        if revision is not None:
            raise UserError(
                f"revision is {revision!r}, but {what[0].lower()}{what[1:]} {text!r} is a "
                f"{'file' if is_file else 'folder'}, and only hub ids have revisions. Leave the "
                "revision out, or name a hub id."
            )
        if is_file:
            from peagle.models.gguf_folder import cached_folder

            folder = cached_folder(folder)
    else:
        from peagle.models.hub import Repository

        folder = Repository(*_hub_id(text, revision, what), what).fetch()
    check_weights(folder)
    config = folder / "config.json"
    data = read_json(config) if config.is_file() else None
    if isinstance(data, dict):
        _refuse_code(data, f"{what} {text!r}")
        refuse = refuse_head if role == "target" else refuse_whole_model
        refuse(data, str(folder))
    return folder


def find_model(name_or_path: str | os.PathLike[str], role: Role = "target") -> Path | None:
    """Return the folder or the GGUF file of a model, None where the name may be a hub id.

    Neither torch nor the hub's library is imported, so that a wrong path or file is refused at
    once.

    Args:
        name_or_path: see `resolve_model`.
        role: the use of the model, for messages.

    Raises:
        UserError: the name is a path that is no folder, or neither a path nor a hub id.
        CheckpointError: the GGUF file cannot be read.
    """
    text = os.fspath(name_or_path)
    if isinstance(name_or_path, str):
        text = expand_bundled(text, role)
    path = Path(text).expanduser()
    looks_like_path = text.startswith((".", "/", "~")) or "\\" in text
    if text and (isinstance(name_or_path, Path) or looks_like_path or path.exists()):
        if role == "target" and is_gguf(path):
            read_gguf_header(path)
            return path
        return require_folder(path, _ROLE_NAMES[role])
    # No hub is asked for a bare name: hubs have few, and it may be a mistyped private folder.
    if "/" not in text.partition("@")[0]:
        raise _not_there(text, _ROLE_NAMES[role])
    return None


def with_local_head(config: SpeculativeConfig) -> SpeculativeConfig:
    """Return the configuration with its head in a folder, to which the hub's heads are fetched.

    K comes from the head where none is given (`with_depth`).

    Raises:
        UserError: as `resolve_model`.
    """
    if config.model is None:
        return config
    folder = resolve_model(config.model, config.revision, role="draft")
    return with_depth(replace(config, model=str(folder), revision=None), folder)


def _hub_id(text: str, revision: str | None, what: str) -> tuple[str, str]:
    """Return the repository and revision of "owner/name" or "owner/name@revision"."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    from peagle.models.hub import DEFAULT_REVISION

    repo, at, pinned = text.partition("@")
    try:
        validate_repo_id(repo)
    except HFValidationError:
        repo = ""
    if not repo or (at and not pinned):
        raise _not_there(text, what)
    if pinned and revision not in (None, pinned):
        raise UserError(
            f"The revision of {repo!r} is given twice, as {pinned!r} and as {revision!r}; "
            "leave one of them out."
        )
    return repo, pinned or revision or DEFAULT_REVISION


def _not_there(text: str, what: str) -> UserError:
    file = ", a GGUF file" if what == _ROLE_NAMES["target"] else ""
    return UserError(
        f"{what} {text!r} is not there; expected a folder with config.json{file}, or a hub id of "
        "the form owner/name or owner/name@revision."
    )


def check_weights(folder: Path) -> None:
    """Refuse safetensors files that are missing or cut, and JSON that is too large or too deep.

    Of each safetensors file only the header is read.

    Raises:
        CheckpointError: naming the file.
    """
    check_json(folder)
    for index in sorted(folder.glob("*.safetensors.index.json")):
        shards = set(read_weight_map(index).values())
        missing = sorted(name for name in shards if not (folder / name).is_file())
        if missing:
            raise CheckpointError(
                f"{str(folder / missing[0])!r} is missing; {index.name!r} names {len(shards)} "
                f"shards, {len(missing)} of which are not there. Copy or fetch them again."
            )
    for file in sorted(folder.glob("*.safetensors")):
        try:
            read_file_header(file)
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"{str(file)!r} is cut or damaged: {error}. Copy or fetch it again (the hub's "
                "cache fetches a file anew once it is removed)."
            ) from None


def _refuse_code(data: Mapping[str, Any], name: str) -> None:
    """Refuse a model type that only code of the model's own could build."""
    # Heads of the speculators package name its classes, but are read without them.
    if not data.get("auto_map") or "speculators_model_type" in data:
        return
    from transformers import CONFIG_MAPPING

    if data.get("model_type") not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{name} has model type {data.get('model_type')!r}, which transformers does not know: "
            "it brings code of its own (auto_map), and peagle runs no code out of a model. Use a "
            "model that transformers supports by itself, or a newer transformers."
        )
