"""An id is in every answer, the client's own if it has sent one, so that its log and ours can be joined."""

from __future__ import annotations

import re

from carpool.http.exchange import Head, RequestIds
from tests.support.http.front import Front, chunked, get, post
from tests.support.http.jump import on_a_jumping_loop, turns

ID = "X-Request-Id: my-Id_7"


@on_a_jumping_loop
async def test_every_answer_has_the_client_s_id() -> None:
    """Good answers, pages and errors repeat the client's id, once, whether their heads are known or
    not; those to requests without one have an id of ours, each another.
    """
    front = Front()
    requests = {
        "good": post(b"1", "/predict", ID),
        "good, in chunks": chunked(b"1", headers=(ID,)),
        "HTTP/1.0": post(b"1", "/predict", ID, version="1.0"),
        "an error of the model": post(b"raise", "/predict", ID),
        "a page": get("/livez", ID),
        "a page's head": get("/livez", ID, method="HEAD"),
        "no such address": get("/nowhere", ID),
    }
    for what, request in requests.items():
        for _ in range(2):  # the second time the head is known
            wire = front.connect()
            wire.send(request)
            await turns(8)
            (answer,) = wire.answers(["HEAD" if request.startswith(b"HEAD") else ""])
            assert answer.headers["x-request-id"] == "my-Id_7", what
    ours = []
    for without in (
        post(b"1"),
        post(b"1"),
        post(b"1", "/predict", "X-Request-Id: no<id>"),
        chunked(b"1"),
        get("/livez"),
    ):
        wire = front.connect()
        wire.send(without)
        await turns(8)
        ours += [answer.headers["x-request-id"] for answer in wire.answers()]
    assert len(set(ours)) == 5
    assert len({each.partition("-")[0] for each in ours}) == 1
    assert all(re.fullmatch(r"[0-9a-f]{12}-[0-9]+", each) for each in ours)


def test_an_answer_s_own_id_stands() -> None:
    """An answer that has an id already, such as a model's own `Response`, keeps it alone."""
    head = Head(b"POST", b"/predict", {b"x-request-id": b"client"})
    assert head.echoed(((b"x-request-id", b"model"),), RequestIds()) == ((b"x-request-id", b"model"),)
    assert head.echoed((), RequestIds()) == ((b"x-request-id", b"client"),)
