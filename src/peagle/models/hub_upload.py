"""Upload files to a repository on the Hugging Face hub, in one commit that is checked afterwards.

The upload looks at the repository first: it replaces a file that differs only on request, and it
notices a commit that came in between. The library's own environment applies: HF_TOKEN or the token
that `hf auth login` stored, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo, RepoSibling

from peagle.errors import UserError
from peagle.model_folder import sha256_of
from peagle.models.hub import (
    DEFAULT_REVISION,
    git_blob_id,
    hub_url,
    no_telemetry,
    progress_bars,
    require_connection,
    status_of,
)

# Errors of the network, the disk, answers that no hub gives, and the library's own of an upload.
_FAILURES = (HTTPError, OSError, ValueError, KeyError, TypeError, RuntimeError)
_WEIGHTS = (".safetensors", ".safetensors.index.json", "correction.st")
_SHOWN_NAMES = 4


@dataclass(frozen=True, slots=True)
class UploadFile:
    """A file for the repository.

    Attributes:
        name: there; content: bytes, or the file that has them; size: bytes.
        sha256, blob_id: the hub's hashes: SHA-256 of large files, git's id of others.
    """

    name: str
    content: bytes | Path
    size: int
    sha256: str
    blob_id: str

    @classmethod
    def of(cls, name: str, content: bytes | Path) -> Self:
        """Read the content for its size and its checksums."""
        if isinstance(content, Path):
            size, sha256 = content.stat().st_size, sha256_of(content)
        else:
            size, sha256 = len(content), hashlib.sha256(content).hexdigest()
        return cls(name, content, size, sha256, git_blob_id(content))

    def equals(self, remote: RepoSibling | None) -> bool:
        """Return whether the hub's file is this one."""
        if remote is None:
            return False
        if remote.lfs is not None:
            return remote.lfs.sha256 == self.sha256
        return remote.blob_id == self.blob_id


@dataclass(frozen=True, slots=True)
class Commit:
    """The result of an upload.

    Attributes:
        url, oid: URL and id of the commit; of the newest commit if nothing had to change.
        created: the repository was made.
        added, replaced, removed: names of files.
        verified: the hub, asked afterwards, lists every file as it was meant.
    """

    url: str
    oid: str
    created: bool
    added: tuple[str, ...]
    replaced: tuple[str, ...]
    removed: tuple[str, ...]
    verified: bool


def upload_files(
    files: Sequence[UploadFile],
    repo: str,
    revision: str = DEFAULT_REVISION,
    *,
    message: str,
    private: bool = False,
    force: bool = False,
) -> Commit:
    """Put files into a repository of models, in one commit.

    The repository and the branch are made if they are not there. Other files there stay, except
    for weights, which would be loaded in place of or beside the new ones.

    Args:
        files: all that the commit may change.
        repo: "owner/name"; revision: a branch.
        message: message of the commit.
        private: make the repository private, or refuse one that is public.
        force: replace files that differ, remove other weights.

    Raises:
        UserError: no token, no permission, no network, a file there that differs, a repository of
            somebody else's, a commit that came in between; the message says what to do.
    """
    token = get_token()
    if token is None:
        raise UserError(
            f"There is no token for {hub_url()}, and nothing can be pushed without one. Make one "
            f"that may write at {hub_url()}/settings/tokens, then set HF_TOKEN to it or run "
            "`hf auth login`."
        )
    with no_telemetry(), progress_bars(shown=sys.stderr.isatty()):
        run = _Upload(files, repo, revision, token)
        try:
            require_connection(run.hub)
            return run.run(message, private=private, force=force)
        except UserError:
            raise
        except _FAILURES as error:
            raise run.explained(error) from None


class _Upload:
    def __init__(self, files: Sequence[UploadFile], repo: str, revision: str, token: str) -> None:
        self.files, self.repo, self.revision = files, repo, revision
        self.hub = hub_url()
        self.api = HfApi(endpoint=self.hub, token=token)
        self.committing = False

    def run(self, message: str, *, private: bool, force: bool) -> Commit:
        info, created = self._repository(private=private)
        branch_is_new = False
        if self.revision != DEFAULT_REVISION:
            try:
                info = self._look(self.revision) or info
            except RevisionNotFoundError:  # the branch will begin with what main holds
                branch_is_new = True
        there = {sibling.rfilename: sibling for sibling in info.siblings or []}
        new = [file for file in self.files if not file.equals(there.get(file.name))]
        replaced = tuple(file.name for file in new if file.name in there)
        added = tuple(file.name for file in new if file.name not in there)
        ours = {file.name for file in self.files}
        weights = (name for name in sorted(there) if name.endswith(_WEIGHTS) and "/" not in name)
        removed = tuple(name for name in weights if name not in ours)
        if not force and (replaced or removed):
            self._refuse(replaced, removed)
        if branch_is_new:
            self.api.create_branch(self.repo, branch=self.revision, exist_ok=True)
        oid, url = info.sha or "", f"{self.hub}/{self.repo}/commit/{info.sha}"
        if new or removed:
            oid, url = self._commit(new, removed, message, parent=info.sha)
        return Commit(url, oid, created, added, replaced, removed, self._verified(oid, url))

    def _repository(self, *, private: bool) -> tuple[ModelInfo, bool]:
        """Find the repository, or make it; return whether it was made too."""
        info = self._look(DEFAULT_REVISION)
        created = info is None
        if info is None:
            self.api.create_repo(self.repo, private=private or None, exist_ok=True)
            info = self._look(DEFAULT_REVISION)
        if info is None:
            raise UserError(
                f"{self.hub} has a repository {self.repo!r} already, and does not show it to the "
                "token in use. Choose another name, or use a token of an account that may write it."
            )
        if private and info.private is False:
            raise UserError(
                f"{self.hub}/{self.repo} is public, but --private was given. Nothing was uploaded. "
                "Make it private in its settings on the hub, choose another name, or leave "
                "--private out."
            )
        return info, created

    def _refuse(self, replaced: Sequence[str], removed: Sequence[str]) -> NoReturn:
        """Refuse to change files that are on the hub."""
        problems = [f"has {_shown(replaced)} with other contents"] if replaced else []
        if removed:
            problems.append(f"has the weights {_shown(removed)}, which are not the head's")
        raise UserError(
            f"{self.hub}/{self.repo} at {self.revision!r} {' and '.join(problems)}. Nothing "
            "was uploaded. With --force they are replaced and removed (the history keeps "
            "them); another name or --revision leaves them alone."
        )

    def _look(self, revision: str) -> ModelInfo | None:
        """Return the repository at a revision, None if the hub shows none."""
        try:
            return self.api.model_info(
                self.repo,
                revision=revision,
                files_metadata=True,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:
            return None

    def _commit(
        self, files: Sequence[UploadFile], removed: Sequence[str], message: str, parent: str | None
    ) -> tuple[str, str]:
        """Commit the files; return the commit and its address."""
        operations = [
            *(CommitOperationAdd(file.name, file.content) for file in files),
            *(CommitOperationDelete(name, is_folder=False) for name in removed),
        ]
        self.committing = True
        commit = self.api.create_commit(
            self.repo,
            operations,
            commit_message=message,
            revision=self.revision,
            parent_commit=parent,
        )
        self.committing = False
        return commit.oid, commit.commit_url

    def _verified(self, oid: str, url: str) -> bool:
        """Return whether the hub lists the files as they were meant; False if it cannot be asked.

        Raises:
            UserError: it lists other files: one changed here meanwhile, or the hub ignored it.
        """
        try:
            info = self._look(oid)
        except _FAILURES:
            info = None
        if info is None:
            return False
        there = {sibling.rfilename: sibling for sibling in info.siblings or []}
        wrong = [file.name for file in self.files if not file.equals(there.get(file.name))]
        if wrong:
            raise UserError(
                f"{url} does not hold {_shown(wrong)} as it was read here: the file changed during "
                "the upload, or a .gitignore in the repository leaves it out. Run the command "
                "again with --force, once neither is so."
            )
        return True

    def explained(self, error: Exception) -> UserError:
        """Explain `error` to the user."""
        # A failed upload of a large file hides its reason behind a RuntimeError.
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        status, where = status_of(cause), f"{self.hub}/{self.repo}"
        # The first lines of the message of the hub or of the network.
        said = getattr(cause, "server_message", None) or str(cause).strip() or type(cause).__name__
        reason = " ".join(said.split())[:300].rstrip(".")
        if isinstance(cause, OfflineModeIsEnabled):
            return UserError(
                f"Nothing was pushed to {where}: HF_HUB_OFFLINE forbids it. Unset HF_HUB_OFFLINE."
            )
        if remedy := self._remedy(cause, status):
            return UserError(f"Nothing was committed to {where}: {reason}. {remedy}")
        if status is None and isinstance(cause, HTTPError | OSError):
            lost = "is not known to have arrived at" if self.committing else "was not made in"
            return UserError(
                f"{self.hub} cannot be reached: {reason}. The commit {lost} {self.repo!r}. Check "
                "the network and HF_ENDPOINT, then run the command again: it uploads only what is "
                "missing."
            )
        answer = f"answers with status {status}" if status else "does not answer as a hub does"
        return UserError(
            f"Nothing was committed to {where}: the hub {answer}: {reason}. Check HF_ENDPOINT "
            f"({self.hub}), and run the command again later."
        )

    def _remedy(self, error: BaseException, status: int | None) -> str:
        owner, tokens = self.repo.partition("/")[0], f"{self.hub}/settings/tokens"
        if isinstance(error, RevisionNotFoundError):
            return f"Name a branch: --revision is {self.revision!r}."
        if status == 401 and not isinstance(error, RepositoryNotFoundError):
            return f"The hub does not know the token in use. Make a new one at {tokens}."
        if status in (401, 402, 403, 404) or isinstance(error, PermissionError):
            return (
                f"The token in use may not write there. Check that {owner!r} is your account or "
                f"an organization in which you may write, and that the token may write ({tokens})."
            )
        if type(error) is ValueError and "metadata" in str(error):
            return "The hub does not accept the lines at the top of README.md: mend them."
        moved = "Somebody changed the repository meanwhile. Look at it, and run it again."
        remedies = {
            409: moved,
            412: moved,
            413: "The hub takes no files of that size from this account.",
            429: "The hub had too many requests of this account. Wait, and run it again.",
        }
        return remedies.get(status or 0, "")


def _shown(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_SHOWN_NAMES])) + ", ..." * (len(names) > _SHOWN_NAMES)
