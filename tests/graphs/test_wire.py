"""Several payloads as one, what a worker may say of its results' ways, and a worker that joins a graph."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool import Done, Route, Service, Stage
from carpool.engine.core.batch import DONE_EARLY, Batch
from carpool.engine.core.graph import Node, Onward
from carpool.engine.drive.pools import check_takers, errors_of, turns_of
from carpool.engine.request import Request
from carpool.engine.wire.frame import Frame, FrameError, FrameKind
from carpool.engine.wire.outcome import WAY, FailureReport, Outcome, pack_report
from carpool.engine.wire.payload import JSON, LARGE, MSGPACK, RAW, Memory, Scalars, detached, dump, join, load, parts_in
from carpool.engine.worker.own import Goes, Spot, Ways
from carpool.errors import ModelError
from carpool.service.content import Payloads
from tests.graphs.models import parity, times_ten

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.lists(VALUES), st.booleans())
def test_payloads_are_one_and_are_taken_apart_again(values: list[Any], is_tuple: bool) -> None:
    whole = join([dump(value) for value in values], None, is_tuple=is_tuple)
    assert load(whole) == (tuple(values) if is_tuple else values)
    if values:
        parts = parts_in(whole)
        assert parts is not None and [load(part) for part in parts] == values


@given(st.dictionaries(st.text(), VALUES))
def test_payloads_with_names_are_a_dict(values: dict[str, Any]) -> None:
    assert load(join([dump(value) for value in values.values()], [*values])) == values


def test_large_buffers_stay_as_they_are() -> None:
    small, large = np.arange(3.0), np.arange(float(LARGE))
    part = dump(large)
    whole = join([dump(small), part, join([dump(large), dump("x")], None)], None)
    assert any(buffer is part[1] for buffer in whole)  # type: ignore[index, union-attr]
    (again,) = detached([whole], Memory())
    for found in (load(whole), load(again)):
        assert (found[0] == small).all() and (found[1] == large).all()  # type: ignore[index]
        assert (found[2][0] == large).all() and found[2][1] == "x"  # type: ignore[index]


@pytest.mark.parametrize("payload", [b"x", 3, "text", pickle.dumps([1]), [b"", b"bytes"], dump(np.arange(3.0))])
def test_others_have_no_parts(payload: Any) -> None:
    assert parts_in(payload) is None


@pytest.mark.parametrize("damaged", [b"\2", b"\2\xc1", b"\2\x93\xc0\xc2\x91\x91\xcd\x01\x00"])
def test_what_is_damaged_is_refused(damaged: bytes) -> None:
    with pytest.raises(ValueError, match="payload of several parts"):
        load([damaged, b"short"])


def test_what_a_worker_has_not_made_right_fails_its_request() -> None:
    content, block = Payloads(Any), SimpleNamespace(names=None, is_tuple=True)
    for accept, results in ((JSON, [b"1", [b"2", b"3"]]), (JSON, [1.0]), (RAW, [b"1"])):
        with pytest.raises(ModelError, match="cannot be put together"):
            content.joined(block, results, accept)
    with pytest.raises(ModelError, match="a list cannot be read"):
        content.items([b"\2\xc1", b""], 0, 9)


@pytest.mark.parametrize("n", [0, 1, 15, 16, 65_535, 65_536])
def test_answers_of_any_length_are_spliced(n: int) -> None:
    content = Payloads(Any)
    names = [f'n"{i}' for i in range(n)]
    for block in (SimpleNamespace(names=None, is_tuple=False), SimpleNamespace(names=names)):
        expected: Any = [*range(n)] if block.names is None else dict(zip(names, range(n), strict=True))
        for accept, coder in ((JSON, msgspec.json), (MSGPACK, msgspec.msgpack)):
            spliced = content.joined(block, [coder.encode(i) for i in range(n)], accept)
            assert coder.decode(spliced) == expected


def _asked(outcomes: list[int], payloads: Any = None, accept: int = 0, ends: bool = False) -> tuple[Frame, Batch]:
    """A reply with these outcomes, and the batch of a node behind which two ways lead on."""
    node = object.__new__(Node)
    node.ways, node.is_last, node.ends, node.block = [Onward(None, False), Onward(node, True)], False, ends, None
    requests = []
    for i in range(len(outcomes)):
        request = Request(i, 9.0)
        request.id, request.node, request.accept = i + 1, node, accept
        requests.append(request)
    frame = Frame(FrameKind.REPLY, 1, [request.id for request in requests], bytes(outcomes))
    frame.payloads = payloads or [pack_report(FailureReport("why"))] * len(outcomes)
    return frame, Batch(1, 0, 0, requests, len(requests), "", 0.0)


def test_turns_are_read_off_a_reply() -> None:
    frame, batch = _asked([Outcome.OK, Outcome.DONE, WAY, WAY + 1, Outcome.MODEL_ERROR])
    assert turns_of(frame, batch) == {1: DONE_EARLY, 2: Onward(None, False), 3: (batch.requests[0].node, True)}
    assert {*(errors_of(frame, batch) or ())} == {4}


def test_a_reply_of_no_turns_has_none() -> None:
    assert turns_of(*_asked([Outcome.OK, Outcome.MODEL_ERROR])) is None


def test_a_way_that_there_is_not_is_refused() -> None:
    with pytest.raises(FrameError, match="takes way 2 of 2"):
        turns_of(*_asked([Outcome.OK, WAY + 2]))


def test_an_outcome_that_there_is_not_is_refused() -> None:
    with pytest.raises(FrameError, match="outcome 9"):
        errors_of(*_asked([Outcome.OK, 9]))


@pytest.mark.parametrize(("outcome", "is_refused"), [(Outcome.DONE, True), (WAY, True), (WAY + 1, False), (0, False)])
def test_a_scalar_for_a_caller_that_takes_bytes_is_refused(outcome: int, is_refused: bool) -> None:
    frame, batch = _asked([outcome], Scalars([1.0]), JSON)
    if is_refused:
        with pytest.raises(FrameError, match="a scalar for a caller"):
            check_takers(frame, batch)
    else:
        check_takers(frame, batch)


def test_ways_are_found_through_routes_in_routes() -> None:
    ways = Ways(None, {"a": 0, "b": Ways(parity, {"even": 1, "odd": 2})})
    assert [ways.find(name, 3) for name in ("a", "b")] == [0, 2]
    spot = Spot((Goes.ON, Goes.ANSWER, Goes.LIST), ways)
    assert spot.turn(Done(7)) == (None, 0, 7)
    assert SimpleNamespace(turn=spot.turn(5)).turn[2].error.code == "bad_result"


def _parity_of_next(x: int) -> str:
    return parity(x)


def far(xs: list[int]) -> list[Done[int] | int]:
    return [Done(-x) if x == 9 else x + 1 for x in xs]


FAR = Stage(far, join=True, workers=0, max_batch_size=4)
JOINED = Service(
    FAR, Route({"even": FAR, "odd": Stage(times_ten, run_in="thread")}, choose=_parity_of_next), name="joined"
)


def test_a_worker_that_joins_serves_all_places_of_its_stage(tmp_path: Path) -> None:
    address = str(tmp_path / "join")
    with JOINED.run(join=address) as s:
        command = [sys.executable, "-m", "carpool", "worker", f"{__name__}:JOINED", "--connect", address]
        worker = subprocess.Popen(command)
        try:
            assert [s.predict(x) for x in (1, 2, 3, 9)] == [3, 30, 5, -9]
        finally:
            worker.terminate()
            worker.wait(20)
