"""Workers that join over TLS: frames of every size, both ways, and who is not let in."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

import carpool
from tests.effort import slow_where
from tests.support import joining
from tests.support.joining import wait_for_workers

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")


class Files(NamedTuple):
    """A certificate for 127.0.0.1 that vouches for itself, its key, and those of somebody else."""

    certificate: Path
    key: Path
    other_certificate: Path
    other_key: Path
    token: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    for name in ("own", "other"):
        command = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={name}"
        where = [
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            folder / f"{name}.key",
            "-out",
            folder / f"{name}.pem",
        ]
        subprocess.run([*command.split(), *where], check=True, capture_output=True)
    token = folder / "token"
    token.write_bytes(joining.TOKEN)
    return Files(folder / "own.pem", folder / "own.key", folder / "other.pem", folder / "other.key", token)


def worker(address: str | None, files: Files, *tls: object) -> subprocess.Popen[str]:
    """`carpool worker` for the service `where`."""
    assert address is not None
    where = ["--connect", address, "--token", files.token, *tls]
    program = [sys.executable, "-m", "carpool", "worker", "tests.support.joining_program:service", *map(str, where)]
    return subprocess.Popen(program, cwd=joining.ROOT, stderr=subprocess.PIPE, text=True)


def test_frames_of_every_size(files: Files) -> None:
    """Small and large items go to and fro, many at a time, and every one comes back as it was."""
    join = carpool.Join("127.0.0.1:0", token_file=files.token, certificate=files.certificate, key=files.key)
    with (
        joining.where().run(join=join) as handle,
        ThreadPoolExecutor(8) as callers,
        worker(handle.join_address, files, "--ca", files.certificate) as process,
    ):
        wait_for_workers(handle, 1)
        xs = [bytes([i]) * n for i, n in enumerate([1, 100, 16_383, 16_384, 70_000, 300_000, 5_000_000] * 4)]
        answers = list(callers.map(handle.predict, xs))
        assert [x for _, x in answers] == xs
        assert {pid for pid, _ in answers} == {process.pid}
        process.terminate()
        assert process.wait(20) == 0


@slow_where(lambda flags: not flags)
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--ca", "other_certificate"], "certificate verify failed"),
        ([], "expects TLS"),
    ],
)
def test_a_worker_that_trusts_another(files: Files, flags: list[str], text: str) -> None:
    """A worker gives nothing to a service for which nobody whom it trusts has vouched, and says so."""
    join = carpool.Join("127.0.0.1:0", token_file=files.token, certificate=files.certificate, key=files.key)
    with joining.where().run(join=join) as handle:
        tls = [getattr(files, flag) if hasattr(files, flag) else flag for flag in flags]
        process = worker(handle.join_address, files, *tls, "--wait-s", "0")
        _, errors = process.communicate(timeout=30)
        assert process.returncode in (1, 2)
        assert text in errors
        assert handle.stats().stages[0].workers == {}


def test_certificates_of_workers(files: Files) -> None:
    """Where the service has an authority, a worker needs a certificate for which that vouches."""
    join = carpool.Join(
        "127.0.0.1:0",
        token_file=files.token,
        certificate=files.certificate,
        key=files.key,
        authority=files.other_certificate,
    )
    with joining.where().run(join=join) as handle:
        without = worker(handle.join_address, files, "--ca", files.certificate, "--wait-s", "0")
        own = ["--cert", files.other_certificate, "--key", files.other_key]
        with worker(handle.join_address, files, "--ca", files.certificate, *own) as process:
            assert without.communicate(timeout=30)[1]
            assert without.returncode in (1, 2)
            wait_for_workers(handle, 1)
            assert handle.predict(1) == (process.pid, 1)
            process.terminate()
