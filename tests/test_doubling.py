"""Twice as much takes about twice as long: in each reader, each writer and the queue.

A reader or writer joins with a function that makes an input of `n` things and returns the work on it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from carpool.client.messages import EventReader, LineSplitter
from carpool.client.score.inputs import Input
from carpool.client.score.outputs import Answer, LineRows, SheetRows, done_in
from carpool.engine.allowance import Allowance
from carpool.engine.core.queue import Queue
from carpool.engine.drive.streams import StreamWindow
from carpool.engine.request import Lane, Request
from carpool.engine.wire.payload import JSON, MSGPACK
from carpool.errors import CarpoolError
from carpool.frames import Pandas
from carpool.frames.sheets import as_sheet, check_size
from carpool.http import converted, entries
from carpool.http.bulk import BulkItems
from carpool.http.compression import expanded
from carpool.http.items import split
from carpool.http.protocols.instances import records_of
from carpool.http.protocols.openai_text import Choice, ChoiceTerms
from carpool.http.protocols.tensors import from_binary, from_json, to_binary
from carpool.openai import Delta
from tests.support.opcodes import opcodes
from tests.support.pipelines import pipeline_of, stage

Work = Callable[[], object]


def _pieces(data: bytes, size: int = 512) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def _fed(feed: Callable[[bytes], object], data: bytes, size: int = 512) -> Work:
    pieces = _pieces(data, size)
    return lambda: [feed(piece) for piece in pieces]


# -- the client


def many_events(n: int) -> Work:
    return _fed(EventReader().feed, b"data: 1\n\n" * n)


def a_long_event(n: int) -> Work:
    return _fed(EventReader().feed, b"data: " + b"x" * 64 * n + b"\n\n", 64)


def an_event_of_many_lines(n: int) -> Work:
    return _fed(EventReader().feed, b"data: 1\n" * n + b"\n")


def many_lines(n: int) -> Work:
    return _fed(LineSplitter().feed, b"1\n" * n)


def a_long_line(n: int) -> Work:
    return _fed(LineSplitter().feed, b"x" * 64 * n + b"\n", 64)


# -- bodies of the server


def _bulk() -> BulkItems:
    """Return a bulk request for which there is no room, so that all that comes is kept."""
    core = pipeline_of(stage(4))
    nothing = lambda *_, **__: None  # noqa: E731
    names = ("watch_silence", "write_part", "end_parts", "want_more", "hold", "leave_body_unread")
    exchange: Any = SimpleNamespace(head=None, stream=None, **dict.fromkeys(names, nothing))
    endpoint = SimpleNamespace(weigher=None)
    lane = Lane(-1, None, 0)
    ask: Any = SimpleNamespace(endpoint=endpoint, responder=None, format=1, accept=1, timeout_s=inf, lane=lane)
    driver: Any = SimpleNamespace(core=core, loop=SimpleNamespace(call_later=nothing), clock=lambda: 0.0)
    items = BulkItems(exchange, ask, driver, StreamWindow(8, 8), 2**40, nothing)
    items.pause(is_paused=True)
    return items


def bulk_of_many_lines(n: int) -> Work:
    return _fed(_bulk().feed, b"1\n" * n)


def bulk_of_a_long_line(n: int) -> Work:
    return _fed(_bulk().feed, b"x" * 64 * n, 64)


def a_list(n: int) -> Work:
    body = b"[" + b",".join([b'"x"'] * n) + b"]"
    return lambda: split(body, JSON, Allowance(len(body), items=n))


def a_list_of_lists(n: int) -> Work:
    body = b"[" + b",".join([b"[1,2,3]"] * n) + b"]"  # more commas than items: they are told apart
    return lambda: split(body, JSON, Allowance(len(body), items=n))


def a_list_in_msgpack(n: int) -> Work:
    body = msgspec.msgpack.encode(["x"] * n)
    return lambda: split(body, MSGPACK, Allowance(len(body), items=n))


def a_form_like_its_boundary(n: int) -> Work:
    content = b"\r\n--boundarx" * n + b"\r" * n + b"\r\n-" * n
    body = b'--boundary\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + content + b"\r\n--boundary--\r\n"
    return lambda: converted.parts_of(body, b"multipart/form-data; boundary=boundary")


def a_form_of_long_headers(n: int) -> Work:
    body = b"--b\r\n" + b"a: b\r\n" * n + b"\r\n\r\n--b--\r\n"

    def read() -> None:
        with contextlib.suppress(CarpoolError):  # too long headers, which it counts
            converted.parts_of(body, b"multipart/form-data; boundary=b")

    return read


def a_compressed_body(n: int) -> Work:
    import gzip

    body = gzip.compress(Random(1).randbytes(n))
    return lambda: expanded(body, b"gzip", 2**40)


def records_with_names_of_their_own(n: int) -> Work:
    class Tab(Pandas):
        def predict(self, frame: Any) -> list[float]:
            return [1.0] * len(frame)

    body = json.dumps([{f"c{i}": 1} for i in range(n)]).encode()

    def read() -> None:
        with contextlib.suppress(CarpoolError):  # too few columns in common
            Tab._readers.decode("application/json", body)

    return read


def records(n: int) -> Work:
    class Tab(Pandas):
        def predict(self, frame: Any) -> list[float]:
            return [1.0] * len(frame)

    body = json.dumps([{"a": i, "b": "x"} for i in range(n)]).encode()
    return lambda: Tab._readers.decode("application/json", body)


def a_sheet(n: int) -> Work:
    body = b"a,b\n" + b'1,"x"\n' * n
    return lambda: check_size(body, as_sheet(body))


def a_sheet_of_many_columns(n: int) -> Work:
    body = b",".join(b"c%d" % i for i in range(n)) + b"\n" + b",".join([b"1"] * n) + b"\n"
    return lambda: check_size(body, as_sheet(body))


def columns_to_records(n: int) -> Work:
    return lambda: records_of(["a", "b"], [[1, "x"]] * n, Allowance(2**40))


def a_tensor_of_texts(n: int) -> Work:
    return lambda: from_json("x", "BYTES", [n], ["a"] * n, Allowance(2**40))


def a_nested_tensor(n: int) -> Work:
    return lambda: from_json("x", "FP32", [n, 2], [[1.0, 2.0]] * n, Allowance(2**40))


def a_binary_tensor_of_texts(n: int) -> Work:
    data = memoryview(b"\x01\x00\x00\x00a" * n)
    return lambda: from_binary("x", "BYTES", [n], data, Allowance(2**40))


# -- answers of the server


def tensor_in_binary(n: int) -> Work:
    tensor = from_json("x", "BYTES", [n], ["a"] * n, Allowance(2**40))
    return lambda: b"".join(to_binary(tensor))


def many_parts_that_may_stop(n: int) -> Work:
    choice = Choice(ChoiceTerms(["a" * 900 + "b"], None, None))
    return lambda: [choice.add(Delta("a")) for _ in range(n)]


def lines_that_look_like_errors(n: int) -> Work:
    results = [b'{"result":' * 20 + b'{"error":1}' + b"}" * 20] * n
    return lambda: entries.of_results(results)


def a_listed_answer(n: int) -> Work:
    return lambda: (entries.listed([b"1"] * n, JSON), entries.listed([b"1"] * n, MSGPACK))


# -- files of rows


def _written(kind: str, data: bytes, folder: Path) -> Input:
    path = folder / f"rows{len(data)}.{kind}"
    path.write_bytes(data)
    return Input(str(path), kind)


def rows_of_ndjson(n: int, folder: Path) -> Work:
    file = _written("ndjson", b'{"a":1}\n' * n, folder)
    return lambda: list(file.rows())


def rows_of_csv(n: int, folder: Path) -> Work:
    file = _written("csv", b"a,b\n" + b'1,"x"\n' * n, folder)
    return lambda: list(file.rows())


def a_long_field_of_csv(n: int, folder: Path) -> Work:
    file = _written("csv", b'a\n"' + b"x\n" * n + b'"\n', folder)
    return lambda: list(file.rows())


def what_is_done_in_ndjson(n: int, folder: Path) -> Work:
    path = folder / f"done{n}.ndjson"
    path.write_bytes(b'1\n{"error":{"message":"no"}}\n' * n)
    return lambda: done_in(str(path), "ndjson")


def answers_in_ndjson(n: int) -> Work:
    rows, answers = LineRows(), [Answer(b'{"a":1}', is_error=False)] * n
    return lambda: rows.written(rows.fitted(answers))


def answers_in_csv(n: int) -> Work:
    rows, answers = SheetRows([]), [Answer(b'{"a":1,"b":[1,2]}', is_error=False)] * n
    return lambda: [rows.written(rows.fitted(answers[at : at + 8])) for at in range(0, n, 8)]


# -- the queue


def _filled(n: int, place: Callable[[Request, Random], None]) -> Queue:
    queue, random = Queue(max_size=n), Random(1)
    for i in range(n):
        request = Request(i, inf, None, 1)
        request.arrived = request.admitted = float(i)
        place(request, random)
        queue.push([request])
    return queue


def _take(queue: Queue) -> None:
    now = 0.0
    while queue.count:
        now += 1.0
        queue.earliest_due, queue.earliest_deadline, queue.oldest_arrival, queue.peek(4)
        new = Request(0, now, None, 1)
        new.lane, new.due = Lane(0, -1, 0), now
        queue.ahead_of(new, now)
        queue.take(4, now)


def many_keys(n: int) -> Work:
    def place(request: Request, random: Random) -> None:
        request.lane = Lane(0, request.item, 0)

    queue = _filled(n, place)
    return lambda: _take(queue)


def many_priorities(n: int) -> Work:
    def place(request: Request, random: Random) -> None:
        request.lane = Lane(random.randrange(-100, 101), random.randrange(n), 0)

    queue = _filled(n, place)
    return lambda: _take(queue)


def _hurried(request: Request, random: Random) -> None:
    request.deadline = random.uniform(1, 1000)
    request.due = min(request.deadline, random.uniform(1, 1000))


def many_deadlines(n: int) -> Work:
    queue = _filled(n, _hurried)
    return lambda: _take(queue)


def many_that_expire(n: int) -> Work:
    queue = _filled(n, _hurried)

    def expire() -> None:
        while queue.count:
            for request in queue.expired(queue.earliest_deadline):
                queue.remove(request)

    return expire


def many_that_are_cancelled(n: int) -> Work:
    queue = _filled(n, _hurried)
    waiting = list(queue)

    def cancel() -> None:
        for request in waiting[1:]:  # the first one stays, and those behind it go
            queue.remove(request)
            queue.peek(2)
            assert queue.earliest_deadline < inf and queue.oldest_arrival < inf

    return cancel


def many_that_wait_again(n: int) -> Work:
    queue = _filled(n, _hurried)
    taken = queue.take(n, 1.0)
    return lambda: queue.put_back(taken)


def many_that_make_room(n: int) -> Work:
    def place(request: Request, random: Random) -> None:
        request.lane = Lane(-1, random.randrange(max(1, n // 4)), 0)

    queue = _filled(n, place)
    new = Request(0, inf, None, 1)

    def evict() -> None:
        while found := queue.in_the_way(new, 1):
            queue.max_size -= len(found)
            for each in found:
                queue.evict(each)

    return evict


OF_CORE: list[Callable[[int], Work]] = [
    many_keys,
    many_priorities,
    many_deadlines,
    many_that_expire,
    many_that_are_cancelled,
    many_that_wait_again,
    many_that_make_room,
]
OF_READERS: list[Callable[[int], Work]] = [
    many_events,
    a_long_event,
    an_event_of_many_lines,
    many_lines,
    a_long_line,
    bulk_of_many_lines,
    bulk_of_a_long_line,
    a_list,
    a_list_of_lists,
    a_list_in_msgpack,
    a_form_like_its_boundary,
    a_form_of_long_headers,
    a_compressed_body,
    records_with_names_of_their_own,
    records,
    a_sheet,
    a_sheet_of_many_columns,
    columns_to_records,
    a_tensor_of_texts,
    a_nested_tensor,
    a_binary_tensor_of_texts,
    tensor_in_binary,
    many_parts_that_may_stop,
    lines_that_look_like_errors,
    a_listed_answer,
    answers_in_ndjson,
    answers_in_csv,
]
OF_FILES: list[Callable[[int, Path], Work]] = [
    rows_of_ndjson,
    rows_of_csv,
    a_long_field_of_csv,
    what_is_done_in_ndjson,
]


def _cpu_s(make: Callable[[int], Work], n: int, times: int = 3) -> float:
    """Return the least time of the processor that the work takes, of so many times."""
    took = []
    for _ in range(times):
        work = make(n)
        gc.collect()
        gc.disable()
        before = time.thread_time()
        work()
        took.append(time.thread_time() - before)
        gc.enable()
    return min(took)


def _check_opcodes(make: Callable[[int], Work]) -> None:
    """Compare bytecodes, which are the same on each machine."""
    make(10)()  # what is imported late
    small, large = opcodes(make(200)), opcodes(make(400))
    assert large < 2.5 * small + 500, (small, large)


def _check_time(make: Callable[[int], Work]) -> None:
    """Compare times of the processor for larger inputs, since what C code does is not counted."""
    least_s, n = 0.0, 500
    while least_s < 0.002 and n < 100_000:
        n *= 2
        least_s = _cpu_s(make, n)
    next_s = _cpu_s(make, 8 * n)
    if next_s >= 3 * 8 * least_s + 0.01:  # perhaps a step: the pages of large blocks are mapped anew each time
        assert _cpu_s(make, 24 * n, times=1) < 2 * 3 * next_s + 0.01, n


OF_ALL = pytest.mark.parametrize("make", [*OF_CORE, *OF_READERS], ids=lambda make: make.__name__)
OF_ALL_FILES = pytest.mark.parametrize("make", OF_FILES, ids=lambda make: make.__name__)


@OF_ALL
def test_twice_as_much_is_twice_the_work(make: Callable[[int], Work]) -> None:
    """The work of readers, writers and the queue is in proportion to what they get, whatever it is."""
    _check_opcodes(make)


@OF_ALL_FILES
def test_twice_as_many_rows_are_twice_the_work(make: Callable[[int, Path], Work], tmp_path: Path) -> None:
    """The work of the readers of files is in proportion to their rows."""
    _check_opcodes(lambda n: make(n, tmp_path))


@pytest.mark.slow
@OF_ALL
def test_eight_times_as_much_takes_no_more_than_so_many_times_as_long(make: Callable[[int], Work]) -> None:
    """The time of readers, writers and the queue is in proportion to what they get, C code included."""
    _check_time(make)


@pytest.mark.slow
@OF_ALL_FILES
def test_eight_times_as_many_rows_take_no_more_than_so_many_times_as_long(
    make: Callable[[int, Path], Work], tmp_path: Path
) -> None:
    """The time of the readers of files is in proportion to their rows, C code included."""
    _check_time(lambda n: make(n, tmp_path))


def test_what_is_quadratic_is_found() -> None:
    """Work that grows with the square of its input fails, in Python and in C."""

    def in_python(n: int) -> Work:
        return lambda: [i for i in range(n) for _ in range(n)]

    def in_c(n: int) -> Work:
        data = list(range(n))
        return lambda: [-1 in data for _ in range(n // 5)]

    with pytest.raises(AssertionError):
        _check_opcodes(in_python)
    with pytest.raises(AssertionError):
        _check_time(in_c)
