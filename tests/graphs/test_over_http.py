"""Graphs over HTTP: answers of several branches, errors, lists, early answers, OpenAPI, metrics, and the picture."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from carpool import Done, ForEach, Parallel, Response, Route, Service, Stage
from carpool.cli import graph_command
from carpool.cli.graph_command import as_mermaid, as_svg
from tests.graphs.models import as_it_is, fails, fails_on_seven, parity, plus_one, small, times_ten, up_to
from tests.graphs.over_http import asked
from tests.support.prepared import carpool_command


def halves(xs: list[int]) -> list[Done[float] | int]:
    return [Done(-x / 2) if x % 2 else x for x in xs]


def as_float(x: int) -> float:
    return 1.0 * x


def early_response(x: int) -> Any:
    return Done(Response("early", status=202)) if x < 0 else x


def responds(x: int) -> Any:
    return Response("part")


def early_text(x: int) -> Any:
    return Done("no number")


def _threads(model: Any, **settings: Any) -> Stage:
    return Stage(model, run_in="thread", **settings)


def services() -> list[Service]:
    return [
        Service(Parallel(_threads(plus_one), _threads(as_float)), name="pair"),
        Service(Parallel({"a\n": _threads(plus_one), "b": [], "c": ForEach(_threads(times_ten))}), name="odd"),
        Service(Parallel({"a": _threads(plus_one), "b": []}), name="named"),
        Service(_threads(up_to), ForEach(Parallel(_threads(plus_one), [])), name="crops"),
        Service(ForEach(_threads(plus_one), max_items=3), name="each"),
        Service(_threads(halves, max_batch_size=4), _threads(as_float), name="cascade"),
        Service(Route({"even": _threads(times_ten), "odd": []}, choose=parity), name="route"),
        Service(Parallel(_threads(fails), _threads(plus_one), errors="values"), name="values"),
        Service(Parallel(_threads(fails), _threads(plus_one)), name="raises"),
        Service(_threads(early_response), _threads(as_it_is), name="response"),
        Service(Parallel(_threads(responds)), name="responds"),
        Service(_threads(early_text), _threads(as_float), name="early_text"),
    ]


CASES: list[tuple[str, Any, int, Any]] = [
    ("pair", 3, 200, [4, 3.0]),
    ("pair", "x", 422, "invalid_item"),
    ("odd", [1, 2], 422, "invalid_item"),
    ("named", 3, 200, {"a": 4, "b": 3}),
    ("named", "x", 422, "invalid_item"),
    ("crops", 2, 200, [[1, 0], [2, 1]]),
    ("crops", 0, 200, []),
    ("each", [1, 2], 200, [2, 3]),
    ("each", [], 200, []),
    ("each", [1, "x"], 422, "invalid_item"),
    ("each", [1] * 4, 413, "too_large"),
    ("each", {"a": 1}, 422, "invalid_item"),
    ("cascade", 4, 200, 4.0),
    ("cascade", 3, 200, -1.5),
    ("route", 3, 200, 3),
    ("route", 4, 200, 40),
    ("route", "x", 422, "invalid_item"),
    ("values", 3, 200, [{"error": {"code": "model_error", "message": "The model failed on this item."}}, 4]),
    ("raises", 3, 500, "model_error"),
    ("response", 3, 200, 3),
    ("response", -3, 202, "early"),
    ("responds", 3, 500, "bad_result"),
    ("early_text", 3, 500, "bad_result"),
]


def test_answers_in_json_and_msgpack() -> None:
    async def main() -> None:
        async with asked(*services()) as client:
            for name, item, status, expected in CASES:
                for kind, read in (("json", json.loads), ("msgpack", msgspec.msgpack.decode)):
                    headers = {"accept": f"application/{kind}"}
                    answer = await client.post(f"/models/{name}/predict", json=item, headers=headers)
                    assert answer.status_code == status, (name, item, answer.text)
                    if status in (200, 202):
                        assert read(answer.content) == expected, (name, item)
                    else:
                        assert answer.json()["error"]["code"] == expected, (name, item)

    asyncio.run(main())


def test_msgpack_is_read_and_written_as_json_is() -> None:
    async def main() -> None:
        async with asked(*services()) as client:
            for name, item, status, expected in CASES:
                if status == 200:
                    body, headers = msgspec.msgpack.encode(item), {"content-type": "application/msgpack"}
                    answer = await client.post(f"/models/{name}/predict", content=body, headers=headers)
                    assert msgspec.msgpack.decode(answer.content) == expected, name

    asyncio.run(main())


def test_other_formats_of_a_join_are_refused() -> None:
    async def main() -> None:
        async with asked(*services()) as client:
            answer = await client.post("/models/pair/predict", json=3, headers={"accept": "application/x-npy"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")

    asyncio.run(main())


def test_lists_and_lines_of_items() -> None:
    async def main() -> None:
        async with asked(*services()) as client:
            many = await client.post("/models/pair/predict/many", json=[1, "x", 2])
            assert many.json()[::2] == [[2, 1.0], [3, 2.0]]
            assert many.json()[1]["error"]["code"] == "invalid_item"
            headers = {"content-type": "application/x-ndjson"}
            lines = await client.post("/models/named/predict", content=b"1\n2\n" * 200, headers=headers)
            assert list(map(json.loads, lines.text.splitlines())) == [{"a": 2, "b": 1}, {"a": 3, "b": 2}] * 200

    asyncio.run(main())


def test_openapi_says_what_branches_come_to() -> None:
    async def main() -> None:
        async with asked(*services()) as client:
            document = (await client.get("/openapi.json")).json()
            gives = {}
            for name in ("pair", "named", "crops", "each", "cascade"):
                post = document["paths"][f"/models/{name}/predict"]["post"]
                gives[name] = post["responses"]["200"]["content"]["application/json"]["schema"]
            assert [each["type"] for each in gives["pair"]["prefixItems"]] == ["integer", "number"]
            named = document["components"]["schemas"][gives["named"]["$ref"].rpartition("/")[2]]
            assert named["properties"]["a"] == {"type": "integer"}
            assert gives["each"] == {"type": "array", "items": {"type": "integer"}}
            assert gives["cascade"] == {"type": "number"}

    asyncio.run(main())


def test_statistics_and_metrics_count_early_answers_and_places() -> None:
    shared = _threads(plus_one)
    service = Service(_threads(small, max_batch_size=4), shared, shared, name="counted")

    async def main() -> None:
        async with asked(service) as client:
            for item in (1, 2, 4):
                await client.post("/predict", json=item)
            text = (await client.get("/metrics")).text
            assert 'carpool_early_answers_total{model="counted",stage="small"} 1.0' in text
            for place in ("plus_one", "plus_one 2"):
                line = f'carpool_place_requests_total{{model="counted",place="{place}",stage="plus_one"}} 2.0'
                assert line in text
            stages = (await client.get("/dashboard/data")).json()["figures"]["services"][0]["stages"]
            assert stages[0]["early_answers"] == 1 and stages[1]["places"] == [2, 2]

    asyncio.run(main())


DRAWN = Service(
    as_it_is,
    Route({"even": [times_ten, Stage(plus_one, name="last")], 'o"dd': []}, choose=parity),
    Parallel({"a": Stage(plus_one), "b": ForEach(Stage(fails_on_seven, max_batch_size=4, workers=2))}),
    name="a<b",
)


def test_the_picture_has_each_stage_and_each_branch() -> None:
    text = as_mermaid(DRAWN)
    assert text.startswith("flowchart LR\n")
    for part in ("as_it_is<br/>1 worker, single items", "fails_on_seven<br/>2 workers", '|"even"|', "o#quot;dd"):
        assert part in text
    assert text.count("-->") == 14
    svg = as_svg(DRAWN, {"fails_on_seven": "12/s & more"})
    assert "<title>a&lt;b</title>" in svg and "12/s &amp; more" in svg and svg.count("<rect") == 12
    assert svg.startswith("<svg ") and svg.endswith("</svg>\n")


def test_a_stage_at_two_places_is_marked() -> None:
    shared = Stage(plus_one)
    assert "class n1,n2 shared0" in as_mermaid(Service(shared, shared))


def test_the_command_draws_a_running_service(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rates and times are those of the time between two looks at the server."""
    histogram = {"counts": [0, 0], "sum_s": 0.0}
    stage = {"name": "as_it_is", "batch_sizes": {"1": 3}, "queue": histogram, "compute": histogram}
    later = {**stage, "batch_sizes": {"1": 5, "4": 2}, "compute": {"counts": [3, 1], "sum_s": 0.008}}
    looks = iter([(10.0, stage), (12.0, later)])
    monkeypatch.setattr(graph_command, "_figures", lambda *_: (lambda t, s: {"time": t, "stages": [s]})(*next(looks)))
    graph_command.graph("tests.graphs.test_over_http:DRAWN", url="http://127.0.0.1:1", watch_s=0.0)
    assert "as_it_is<br/>5/s, - waiting, 2 ms a batch" in capsys.readouterr().out


def test_the_command_draws(tmp_path: Path) -> None:
    command = ("graph", "tests.graphs.test_over_http:DRAWN")
    assert carpool_command(*command).stdout == as_mermaid(DRAWN)
    carpool_command(*command, "--out", str(tmp_path / "graph.svg")).check_returncode()
    assert (tmp_path / "graph.svg").read_text() == as_svg(DRAWN)
