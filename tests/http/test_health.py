"""`carpool health`: one line, and an exit status for Docker and for probes that run a command."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from carpool import Service
from carpool.cli.operate_commands import health
from carpool.http.app import AdminApp, App
from carpool.http.listener import UnixListener
from carpool.http.server import Server
from tests.support.http import models
from tests.support.http.net import RunningServer, predict, serving

KEY = "a-long-enough-key"


def status_of(capsys: pytest.CaptureFixture[str], url: str, **options: object) -> tuple[int, str]:
    """The exit status of the command, and what it prints."""
    status = 0
    try:
        health(url, **options)  # type: ignore[arg-type]
    except SystemExit as error:
        status = int(str(error.code))
    printed = capsys.readouterr()
    return status, (printed.out + printed.err).rstrip("\n")


def test_a_server_from_its_start_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is 0 while the server is ready and 1 before, after, and without the key that it
    needs; one line says why.
    """
    keys, mine = tmp_path / "keys", tmp_path / "mine"
    keys.write_text(f"prober:{KEY}\n")
    mine.write_text(KEY)
    running = RunningServer(App(models.scale, api_keys=keys))
    running.listen()
    url = f"http://127.0.0.1:{running.port}"
    try:
        assert status_of(capsys, url, key_file=mine) == (1, f"{url} is not ready: scale is starting")
        assert status_of(capsys, url, live=True) == (0, f"{url} is live")
        running.start()
        assert status_of(capsys, url, key_file=mine) == (0, f"{url} is ready")
        status, told = status_of(capsys, url)
        assert (status, told.partition(",")[0]) == (1, f"{url} is not ready: it needs a key: set CARPOOL_KEY")
        told = f"{url} is not ready for scale: it needs a key: set CARPOOL_KEY, or give --key-file"
        assert status_of(capsys, url, model="scale") == (1, told)
        monkeypatch.setenv("CARPOOL_KEY", "another-long-enough-key")
        unknown = f"{url} is not ready: it does not know the key that CARPOOL_KEY or --key-file has"
        assert status_of(capsys, url) == (1, unknown)
        monkeypatch.setenv("CARPOOL_KEY", KEY)
        assert status_of(capsys, url)[0] == status_of(capsys, url, model="scale")[0] == 0
        running.call(running.app.announce_end)
        assert status_of(capsys, url) == (1, f"{url} is not ready: The service is shutting down")
    finally:
        running.stop()
    status, told = status_of(capsys, url)
    assert (status, "\n" in told) == (1, False)
    assert told.startswith(f"carpool: {url} does not answer: ")


def test_one_model_of_two(capsys: pytest.CaptureFixture[str]) -> None:
    """A server is ready while one of its models is, with a line for the other one; --model asks for
    one of them.
    """
    fragile = Service(models.Fragile, name="fra/gile")
    with serving(App(models.scale, fragile, idle_check_s=0.0)) as running:
        url = f"http://127.0.0.1:{running.port}"
        assert status_of(capsys, url) == (0, f"{url} is ready")
        predict(running.port, "break", "/models/fra%2Fgile/predict")
        problem = "fra/gile no longer answers its example"
        assert status_of(capsys, url) == (0, f"{url} is ready\nnot ready: {problem}")
        assert status_of(capsys, url, model="scale") == (0, f"{url} is ready for scale")
        assert status_of(capsys, url, model="fra/gile") == (1, f"{url} is not ready for fra/gile: {problem}")
        missing = f"{url} is not ready for x: it has no such model, or is no carpool server"
        assert status_of(capsys, url, model="x") == (1, missing)
        status, told = status_of(capsys, url, model="scale", live=True)
        assert (status, told) == (2, "carpool: --live is about the process: leave --model out, or --live")


def test_a_unix_socket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server is also asked at the Unix socket of its admin address."""
    path = tmp_path / "admin.sock"
    app = App(models.scale, has_admin_address=True)
    running = RunningServer(app)
    running.server = Server(app, port=0, admin=(UnixListener(path), AdminApp(app, None)))
    running.listen()
    try:
        running.start()
        assert status_of(capsys, f"unix:{path}") == (0, f"unix:{path} is ready")
    finally:
        running.stop()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 503 x\r\nContent-Length: 9\r\n\r\nelsewhere", "is not ready: it answers 503"),
        (b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n", "is not ready: there is no carpool server"),
        (b"no HTTP at all\r\n\r\n", "does not answer: no HTTP at all"),
        (b"HTTP/1.1 503 x\r\nContent-Length: 12\r\n\r\n" + json.dumps({"error": 1}).encode(), "it answers 503"),
    ],
)
def test_something_else_answers(answer: bytes, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is no carpool server is not ready either, whatever it says."""

    async def told() -> tuple[int, str]:
        async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return await asyncio.to_thread(status_of, capsys, url)

    status, text = asyncio.run(told())
    assert status == 1
    assert why in text
