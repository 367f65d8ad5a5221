"""How a worker that comes by itself and the service that it joins prove themselves to each other.

Both know a token, which is never sent. No frame is read or written before both have shown that they
know it, since frames between our own processes hold pickles, which run code when they are read.

    greeting   service -> worker   magic, version of frames, nonce of the service
    hello      worker -> service   nonce of the worker, proof, length, `Hello`
    verdict    service -> worker   proof, length, a text: empty for "welcome", or why not

A proof is an HMAC-SHA256 with the token as its key. It covers which side proves itself, both nonces
and the rest of its own message. So no proof can be used twice, sent back to the side that made it,
or go with another hello. Sans-IO: nonces are arguments.
"""

from __future__ import annotations

import hmac
import struct
from typing import Final

import msgspec

from carpool.engine.wire.frame import VERSION

NONCE_BYTES: Final = 32
LONGEST_TEXT: Final = 4096

_MAGIC: Final = b"carpool"
_GREETING: Final = struct.Struct(f"<{len(_MAGIC)}sB{NONCE_BYTES}s")
_HELLO: Final = struct.Struct(f"<{NONCE_BYTES}s32sH")
_VERDICT: Final = struct.Struct("<32sH")
GREETING_BYTES: Final = _GREETING.size
HELLO_HEAD_BYTES: Final = _HELLO.size
VERDICT_HEAD_BYTES: Final = _VERDICT.size

_BY_WORKER: Final = b"worker"
_BY_SERVICE: Final = b"service"


class HandshakeError(Exception):
    """The other side is not who it should be, or speaks another version; the text tells people."""


class Hello(msgspec.Struct, frozen=True):
    """What a worker says of itself.

    Attributes:
        version: Its version of carpool.
        service: The name of the service that it wants to join.
        ticket: Which token it proves that it knows, where the service has given out several.
        host: The name of its machine, for people.
        pid: The id of its process on that machine.
        device: The accelerators that it sees; empty if it says nothing of them.
        node: The id of its node in a cluster, as `actor` is that of its actor; empty if it is in
            none.
    """

    version: str
    service: str
    stage: str
    ticket: str = ""
    host: str = ""
    pid: int = 0
    device: str = ""
    node: str = ""
    actor: str = ""

    @property
    def whereabouts(self) -> str:
        parts = [f"pid {self.pid} on {self.host or 'an unknown machine'}"]
        parts += [f"{name} {id[:12]}" for name, id in (("node", self.node), ("actor", self.actor)) if id]
        return ", ".join([*parts, *([f"devices {self.device}"] if self.device else [])])

    @property
    def place_in_cluster(self) -> dict[str, str]:
        named = {"node": self.node, "actor": self.actor, "device": self.device}
        return {name: value for name, value in named.items() if value}


class Claim(msgspec.Struct, frozen=True):
    """A hello that has come, and is not proven yet.

    Attributes:
        proof: What it says is a proof.
        packed: The hello as it came, which the proof covers.
    """

    hello: Hello
    nonce: bytes
    proof: bytes
    packed: bytes


# -- the service's side


def greeting(nonce: bytes) -> bytes:
    return _GREETING.pack(_MAGIC, VERSION, nonce)


def hello_rest(head: bytes) -> int:
    """Return how many bytes follow the head of a hello. Raises HandshakeError."""
    length: int = _HELLO.unpack(head)[2]
    if not 0 < length <= LONGEST_TEXT:
        raise HandshakeError(f"it introduces itself with {length} bytes")
    return length


def read_hello(head: bytes, packed: bytes) -> Claim:
    """Return what a worker says of itself, of which nothing is proven. Raises HandshakeError."""
    nonce, proof, _ = _HELLO.unpack(head)
    try:
        return Claim(msgspec.msgpack.decode(packed, type=Hello), nonce, proof, packed)
    except Exception:  # one that is nested too deep is a RecursionError
        raise HandshakeError("it does not introduce itself as a worker") from None


def is_proven(claim: Claim, token: bytes, nonce: bytes) -> bool:
    """Report whether a worker has proven that it knows the token; `nonce` is the service's."""
    return hmac.compare_digest(claim.proof, _proof(token, _BY_WORKER, nonce, claim.nonce, claim.packed))


def verdict(claim: Claim, token: bytes, nonce: bytes, refusal: str = "") -> bytes:
    """Return the answer to a worker that has proven itself, which proves the service to it. An
    empty `refusal` admits the worker.
    """
    text = refusal.encode()[:LONGEST_TEXT]
    return _VERDICT.pack(_proof(token, _BY_SERVICE, nonce, claim.nonce, text), len(text)) + text


# -- the worker's side


def read_greeting(data: bytes) -> bytes:
    """Return the service's nonce. Raises HandshakeError."""
    magic, version, nonce = _GREETING.unpack(data)
    if magic != _MAGIC:
        raise HandshakeError("what listens there is not a carpool service that workers can join")
    if version != VERSION:
        raise HandshakeError(
            f"the service speaks version {version} of the protocol and this worker version {VERSION}: install the same"
            " version of carpool for both"
        )
    result: bytes = nonce
    return result


def hello(me: Hello, token: bytes, nonce: bytes, own_nonce: bytes) -> bytes:
    """Return what a worker says of itself, with the proof that it knows the token; `nonce` is the
    service's.
    """
    packed = msgspec.msgpack.encode(me)
    return _HELLO.pack(own_nonce, _proof(token, _BY_WORKER, nonce, own_nonce, packed), len(packed)) + packed


def verdict_rest(head: bytes) -> int:
    length: int = _VERDICT.unpack(head)[1]
    if length > LONGEST_TEXT:
        raise HandshakeError(f"the service answers with {length} bytes")
    return length


def read_verdict(head: bytes, text: bytes, token: bytes, nonce: bytes, own_nonce: bytes) -> str:
    """Return why a service does not admit this worker; empty if it does. `nonce` is the service's.

    Raises:
        HandshakeError: The service does not know the token.
    """
    if not hmac.compare_digest(_VERDICT.unpack(head)[0], _proof(token, _BY_SERVICE, nonce, own_nonce, text)):
        raise HandshakeError("what listens there does not know the token: it must not get this worker")
    return text.decode("utf-8", "replace")


def _proof(token: bytes, side: bytes, nonce: bytes, own_nonce: bytes, rest: bytes) -> bytes:
    """Return a proof; `side` and the nonces have fixed lengths, so that no two messages agree."""
    return hmac.digest(token, b"carpool join 1 %-8s" % side + nonce + own_nonce + rest, "sha256")
