"""Several services behind one server: none of them can take what is guaranteed to the others."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool import Service, Stage
from carpool.http.app import App
from carpool.http.reader import LARGE_BODY
from carpool.http.server_state import Limits
from carpool.http.shares import Bodies, ConnectionShares, guaranteed_of
from carpool.service.overrides import changed
from tests.effort import examples
from tests.support.http import models
from tests.support.http.front import Front, chunked, get, nothing, post
from tests.support.http.jobs import GATED, job
from tests.support.http.jump import on_a_jumping_loop, run, turns
from tests.support.http.net import Client, Gate, RunningServer, code_of, serving
from tests.support.http.wire import Wire

NAMES = st.sampled_from("abc")
WEIGHTS = st.dictionaries(NAMES, st.floats(1e-6, 1e6))

# -- decisions


@given(st.integers(1, 2**40), st.dictionaries(st.integers(), st.floats(1e-6, 1e6), max_size=20))
def test_half_is_guaranteed_in_proportion(total: int, weights: dict[int, float]) -> None:
    """Of what there is, half is guaranteed to the services in proportion to their shares, but at
    least one where there is enough for that; a lone service needs no guarantee.
    """
    parts = guaranteed_of(total, weights)
    if len(weights) < 2:
        assert parts == {}
        return
    assert sum(parts.values()) <= total
    for name, weight in weights.items():
        exact = total / 2 * weight / sum(weights.values())
        assert parts[name] <= max(1, exact * (1 + 1e-9))
        assert parts[name] >= max(exact * (1 - 1e-9) - 1, 1 if total >= 2 * len(weights) else 0)


@examples(300)
@given(
    st.integers(1, 12),
    WEIGHTS,
    st.lists(st.one_of(st.tuples(st.integers(0, 15), NAMES), st.integers(0, 15), WEIGHTS), max_size=80),
)
def test_connections_are_shared_whatever_happens(total: int, weights: dict[str, float], events: list[Any]) -> None:
    """However connections come, change over and go, and services too: there are never more than the
    total, no service is refused what is guaranteed to it, none gets what is guaranteed to another
    one, and in the end all is given back.
    """
    shares, counted = ConnectionShares(total), dict[int, str]()
    shares.divide(weights)
    for event in events:
        if isinstance(event, dict):
            shares.divide(event)
        elif isinstance(event, int):
            shares.give_back(event)
            counted.pop(event, None)
        else:
            connection, name = event
            counted.pop(connection, None)
            held = list(counted.values())
            left = total - sum([max(held.count(each), shares.guaranteed.get(each, 0)) for each in "abc"])
            is_guaranteed = held.count(name) < shares.guaranteed.get(name, 0)
            assert shares.take(connection, name) == (is_guaranteed or left > 0)
            if is_guaranteed or left > 0:
                counted[connection] = name
        held = list(counted.values())
        assert shares.held == {name: held.count(name) for name in held}
        if not any(isinstance(each, dict) for each in events):
            assert len(held) <= total
    for connection in list(counted):
        shares.give_back(connection)
    assert shares.held == {}


class Upload:
    """A body that notes that it was ended."""

    def __init__(self, service: str | None) -> None:
        self.held = 0
        self.service = service
        self.ended = False

    def end(self) -> None:
        self.ended = True


@examples(300)
@given(
    WEIGHTS,
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 60), st.floats(0, 1), st.booleans()),
        max_size=80,
    ),
)
def test_bytes_of_bodies_are_shared_whatever_happens(weights: dict[str, float], events: list[Any]) -> None:
    """However bodies come and end, they are never larger together than the limit, none is ended of a
    service that has no more than is guaranteed to it, or within its connection's share, and in the
    end all is given back.
    """
    limit, connections, now = 800, 8, 0.0
    bodies = Bodies(limit, connections, lambda: now)
    bodies.divide(weights)
    present = [Upload(service) for service in ["a", "a", "a", "b", "b", "c", None, None]]
    for index, nbytes, seconds, is_over in events:
        now += seconds
        body = present[index]
        if is_over:
            bodies.remove(body)
        before = {id(each): each.held for each in present}
        before[id(body)] += nbytes
        try:
            bodies.add(body, nbytes)
        except Exception:
            ended = [body]
            bodies.remove(body)
        else:
            ended = []
        ended += [each for each in present if each.ended]
        for each in ended:
            assert before[id(each)] > bodies.share
            of_service = [before[id(other)] for other in present if other.service == each.service]
            large = sum([held for held in of_service if held > bodies.share])
            assert large > bodies.guaranteed.get(each.service or "", 0)
            each.ended = False
        assert bodies.held == sum([each.held for each in present]) <= limit
    for each in present:
        bodies.remove(each)
    assert bodies.held == 0


def test_a_share_can_be_changed_from_outside() -> None:
    """The share of a service is a setting of it, and stays when others are changed."""
    (service,) = changed([Service(nothing, share=2)], {"nothing": {"slo_s": 1}}, {})
    assert service.share == 2.0
    assert changed([service], {"nothing": {"share": 0.5}}, {})[0].share == 0.5


# -- connections without sockets


def two_services(limits: Limits, *, share: float = 1.0, **settings: Any) -> Front:
    """A server of the services `echo` and `other`, whose requests the same stub answers."""
    other = Service(Stage(nothing, name="other"), share=share)
    front = Front(limits, app=lambda service, **more: App(service, other, **more), **settings)  # type: ignore[arg-type]
    front.app.endpoints[1].driver = front.driver
    return front


def ask(front: Front, *requests: bytes) -> Wire:
    """A new client that has sent this."""
    wire = front.connect()
    for request in requests:
        wire.send(request)
    return wire


ECHO, OTHER = post(b"1", "/models/echo/predict"), post(b"1", "/models/other/predict")
FULL = (503, "too_many_connections", True)


def outcomes(*wires: Wire) -> list[tuple[int, str, bool]]:
    """The status, the code and whether the connection ends, of each answer that is an error."""
    answers = [answer for wire in wires for answer in wire.answers()]
    return [(each.status, code_of(each), each.closes) for each in answers if each.status != 200]


@pytest.mark.parametrize("is_known", [False, True], ids=["parsed", "looked up"])
@on_a_jumping_loop
async def test_a_hung_service_leaves_connections_to_the_others(is_known: bool) -> None:
    """Clients of a service that does not answer get as many connections as are not guaranteed to
    others: one more is told 503 and closed, also where the head of its request is known.
    """
    front = two_services(Limits(connections=8), cost_s=None)
    if not is_known:
        front.state.remember = lambda raw, head: None  # type: ignore[method-assign]
    waiting = [ask(front, ECHO) for _ in range(6)]
    late = [ask(front, ECHO) for _ in range(20)]
    assert outcomes(*waiting) == []
    assert outcomes(*late) == [FULL] * 20
    assert (len(front.state.heads) > 0) == is_known
    for wire in late:
        wire.reset()
    for _ in range(5):
        again = [ask(front, OTHER) for _ in range(2)]
        assert outcomes(*again, ask(front, OTHER)) == [FULL]
        for wire in again:
            wire.reset()
    assert front.outcomes == {"unavailable": 20}
    await turns()
    front.worker.finish()
    await turns()
    assert [len(wire.answers()) for wire in waiting] == [1] * 6


EMBED = post(b'{"model": "other", "input": [1]}', "/v1/embeddings", "Content-Type: application/json")
SENT = st.sampled_from([ECHO, OTHER, EMBED, get("/livez"), ECHO + OTHER, OTHER + EMBED + ECHO, ECHO[:-1], b"1"])
GOES = None


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 9), st.one_of(SENT, st.just(GOES))), max_size=40), st.booleans())
def test_known_heads_change_nothing_about_shares(events: list[tuple[int, bytes | None]], is_hung: bool) -> None:
    """Whether heads are known or not, the same requests are refused, and connections count for the
    same services.
    """

    async def play(*, is_forgetful: bool) -> list[Any]:
        front = two_services(Limits(connections=6), cost_s=None if is_hung else 0.0)
        if is_forgetful:
            front.state.remember = lambda raw, head: None  # type: ignore[method-assign]
        wires, ended, seen = dict[int, Wire](), list[Wire](), list[Any]()
        for client, data in events:
            if data is None:
                if client in wires:
                    wires.pop(client).reset()
            else:
                if client in wires and wires[client].ended:
                    ended.append(wires.pop(client))
                if client not in wires:
                    wires[client] = front.connect()
                wires[client].send(data)
            await turns(3)
            seen.append({each.name: n for each, n in front.state.shares.held.items()})  # type: ignore[attr-defined]
            seen += [(n, wire.ended, [a.status for a in wire.answers()]) for n, wire in sorted(wires.items())]
        for wire in (*wires.values(), *ended):
            wire.reset()
        await turns()
        assert front.state.shares.held == {}
        assert not front.state.connections
        return seen

    assert run(play(is_forgetful=False)) == run(play(is_forgetful=True))


@on_a_jumping_loop
async def test_a_lone_service_may_have_all_connections() -> None:
    """Where one service is alone, or the others want nothing beyond their part, nothing is refused."""
    front = Front(Limits(connections=8), cost_s=None)
    assert outcomes(*[ask(front, post(b"1")) for _ in range(8)]) == []
    assert front.state.shares.held == {front.app.endpoints[0]: 8}
    front = two_services(Limits(connections=8), share=3.0, cost_s=None)
    assert front.state.shares.guaranteed == dict(zip(front.app.endpoints, (1, 3), strict=True))
    assert outcomes(*[ask(front, OTHER) for _ in range(7)], ask(front, ECHO)) == []


@on_a_jumping_loop
async def test_a_connection_counts_for_the_service_that_it_asked_last() -> None:
    """A connection counts from the head of its first request on, also while it is idle, until it asks
    another service or closes; pages change nothing, and neither do requests behind others.
    """
    front = two_services(Limits(connections=8))
    echo, other = front.app.endpoints
    held = front.state.shares.held
    wire = ask(front, get("/livez"))
    assert held == {}
    wire.send(ECHO[:-1])
    assert held == {echo: 1}
    wire.send(ECHO[-1:])
    await turns()
    wire.send(get("/livez"))
    assert held == {echo: 1}
    wire.send(OTHER + ECHO)
    assert held == {other: 1}
    await turns()
    wire.send(ECHO)
    assert held == {echo: 1}
    await turns()
    assert [answer.status for answer in wire.answers()] == [200] * 6
    wire.reset()
    assert held == {}


@pytest.mark.parametrize(
    ("path", "body", "from_the_head_on"),
    [
        ("/v2/models/other/infer", {"inputs": [{"name": "x", "shape": [1], "datatype": "FP64", "data": [1]}]}, True),
        ("/v1/embeddings", {"model": "other", "input": "text"}, False),
    ],
)
@on_a_jumping_loop
async def test_requests_to_protocols_count_too(path: str, body: Any, from_the_head_on: bool) -> None:
    """A request at an address of a protocol counts for the model that the address names, or else for
    the one that its body names, and is refused in the protocol's words.
    """
    front = two_services(Limits(connections=4), cost_s=None)
    other = front.app.endpoints[1]
    request = post(json.dumps(body).encode(), path, "Content-Type: application/json")
    wire = ask(front, request[:-1])
    assert front.state.shares.held == ({other: 1} if from_the_head_on else {})
    wire.send(request[-1:])
    assert front.state.shares.held == {other: 1}
    assert outcomes(ask(front, OTHER), ask(front, OTHER)) == []
    late = ask(front, request)
    (answer,) = late.answers()
    assert (answer.status, answer.closes, b"too many open connections" in answer.body) == (503, True, True)
    assert late.ended
    assert front.outcomes["unavailable"] == 1


@on_a_jumping_loop
async def test_connections_that_end_take_no_room() -> None:
    """Connections that were refused, and are open only so that their answer arrives, count for
    nobody; if there are too many, the oldest is cut off and not a new client.
    """
    front = two_services(Limits(connections=4), cost_s=None)
    waiting = [ask(front, ECHO) for _ in range(3)]
    late = [ask(front, ECHO) for _ in range(30)]
    assert outcomes(*waiting, *late) == [FULL] * 30
    await turns()
    assert len(front.state.connections) == 8
    assert [wire.aborted for wire in late] == [True] * 25 + [False] * 5
    assert outcomes(ask(front, OTHER)) == []
    for wire in [*late, *waiting]:
        wire.reset()
    await turns()
    assert len(front.state.connections) == len(front.state.shares.held) == 1
    assert front.state.ending == {}


@on_a_jumping_loop
async def test_services_that_come_and_go_change_the_shares() -> None:
    """With a service more, one that has more connections than is left for it keeps them until it asks
    again; with a service less, its part is there for the others.
    """
    front = two_services(Limits(connections=8), cost_s=None)
    echo, other = front.app.endpoints
    front.app.on_new_routes.append(front.state.routes_changed)
    front.app.serve_at([echo])
    wires = [ask(front, ECHO) for _ in range(8)]
    assert outcomes(*wires) == []
    await turns()
    front.app.serve_at([echo, other])
    front.worker.finish()
    await turns()
    assert front.state.shares.guaranteed == {echo: 2, other: 2}
    for wire in wires:
        wire.send(ECHO)
    assert outcomes(*wires) == [FULL] * 2
    await turns()
    assert outcomes(ask(front, OTHER), ask(front, OTHER)) == []
    front.worker.finish()
    await turns()
    front.app.serve_at([other])
    for wire in wires[2:]:
        wire.send(OTHER)
    assert outcomes(*wires) == [FULL] * 2


# -- bodies


def uploads(front: Front, name: str, n: int, size: int) -> list[Wire]:
    """New clients that have sent nearly all of a body."""
    return [ask(front, chunked(b"x" * size, path=f"/models/{name}/predict")[:-5]) for _ in range(n)]


@pytest.mark.parametrize(("size", "statuses"), [(2 * LARGE_BODY, [200]), (3 * LARGE_BODY, [408])])
@on_a_jumping_loop
async def test_large_bodies_of_one_service_end_none_of_another(size: int, statuses: list[int]) -> None:
    """A body that comes slowly is not ended for those of another service, however fast these come,
    as long as its service has no more than what is guaranteed to it.
    """
    front = two_services(Limits(connections=8, body_bytes_in_flight=8 * LARGE_BODY), max_body_bytes=4 * LARGE_BODY)
    assert front.state.bodies.guaranteed == dict.fromkeys(front.app.endpoints, 2 * LARGE_BODY)
    assert front.state.bodies.share == LARGE_BODY // 2
    (slow,) = uploads(front, "other", 1, size)
    for _ in range(3):
        await asyncio.sleep(1.0)
        quick = uploads(front, "echo", 5, 3 * LARGE_BODY)
        told = {code_of(answer) for wire in quick for answer in wire.answers()}
        assert told <= {"request_timeout", "overloaded"}
        assert told
        for wire in quick:
            wire.reset()
    slow.send(b"0\r\n\r\n")
    await turns()
    assert [answer.status for answer in slow.answers()] == statuses
    assert front.state.bodies.held == 0


# -- the real thing


@contextmanager
def flood(running: RunningServer, request: bytes, clients: int) -> Iterator[list[int]]:
    """Clients that ask one service all the time, each on a new connection if it is refused."""
    over, statuses = threading.Event(), list[int]()

    def ask_again_and_again() -> None:
        while not over.is_set():
            with suppress(OSError), Client(running.port) as client:
                client.sock.settimeout(0.2)
                client.send(request)
                while not over.is_set():
                    with suppress(TimeoutError):
                        statuses.append(client.answer().status)
                        break
            over.wait(random.uniform(0.2, 0.8))  # not all at one moment

    threads = [threading.Thread(target=ask_again_and_again) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_one_service_hangs_and_is_flooded_and_the_other_is_answered() -> None:
    """While one of two services hangs, and clients send it large bodies on more connections than the
    server has, each request to the other one is answered, on new connections as on old ones.
    """
    limits = Limits(connections=48)
    with Gate() as gate, serving(App(models.scale, models.gated), limits) as running, ExitStack() as stack:
        kept, hung = [stack.enter_context(Client(running.port)) for _ in range(2)]
        hung.send(job(1, gate))
        gate.knocked()
        stack.callback(gate.open)
        large = job(2).partition(b"\r\n\r\n")[2] + b" " * 300_000
        with flood(running, post(large, GATED), clients=47) as statuses:
            running.wait_until(lambda: len(statuses) >= 12)  # those for whom there is no room
            until, asked = time.monotonic() + 0.5, 0
            while time.monotonic() < until or asked < 50:
                with Client(running.port) as new:
                    for client, item in ((new, b"1.5"), (kept, b"1.5" + b" " * 300_000)):
                        answer = client.ask(post(item))
                        assert (answer.status, answer.body) == (200, b"3.0")
                asked += 1
            assert set(statuses) == {503}
            page = kept.ask(get("/metrics"), "GET").body.decode()
            assert 'carpool_connections{model="gated"} 36.0' in page
