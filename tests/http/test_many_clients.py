"""Many clients at once, through real sockets and worker processes: nobody loses an answer or gets another's."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
import uvloop

from carpool import Service, Stage
from tests.support.http import models
from tests.support.http.front import post
from tests.support.processes import alive, children
from tests.support.serving import serve

CLIENTS = 64
CALLS = 2_000

service = Service(Stage(models.Scale, max_batch_size=64, workers=2), name="scale")


async def client(port: int, number: int) -> list[tuple[float, bytes]]:
    """Calls one after the other on one connection; what was answered wrongly, with what was asked."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    wrong = []
    for call in range(CALLS):
        value = number * 10_000.0 + call
        writer.write(post(json.dumps(value).encode()))
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: (\d+)\r\n", head)
        assert length, head
        body = await reader.readexactly(int(length[1]))
        if not head.startswith(b"HTTP/1.1 200 OK\r\n") or json.loads(body) != 2 * value:
            wrong.append((value, body))
    writer.close()
    await writer.wait_closed()
    return wrong


@pytest.mark.slow
def test_every_client_gets_its_own_answers() -> None:
    """64 clients that keep their connections and call 2,000 times each get the right answers, which
    are counted once.
    """

    async def main(port: int) -> list[tuple[float, bytes]]:
        wrong = await asyncio.gather(*[client(port, number) for number in range(CLIENTS)])
        return [each for some in wrong for each in some]

    with serve(f"{__name__}:service") as served:
        workers = children(served.process.pid)
        assert len(workers) == 3  # two workers and the guard
        assert uvloop.run(main(served.port)) == []
        metrics = served.ask("GET", "/metrics")[1].decode()
        counted = re.findall(r'carpool_requests_total\{model="scale",outcome="(\w+)"\} ([1-9].*)', metrics)
        assert [(outcome, float(n)) for outcome, n in counted] == [("ok", CLIENTS * CALLS)]
        assert children(served.process.pid) == workers  # none was replaced
    assert served.process.returncode == 0
    assert not any(alive(pid) for pid in workers)
