"""The API keys of a server: a file of them, who presents one, and how long each is good.

Only digests are compared and kept. A key that is written in plain text is hashed where it is read.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path

from carpool.engine.logger import logger

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_HASHED = "sha256:"
_EXPIRES = "expires="
_PREFIX = "cp_"  # so that scanners for leaked secrets can tell what they have found
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes:
        name: Who has it, for logs and metrics; several keys may have one name.
        digest: SHA-256 of the key.
        expires: Seconds since 1970 after which it is no longer good; infinity if it stays good.
    """

    name: str
    digest: bytes
    expires: float


def new_key(name: str, expires: str = "") -> tuple[str, str]:
    """Make a key; return it, and the line of the file of keys that lets it in.

    Args:
        name: Who gets it.
        expires: The day, or the moment, from which it is no longer good; empty for never.

    Raises:
        ValueError: `name` or `expires` cannot stand in such a line.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a key: use letters, digits, dots, dashes and underscores")
    key = _PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    line = f"{name}:{_HASHED}{hashlib.sha256(key.encode()).hexdigest()}"
    if expires:
        line = f"{line} {_EXPIRES}{expires}"
    _key_of(line, "the new key")
    return key, line


def read_keys(text: str, source: str) -> tuple[Key, ...]:
    """Return the keys in the text of a file.

    Args:
        text: A key a line, as `name:key` or `name:sha256:hex`, and ` expires=2027-01-31` behind it
            if it ends one day. Blank lines and lines that begin with # are passed over.
        source: Where the text is from, for errors.

    Raises:
        ValueError: A line is no key. The error names the line and does not repeat it.
    """
    lines = enumerate(text.splitlines(), 1)
    return tuple(
        _key_of(line.strip(), f"line {n} of {source}") for n, line in lines if line.strip() and line.strip()[0] != "#"
    )


def _key_of(line: str, where: str) -> Key:
    """Read one line. Raises ValueError."""
    entry, _, expires = line.partition(" ")
    name, colon, key = entry.partition(":")
    if not colon or not key or not _NAME.fullmatch(name):
        raise ValueError(
            f"{where} is no key: write name:key or name:sha256:hex, with letters, digits, dots, dashes and underscores"
            " in the name; `carpool key NAME` makes such a line"
        )
    if key.startswith(_HASHED):
        digest = key.removeprefix(_HASHED)
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{where} has no SHA-256 behind {name}:{_HASHED} it is 64 hexadecimal digits")
        return Key(name, bytes.fromhex(digest), _moment(expires.strip(), where))
    if not key.isascii() or not key.isprintable():
        raise ValueError(f"{where} has a key that a header cannot carry: use printable ASCII characters")
    return Key(name, hashlib.sha256(key.encode()).digest(), _moment(expires.strip(), where))


def _moment(text: str, where: str) -> float:
    """Return when a key ends; infinity for an empty text. Raises ValueError."""
    if not text:
        return inf
    try:
        if not text.startswith(_EXPIRES):
            raise ValueError
        moment = datetime.fromisoformat(text.removeprefix(_EXPIRES))
    except ValueError:
        raise ValueError(f"{where} ends in what is no date: write {_EXPIRES}2027-01-31 or leave it out") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp()


class KeyRing:
    """The keys that open a server.

    Args:
        path: The file of keys; None if there is none.
        text: Further keys, as the environment has them: lines, or entries with commas between.

    Attributes:
        names: Who has keys: a closed set, fit to be a metric label.

    Raises:
        ValueError: There is no key at all, or a line is no key.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path | None, text: str = "") -> None:
        self._path = path
        self._from_text = read_keys(text.replace(",", "\n"), "CARPOOL_API_KEYS")
        self._seen: tuple[int, int, int] | None = None
        self._keys: Sequence[Key] = ()
        self._load()
        if not self._keys:
            raise ValueError(
                f"there is no key in {path or 'CARPOOL_API_KEYS'}: put a line there, which `carpool key NAME` makes"
            )

    @property
    def names(self) -> frozenset[str]:
        """Who has keys."""
        return frozenset(key.name for key in self._keys)

    def caller_of(self, presented: bytes, now: float) -> str | None:
        """Return the name behind a key; None if the key is not good.

        It takes the same time wherever in the file the key is, and if it is not there.

        Args:
            presented: The key as the client has sent it.
            now: Seconds since 1970.
        """
        digest = hashlib.sha256(presented).digest()
        found: str | None = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest) and now < key.expires:
                found = key.name
        return found

    def next_expiry(self, now: float) -> float:
        """Return when the next key ends that is still good; infinity if none ends."""
        return min((key.expires for key in self._keys if key.expires > now), default=inf)

    def reload(self) -> bool:
        """Read the file again if it has changed; report whether the keys are other ones now.

        A file that cannot be read, or in which a line is no key, leaves the keys as they are, which
        is logged. Of one that has no key any more, or that has gone, none stays good.
        """
        before = self._keys
        try:
            if self._path is None or _state_of(self._path) == self._seen:
                return False
            self._load()
        except FileNotFoundError:
            self._seen, self._keys = None, self._from_text
        except (OSError, ValueError) as error:
            logger.error("the keys stay as they are: %s", error)
            return False
        if self._keys == before:
            return False
        level = logging.INFO if self._keys else logging.WARNING
        logger.log(level, "%d keys in %s are in force", len(self._keys), self._path)
        return True

    def _load(self) -> None:
        keys = list(self._from_text)
        if self._path is not None:
            self._seen = _state_of(self._path)  # before it is read: a later change is seen the next time
            keys += self._read()
        self._keys = tuple(keys)

    def _read(self) -> Iterator[Key]:
        assert self._path is not None
        if self._path.stat().st_mode & stat.S_IROTH:
            logger.warning("every user of this machine can read %s: chmod o= %s", self._path, self._path)
        yield from read_keys(self._path.read_text(), os.fspath(self._path))


def _state_of(path: Path) -> tuple[int, int, int]:
    """Return what changes when a file is written or replaced. Raises OSError."""
    state = path.stat()
    return state.st_mtime_ns, state.st_size, state.st_ino
