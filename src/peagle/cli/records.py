"""`peagle records list | delete`: recorded traffic of a server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer
from typer.core import TyperGroup

from peagle.cli.groups import Format, OutputFormat
from peagle.cli.main import CONTEXT, with_examples
from peagle.data.recorded import RecordFolder
from peagle.disk import size_text
from peagle.errors import UserError

EXAMPLES = """
Count the records in a folder, without any text:
  peagle records list traffic

Delete all records of a key, named by its id in the list, or on standard input:
  peagle records delete traffic --key 0f3a5c2e9b7d41680f3a5c2e9b7d4168
  peagle records delete traffic --key - < key.txt
"""

_Folder = typer.Argument(..., metavar="DIR", help="Folder of --record.", show_default=False)


def list_records(folder: Path = _Folder, output_format: Format = OutputFormat.TEXT) -> None:
    """Count recorded traffic by day and by key; keys have ids of this folder."""
    found = RecordFolder(folder).summary()
    if output_format is OutputFormat.JSON:
        print(json.dumps({"folder": str(folder), **found}))
        return
    cut = f", and {found['cut']} lines that were cut off" if found["cut"] else ""
    size = size_text(found["bytes"])
    print(f"{folder}: {found['records']} records in {found['files']} files, {size}{cut}")
    for kind in ("day", "key"):
        for name, count in sorted(found[f"{kind}s"].items()):
            print(f"{kind} {name or '(none)':<33}{count:>9}")
    for one in found["refused"]:
        print(f"key {one} is refused: nothing of it is recorded")


def delete_records(
    folder: Path = _Folder,
    key: str = typer.Option(
        ...,
        metavar="KEY",
        help="The API key, its SHA-256 or its id in the list; - reads it from standard input.",
    ),
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Delete all records of an API key; servers record nothing more of it in this folder.

    Remove its id from the file "refused" there to have it recorded again.
    """
    records = RecordFolder(folder)
    name = (sys.stdin.readline() if key == "-" else key).strip()
    if not name:
        raise UserError("--key is empty; expected an API key, its SHA-256 or its id in the list.")
    ids = records.ids_named(name)
    count = records.delete(ids)
    if output_format is OutputFormat.JSON:
        print(json.dumps({"folder": str(folder), "deleted": count, "refused": sorted(ids)}))
    else:
        found = f"deleted {count} records" if count else "there were no records of this key"
        print(f"{folder}: {found}; nothing more of this key is recorded there")


records = typer.Typer(
    cls=with_examples(TyperGroup, EXAMPLES),
    add_completion=False,
    context_settings=CONTEXT,
    help="List recorded traffic of a server, and delete that of an API key.",
)
records.command("list")(list_records)
records.command("delete")(delete_records)
