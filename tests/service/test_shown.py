"""What `print`, a prompt and a notebook show of services, handles and statistics."""

from __future__ import annotations

import asyncio

import carpool
from tests.support import models


def scaled(xs: list[float]) -> list[float]:
    return [2 * x for x in xs]


SERVICE = carpool.Service(
    carpool.Stage(scaled, max_batch_size=8, run_in="thread", workers=2, policy="greedy"),
    carpool.Stage(models.double, name="<twice>", run_in="thread"),
    name="digits",
    slo_s=10.0,
)


def test_a_handle_says_what_it_is() -> None:
    """The repr of a handle has the name, the state and the number of workers."""
    with SERVICE.run() as s:
        assert repr(s) == "<Handle digits: open, 3 workers>"
    assert repr(s) == "<Handle digits: closed, 3 workers>"
    handle = carpool.Service(models.double).run_async()
    assert repr(handle) == "<AsyncHandle double: new, 1 worker>"


def test_stats_print_as_a_table() -> None:
    """`print(s.stats())` shows one line for the service, and a row for each stage, in less than a
    screen's width.
    """
    with SERVICE.run() as s:
        assert list(s.stream([1.0] * 2000)) == [4.0] * 2000
        stats = s.stats()
        summary, headings, *rows = str(stats).splitlines()
    assert summary.startswith("digits: 2,000 ok, 0 in flight, mean latency ")
    assert summary.endswith(" ms, 100.0% within the SLO")
    assert headings.split("  ")[0] == "stage"
    assert [row.split()[0] for row in rows] == ["scaled", "<twice>"]
    assert rows[0].endswith("2 ready")
    assert rows[1].split()[3:5] == ["2,000", "1.0"]
    assert max(map(len, [headings, *rows])) <= 100
    assert str(stats.stages[0]).splitlines()[1].split() == rows[0].split()
    assert repr(stats).startswith("ServiceSnapshot(name='digits', outcomes=")


def test_what_went_wrong_is_shown_below() -> None:
    """A stage in which something went wrong has a line below the table, and outcomes other than ok
    are in the first line.
    """

    def fails_for_zero(xs: list[float]) -> list[float]:
        return [1 / x for x in xs]

    stage = carpool.Stage(fails_for_zero, max_batch_size=8, run_in="thread", isolate_errors=True)
    with carpool.Service(stage, name="fails").run() as s:
        list(s.stream([0.0, 1.0, 1.0, 1.0] * 8, return_exceptions=True))
        stats = s.stats()
    assert ", 8 model error, " in str(stats).splitlines()[0]
    assert "split batch" in str(stats).splitlines()[-1]
    assert "split batch" in stats._repr_html_()


def test_notebooks_get_tables() -> None:
    """Services, handles and statistics have a table for notebooks, in which names are escaped; it
    asks nothing of the service's loop, which may be blocked.
    """
    with SERVICE.run() as s:
        stats = s.stats()._repr_html_()
        shown = s._repr_html_()
    for html in (stats, shown, SERVICE._repr_html_()):
        assert html.count("<tr>") == 3
        assert "&lt;twice&gt;" in html
        assert "<twice>" not in html
    assert "Handle digits: open, 3 workers" in shown
    assert "<td>greedy</td>" in shown

    async def main() -> str:
        async with SERVICE.run_async() as s:
            return s._repr_html_()

    assert "AsyncHandle digits: open, 3 workers" in asyncio.run(main())
