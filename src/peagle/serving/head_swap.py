"""Swaps of the draft head of a running server: which heads may come, one at a time, on trial."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from peagle.errors import UserError, short_repr
from peagle.serving.engine_pool import EnginePool, EngineProcess
from peagle.serving.errors import ApiError
from peagle.serving.head_trial import HeadSlice, HeadTrial
from peagle.serving.metrics import ServedHead
from peagle.serving.protocol import TrialBody

logger = logging.getLogger("peagle.serving")

_LOOK_EVERY_S = 0.2  # at a slice of a trial
_TURN_TIMES = 20  # a slice lasts so many times as long as a turn, which halts all requests


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

    A swap changes `head`, the head that serves. On trial the new head takes turns with the old one
    (`HeadTrial`), and is rolled back if it proves worse, or if anything fails.
    """

    def __init__(self, pool: EnginePool, folders: tuple[Path, ...], head: ServedHead) -> None:
        self._pool, self._folders, self.head = pool, folders, head
        self._swapping: asyncio.Task[None] | None = None
        self._trying: asyncio.Task[None] | None = None
        self._trial: HeadTrial | None = None

    def facts(self) -> dict[str, Any]:
        """Return the head that serves, and its trial: None for a head that came without one."""
        trial = self._trial
        return {"head": self.head.to_json(), "trial": trial and trial.to_json()}

    async def swap(self, path: str, trial: TrialBody | None = None) -> dict[str, Any]:
        """Serve with another head, even if the client leaves; return the facts.

        The path of the old head ends a trial by hand.

        Raises:
            ApiError: the path is in no allowed folder (403), another swap or a trial is under way
                (409), or as `EnginePool.try_head`. The old head is then served on.
        """
        if self._swapping is not None:
            text = "Another swap of the head is under way; try again when it has ended."
            raise ApiError(409, text, code="swap_under_way", headers={"Retry-After": "5"})
        self._swapping = asyncio.ensure_future(self._swap(path, trial))
        self._swapping.add_done_callback(self._end)
        await asyncio.shield(self._swapping)
        return self.facts()

    async def _swap(self, path: str, body: TrialBody | None) -> None:
        if self._trying is not None and not self._trying.done():
            await self._stop_trial(path, body, self._trying)
            if self._trial is not None and self._trial.state == "rolled back":
                return  # else the new head had just been kept
        folder = await asyncio.to_thread(self._resolve, path)
        engines = await self._pool.try_head(str(folder))
        old = replace(self.head)
        self.head.num_swaps += 1
        self.head.name, self.head.version = folder.name, self.head.num_swaps + 1
        logger.info("the head is now %r, version %d", str(folder), self.head.version)
        if body is None:
            self._trial = None
            self._pool.keep_head(engines, str(folder))
        else:
            self._trial = HeadTrial(old, replace(self.head), body.requests, body.share)
            self._trying = asyncio.ensure_future(self._try(self._trial, folder, engines))

    def _end(self, swapping: asyncio.Task[None]) -> None:
        self._swapping = None
        _ = swapping.cancelled() or swapping.exception()  # its client may have left

    # ---- a trial ----

    async def _stop_trial(
        self, path: str, body: TrialBody | None, trying: asyncio.Task[None]
    ) -> None:
        """End a trial by hand, at the path of its old head; refuse all else."""
        trial, old = self._trial, self._pool.head_folder
        assert trial is not None and old is not None
        with suppress(OSError, RuntimeError, ValueError):
            trial.is_stopped = body is None and Path(path).resolve() == Path(old).resolve()
        if not trial.is_stopped:
            text = (
                f"The head {trial.new.head.name!r} is on trial; GET /admin/head tells how it goes. "
                f"Try again when the trial has ended, or end it with the old head, {old!r}."
            )
            raise ApiError(409, text, code="trial_under_way", headers={"Retry-After": "60"})
        await trying

    async def _try(self, trial: HeadTrial, folder: Path, engines: list[EngineProcess]) -> None:
        """Let both heads take turns until the verdict, then one of them for good."""
        try:
            reason = await self._find_worse(trial, folder, engines)
            if not reason:
                await self._turn(trial, engines, is_new=True)
        except ApiError as error:
            reason = error.message
        except Exception:
            logger.exception("a trial failed")
            reason = "The trial failed; the server's log says why."
        finally:
            for engine in engines:
                engine.slice = None
        if reason:
            self._pool.restore_head(engines)
            self._serves(trial.old.head)
            self.head.num_rollbacks += 1
        else:
            self._pool.keep_head(engines, str(folder))
        trial.end(reason)
        text = "the trial of the head %r ended, it is %s: %s"
        logger.info(text, str(folder), trial.state, reason or trial.verdict())

    async def _find_worse(
        self, trial: HeadTrial, folder: Path, engines: list[EngineProcess]
    ) -> str:
        """Run the slices of a trial; return why the old head is to serve, "" if the new one is.

        Raises:
            ApiError: an engine failed.
        """
        is_new, turn_s = True, 0.0
        while True:
            began, part = time.monotonic(), HeadSlice()
            for engine in engines:
                engine.slice = part
            while not trial.is_full(part) or time.monotonic() - began < _TURN_TIMES * turn_s:
                await asyncio.sleep(_LOOK_EVERY_S)
                if fault := await _find_fault(trial, folder, engines):
                    return fault
            trial.add(part, is_new=is_new)
            if trial.is_due:
                await asyncio.to_thread(trial.look)
                if trial.is_worse:
                    return f"It drafts worse: {trial.verdict()}."
            if trial.has_all:  # engines may have ended during a look
                return await _find_fault(trial, folder, engines)
            if trial.is_new_next != is_new:
                is_new, before = not is_new, time.monotonic()
                await self._turn(trial, engines, is_new=is_new)
                turn_s = time.monotonic() - before

    async def _turn(self, trial: HeadTrial, engines: list[EngineProcess], *, is_new: bool) -> None:
        """Let one of the heads serve; requests that come before all engines do are not counted."""
        for engine in engines:
            engine.slice = None
        head = trial.new.head if is_new else trial.old.head
        if self.head.version != head.version:
            await self._pool.turn_head(engines, is_new=is_new)
            self._serves(head)

    def _serves(self, head: ServedHead) -> None:
        self.head.name, self.head.version = head.name, head.version

    def close(self) -> None:
        """End a trial without a verdict, as the server ends."""
        if self._trying is not None:
            self._trying.cancel()

    # ---- which heads may come ----

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


async def _find_fault(trial: HeadTrial, folder: Path, engines: list[EngineProcess]) -> str:
    """Return why a trial cannot go on, a sentence; "" if it can."""
    is_there = await asyncio.to_thread(folder.is_dir)
    if trial.is_stopped:
        return "It was ended by hand."
    if ended := [engine for engine in engines if engine.end]:
        return f"Engine {ended[0].number} {ended[0].end} during the trial."
    return "" if is_there else "The folder of the new head was deleted during the trial."
