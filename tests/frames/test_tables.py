"""Models of tables: rows of all requests in one frame, and each request gets exactly the answers of its own rows."""

from __future__ import annotations

import csv
import io
import json
import random
import subprocess
import sys
from functools import cache
from typing import Any, ClassVar

import msgspec
import pytest

import carpool
from carpool import HTTPRequest, ModelError, Service, Stage, ValidationError
from carpool.frames import Pandas, Polars
from carpool.frames.sheets import as_sheet
from carpool.http.app import App
from carpool.model import traits_of
from tests.effort import slow_where
from tests.support.http.front import get, post
from tests.support.http.net import Client, serving
from tests.support.late import Late

pd, pl, pa, tables = Late("pandas"), Late("polars"), Late("pyarrow"), Late("tests.support.tables")

CSV, JSON, MSGPACK, ARROW = (
    "text/csv",
    "application/json",
    "application/msgpack",
    "application/vnd.apache.arrow.stream",
)


@cache
def polars_sum() -> Any:
    """The same model as `tables.Sum`, for polars."""

    class PolarsSum(Polars):
        columns: ClassVar[dict[str, Any]] = {"a": pl.Float64, "b": pl.Int64, "plan": pl.String}

        def setup(self) -> None:
            self.calls: list[int] = []

        def predict(self, frame: pl.DataFrame) -> pl.DataFrame:
            self.calls.append(len(frame))
            if (frame["a"] == 666).any():
                raise RuntimeError("not this one")
            return frame.select(sum=pl.col("a") + pl.col("b"), plan="plan")

    return PolarsSum


@pytest.fixture
def cls(request: pytest.FixtureRequest) -> Any:
    """A model of sums, by its name."""
    return polars_sum() if request.param == "PolarsSum" else tables.Sum


def made(cls: type[Any]) -> Any:
    model = cls()
    model.setup()
    return model


def of(body: Any, kind: str = CSV) -> HTTPRequest:
    return HTTPRequest(body if type(body) is bytes else body.encode(), headers={"Content-Type": kind})


def through(model: Any, *requests: HTTPRequest, accept: str = JSON) -> list[Any]:
    """What each request is answered: an error, or a body."""
    items = model.decode(list(requests))
    sound = [item for item in items if not isinstance(item, Exception)]
    results = iter(model.predict(sound) if sound else [])
    answers = [item if isinstance(item, Exception) else next(results) for item in items]
    bodies = [a if isinstance(a, Exception) else model.encode([a], accept)[0] for a in answers]
    return [json.loads(b) if isinstance(b, bytes) and accept == JSON else b for b in bodies]


def arrow(**columns: list[Any]) -> bytes:
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


@pytest.mark.parametrize("cls", ["Sum", "PolarsSum"], indirect=True)
def test_all_formats_share_one_call(cls: Any) -> None:
    """CSV, records, one record, msgpack and Arrow share one call, and each request gets its own
    rows' answers, in order.
    """
    model = made(cls)
    answers = through(
        model,
        of("a,b,plan\n1,2,x\n3,4,y\n"),
        of('[{"a": 5, "b": 6, "plan": "z"}, {"plan": null, "b": 8, "a": 7.5}]', JSON),
        of('{"a": 9, "b": 10, "plan": "w"}', JSON),
        of("plan,b,a,more\r\nq,12,11,0\r\n"),
        of(msgspec.msgpack.encode([{"a": 13.0, "b": 14, "plan": "m"}]), MSGPACK),
        of(arrow(b=[16, 18], a=[15.0, 17.0], plan=["r", "s"], other=[1, 2]), ARROW),
        of("a,b,plan\n19,20,last"),
    )
    assert answers == [
        [{"sum": 3.0, "plan": "x"}, {"sum": 7.0, "plan": "y"}],
        [{"sum": 11.0, "plan": "z"}, {"sum": 15.5, "plan": None}],
        {"sum": 19.0, "plan": "w"},
        [{"sum": 23.0, "plan": "q"}],
        [{"sum": 27.0, "plan": "m"}],
        [{"sum": 31.0, "plan": "r"}, {"sum": 35.0, "plan": "s"}],
        [{"sum": 39.0, "plan": "last"}],
    ]
    assert model.calls == [10]


BODIES = {
    "mark": (b"\xef\xbb\xbfa,b,plan\n1,2,x\n", ["x"]),
    "quoted": (b'"a","b","plan"\n"1","2","x,y"\n', ["x,y"]),
    "lines": (b'a,b,plan\n1,2,"x\ny"\n3,4,z', ["x\ny", "z"]),
    "quotes": (b'a,b,plan\n1,2,"x ""y"" z"\n', ['x "y" z']),
    "inches": (b'a,b,plan\n1,2,5" pipe\n3,4,3" pipe\n', ['5" pipe', '3" pipe']),
    "blank lines": (b"\na,b,plan\n\n1,2,x\n\n  \n3,4,y\n\n", ["x", "y"]),
    "no end": (b"a,b,plan\n1,2,x", ["x"]),
    "windows": (b"a,b,plan\r\n1,2,x\r\n3,4,y\r\n", ["x", "y"]),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_reads_in_company_as_alone(name: str) -> None:
    """Whatever quotes, line ends and marks a body has, it reads in company as alone."""
    body, plans = BODIES[name]
    plain, model = of("a,b,plan\n0,0,plain\n0,0,plain\n"), made(tables.Sum)
    (alone,) = through(model, of(body))
    company = through(model, plain, of(body), plain, of(body))
    assert [row["plan"] for row in alone] == plans
    assert company[1] == company[3] == alone
    assert company[0] == company[2] == [{"sum": 0.0, "plan": "plain"}] * 2


BAD = {
    "no number": (of("a,b,plan\nx,2,y\n"), "row 1 of the table, column 'a': 'x' does not fit [Ff]loat64"),
    "half a number": (of("a,b,plan\n1,2.5,y\n"), "row 1 of the table, column 'b': '2.5' does not fit [Ii]nt64"),
    "missing number": (of("a,b,plan\n1,,y\n"), "row 1 of the table, column 'b': '' does not fit int64"),
    "empty": (of(""), "the body is empty"),
    "blank": (of("\xef\xbb\xbf".encode("latin-1") + b" \n"), "the body is empty"),
    "header alone": (of("a,b,plan\n"), "the table has no rows"),
    "a field too many": (of("a,b,plan\n1,2,x\n1,2,x,4\n"), "row 2 of the table has 4 fields, but its header has 3"),
    "a field too few": (of("a,b,plan\n1,2\n"), "row 1 of the table has 2 fields, but its header has 3"),
    "columns": (of("a,plan\n1,x\n"), "the table lacks the columns b; it has 'a', 'plan'$"),
    "semicolons": (
        of("a;b;plan\n1;2;x\n"),
        "lacks the columns a, b, plan; it has 'a;b;plan': separate the fields with commas",
    ),
    "a bad cell": (of("a,b,plan\n" + "1,2,x\n" * 9 + "zz,3,y\n1,zz,\n"), r"row 10 of the table, column 'a': 'zz' does"),
    "a bad cell beside quotes": (
        of('a,b,plan\n1,2,"x\n,"\n1,z,y\n'),
        "row 2 of the table, column 'b': 'z' does not fit",
    ),
    "an open quote": (of('a,b,plan\n1,2,"x\n'), "the table"),
    "no text": (of(b"a,b,plan\n1,2,\xff\n"), "the table cannot be read"),
    "no JSON": (of("[", JSON), "not valid json"),
    "a wrong type": (of('[{"a": "x", "b": 1, "plan": ""}]', JSON), r"Expected `float(.*)`, got `str`.*\$\[0\].a"),
    "a record without": (of('[{"a": 1}]', JSON), "missing required field `b`"),
    "no record": (of("3", JSON), "Expected"),
    "no records": (of("[]", JSON), "the table has no rows"),
    "too large": (of('{"a": 1, "b": 99999999999999999999, "plan": ""}', JSON), "the table"),
    "no Arrow": (of("abc", ARROW), "not an Arrow stream"),
    "Arrow without": (lambda: of(arrow(a=[1.0]), ARROW), "lacks the columns b, plan"),
}


@pytest.mark.parametrize("cls", ["Sum", "PolarsSum"], indirect=True)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_fails_alone_and_is_told_why(cls: Any, name: str) -> None:
    """A bad body fails alone and is told why; its mates are answered from one call, as ever."""
    bad, text = BAD[name]
    bad = bad() if callable(bad) else bad
    if cls is polars_sum() and name == "missing number":
        pytest.skip("polars has a null for it")
    if cls is polars_sum() and name == "an open quote":
        pytest.skip("polars closes it")
    model = made(cls)
    goods = [of(f"a,b,plan\n{n},1,x\n") for n in range(5)] + [of('{"a": 5, "b": 1, "plan": "x"}', JSON)]
    answers = through(model, *goods[:2], bad, *goods[2:])
    error = answers.pop(2)
    assert isinstance(error, carpool.CarpoolError)
    assert error.status in (400, 422)
    with pytest.raises(type(error), match=text):
        raise error
    assert [a["sum"] if type(a) is dict else a[0]["sum"] for a in answers] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert model.calls == [6]


@pytest.mark.parametrize("cls", ["Sum", "PolarsSum"], indirect=True)
def test_nobody_s_numbers_change_in_company(cls: Any) -> None:
    """Whole numbers beyond what a float can hold do not change beside values that would make floats
    of them.
    """
    large = 2**53 + 1

    class Keep(cls):  # type: ignore[misc]
        def predict(self, frame: Any) -> Any:
            return frame["b"]

    model = made(Keep)
    mates = [
        of("a,b,plan\n1,2.0,x\n"),
        of('{"a": 1, "b": 2.0, "plan": "x"}', JSON),
        of(arrow(a=[1.0], b=[None], plan=["x"]), ARROW),
        of("a,b,plan\n1,1e3,x\n"),
        of("a,b,plan\n1,,x\n"),
    ]
    for mate in mates:
        answers = through(
            model,
            of(f"a,b,plan\n1,{large},x\n"),
            of(f'[{{"a": 1, "b": {large}, "plan": "x"}}]', JSON),
            mate,
            of(arrow(a=[1.0], b=[large], plan=["x"]), ARROW),
        )
        assert [answers[0], answers[1], answers[3]] == [[large]] * 3


CELLS = ("1", "2.0", "-3", "1e3", "9007199254740993", "18446744073709551615", "", "NA", "true", "x", " 4", "300", "inf")
TYPES = [
    *[(Pandas, of) for of in ("int64", "int8", "uint64", "float64", "float32", "bool", "str", "Int64", "boolean")],
    *[(Polars, of) for of in ("Int64", "Int8", "Float64", "Boolean", "String", "Enum")],
]


@slow_where(lambda base, kind: kind in ("int8", "uint64", "float32", "boolean"))
@slow_where(lambda base, kind: base is Polars and kind in ("Int8", "Float64"))
@pytest.mark.parametrize(("base", "kind"), TYPES)
def test_every_cell_reads_in_company_as_alone(base: Any, kind: Any) -> None:
    """Every cell of every type that can be declared reads the same whatever stands above and below
    it.
    """
    if base is Polars:
        kind = pl.Enum(["x", "1"]) if kind == "Enum" else getattr(pl, kind)

    class Shown(base):  # type: ignore[misc]
        columns: ClassVar[dict[str, Any]] = {"v": kind}

        def predict(self, frame: Any) -> list[str]:
            return [repr(value) for value in frame["v"].to_list()]

    model = Shown()

    def read(cells: list[str]) -> list[Any]:
        answers = through(model, *[of(f"v,w\n{cell},1\n") for cell in cells])
        return [type(answer) if isinstance(answer, Exception) else answer for answer in answers]

    alone = {cell: read([cell])[0] for cell in CELLS}
    for seed in range(15):
        cells = random.Random(seed).choices(CELLS, k=5)
        assert read(cells) == [alone[cell] for cell in cells]


def test_a_number_that_has_no_room_is_refused() -> None:
    """A number that has no room in its column's type is refused: pandas would make another of it."""

    class Small(Pandas):
        columns: ClassVar[dict[str, Any]] = {"v": "int8"}

        def predict(self, frame: Any) -> Any:
            return frame["v"]

    answers = through(Small(), *[of(f"v\n{cell}\n") for cell in ("127", "128", "1e30", "1.5", "2.0")])
    assert [isinstance(answer, ValidationError) or answer for answer in answers] == [[127], True, True, True, [2]]


def test_what_is_missing_in_a_column_of_text_is_no_text() -> None:
    """A missing value in a column that is declared as text is missing with every version of pandas and
    in every format, and what is no text there becomes one.
    """

    class Text(Pandas):
        columns: ClassVar[dict[str, Any]] = {"v": "str", "w": str}

        def predict(self, frame: Any) -> Any:
            return [None if v != v or v is None else v + w for v, w in zip(frame["v"], frame["w"], strict=True)]

    texts, numbers = arrow(v=["a", None, "None"], w=["x", "y", "z"]), arrow(v=[1, 2, 3], w=[True, False, True])
    answers = through(
        Text(),
        *[of(texts, ARROW), of(numbers, ARROW), of(arrow(v=[None], w=["x"]), ARROW)],
        *[of("v,w\na,x\n,y\nb,z\n"), of('[{"v": "a", "w": "x"}, {"v": null, "w": "y"}]', JSON)],
    )
    assert answers == [["ax", None, "Nonez"], ["1True", "2False", "3True"], [None], ["ax", None, "bz"], ["ax", None]]


def test_without_columns_nothing_is_inferred_from_others() -> None:
    """Without declared columns, a column of numbers stays one beside a column of words of the same
    name.
    """
    answers = through(
        made(tables.Inferred), of("x\n1\n"), of("x\nword\n"), of("x\n1.5\n2\n"), of('[{"x": 7}]', JSON), of("y\n1\n")
    )
    of_words = str(pd.Series(["word"]).dtype)  # `object` before pandas 3
    assert answers == [["int64"], [of_words], ["float64", "float64"], ["int64"], ["int64"]]


@pytest.mark.parametrize("seed", range(20))
def test_random_tables_in_random_company(seed: int) -> None:
    """For random tables, with all texts to which CSV gives a meaning, the count of rows that is
    told beforehand is what a reader finds.
    """
    dice = random.Random(seed)
    model = made(tables.Sum)
    requests, expected = [], []
    for _ in range(dice.randint(1, 12)):
        rows = [
            [dice.randint(0, 9), dice.randint(0, 9), "".join(dice.choices('ab,"\n \t;', k=dice.randint(1, 5))) + "."]
            for _ in range(dice.randint(1, 4))
        ]
        text = io.StringIO()
        quoting = dice.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
        writer = csv.writer(text, lineterminator=dice.choice(["\n", "\r\n"]), quoting=quoting)  # type: ignore[arg-type]
        writer.writerows([["a", "b", "plan"], *rows])
        body = text.getvalue()
        requests.append(of(body if dice.random() < 0.5 else body.rstrip("\r\n")))
        expected.append([{"sum": float(a + b), "plan": plan} for a, b, plan in rows])
    assert through(model, *requests) == expected


def test_which_bodies_are_joined() -> None:
    """Bodies are joined if their rows can be counted beyond doubt."""
    assert as_sheet(b'a,b\n1,"x\ny"\n') == (b"a,b", b'1,"x\ny"\n', 1)
    assert as_sheet(b"a,b\r\n1,2") == (b"a,b", b"1,2\n", 1)
    for body in (b'a,b\n1,"x', b'a,b\n1,x"y"\n', b"a,b\r1,2\r", b'a,"b\nc"\n1,2\n', b'a\n"1"\n', b"a,b\n1,\0\n"):
        assert as_sheet(body) is None, body


def test_python_callers_bring_frames_and_records() -> None:
    """Python callers bring frames and records, and get a part of what `predict` returns or plain
    values; rows are counted from 0.
    """
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [1, 2], "plan": ["x", "y"], "more": [0, 0]}, index=[7, 8])
    with Service(Stage(tables.Sum, max_batch_size=8, run_in="thread")).run() as service:
        answers = list(
            service.stream([frame, [{"a": 1.0, "b": 2, "plan": "p"}], {"a": 1.0, "b": 3, "plan": "q"}, frame])
        )
        pd.testing.assert_frame_equal(answers[0], pd.DataFrame({"sum": [2.0, 4.0], "plan": ["x", "y"]}))
        pd.testing.assert_frame_equal(answers[3], answers[0])
        assert answers[1:3] == [[{"sum": 3.0, "plan": "p"}], {"sum": 4.0, "plan": "q"}]
        for wrong in (3, frame[["a"]], frame[:0], [{"a": 1}]):
            with pytest.raises(ValidationError):
                service.predict(wrong)
    assert list(made(tables.Sum).predict(frame)["sum"]) == [2.0, 4.0]


def test_frames_of_two_kinds_may_be_answered_in_one_memory() -> None:
    """A model that answers each kind of frames in the same memory has neither answer changed."""
    frames = [pd.DataFrame({"a": [1.0, 2.0]}), pd.DataFrame({"b": [3.0, 4.0]}), [{"c": 5.0}]]
    assert [list(answer) for answer in made(tables.InOneMemory).predict(frames)] == [[1.0, 2.0], [3.0, 4.0], [5.0]]


def test_a_call_that_fails_is_made_again_for_the_others() -> None:
    """A call that fails is made again for the others without what it had done to its frame, and
    only the guilty request fails.
    """
    with serving(App(Service(Stage(tables.Sum, max_batch_size=16), name="sum"))) as server:

        def ask(n: int) -> tuple[int, bytes]:
            with Client(server.port) as client:
                answer = client.ask(post(b"a,b,plan\n%d,0,x\n" % n, "/predict", f"Content-Type: {CSV}"))
                return answer.status, answer.body

        from concurrent.futures import ThreadPoolExecutor

        numbers = [*range(20), 666, *range(20)] * 3
        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(ask, numbers))
    for n, answer in zip(numbers, answers, strict=True):
        assert answer[0] == 500 if n == 666 else answer == (200, b"sum,plan\n%d.0,x\n" % n)


def test_answers_in_the_format_of_the_request_or_of_the_wish() -> None:
    """Answers to CSV are CSV unless another format is asked for, and each can be."""
    with (
        serving(App(Service(Stage(tables.Sum, max_batch_size=16, run_in="thread"), name="sum"))) as server,
        Client(server.port) as client,
    ):

        def ask(body: bytes, *headers: str) -> tuple[str, bytes]:
            answer = client.ask(post(body, "/predict", *headers))
            assert answer.status == 200, answer
            return answer.headers["content-type"], answer.body

        rows, record = b"a,b,plan\n1,2,x\n,4,\n", b'{"a": 1, "b": 2, "plan": "x"}'
        assert ask(rows, f"Content-Type: {CSV}; charset=utf-8") == (CSV, b"sum,plan\n3.0,x\n,\n")
        assert ask(record) == (JSON, b'{"sum":3.0,"plan":"x"}')
        assert ask(record, "Content-Type: text/json") == (JSON, b'{"sum":3.0,"plan":"x"}')
        assert ask(rows[:15], f"Content-Type: {CSV}", f"Accept: {JSON}") == (JSON, b'[{"sum":3.0,"plan":"x"}]')
        kind, body = ask(record, f"Accept: {ARROW}")
        assert (kind, pa.ipc.open_stream(body).read_all().to_pylist()) == (ARROW, [{"sum": 3.0, "plan": "x"}])
        kind, body = ask(msgspec.msgpack.encode(json.loads(record)), f"Content-Type: {MSGPACK}")
        assert (kind, msgspec.msgpack.decode(body)) == (MSGPACK, {"sum": 3.0, "plan": "x"})
        (nan,) = [client.ask(post(rows, "/predict", f"Content-Type: {CSV}", f"Accept: {JSON}"))]
        assert (nan.status, json.loads(nan.body)["error"]["code"]) == (500, "bad_result")


SECRET = "/srv/secret"
ROW_ERRORS: dict[str, Any] = {
    "a list": lambda f: [ValueError(SECRET) if x < 0 else x for x in f["a"]],
    "a list of records": lambda f: [{"y": ValueError(SECRET) if x < 0 else x} for x in f["a"]],
    "records and exceptions": lambda f: [ValueError(SECRET) if x < 0 else {"y": x, "error": "mine"} for x in f["a"]],
    "rows": lambda f: [[x, [ValueError(SECRET)] if x < 0 else x] for x in f["a"]],
    "a series": lambda f: pd.Series([ValueError(SECRET) if x < 0 else x for x in f["a"]], dtype=object),
    "an array": lambda f: pd.Series([ValueError(SECRET) if x < 0 else x for x in f["a"]], dtype=object).to_numpy(),
    "a frame": lambda f: pd.DataFrame({"y": [KeyError(SECRET) if x < 0 else x for x in f["a"]]}),
    "an error of ours": lambda f: [carpool.HTTPError("too small", status=409) if x < 0 else x for x in f["a"]],
    "an item that does not fit": lambda f: [ValidationError("too small") if x < 0 else x for x in f["a"]],
}


@pytest.mark.parametrize("answer", ROW_ERRORS)
def test_a_row_s_error_is_that_row_s_in_every_format(answer: str) -> None:
    """An exception in the place of a row's answer is that row's error, by its code and a text of our own; the other
    rows of its request have their answers, whatever the format, and so have other requests.
    """

    class Strict(Pandas):
        columns: ClassVar[dict[str, Any]] = {"a": "float64"}

        def predict(self, frame: Any) -> Any:
            return ROW_ERRORS[answer](frame)

    told = {
        "an error of ours": {"code": "refused", "message": "too small", "status": 409},
        "an item that does not fit": {"code": "invalid_item", "message": "too small", "status": 422},
    }.get(answer, {"code": "model_error", "message": "The model raised an error.", "status": 500})
    column, values = f"{told['code']}: {told['message']}", [1.0, 2.0]
    records = json.dumps([{"a": x} for x in (1, -1, 2)]).encode()
    with (
        serving(App(Service(Stage(Strict, max_batch_size=16, run_in="thread"), name="strict"))) as server,
        Client(server.port) as client,
    ):

        def ask(body: bytes, sent: str, wanted: str, path: str = "/predict") -> bytes:
            got = client.ask(post(body, path, f"Content-Type: {sent}", f"Accept: {wanted}"))
            assert got.status == 200 and SECRET.encode() not in got.body, got
            return got.body

        for rows in (
            json.loads(ask(records, JSON, JSON)),
            msgspec.msgpack.decode(ask(records, JSON, MSGPACK)),
            json.loads(ask(b'{"instances": %b}' % records, JSON, JSON, "/v1/models/strict:predict"))["predictions"],
            json.loads(ask(b"[%b]" % records, JSON, JSON, "/predict/many"))[0],
        ):
            assert rows[1] == {"error": told}
            assert [str(x) in json.dumps(row) for x, row in zip(values, rows[::2], strict=True)] == [True, True]
        sheet = list(csv.DictReader(io.StringIO(ask(b"a\n1\n-1\n2\n", CSV, CSV).decode())))
        table = pa.ipc.open_stream(ask(b"a\n1\n-1\n2\n", CSV, ARROW)).read_all().to_pylist()
        for lines, nothing in ((sheet, ""), (table, None)):
            of_errors = list(lines[0])[-1]
            assert of_errors == ("carpool_error" if answer == "records and exceptions" else "error")
            assert [line[of_errors] for line in lines] == [nothing, column, nothing]
            assert {line for name, line in lines[1].items() if name != of_errors} == {nothing}
            assert [float(next(iter(line.values()))) for line in lines[::2]] == values
        assert b"model_error" not in ask(b"a\n1\n2\n", CSV, CSV)
        alone = client.ask(post(b'{"a": -1}', "/predict"))
        assert (alone.status, SECRET.encode() in alone.body) == (told["status"], False)
        assert json.loads(alone.body)["error"]["code"] == told["code"]


def test_python_callers_find_the_errors_of_rows_in_their_places() -> None:
    """A caller in Python gets a row's error in the place of its answer, and of a single record as its own."""

    class Strict(Pandas):
        columns: ClassVar[dict[str, Any]] = {"a": "float64"}

        def predict(self, frame: Any) -> Any:
            return [ValueError(SECRET) if x < 0 else x for x in frame["a"]]

    with Service(Stage(Strict, max_batch_size=16, run_in="thread")).run() as s:
        for given in ([{"a": 1.0}, {"a": -1.0}], pd.DataFrame({"a": [1.0, -1.0]})):
            good, bad = s.predict(given)
            assert good == 1.0 and isinstance(bad, ModelError) and SECRET in str(bad)
        with pytest.raises(ModelError, match=SECRET) as found:
            s.predict({"a": -1.0})
        assert isinstance(found.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda f: f["a"], [1.0, 2.0]),
        (lambda f: f["a"].to_numpy(), [1.0, 2.0]),
        (lambda f: [[x, x] for x in f["a"]], [[1.0, 1.0], [2.0, 2.0]]),
        (lambda f: f[["a"]].to_numpy(), [[1.0], [2.0]]),
        (lambda f: pd.Series([1, None], dtype="Int64"), [1, None]),
        (lambda f: pl.Series([1, None]), [1, None]),
        (lambda f: pa.array(["x", None]), ["x", None]),
    ],
)
def test_what_predict_may_return(answer: Any, expected: Any) -> None:
    """`predict` may return one answer a row in any of these forms, and all can be written in every
    format.
    """

    class Some(Pandas):
        def predict(self, frame: Any) -> Any:
            return answer(frame)

    body = of("a\n1.0\n2.0\n")
    assert through(made(Some), body) == [expected]
    for accept in (CSV, MSGPACK, ARROW):
        assert type(through(made(Some), body, accept=accept)[0]) is bytes


@pytest.mark.parametrize("returned", [[1], 3, "ab", None])
def test_what_it_may_not_return(returned: Any) -> None:
    """Anything but one answer a row is an error of the model."""

    class Wrong(Pandas):
        def predict(self, frame: Any) -> Any:
            return returned

    with pytest.raises(ModelError, match="must return"):
        through(made(Wrong), of("a\n1.0\n2.0\n"))


def test_what_cannot_be_declared_is_refused_there() -> None:
    """A declaration that cannot work is refused where it is made, with what would do."""

    def declare(base: type[Any] = Pandas, **body: Any) -> None:
        type("Odd", (base,), {"predict": lambda self, frame: frame, **body})

    for columns in ({"a": "datetime64[ns]"}, {"a": "category"}, {"a": pd.CategoricalDtype([1, 2])}):
        with pytest.raises(TypeError, match="Declare text, and convert it in predict"):
            declare(columns=columns)
    with pytest.raises(TypeError, match=r"polars.Enum"):
        declare(Polars, columns={"a": pl.Datetime})
    with pytest.raises(TypeError, match="columns of Odd must be names of columns"):
        declare(columns={})
    with pytest.raises(TypeError, match="which cannot have preprocess: do its work in predict"):
        declare(preprocess=lambda self, x: x)

    async def later(self: Any, frame: Any) -> Any:
        return frame

    with pytest.raises(TypeError, match="must be a plain function"):
        declare(predict=later)
    declare(columns={"a": pd.CategoricalDtype(["x"]), "b": "Int64", "c": "boolean", "d": "float32"})
    declare(Polars, columns={"a": pl.Enum(["x"]), "b": pl.Int8, "c": pl.Boolean, "d": pl.Float32})


def test_in_a_pipeline() -> None:
    """What a model of tables gives goes on to the next stage as plain values."""

    def largest(rows: list[dict[str, Any]]) -> float:
        return max(row["sum"] for row in rows)

    with (
        serving(
            App(
                Service(
                    Stage(tables.Sum, max_batch_size=8, run_in="thread"), Stage(largest, run_in="thread"), name="two"
                )
            )
        ) as server,
        Client(server.port) as client,
    ):
        answer = client.ask(post(b"a,b,plan\n1,2,x\n3,4,x\n", "/predict", f"Content-Type: {CSV}"))
        assert (answer.status, answer.body) == (200, b"7.0")


def test_carpool_does_not_import_them() -> None:
    """Importing `carpool` or `carpool.frames` imports neither pandas nor polars."""
    code = "import sys, carpool, carpool.frames; print({'pandas', 'polars', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_openapi_names_the_formats() -> None:
    """`/openapi.json` names the formats of tables, for requests and for answers."""
    from carpool.http.codec import Formats

    traits = traits_of(tables.Sum, True)
    formats = Formats(traits, traits)
    assert set(formats.readable) == set(formats.writable) == {CSV, JSON, MSGPACK, ARROW}


@pytest.mark.parametrize("cls", ["Sum", "PolarsSum"], indirect=True)
def test_a_bad_cell_has_its_place_among_the_details(cls: Any) -> None:
    """The details of a bad cell name its row, counted from 0 as in JSON, and its column."""
    (error,) = through(made(cls), of("a,b,plan\n1,2,x\nzz,3,y\n"))
    assert error.details[0]["loc"] == [1, "a"]


def test_lists_of_addresses_ask_tables_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """What lists the addresses of a model of tables, by whatever examples it has, logs nothing."""
    record: dict[str, Any] = {"a": 1.0, "b": 2, "plan": "x"}
    for number, example in enumerate((record, [record, record], pd.DataFrame({"a": [1.0]}))):

        class Exemplary(Pandas):
            examples = (example,)

            def predict(self, frame: Any) -> Any:
                return frame["a"]

        service = Service(Stage(Exemplary, max_batch_size=4, run_in="thread"), name=f"m{number}")
        with caplog.at_level("WARNING"), serving(App(service)) as server, Client(server.port) as client:
            for path in ("/", "/openapi.json"):
                assert client.ask(get(path)).status == 200
        assert caplog.records == []


def test_openapi_has_the_columns() -> None:
    """The document has a schema of the rows, with the declared columns and their types."""
    service = Service(Stage(tables.Sum, max_batch_size=4, run_in="thread"), name="sum")
    with serving(App(service)) as server, Client(server.port) as client:
        document = json.loads(client.ask(get("/openapi.json")).body)
    content = document["paths"]["/models/sum/predict"]["post"]["requestBody"]["content"][JSON]
    row = {"$ref": "#/components/schemas/SumRow"}
    assert content["schema"] == {"anyOf": [{"type": "array", "items": row}, row]}
    found = document["components"]["schemas"]["SumRow"]
    assert found["required"] == ["a", "b", "plan"]
    assert found["properties"]["b"] == {"type": "integer", "description": "int64"}
    assert {"type": "number"} in found["properties"]["a"]["anyOf"]
