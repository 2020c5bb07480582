"""Fetching models from the Hugging Face hub into its cache, with their checksums compared.

Configuration, tokenizer and safetensors files are all that is ever fetched: no pickles, no code.
The library's own environment applies: HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HTTPError,  # what the network raises; its home, httpx or httpx2, depends on the version
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    filter_repo_objects,
)

from peagle.errors import CheckpointError, UserError

DEFAULT_REVISION = "main"
FETCHED = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
]
# Copies of the weights in another layout, as gpt-oss and Mistral publish them beside the usual one.
NOT_FETCHED = ["*/*", "consolidated*"]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")

# Lies in the cache folder of a repository while files there may have arrived unchecked.
_UNCHECKED = ".peagle-unchecked"
_MAKE_ROOM = "Make room, or set HF_HOME to a folder on a larger disk."
# The network, the disk, and answers that are no hub's.
_FAILURES = (HTTPError, OSError, ValueError, KeyError, TypeError)
_logger = logging.getLogger(__name__)


class Repository:
    """One revision of a repository on the hub, and its place in the cache.

    Args:
        repo: "owner/name".
        revision: branch, tag or commit.
        what: the model's role, for messages.
    """

    def __init__(self, repo: str, revision: str, what: str) -> None:
        self.repo = repo
        self.revision = revision
        self.name = f"{what} {repo!r}"
        # Read now, not when the hub's library was imported.
        self.hub = os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
        self.cache = Path(constants.HF_HUB_CACHE)
        self.storage = self.cache / f"models--{repo.replace('/', '--')}"

    def fetch(self) -> Path:
        """The snapshot's folder: what the hub has, or the cache where the hub gives no access.

        Raises:
            UserError: neither has it; the message says why.
            CheckpointError: it has no safetensors, or a file did not arrive as the hub lists it.
        """
        with no_telemetry():
            try:
                info = HfApi(endpoint=self.hub).model_info(
                    self.repo,
                    revision=self.revision,
                    files_metadata=True,
                    timeout=constants.HF_HUB_ETAG_TIMEOUT,
                )
            except _FAILURES as error:
                return self._cached(error)
            return self._download(info.sha or "", self._wanted(info.siblings or []))

    def _cached(self, error: Exception) -> Path:
        """The copy in the cache after `error` of the look-up, else what that means."""
        if isinstance(error, RevisionNotFoundError):
            raise self._explained(error) from None
        try:
            folder = self._snapshot(local_files_only=True)
        except LocalEntryNotFoundError:
            raise self._explained(error) from None
        if not isinstance(error, OfflineModeIsEnabled):
            why = type(error).__name__
            _logger.warning(
                "%s: no access to %s (%s), using the copy in the cache", self.name, self.hub, why
            )
        return folder

    def _snapshot(self, *, local_files_only: bool) -> Path:
        folder = snapshot_download(
            self.repo,
            revision=self.revision,
            endpoint=self.hub,
            allow_patterns=FETCHED,
            ignore_patterns=NOT_FETCHED,
            local_files_only=local_files_only,
        )
        return Path(folder)

    def _wanted(self, siblings: Sequence[RepoSibling]) -> list[RepoSibling]:
        """The files to fetch, of all files of the repository."""
        files = list(
            filter_repo_objects(
                siblings,
                allow_patterns=FETCHED,
                ignore_patterns=NOT_FETCHED,
                key=lambda file: file.rfilename,
            )
        )
        if any(file.rfilename.endswith(".safetensors") for file in files):
            return files
        pickles = sorted(s.rfilename for s in siblings if s.rfilename.endswith(_PICKLES))
        only = f", only the pickle {pickles[0]!r}, which can run code" if pickles else ""
        raise CheckpointError(
            f"{self.name} has no *.safetensors weights at revision {self.revision!r} on "
            f"{self.hub}{only}. Nothing was fetched. Look for a revision or a copy with "
            "safetensors, or convert it with `model.save_pretrained(folder)` of transformers."
        )

    def _download(self, commit: str, files: Sequence[RepoSibling]) -> Path:
        """Fetch what the cache lacks, compare it with the hub's checksums, return the folder."""
        snapshot, unchecked = self.storage / "snapshots" / commit, self.storage / _UNCHECKED
        missing = [file for file in files if not (snapshot / file.rfilename).exists()]
        suspect = files if unchecked.exists() else missing
        try:
            if missing:
                self._check_space(sum(file.size or 0 for file in missing))
                self.storage.mkdir(parents=True, exist_ok=True)
                unchecked.touch()
            with progress_bars(shown=bool(missing) and sys.stderr.isatty()):
                folder = self._snapshot(local_files_only=False)
        except (HTTPError, OSError) as error:
            late = [f.rfilename for f in missing if not (snapshot / f.rfilename).exists()]
            raise self._explained(error, late) from None
        for file in suspect:
            _check_sum(folder / file.rfilename, file, self.hub)
        with suppress(OSError):
            unchecked.unlink(missing_ok=True)
        return folder

    def _check_space(self, needed: int) -> None:
        existing = next(p for p in (self.cache, *self.cache.absolute().parents) if p.is_dir())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise UserError(
                f"{self.name} takes {needed / 1e9:.2f} GB more, but {str(existing)!r} has "
                f"{free / 1e9:.2f} GB left. {_MAKE_ROOM}"
            )

    def _explained(self, error: Exception, late: Sequence[str] = ()) -> UserError:
        """What `error` means to the user; `late` are the files that had not arrived by then."""
        message = self._refusal(error) or self._disk_problem(error)
        if message:
            return UserError(message)
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
        if late:
            named = [name for name in late if name in str(cause)] or late
            names = ", ".join(map(repr, named[:3])) + ", ..." * (len(named) > 3)
            return CheckpointError(
                f"{self.name}: {names} did not arrive whole from {self.hub} ({len(late)} of its "
                f"files are missing): {reason}. Run the command again; what has arrived is kept."
            )
        status = _status(error)
        answer = "cannot be reached" if status is None else f"answers with status {status}"
        if not isinstance(error, HTTPError | OSError):
            answer = "does not answer as a hub does"
        return UserError(
            f"{self.name} is neither a folder here nor complete in the cache {str(self.cache)!r}, "
            f"and {self.hub} {answer}: {reason}. Check the network and HF_ENDPOINT, or name a "
            "folder."
        )

    def _refusal(self, error: Exception) -> str:
        """The message where the hub does not give the model, or may not be asked."""
        token = "the token in use" if get_token() else "those without a token"
        if isinstance(error, GatedRepoError):
            return (
                f"{self.name} is gated on {self.hub} and closed to {token}. Ask for access at "
                f"{self.hub}/{self.repo}, then set HF_TOKEN to a token of the account that has it."
            )
        if isinstance(error, RepositoryNotFoundError):
            return (
                f"{self.name} is neither a folder here nor a model that {self.hub} shows to "
                f"{token}. Check the spelling (./{self.repo} is always a folder); if the model is "
                "private, set HF_TOKEN to a token that may read it."
            )
        if isinstance(error, RevisionNotFoundError):
            return (
                f"{self.name} has no revision {self.revision!r} on {self.hub}; expected a branch, "
                f"a tag or a commit, as listed at {self.hub}/{self.repo}/tree/{DEFAULT_REVISION}."
            )
        if (status := _status(error)) in (401, 403):
            return (
                f"{self.name}: {self.hub} refuses {token} (status {status}). Set HF_TOKEN to a "
                "valid token that may read the model, or unset it for a public one."
            )
        if isinstance(error, OfflineModeIsEnabled):
            return (
                f"{self.name} is neither a folder here nor complete in the cache "
                f"{str(self.cache)!r} at revision {self.revision!r}, and HF_HUB_OFFLINE forbids "
                "fetching it. Unset HF_HUB_OFFLINE, or name a folder."
            )
        return ""

    def _disk_problem(self, error: Exception) -> str:
        """The message where the cache cannot be written."""
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"{self.name} does not fit on the disk of the cache {str(self.cache)!r}: "
                f"{os.strerror(number)}. {_MAKE_ROOM}"
            )
        if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            return (
                f"{self.name} cannot be stored in the cache {str(self.cache)!r}: "
                f"{os.strerror(number)}. Set HF_HOME to a folder that you may write to."
            )
        return ""


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _check_sum(path: Path, file: RepoSibling, hub: str) -> None:
    """Compare a fetched file with what the hub lists; one that differs is removed.

    Files in large storage are listed with a SHA-256, the others with git's blob id,
    SHA-1("blob " + size + "\\0" + bytes).
    """
    size = path.stat().st_size
    with path.open("rb") as data:
        if file.lfs is not None:
            kind, expected = "sha256", file.lfs.sha256
            found = hashlib.file_digest(data, "sha256").hexdigest()
        else:
            kind, expected = "git blob id", file.blob_id
            blob = b"blob %d\0" % size + data.read()
            found = hashlib.sha1(blob, usedforsecurity=False).hexdigest()
    if expected in (None, found):
        return
    # Blob and link: the next run would otherwise take the file for complete.
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    raise CheckpointError(
        f"{file.rfilename!r} was damaged on its way from {hub}: its {kind} is {found} ({size} "
        f"bytes), expected {expected} ({file.size} bytes). It was removed from the cache; run the "
        "command again to fetch it anew."
    )


@contextmanager
def no_telemetry() -> Iterator[None]:
    """No request that tells the hub about this process, no list of its packages in the others."""
    before = constants.HF_HUB_DISABLE_TELEMETRY
    constants.HF_HUB_DISABLE_TELEMETRY = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_TELEMETRY = before


@contextmanager
def progress_bars(*, shown: bool) -> Iterator[None]:
    """Show or hide the hub's progress bars, unless HF_HUB_DISABLE_PROGRESS_BARS has decided."""
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:
        yield
        return
    hidden_before = are_progress_bars_disabled()
    (enable_progress_bars if shown else disable_progress_bars)()
    try:
        yield
    finally:
        (disable_progress_bars if hidden_before else enable_progress_bars)()
