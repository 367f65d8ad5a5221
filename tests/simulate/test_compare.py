"""Several policies, seeds and loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from carpool.simulate import compare, mean_of, run, sweep


def test_policies_are_compared_over_seeds() -> None:
    """The report of each policy is the mean of the single runs over all seeds, and progress tells
    of each.
    """
    told: list[tuple[int, int]] = []
    reports = compare(
        ["greedy", "static:10ms"], seeds=2, seed=3, duration_s=1, progress=lambda done, of: told.append((done, of))
    )

    assert [report.policy for report in reports] == ["greedy", "static:10ms"]
    assert reports[1] == mean_of([run("static:10ms", duration_s=1, seed=3), run("static:10ms", duration_s=1, seed=4)])
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_processes_change_nothing() -> None:
    """Two processes give the same reports as one."""
    one = compare(["greedy", "cork"], "poisson:rho=0.9", seeds=2, duration_s=0.5)

    assert compare(["greedy", "cork"], "poisson:rho=0.9", seeds=2, duration_s=0.5, jobs=2) == one


def test_a_mistake_in_a_process_is_told() -> None:
    """A mistake in another process is reported as it would be in this one."""
    with pytest.raises(ValueError, match="workers must be"):
        compare(["greedy"], seeds=2, duration_s=1, jobs=2, workers=0)


def test_what_processes_cannot_be_given() -> None:
    """A function without a name cannot go to another process, and is refused with that reason."""
    with pytest.raises(ValueError, match="with several jobs, give specs"):
        compare(["greedy"], cost=lambda n: 1.0, seeds=2, jobs=2)
    with pytest.raises(ValueError, match="jobs must be at least 1"):
        compare(["greedy"], jobs=-1)
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        compare(["greedy"], seeds=0)


def test_a_sweep_scales_arrivals_to_loads() -> None:
    """A sweep scales arrivals to each load, whatever rate they had, with one policy after the
    other.
    """
    reports = sweep(["greedy", "cork"], "poisson:rate=10+gamma:rate=30,cv=2", loads=[0.2, 0.5], duration_s=20)

    assert [(report.policy, report.load) for report in reports] == [
        ("greedy", 0.2),
        ("greedy", 0.5),
        ("cork", 0.2),
        ("cork", 0.5),
    ]
    assert [report.requests / 20 for report in reports[:2]] == pytest.approx([2667 * 0.2, 2667 * 0.5], rel=0.05)


def test_a_sweep_over_a_closed_loop_scales_clients() -> None:
    """A sweep over a closed loop scales the given number of clients, and leaves at least one."""
    reports = sweep(["greedy"], "closed:clients=8", "affine:a=10ms,b=0s", [0.01, 0.5, 1.0], duration_s=2)

    assert [report.load for report in reports] == [0.01, 0.5, 1.0]
    assert [round(report.mean_batch_size) for report in reports] == [1, 2, 4]


def test_what_cannot_be_scaled() -> None:
    """Arrival times that are given, and no arrivals at all, cannot be scaled to a load, which is an
    error.
    """
    with pytest.raises(ValueError, match="cannot be scaled"):
        sweep(["greedy"], [0.0, 1.0], loads=[0.5])
    with pytest.raises(ValueError, match="cannot be scaled"):
        sweep(["greedy"], "poisson:rate=0", loads=[0.5])


def test_without_shared_memory_several_runs_are_a_clear_error() -> None:
    """Where /dev/shm cannot be written, several runs at a time are refused with what to do; one at a time works."""
    command = "mount -t tmpfs -o ro none /dev/shm || exit 77; exec {} -c '{}'"
    program = 'from carpool.simulate import compare; compare(["greedy"], seeds=2, duration_s=0.1, jobs=JOBS)'
    for jobs in (1, 2):
        text = command.format(sys.executable, program.replace("JOBS", str(jobs)))
        done = subprocess.run(["unshare", "-m", "sh", "-c", text], capture_output=True, text=True, check=False)
        if "Operation not permitted" in done.stderr or done.returncode == 77:
            pytest.skip("only root may mount a file system")
        assert ("make /dev/shm writable, or set jobs to 1" in done.stderr) == (jobs == 2)
        assert done.returncode == jobs - 1
