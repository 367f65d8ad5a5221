"""How many BLAS threads a worker gets: what the user has set, else its cores, else its share of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from carpool.engine.worker import place
from carpool.engine.worker.place import (
    FOR_ALL,
    SPIN_TIMEOUT,
    THREAD_VARIABLES,
    Threads,
    cpu_limit,
    decide_threads,
    usable_cores,
)


def decided(
    exported: dict[str, str] | None = None,
    env: dict[str, str] | None = None,
    *,
    workers: int = 2,
    pinned: list[int] | None = None,
    cores: int = 2,
    all_workers: int = 2,
    limit: int | None = None,
) -> Threads:
    numbers = {"workers": workers, "cores": cores, "all_workers": all_workers, "limit": limit}
    return decide_threads("Net", exported or {}, env or {}, pinned=pinned, **numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "each"), [(None, ["4", "8"]), (2, ["1", "1"]), (12, ["4", "6"]), (100, ["4", "8"]), (1, ["1", "1"])]
)
def test_pinned_workers_share_what_their_container_may_use(limit: int | None, each: list[str]) -> None:
    """A pinned worker has no more threads than its share of its container's limit."""
    threads = decided(pinned=[4, 8], cores=64, limit=limit)
    assert [variables[FOR_ALL] for variables in threads.variables] == each


@pytest.mark.parametrize(
    ("cores", "all_workers", "each"),
    [(2, 1, 2), (2, 2, 1), (2, 4, 1), (1, 1, 1), (1, 3, 1), (8, 3, 2), (64, 4, 16), (7, 8, 1)],
)
def test_cores_are_shared_by_all_workers_of_the_service(cores: int, all_workers: int, each: int) -> None:
    """Each worker of a service gets its share of the cores, rounded down, and at least one."""
    threads = decided(cores=cores, all_workers=all_workers)
    assert [{name: variables[name] for name in THREAD_VARIABLES} for variables in threads.variables] == [
        dict.fromkeys(THREAD_VARIABLES, str(each))
    ] * 2


@pytest.mark.parametrize(
    ("settings", "timeout"),
    [
        ({"all_workers": 1}, "4"),
        ({"all_workers": 2}, None),
        ({"pinned": [2, 2]}, None),
        ({"all_workers": 1, "exported": {SPIN_TIMEOUT: "20"}}, None),
        ({"all_workers": 1, "env": {SPIN_TIMEOUT: "20"}}, None),
        ({"all_workers": 1, "env": {FOR_ALL: "2"}}, None),
    ],
)
def test_threads_that_share_all_cores_do_not_spin(settings: Any, timeout: str | None) -> None:
    """BLAS threads that share all cores do not spin, unless the user has said how long they are to,
    or how many there are.
    """
    assert [variables.get(SPIN_TIMEOUT) for variables in decided(**settings).variables] == [timeout] * 2


@pytest.mark.parametrize("pinned", [[1, 1], [1, 3], [4, 4]])
def test_a_pinned_worker_gets_as_many_as_its_cores(pinned: list[int]) -> None:
    """A pinned worker gets as many BLAS threads as it has cores, whatever the others get."""
    threads = decided(pinned=pinned, cores=64, all_workers=9)
    assert [set(variables.values()) for variables in threads.variables] == [{str(n)} for n in pinned]


@pytest.mark.parametrize("pinned", [None, [1, 2]])
@pytest.mark.parametrize(
    ("exported", "env", "added"),
    [
        ({"OMP_NUM_THREADS": "7"}, {}, ()),
        ({}, {"OMP_NUM_THREADS": "7"}, ()),
        ({"OMP_NUM_THREADS": ""}, {}, ()),
        ({"OMP_NUM_THREADS": "4,2", "MKL_NUM_THREADS": "1"}, {}, ()),
        ({"MKL_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "7"}, ()),
        ({"MKL_NUM_THREADS": "3"}, {}, set(THREAD_VARIABLES) - {"MKL_NUM_THREADS"}),
        (
            {"MKL_NUM_THREADS": "3"},
            {"OPENBLAS_NUM_THREADS": "7"},
            set(THREAD_VARIABLES) - {"MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"},
        ),
        ({"HOME": "/", "NUM_THREADS": "3"}, {"FLAVOUR": "vanilla"}, set(THREAD_VARIABLES)),
    ],
)
def test_what_the_user_has_set_stands(
    exported: dict[str, str], env: dict[str, str], added: Any, pinned: list[int] | None
) -> None:
    """Each variable that the user has set stands, and `OMP_NUM_THREADS` for all, since they all
    read it.
    """
    for variables in decided(exported, env, pinned=pinned).variables:
        assert set(variables) == set(added)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "get 1 BLAS thread each: 2 cores, 2 workers; set OMP_NUM_THREADS or env= to choose"),
        (
            {"cores": 1, "all_workers": 1},
            "get 1 BLAS thread each: 1 core, 1 worker; set OMP_NUM_THREADS or env= to choose",
        ),
        (
            {"cores": 16, "all_workers": 3},
            "get 5 BLAS threads each: 16 cores, 3 workers; set OMP_NUM_THREADS or env= to choose",
        ),
        (
            {"pinned": [1, 2]},
            "get 1 or 2 BLAS threads each: as many as the cores that each is tied to;"
            " set OMP_NUM_THREADS or env= to choose",
        ),
        (
            {"exported": {"OMP_NUM_THREADS": "1"}, "env": {"MKL_NUM_THREADS": "2"}},
            "get BLAS threads as you have set them: OMP_NUM_THREADS=1, MKL_NUM_THREADS=2 (env=)",
        ),
        (
            {"exported": {"MKL_NUM_THREADS": "4"}},
            "get 1 BLAS thread each: 2 cores, 2 workers; MKL_NUM_THREADS=4 is kept as you have set it",
        ),
    ],
)
def test_the_log_says_what_and_why(settings: dict[str, Any], why: str) -> None:
    """The log says how many BLAS threads there are and why, and what to do for another number."""
    assert decided(**settings).why == f"workers of stage Net {why}"


# -- the cores there are


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("", {}, None),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n"}, 4.0),
        ("0::/a/b\n", {"a/b/cpu.max": "300000 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/docker/7f\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/../x\n", {"cpu.max": "nonsense\n"}, None),
        ("4:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("4:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.5),
        (
            "5:memory:/m\n4:cpu,cpuacct:/docker/7f\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "100000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            1.0,
        ),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "0\n"}, None),
        ("no group at all\n", {}, None),
    ],
)
def test_the_limit_of_a_container(groups: str, files: dict[str, str], limit: float | None, tmp_path: Path) -> None:
    """The limit of a container is the least of its control group and those around it, of both
    versions; what cannot be read limits nothing.
    """
    for name, content in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    if groups:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    assert cpu_limit(tmp_path) == limit


@pytest.mark.parametrize(("limit", "usable"), [(None, 8), (16.0, 8), (8.0, 8), (2.9, 2), (0.5, 1)])
def test_the_usable_cores_are_no_more_than_the_limit(
    limit: float | None, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usable cores are no more than the container's limit, where a share of a core counts for
    nothing beside a whole one.
    """
    monkeypatch.setattr(place, "available_cores", lambda: 8)
    monkeypatch.setattr(place, "cpu_limit", lambda: limit)
    assert usable_cores() == usable


@pytest.mark.parametrize("named", ["cpu,cpuacct", "cpuacct,cpu", "cpu"])
@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpuacct,cpu", "cpu"])
def test_a_limit_is_found_in_whatever_order_its_controllers_are_named(tmp_path: Path, named: str, folder: str) -> None:
    """The kernel and the folder may name the controllers of version 1 in other orders."""
    group = tmp_path / "sys/fs/cgroup" / folder / "docker/a"
    group.mkdir(parents=True)
    if folder != "cpu":
        (tmp_path / "sys/fs/cgroup/cpu").symlink_to(folder)
    (group / "cpu.cfs_quota_us").write_text("200000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"4:{named}:/docker/a\n")
    assert cpu_limit(tmp_path) == 2.0
