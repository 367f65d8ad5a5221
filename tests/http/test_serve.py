"""`carpool.serve` and `service.serve`: a program that serves, as `carpool serve` does it."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import get_type_hints

import pytest

import carpool
from carpool import cli
from carpool.http.app import App, AppSettings
from carpool.service.settings import AnswerSettings, with_defaults
from tests.support import models
from tests.support.serving import Served, run_program

PROGRAM = """
    import logging
    import time
    import carpool

    class Slow(carpool.Model):
        def predict(self, x: float) -> float:
            print("asked for", x)
            time.sleep(x)
            return 2 * x

    def half(x: float) -> float:
        return x / 2

    slow = carpool.Service(Slow)
    halves = carpool.Service(half)
"""
GUARDED = '\nif __name__ == "__main__":\n    '


def program(folder: Path, end: str) -> Path:
    path = folder / "app.py"
    path.write_text(textwrap.dedent(PROGRAM) + end)
    return path


def run(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, path.name], cwd=path.parent, capture_output=True, text=True, timeout=60)


def test_a_program_serves_until_sigterm_and_drains(tmp_path: Path) -> None:
    """`python app.py` answers; after SIGTERM it finishes what is inside, goes on behind `serve` and
    ends with status 0.
    """
    path = program(tmp_path, GUARDED + "carpool.serve(slow, halves, port=0)\n    logging.info('after it')\n")
    with run_program(path) as served:
        assert served.ask("POST", "/predict", 0.25)[:2] == (200, b"0.5")
        assert served.ask("POST", "/models/half/predict", 5)[:2] == (200, b"2.5")
        answers: list[tuple[int, bytes]] = []
        asked = threading.Thread(target=lambda: answers.append(served.ask("POST", "/predict", 2.0)[:2]))
        asked.start()
        while not any("asked for 2.0" in line for line in served.log):
            asked.join(0.01)
        served.process.send_signal(signal.SIGTERM)
        asked.join()
        assert served.wait() == 0
    assert answers == [(200, b"4.0")]
    assert any("[Slow/0] asked for 0.25" in line for line in served.log)
    assert any("SIGTERM: no new requests" in line for line in served.log)
    assert "stopped" in served.log[-2]
    assert "after it" in served.log[-1]


def ask_in_vain(served: Served) -> None:
    with pytest.raises((OSError, http.client.HTTPException)):
        served.ask("POST", "/predict", 30.0)


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """The second signal ends the process with 128 + its number."""
    path = program(tmp_path, GUARDED + "slow.serve(port=0)\n")
    with run_program(path) as served:
        asked = threading.Thread(target=ask_in_vain, args=(served,))
        asked.start()
        while not any("asked for" in line for line in served.log):
            asked.join(0.01)
        served.process.send_signal(signal.SIGINT)
        while not any("SIGINT" in line for line in served.log):
            asked.join(0.01)
        served.process.send_signal(signal.SIGINT)
        assert served.wait() == 128 + signal.SIGINT
        asked.join()


def test_a_missing_guard_is_named(tmp_path: Path) -> None:
    """Without `if __name__ == "__main__":` the workers cannot start, and the error says what is missing."""
    done = run(program(tmp_path, "\nslow.serve(port=0)\n"))
    assert done.returncode == 1
    assert 'put the call under `if __name__ == "__main__":`' in done.stderr
    assert "StartupError" in done.stderr


def test_logging_of_the_program_stays(tmp_path: Path) -> None:
    """A program that has set up logging keeps its format, and another one can ask for JSON."""
    own = "logging.basicConfig(level=20, format='MINE %(message)s')\n    slow.serve(port=0)\n"
    with run_program(program(tmp_path, GUARDED + own)) as served:
        pass
    assert all(line.startswith("MINE ") for line in served.log)
    with run_program(program(tmp_path, GUARDED + "slow.serve(port=0, log='json')\n")) as served:
        pass
    assert all(line.startswith('{"time"') for line in served.log)


def test_an_address_that_is_taken(tmp_path: Path) -> None:
    """A port in use is told with the setting to change, and the exit status is 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(program(tmp_path, GUARDED + f"slow.serve(port={port})\n"))
    assert done.returncode == 1
    assert (
        f"port {port} is in use on 127.0.0.1: stop what listens there, or choose another one with port=" in done.stderr
    )


def test_wrong_settings_and_places_are_refused() -> None:
    """A wrong setting, a loop that runs and a thread are refused before anything listens."""
    service = carpool.Service(models.double)

    async def in_a_task() -> None:
        service.serve(port=0)

    with pytest.raises(ValueError, match="there is no port 99999: choose one from 1 to 65535 with port="):
        service.serve(port=99999)
    with pytest.raises(ValueError, match="log must be 'text' or 'json', not 'xml'"):
        service.serve(log="xml")  # type: ignore[arg-type]
    for odd in (float("nan"), float("inf"), -1.0, 0.0):
        with pytest.raises(ValueError, match="max_body_mb must be a positive number, not "):
            service.serve(port=0, max_body_mb=odd)
    with pytest.raises(RuntimeError, match="an event loop is running in this thread"):
        asyncio.run(in_a_task())
    raised: list[BaseException] = []

    def in_a_thread() -> None:
        try:
            service.serve(port=0)
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert "must be called in the main thread" in str(raised[0])


def test_the_settings_are_those_of_the_command() -> None:
    """`serve` in its three forms has the settings of one schema."""
    parameters = inspect.signature(cli.serve).parameters.values()
    assert ["ServerOptions" in str(each.annotation) for each in parameters if each.name == "settings"] == [True]
    for function in (carpool.serve, carpool.Service.serve):
        (settings,) = [
            each for each in inspect.signature(function).parameters.values() if each.kind is each.VAR_KEYWORD
        ]
        assert settings.annotation == "Unpack[ServerSettings]"


def test_an_app_has_the_settings_of_a_server() -> None:
    """An app has the settings and defaults of a server that are about requests and answers, so that a service answers
    alike under another ASGI server. Its signature shows them, and no other is taken.
    """
    of_app = {name: each.default for name, each in inspect.signature(App).parameters.items()}
    shared = {name: default for name, default in with_defaults({}).items() if name in AnswerSettings.__annotations__}

    assert shared.keys() == AnswerSettings.__annotations__.keys()
    assert shared.items() <= of_app.items()
    assert of_app.keys() == {"services", *get_type_hints(AppSettings)}
    assert inspect.signature(App).parameters["compress_from_bytes"].annotation is int
    with pytest.raises(TypeError, match=r"App.__init__\(\) got an unexpected keyword argument 'compres'"):
        App(models.scale, compres="gzip")  # type: ignore[call-arg]
