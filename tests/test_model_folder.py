"""Model folders that are broken, or made to do harm: each is refused, within limits."""

import io
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peagle.errors import CheckpointError
from peagle.model_folder import (
    MAX_DEPTH,
    MAX_HEADER_BYTES,
    MAX_JSON_BYTES,
    check_json,
    parse_json,
    read_header,
    read_json,
    read_weight_map,
)

PAIR = Path(__file__).resolve().parent / "fixtures" / "pair2"
SPARSE_HEADER = 4_300_000_000
A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


# ---- JSON ----


@pytest.mark.parametrize("depth", [1, MAX_DEPTH])
def test_json_within_the_limits(depth: int) -> None:
    text = '{"a": ' * (depth - 1) + "[1, {}]" + "}" * (depth - 1)
    assert parse_json(b"[]") == [] and parse_json(text.encode()) is not None


@pytest.mark.parametrize("depth", [MAX_DEPTH + 2, 900, 100_000])
@pytest.mark.parametrize(("start", "end"), [('{"a":', "}"), ("[", "]"), ("[{}, ", "]")])
def test_json_that_is_nested_too_deeply(depth: int, start: str, end: str) -> None:
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        parse_json((start * depth + "1" + end * depth).encode())


def test_json_of_two_meanings() -> None:
    with pytest.raises(ValueError, match="the key 'a' stands twice"):
        parse_json(b'{"b": 1, "x": {"a": 1, "c": 3, "a": 2}}')


def test_json_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(CheckpointError, match="has 100000001 bytes; expected JSON of at most"):
        read_json(path)


@pytest.mark.parametrize(
    "place",
    ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", 5, None, "x/"],
)
def test_shards_lie_beside_their_index(tmp_path: Path, place: Any) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": place}}))
    with pytest.raises(CheckpointError, match="expected the name of a file beside it"):
        read_weight_map(index)


def test_what_nobody_reads_may_be_anything(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"line": 1}\n{"line": 2}\n')
    (tmp_path / "generation_config.json").write_text('{"a": 1, "a": 2}')
    check_json(tmp_path)
    (tmp_path / "added_tokens.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"added_tokens\.json' is not JSON"):
        check_json(tmp_path)


# ---- headers ----


def packed(header: Any, body: int = 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(body)


def test_a_sound_header() -> None:
    data = packed({"__metadata__": {"format": "pt"}, "a": A})
    assert read_header(io.BytesIO(data), len(data)) == read_header(io.BytesIO(data)) == {"a": A}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "too few"),
        (b"1234567", "too few"),
        (packed({"a": A}, length=1000), "its header takes 1000 bytes, the file has"),
        (packed({"a": A}, length=2**64 - 1), "its header takes 18446744073709551615 bytes"),
        (packed({"a": A}, length=0), "its header takes 0 bytes"),
        (packed({"a": A})[:-1], "its tensors take 7 bytes, expected 8"),
        (packed({"a": A}, 9), "its tensors take 9 bytes, expected 8"),
        (packed(b"[" * 100_000), "is not that of a safetensors file"),
        (packed(b'{"a":' * 100_000), "is not that of a safetensors file"),
        (packed(b'{"a": {}, "a": {}}'), "is not that of a safetensors file"),
        (packed([A]), "is not that of a safetensors file"),
        (packed({"a": 1}), "describes tensor 'a' wrongly"),
        (packed({"a": {**A, "data_offsets": [8, 0]}}), "describes tensor 'a' wrongly"),
        (packed({"a": {**A, "data_offsets": [-8, 0]}}), "describes tensor 'a' wrongly"),
        (packed({"a": {**A, "data_offsets": [0, 8.0]}}), "describes tensor 'a' wrongly"),
        (packed({"a": {**A, "data_offsets": [0, True]}}), "describes tensor 'a' wrongly"),
        (packed({"a": {**A, "data_offsets": [0]}}), "describes tensor 'a' wrongly"),
        (packed({"a": {**A, "data_offsets": "08"}}), "describes tensor 'a' wrongly"),
        (packed({"a": {**A, "shape": [-2]}}), "describes tensor 'a' wrongly"),
        (packed({"a": {**A, "shape": 2}}), "describes tensor 'a' wrongly"),
        (packed({"a": {**A, "dtype": ["F32"]}}), "describes tensor 'a' wrongly"),
        (packed({"a": {**A, "shape": [2**62, 2**62]}}), "does not have the bytes"),
        (packed({"a": {**A, "shape": [3]}}), "does not have the bytes"),
        (packed({"a": A, "b": A}), "overlap or leave a gap"),
        (packed({"a": {**A, "data_offsets": [4, 12]}}, 12), "overlap or leave a gap"),
    ],
)
def test_a_broken_header(data: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_header(io.BytesIO(data), len(data))


def test_a_header_beyond_the_formats_own_limit_is_not_read() -> None:
    class First(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            assert size == 8
            return super().read(size)

    for size in (None, 1 << 50):
        first = First((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        with pytest.raises(ValueError, match="expected at most 100000000"):
            read_header(first, size)


# ---- whole folders, by what reads them ----

READERS = """
import resource, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from peagle.cli.main import run
from peagle.deploy.memory import facts_of_folder
from peagle.deploy.model_files import LocalFiles
from peagle.errors import UserError
from peagle.models.checkpoint import load_drafter
from peagle.models.loading import resolve_model
from peagle.models.target_ends import TargetEnds

folder = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for read in (resolve_model, facts_of_folder, lambda f: LocalFiles(f).tensor_names()):
    try:
        read(folder)
    except UserError as error:
        print("refused", type(error).__name__, str(error)[:200].replace(chr(10), " "))
    else:
        print("read")
print("grew by", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_a_sparse_header_takes_no_memory(tmp_path: Path) -> None:
    """Its file says that 4.3 GB of header follow, and has them, as a hole."""
    folder = Path(shutil.copytree(PAIR / "target", tmp_path / "target"))
    weights = folder / "model.safetensors"
    with weights.open("wb") as file:
        file.write(SPARSE_HEADER.to_bytes(8, "little"))
        file.truncate(8 + SPARSE_HEADER)

    def limited() -> None:  # whoever reads it dies of it, not this machine
        resource.setrlimit(resource.RLIMIT_CPU, (120, 120))

    argv = [sys.executable, "-c", READERS, str(folder)]
    ran = subprocess.run(argv, capture_output=True, text=True, preexec_fn=limited)
    *told, grown = ran.stdout.splitlines()
    assert len(told) == 3 and all(line.startswith("refused CheckpointError") for line in told), ran
    assert int(grown.split()[-1]) < 300_000, "kilobytes"


def nested(start: str, end: str, depth: int = 100_000) -> str:
    return start * depth + "1" + end * depth


HOSTILE = {
    "config.json": nested('{"a":', "}"),
    "generation_config.json": nested('{"a":', "}"),
    "tokenizer_config.json": nested("[", "]"),
    "tokenizer.json": nested('{"a":', "}"),
    "special_tokens_map.json": nested('{"a":', "}", 500),
    "chat_template.json": nested('{"a":', "}"),
    "adapter_config.json": nested('{"a":', "}"),
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "../../secret.safetensors"}}),
    "model.safetensors": "\x00\x00\x00\x00\x01\x00\x00\x00",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("role", ["target", "peagle"])
def test_the_command_line_refuses_it_without_a_traceback(
    name: str, role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peagle.cli.main import run

    folders = {r: str(PAIR / r) for r in ("target", "peagle")}
    folders[role] = str(shutil.copytree(folders[role], tmp_path / role))
    (Path(folders[role]) / name).write_text(HOSTILE[name])
    arguments = ["generate", "--target", folders["target"], "--draft", folders["peagle"]]
    status = run([*arguments, "--prompt", "x", "--max-new-tokens", "1"])
    said = capsys.readouterr().err
    assert status == 2 and "Traceback" not in said, said
    assert name in said or (name == "tokenizer.json" and "tokenizer" in said), said
