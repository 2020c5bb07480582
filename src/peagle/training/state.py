"""The checkpoint that a run resumes from: weights, optimizer and step.

Written and read by torch.distributed.checkpoint (DCP) through its safetensors storage: each process
writes the shares that it holds, with their place in the whole tensor in the file's header, and
reads the slices that it needs, however many processes wrote them. Nothing is pickled.

state.json has the step and what the run is made of; manifest.json has the SHA-256 of every other
file.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from peagle.disk import sync
from peagle.errors import CheckpointError, UserError
from peagle.model_folder import sha256_of
from peagle.models.checkpoint.files import object_at, read_object, write_json
from peagle.training.checkpoint_facts import (
    NEW_FACTS,
    STATE_NAME,
    previous_of,
    require_checkpoint,
    require_same_facts,
    shown,
)
from peagle.training.distributed import ONE_PROCESS, Processes
from peagle.training.optimizers import Masters

_WEIGHTS = "weights."
_OPTIMIZER = "optimizer."
_MANIFEST_NAME = "manifest.json"
# A file is put together in memory before it is written.
_FILE_BYTES = 2 << 30
_MAX_THREADS = 8


def save_state(
    folder: Path,
    masters: Masters,
    optimizers: Sequence[Optimizer],
    step: int,
    facts: dict,
    progress: dict,
    processes: Processes = ONE_PROCESS,
) -> None:
    """Write a checkpoint beside the last one, then put it in its place.

    A crash of the process or of the machine, or a full disk, leaves the last checkpoint or the
    whole new one. `progress` is JSON, which `load_state` gives back.

    Raises:
        UserError: it could not be written (a full disk for one); in all processes.
    """
    partial = _partial(folder)
    record = {"step": step, **facts, "progress": progress}
    tensors = {_WEIGHTS + name: weight for name, weight in masters.state().items()}
    names = {id(p): n for n, p in masters.named()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                tensors[f"{_OPTIMIZER}{key}.{names[id(parameter)]}"] = value.detach()

    def begin() -> None:
        with _write_errors(folder):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def finish() -> None:
        with _write_errors(folder):
            write_json(partial / STATE_NAME, record)
            write_json(partial / _MANIFEST_NAME, {"sha256": _digests(partial)})
            _replace(folder, partial)

    try:
        processes.first(begin)
        with _write_errors(folder), _quiet():
            writer = HuggingFaceStorageWriter(
                str(partial), fqn_to_index_mapping=_files(tensors), save_distributed=True
            )
            dcp.save(tensors, storage_writer=writer, no_dist=processes.world_size == 1)
        processes.first(finish)
    except UserError:
        if processes.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def load_state(
    folder: Path,
    masters: Masters,
    optimizers: Sequence[Optimizer],
    facts: dict,
    processes: Processes = ONE_PROCESS,
) -> tuple[int, dict]:
    """Put a checkpoint into model and optimizer; returns its step and the progress.

    A checkpoint of an older version, which says neither the data and the target that it was made
    with nor what its files hold, brings a warning.

    Raises:
        UserError: there is none, a file of it is damaged, or `facts` differ in more than
            `optimizer.steps`.
    """
    require_checkpoint(folder)
    processes.first(lambda: _require_whole(folder))
    try:
        record = json.loads((folder / STATE_NAME).read_text())
        if processes.is_first and not record.keys() >= set(NEW_FACTS):
            warnings.warn(
                f"The checkpoint {str(folder)!r} is of an older peagle, which did not store what "
                "data and target it was made with. See that they are the same: they cannot be "
                "compared.",
                stacklevel=2,
            )
        require_same_facts(folder, record, facts)
        reader = HuggingFaceStorageReader(str(folder))
        tensors = {_WEIGHTS + name: weight for name, weight in masters.state().items()}
        states = _room_for_optimizers(reader, masters)
        for parameter, state in states.items():
            tensors |= {f"{_OPTIMIZER}{key}.{parameter}": x for key, x in state.items()}
        with _quiet():
            dcp.load(tensors, storage_reader=reader, no_dist=processes.world_size == 1)
    except (OSError, SafetensorError, json.JSONDecodeError, CheckpointException) as error:
        raise UserError(
            f"The checkpoint {str(folder)!r} is not readable: {_cause(error)}."
        ) from None
    masters.publish()
    names = {id(p): n for n, p in masters.named()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if names[id(parameter)] in states:
                    optimizer.state[parameter] = states[names[id(parameter)]]
    return record["step"], record.get("progress", {})


def _files(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return the number, from 1, of the file that each tensor goes to."""
    written, files = 0, {}
    for name, tensor in tensors.items():
        files[name] = 1 + written // _FILE_BYTES
        written += tensor.nbytes
    return files


def _room_for_optimizers(
    reader: HuggingFaceStorageReader, masters: Masters
) -> dict[str, dict[str, Tensor]]:
    """Return tensors to read the optimizer's states of each parameter into, by names."""
    parameters = dict(masters.named())
    states: dict[str, dict[str, Tensor]] = {}
    for name, found in reader.read_metadata().state_dict_metadata.items():
        key, _, parameter = name.removeprefix(_OPTIMIZER).partition(".")
        if not name.startswith(_OPTIMIZER) or parameter not in parameters:
            continue
        assert isinstance(found, TensorStorageMetadata), "safetensors hold nothing else"
        like = parameters[parameter].detach()
        # Moments have their parameter's shape, and are divided as it is; counters have none.
        if found.size == like.shape:
            room = torch.zeros_like(like)
        else:
            room = torch.zeros(found.size, dtype=found.properties.dtype, device=like.device)
        states.setdefault(parameter, {})[key] = room
    return states


def _digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a checkpoint but the manifest, by name."""
    files = sorted(path for path in folder.iterdir() if path.name != _MANIFEST_NAME)
    with ThreadPoolExecutor(_MAX_THREADS) as threads:
        return {p.name: d for p, d in zip(files, threads.map(sha256_of, files), strict=True)}


def _require_whole(folder: Path) -> None:
    """Refuse a checkpoint with a file that differs from the written one; older ones cannot tell.

    Of a whole one the checkpoint before it goes, which a crash may have left.

    Raises:
        UserError: naming the file, and what to do.
    """
    problem, previous = _damage(folder), previous_of(folder)
    if not problem:
        shutil.rmtree(previous, ignore_errors=True)
        return
    if (previous / STATE_NAME).is_file() and not _damage(previous):
        remedy = (
            f"The checkpoint before it is whole: remove {str(folder)!r} and run again with "
            f"--resume, which then goes on from {str(previous)!r}."
        )
    else:
        remedy = (
            "Restore the checkpoint from a copy, or start anew in another output folder, where "
            "head.init may name the head of this run."
        )
    raise UserError(f"The checkpoint {str(folder)!r} is damaged: {problem}. {remedy}")


def _damage(folder: Path) -> str:
    """Describe the first file that differs from the manifest; "" if there is none."""
    try:
        if not (folder / _MANIFEST_NAME).is_file():
            is_old = not read_object(folder / STATE_NAME).keys() >= set(NEW_FACTS)
            return "" if is_old else f"{_MANIFEST_NAME} is missing"
        written = object_at(read_object(folder / _MANIFEST_NAME), "sha256")
        found = _digests(folder)
    except (CheckpointError, OSError) as error:
        return str(error).rstrip(".")
    for name, digest in written.items():
        if name not in found:
            return f"{name} is missing"
        if digest != found[name]:
            return f"{name} has {shown(found[name])}, it was written with {shown(digest)}"
    others = [name for name in found if name not in written and name.endswith(".safetensors")]
    return f"{others[0]} is not a part of it" if others else ""


def _replace(folder: Path, partial: Path) -> None:
    previous = previous_of(folder)
    shutil.rmtree(previous, ignore_errors=True)
    if folder.exists():
        os.replace(folder, previous)
    os.replace(partial, folder)
    sync(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def recover_state(folder: Path) -> None:
    """Put the last checkpoint back where the process died between the renames of a save, and remove
    an unfinished one.
    """
    shutil.rmtree(_partial(folder), ignore_errors=True)
    if not folder.exists() and previous_of(folder).exists():
        os.replace(previous_of(folder), folder)


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + ".part")


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        cause = _cause(error)
        if not isinstance(cause, OSError | SafetensorError):
            raise
        raise UserError(
            f"The checkpoint {str(folder)!r} could not be written: {cause}. "
            "Free some space and run again; `peagle train --resume` goes on from the last one."
        ) from None


def _cause(error: BaseException) -> BaseException:
    """Return the first cause in DCP's exception, which lists each process's own."""
    if not isinstance(error, CheckpointException):
        return error
    cause = next(iter(error.failures.values()))[0]
    if isinstance(cause, KeyboardInterrupt):
        raise cause
    return cause


@contextmanager
def _quiet() -> Iterator[None]:
    """Run the body without DCP's warning about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
