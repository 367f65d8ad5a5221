"""Metrics of the user's own that change in workers appear in /metrics, summed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, Info

from carpool.engine.observe.own_metrics import OwnMetricsOfWorkers
from carpool.engine.observe.stats import Counted, SentMetrics
from carpool.engine.worker.own_metrics import Family, OwnMetrics, OwnSample, families_of, write_file
from carpool.http.app import App
from carpool.http.serve import _own_metrics
from tests.support.http import models
from tests.support.serving import Served, serve
from tests.support.waiting import PATIENCE_S, wait_until

PROGRAM = """
    import carpool
    from prometheus_client import Counter, Gauge

    tokens = Counter("tokens", "Tokens that were read.", ["kind"])
    loaded = Gauge("loaded", "Models that are loaded.")

    class Count(carpool.Model):
        def setup(self):
            loaded.set(1)

        def predict(self, text: str) -> int:
            tokens.labels("word").inc(len(text.split()))
            return carpool.worker_index()

    service = carpool.Service(carpool.Stage(Count, workers=2))
"""


def value(served: Served, line: str) -> float:
    found = re.search(rf"^{re.escape(line)} (\S+)$", served.ask("GET", "/metrics")[1].decode(), re.MULTILINE)
    return -1.0 if found is None else float(found[1])


def test_what_workers_count_is_in_metrics(tmp_path: Path) -> None:
    """A counter is summed over all workers, also those that have died; a gauge over those that live."""
    (tmp_path / "counts.py").write_text(textwrap.dedent(PROGRAM))
    with serve("counts:service", folder=tmp_path) as served:
        for _ in range(10):
            assert served.ask("POST", "/predict", "three short words")[0] == 200
        words = 'tokens_total{kind="word"}'
        wait_until(lambda: value(served, words) == 30.0)
        assert value(served, "loaded") == 2.0
        folder = next(Path("/proc").glob(f"{served.process.pid}/task/*/children")).read_text().split()
        victims = [pid for pid in folder if "worker" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(int(victims[0]), signal.SIGKILL)
        wait_until(lambda: value(served, 'carpool_workers{model="Count",stage="Count",state="ready"}') == 2.0)
        assert value(served, words) == 30.0
        assert served.ask("POST", "/predict", "one more")[0] == 200
        wait_until(lambda: value(served, words) == 32.0)
        wait_until(lambda: value(served, "loaded") == 2.0)


def test_sums_of_processes(tmp_path: Path) -> None:
    """Counters and histograms are summed over all files, gauges over the processes that live, and a broken file is
    passed over.
    """
    own = OwnMetricsOfWorkers()
    for pid in (11, 22):
        registry = CollectorRegistry()
        Counter("seen", "Seen.", registry=registry).inc(pid)
        Gauge("level", "Level.", registry=registry).set(pid)
        Histogram("took_seconds", "Took.", registry=registry, buckets=(1, 2)).observe(1.5)
        Counter("carpool_fake", "Ours.", registry=registry).inc()
        written_by(own, pid, registry)
    Path(own.folder, "S.0.33").write_bytes(b"broken")
    own.seen([22])
    samples = {sample.name: sample.value for metric in own.collect() for sample in metric.samples if not sample.labels}
    buckets = {s.labels["le"]: s.value for m in own.collect() for s in m.samples if s.name == "took_seconds_bucket"}
    assert (samples["seen_total"], samples["level"], samples["took_seconds_count"]) == (33.0, 22.0, 2.0)
    assert buckets == {"1.0": 0.0, "2.0": 2.0, "+Inf": 2.0}
    assert "carpool_fake_total" not in samples
    own.close()
    assert not os.path.exists(own.folder)


def test_what_a_killed_server_has_left_is_removed() -> None:
    """The folder of a server that was killed is removed by the next one, also if another process has its id, as process
    1 of a container has; that of a live one stays, whatever its id means here, and one that has just been made.
    """
    done = subprocess.Popen(["true"])
    done.wait()
    left = [Path(tempfile.mkdtemp(prefix=f"carpool-metrics-{pid}-")) for pid in (done.pid, os.getpid(), 1)]
    young = Path(tempfile.mkdtemp(prefix="carpool-metrics-1-"))
    live = OwnMetricsOfWorkers()
    for folder in (*left, Path(live.folder)):
        os.utime(folder, (0, 0))
    other = OwnMetricsOfWorkers()
    assert not any(folder.exists() for folder in left)
    assert Path(live.folder).exists() and young.exists()
    young.rmdir()
    live.close()
    other.close()


def test_a_folder_that_is_gone_costs_only_what_was_in_it() -> None:
    """Something that cleans up may take the folder away; then there are no metrics of workers, and no error."""
    own = OwnMetricsOfWorkers()
    registry = CollectorRegistry()
    Counter("lost", "Lost.", registry=registry).inc()
    written_by(own, 11, registry)
    shutil.rmtree(own.folder)
    assert "lost" not in {metric.name for metric in own.collect()}
    own.close()


def test_a_collector_that_raises_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A collector of the user's that raises costs the metrics and nothing else."""

    class Broken:
        def collect(self) -> list[object]:
            raise KeyboardInterrupt

    OwnMetrics(partial(write_file, str(tmp_path / "S.0.1")), Broken()).write()
    assert not (tmp_path / "S.0.1").exists()
    with pytest.raises(KeyboardInterrupt):
        families_of(Broken())
    monkeypatch.setattr("carpool.engine.observe.own_metrics.REGISTRY", Broken())
    own = OwnMetricsOfWorkers()
    assert list(own.collect()) == []
    own.close()
    assert "a collector of metrics raised" in caplog.text


def test_without_a_folder_for_them_it_serves_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no temporary file can be made, a server collects no metrics of models, says so, and runs."""

    def none_is_usable() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none_is_usable)
    app = App(models.scale)
    with _own_metrics(app):
        assert app.own_metrics is None
    assert "metrics of the models' own are not collected" in caplog.text


def written(own: OwnMetricsOfWorkers, pid: int, make: Callable[[CollectorRegistry], object]) -> None:
    """A worker with this process id has these metrics."""
    registry = CollectorRegistry()
    make(registry)
    written_by(own, pid, registry)


def written_by(own: OwnMetricsOfWorkers, pid: int, registry: CollectorRegistry) -> None:
    """A worker with this process id has a registry."""
    OwnMetrics(partial(write_file, f"{own.folder}/S.0.{pid}"), registry).write()


def samples_of(own: OwnMetricsOfWorkers, name: str) -> dict[str, float]:
    """The samples of a metric, by the value of their one label, in order."""
    (metric,) = [metric for metric in own.collect() if metric.name == name]
    return {next(iter(sample.labels.values()), sample.name): sample.value for sample in metric.samples}


@pytest.fixture
def own() -> Iterator[OwnMetricsOfWorkers]:
    one = OwnMetricsOfWorkers()
    yield one
    one.close()


def test_what_an_info_or_enum_says_is_there_once(own: OwnMetricsOfWorkers) -> None:
    """An Info and an Enum say what the workers that live say, each with value 1, however many they are and were."""

    def weights(version: str, state: str) -> Callable[[CollectorRegistry], object]:
        def make(registry: CollectorRegistry) -> None:
            Info("weights", "Weights.", registry=registry).info({"version": version})
            Enum("state", "State.", states=["cold", "warm"], registry=registry).state(state)

        return make

    written(own, 11, weights("1", "cold"))
    for pid in (22, 33):
        written(own, pid, weights("2", "warm"))
    own.seen([22, 33])
    assert samples_of(own, "weights") == {"2": 1.0}
    assert samples_of(own, "state") == {"cold": 0.0, "warm": 1.0}
    own.seen([])
    assert not {"weights", "state"} & {metric.name for metric in own.collect()}


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ((1, 10), (2, 4, 8, 16), {"2.0": 0, "4.0": 0, "8.0": 2, "16.0": 2, "+Inf": 2}),
        ((2, 4, 8), (4, 8), {"4.0": 0, "8.0": 3, "+Inf": 3}),
        ((4, 8), (4, 8), {"4.0": 0, "8.0": 3, "+Inf": 3}),
        ((4,), (4, 8), {"4.0": 0, "8.0": 2, "+Inf": 2}),
    ],
    ids=["others", "fewer", "the same", "more"],
)
def test_a_histogram_with_other_bounds_starts_anew(
    own: OwnMetricsOfWorkers, before: Sequence[float], now: Sequence[float], expected: dict[str, float]
) -> None:
    """After a reload a histogram has the bounds of the workers that live, with what fits them of those that have ended,
    so its counts never fall from bound to bound.
    """

    def took(bounds: Sequence[float]) -> Callable[[CollectorRegistry], object]:
        return lambda registry: Histogram("took", "Took.", buckets=bounds, registry=registry).observe(5)

    written(own, 11, took(before))
    for pid in (22, 33):
        written(own, pid, took(now))
    written(own, 44, lambda registry: Histogram("took", "Took.", labelnames=["x"], registry=registry))  # nothing yet
    own.seen([22, 33, 44])
    found = samples_of(own, "took")
    assert found.pop("took_count") == expected["+Inf"] and found.pop("took_sum") == 5 * expected["+Inf"]
    assert found == expected and [*found] == [*expected]


@pytest.mark.parametrize(("before", "now"), [((1, 10), (2, 4, 8, 16)), ((2, 4, 8), (4, 8)), ((4,), (4, 8))])
def test_while_workers_have_other_bounds_a_histogram_has_those_of_all(
    own: OwnMetricsOfWorkers, before: Sequence[float], now: Sequence[float]
) -> None:
    """In a reload old and new workers live, and a histogram has the bounds that both have, of all that there were."""

    def took(bounds: Sequence[float]) -> Callable[[CollectorRegistry], object]:
        return lambda registry: Histogram("took", "Took.", buckets=bounds, registry=registry).observe(5)

    written(own, 11, took(before))
    for pid in (22, 33):
        written(own, pid, took(now))
    own.seen([11, 22])
    found = samples_of(own, "took")
    assert [*found.values()][:-2] == sorted([*found.values()][:-2]) and found["+Inf"] == 3


@pytest.mark.parametrize("has_own_stages", [False, True])
def test_what_a_server_has_only_imported_does_not_count(
    own: OwnMetricsOfWorkers, has_own_stages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gauge is that of the workers, and of this process if stages run in it or if it is the only one to have it."""
    registry = CollectorRegistry()
    Gauge("level", "Level.", registry=registry).set(10)
    Gauge("here", "Here.", registry=registry).set(7)
    monkeypatch.setattr("carpool.engine.observe.own_metrics.REGISTRY", registry)
    for pid in (11, 22):
        written(own, pid, lambda registry: Gauge("level", "Level.", registry=registry).set(10))
    own.seen([11, 22], has_own_stages=has_own_stages)
    assert samples_of(own, "level") == {"level": 30.0 if has_own_stages else 20.0}
    assert samples_of(own, "here") == {"here": 7.0}


def test_what_a_worker_that_is_dead_has_left_is_added_up_once(own: OwnMetricsOfWorkers) -> None:
    """The file of a worker that has ended goes when it has been read, and what it counted stays: a server whose workers
    are replaced for months has no file for each of them.
    """
    for pid in range(5_000_000, 5_000_010):  # above what a system gives
        written(own, pid, lambda registry: Counter("seen", "Seen.", registry=registry).inc(2))
    for _ in range(3):
        assert samples_of(own, "seen") == {"seen_total": 20.0}
    assert list(Path(own.folder).iterdir()) == []


def message(**values: Any) -> bytes:
    """What a worker elsewhere sends that has counted so often, and whose gauges have these values."""
    sent: list[bytes] = []
    registry = CollectorRegistry()
    for name, value in values.items():
        if name.startswith("level"):
            Gauge(name, "Level.", registry=registry, multiprocess_mode=name.partition("_")[2] or "all").set(value)
        else:
            Counter(name, "Seen.", ["of"], registry=registry).labels("x").inc(value)
    OwnMetrics(sent.append, registry).write()
    return sent[0]


def test_what_workers_elsewhere_send(own: OwnMetricsOfWorkers) -> None:
    """Counters of workers elsewhere are kept when these have gone, whoever has their place then, and gauges are not."""
    sent = SentMetrics()
    own.seen([], [sent])
    sent.sent(7, message(seen=1, level=1))
    sent.sent(7, message(seen=3, level=5))
    sent.sent(8, message(seen=10, level=20))
    assert (samples_of(own, "seen"), samples_of(own, "level")) == ({"x": 13.0}, {"level": 25.0})
    sent.ended(7)
    assert (samples_of(own, "seen"), samples_of(own, "level")) == ({"x": 13.0}, {"level": 20.0})
    sent.sent(7, message(seen=1, level=2))
    sent.ended(8)
    sent.ended(9)
    assert (samples_of(own, "seen"), samples_of(own, "level")) == ({"x": 14.0}, {"level": 2.0})


@pytest.mark.parametrize(("mode", "expected"), [("max", 5), ("livemax", 5), ("min", 1), ("livemin", 1), ("sum", 9)])
def test_a_gauge_says_how_those_of_workers_become_one(own: OwnMetricsOfWorkers, mode: str, expected: float) -> None:
    """`multiprocess_mode` of a gauge has the largest or the smallest of the workers that live shown, else their sum."""
    sent = SentMetrics()
    own.seen([], [sent])
    for place, level in enumerate((3, 1, 5)):
        sent.sent(place, message(**{f"level_{mode}": level}))
    assert samples_of(own, f"level_{mode}") == {f"level_{mode}": expected}


def test_what_a_worker_elsewhere_sends_can_spoil_nothing(own: OwnMetricsOfWorkers) -> None:
    """Bytes that are no metrics, kinds that there are not, and names that would write lines of their own on the page
    are left out; what others have sent is there.
    """

    def family(name: str = "odd", kind: str = "counter", sample: str = "odd_total", **labels: str) -> bytes:
        return msgspec.msgpack.encode([Family(name, "Odd.\nodd 7", kind, [OwnSample(sample, labels, 1.0)])])

    sent = SentMetrics()
    own.seen([], [sent])
    odd = [b"", b"broken", family(name="o\ndd"), family(kind="secret"), family(sample="x 1\nodd")]
    odd.append(msgspec.msgpack.encode([Family("odd", "", "counter", [OwnSample("odd", {'a="1"} 1\nb': ""}, 1.0)])]))
    for place, data in enumerate([*odd, message(seen=2)]):
        sent.sent(place, data)
    assert [metric.name for metric in own.collect() if metric.name in ("odd", "o\ndd", "seen")] == ["seen"]
    for place in range(len(odd) + 1):
        sent.ended(place)
    assert [metric.name for metric in own.collect() if metric.name in ("odd", "o\ndd", "seen")] == ["seen"]


def test_workers_that_have_gone_take_a_bounded_amount_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Once there is no room for more series, new ones are lost, with one warning; those that are there count on."""
    counted = Counted(most_text=10_000)
    for i in range(1000):
        counted.add(
            [
                Family(
                    "seen",
                    "Seen.",
                    "counter",
                    [OwnSample("seen_total", {"of": str(i)}, 1.0), OwnSample("all", {}, 1.0)],
                )
            ]
        )
    (family,) = counted.families()
    values = {sample.labels.get("of", "all"): sample.value for sample in family.samples}
    assert values["all"] == 1000.0 and values["0"] == 1.0 and len(values) < 60
    assert caplog.text.count("too many series") == 1


JOINED = """
    import os, carpool
    from prometheus_client import Counter, Gauge, Info

    seen = Counter("seen", "Items.", ["text"])
    loaded = Gauge("loaded", "Models that are loaded.")
    weights = Info("weights", "Weights.")

    class Count(carpool.Model):
        def setup(self):
            loaded.set(1)
            weights.info({"version": os.environ["VERSION"]})

        def predict(self, text: str) -> str:
            seen.labels("x" * 100).inc()
            return os.environ["VERSION"]

    service = carpool.Service(carpool.Stage(Count, workers=0, join=True))
"""


def test_what_workers_count_that_have_joined_is_in_metrics(tmp_path: Path) -> None:
    """What a worker that joins over the network counts is in /metrics while it has nothing to do, and stays there when
    it is killed or has left; its gauges and what its Info says do not.
    """
    (tmp_path / "counts.py").write_text(textwrap.dedent(JOINED))
    token = tmp_path / "token"
    token.write_text("a token that both sides have")
    token.chmod(0o600)
    seen = f'seen_total{{text="{"x" * 100}"}}'

    def start(version: str) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "carpool", "worker", "counts:service"),
            "--connect",
            address,
            "--token",
            token,
        ]
        return subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "VERSION": version})

    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with serve("counts:service", "--join", address, "--join-token", str(token), folder=tmp_path) as served:
        with start("1") as first:
            wait_until(lambda: value(served, "loaded") == 1.0)
            for _ in range(10):
                assert served.ask("POST", "/predict", "a text")[0] == 200
            wait_until(lambda: value(served, seen) == 10.0)
            assert value(served, 'weights_info{version="1"}') == 1.0
            first.kill()
        wait_until(lambda: value(served, "loaded") != 1.0)
        assert value(served, seen) == 10.0
        with start("2") as second:
            wait_until(lambda: value(served, "loaded") == 1.0)
            assert json.loads(served.ask("POST", "/predict", "a text")[1]) == "2"
            second.terminate()  # at once: what it has counted last comes as it leaves
            assert second.wait(PATIENCE_S) == 0
            wait_until(lambda: value(served, seen) == 11.0)
            assert value(served, 'weights_info{version="1"}') == value(served, 'weights_info{version="2"}') == -1.0
