"""A whole head in the place of a compact one, for runtimes that load no compact heads."""

import hashlib
import logging
import shutil
from pathlib import Path

import torch
from torch import Tensor

from peagle.disk import cache_folder, locked, put_in_place
from peagle.errors import UserError
from peagle.model_folder import sha256_of
from peagle.models.checkpoint.convert import convert_head
from peagle.models.checkpoint.stored import read_head
from peagle.models.loading import resolve_model
from peagle.models.target_ends import TargetEnds

_logger = logging.getLogger(__name__)
_FORMAT = "1"  # of the folders; another one when the same files are expanded otherwise
_PARTIAL = ".part"


def whole_head(folder: str | Path, target: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a head that every runtime loads.

    A head that is not compact has its own folder. A compact head gets one in the cache
    (`convert_head` in vLLM's style). Its place there depends on the contents of the head's files
    and on the ends of the target that the head takes, so it is written once. Of several processes
    one writes it and the others wait.

    Args:
        folder: the head.
        target: folder, file or hub id of its target, which is fetched if need be; revision: of a
            hub id.

    Raises:
        CheckpointError: the head is broken, or another target's.
        UserError: the target is not there; the cache cannot be written, or has no room.
    """
    folder = Path(folder)
    head = read_head(folder)
    if not head.is_compact:
        return folder
    target = resolve_model(target, revision)
    digest = hashlib.sha256()
    for file in sorted(one for one in folder.iterdir() if one.is_file()):
        digest.update(f"{file.name} {sha256_of(file)}\n".encode())
    if head.from_target:
        ends = TargetEnds.load(target)
        for weight in (ends.embedding_weight(), ends.lm_head_weight()):
            digest.update(_bytes(weight))
    place = cache_folder() / "heads" / _FORMAT / digest.hexdigest()
    made = place / (folder.resolve().name.lstrip(".") or "head")
    try:
        with locked(place, wait=True):
            places = (one.parent for one in place.glob("*/config.json"))
            if (found := next((one for one in places if one.name != _PARTIAL), None)) is not None:
                return found
            _logger.warning(
                "The compact head %r is expanded into %r, once.", str(folder), str(made)
            )
            try:
                convert_head(folder, place / _PARTIAL, "vllm", force=True, target=str(target))
                put_in_place(place / _PARTIAL, made)
            finally:
                shutil.rmtree(place / _PARTIAL, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"The compact head {str(folder)!r} is expanded into the cache {str(cache_folder())!r}, "
            f"which cannot be written: {error.strerror or error}. Set XDG_CACHE_HOME to a folder "
            "that you may write to, or write the head with `peagle convert --format vllm` and name "
            "the folder."
        ) from None
    return made


def _bytes(weight: Tensor) -> bytes:
    return weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
