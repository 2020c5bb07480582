"""API keys: where they come from, whether a request carries one, and what they isolate."""

from __future__ import annotations

import binascii
import logging
import os
import secrets
import stat
from base64 import b64decode
from collections.abc import Iterable, Mapping
from hashlib import blake2b, sha256
from hmac import compare_digest
from pathlib import Path

from peagle.errors import UserError

ENVIRONMENT_VARIABLE = "PEAGLE_API_KEY"
MIN_LENGTH = 16

_logger = logging.getLogger(__name__)
# Drawn for each process, so that a salt reveals nothing about its key.
_PROCESS_SECRET = secrets.token_bytes(32)


class ApiKeys:
    """The keys that open the server. Only their SHA-256 digests are kept; false if there are none.

    Args:
        keys: as clients send them; repetitions count once.
        digests: SHA-256 of further keys.

    Attributes:
        digests: SHA-256 of all keys.
    """

    def __init__(self, keys: Iterable[str] = (), *, digests: Iterable[bytes] = ()) -> None:
        own = (sha256(key.encode()).digest() for key in keys)
        self.digests = tuple(dict.fromkeys([*own, *digests]))
        self._salts = tuple(
            blake2b(digest, key=_PROCESS_SECRET, digest_size=16).digest() for digest in self.digests
        )

    def __len__(self) -> int:
        return len(self.digests)

    def __repr__(self) -> str:
        return f"ApiKeys(<{len(self)}>)"

    def salt_of(self, candidate: bytes) -> bytes | None:
        """16 bytes that isolate this key's prefix cache from other keys'; None if it is no key.

        The salt is the same for all requests with one key while the process lives. Every key is
        compared, in constant time, so that the time reveals nothing.
        """
        digest = sha256(candidate).digest()
        found = None
        for known, salt in zip(self.digests, self._salts):
            if compare_digest(digest, known):
                found = salt
        return found


def load_keys(environ: Mapping[str, str], file: str | Path | None = None) -> ApiKeys:
    """The keys that `read_keys` finds, of which only digests are kept."""
    return ApiKeys(read_keys(environ, file))


def read_keys(environ: Mapping[str, str], file: str | Path | None = None) -> tuple[str, ...]:
    """The keys of `file`, or else those of PEAGLE_API_KEY in `environ`; none if neither is there.

    Args:
        environ: the variable holds one key, or several separated by commas.
        file: one key per line; blank lines and lines that begin with # are skipped.

    Raises:
        UserError: a file that cannot be read, a source without any key, or a key with characters
            that a header cannot carry. No message contains a key.
    """
    variable = environ.get(ENVIRONMENT_VARIABLE)
    if file is not None:
        if variable is not None:
            _logger.warning("%s is ignored: keys come from the key file.", ENVIRONMENT_VARIABLE)
        # Not splitlines, nor a plain strip: those would hide control characters from the check.
        lines = enumerate(_read(Path(file)).split("\n"), start=1)
        named = [(f"line {n} of {str(file)!r}", line.strip(" \t")) for n, line in lines]
        named = [(name, key) for name, key in named if key and not key.startswith("#")]
        source, remedy = f"the key file {str(file)!r}", "leave the option out"
    elif variable is not None:
        parts = enumerate(variable.split(","), start=1)
        named = [(f"key {n} in {ENVIRONMENT_VARIABLE}", part.strip()) for n, part in parts]
        named = [(name, key) for name, key in named if key]
        source, remedy = f"the variable {ENVIRONMENT_VARIABLE}", "unset it"
    else:
        return ()
    if not named:
        # An empty secret must not open a server that was meant to be locked.
        raise UserError(
            f"No API key in {source}: expected at least one. Put a key there, or {remedy} to serve "
            "without keys."
        )
    for name, key in named:
        _check(name, key)
    return tuple(key for _, key in named)


def key_of(authorization: bytes) -> bytes | None:
    """The key in an Authorization header: a Bearer token, or the password of HTTP Basic."""
    scheme, _, value = authorization.partition(b" ")
    value = value.strip()
    match scheme.lower():
        case b"bearer":
            return value
        case b"basic":
            try:
                _, colon, password = b64decode(value, validate=True).partition(b":")
            except binascii.Error:
                return None
            return password if colon else None
    return None


def _read(file: Path) -> str:
    try:
        with file.open(encoding="utf-8-sig") as lines:
            mode = os.fstat(lines.fileno()).st_mode
            if os.name == "posix" and mode & stat.S_IROTH:
                _logger.warning(
                    "The key file %r can be read by every user of this machine: chmod 600 it.",
                    str(file),
                )
            return lines.read()
    except OSError as error:
        raise UserError(
            f"The key file {str(file)!r} cannot be read ({error.strerror}): expected a text file "
            "with one API key per line."
        ) from None
    except UnicodeDecodeError:  # from None: this error carries the file's content
        raise UserError(
            f"The key file {str(file)!r} is not UTF-8: expected a text file with one API key per "
            "line."
        ) from None


def _check(name: str, key: str) -> None:
    """Refuse a key that no header can carry, warn of a short one; `name` is its place."""
    if not all("!" <= character <= "~" for character in key):
        raise UserError(
            f"An API key contains a space, a control character or a character outside ASCII "
            f"({name}): expected visible ASCII only, for example the output of openssl rand -hex "
            "32."
        )
    if len(key) < MIN_LENGTH:
        _logger.warning(
            "An API key is short (%s: %d characters): use at least %d random ones.",
            name,
            len(key),
            MIN_LENGTH,
        )
