"""`peagle push`: push a draft head with a model card to a Hugging Face hub."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from peagle.bundled import expand_bundled
from peagle.config import require_folder
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.models.hub_upload import Commit
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
# Names that git takes for a branch, without names that mean something else to a hub.
_BRANCH = re.compile(r"(?!refs/)[A-Za-z0-9_][A-Za-z0-9_.\-/]*(?<![./])")


def push(
    folder: str = typer.Argument(..., help="Folder of the head.", metavar="HEAD_DIR"),
    repo: str = typer.Argument(..., help="Repository on the hub.", metavar="OWNER/NAME"),
    target: str | None = typer.Option(
        None,
        metavar="HUB_ID",
        help="The head's target, for the card.",
        show_default="the one that the head names",
    ),
    license: str | None = typer.Option(
        None,
        metavar="ID",
        help="Licence of the head, for the card: apache-2.0, mit, ...",
        show_default=False,
    ),
    card: Literal["keep", "overwrite"] = typer.Option(
        "keep", help="Keep the README.md of HEAD_DIR, if there is one, or write a new card."
    ),
    revision: str = typer.Option(
        "main", metavar="BRANCH", help="Branch to push to; made if it is not there."
    ),
    private: bool = typer.Option(
        False, "--private", help="Make the repository private; refuse a public one."
    ),
    message: str | None = typer.Option(
        None, metavar="TEXT", help="Message of the commit.", show_default="what the head is"
    ),
    force: bool = typer.Option(False, "--force", help="Replace files on the hub that differ."),
    yes: bool = typer.Option(
        False, "--yes", help="Upload; without --yes the command only shows the plan."
    ),
    format: Literal["text", "json"] = typer.Option("text", help="Print text, or one JSON object."),
) -> None:
    """Push a draft head and its model card to a Hugging Face hub.

    Without --yes nothing is sent: the command checks the head and shows the files to upload.
    """
    path = Path(expand_bundled(folder, "draft"))
    require_folder(path, "The draft head")
    from peagle.models.hub import hub_url
    from peagle.models.hub_upload import UploadFile, upload_files
    from peagle.training.published_head import CARD_NAME, model_card, read_published

    _check_hub_id(repo, "The repository")
    if not _BRANCH.fullmatch(revision) or re.search(r"\.\.|//|^[0-9a-f]{40}$", revision):
        raise UserError(
            f"--revision is {revision!r}; expected a branch, like main: commits and tags stay as "
            "they are."
        )
    if message is not None and not message.strip():
        raise UserError("The message of the commit is empty; expected text, or no --message.")
    head = read_published(path)
    keeps_card = CARD_NAME in head.files and card == "keep"
    target = _target(head, target, wanted=not keeps_card)
    if keeps_card:
        text = _kept_card(path / CARD_NAME, license)
    else:
        assert target is not None
        text = model_card(head, repo, target, _checked_license(license), revision=revision)
    contents: dict[str, bytes | Path] = {name: head.folder / name for name in head.files}
    contents[CARD_NAME] = text.encode()
    files = [UploadFile.of(name, content) for name, content in sorted(contents.items())]
    notes = list(head.notes) if not keeps_card else []
    if head.format == "speculators" and head.target is None:
        notes.append(
            "config.json does not name the target, so that vLLM cannot serve by the head alone: "
            "`peagle convert --format speculators --target` writes it down"
        )
    plan: dict[str, Any] = {
        "hub": hub_url(),
        "repo": repo,
        "revision": revision,
        "private": private,
        "message": message
        or f"Upload {head.config.kind} head{f' for {target}' if target else ''}, with peagle",
        "kind": head.config.kind,
        "style": head.format,
        "num_layers": head.config.num_layers,
        "num_speculative_tokens_trained": head.config.trained_depth,
        "target": target,
        "num_parameters": head.parameters,
        "files": [{"name": f.name, "bytes": f.size, "sha256": f.sha256} for f in files],
        "num_bytes": sum(file.size for file in files),
        "card": text,
        "card_made": not keeps_card,
        "notes": notes,
    }
    for note in notes:
        print(f"peagle: note: {note}", file=sys.stderr)
    if format == "text":
        print(_description(plan, head.dtype), flush=True)
    commit = None
    if yes:
        commit = upload_files(
            files, repo, revision, message=plan["message"], private=private, force=force
        )
    if format == "json":
        print(json.dumps(plan | {"commit": commit and asdict(commit)}))
    else:
        print(_result(commit) if commit else "\nNothing was sent. Upload it with --yes.")


# ---- arguments ----


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
    """Return the target's hub id, as given or as the head names it."""
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


def _kept_card(path: Path, license: str | None) -> str:
    """Return the user's own card, which no option may change."""
    if license is not None:
        raise UserError(
            f"--license is {license!r}, but the card is {str(path)!r}, which is kept as it is. "
            "Write the licence there, or have the card made anew with --card overwrite."
        )
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{str(path)!r} is not UTF-8 text: {error}. Save it as UTF-8, or have it made anew "
            "with --card overwrite."
        ) from None


# ---- output ----


def _description(plan: dict[str, Any], dtype: str) -> str:
    depth, count = plan["num_speculative_tokens_trained"], plan["num_layers"]
    layers = "1 layer" if count == 1 else f"{count} layers"
    trained = "K not recorded" if depth is None else f"trained for K = {depth}"
    width = max(len(file["name"]) for file in plan["files"])
    lines = [
        f"{plan['kind']} head, {layers}, {trained}, {plan['num_parameters']:,} parameters of "
        f"{dtype}, style of {plan['style']}",
        f"to     {plan['hub']}/{plan['repo']}, branch {plan['revision']}"
        + (", private" if plan["private"] else ""),
        f"commit {plan['message']}",
        f"files  {len(plan['files'])}, {plan['num_bytes']:,} bytes",
        *(
            f"  {file['name']:<{width}}  {file['bytes']:>14,}  sha256 {file['sha256']}"
            for file in plan["files"]
        ),
        f"README.md, {'made' if plan['card_made'] else 'yours'}:",
        "",
        *(f"  | {line}".rstrip() for line in plan["card"].splitlines()),
    ]
    return "\n".join(lines)


def _result(commit: Commit) -> str:
    verbs = {"added": commit.added, "replaced": commit.replaced, "removed": commit.removed}
    changes = [f"{verb} {', '.join(names)}" for verb, names in verbs.items() if names]
    state = "" if commit.verified else "\nThe hub could not be asked whether it has all of it."
    done = "; ".join(changes) or "nothing to do, all of it is there"
    return f"\n{done}{state}\n{commit.url}"
