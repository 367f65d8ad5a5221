"""`/ping` and `/invocations`: the container contract of SageMaker, and MLflow's scoring server."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Final

import msgspec

from carpool.engine.hints import schema
from carpool.engine.wire.payload import CUSTOM, JSON
from carpool.errors import InvalidRequest
from carpool.http.exchange import JSON_TYPE, HttpResponse
from carpool.http.protocols.base import (
    HttpProtocol,
    ModelOfApp,
    ProtocolRequest,
    ProtocolRoute,
    ShownError,
    Submission,
    first_of,
    nobody_is_first,
)
from carpool.http.protocols.instances import (
    allowance_of,
    as_list,
    of_inputs,
    of_instances,
    of_items,
    records_of,
)
from carpool.http.protocols.rows import fields_of
from carpool.http.protocols.wording import as_item, as_response, listed_in, members_of, read, without_details
from carpool.version import __version__

_TEXT: Final = b"text/plain; charset=utf-8"
_CSV: Final = b"text/csv"
_FORMS: Final = ("dataframe_split", "dataframe_records", "instances", "inputs")
_HEADER: Final = re.compile(rb"(?:^|[;\s])header\s*=\s*\"?(present|absent)\b")


class _Split(msgspec.Struct):
    columns: list[str]
    data: msgspec.Raw
    index: list[Any] | None = None


_read_split = msgspec.json.Decoder(_Split).decode
_read_row = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = as_item


class SageMaker(HttpProtocol):
    """The protocol of containers of SageMaker and MLflow; the model is the first one."""

    name = "sagemaker"
    prefixes = ("/invocations", "/ping")

    def routes(self, models: Sequence[ModelOfApp]) -> Iterator[ProtocolRoute]:
        for path in ("/ping", "/health"):
            yield ProtocolRoute("GET", path, _ping, summary="Readiness", is_alias=path == "/health")
        version = HttpResponse(200, __version__.encode(), _TEXT)
        yield ProtocolRoute(
            "GET", "/version", lambda request: version, summary="The version of carpool", writes=("text/plain",)
        )
        model = first_of(models)
        if model is None:
            yield ProtocolRoute("POST", "/invocations", nobody_is_first(models), fits=lambda: False)
            return
        rows = ["application/json", "text/csv"] if model.formats.holds(JSON, JSON) else []
        yield ProtocolRoute(
            "POST",
            "/invocations",
            _Invocations(model).answer,
            model,
            summary=f"Ask {model.name} for predictions of rows, or of one item",
            sent_as=CUSTOM,
            wanted_as=CUSTOM,
            reads=list(dict.fromkeys([*rows, *model.formats.readable])),
            writes=list(dict.fromkeys([*rows[:1], *model.formats.writable])),
        )

    def error(self, error: ShownError) -> HttpResponse:
        return without_details(error)


def _ping(request: ProtocolRequest) -> HttpResponse:
    if request.problem is not None:
        return as_response({"status": "Unhealthy", "error": request.problem}, status=503)
    return HttpResponse(200, b'{"status": "Healthy"}\n')


class _Invocations:
    """The route of the model."""

    def __init__(self, model: ModelOfApp) -> None:
        self._model = model
        fields = fields_of(model.takes.input_type)
        self._fields = {} if fields is None else {name: kind for name, (kind, _) in fields.items()}

    def answer(self, request: ProtocolRequest) -> Submission:
        """Submit the content of a body: rows in one of MLflow's forms, or else one item."""
        kind, _, parameters = request.headers.get(b"content-type", JSON_TYPE).partition(b";")
        kind = kind.strip().lower()
        if kind == _CSV and b"text/csv" not in self._accepts and self._takes_rows:
            return self._of_csv(request.body, _says_of_header(parameters))
        if kind == JSON_TYPE:
            members = self._members(request.body)
            found = [form for form in _FORMS if form in members and form not in self._fields]
            if len(found) > 1:
                raise InvalidRequest(f"the body must have one of {', '.join(_FORMS)}, not {' and '.join(found)}")
            if found:
                return self._of_rows(found[0], members)
        return self._of_body(request)

    @property
    def _accepts(self) -> tuple[bytes, ...]:
        return tuple(each.encode() for each in self._model.takes.accepts)

    @property
    def _takes_rows(self) -> bool:
        kind = self._model.takes.input_type
        return bool(self._fields) or kind not in (str, bytes, Any)

    def _members(self, body: bytes | bytearray) -> dict[str, bytes]:
        return members_of(body) if bytes(body[:64]).lstrip()[:1] == b"{" else {}

    def _of_rows(self, form: str, members: dict[str, bytes]) -> Submission:
        if members.get("params", b"{}") != b"{}":
            raise InvalidRequest('the model takes no "params": put what it needs into the rows')
        if form == "dataframe_split":
            return of_items(self._model, self._records(members[form]), partial(as_list, "predictions"))
        if form == "inputs":
            return of_inputs(self._model, members[form], "predictions")
        return of_instances(self._model, members[form])

    def _records(self, split: bytes) -> list[bytes]:
        """Return the rows of a `dataframe_split`: objects, or lists if the model takes these."""
        allowance = allowance_of(self._model, split)
        table = read(_read_split, split)
        rows = [read(_read_row, row) for row in listed_in(bytes(table.data), allowance)]
        if not all(len(row) == len(table.columns) for row in rows):
            raise InvalidRequest("a row of dataframe_split has another number of values than there are columns")
        if not self._fields and self._model.takes.input_type is not Any and not self._model.takes.accepts:
            return [_encode(row if len(row) > 1 or self._is_list else row[0]) for row in rows]
        return records_of(table.columns, rows, allowance)

    @property
    def _is_list(self) -> bool:
        return self._model.takes.input_type not in (int, float, bool, str, bytes)

    def _of_csv(self, body: bytes | bytearray, has_header: bool | None) -> Submission:
        allowance = allowance_of(self._model, body)
        lines: list[list[str]] = []
        try:
            for line in filter(None, csv.reader(io.StringIO(body.decode("utf-8-sig")), strict=True)):
                lines.append(line)
                allowance.check_items(len(lines) - 1, "the table")  # the first one may be its header
        except (UnicodeDecodeError, csv.Error) as error:
            raise InvalidRequest(f"the body is not valid CSV in UTF-8: {error}") from None
        if not lines:
            raise InvalidRequest("the body is a table without lines")
        if self._fields:
            items = self._records_of_csv(lines, has_header)
        else:
            if self._is_header(lines[0]) if has_header is None else has_header:
                lines = lines[1:]
            items = [self._item_of(line) for line in lines]
        return of_items(self._model, items, partial(as_list, "predictions"))

    def _is_header(self, line: list[str]) -> bool:
        """Report whether a line names columns: it has no number, and can be no item.

        Raises:
            InvalidRequest: It may be either.
        """
        if any(map(_is_number, line)) or not any(line):
            return False
        if not self._fits(self._item_of(line)):
            return True
        if not all(line):
            return False  # columns have names
        raise InvalidRequest(
            "the first line of the table may be its header or a row: say which, as Content-Type: text/csv;"
            " header=present or header=absent"
        )

    def _item_of(self, line: list[str]) -> bytes:
        """Return a line as an item: what is empty is missing, or if that does not fit a text."""
        item = _encode(_numbers(line, None, is_list=self._is_list))
        if all(line) or self._fits(item):
            return item
        return _encode(_numbers(line, "", is_list=self._is_list))

    @cached_property
    def _read(self) -> Callable[[bytes], Any]:
        return schema.json_reader(self._model.takes.input_type)

    def _fits(self, item: bytes) -> bool:
        try:
            self._read(item)
        except BaseException:  # types may have validators, which are user code
            return False
        return True

    def _records_of_csv(self, lines: list[list[str]], has_header: bool | None) -> list[bytes]:
        names = list(self._fields)
        if has_header is None:
            has_header = set(lines[0]) <= set(names) and len(set(lines[0])) == len(lines[0])
        if has_header:
            names, lines = lines[0], lines[1:]
            if unknown := [name for name in names if name not in self._fields]:
                raise InvalidRequest(f"the model has no field {unknown[0]!r}; it has {', '.join(self._fields)}")
        if not all(len(line) == len(names) for line in lines):
            raise InvalidRequest(
                f"a line of the table has another number of fields than its columns, {', '.join(names)}"
            )
        return [
            _encode({name: _value(text, self._fields[name]) for name, text in zip(names, line, strict=True)})
            for line in lines
        ]

    def _of_body(self, request: ProtocolRequest) -> Submission:
        """Submit the body as one item, in any format that the model reads."""
        headers, formats = request.headers, self._model.formats
        kind = headers.get(b"content-type", JSON_TYPE)
        read_as, write_as = formats.choose(kind, headers.get(b"accept"))

        def respond(results: list[Any]) -> HttpResponse:
            return HttpResponse(200, results[0], formats.types[write_as])

        return Submission(self._model, [request.body], respond, read_as, write_as)


def _says_of_header(parameters: bytes) -> bool | None:
    """Return whether a content type's parameters say that a table has a header (RFC 4180)."""
    found = _HEADER.search(parameters.lower())
    return None if found is None else found[1] == b"present"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _numbers(line: list[str], missing: str | None, *, is_list: bool) -> Any:
    """Return the values of a line: numbers where these can be made, `missing` for what is empty."""
    values = [_value(text, float) if text else missing for text in line]
    return values if is_list or len(values) != 1 else values[0]


def _value(text: str, kind: Any) -> Any:
    """Return a field as what the model's type wants, as far as that is known; else as text."""
    try:
        return msgspec.convert(text, kind, strict=False)
    except (msgspec.MsgspecError, TypeError):
        return text
