"""The handshake of workers that join: who knows the token is let in, and nobody else learns anything."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.engine.wire import handshake
from carpool.engine.wire.handshake import Claim, HandshakeError, Hello

TOKEN = b"a token that both sides know"
NONCE, OWN_NONCE = bytes(range(32)), bytes(range(32, 64))
ME = Hello("1.0", "digits", "Digits", host="gpu-1", pid=77, device="0,1")


def claim_of(message: bytes) -> Claim:
    """What a service reads of a hello."""
    head, packed = message[: handshake.HELLO_HEAD_BYTES], message[handshake.HELLO_HEAD_BYTES :]
    assert handshake.hello_rest(head) == len(packed)
    return handshake.read_hello(head, packed)


def heard(message: bytes, token: bytes = TOKEN) -> str:
    """What a worker reads of a verdict."""
    head, text = message[: handshake.VERDICT_HEAD_BYTES], message[handshake.VERDICT_HEAD_BYTES :]
    assert handshake.verdict_rest(head) == len(text)
    return handshake.read_verdict(head, text, token, NONCE, OWN_NONCE)


@pytest.mark.parametrize("refusal", ["", "the stage is full — try later"])
def test_who_knows_the_token_is_believed(refusal: str) -> None:
    """Both sides believe each other if they know the same token, and a refusal is told in words."""
    assert handshake.read_greeting(handshake.greeting(NONCE)) == NONCE
    claim = claim_of(handshake.hello(ME, TOKEN, NONCE, OWN_NONCE))

    assert claim.hello == ME
    assert handshake.is_proven(claim, TOKEN, NONCE)
    assert heard(handshake.verdict(claim, TOKEN, NONCE, refusal)) == refusal


def test_another_token_proves_nothing() -> None:
    """A worker with another token is not believed, and neither is a service with another token."""
    claim = claim_of(handshake.hello(ME, b"another token", NONCE, OWN_NONCE))
    assert not handshake.is_proven(claim, TOKEN, NONCE)
    with pytest.raises(HandshakeError, match="does not know the token"):
        heard(handshake.verdict(claim, b"another token", NONCE))


def test_a_proof_is_good_once() -> None:
    """What was said on one connection proves nothing on another one, which has another nonce."""
    claim = claim_of(handshake.hello(ME, TOKEN, NONCE, OWN_NONCE))
    assert not handshake.is_proven(claim, TOKEN, bytes(32))
    verdict = handshake.verdict(claim, TOKEN, bytes(32))
    with pytest.raises(HandshakeError):
        heard(verdict)


def test_a_proof_cannot_be_sent_back() -> None:
    """A proof of one side is none of the other side, even if that has chosen the same nonces."""
    mirrored = handshake._proof(TOKEN, handshake._BY_SERVICE, NONCE, OWN_NONCE, b"")
    claim = Claim(ME, OWN_NONCE, mirrored, b"")
    assert not handshake.is_proven(claim, TOKEN, NONCE)


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_hello_that_was_changed_is_not_believed(position: int, bit: int) -> None:
    """Whatever bit of a hello is changed on its way, it is not a proof any more, or cannot be read."""
    message = bytearray(handshake.hello(ME, TOKEN, NONCE, OWN_NONCE))
    message[position % len(message)] ^= 1 << bit
    head, packed = bytes(message[: handshake.HELLO_HEAD_BYTES]), bytes(message[handshake.HELLO_HEAD_BYTES :])
    try:
        if handshake.hello_rest(head) != len(packed):
            return
        claim = handshake.read_hello(head, packed)
    except HandshakeError:
        return
    assert not handshake.is_proven(claim, TOKEN, NONCE)


@given(st.binary(max_size=handshake.LONGEST_TEXT))
@example(b"\x81\xa1x" + b"\x91" * 3000 + b"\x01")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xdb\xff\xff\xff\xffa")
def test_noise_is_no_hello(packed: bytes) -> None:
    """Whatever else a stranger says of itself, nested ever so deep or said to be ever so long, is an
    error of the handshake, or is not proven.
    """
    head = handshake.hello(ME, TOKEN, NONCE, OWN_NONCE)[: handshake.HELLO_HEAD_BYTES]
    try:
        claim = handshake.read_hello(head, packed)
    except HandshakeError:
        return
    assert not handshake.is_proven(claim, TOKEN, NONCE)


@given(st.binary(min_size=handshake.GREETING_BYTES, max_size=handshake.GREETING_BYTES))
def test_noise_is_no_greeting(noise: bytes) -> None:
    """Whatever else listens at an address, a worker says so in words."""
    with pytest.raises(HandshakeError, match=r"not a carpool service|version"):
        handshake.read_greeting(noise)


def test_another_version_is_told() -> None:
    """A service of another version of the protocol is told by both versions, before anything is proven."""
    greeting = bytearray(handshake.greeting(NONCE))
    greeting[7] += 1
    with pytest.raises(HandshakeError, match=r"speaks version 2 .* this worker version 1: install the same version"):
        handshake.read_greeting(bytes(greeting))


@pytest.mark.parametrize("length", [0, handshake.LONGEST_TEXT + 1])
def test_lengths_are_bounded(length: int) -> None:
    """No more is read of a stranger than a hello can hold, and no more of a service than a refusal can."""
    with pytest.raises(HandshakeError):
        handshake.hello_rest(bytes(64) + length.to_bytes(2, "little"))
    if length:
        with pytest.raises(HandshakeError):
            handshake.verdict_rest(bytes(32) + length.to_bytes(2, "little"))
