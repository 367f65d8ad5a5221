"""The soak's leak check: what is held more than before is named, what somebody else holds is not."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bench.chaos.leaks import Holdings, leaked, look
from bench.tools.process_tree import ProcessTree

MIB = 2**20
SHARED = Path("/dev/shm")


def held(
    rss: int = 100 * MIB,
    fds: int = 10,
    threads: int = 3,
    zombies: int = 0,
    workers: int = 2,
    shared: frozenset[str] = frozenset(),
    temporary: frozenset[str] = frozenset(),
) -> Holdings:
    """What a server and its workers hold."""
    others = [(10 + i, 10 + i) for i in range(workers)]
    return Holdings(
        {(1, 1): rss, **dict.fromkeys(others, 30 * MIB)},
        {(1, 1): fds, **dict.fromkeys(others, 5)},
        {(1, 1): threads, **dict.fromkeys(others, 2)},
        zombies,
        shared,
        temporary,
    )


def test_what_is_the_same_is_no_leak() -> None:
    """A little more memory, and fewer descriptors, are no leak."""
    assert leaked(held(), held(rss=110 * MIB, fds=9)) == []


@pytest.mark.parametrize(
    ("after", "what"),
    [
        (held(rss=140 * MIB), "memory"),
        (held(fds=11), "descriptors"),
        (held(threads=4), "threads"),
        (held(workers=3), "processes"),
        (held(zombies=1), "zombies"),
        (held(shared=frozenset({"x"})), "/dev/shm"),
        (held(temporary=frozenset({"y"})), "files"),
    ],
)
def test_each_kind_of_leak_is_named(after: Holdings, what: str) -> None:
    """A leak of each kind is named, alone among all that is held."""
    (text,) = leaked(held(), after)
    assert text.startswith(what)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps, and has its memory: it has run its first line."""
    program = "import time; print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_memory_that_others_have_mapped_is_theirs(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Memory that others have mapped is theirs, but a name that nobody has mapped counts; this
    process is no member of the tree.
    """
    tree = ProcessTree(sleeper.pid)
    mine, nobodys = SHARED / f"mine-{os.getpid()}", SHARED / f"nobodys-{os.getpid()}"
    try:
        nobodys.touch()
        with mine.open("w+b") as file:
            file.write(b"\0")
            file.flush()
            with mmap.mmap(file.fileno(), 1):
                names = look(tree, tmp_path).shared
    finally:
        for path in (mine, nobodys):
            with suppress(FileNotFoundError):
                path.unlink()
    assert nobodys.name in names
    assert mine.name not in names


def test_a_living_tree_is_measured(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """A tree of one process is measured with its memory, its descriptors, its thread, and the files
    that it was given.
    """
    (tmp_path / "left").touch()
    found = look(ProcessTree(sleeper.pid), tmp_path)

    assert [pid for pid, _ in found.rss] == [sleeper.pid]
    assert next(iter(found.rss.values())) > MIB
    assert next(iter(found.fds.values())) >= 3
    assert list(found.threads.values()) == [1]
    assert found.temporary == {"left"}
