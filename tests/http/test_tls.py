"""TLS and mutual TLS in our own server, with certificates that are renewed while it runs."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from carpool.http.app import App
from carpool.http.listener import Certificates
from carpool.http.server import Server
from carpool.http.server_state import Limits
from tests.support.certificates import OPENSSL, Pair, self_signed
from tests.support.http import models
from tests.support.http.front import get, post
from tests.support.http.net import Client, RunningServer

pytestmark = pytest.mark.skipif(OPENSSL is None, reason="openssl makes the certificates")


@contextmanager
def serving_tls(certificates: Certificates) -> Iterator[RunningServer]:
    """A server that speaks TLS and is ready."""
    running = RunningServer(App(models.scale, models.echo))
    running.server = Server(running.app, port=0, tls=certificates)
    running.listen()
    try:
        running.start()
        yield running
    finally:
        running.stop()


def trusting(root: Path, own: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(root))
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context


def ask(port: int, context: ssl.SSLContext, body: bytes, path: str = "/predict") -> tuple[int, bytes]:
    connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=20)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_answers_over_tls_are_those_without_it(tmp_path: Path) -> None:
    """Small and large bodies and many requests of one connection go over TLS; plain HTTP gets nothing."""
    pair = self_signed(tmp_path, "one")
    with serving_tls(Certificates(pair.cert, pair.key)) as running:
        context = trusting(pair.cert)
        assert ask(running.port, context, b"21") == (200, b"42.0")
        large = b'"' + b"x" * 2**20 + b'"'
        assert ask(running.port, context, large, "/models/echo/predict") == (200, large)
        plain = socket.create_connection(("localhost", running.port))
        with context.wrap_socket(plain, server_hostname="localhost") as secure:
            assert secure.version() in ("TLSv1.2", "TLSv1.3")
            secure.sendall(post(b"1") + post(b"2") + get("/livez", "Connection: close"))
            received = b""
            while data := secure.recv(65536):
                received += data
        assert [received.count(text) for text in (b"\r\n\r\n2.0", b"\r\n\r\n4.0", b"ok\n")] == [1, 1, 1]
        with Client(running.port) as client:
            client.send(get("/livez"))
            assert client.sock.recv(100)[:4] != b"HTTP"
        assert ask(running.port, context, b"21") == (200, b"42.0")


def test_old_versions_of_tls_are_refused(tmp_path: Path) -> None:
    """A client that knows nothing newer than TLS 1.1 is refused."""
    pair = self_signed(tmp_path, "one")
    assert Certificates(pair.cert, pair.key).context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_client_needs_a_certificate_of_the_right_root(tmp_path: Path) -> None:
    """With a client CA only clients with a certificate from there are let in."""
    pair, good, bad = (self_signed(tmp_path, name) for name in ("server", "good", "bad"))
    with serving_tls(Certificates(pair.cert, pair.key, good.cert)) as running:
        assert ask(running.port, trusting(pair.cert, good), b"21") == (200, b"42.0")
        for own in (None, bad):
            with pytest.raises((ssl.SSLError, ConnectionError, http.client.BadStatusLine)):
                ask(running.port, trusting(pair.cert, own), b"21")
        assert ask(running.port, trusting(pair.cert, good), b"21") == (200, b"42.0")


def test_a_renewed_certificate_is_used_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New connections see the renewed certificate, and a client CA that has changed counts, too; files that are no
    good change nothing.
    """
    monkeypatch.setattr("carpool.http.server._LOOK_EVERY_S", 0.05)
    old, new = self_signed(tmp_path, "old"), self_signed(tmp_path, "new")
    used = Pair(tmp_path / "used.pem", tmp_path / "used.key")
    roots = tmp_path / "roots.pem"
    clients = [self_signed(tmp_path, name) for name in ("first", "second")]
    copy(old, used)
    shutil.copy(clients[0].cert, roots)
    with serving_tls(Certificates(used.cert, used.key, roots)) as running:
        assert ask(running.port, trusting(old.cert, clients[0]), b"21")[0] == 200
        used.cert.write_text("broken")
        until_logged(caplog, "the certificate stays as it is")
        assert ask(running.port, trusting(old.cert, clients[0]), b"21")[0] == 200
        copy(new, used)
        shutil.copy(clients[1].cert, roots)
        until_logged(caplog, "is in force")
        assert ask(running.port, trusting(new.cert, clients[1]), b"21")[0] == 200
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.BadStatusLine)):
            ask(running.port, trusting(new.cert, clients[0]), b"21")


def test_no_old_session_is_resumed_with_new_roots(tmp_path: Path) -> None:
    """A client resumes its session as long as the files stay; with other roots it has to begin anew, and cannot."""
    pair, first, second = (self_signed(tmp_path, name) for name in ("server", "first", "second"))
    roots = tmp_path / "roots.pem"
    shutil.copy(first.cert, roots)
    certificates = Certificates(pair.cert, pair.key, roots)
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        shutil.copy(first.cert, roots)
        with serving_tls(certificates) as running:
            certificates.refresh()
            context = trusting(pair.cert, first)
            context.maximum_version = version
            _, session = resumed(running.port, context, None)
            was_reused, session = resumed(running.port, context, session)
            assert was_reused
            shutil.copy(second.cert, f"{roots}.new")
            os.replace(f"{roots}.new", roots)
            certificates.refresh()
            with pytest.raises((ssl.SSLError, ConnectionError)):
                resumed(running.port, context, session)


def resumed(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> tuple[bool, ssl.SSLSession | None]:
    """Ask on a new connection; whether it has resumed a session, and its own."""
    plain = socket.create_connection(("localhost", port), timeout=20)
    with context.wrap_socket(plain, server_hostname="localhost", session=session) as secure:
        secure.sendall(get("/livez"))
        if not secure.recv(4096):
            raise ConnectionResetError
        return bool(secure.session_reused), secure.session


def test_connections_that_do_not_shake_hands_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be as many as connections; who comes later takes the place of the oldest, and those that are
    connected stay.
    """
    monkeypatch.setattr("carpool.http.listener._SURE_S", 0.05)
    pair = self_signed(tmp_path, "one")
    running = RunningServer(App(models.scale))
    running.server = Server(running.app, port=0, tls=Certificates(pair.cert, pair.key), limits=Limits(connections=4))
    running.listen()
    running.start()
    context = trusting(pair.cert)
    with context.wrap_socket(socket.create_connection(("localhost", running.port)), server_hostname="localhost") as old:
        silent = [socket.create_connection(("localhost", running.port), timeout=20) for _ in range(12)]
        assert ask(running.port, context, b"21") == (200, b"42.0")
        assert silent[0].recv(1) == b""
        acceptor = running.server._addresses[0].acceptor
        assert acceptor is not None and running.call(lambda: len(acceptor._strangers)) <= 4
        old.sendall(get("/livez"))
        assert old.recv(100).startswith(b"HTTP/1.1 200")
    running.stop()
    for each in silent:
        each.close()


def copy(pair: Pair, to: Pair) -> None:
    """Put a pair in the place of another, each file at once, as those who renew certificates do."""
    for source, target in zip(pair, to, strict=True):
        shutil.copy(source, f"{target}.new")
        os.replace(f"{target}.new", target)


def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    until = time.monotonic() + 20
    caplog.set_level("INFO")
    while text not in caplog.text:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """A certificate without its key, and a file that is not there, are errors that name the file."""
    one, other = self_signed(tmp_path, "one"), self_signed(tmp_path, "other")
    with pytest.raises(OSError, match=r"one\.pem and .*other\.key have no certificate with its key"):
        Certificates(one.cert, other.key)
    with pytest.raises(OSError, match=r"none\.pem"):
        Certificates(tmp_path / "none.pem")
