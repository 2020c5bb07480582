"""Swaps of the draft head of a running server: which heads may come, and one swap at a time."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peagle.errors import UserError, short_repr
from peagle.serving.engine_pool import EnginePool
from peagle.serving.errors import ApiError
from peagle.serving.metrics import ServedHead

logger = logging.getLogger("peagle.serving")


def resolve_folders(folders: Sequence[str]) -> tuple[Path, ...]:
    """Return the folders that heads may come from, with symbolic links resolved.

    Raises:
        UserError: one of them is no folder.
    """
    found = tuple(Path(folder).resolve() for folder in folders)
    for folder, given in zip(found, folders, strict=True):
        if not folder.is_dir():
            raise UserError(f"--allow-heads is {given!r}, which is no folder: expected one.")
    return found


class HeadSwaps:
    """Swaps the head of a server's first proposer for one in `folders` (`resolve_folders`).

    A swap changes `head`, the head that is served.
    """

    def __init__(self, pool: EnginePool, folders: tuple[Path, ...], head: ServedHead) -> None:
        self._pool, self._folders, self.head = pool, folders, head
        self._swapping: asyncio.Task[None] | None = None

    async def swap(self, path: str) -> dict[str, Any]:
        """Serve with another head, even if the client leaves; return its facts.

        Raises:
            ApiError: the path is in no allowed folder (403), another swap is under way (409), or as
                `EnginePool.swap_head`. The old head is then served on.
        """
        if self._swapping is not None:
            text = "Another swap of the head is under way; try again when it has ended."
            raise ApiError(409, text, code="swap_under_way", headers={"Retry-After": "5"})
        self._swapping = asyncio.ensure_future(self._swap(path))
        self._swapping.add_done_callback(self._end)
        await asyncio.shield(self._swapping)
        return {"head": asdict(self.head)}

    async def _swap(self, path: str) -> None:
        folder = await asyncio.to_thread(self._resolve, path)
        await self._pool.swap_head(str(folder))
        self.head.name, self.head.version = folder.name, self.head.version + 1
        logger.info("the head is now %r, version %d", str(folder), self.head.version)

    def _end(self, swapping: asyncio.Task[None]) -> None:
        self._swapping = None
        _ = swapping.cancelled() or swapping.exception()  # its client may have left

    def _resolve(self, path: str) -> Path:
        """Return the folder of a head; it and its files lie in an allowed folder, links or not.

        All else is refused in one way, so that nobody learns what is there.
        """
        error = ApiError(
            403,
            f"head is {short_repr(path)}; expected the absolute path of a head's folder in a "
            "folder of --allow-heads.",
            param="head",
            code="head_not_allowed",
        )
        try:
            folder = Path(path).resolve(strict=True)
            files = [folder, *(file.resolve() for file in folder.iterdir())]
            if not Path(path).is_absolute() or not all(map(self._allows, files)):
                raise error
        except (OSError, RuntimeError, ValueError):  # nothing there, links in a circle, a null byte
            raise error from None
        return folder

    def _allows(self, path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in self._folders)
