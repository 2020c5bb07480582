"""Large safetensors files, written in pieces, whole or not at all, beside what computes them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.errors import UserError
from peagle.model_folder import sha256_of

PART_SUFFIX = ".part"
_NAMES = {
    torch.int64: "I64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A safetensors file: its header, and where each tensor begins.

    Attributes:
        header: the first bytes of the file.
        begins: offsets in the file, by name.
        size: bytes of the whole file.
    """

    header: bytes
    begins: dict[str, int]
    size: int

    @classmethod
    def of(
        cls, tensors: Mapping[str, tuple[torch.dtype, list[int]]], metadata: dict[str, str]
    ) -> TensorLayout:
        """The layout of tensors one after the other; wide types first keeps all aligned."""
        entries: dict[str, Any] = {"__metadata__": metadata}
        begins, end = {}, 0
        for name, (dtype, shape) in tensors.items():
            begins[name] = end
            end += dtype.itemsize * torch.Size(shape).numel()
            offsets = [begins[name], end]
            entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": offsets}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return cls(
            header, {name: len(header) + at for name, at in begins.items()}, len(header) + end
        )


class PartialFile:
    """A safetensors file under way, beside its place.

    Args:
        path: its place.
        layout: what it will hold.
    """

    def __init__(self, path: Path, layout: TensorLayout) -> None:
        self.path, self.layout = path, layout
        self._part = path.with_name(path.name + PART_SUFFIX)
        self._file = self._part.open("wb")
        self._file.write(layout.header)
        self._at = dict(layout.begins)

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Add rows, after those that were put before."""
        for name, value in tensors.items():
            raw = value.contiguous().view(torch.uint8).numpy()
            self._file.seek(self._at[name])
            self._file.write(raw.data)
            self._at[name] += raw.nbytes

    def finish(self) -> str:
        """Put the file in its place; returns its SHA-256."""
        self._file.close()
        ends = [*sorted(self.layout.begins.values())[1:], self.layout.size]
        assert sorted(self._at.values()) == ends, "every row was put"
        digest = sha256_of(self._part)
        os.replace(self._part, self.path)
        return digest

    def abort(self) -> None:
        """Remove what there is of it."""
        with suppress(OSError):  # what is buffered may not fit on the disk
            self._file.close()
        self._part.unlink(missing_ok=True)


class Background:
    """One job at a time beside the caller; a failed one is raised when the next is given."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._running: Future[None] | None = None

    def run(self, job: Callable[..., None], *arguments: Any) -> None:
        self.wait()
        self._running = self._thread.submit(job, *arguments)

    def wait(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def stop(self) -> None:
        """Let the job at hand end, however it does."""
        if self._running is not None:
            wait([self._running])


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder, made if need be, for this process alone.

    Raises:
        UserError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(
            f"Another process is writing {str(folder)!r}; wait for it, or choose another output."
        ) from None
    else:
        yield
    finally:
        os.close(descriptor)
