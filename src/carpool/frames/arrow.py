"""Arrow streams as tables, counted before they are read.

A stream of few bytes can stand for a large table: its buffers may be compressed, or be one and the
same for many columns; nulls, references and empty lists take no bytes at all. pyarrow takes the
memory that the stream asks for, and there is no limit to give it. So the sizes in the messages are
read here first, and the columns are counted before anything is made of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

from carpool.engine.allowance import Allowance
from carpool.engine.foreign import text_of
from carpool.errors import InvalidRequest

_LONGEST_COMPLAINT = 200
_DICTIONARY, _BATCH = 2, 3  # kinds of messages
_VERSION_5: Final = 4  # of the format; before, what a message says beside its header may compress it
_UNCOMPRESSED: Final = -1
_LENGTH: Final = struct.Struct("<q")
_BUFFER: Final = struct.Struct("<qq")  # where it begins, and its length


def table_in(body: bytes) -> Any:
    """Return the table in a stream.

    Raises:
        InvalidRequest: It is malformed (400), or stands for too much (413).
    """
    import pyarrow as pa

    allowance = Allowance(len(body))

    try:
        for message in _messages(body):
            _count_buffers(message, allowance)
        stream = pa.ipc.open_stream(body)
        for field in stream.schema:
            _check_type(field.type)
        table = stream.read_all()
        table.validate()
        allowance.take_values(table.num_rows, "the rows of the table", "send fewer rows")
        for column in table.columns:
            for chunk in column.chunks:
                _count(chunk, allowance)
        table.validate(full=True)
        for column in table.columns:
            for chunk in column.chunks:
                _count_references(chunk, allowance)
    except (pa.ArrowException, OSError, ValueError, struct.error) as error:
        text = text_of(error).partition("\n")[0][:_LONGEST_COMPLAINT]
        raise InvalidRequest(f"the body is not an Arrow stream: {text}") from error
    return table


# -- sizes in messages, before anything is read


class _Table:
    """A table of flatbuffers, the format in which Arrow describes a message.

    Args:
        data: The whole description, which pyarrow has checked.
        at: Where the table begins.
    """

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self._at = at
        (back,) = struct.unpack_from("<i", data, at)
        self._fields = at - back
        (self._end,) = struct.unpack_from("<H", data, self._fields)

    def place(self, i: int) -> int:
        """Return where field number `i` is; 0 if it is left out."""
        if 4 + 2 * i >= self._end:
            return 0
        (offset,) = struct.unpack_from("<H", self._data, self._fields + 4 + 2 * i)
        return self._at + offset if offset else 0

    def number(self, i: int, form: str) -> int:
        """Return a number, in the form of `struct`; 0 if it is left out."""
        at = self.place(i)
        found: int = struct.unpack_from(form, self._data, at)[0] if at else 0
        return found

    def table(self, i: int) -> _Table:
        """Return the table to which a field refers."""
        at = self.place(i)
        return _Table(self._data, at + struct.unpack_from("<I", self._data, at)[0])

    def structs(self, i: int, form: struct.Struct) -> Iterator[tuple[int, ...]]:
        """Yield the structs of a list."""
        at = self.place(i)
        if at:
            at += struct.unpack_from("<I", self._data, at)[0]
            (n,) = struct.unpack_from("<I", self._data, at)
            yield from form.iter_unpack(self._data[at + 4 : at + 4 + n * form.size])


def _messages(body: bytes) -> Iterator[Any]:
    """Yield the messages of a stream, of which nothing is copied."""
    import pyarrow as pa

    reader = pa.ipc.MessageReader.open_stream(pa.BufferReader(body))
    while True:
        try:
            yield reader.read_next_message()
        except StopIteration:
            return


def _count_buffers(message: Any, allowance: Allowance) -> None:
    """Count the bytes of the buffers of a message, as they are when they are not compressed."""
    metadata = memoryview(message.metadata)
    about = _Table(metadata, struct.unpack_from("<I", metadata, 0)[0])
    kind = about.number(1, "<B")
    if kind not in (_DICTIONARY, _BATCH):
        return
    header = about.table(2)
    batch = header.table(1) if kind == _DICTIONARY else header
    is_compressed = batch.place(3) or (about.number(0, "<h") < _VERSION_5 and about.place(4))
    content = memoryview(message.body)
    for at, length in batch.structs(2, _BUFFER):
        if is_compressed and length:
            (expanded,) = _LENGTH.unpack(content[at : at + _LENGTH.size])
            length = length if expanded == _UNCOMPRESSED else expanded
        if length < 0:
            raise ValueError("a buffer has a negative length")
        allowance.take_bytes(length, "the columns of the table", "send fewer rows, or buffers that are not compressed")


# -- types of columns, before any is read


def _check_type(kind: Any, *, is_inside: bool = False) -> None:
    """Raise `InvalidRequest` (400) for a type that is not read: its values take no bytes, share
    those of others, or have no place in a frame.

    Args:
        kind: The type of a column, or of what is inside its values.
        is_inside: Whether it is the latter.
    """
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        _check_type(kind.storage_type, is_inside=is_inside)
    elif types.is_struct(kind) and kind.num_fields:
        for field in kind:
            _check_type(field.type, is_inside=True)
    elif types.is_map(kind):
        _check_type(kind.key_type, is_inside=True)
        _check_type(kind.item_type, is_inside=True)
    elif types.is_list(kind) or types.is_large_list(kind) or (types.is_fixed_size_list(kind) and kind.list_size > 0):
        _check_type(kind.value_type, is_inside=True)
    elif types.is_dictionary(kind) and not is_inside and _is_plain(kind.value_type):
        pass
    elif not (types.is_null(kind) or _is_plain(kind)):
        text = f"columns of type {str(kind)[:_LONGEST_COMPLAINT]} are not read: send plain values"
        raise InvalidRequest(text)


def _is_plain(kind: Any) -> bool:
    """Report whether a value of a type is a number, a time, a text or bytes."""
    import pyarrow as pa

    types = pa.types
    if types.is_fixed_size_binary(kind) and not types.is_decimal(kind):
        return bool(kind.byte_width > 0)
    return bool(types.is_primitive(kind) or types.is_decimal(kind)) or _is_text(kind)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    tests = (types.is_string, types.is_large_string, types.is_string_view)
    return any(test(kind) for test in (*tests, types.is_binary, types.is_large_binary, types.is_binary_view))


# -- columns, before anything is made of them


def _count(column: Any, allowance: Allowance) -> None:
    """Count what no buffer of a column shows: values without bytes, and bytes that several share.
    Its type has been checked.
    """
    import pyarrow as pa

    kind, types = column.type, pa.types
    if isinstance(column, pa.ExtensionArray):
        _count(column.storage, allowance)
    elif types.is_dictionary(kind):
        allowance.take_values(len(column.dictionary), "the dictionaries of the columns")
        allowance.take_bytes(column.dictionary.nbytes, "the dictionaries of the columns")
        _count(column.dictionary, allowance)
    elif types.is_struct(kind):
        for i in range(kind.num_fields):
            _count(column.field(i), allowance)
    elif types.is_nested(kind):
        _count(column.values, allowance)
    elif types.is_null(kind):
        allowance.take_values(len(column), "columns of nulls", "leave them out, or send fewer rows")
    elif types.is_string_view(kind) or types.is_binary_view(kind):
        _, views, *_ = column.buffers()
        lengths = memoryview(views).cast("B").cast("I")[::4] if views is not None else ()
        allowance.take_bytes(sum(lengths), "texts that share their bytes", "send each text by itself, or fewer rows")


def _count_references(column: Any, allowance: Allowance) -> None:
    """Count the texts to which a column of references refers, since whoever changes its type makes
    them. It has been checked that there is a text for each reference.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type) or not _is_text(column.type.value_type):
        return
    lengths = pc.binary_length(column.dictionary.cast(pa.large_binary()))
    n = pc.sum(lengths.take(column.indices)).as_py() or 0
    allowance.take_bytes(n, "columns of references, written out,", "send fewer rows")
