"""Requests of the soak: each with an id and data of its own, drawn from a seed."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass

HOST = "127.0.0.1"
HASTY_S = 0.03  # the deadline of those that are in a hurry
HASTY_SHARE = 0.01
SIZES = ((0.90, 32, 128), (0.09, 1_000, 8_000), (0.01, 50_000, 150_000))
"""Share, and from how many to how many bytes of data (written as twice as many characters)."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: the bytes to send and what the answer must say."""

    id: str
    kind: str
    timeout_s: float
    sha: str
    message: bytes


class Asks:
    """Makes requests.

    Args:
        seed: Of ids, data and sizes.
        path: Where the model is.
        timeout_s: What the server is set to.
        header: With which a request sets a shorter deadline, in ms; empty where the server knows
            none.
    """

    def __init__(self, seed: str, path: str, timeout_s: float, header: str) -> None:
        self._random = random.Random(seed)
        self._path = path
        self._timeout_s = timeout_s
        self._header = header
        self._heads: dict[float, bytes] = {}

    def make(self, kind: str = "ok", nbytes: int | None = None) -> Ask:
        """The next one; now and then one of kind "ok" is "hasty" instead."""
        timeout_s = self._timeout_s
        if self._header and kind == "ok" and nbytes is None and self._random.random() < HASTY_SHARE:
            kind, timeout_s = "hasty", HASTY_S
        id = f"{self._random.getrandbits(128):032x}"
        data = self._random.randbytes(self._size() if nbytes is None else nbytes).hex()
        body = json.dumps({"id": id, "kind": kind, "data": data}).encode()
        head = self._heads.get(timeout_s) or self._head(timeout_s)
        sha = hashlib.sha256(data.encode()).hexdigest()
        return Ask(id, kind, timeout_s, sha, b"%b%d\r\n\r\n%b" % (head, len(body), body))

    def _size(self) -> int:
        dice = self._random.random()
        for share, least, most in SIZES:
            if dice < share:
                return self._random.randint(least, most)
            dice -= share
        return SIZES[0][1]

    def _head(self, timeout_s: float) -> bytes:
        """All of the head up to the value of Content-Length, which comes last."""
        deadline = f"{self._header}: {timeout_s * 1000:g}\r\n" if self._header else ""
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            f"{deadline}Content-Length: "
        )
        return self._heads.setdefault(timeout_s, head.encode())


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: the status, whose it says it is, and its hash; `-` where it says nothing."""

    status: str
    id: str
    sha: str
    closes: bool


class AnswerReader:
    """Cuts a connection's bytes into answers."""

    def __init__(self) -> None:
        self._data = b""

    def received(self, data: bytes) -> list[Answer]:
        """The answers that these bytes complete.

        Raises:
            ValueError: They are no HTTP.
        """
        self._data += data
        answers = []
        while (answer := self._next()) is not None:
            answers.append(answer)
        return answers

    def _next(self) -> Answer | None:
        while True:
            end = self._data.find(b"\r\n\r\n") + 4
            if end < 4:
                return None
            head = self._data[:end].lower()
            if not head.startswith(b"http/1.1 "):
                raise ValueError(f"not HTTP: {head[:50]!r}")
            if head[9:10] != b"1":
                break
            self._data = self._data[end:]  # 100 Continue
        _, found, rest = head.partition(b"\r\ncontent-length:")
        length = int(rest.partition(b"\r\n")[0]) if found else 0
        if len(self._data) < end + length:
            return None
        body, self._data = self._data[end : end + length], self._data[end + length :]
        id, sha = _read(body) if head[9:12] == b"200" else ("-", "-")
        return Answer(head[9:12].decode(), id, sha, b"connection: close" in head)


def _read(body: bytes) -> tuple[str, str]:
    """Id and hash of a good answer; what cannot be read is somebody else's answer."""
    try:
        answer = json.loads(body)
        return str(answer["id"]), str(answer["sha"])
    except (ValueError, KeyError, TypeError):
        return "unreadable", "unreadable"
