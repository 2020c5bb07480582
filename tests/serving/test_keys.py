"""API keys: sources, comparison, and that nothing tells them."""

import base64
import logging
from pathlib import Path

import pytest

from peagle.errors import UserError
from peagle.serving import keys as keys_module
from peagle.serving.keys import ApiKeys, bearer_key, load_keys

FIRST, SECOND, THIRD = "first-key-0123456789", "second-key-0123456789", "third-key-0123456789"


def write(folder: Path, text: str | bytes, mode: int = 0o600) -> Path:
    file = folder / "keys"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    file.chmod(mode)
    return file


def opens(keys: ApiKeys, *candidates: str) -> list[bool]:
    return [keys.salt_of(candidate.encode()) is not None for candidate in candidates]


# ---- where keys come from ----


def test_no_source_gives_no_keys() -> None:
    keys = load_keys({})
    assert not keys and len(keys) == 0
    assert opens(keys, FIRST, "") == [False, False]


def test_variable_holds_several_keys() -> None:
    keys = load_keys({"PEAGLE_API_KEY": f" {FIRST},{SECOND} ,, {FIRST}\n"})
    assert len(keys) == 2 and keys
    assert opens(keys, FIRST, SECOND, THIRD, f"{FIRST},{SECOND}") == [True, True, False, False]


def test_file_holds_a_key_per_line(tmp_path: Path) -> None:
    file = write(tmp_path, f"\ufeff# of the team\n\n{FIRST}\r\n  {SECOND}\t\n  # {THIRD}\n")
    keys = load_keys({}, file)
    assert opens(keys, FIRST, SECOND, THIRD, "") == [True, True, False, False]


def test_file_goes_before_the_variable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = load_keys({"PEAGLE_API_KEY": FIRST}, write(tmp_path, SECOND))
    assert opens(keys, FIRST, SECOND) == [False, True]
    assert "PEAGLE_API_KEY is ignored" in caplog.text


@pytest.mark.parametrize("value", ["", " ", ",", " , ,\n"])
def test_an_empty_variable_does_not_open_the_server(value: str) -> None:
    with pytest.raises(UserError, match=r"No API key in the variable PEAGLE_API_KEY.*unset it"):
        load_keys({"PEAGLE_API_KEY": value})


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_an_empty_file_does_not_open_the_server(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="No API key in the key file"):
        load_keys({}, write(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent.*cannot be read \(No such file"):
        load_keys({}, tmp_path / "absent")
    with pytest.raises(UserError, match="cannot be read"):
        load_keys({}, tmp_path)


# ---- bad keys, and silence about all of them ----


@pytest.mark.parametrize(
    "character", [" ", "\t", "\0", "\x0b", "\x1c", "\x7f", "\x85", "é", "\u2028"]
)
def test_keys_that_no_header_carries(tmp_path: Path, character: str) -> None:
    key = f"{FIRST}{character}{SECOND}"
    with pytest.raises(UserError, match="visible ASCII") as caught:
        load_keys({}, write(tmp_path, f"# one\n{key}\n"))
    assert "line 2" in str(caught.value)
    if character not in " \t":  # which around a key are not part of it
        with pytest.raises(UserError, match="visible ASCII"):
            load_keys({}, write(tmp_path, f"{FIRST}{character}\n"))
    assert FIRST not in str(caught.value) and SECOND not in str(caught.value)
    with pytest.raises(UserError, match="key 2 in PEAGLE_API_KEY") as caught:
        load_keys({"PEAGLE_API_KEY": f"{THIRD},{key}"})
    assert not any(part in str(caught.value) for part in (FIRST, SECOND, THIRD))


def test_a_file_in_another_encoding_is_not_quoted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not UTF-8") as caught:
        load_keys({}, write(tmp_path, FIRST.encode() + b"\xff"))
    # A traceback prints what the error was raised from.
    assert caught.value.__suppress_context__ and caught.value.__cause__ is None
    assert FIRST not in str(caught.value)


def test_short_keys_and_open_files_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file = write(tmp_path, f"hunter2\n{FIRST}\n", mode=0o644)
    keys = load_keys({}, file)
    assert opens(keys, "hunter2", FIRST) == [True, True]
    assert "short (line 1 of" in caplog.text and "7 characters" in caplog.text
    assert "can be read by every user" in caplog.text
    assert "hunter2" not in caplog.text and FIRST not in caplog.text

    caplog.clear()
    load_keys({}, write(tmp_path, FIRST, mode=0o640))
    assert caplog.text == ""


def test_keys_are_not_kept() -> None:
    keys = ApiKeys([FIRST])
    assert repr(keys) == "ApiKeys(<1>)"
    assert FIRST not in repr(vars(keys)) and FIRST.encode() not in b"".join(keys.digests)


# ---- comparison and salts ----


@pytest.mark.parametrize("candidate", [FIRST, SECOND, THIRD, "none of them", ""])
def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch, candidate: str) -> None:
    seen: list[bytes] = []
    real = keys_module.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        seen.append(b)
        assert len(a) == len(b) == 32  # what differs in length is not compared in constant time
        return real(a, b)

    keys = ApiKeys([FIRST, SECOND, THIRD])
    monkeypatch.setattr(keys_module, "compare_digest", counted)
    keys.salt_of(candidate.encode())
    assert len(set(seen)) == len(seen) == 3


def test_salts_tell_keys_apart_and_last_as_long_as_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = ApiKeys([FIRST, SECOND])
    first, second = keys.salt_of(FIRST.encode()), keys.salt_of(SECOND.encode())
    assert first and second and first != second and len(first) == len(second) == 16
    assert keys.salt_of(FIRST.encode()) == first
    assert ApiKeys([THIRD, FIRST]).salt_of(FIRST.encode()) == first
    monkeypatch.setattr(keys_module, "_PROCESS_SECRET", bytes(32))
    assert ApiKeys([FIRST]).salt_of(FIRST.encode()) != first


def basic(text: str) -> bytes:
    return b"Basic " + base64.b64encode(text.encode())


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (b"Bearer abc", b"abc"),
        (b"bEARER   abc ", b"abc"),
        (b"Bearer a b", b"a b"),
        (b"Bearer ", b""),
        (b"Bearer", b""),
        (b"Bearerabc", None),
        (b"abc", None),
        (b"", None),
        (b"Digest abc", None),
        (basic("user:abc"), b"abc"),
        (basic(":abc"), b"abc"),
        (basic("user:a:b"), b"a:b"),
        (basic("user:"), b""),
        (basic("abc"), None),
        (b"Basic !!!", None),
        (b"Basic YWJ", None),
        (b"Basic Om!FiYw==", None),
        (b"Basic \xff\xfe", None),
        (b"Basic", None),
    ],
)
def test_key_of_a_header(header: bytes, key: bytes | None) -> None:
    assert bearer_key(header) == key
