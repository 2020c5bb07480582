"""`peagle push`: a draft head, with a model card, to a Hugging Face hub."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from peagle.bundled import expand_bundled
from peagle.config import require_folder
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.models.hub_upload import Commit, UploadFile
    from peagle.training.published_head import PublishedHead

EXAMPLES = """
What would be uploaded, and the card; nothing leaves the machine:
  peagle push ./head my-name/qwen3-8b-p-eagle --target Qwen/Qwen3-8B --license apache-2.0

Upload it, into a private repository; the token is that of `hf auth login`, or HF_TOKEN:
  peagle push ./head my-name/qwen3-8b-p-eagle --target Qwen/Qwen3-8B --license apache-2.0 \\
      --private --yes

A better head in its place; a trial on a branch of its own; for a program:
  peagle push ./head my-name/qwen3-8b-p-eagle --message 'Trained for 40 epochs' --force --yes
  peagle push ./trial my-name/qwen3-8b-p-eagle --revision trial --yes
  peagle push ./head my-name/qwen3-8b-p-eagle --format json
"""

_LICENSE = re.compile(r"[a-z0-9][a-z0-9.\-]*")
# Names that git takes for a branch, less those that a hub would read as something else.
_BRANCH = re.compile(r"(?!refs/)[A-Za-z0-9_][A-Za-z0-9_.\-/]*(?<![./])")


@dataclass(frozen=True, slots=True)
class PushPlan:
    """The steps of a push.

    Attributes:
        head: the head; target: hub id of its target, None if only the user's card names it.
        repo, revision, private, message: the place on the hub, and the commit.
        files: all that go there; card: the text of README.md.
        card_is_ours: the card was made, not found in the folder.
        notes: advice for the user.
    """

    head: PublishedHead
    target: str | None
    repo: str
    revision: str
    private: bool
    message: str
    files: tuple[UploadFile, ...]
    card: str
    card_is_ours: bool
    notes: tuple[str, ...]

    def to_json(self, commit: Commit | None) -> dict[str, Any]:
        """The output of --format json."""
        from peagle.models.hub import hub_url

        head = self.head
        return {
            "hub": hub_url(),
            "repo": self.repo,
            "revision": self.revision,
            "private": self.private,
            "message": self.message,
            "kind": head.kind,
            "style": head.format,
            "num_layers": head.config.num_layers,
            "num_speculative_tokens_trained": head.config.trained_depth,
            "target": self.target,
            "num_parameters": head.parameters,
            "files": [{"name": f.name, "bytes": f.size, "sha256": f.sha256} for f in self.files],
            "num_bytes": sum(file.size for file in self.files),
            "card": self.card,
            "card_made": self.card_is_ours,
            "notes": list(self.notes),
            "commit": commit and asdict(commit),
        }


def push(
    folder: Annotated[str, typer.Argument(help="Folder of the head.", metavar="HEAD_DIR")],
    repo: Annotated[str, typer.Argument(help="Repository on the hub.", metavar="OWNER/NAME")],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="HUB_ID",
            help="The head's target, for the card.",
            show_default="the one that the head names",
        ),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Licence of the head, for the card: apache-2.0, mit, ...",
            show_default=False,
        ),
    ] = None,
    card: Annotated[
        Literal["keep", "overwrite"],
        typer.Option(help="Keep the README.md of HEAD_DIR, if there is one, or write a new card."),
    ] = "keep",
    revision: Annotated[
        str, typer.Option(metavar="BRANCH", help="Branch to push to; made if it is not there.")
    ] = "main",
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private; refuse a public one.")
    ] = False,
    message: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Message of the commit.", show_default="what the head is"
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files on the hub that differ.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Upload; without --yes the command only shows the plan.")
    ] = False,
    format: Annotated[
        Literal["text", "json"], typer.Option(help="Print text, or one JSON object.")
    ] = "text",
) -> None:
    """Push a draft head and its model card to a Hugging Face hub.

    Without --yes nothing is sent: the head is checked, and what would be uploaded is shown.
    """
    plan = make_plan(
        Path(expand_bundled(folder, "draft")),
        repo,
        target=target,
        license=license,
        overwrite_card=card == "overwrite",
        revision=revision,
        private=private,
        message=message,
    )
    for note in plan.notes:
        print(f"peagle: note: {note}", file=sys.stderr)
    if format == "text":
        print(_description(plan), flush=True)
    commit = None
    if yes:
        from peagle.models.hub_upload import upload

        commit = upload(
            plan.files,
            plan.repo,
            plan.revision,
            message=plan.message,
            private=plan.private,
            force=force,
        )
    if format == "json":
        print(json.dumps(plan.to_json(commit)))
    else:
        print(_result(commit) if commit else "\nNothing was sent. Upload it with --yes.")


def make_plan(
    folder: Path,
    repo: str,
    *,
    target: str | None = None,
    license: str | None = None,
    overwrite_card: bool = False,
    revision: str = "main",
    private: bool = False,
    message: str | None = None,
) -> PushPlan:
    """Check the head and make its card; no connection is made.

    Raises:
        UserError: an argument is not usable, or the head may not be published.
    """
    require_folder(folder, "The draft head")
    from peagle.models.hub_upload import UploadFile
    from peagle.training.model_card import model_card
    from peagle.training.published_head import CARD_NAME, read_head

    _check_hub_id(repo, "The repository")
    if not _BRANCH.fullmatch(revision) or re.search(r"\.\.|//|^[0-9a-f]{40}$", revision):
        raise UserError(
            f"--revision is {revision!r}; expected a branch, like main: commits and tags stay as "
            "they are."
        )
    if message is not None and not message.strip():
        raise UserError("The message of the commit is empty; expected text, or no --message.")
    head = read_head(folder)
    keeps_card = CARD_NAME in head.files and not overwrite_card
    target = _target(head, target, wanted=not keeps_card)
    if keeps_card:
        if license is not None:
            raise UserError(
                f"--license is {license!r}, but the card is {str(folder / CARD_NAME)!r}, which is "
                "kept as it is. Write the licence there, or have the card made anew with --card "
                "overwrite."
            )
        text = _read_card(folder / CARD_NAME)
    else:
        assert target is not None
        text = model_card(head, repo, target, _checked_license(license), revision=revision)
    contents: dict[str, bytes | Path] = {name: head.folder / name for name in head.files}
    contents[CARD_NAME] = text.encode()
    files = tuple(UploadFile.of(name, content) for name, content in sorted(contents.items()))
    notes = list(head.notes) if not keeps_card else []
    if head.format == "speculators" and head.target is None:
        notes.append(
            "config.json does not name the target, so that vLLM cannot serve by the head alone: "
            "`peagle convert --format speculators --target` writes it down"
        )
    what = f"{head.kind} head" + (f" for {target}" if target else "")
    return PushPlan(
        head=head,
        target=target,
        repo=repo,
        revision=revision,
        private=private,
        message=message or f"Upload {what}, with peagle",
        files=files,
        card=text,
        card_is_ours=not keeps_card,
        notes=tuple(notes),
    )


# ---- arguments ------------------------------------------------------------------------------


def _is_hub_id(text: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return "/" in text


def _check_hub_id(text: str, what: str) -> None:
    if not _is_hub_id(text):
        raise UserError(f"{what} is {text!r}; expected a hub id of the form OWNER/NAME.")


def _target(head: PublishedHead, given: str | None, *, wanted: bool) -> str | None:
    """The target's hub id, as given or as the head names it.

    Raises:
        UserError: there is none though it is wanted, or the head names another one.
    """
    named = head.target
    is_id = named is not None and _is_hub_id(named) and not Path(named).exists()
    remedy = (
        f"Write its hub id down with `peagle convert {head.folder} COPY --format {head.format} "
        "--target HUB_ID`, and push the copy."
    )
    if given is not None:
        _check_hub_id(given, "--target")
        if given == named:
            return given
    if named is not None and not is_id and re.search(r"[/\\]", named):
        raise UserError(
            f"The head names its target by the path {named!r}, which nobody else has. {remedy}"
        )
    if is_id and given not in (None, named):
        raise UserError(f"--target is {given!r}, but the head names the target {named!r}. {remedy}")
    found = given or (named if is_id else None)
    if found is None and wanted:
        raise UserError(
            f"The head does not say which model on the hub its target is (it knows it as "
            f"{named!r}). Name it with --target, like --target Qwen/Qwen3-8B."
        )
    return found


def _checked_license(license: str | None) -> str:
    if license is None:
        raise UserError(
            "The card needs the licence under which the head is given away, and that is yours to "
            "choose: name it with --license, like --license apache-2.0. The licence of the target "
            "may set terms for it."
        )
    if not _LICENSE.fullmatch(license):
        raise UserError(
            f"--license is {license!r}; expected an identifier of the hub in small letters, like "
            "apache-2.0, mit, llama3.1 or other."
        )
    return license


def _read_card(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{str(path)!r} is not UTF-8 text: {error}. Save it as UTF-8, or have it made anew "
            "with --card overwrite."
        ) from None


# ---- output ---------------------------------------------------------------------------------


def _description(plan: PushPlan) -> str:
    from peagle.models.hub import hub_url

    head, depth = plan.head, plan.head.config.trained_depth
    layers = "1 layer" if head.config.num_layers == 1 else f"{head.config.num_layers} layers"
    trained = "K not recorded" if depth is None else f"trained for K = {depth}"
    width = max(len(file.name) for file in plan.files)
    lines = [
        f"{head.kind} head, {layers}, {trained}, {head.parameters:,} parameters of {head.dtype}, "
        f"style of {head.format}",
        f"to     {hub_url()}/{plan.repo}, branch {plan.revision}"
        + (", private" if plan.private else ""),
        f"commit {plan.message}",
        f"files  {len(plan.files)}, {sum(file.size for file in plan.files):,} bytes",
        *(f"  {f.name:<{width}}  {f.size:>14,}  sha256 {f.sha256}" for f in plan.files),
        f"README.md, {'made' if plan.card_is_ours else 'yours'}:",
        "",
        *(f"  | {line}".rstrip() for line in plan.card.splitlines()),
    ]
    return "\n".join(lines)


def _result(commit: Commit) -> str:
    verbs = {"added": commit.added, "replaced": commit.replaced, "removed": commit.removed}
    changes = [f"{verb} {', '.join(names)}" for verb, names in verbs.items() if names]
    state = "" if commit.verified else "\nThe hub could not be asked whether it has all of it."
    done = "; ".join(changes) or "nothing to do, all of it is there"
    return f"\n{done}{state}\n{commit.url}"
