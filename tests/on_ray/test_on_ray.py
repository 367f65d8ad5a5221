"""Services whose workers are Ray actors: the same promises, and every fault made to happen."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import carpool
from carpool import DeadlineExceeded, ModelError, Service, Stage, StartupError, Unavailable
from carpool.engine.observe.figures import figures
from tests.on_ray.models import Place
from tests.support import joining, models, parts
from tests.support.pressing import Callers
from tests.support.processes import alive
from tests.support.promises import PROMISES, Contract, Driven
from tests.support.serving import serve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("cluster")


def service(workers: int = 1, **settings: Any) -> Service:
    """A service whose answers say where they were made."""
    return Service(Stage(Place, max_batch_size=4, workers=workers, policy="greedy", **settings), name="place")


@contextlib.asynccontextmanager
async def actors(*, cost_s: float = 0.0, max_batch_size: int = 8, workers: int = 1) -> AsyncIterator[Driven]:
    """The service of the contract suite, with actors as its workers."""
    stage = Stage(Contract, kwargs={"cost_s": cost_s}, max_batch_size=max_batch_size, workers=workers, policy="greedy")
    async with Service(stage, name="contract").run_async(on="ray") as handle:
        yield Called(handle)


class Called:
    """A handle as the contract asks for it."""

    def __init__(self, handle: Any) -> None:
        self.predict, self.stream = handle.predict, handle.stream

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@pytest.mark.parametrize("promise", PROMISES)
def test_the_contract(promise: str) -> None:
    """A service on a cluster keeps all promises of one on this machine."""
    asyncio.run(PROMISES[promise](actors))


def wait_for(handle: Any, ready: int) -> None:
    wait_until(lambda: handle.stats().stages[0].workers.get("ready", 0) == ready, 60)


def test_where_workers_run() -> None:
    """Workers are spread over the nodes; none is a child of this process; the main thread is the model's."""
    with service(workers=3).run(on="ray") as handle, ThreadPoolExecutor(12) as callers:
        assert handle.pids == []
        answers = list(callers.map(handle.predict, range(60)))
        assert [answer["x"] for answer in answers] == list(range(60))
        assert len({answer["pid"] for answer in answers}) == 3
        assert len({answer["node"] for answer in answers}) >= 2
        assert all(answer["is_main_thread"] for answer in answers)
        pids = {answer["pid"] for answer in answers}
    wait_until(lambda: not any(map(alive, pids)))


def test_a_killed_worker_costs_no_request() -> None:
    """Under load, killed workers cost no request its answer, and successors come."""
    with service(workers=2).run(on="ray") as handle, pressing(handle) as callers:
        for _ in range(2):
            callers.go_on()
            pid = handle.predict(0)["pid"]
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: not alive(pid))
            wait_for(handle, 2)
        callers.go_on()
    assert callers.errors == []


def test_all_workers_killed() -> None:
    """All workers are killed at once under load, and no request fails."""
    with service(workers=2).run(on="ray") as handle, pressing(handle) as callers:
        callers.go_on(200)
        for pid in set(callers.pids):
            os.kill(pid, signal.SIGKILL)
        callers.go_on(200)
        wait_for(handle, 2)
    assert callers.errors == []


def pressing(handle: Any) -> Callers:
    """Callers of a service whose answers say where they were made."""
    return Callers(handle, lambda answer: (answer["pid"], answer["x"]))


def test_a_request_that_kills_workers() -> None:
    """A request with which two workers die fails, and the service goes on."""
    with service(workers=2).run(on="ray") as handle:
        with pytest.raises(ModelError, match="two workers of stage Place died"):
            handle.predict("die", timeout_s=25)
        assert handle.predict(1)["x"] == 1


def test_a_hung_call_is_replaced() -> None:
    """A worker whose call takes too long is killed, and replaced at once: its node is well."""
    with service(max_batch_time_s=0.5).run(on="ray") as handle:
        before = handle.predict(0)["pid"]
        with pytest.raises((Unavailable, DeadlineExceeded)):
            handle.predict("hang", timeout_s=1.5)
        wait_for(handle, 1)
        assert handle.predict(1, timeout_s=25)["pid"] != before


def test_a_node_that_is_gone(cluster: Any) -> None:
    """The workers of a node that is taken away are lost at once, and replaced where there is room."""
    own = {"num_cpus": 1, "resources": {"extra": 1}, "object_store_memory": 80 * 2**20}
    node = cluster.add_node(node_ip_address="127.0.0.5", **own)
    cluster.wait_for_nodes()
    with service(needs={"resources": {"extra": 1}}).run(on="ray") as handle, ThreadPoolExecutor() as callers:
        pid = handle.predict(0)["pid"]
        cluster.remove_node(node)
        wait_until(lambda: not alive(pid), 60)
        wait_for(handle, 0)
        waiting = callers.submit(handle.predict, 1)
        cluster.add_node(node_ip_address="127.0.0.6", **own)
        assert waiting.result(60)["pid"] != pid


COORDINATOR = """
    import sys, time, carpool
    from tests.on_ray.test_on_ray import service
    with service(workers=2).run(on="ray") as handle:
        print(*{handle.predict(i)["pid"] for i in range(20)}, flush=True)
        time.sleep(60)
"""


def test_a_killed_coordinator_leaves_no_actor() -> None:
    """The actors of a coordinator that is killed are gone within a second."""
    program = [sys.executable, "-c", textwrap.dedent(COORDINATOR)]
    with subprocess.Popen(program, cwd=joining.ROOT, stdout=subprocess.PIPE, text=True) as coordinator:
        assert coordinator.stdout is not None
        pids = []
        for line in coordinator.stdout:
            with contextlib.suppress(ValueError):
                pids = [int(pid) for pid in line.split()]
                break
        assert pids
        coordinator.kill()
        wait_until(lambda: not any(map(alive, pids)), timeout_s=1)


def test_a_start_that_fails() -> None:
    """A model that cannot be loaded on the cluster fails the start, with the traceback from there."""
    with pytest.raises(StartupError, match="there are no weights"):
        service(kwargs={"is_broken": True}).start(on="ray")


def test_an_environment_of_its_own() -> None:
    """Variables of `env`, and the index of the worker, are there when the model is loaded."""
    with service(env={"COLOUR": "red"}, workers=2).run(on="ray") as handle, ThreadPoolExecutor(8) as callers:
        answers = list(callers.map(handle.predict, range(40)))
        assert {(each["colour"], each["index"], each["variable"]) for each in answers} == {
            ("red", 0, "0"),
            ("red", 1, "1"),
        }


def test_workers_are_scaled_and_replaced() -> None:
    """Under load workers are added, all are replaced, and some are taken away; no request fails, and
    each has the environment and the index that it would have on one machine.
    """
    with service(env={"COLOUR": "red"}).run(on="ray") as handle, pressing(handle) as callers:
        callers.go_on()
        handle.scale("Place", 3)
        callers.pids.clear()
        wait_until(lambda: len(callers.pids) == 3)
        before = set(callers.pids)
        handle.reload()
        wait_until(lambda: not any(map(alive, before)))
        callers.pids.clear()
        wait_until(lambda: len(callers.pids) == 3)
        assert not before & callers.pids
        with ThreadPoolExecutor(16) as others:
            answers = list(others.map(handle.predict, range(100)))
        assert {(each["colour"], each["index"]) for each in answers} == {("red", 0), ("red", 1), ("red", 2)}
        handle.scale("Place", 1)
        wait_for(handle, 1)
        callers.go_on()
    assert callers.errors == []


def test_worn_workers_are_replaced() -> None:
    """Under load workers are recycled, and no request fails."""
    with service(max_calls=30).run(on="ray") as handle, pressing(handle) as callers:
        wait_until(lambda: len(callers.pids) >= 3 or callers.errors, 60)
    assert callers.errors == []


def test_workers_follow_the_load() -> None:
    """With a range, workers are added while there is load and taken away after it, and no request fails."""
    with service(workers=(1, 3)).run(on="ray") as handle:
        assert handle.stats().stages[0].workers == {"ready": 1}
        with pressing(handle) as callers:
            wait_until(lambda: handle.stats().stages[0].workers.get("ready", 0) >= 2, 60)
            callers.go_on()
        assert callers.errors == []
        wait_until(lambda: handle.stats().stages[0].workers == {"ready": 1}, 90)
        assert handle.predict(1)["x"] == 1


def test_room_is_waited_for(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker for which there is no room waits, and the log says what it needs and what is free."""
    from carpool.ray import actor_worker

    monkeypatch.setattr(actor_worker, "_LOOK_EVERY_S", 0.2)
    with caplog.at_level(logging.WARNING, "carpool"):
        handle = service(needs={"resources": {"unobtainium": 1}}).run(on="ray")
        with ThreadPoolExecutor() as starting:
            started = starting.submit(handle.start)
            wait_until(lambda: "waits for room in the cluster" in caplog.text)
            wait_until(lambda: handle._inner.state.name == "STARTING")
            handle.close()
            assert isinstance(started.exception(20), Unavailable)
    assert "unobtainium" in caplog.text


SCRIPT = """
    import carpool

    class Item:
        def __init__(self, value): self.value = value

    class Plus(carpool.Model):
        def predict(self, item): return Item(item.value + 1)

    if __name__ == "__main__":
        with carpool.Service(Plus).run(on="ray") as s:
            answer = s.predict(Item(1))
            print("answer", type(answer) is Item, answer.value)
"""


@pytest.mark.parametrize("how", ["a file", "standard input"])
def test_a_model_of_main(how: str, tmp_path: Path) -> None:
    """A model that is defined in the program itself, or was typed, works on a cluster."""
    text = textwrap.dedent(SCRIPT)
    (tmp_path / "program.py").write_text(text)
    command = [sys.executable, "program.py"] if how == "a file" else [sys.executable]
    done = subprocess.run(command, cwd=tmp_path, input=text, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "answer True 2" in done.stdout


def test_what_is_observed(caplog: pytest.LogCaptureFixture) -> None:
    """Ray's own metrics have a snapshot of the service, and with `/metrics`, `stats()`, the dashboard's
    figures and lines of the log say on which node, and as which actor, a worker runs; what ends is
    told as well.
    """
    import ray

    pytest.importorskip("opencensus", reason="Ray exports metrics only with ray[default]")
    with caplog.at_level(logging.INFO, "carpool"), service(name="Observed").run(on="ray") as handle:
        node = handle.predict(1)["node"]
        wait_until(lambda: ray_metrics("carpool_requests_total{", 'model="place"'), 60)
        infos: list[str] = []
        wait_until(lambda: infos.extend(ray_metrics("carpool_worker_info{", 'stage="Observed"')) or infos, 60)
        (info,) = infos
        assert f'node="{node}"' in info and info.endswith(" 1.0")
        assert node[:12] in handle.stats().stages[0].elsewhere[0]
        (worker,) = figures([handle._inner.driver.stats], 0.0)["services"][0]["stages"][0]["workers"]
        assert (worker["node"], len(worker["actor"])) == (node, 32)
        ready = [record for record in caplog.records if record.msg.startswith("worker %s is ready")]
        assert [record.node for record in ready] == [node]  # type: ignore[attr-defined]
        assert all(len(record.actor) == 32 for record in ready)  # type: ignore[attr-defined]
        os.kill(handle.predict(1)["pid"], signal.SIGKILL)
        wait_until(lambda: any("is lost" in record.getMessage() for record in caplog.records))
        lost = next(record for record in caplog.records if "is lost" in record.getMessage())
        assert lost.node == node  # type: ignore[attr-defined]
        assert ray.is_initialized()


def ray_metrics(name: str, label: str) -> list[str]:
    """What the nodes of the cluster export for Prometheus under a name and with a label."""
    import ray

    lines: list[str] = []
    for node in ray.nodes():
        if node["Alive"]:
            url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
                lines += answer.read().decode().splitlines()
    return [line for line in lines if name in line and label in line]


def test_other_stages_stay_here() -> None:
    """Stages in threads and on the loop run in this process, beside those on the cluster."""
    chain = Service(Stage(models.Affine, max_batch_size=4, run_in="thread", kwargs={"slope": 2, "shift": 1}), name="x")
    with chain.run(on="ray") as handle:
        assert handle.predict(1.0) == {"x": 1.5, "y": 4.0}


SERVED = """
    from carpool import Service, Stage
    from tests.on_ray.models import Place

    service = Service(Stage(Place, max_batch_size=4), name="place")
"""


def test_http(tmp_path: Path) -> None:
    """`carpool serve --on ray` serves a service whose workers are actors, as many as `--set` says."""
    (tmp_path / "program.py").write_text(textwrap.dedent(SERVED))
    with serve("program:service", "--on", "ray", "--set", "Place.workers=2", folder=tmp_path) as served:
        answers = [json.loads(served.ask("POST", "/predict", i)[1]) for i in range(20)]
        assert [answer["x"] for answer in answers] == list(range(20))
        metrics = served.ask("GET", "/metrics")[1].decode()
        assert 'carpool_workers{model="place",stage="Place",state="ready"} 2.0' in metrics
    assert "*** SIGTERM" not in "".join(served.log), "Ray's handler of signals tells of a stop as of a crash"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"address": "ray://head:10001"}, "is an address of Ray Client.*ray job submit"),
        ({"silence_s": 1}, "silence_s must be at least 2 seconds"),
        ({"ports": (7, 3)}, "ports must be the first and the last one"),
        ({"ports": 7}, "ports must be the first and the last one"),
        ({"stages": {"Place": {"gpus": 1}}}, "has no 'gpus'"),
        ({"stages": {"Place": {"workers": (3, 2)}}}, "more workers at least than at most"),
        ({"stages": {"Place": {"workers": 0}}}, "must be a whole number of at least 1"),
        ({"stages": {"Place": 7}}, "Place must be a mapping"),
    ],
)
def test_wrong_clusters(settings: dict[str, Any], text: str) -> None:
    """What cannot be is refused where the cluster is described, with the next step."""
    with pytest.raises((ValueError, TypeError), match=text):
        carpool.ray.Cluster(**settings)


def test_wrong_stages_of_a_cluster() -> None:
    """A stage that there is not, or that does not move, is refused before anything is started."""
    with pytest.raises(ValueError, match="stages names Plaice, and place has Place"):
        service().run(on=carpool.ray.Cluster(stages={"Plaice": {"workers": 2}}))
    here = Service(Stage(models.double, run_in="thread"), name="here")
    with pytest.raises(ValueError, match="stays in this process"):
        here.run(on=carpool.ray.Cluster(stages={"double": {"workers": 2}}))
    joining = Service(Stage(models.double, join=True), name="joining")
    with pytest.raises(ValueError, match="on Ray the cluster starts the workers"):
        joining.run(on="ray")
    counting = Service(Stage(parts.Once, name="counting"), name="counting")
    with pytest.raises(ValueError, match="answers in parts: give one number"):
        counting.run(on=carpool.ray.Cluster(stages={"counting": {"workers": (1, 4)}}))


def test_more_workers_and_ports() -> None:
    """`stages` says how many workers there are on the cluster, and `ports` where they connect."""
    cluster = carpool.ray.Cluster(stages={"Place": {"workers": 3, "num_cpus": 0.5}}, ports=(23400, 23500))
    with service().run(on=cluster) as handle:
        assert handle.stats().stages[0].workers == {"ready": 3}
        where = handle.stats().stages[0].elsewhere
        assert len(where) == 3
        assert all("node" in each and "actor" in each for each in where.values())
        assert 23400 <= handle._inner._running.site._address.port <= 23500
