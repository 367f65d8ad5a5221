"""Files of `carpool score`: what is written is read back by others, at any cut it goes on, and no value changes."""

from __future__ import annotations

import csv
import json
import math
import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.client.score.inputs import MIXED, Input, InputRow, candidates, kind_of, merged
from carpool.client.score.outputs import (
    NOT_BEGUN,
    Answer,
    EarlierRun,
    Errors,
    File,
    LineRows,
    Output,
    ParquetFile,
    RowsFile,
    SheetRows,
)
from carpool.client.score.outputs import done_in as done_in_file
from carpool.http import entries
from tests.support.properties import PROPERTY

LONG = "long" * 40_000
"""Longer than the csv module reads by default."""

texts = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["", "a\rb", "a\nb", "\r\n", '"', 'a"b,', "\x00", "007", "nan", "1", "null", " ", LONG]
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-3, 3),
    st.floats(allow_nan=False, allow_infinity=False),
    texts,
)
names = st.sampled_from(["a", "b", "result", "error", "_error", "a,b", "a\rb", ""])
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=6
)
answers_of = st.lists(
    st.tuples(values | st.dictionaries(names, scalars, max_size=3), st.sampled_from([False, False, False, True]))
)


def answer_of(value: Any, is_error: bool) -> Answer:
    told = {"code": "model_error", "message": json.dumps(value)}
    return Answer(entries.of_error(told) if is_error else msgspec.json.encode(value), is_error)


def output_of(path: Path, format: str, done: EarlierRun = NOT_BEGUN, *, is_retried: bool = False) -> Output:
    if format == "parquet":
        return ParquetFile(str(path))
    rows = SheetRows(done.header) if format == "csv" else LineRows()
    return RowsFile(str(path), rows, done, is_retried=is_retried)


def write(output: Output, answers: Sequence[Answer], n: int = 3) -> list[Answer]:
    """Write answers in bunches of `n`, and return what has become of them."""
    fitted: list[Answer] = []
    try:
        for at in range(0, len(answers), n):
            bunch = output.fitted(answers[at : at + n])
            output.write(bunch)
            fitted += bunch
    finally:
        output.close(is_whole=True)
    return fitted


Found = tuple[Any, dict[str, Any] | None]
"""A value and an error, as they were read."""


def in_lines(path: Path) -> list[Found]:
    lines = path.read_bytes().splitlines(keepends=True)  # of bytes: at \n, \r and \r\n only
    return [
        (None, json.loads(line)["error"]) if entries.is_error(line) else (json.loads(entries.result_in(line)), None)
        for line in lines
    ]


def in_sheet(path: Path) -> list[Found]:
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file, strict=True))
    assert {len(row) for row in rows} <= {len(rows[0])} if rows else True
    return [(row[:-1], json.loads(row[-1]) if row[-1] else None) for row in rows[1:]]


def in_parquet(path: Path) -> list[Found]:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(path)
    mark = table.column_names[-1]
    as_json = {field.name for field in table.schema if field.metadata == {b"format": b"json"}}
    return [
        (
            {
                name: json.loads(value) if name in as_json and value is not None else value
                for name, value in row.items()
                if name != mark
            },
            None if row[mark] is None else json.loads(row[mark]),
        )
        for row in table.to_pylist()
    ]


def cell(value: Any) -> str:
    """What stands for a value in CSV."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) if not isinstance(value, float) else repr(value)


@PROPERTY
@given(given_answers=answers_of, format=st.sampled_from(["ndjson", "csv", "parquet"]))
def test_what_is_written_is_read_back(given_answers: list[tuple[Any, bool]], format: str) -> None:
    """Other programs read from a file the same values, errors in their places, and no row more or less; what a header
    has no room for stands in the error that says so.
    """
    answers = [answer_of(*each) for each in given_answers]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out"
        fitted = write(output_of(path, format), answers)
        found = {"ndjson": in_lines, "csv": in_sheet, "parquet": in_parquet}[format](path)
        header = done_in_file(str(path), "csv").header[:-1] if format == "csv" else []
    assert len(found) == len(fitted) == len(answers)
    for (value, was_error), answer, (read, error) in zip(given_answers, fitted, found, strict=True):
        assert (error is not None) == answer.is_error
        if error is not None:
            assert json.loads(error["message"]) == value if was_error else (format, error["result"]) == ("csv", value)
        elif format == "ndjson":
            assert read == value and type(read) is type(value)
        elif format == "csv":
            fields = value if isinstance(value, dict) and header != ["result"] else {"result": value}
            assert read == [
                cell(each) if not isinstance(each, list | dict | bool) else msgspec.json.encode(each).decode()
                for each in map(fields.get, header)
            ]
        else:
            fields = value if isinstance(value, dict) else {"result": value}
            assert {name: each for name, each in read.items() if each is not None} == {
                name: each for name, each in fields.items() if each is not None
            }
            assert all(isinstance(read[name], bool) == isinstance(each, bool) for name, each in fields.items())


@PROPERTY
@given(given_answers=answers_of, format=st.sampled_from(["ndjson", "csv"]), share=st.floats(0, 1))
def test_it_goes_on_at_any_cut(given_answers: list[tuple[Any, bool]], format: str, share: float) -> None:
    """Cut at any byte, what an earlier run has written is gone on with, and in the end it is the same file."""
    answers = [answer_of(*each) for each in given_answers]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out"
        write(output_of(path, format), answers)
        whole = path.read_bytes()
        os.truncate(path, int(share * len(whole)))
        done = done_in_file(str(path), format)
        assert done.rows <= len(answers)
        write(output_of(path, format, done), answers[done.rows :])
        assert path.read_bytes() == whole


@PROPERTY
@given(given_answers=answers_of, format=st.sampled_from(["ndjson", "csv"]), n=st.integers(1, 5))
def test_failed_rows_are_tried_again(given_answers: list[tuple[Any, bool]], format: str, n: int) -> None:
    """New answers stand where errors stood, all others stay, and later ones follow."""
    is_long = [answer_of(value, is_error) for value, is_error in given_answers]
    better = [answer_of(value, False) for value, _ in given_answers]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out"
        fitted = write(output_of(path, format), is_long)
        done = done_in_file(str(path), format)
        assert [place.row for place in done.failed] == [row for row, each in enumerate(fitted, 1) if each.is_error]
        again = [better[place.row - 1] for place in done.failed]
        more = [answer_of(1, False), answer_of(2, True)]
        last = write(output_of(path, format, done, is_retried=True), again + more, n)
        found = (in_lines if format == "ndjson" else in_sheet)(path)
        assert not (Path(folder) / "out.retried").exists()
    retried = iter(last)
    wanted = [next(retried) if each.is_error else each for each in fitted] + list(retried)
    assert [error is not None for _, error in found] == [each.is_error for each in wanted]
    if format == "ndjson":
        assert [value for value, error in found[: len(better)] if error is None] == [
            value for value, _ in given_answers
        ]


def test_what_is_tried_again_in_vain_loses_nothing(tmp_path: Path) -> None:
    """A run that ends before all failed rows have new answers leaves the file as it was."""
    path = tmp_path / "out"
    write(output_of(path, "ndjson"), [answer_of(n, n % 2 == 0) for n in range(5)])
    path.chmod(0o640)
    before = path.read_bytes()
    done = done_in_file(str(path), "ndjson")
    write(output_of(path, "ndjson", done, is_retried=True), [answer_of(0, False)])
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["out"]
    (tmp_path / "link").symlink_to(path)
    write(output_of(tmp_path / "link", "ndjson", done, is_retried=True), [answer_of(0, False)] * 3)
    assert path.read_bytes() == b"0\n1\n0\n3\n0\n" and path.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "link").is_symlink()


def test_errors_of_rows_that_are_tried_again(tmp_path: Path) -> None:
    """The file of errors keeps the old ones until all have been tried again, and then has the new ones."""
    path = tmp_path / "errors"
    first = Errors(str(path), NOT_BEGUN)
    first.write([1, 2, 3], [answer_of("a", True), answer_of("b", False), answer_of("c", True)])
    first.close()
    write(output_of(tmp_path / "out", "ndjson"), [answer_of("a", True), answer_of("b", False), answer_of("c", True)])
    again = Errors(str(path), done_in_file(str(tmp_path / "out"), "ndjson"), is_retried=True)
    again.write([1], [answer_of("a", False)])
    assert [json.loads(line)["row"] for line in path.read_text().splitlines()] == [1, 3]
    again.write([3, 4], [answer_of("c", True), answer_of("d", True)])
    again.forget()
    again.write([5], [answer_of("e", True)])
    again.close()
    assert [json.loads(line)["row"] for line in path.read_text().splitlines()] == [3, 4, 5]


def test_rows_that_fail_first_do_not_make_the_header() -> None:
    """Errors wait for the first good answer, which makes the header; without any there are whole results."""
    sheet = SheetRows([])
    assert sheet.written(sheet.fitted([answer_of("x", True)])) == []
    rows = sheet.written(sheet.fitted([answer_of({"price": 1.5}, False)]))
    assert rows[0].startswith(b'price,error\n,"{') and rows[1:] == [b"1.5,\n"]
    alone = SheetRows([])
    assert alone.written(alone.fitted([answer_of("x", True)])) == []
    assert alone.rest()[0].startswith(b"result,error\n,")
    known = SheetRows([], ["price", "note"])
    assert known.written(known.fitted([answer_of({"price": 1.5}, False)])) == [b"price,note,error\n1.5,,\n"]


@pytest.mark.parametrize("format", ["ndjson", "csv", "parquet"])
def test_what_never_began_is_no_file(tmp_path: Path, format: str) -> None:
    """A run that ends before the first answer leaves an empty file, which the next one takes; one without rows does
    not.
    """
    pytest.importorskip("pyarrow")
    output_of(tmp_path / "out", format).close(is_whole=False)
    assert (tmp_path / "out").read_bytes() == b""
    write(output_of(tmp_path / "out", format), [])
    if format == "parquet":
        assert in_parquet(tmp_path / "out") == []


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_the_standard_output_is_gone_on_with(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """What is there of a file behind it stays, whatever it is called."""
    os.write(1, b"before\n")
    write(output_of(Path(name), "ndjson"), [answer_of(1, False)])
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "before\n1\nafter\n"


@pytest.mark.parametrize("format", ["ndjson", "csv", "parquet"])
def test_a_pipe_is_an_output(tmp_path: Path, format: str) -> None:
    """A named pipe gets the same bytes as a file, and a device takes them."""
    pytest.importorskip("pyarrow")
    answers = [answer_of({"x": n}, n == 2) for n in range(5)]
    write(output_of(tmp_path / "file", format), answers)
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write(output_of(pipe, format), answers)
    reader.join()
    assert got == [(tmp_path / "file").read_bytes()]
    write(output_of(Path("/dev/null"), format), answers)


def test_a_file_of_errors_may_be_a_device() -> None:
    """So `--errors /dev/stderr` shows them."""
    errors = Errors("/dev/null", NOT_BEGUN)
    errors.write([1], [answer_of("x", True)])
    errors.close()
    file = File("/dev/null", 10)
    assert file.write(b"abc") == 3 and file.tell() == 3
    file.close()


# -- what is read


@PROPERTY
@given(rows=st.lists(st.lists(texts, min_size=2, max_size=2)), end=st.sampled_from(["\n", "\r\n"]), bom=st.booleans())
def test_csv_is_read_as_it_was_written(rows: list[list[str]], end: str, bom: bool) -> None:
    """Each field comes as the csv module has written it: line ends, quotes, long ones and marks included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.csv"
        with open(path, "w", newline="", encoding="utf-8-sig" if bom else "utf-8") as file:
            csv.writer(file, lineterminator=end, quoting=csv.QUOTE_ALL).writerows([["a", "b"], *rows])
        read = list(Input(str(path), "csv").rows())
    assert [row.values for row in read] == [{"a": a, "b": b} for a, b in rows]
    assert all(row.problem is None for row in read)


def test_a_line_that_is_no_row_is_its_rows_error(tmp_path: Path) -> None:
    """A field too many or too few, bytes that are not UTF-8 and quotes that go wrong are that row's error, with the
    number of its line; the others are read.
    """
    path = tmp_path / "in.csv"
    path.write_bytes(b'a,b\n1,2\n1,2,3\n"x\ny",2\n1\n\n\xff,2\n"a"b,2\n5,6\n')
    read = list(Input(str(path), "csv").rows())
    assert [row.values for row in read if row.problem is None] == [
        {"a": "1", "b": "2"},
        {"a": "x\ny", "b": "2"},
        {"a": "5", "b": "6"},
    ]
    problems = [row.problem for row in read if row.problem is not None]
    assert [each.partition(f" of {path}: ")[::2] for each in problems][:3] == [
        ("line 3", "it has 3 fields, and the header 2"),
        ("line 6", "it has 1 field, and the header 2"),
        ("line 8", "it is not UTF-8"),
    ]
    assert problems[3].startswith("line 9 ") and len(read) == 7
    path.write_bytes(b'a,b\n1,2\n"x,2\n3,4\n')
    first, rest = Input(str(path), "csv").rows()
    assert first.values == {"a": "1", "b": "2"} and (rest.problem or "").startswith("lines 3 to 4 of ")


def test_rows_are_chosen_by_number(tmp_path: Path) -> None:
    """Rows that were done are left out, but for those that are tried again."""
    path = tmp_path / "in"
    path.write_text("0\n\n1\n2\n3\n4\n")
    assert [row.line for row in Input(str(path), "ndjson").rows(3, {2})] == [b"1\n", b"3\n", b"4\n"]


def test_parquet_is_read_as_it_is(tmp_path: Path) -> None:
    """Numbers and texts of a table keep their types and values, also by way of a pipe."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path, pipe = tmp_path / "in.parquet", tmp_path / "pipe"
    columns = {"code": ["007", "1"], "x": [math.inf, 1.0], "blob": [b"\xff", b""]}
    parquet.write_table(pyarrow.table(columns), path)
    wanted = [{"code": "007", "x": math.inf, "blob": b"\xff"}, {"code": "1", "x": 1.0, "blob": b""}]
    rows = list(Input(str(path), "parquet").rows())
    assert [row.values for row in rows] == wanted
    assert [next(candidates(row, Any)) for row in rows] == wanted
    os.mkfifo(pipe)
    threading.Thread(target=lambda: pipe.write_bytes(path.read_bytes()), daemon=True).start()
    assert [row.values for row in Input(str(pipe), "parquet").rows()] == wanted


@pytest.mark.parametrize("text", [b"a,a\n1,2\n", b'"a"b\n1\n', b"\xff\n1\n"])
def test_a_header_that_is_none_is_refused(tmp_path: Path, text: bytes) -> None:
    """A column that is named twice would be lost."""
    (tmp_path / "in.csv").write_bytes(text)
    with pytest.raises(ValueError, match=r"the header of .* (names a column twice|cannot be read)"):
        list(Input(str(tmp_path / "in.csv"), "csv").rows())


@dataclass
class Flat:
    zip: str
    rooms: int
    area: float | None = None


@pytest.mark.parametrize(
    ("texts", "kind", "item"),
    [
        ({"zip": "007", "rooms": "3", "area": "1e3"}, Flat, Flat("007", 3, 1000.0)),
        ({"zip": "007", "rooms": "3", "area": ""}, Flat, Flat("007", 3)),
        ({"x": "007", "y": "1_000", "z": "+1", "w": "12345678901234567890"}, Any, None),
        ({"x": "1", "y": "-2.5e3", "z": "", "w": "nan"}, Any, {"x": 1, "y": -2500.0, "z": None, "w": "nan"}),
    ],
)
def test_what_texts_stand_for(texts: dict[str, str], kind: Any, item: Any) -> None:
    """The model's hint says what a cell is; without one only what JSON writes as a number is a number."""
    assert next(candidates(InputRow(None, texts, are_texts=True), kind)) == (texts if item is None else item)


@pytest.mark.parametrize(
    ("values", "is_mixed"),
    [
        ([1, 2.5, None], False),
        ([True, 1.5], True),
        ([True, 1], True),
        ([2**53 + 1, 1.5], True),
        ([2**63], True),
        ([1, "a"], True),
        ([[], [1], [None, 2.5]], False),
        ([[1], ["a"]], True),
        ([{"a": 1}, {"a": None}], False),
        ([{"a": 1}, {"b": 1}], True),
        ([{}], True),
        ([[{}]], True),
    ],
)
def test_kinds(values: list[Any], is_mixed: bool) -> None:
    """Values have a kind together if a type of Parquet holds each of them as it is, in whatever order they come."""
    assert (merged(map(kind_of, values)) == MIXED) == is_mixed == (merged(map(kind_of, values[::-1])) == MIXED)
