"""Fetch models from the Hugging Face hub into its cache, and compare their checksums.

Only configuration, tokenizer and safetensors files are fetched: no pickles, no code. The library's
own environment applies: HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE.
"""

import errno
import hashlib
import io
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

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
from peagle.model_folder import sha256_of

DEFAULT_REVISION = "main"
FETCHED_PATTERNS = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "correction.st",  # of a draft head
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
]
# Copies of the weights in another layout, as gpt-oss and Mistral publish them beside the usual one.
SKIPPED_PATTERNS = ["*/*", "consolidated*"]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")

# Marks the cache folder of a repository while files in it are not compared with their checksums.
_UNCHECKED_MARK = ".peagle-unchecked"
_MAKE_ROOM = "Make room, or set HF_HOME to a folder on a larger disk."
# Errors of the network, of the disk, and of answers that no hub gives.
_FAILURES = (HTTPError, OSError, ValueError, KeyError, TypeError)
# Time for a connection to the hub. A lost first packet is sent again after 1 and 3 seconds.
CONNECT_S = 5.0
_RETRY_S = 30.0  # for so long a hub without a connection is not tried again
_unreachable: dict[str, tuple[float, OSError]] = {}
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
        self.hub = hub_url()
        self.cache = Path(constants.HF_HUB_CACHE)
        self.storage = self.cache / f"models--{repo.replace('/', '--')}"

    def fetch(self) -> Path:
        """Return the folder of the snapshot: the hub's, or a cached one where it gives no access.

        Raises:
            UserError: neither has it; the message says why.
            CheckpointError: it has no safetensors, or a file did not arrive as the hub lists it.
        """
        with no_telemetry():
            try:
                require_connection(self.hub)
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
        """Return the copy in the cache after a failed look-up.

        Raises:
            UserError: there is none; the message explains `error`.
        """
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
            allow_patterns=FETCHED_PATTERNS,
            ignore_patterns=SKIPPED_PATTERNS,
            local_files_only=local_files_only,
        )
        return Path(folder)

    def _wanted(self, siblings: Sequence[RepoSibling]) -> list[RepoSibling]:
        """Return the files to fetch, of all files of the repository."""
        patterns = {"allow_patterns": FETCHED_PATTERNS, "ignore_patterns": SKIPPED_PATTERNS}
        files = list(filter_repo_objects(siblings, **patterns, key=lambda file: file.rfilename))
        if any(file.rfilename.endswith(".safetensors") for file in files):
            return files
        pickles = sorted(s.rfilename for s in siblings if s.rfilename.endswith(_PICKLES))
        only = f", only the pickle {pickles[0]!r}, which can run code" if pickles else ""
        gguf = min((s.rfilename for s in siblings if s.rfilename.endswith(".gguf")), default="")
        way = "convert it with `model.save_pretrained(folder)` of transformers"
        if gguf:
            way = f"download one GGUF file, like {gguf!r}, and name that file as the target"
        raise CheckpointError(
            f"{self.name} has no *.safetensors weights at revision {self.revision!r} on "
            f"{self.hub}{only}. Nothing was fetched. Look for a revision or a copy with "
            f"safetensors, or {way}."
        )

    def _download(self, commit: str, files: Sequence[RepoSibling]) -> Path:
        """Fetch files missing in the cache, check the hub's checksums, return the folder."""
        snapshot, unchecked = self.storage / "snapshots" / commit, self.storage / _UNCHECKED_MARK
        missing = [file for file in files if not (snapshot / file.rfilename).exists()]
        suspect = files if unchecked.exists() else missing
        try:
            if missing:
                needed = sum(file.size or 0 for file in missing)
                place = next(p for p in (self.cache, *self.cache.absolute().parents) if p.is_dir())
                if needed > (free := shutil.disk_usage(place).free):
                    raise UserError(
                        f"{self.name} takes {needed / 1e9:.2f} GB more, but {str(place)!r} has "
                        f"{free / 1e9:.2f} GB left. {_MAKE_ROOM}"
                    )
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

    def _explained(self, error: Exception, late: Sequence[str] = ()) -> UserError:
        """Explain `error` to the user; `late` are the files that had not arrived by then."""
        if message := self._describe_refusal(error):
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
        status = status_of(error)
        answer = "cannot be reached" if status is None else f"answers with status {status}"
        if not isinstance(error, HTTPError | OSError):
            answer = "does not answer as a hub does"
        is_slow = isinstance(error, HTTPError) and "timed out" in reason
        longer = " HF_HUB_ETAG_TIMEOUT=60 waits a minute for a slow hub." if is_slow else ""
        return UserError(
            f"{self.name} is neither a folder here nor complete in the cache {str(self.cache)!r}, "
            f"and {self.hub} {answer}: {reason}. Check the network and HF_ENDPOINT, or name a "
            f"folder.{longer}"
        )

    def _describe_refusal(self, error: Exception) -> str:
        """Say why the hub does not give the model, or the disk does not take it."""
        token = "the token in use" if get_token() else "those without a token"
        number, cache = getattr(error, "errno", None), repr(str(self.cache))
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
        if (status := status_of(error)) in (401, 403):
            return (
                f"{self.name}: {self.hub} refuses {token} (status {status}). Set HF_TOKEN to a "
                "valid token that may read the model, or unset it for a public one."
            )
        if isinstance(error, OfflineModeIsEnabled):
            return (
                f"{self.name} is neither a folder here nor complete in the cache {cache} at "
                f"revision {self.revision!r}, and HF_HUB_OFFLINE forbids fetching it. Unset "
                "HF_HUB_OFFLINE, or name a folder."
            )
        if number in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"{self.name} does not fit on the disk of the cache {cache}: "
                f"{os.strerror(number)}. {_MAKE_ROOM}"
            )
        if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            return (
                f"{self.name} cannot be stored in the cache {cache}: {os.strerror(number)}. Set "
                "HF_HOME to a folder that you may write to."
            )
        return ""


def hub_url() -> str:
    """Return the address of the hub in use."""
    # Read now, not when the hub's library was imported.
    return os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")


def require_connection(hub: str) -> None:
    """Connect to the hub, or to the proxy before it, within `CONNECT_S` seconds, and disconnect.

    The hub's library tries the addresses of a host one after another, each for its whole timeout,
    and nothing bounds the time of a name server. Only the connection is bounded here: a hub that
    answers slowly is not cut. Offline mode and an address without a host are left to the library.

    Raises:
        OSError: there is no connection.
    """
    address = urlsplit(hub)
    if constants.HF_HUB_OFFLINE or address.hostname is None:
        return
    since, failure = _unreachable.get(hub, (0.0, None))
    if failure is not None and time.monotonic() - since < _RETRY_S:
        raise failure
    proxies = {} if proxy_bypass(address.hostname) else getproxies()
    if proxy := proxies.get(address.scheme, proxies.get("all")):
        address = urlsplit(proxy if "://" in proxy else f"//{proxy}")
    port = address.port or {"https": 443, "socks5": 1080}.get(address.scheme, 80)
    outcome: SimpleQueue[OSError | None] = SimpleQueue()
    # A thread, as nothing ends the wait for a name server.
    arguments = (address.hostname or "", port, outcome)
    Thread(target=_connect_any, args=arguments, daemon=True).start()
    try:
        error = outcome.get(timeout=CONNECT_S)
    except Empty:
        error = TimeoutError(f"it gave no connection within {CONNECT_S:g} s")
    if error is not None:
        _unreachable[hub] = time.monotonic(), error
        raise error
    _unreachable.pop(hub, None)


def _connect_any(host: str, port: int, outcome: SimpleQueue[OSError | None]) -> None:
    """Put None once one of the host's addresses gives a connection, else the last error."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return outcome.put(error if isinstance(error, OSError) else OSError(str(error)))
    told: SimpleQueue[OSError | None] = SimpleQueue()
    for *_, place in found:
        Thread(target=_connect, args=(place[:2], told), daemon=True).start()
    error = None
    for _ in found:
        if (error := told.get()) is None:
            break
    outcome.put(error)


def _connect(address: tuple[str, int], told: SimpleQueue[OSError | None]) -> None:
    try:
        socket.create_connection(address, timeout=2 * CONNECT_S).close()
    except OSError as error:
        return told.put(error)
    told.put(None)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error came with, if any."""
    return getattr(getattr(error, "response", None), "status_code", None)


def git_blob_id(content: bytes | Path) -> str:
    """Return git's name of a file, SHA-1("blob " + size + "\\0" + bytes), as hex digits."""
    is_path = isinstance(content, Path)
    size = content.stat().st_size if is_path else len(content)
    with content.open("rb") if is_path else io.BytesIO(content) as data:
        prefix = b"blob %d\0" % size
        return hashlib.file_digest(
            data, lambda: hashlib.sha1(prefix, usedforsecurity=False)
        ).hexdigest()


def _check_sum(path: Path, file: RepoSibling, hub: str) -> None:
    """Compare a fetched file with the hub's checksum; remove and refuse one that differs.

    The hub lists a SHA-256 of files in large storage, and git's blob id of the others.
    """
    if file.lfs is not None:
        kind, expected, found = "sha256", file.lfs.sha256, sha256_of(path)
    else:
        kind, expected, found = "git blob id", file.blob_id, git_blob_id(path)
    if expected in (None, found):
        return
    size = path.stat().st_size
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
    """Keep the hub's library from reporting on this process, and from listing its packages."""
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
