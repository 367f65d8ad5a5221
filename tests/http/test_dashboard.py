"""The dashboard and the page of the API: their data, their files, and what a browser shows."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from carpool.cli import top_command as top
from carpool.engine.observe.figures import PastFigures, in_words, problems
from carpool.engine.observe.snapshot import DURATION_BOUNDS
from carpool.http.app import App
from tests.effort import slow_where
from tests.support import chromium, joining
from tests.support.http import models
from tests.support.http.both_fronts import asked, both_fronts
from tests.support.http.front import get, post
from tests.support.http.net import Client, RunningServer, serving
from tests.support.sources import ROOT
from tests.support.waiting import wait_until

PAGES = ROOT / "src" / "carpool" / "http" / "pages"


@pytest.fixture(scope="module")
def fronts() -> Iterator[tuple[RunningServer, int]]:
    with both_fronts(App(models.scale, models.two_steps)) as (ours, asgi):
        yield ours, asgi.port


@pytest.fixture(params=[0, 1], ids=["own", "asgi"])
def port(request: pytest.FixtureRequest, fronts: tuple[RunningServer, int]) -> int:
    return fronts[0].port if request.param == 0 else fronts[1]


def data_of(port: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(asked(port, get("/dashboard/data"), "GET").body)
    return found


def test_the_figures_are_those_of_metrics(port: int) -> None:
    """Counts of requests and batches, buckets and states of workers are the same in both."""
    for _ in range(5):
        asked(port, post(b"21"))
    service = data_of(port)["figures"]["services"][0]
    text = asked(port, get("/metrics"), "GET").body.decode()

    def metric(line: str) -> float:
        found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
        assert found is not None, line
        return float(found[1])

    name, (stage,) = service["name"], service["stages"]
    labels = f'model="{name}",stage="{stage["name"]}"'
    assert service["outcomes"]["ok"] == metric(f'carpool_requests_total{{model="{name}",outcome="ok"}}') >= 5
    assert sum(service["latency"]["counts"]) == metric(f'carpool_request_duration_seconds_count{{model="{name}"}}')
    assert sum(stage["batch_sizes"].values()) == metric(f"carpool_batch_size_count{{{labels}}}")
    assert sum(stage["queue"]["counts"]) == metric(f"carpool_queue_duration_seconds_count{{{labels}}}")
    assert [worker["state"] for worker in stage["workers"]].count("ready") == metric(
        f'carpool_workers{{{labels},state="ready"}}'
    )
    assert data_of(port)["problems"] == []


@slow_where(lambda port: port == 1)
def test_figures_come_as_events(port: int) -> None:
    """The figures come at once and then each second, and a viewer that leaves is forgotten."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as viewer:
        viewer.sendall(get("/dashboard/events"))
        received = b""
        while received.count(b"data: {") < 3:
            received += viewer.recv(65536)
    assert b"content-type: text/event-stream" in received.lower()
    assert b"transfer-encoding: chunked" in received.lower()


def test_viewers_that_have_left_are_forgotten(fronts: tuple[RunningServer, int]) -> None:
    """Nothing is kept of viewers that have gone."""
    ours, _ = fronts
    with socket.create_connection(("127.0.0.1", ours.port), timeout=20) as viewer:
        viewer.sendall(get("/dashboard/events"))
        viewer.recv(65536)
    wait_until(lambda: not ours.app._dashboard._viewers)


def test_the_server_ends_while_somebody_looks() -> None:
    """Events end in good order when the server drains, and do not hold it up."""
    with serving(App(models.scale)) as running:
        viewer = Client(running.port)
        viewer.send(get("/dashboard/events"))
        assert viewer.sock.recv(65536)
    received = b""
    while data := viewer.sock.recv(65536):
        received += data
    assert received.endswith(b"0\r\n\r\n")
    viewer.close()


@pytest.mark.parametrize("page", ["/dashboard", "/docs"])
def test_pages_load_their_own_files_only(port: int, page: str) -> None:
    """All that a page names is served by us, nothing stands inline, and the policy forbids the rest."""
    answer = asked(port, get(page), "GET")
    text = answer.body.decode()
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", text)
    names = re.findall(r'(?:src|href)="([^#"]+)"', text)
    assert len(names) >= 3
    for name in names:
        assert "://" not in name
        assert asked(port, get(f"/{name}"), "GET").status == 200


def test_libraries_of_others_have_their_licences() -> None:
    """Next to each vendored library is its licence, and the list says version and origin."""
    listed = (PAGES / "VENDORED.md").read_text()
    for name, licence in (("uPlot.iife.min.js", "uPlot.LICENSE"),):
        assert name in listed
        assert licence in listed
        assert (PAGES / licence).stat().st_size > 500


def stage(**changes: Any) -> dict[str, Any]:
    ready = {"state": "ready", "restarts": 0}
    usual = {"name": "S", "has_failed": False, "queued": 0, "most_queued": 10, "workers": [ready, ready]}
    return {**usual, **changes}


def moment(
    stages: list[dict[str, Any]], slo_s: float | None = None, within: int = 0, **outcomes: int
) -> dict[str, Any]:
    counts = {
        **dict.fromkeys(("ok", "overloaded", "expired", "unavailable", "model_error", "invalid_item"), 0),
        **outcomes,
    }
    return {
        "services": [
            {"name": "M", "run": 0, "stages": stages, "outcomes": counts, "slo_s": slo_s, "within_slo": within}
        ]
    }


@pytest.mark.parametrize(
    ("now", "level", "text"),
    [
        (moment([stage(has_failed=True)]), "bad", "Stage S of M has failed"),
        (moment([stage(workers=[{"state": "loading"}])]), "bad", "no worker that is ready (loading)"),
        (moment([stage(workers=[{"state": "ready"}, {"state": "dead"}])]), "warn", "1 of 2 workers of stage S of M"),
        (moment([stage(queued=10)]), "bad", "queue of stage S of M is full"),
        (moment([stage(restarts=2)], ok=3), "warn", "Workers of stage S of M have died lately: 2"),
        (moment([stage()], overloaded=1, ok=3), "bad", "25 % of the requests for M are refused"),
        (moment([stage()], expired=1, ok=999), "warn", "Less than 1 % of the requests for M miss"),
        (moment([stage()], 0.05, 80, ok=100), "warn", "20 % of the answers of M come later than the SLO of 50 ms"),
    ],
)
def test_what_is_wrong_is_said_in_words_with_the_next_step(now: dict[str, Any], level: str, text: str) -> None:
    """Each kind of trouble has a sentence, and another one that says what to do."""
    (problem,) = problems(moment([stage()], now["services"][0]["slo_s"]), now)
    assert problem["level"] == level
    assert text in problem["text"]
    assert problem["step"].endswith((".", "?"))


def test_all_well_is_no_problem_and_the_worst_comes_first() -> None:
    """Without trouble there is nothing, and what stops requests stands above what does not."""
    assert problems(moment([stage()]), moment([stage()], ok=100)) == []
    levels = [each["level"] for each in problems(moment([stage()]), moment([stage()], invalid_item=1, expired=1, ok=1))]
    assert levels == ["bad", "warn"]


def test_the_cause_comes_before_what_it_does_to_requests() -> None:
    """Of a stage that has failed it is said once that requests are refused, above what else is wrong,
    and not that its workers were replaced.
    """
    other = moment([stage()], overloaded=5, ok=5)["services"][0] | {"name": "A", "run": 1}
    failed = moment([stage(has_failed=True, restarts=4)], unavailable=100)["services"][0]
    before = {
        "services": [{**other, "outcomes": dict.fromkeys(other["outcomes"], 0)}, moment([stage()])["services"][0]]
    }
    told = [each["text"] for each in problems(before, {"services": [other, failed]})]
    assert told[0].startswith("Stage S of M has failed")
    assert told[1].startswith("50 % of the requests for A are refused")
    assert len(told) == 2


def ring(seconds: Iterable[float], most_bytes: int = 2**20) -> PastFigures:
    past = PastFigures(most_bytes)
    for second in seconds:
        past.note({"time": second, "services": [], "bounds_s": []})
    return past


def test_the_figures_of_ten_minutes_are_kept_and_no_more() -> None:
    """Whoever looks finds samples of the last ten minutes; they take a bounded number of bytes."""
    kept = [each["time"] for each in json.loads(ring(range(0, 2000, 5)).as_json())]
    assert kept == list(range(1395, 2000, 5))
    few = ring(range(0, 2000, 5), most_bytes=200).as_json()
    assert len(few) < 250 and json.loads(few)[-1]["time"] == 1995
    assert json.loads(ring([]).as_json()) == []


def test_what_is_wrong_now_is_by_the_last_seconds() -> None:
    """However long nobody has looked, or how often somebody does, problems are those of the last ten to fifteen
    seconds; at the beginning, of all there are.
    """
    for now in (1995.1, 1999.9):
        found = ring(range(0, 2000, 5)).before(now)
        assert found is not None and 10 <= now - found["time"] <= 15
    found = ring([0, 5]).before(6.0)
    assert found is not None and found["time"] == 0
    assert ring([]).before(6.0) is None


def test_a_worker_that_died_comes_before_more_workers() -> None:
    """While requests are refused because a worker has died, or is not back, that comes first, and nothing says that
    more comes than can be served; a worker that only loads, as more are wanted, is no reason.
    """
    ready = {"state": "ready", "restarts": 1}
    for now in (stage(restarts=1, workers=[ready]), stage(workers=[{"state": "loading", "restarts": 1}])):
        told = problems(moment([stage()]), moment([now], overloaded=5, ok=5))
        assert "died lately: 1" in told[0]["text"] or "no worker that is ready" in told[0]["text"]
        assert [each["level"] for each in told] == ["bad", "bad"]
        assert told[1]["text"] == "50 % of the requests for M are refused."
        assert "more workers" not in str(told).lower() and "Add" not in str(told)
    told = problems(moment([stage(restarts=1)]), moment([stage(restarts=1)], overloaded=5, ok=5), moment([stage()]))
    assert ["died lately" in each["text"] for each in told] == [True, False]  # refusals last longer than the death
    coming = stage(workers=[ready, {"state": "loading", "restarts": 0}])
    told = problems(moment([stage()]), moment([coming], overloaded=5, ok=5))
    assert "since more come than can be served" in told[0]["text"]


def test_the_page_gets_what_was_before_it_was_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server keeps figures although nobody looks, and its workers have the names that the log gives them."""
    monkeypatch.setattr("carpool.http.server_pages.EVERY_S", 0.05)
    with serving(App(models.scale)) as running:
        assert asked(running.port, post(b"21")).status == 200

        def samples() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = json.loads(asked(running.port, get("/dashboard/history"), "GET").body)
            return found

        def answered() -> list[int]:
            latest: list[Any] = samples()[-1:]
            return [service["outcomes"]["ok"] for moment in latest for service in moment["services"]]

        wait_until(lambda: answered() == [1])
        assert [worker["name"] for worker in workers_of(running.port)] == ["Scale/0"]


def test_a_stage_says_why_no_batch_goes() -> None:
    """Until the first batch, and once it has failed, a stage says so, and not why the last batch went."""
    with serving(App(models.scale)) as running:
        assert data_of(running.port)["figures"]["services"][0]["stages"][0]["decision"] == "no batch has gone yet"
        asked(running.port, post(b"21"))
        told = data_of(running.port)["figures"]["services"][0]["stages"][0]["decision"]
        assert told.startswith("the last batch went because")
        driver = running.app.endpoints[0].driver
        assert driver is not None
        roster = driver.stats.stages[0].roster
        running.call(lambda: setattr(roster, "failed", True))
        told = data_of(running.port)["figures"]["services"][0]["stages"][0]["decision"]
        assert told == "it has failed, so no batch goes any more"


def test_decisions_are_told_in_words() -> None:
    """The rule of the last batch is a sentence that says what waits and for what."""
    why = {"policy": "adaptive", "rule": "free", "gather_s": 0.0012, "expected_batch_size": 8}
    assert in_words(why, 3) == (
        "the last batch went because a worker is free, so nothing waits; it gathers for up to 1.2 ms, as clients are"
        " about to return; it makes batches of up to 8 on purpose; 3 wait now"
    )
    assert in_words({"error": "no"}, 0) == "its policy raises: no"


def test_top_shows_the_same_in_a_terminal(fronts: tuple[RunningServer, int]) -> None:
    """`carpool top` shows services, stages and problems of a server by its URL, and says why it cannot."""
    ours, _ = fronts
    asked(ours.port, post(b"21"))
    console = Console(width=160, record=True, force_terminal=False)
    top.run(f"http://127.0.0.1:{ours.port}", "", console, times=1)
    data = data_of(ours.port)
    console.print(top.shown(data, data))
    text = console.export_text()
    assert "All is well" in text
    assert "1 of 1" in text
    bad = {**data, "problems": [{"level": "bad", "text": "It burns.", "step": "Run."}]}
    with console.capture() as capture:
        console.print(top.shown(bad, data))
    assert "It burns." in capture.get()
    with pytest.raises(top.NoFigures, match="no carpool server answers at"):
        top.fetched("http://127.0.0.1:1", "")
    with pytest.raises(top.NoFigures, match="admin-address"):
        top.fetched(f"http://127.0.0.1:{ours.port}/livez", "")


def test_quantiles_are_those_of_prometheus() -> None:
    """A quantile lies in its bucket on a straight line; there is none of an empty histogram."""
    counts = [0] * 18
    counts[2] = 10
    assert top.quantile(counts, DURATION_BOUNDS, 0.5) == pytest.approx(0.00075)
    assert top.quantile([0] * 18, DURATION_BOUNDS, 0.5) is None
    counts[17] = 100
    assert top.quantile(counts, DURATION_BOUNDS, 0.99) == DURATION_BOUNDS[-1]


ERRORS = """
window.__errors = [];
addEventListener("error", (event) => window.__errors.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => window.__errors.push(event.blockedURI));
"""


@pytest.mark.slow
@pytest.mark.skipif(chromium.PATH is None, reason="there is no Chromium")
def test_a_browser_shows_the_figures_and_a_killed_worker(tmp_path: Path) -> None:
    """What the page shows are the figures of /metrics, a killed worker is told within two seconds,
    and there is no error and no request to another host.
    """
    with serving(App(models.scale)) as running, chromium.run(tmp_path) as tab:
        for _ in range(7):
            asked(running.port, post(b"21"))
        tab.prepare(ERRORS)
        tab.open(f"http://127.0.0.1:{running.port}/dashboard")
        wait_until(lambda: tab.value("document.getElementById('verdict').className") == "good")
        shown = tab.value("document.querySelector('[data-name=\"Answered in all\"] dd').textContent")
        assert int(shown) == data_of(running.port)["figures"]["services"][0]["outcomes"]["ok"] >= 7
        os.kill(running.pids[0], signal.SIGKILL)
        wait_until(lambda: "replaced 1" in tab.value("document.body.textContent"), 4.0)
        assert tab.value("window.__errors.join()") == ""
        hosts = tab.value(
            "[...new Set(performance.getEntriesByType('resource').map((e) => new URL(e.name).host))].join()"
        )
        assert hosts == f"127.0.0.1:{running.port}"


def test_a_worker_from_elsewhere_has_its_place_in_the_figures(tmp_path: Path) -> None:
    """The figures of a worker that has joined say on which machine it runs and what devices it sees."""
    path = str(tmp_path / "gate.sock")
    with serving(App(joining.where(), join=path)) as running:
        with joining.joined("where", path, CUDA_VISIBLE_DEVICES="2") as pid:
            wait_until(lambda: [worker["state"] for worker in workers_of(running.port)] == ["ready"])
            (worker,) = workers_of(running.port)
            assert (worker["pid"], worker["host"], worker["device"]) == (pid, socket.gethostname(), "2")
            assert worker["where"] == f"pid {pid} on {socket.gethostname()}, devices 2"
        wait_until(lambda: workers_of(running.port) == [])


def workers_of(port: int) -> list[dict[str, Any]]:
    """The figures of the workers of the first stage."""
    found: list[dict[str, Any]] = data_of(port)["figures"]["services"][0]["stages"][0]["workers"]
    return found


@pytest.mark.slow
@pytest.mark.skipif(chromium.PATH is None, reason="there is no Chromium")
def test_a_browser_shows_where_workers_run(tmp_path: Path) -> None:
    """The page names the machine and the devices of a worker that has joined."""
    path = str(tmp_path / "gate.sock")
    with (
        serving(App(joining.where(), join=path)) as running,
        joining.joined("where", path, CUDA_VISIBLE_DEVICES="2") as pid,
        chromium.run(tmp_path) as tab,
    ):
        tab.prepare(ERRORS)
        tab.open(f"http://127.0.0.1:{running.port}/dashboard")
        where = f"pid {pid} on {socket.gethostname()}, devices 2"
        wait_until(lambda: where in tab.value("document.body.textContent"))
        assert tab.value("window.__errors.join()") == ""


@pytest.mark.slow
@pytest.mark.skipif(chromium.PATH is None, reason="there is no Chromium")
def test_a_browser_shows_what_can_be_asked(tmp_path: Path) -> None:
    """The page of the API shows each address, without an error and without a request to another host."""
    with serving(App(models.scale)) as running, chromium.run(tmp_path) as tab:
        tab.prepare(ERRORS)
        tab.open(f"http://127.0.0.1:{running.port}/docs")
        wait_until(lambda: "/predict" in tab.value("document.body.textContent"), 20.0)
        assert tab.value("document.querySelectorAll('.operation').length") >= 6
        tab.value(
            "(() => { const one = [...document.querySelectorAll('.operation')].find((each) =>"
            " each.querySelector('code').textContent === '/predict'); one.open = true;"
            " one.querySelector('textarea').value = '2.0'; one.querySelector('button').click(); })()"
        )
        wait_until(
            lambda: "200 OK" in tab.value("document.querySelector('.operation[open] .status').textContent"), 20.0
        )
        assert tab.value("window.__errors.join()") == ""
        hosts = tab.value(
            "[...new Set(performance.getEntriesByType('resource').map((e) => new URL(e.name).host))].join()"
        )
        assert hosts == f"127.0.0.1:{running.port}"
