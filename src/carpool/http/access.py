"""Who may ask: keys, names of the host, and pages of other sites.

An app has an `Access` only where something is restricted. It judges heads. A front that remembers
heads by their exact bytes remembers its judgement with them, so a key that is presented again and
again costs nothing; `Access.on_change` is called when it must forget.

`KeyRing` has the API keys of a server: a file of them, and how long each is good. Only digests are
compared and kept.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Final

from carpool.engine.logger import logger
from carpool.http.codec import Refusal
from carpool.http.exchange import Exchange, Head, HttpResponse

SINGLE: Final = frozenset({b"authorization", b"x-api-key"})
"""Headers that a request may have once only."""

_OPEN = b"/livez"
_READYZ = b"/readyz"
_LOOK_EVERY_S = 1.0
_ANY = "*"
_SAFE_METHODS = frozenset({b"GET", b"HEAD", b"OPTIONS"})
_OWN_SITES = frozenset({b"same-origin", b"none"})
_CHALLENGE = b'Bearer realm="carpool"'
_UNKNOWN_KEY = "This key is not known, or is no longer good: send one that the server has."
_CHALLENGE_TO_BROWSERS = _CHALLENGE + b', Basic realm="carpool (any name, and the key as password)"'
_ALLOWED_HEADERS = (
    b"authorization, content-type, x-api-key, x-request-id, x-request-priority, x-request-timeout-ms, traceparent"
)
_EXPOSED_HEADERS = b"x-request-id, retry-after, server-timing"
_PREFLIGHT_S = b"600"
LOCAL_NAMES: Final = ("localhost", "*.localhost", "127.0.0.1", "[::1]")
"""The names by which a browser on the same machine calls a server on a loopback address."""


class Access:
    """Judges whether a request may be made at all.

    Args:
        hosts: The names by which clients may call the server, such as `api.example.com`,
            `*.example.com` or `[::1]`; empty if any will do.
        origins: The sites whose pages may ask, such as `https://example.com`; `*` for all.
        is_readyz_open: Whether `/readyz` needs no key, as `/livez` never does.
        prefix: The path of a proxy, which stands before each path.

    Attributes:
        rejected: How many requests had no key, or a wrong one.
        on_change: Are called when heads that were let in before may not be any more.
    """

    def __init__(
        self,
        keys: KeyRing | None = None,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        *,
        is_readyz_open: bool = False,
        prefix: str = "",
    ) -> None:
        self.keys = keys
        self._hosts = frozenset(_host(name) for name in hosts)
        self._origins = frozenset(origin.rstrip("/").lower().encode() for origin in origins)
        start = prefix.encode()
        self._open = {_OPEN, start + _OPEN} | ({_READYZ, start + _READYZ} if is_readyz_open else set())
        self.wanted_headers = frozenset(
            {
                b"host",
                b"origin",
                b"sec-fetch-site",
                b"access-control-request-method",
                *(SINGLE if keys is not None else ()),
            }
        )
        self.on_change: list[Callable[[], None]] = []
        self._expiry = inf if keys is None else keys.next_expiry(time.time())
        self._looked_at = 0.0
        self.requests = dict.fromkeys([] if keys is None else sorted(keys.names), 0)
        self.rejected = 0

    def check(self, head: Head) -> HttpResponse | None:
        """Judge a head, and note its caller and its answer's headers; raises a `Refusal`.

        Returns:
            The answer to a browser that asks whether a page may ask; None for any other request.
        """
        headers = head.headers
        if head.path in self._open and head.method in _SAFE_METHODS:
            if self.keys is not None:
                head.caller = self._known_caller(head, self.keys) or ""
            return None
        if self._hosts and not self._is_known(headers.get(b"host")):
            raise Refusal(421, "wrong_host")
        origin = headers.get(b"origin")
        if origin is not None and self._is_allowed(origin):
            head.extra = (
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", _EXPOSED_HEADERS),
                (b"vary", b"origin"),
            )
            if head.method == b"OPTIONS" and b"access-control-request-method" in headers:
                return _preflight()
        elif head.method not in _SAFE_METHODS and _is_of_another_site(headers, origin):
            raise Refusal(403, "cross_site")
        if self.keys is not None:
            head.caller = self._caller(head, self.keys)
        return None

    def counted(self, head: Head, route: Callable[[Exchange], None]) -> Callable[[Exchange], None]:
        """Return a route that counts the requests of a caller."""
        counts, caller = self.requests, head.caller
        if not caller:
            return route
        counts.setdefault(caller, 0)

        def count(exchange: Exchange) -> None:
            counts[caller] += 1
            route(exchange)

        return count

    def refresh(self) -> None:
        """Read the keys again if they have changed, and see whether one has ended."""
        if self.keys is None:
            return
        now = time.time()
        if self.keys.reload() or now >= self._expiry:
            for forget in self.on_change:
                forget()
        self._expiry = self.keys.next_expiry(now)

    def refresh_now_and_then(self) -> None:
        """Do the same at most once a second, for a front that has no timer for it."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            self.refresh()

    def _caller(self, head: Head, keys: KeyRing) -> str:
        caller = self._known_caller(head, keys)
        if caller is None:
            self.rejected += 1
            is_page = head.method in _SAFE_METHODS  # a browser asks its user only where it opens a page
            challenge = _CHALLENGE_TO_BROWSERS if is_page else _CHALLENGE
            text = _UNKNOWN_KEY if _key_of(head) else None
            raise Refusal(401, "unauthorized", headers=((b"www-authenticate", challenge),), text=text)
        return caller

    def _known_caller(self, head: Head, keys: KeyRing) -> str | None:
        presented = _key_of(head)
        return keys.caller_of(presented, time.time()) if presented else None

    def _is_known(self, host: bytes | None) -> bool:
        if host is None:  # HTTP/1.0, which no browser speaks
            return True
        name = host.lower()
        name = name[: name.find(b"]") + 1] if name.startswith(b"[") else name.partition(b":")[0]
        if name in self._hosts or b"*" in self._hosts:
            return True
        _, dot, parent = name.partition(b".")
        while dot:
            if b"*." + parent in self._hosts:
                return True
            _, dot, parent = parent.partition(b".")
        return False

    def _is_allowed(self, origin: bytes) -> bool:
        return origin.lower() in self._origins or _ANY.encode() in self._origins


def new_access(
    api_keys: str | os.PathLike[str] | None,
    allow_host: Iterable[str],
    cors_origin: Iterable[str],
    *,
    open_readyz: bool = False,
    root_path: str = "",
) -> Access | None:
    """Return who may ask by some settings, and by the keys in CARPOOL_API_KEYS; None for everybody.

    Raises:
        ValueError: A setting or a line of the keys cannot be understood.
        OSError: The file of keys cannot be read.
    """
    text = os.environ.get("CARPOOL_API_KEYS")
    if text is not None and not text.strip():
        raise ValueError("CARPOOL_API_KEYS is empty: put a key there, which `carpool key NAME` makes, or remove it")
    keys = None
    if api_keys is not None or text is not None:
        keys = KeyRing(None if api_keys is None else Path(api_keys), text or "")
    hosts, origins = tuple(allow_host), tuple(cors_origin)
    if keys is None and not hosts and not origins:
        return None
    return Access(keys, hosts, origins, is_readyz_open=open_readyz, prefix=root_path)


def _key_of(head: Head) -> bytes:
    presented = head.headers.get(b"x-api-key", b"")
    scheme, _, credentials = head.headers.get(b"authorization", b"").partition(b" ")
    if not presented and scheme.lower() == b"bearer":
        presented = credentials.strip()
    elif not presented and scheme.lower() == b"basic":
        presented = _password(credentials)
    return presented


def _password(credentials: bytes) -> bytes:
    """Return the password that a browser sends for its user; empty if there is none."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _preflight() -> HttpResponse:
    allowed = (
        (b"access-control-allow-methods", b"GET, HEAD, POST, OPTIONS"),
        (b"access-control-allow-headers", _ALLOWED_HEADERS),
        (b"access-control-max-age", _PREFLIGHT_S),
    )
    return HttpResponse(204, b"", headers=allowed)


def _is_of_another_site(headers: Mapping[bytes, bytes], origin: bytes | None) -> bool:
    """Report whether a browser says that a page from elsewhere asks.

    Browsers send at least one of the two headers with every request that can change something, and
    pages cannot set them. The first counts, as a proxy may have changed the name of the host.
    """
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in _OWN_SITES
    return origin is not None and origin.lower().partition(b"://")[2] != headers.get(b"host", b"").lower()


def _host(name: str) -> bytes:
    """Return a name of the server as `Host` has it. Raises ValueError if it is none."""
    try:
        if ipaddress.ip_address(name).version == 6:
            name = f"[{name}]"
    except ValueError:
        pass
    if not name or any(c in name for c in "/@ ,") or (":" in name and not name.startswith("[")):
        raise ValueError(
            f"{name!r} is no name of a host: write it without scheme and port, such as api.example.com, *.example.com"
            " or [::1]"
        )
    return name.lower().encode()


def is_loopback(host: str) -> bool:
    """Report whether only programs of this machine reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")


_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_HASHED = "sha256:"
_EXPIRES = "expires="
_PREFIX = "cp_"  # by which scanners for leaked secrets name what they find
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
    _key_in(line, "the new key")
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
        _key_in(line.strip(), f"line {n} of {source}") for n, line in lines if line.strip() and line.strip()[0] != "#"
    )


def _key_in(line: str, where: str) -> Key:
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
        return frozenset(key.name for key in self._keys)

    def caller_of(self, presented: bytes, now: float) -> str | None:
        """Return the name behind a key; None if the key is not good.

        It takes the same time wherever in the file the key is, and if it is not there.
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
    """Return a mark that changes when a file is written or replaced. Raises OSError."""
    state = path.stat()
    return state.st_mtime_ns, state.st_size, state.st_ino
