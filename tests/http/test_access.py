"""Who may ask: keys on every route, names of the host, and pages of other sites; on both fronts."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.http.access import LOCAL_NAMES, Access, KeyRing, is_loopback, new_access
from carpool.http.app import App
from carpool.http.codec import Refusal
from carpool.http.exchange import Head
from tests.support.http import models
from tests.support.http.both_fronts import asked, both_fronts
from tests.support.http.front import get, post
from tests.support.http.net import Client
from tests.support.http.wire import Answer
from tests.support.properties import examples

KEY = "X-API-Key: secret"
Ask = Callable[..., Answer]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("alice:secret\nbob:other\n")
    return path


@pytest.fixture(scope="module")
def locked(keys: Path) -> Iterator[tuple[int, int]]:
    """The ports of both fronts of an app with keys."""
    with both_fronts(App(models.scale, api_keys=keys)) as (ours, asgi):
        yield ours.port, asgi.port


@pytest.fixture(params=[0, 1], ids=["own", "asgi"])
def port(request: pytest.FixtureRequest, locked: tuple[int, int]) -> int:
    """One of the fronts."""
    found: int = locked[request.param]
    return found


@pytest.mark.parametrize(
    "line",
    [
        "Authorization: Bearer secret",
        "authorization: bearer  secret",
        KEY,
        "X-API-Key: other",
        "Authorization: Basic " + base64.b64encode(b"any:secret").decode(),
    ],
)
def test_a_key_opens(port: int, line: str) -> None:
    """A key may be sent as bearer token, as X-API-Key, or as the password that a browser asks for."""
    assert asked(port, post(b"21", "/predict", line)).body == b"42.0"
    assert asked(port, get("/metrics", line), "GET").status == 200


@pytest.mark.parametrize(
    "line",
    [
        "X: y",
        "Authorization: Bearer wrong",
        "X-API-Key: wrong",
        "X-API-Key: secret2",
        "X-API-Key: ü",
        "Authorization: secret",
        "Authorization: Bearer",
        "Authorization: Basic !",
        "Cookie: key=secret",
    ],
)
def test_without_a_good_key_it_is_401(port: int, line: str) -> None:
    """No key, a wrong one and one in the wrong place are 401 with a challenge."""
    answer = asked(port, post(b"21", "/predict?key=secret&api_key=secret", line))
    assert answer.status == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert b'"code":"unauthorized"' in answer.body


def test_a_wrong_key_is_told_apart_from_none(port: int) -> None:
    """Who sends a key that the server does not have is told so, and not to send one."""
    said = [asked(port, post(b"21", "/predict", line)).body for line in ("X: y", "X-API-Key: wrong")]
    assert b"A key is needed" in said[0]
    assert b"This key is not known" in said[1]


def test_two_keys_at_once_are_400(port: int) -> None:
    """A header that says who asks may be there once only, or a proxy and we may read different ones."""
    assert asked(port, post(b"21", "/predict", KEY, "X-API-Key: wrong")).status == 400


PATHS = st.one_of(
    st.sampled_from(
        [
            "/",
            "/predict",
            "/predict/many",
            "/models/scale/predict",
            "/readyz",
            "/metrics",
            "/openapi.json",
            "/docs",
            "/dashboard",
            "/dashboard/events",
            "/dashboard/data",
            "/dashboard/history",
            "/docs/docs.js",
            "/livez/",
            "//livez",
            "/livez/..",
            "/Livez",
            "/x/../livez",
            "/livez;x",
            "/livez%00",
            "*",
        ]
    ),
    st.text("abcdefghijklmnopqrstuvwxyz/.%20", max_size=20).map("/".__add__),
)
METHODS = st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])


@examples(60)
@given(path=PATHS, method=METHODS, line=st.sampled_from(["X: y", "X-API-Key: no", "Authorization: Bearer no"]))
def test_no_route_answers_anything_but_401_without_a_key(
    locked: tuple[int, int], path: str, method: str, line: str
) -> None:
    """Whatever the path and the method, a request without a key is answered 401, but for /livez."""
    if path == "*":
        method = "OPTIONS"
    if path == "/livez":
        return
    for port in locked:
        answer = asked(port, get(path, line, method=method), method)
        assert answer.status == 401, (port, method, path)


def test_every_route_of_the_app_needs_a_key(locked: tuple[int, int], keys: Path) -> None:
    """Each path and method that the app has is 401 without a key."""
    app = App(models.scale, api_keys=keys, root_path="/api")
    tried = 0
    for path, methods in app.routes.items():
        for method in methods:
            head = Head(method, path, {})
            if path in (b"/livez", b"/api/livez") and method != b"POST":
                assert app.admit(head) is None
                continue
            refusal = app.admit(head)
            assert refusal is not None, (path, method)
            assert refusal.status == 401, (path, method)
            tried += 1
    assert tried > 30


def test_livez_needs_no_key_and_readyz_only_if_told(port: int, keys: Path) -> None:
    """/livez is for everybody; /readyz, too, where the server is told so."""
    assert asked(port, get("/livez"), "GET").status == 200
    assert asked(port, get("/readyz"), "GET").status == 401
    access = new_access(keys, (), (), open_readyz=True)
    assert access is not None
    assert access.check(Head(b"GET", b"/readyz", {})) is None
    with pytest.raises(Refusal):
        access.check(Head(b"POST", b"/readyz", {}))


def test_callers_are_counted_by_the_names_of_their_keys(port: int) -> None:
    """/metrics counts requests by the name of the key, and those that had none, and nothing else."""
    for _ in range(3):
        asked(port, post(b"21", "/predict", "X-API-Key: other"))
        asked(port, post(b"21", "/predict", "X-API-Key: noise"))
    text = asked(port, get("/metrics", KEY), "GET").body.decode()
    names = {
        line.partition('key="')[2].partition('"')[0] for line in text.splitlines() if line.startswith("carpool_caller")
    }
    assert names == {"alice", "bob"}
    assert 'carpool_caller_requests_total{key="bob"}' in text
    assert float(text.partition("\ncarpool_unauthorized_total ")[2].split()[0]) >= 3


def test_keys_change_while_a_connection_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the file has changed, the old key is refused on the same connection, and the new one is let in."""
    monkeypatch.setattr("carpool.http.server._LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("carpool.http.access._LOOK_EVERY_S", 0.05)
    path = tmp_path / "keys"
    path.write_text("alice:secret\n")
    with both_fronts(App(models.scale, api_keys=path)) as (ours, asgi):
        for front in (ours, asgi):
            path.write_text("alice:secret\n")
            wait_for_status(front.port, post(b"21", "/predict", KEY), 200)
            with Client(front.port) as client:
                assert client.ask(post(b"21", "/predict", KEY)).status == 200
                assert client.ask(post(b"21", "/predict", KEY)).status == 200
                path.write_text("alice:changed\n")
                wait_for_status(front.port, post(b"21", "/predict", "X-API-Key: changed"), 200)
                assert client.ask(post(b"21", "/predict", KEY)).status == 401


def test_heads_that_were_let_in_are_forgotten_when_a_key_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the moment when a key ends, fronts forget the heads that they know; not before, and once."""
    now = [86_399.0]
    monkeypatch.setattr("carpool.http.access.time.time", lambda: now[0])
    access = Access(KeyRing(None, "a:one expires=1970-01-02\nb:two"))
    forgotten: list[float] = []
    access.on_change.append(lambda: forgotten.append(now[0]))
    for now[0] in (86_399.5, 86_400.5, 86_401.0):
        access.refresh()
    assert forgotten == [86_400.5]


def wait_for_status(port: int, data: bytes, status: int) -> None:
    """Ask until the answer has a status."""
    until = time.monotonic() + 20
    while asked(port, data).status != status:
        assert time.monotonic() < until
        time.sleep(0.05)


def head(method: bytes = b"POST", path: bytes = b"/predict", **headers: str) -> Head:
    return Head(method, path, {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()})


def status_of(access: Access, asked: Head) -> int:
    try:
        answer = access.check(asked)
    except Refusal as refusal:
        return refusal.status
    return 200 if answer is None else answer.status


@pytest.mark.parametrize(
    "name", ["localhost", "localhost:8000", "LOCALHOST", "a.localhost:1", "127.0.0.1:80", "[::1]:8000"]
)
def test_local_names_reach_a_local_server(name: str) -> None:
    """A server on a loopback address answers to the names that this machine has for it."""
    assert status_of(Access(hosts=LOCAL_NAMES), head(host=name)) == 200


@pytest.mark.parametrize(
    "name", ["evil.com", "localhost.evil.com", "evil-localhost", "10.0.0.1", "", "[::2]", "127.0.0.1.nip.io"]
)
def test_other_names_do_not(name: str) -> None:
    """A page that has had its own name lead here is refused (DNS rebinding), except for /livez."""
    access = Access(hosts=LOCAL_NAMES)
    assert status_of(access, head(host=name)) == 421
    assert status_of(access, head(b"GET", b"/metrics", host=name)) == 421
    assert status_of(access, head(b"GET", b"/livez", host=name)) == 200


def test_names_may_be_given_with_a_star_and_no_port() -> None:
    """`*.example.com` stands for all names below, and `*` for any; a port or a path is an error."""
    access = Access(hosts=("*.example.com", "::1"))
    statuses = {
        name: status_of(access, head(host=name))
        for name in ("a.example.com", "a.b.example.com:1", "example.com", "[::1]")
    }
    assert statuses == {"a.example.com": 200, "a.b.example.com:1": 200, "example.com": 421, "[::1]": 200}
    assert status_of(Access(hosts=("*",)), head(host="what.ever")) == 200
    for wrong in ("example.com:80", "https://example.com", "a b", ""):
        with pytest.raises(ValueError, match="is no name of a host"):
            Access(hosts=(wrong,))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"sec_fetch_site": "same-origin", "origin": "https://behind.a.proxy"}, 200),
        ({"sec_fetch_site": "none"}, 200),
        ({"origin": "http://evil.com"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:8000"}, 200),
        ({"origin": "http://localhost:3000"}, 403),
        ({}, 200),
    ],
)
def test_pages_of_other_sites_may_not_post(headers: dict[str, str], status: int) -> None:
    """A page of another site can neither post to a local server nor change anything there."""
    access = Access(hosts=LOCAL_NAMES)
    assert status_of(access, head(host="localhost:8000", **headers)) == status


def test_an_allowed_site_may_ask_and_read_the_answer(loop: object) -> None:
    """With `cors_origin` a browser's question beforehand is answered, and every answer says who may
    read it; for other sites there is no such header.
    """
    with both_fronts(App(models.scale, cors_origin=("https://good.example",))) as (ours, asgi):
        for port in (ours.port, asgi.port):
            wish = ("Origin: https://good.example", "Access-Control-Request-Method: POST")
            before = asked(port, get("/predict", *wish, method="OPTIONS"), "OPTIONS")
            assert (before.status, before.headers["access-control-allow-origin"]) == (204, "https://good.example")
            assert "authorization" in before.headers["access-control-allow-headers"]
            for _ in range(2):  # the second time by the known head
                answer = asked(port, post(b"21", "/predict", "Origin: https://good.example"))
                assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "https://good.example")
            assert "origin" in answer.headers["vary"]
            failed = asked(port, post(b"{}", "/predict", "Origin: https://good.example"))
            assert (failed.status, failed.headers["access-control-allow-origin"]) == (422, "https://good.example")
            other = asked(port, get("/livez", "Origin: https://evil.example"), "GET")
            assert "access-control-allow-origin" not in other.headers
            assert asked(port, post(b"21", "/predict", "Origin: https://evil.example")).status == 403


def test_a_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key of the ring is compared, by `hmac.compare_digest`, whichever one is presented."""
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr("carpool.http.access.hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    ring = KeyRing(None, "a:1\nb:2\nc:3")
    assert [ring.caller_of(key, 0.0) for key in (b"1", b"3", b"4")] == ["a", "c", None]
    assert len(compared) == 9


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost", "x.localhost"])
def test_loopback_addresses(host: str) -> None:
    """Only this machine reaches these."""
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", ""])
def test_public_addresses(host: str) -> None:
    """Others may reach these."""
    assert not is_loopback(host)


def test_without_restrictions_there_is_nothing_to_ask() -> None:
    """An app without keys, names and sites has no `Access`, so no request pays for one."""
    assert App(models.scale).access is None


def test_under_a_root_path_addresses_are_found_with_and_without_it(keys: Path) -> None:
    """A proxy may cut its prefix off or leave it; only what stands behind it counts."""
    app = App(models.scale, root_path="/api/")
    app.refusing = None
    for path in (b"/livez", b"/api/livez", b"/api/openapi.json"):
        assert app.admit(Head(b"GET", path, {})) is None
    assert app.admit(Head(b"POST", b"/api/predict", {})) is None
    assert app.admit(Head(b"GET", b"/other/livez", {})) is not None
    with pytest.raises(ValueError, match="root_path must begin with a slash"):
        App(models.scale, root_path="api")


@pytest.mark.parametrize("root_path", ["", "/api", "/v1"])
def test_below_a_root_path_are_the_addresses_for_clients_and_no_others(root_path: str) -> None:
    """All addresses for clients, those of protocols among them, are below the root path as well, and what is for those
    who run the server (orders, metrics, dashboard) is not, so that a rule of a proxy keeps all of it.
    """
    app = App(models.scale, root_path=root_path)
    app.refusing = None
    plain = App(models.scale)
    ours = [(method, path) for path, methods in plain.routes.items() for method in methods]
    theirs = [(each.route.method.encode(), each.route.path.encode()) for each in plain.protocol_routes()]
    assert len(theirs) > 5
    for method, path in [*ours, *theirs]:
        assert app.admit(Head(method, path, {})) is None, path
        if path == b"*":
            continue
        below = app.admit(Head(method, root_path.encode() + path, {}))
        is_kept = re.match(rb"/(metrics|dashboard|admin)", path) is not None
        assert (below is not None) is (is_kept and root_path != ""), path
        assert below is None or below.status == 404
