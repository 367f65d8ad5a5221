"""Python objects as bytes between our own processes, and the numbers of the formats in which items
are encoded.

A payload is one bytes-like object, or a list `[head, *buffers]` where large contiguous buffers
(such as numpy arrays) travel beside the pickle instead of inside it (pickle protocol 5, PEP 574).
Small arrays travel as a head and their elements (`arrays.py`), in a tenth of pickle's time. Only
payloads that `dump` has made in one of our own processes ever reach `load`: bytes from the network
are JSON, msgpack or raw, and never come here.

Scalars are payloads as they are until a frame is written. A batch of them is one array in msgpack,
which is written and read in one call each. Only values of exactly these types count: instances of
subclasses (a numpy scalar, an enum) and integers of more than 64 bits are objects like any other.
Texts that are long or not ASCII are packed one by one where they come from, because their length in
bytes is not known without encoding them.

A pickle of a row of a batch does not take its batch along. torch and pyarrow pickle all of an
object's memory, and so the rows of other callers. What shows less than it holds is therefore copied
first, wherever it stands in an object. As with numpy, two views of one memory come as two objects,
each with memory of its own. What is not a plain view (a sparse tensor, one without memory) is left
to its library, and what it consists of is looked at.

Memory for large buffers is used again once nothing refers to it, since a fresh buffer of some
megabytes costs about as much as filling it: the system maps and clears its pages one by one. An
array that is kept also keeps its buffer. A fresh buffer is not cleared, so a client that announces
sixteen megabytes and sends none takes none.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any, Final

import msgspec

from carpool.engine.wire import arrays
from carpool.engine.wire.arrays import Block

Buffer = bytes | bytearray | memoryview
Scalar = float | int | str | bool | None
Payload = Buffer | list[Buffer] | Scalar

# How an item is encoded: `Request.format` on the way in, `Request.accept` on the way out.
OBJECT: Final = 0  # a Python object of one of our processes, as `dump` makes it
JSON: Final = 1
MSGPACK: Final = 2
RAW: Final = 3  # the bytes are the item
ARRAYS: Final = 4  # on the way out: an object of builtins and numpy's arrays, see `hints/plain.py`
# the model's own format, by its `decode` or `encode`; further numbers if it writes several
CUSTOM: Final = 5

OBJECTS: Final = frozenset({OBJECT, ARRAYS})
"""The formats that are read by `load`."""

MOST_ADAPTERS: Final = 64
"""How many adapters of addresses can be told apart on the way in (see `adapted`)."""

LARGE: Final = 64 * 1024
"""Bytes; buffers of at least this size travel by themselves and are received into memory of their
own.
"""

_JOINED: Final = 2  # the first byte of the head of several payloads as one; no other head starts with it
_PICKLE: Final = 0x80  # the first byte of every pickle; no scalar in msgpack starts with it
_BUFFERS: Final = frozenset({bytes, bytearray, memoryview})
_decode_scalar = msgspec.msgpack.Decoder().decode

SCALARS: Final = frozenset({int, float, str, bool, type(None)})
"""The types of scalars; all of them are immutable."""

SHORT_SCALARS: Final = frozenset({int, float, bool, type(None)})
"""The types of scalars that never take more than `SCALAR_BYTES` bytes."""

LONGEST_TEXT: Final = 64 * 1024
"""Characters; longer texts are packed one by one."""

LEAST_INT: Final = -(2**63)
MOST_INT: Final = 2**64 - 1

SCALAR_BYTES: Final = 16
"""The most bytes that a scalar takes in a message, not counting characters but with its part of the
array's head.
"""


def adapted(format: int, adapter: int) -> int:
    """Return the number of a format (JSON, MSGPACK or RAW) whose value the `adapter`th adapter of
    the service makes an item of, on the way in.
    """
    return CUSTOM + format + RAW * adapter


def without_adapter(format: int) -> tuple[int, int]:
    """Return what `adapted` was given, for a format above CUSTOM."""
    adapter, format = divmod(format - CUSTOM - JSON, RAW)
    return format + JSON, adapter


def dump(value: Any) -> Payload:
    """Return `value` as a payload for another of our processes. Raises what pickling raises."""
    kind = type(value)
    if kind is float or (kind is int and LEAST_INT <= value <= MOST_INT):
        return value  # type: ignore[no-any-return]
    if kind in SCALARS:
        if kind is not int and (kind is not str or (len(value) < LONGEST_TEXT and value.isascii())):
            return value  # type: ignore[no-any-return]
        try:
            return pack_scalars(value)
        except (OverflowError, UnicodeError, msgspec.MsgspecError):
            return dumps(value)  # an integer of over 64 bits, or half a surrogate pair
    if kind is dict and is_record(value):
        return pickle.dumps(value, 5)
    if kind is bytes and len(value) >= LARGE:
        return [b"", value]
    if kind is arrays._ndarray or (arrays._ndarray is None and "numpy" in sys.modules and kind is arrays.array_type()):
        packed = _packed_array(value)
        if packed is not None:
            return packed
    buffers: list[Buffer] = []

    def keep_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True
        buffers.append(raw)
        return False

    head = dumps(value, keep_in_pickle)
    return [head, *buffers] if buffers else head


def _packed_array(array: arrays.Array) -> Payload | None:
    if array.nbytes >= LARGE:
        return None  # its memory travels as it is, uncopied
    head = arrays.head_of(array, array.shape)
    return None if head is None else [head, array.tobytes()]


def load(payload: Payload) -> object:
    """Read what `dump` has made. Arrays share the memory of the payload's buffers, so a payload is
    read only once; what is to be read again is `detached` before.
    """
    kind: type = type(payload)
    if kind is bytes or kind in _BUFFERS:
        return pickle.loads(payload) if payload[0] == _PICKLE else _decode_scalar(payload)  # type: ignore
    if type(payload) is not list:
        return payload
    head, *buffers = payload
    if not head:
        return bytes(buffers[0])
    if head[0] == arrays.MARK:
        return arrays.open_array(bytes(head), *buffers)
    if head[0] == _JOINED:
        return _load_joined(payload)
    return pickle.loads(head, buffers=buffers)


# -- several payloads as one


def join(parts: Sequence[Payload], names: Sequence[str] | None, *, is_tuple: bool = False) -> Payload:
    """Return payloads as one, without opening them; `load` reads it as a list, a tuple or, by
    names, a dict.
    """
    if not parts:
        return pickle.dumps({} if names is not None else () if is_tuple else [], 5)
    lengths: list[list[int]] = []
    small: list[Buffer] = []  # all of them travel as one buffer, behind the head
    large: list[Buffer] = []
    for part in parts:
        buffers = part if type(part) is list else [pack_scalars(part) if type(part) in SCALARS else part]
        lengths.append([_nbytes(each) for each in buffers])  # type: ignore[arg-type]
        for each in buffers:
            (small if _nbytes(each) < LARGE else large).append(each)  # type: ignore[arg-type]
    head = msgspec.msgpack.encode((None if names is None else list(names), is_tuple, lengths))
    return [bytes([_JOINED]) + head, b"".join(small), *large]


def parts_in(payload: Payload) -> list[Payload] | None:
    """Return the payloads of which `join` has made this one, or None. Raises ValueError if it is
    damaged.
    """
    if type(payload) is not list or payload[0][:1] != bytes([_JOINED]):
        return None
    _, _, lengths = _read_joined(payload[0])
    small, large = memoryview(payload[1]), iter(payload[2:])
    at, parts = 0, []
    for of_part in lengths:
        buffers: list[Buffer] = []
        for n in of_part:
            if n < LARGE:
                buffers.append(bytes(small[at : at + n]))
                at += n
            else:
                buffers.append(next(large, b""))
            if _nbytes(buffers[-1]) != n:
                raise ValueError("a payload of several parts lacks some of its bytes")
        parts.append(buffers if len(buffers) > 1 else buffers[0])
    return parts  # type: ignore[return-value]


_read_head_of_joined = msgspec.msgpack.Decoder(tuple[list[str] | None, bool, list[list[int]]]).decode


def _read_joined(head: Buffer) -> tuple[list[str] | None, bool, list[list[int]]]:
    try:
        return _read_head_of_joined(memoryview(head)[1:])
    except msgspec.MsgspecError as error:
        raise ValueError(f"the head of a payload of several parts cannot be read: {error}") from error


def _load_joined(payload: list[Buffer]) -> object:
    names, is_tuple, _ = _read_joined(payload[0])
    values = [load(part) for part in parts_in(payload) or ()]
    if names is not None:
        return dict(zip(names, values, strict=True))
    return tuple(values) if is_tuple else values


def detached(payloads: Sequence[Payload], memory: Memory) -> Sequence[Payload]:
    """Return payloads that share no memory with these, nor with the objects they were made of,
    which may change from now on. What cannot change is not copied.
    """
    if type(payloads) is Block:
        elements = payloads.elements
        own = _copied(elements, memory)
        return payloads if own is elements else Block(payloads.head, own, len(payloads))
    if type(payloads) is Scalars or list not in set(map(type, payloads)):
        return payloads
    return [detach(payload, memory) for payload in payloads]


def detach(payload: Payload, memory: Memory) -> Payload:
    if type(payload) is not list:  # reading it makes new objects
        return payload
    return [_copied(buffer, memory) for buffer in payload]


def _copied(buffer: Buffer, memory: Memory) -> Buffer:
    if type(buffer) is bytes:
        return buffer
    fresh = memory.buffer(_nbytes(buffer))
    memoryview(fresh)[:] = buffer  # assigning to the bytearray itself would copy twice
    return fresh


def format_name(format: int) -> str:
    return {MSGPACK: "msgpack", RAW: "text"}.get(format, "JSON")


def size_of(payload: Payload) -> int:
    """Return how many bytes `payload` holds; for a scalar, the most that it takes in a message."""
    if type(payload) is bytes:
        return len(payload)
    if type(payload) in SHORT_SCALARS:
        return SCALAR_BYTES
    if type(payload) is str:
        return SCALAR_BYTES + len(payload)
    if type(payload) is list:
        return sum([_nbytes(part) for part in payload])
    return _nbytes(payload)  # type: ignore[arg-type]


def parts_of(payloads: Sequence[Payload]) -> tuple[list[int], list[Buffer]]:
    """Return how many buffers each payload has (at least one), and all buffers in a row; scalars
    are packed.
    """
    kinds: set[type] = set(map(type, payloads))
    if kinds <= _BUFFERS:
        return [1] * len(payloads), payloads  # type: ignore[return-value]
    counts: list[int] = []
    parts: list[Buffer] = []
    for payload in payloads:
        if type(payload) is list:
            counts.append(len(payload))
            parts += payload
        else:
            counts.append(1)
            parts.append(pack_scalars(payload) if type(payload) in SCALARS else payload)  # type: ignore[arg-type]
    return counts, parts


def _nbytes(part: Buffer) -> int:
    return part.nbytes if type(part) is memoryview else len(part)


# -- scalars


_ALWAYS_PLAIN: Final = frozenset({float, bool, type(None)})

pack_scalars = msgspec.msgpack.Encoder().encode
"""Returns a scalar, or a list of scalars, as bytes."""

_decode_scalars = msgspec.msgpack.Decoder(list[Scalar]).decode


class Scalars(list[Scalar]):
    __slots__ = ()


def are_scalars(payloads: Sequence[Any]) -> bool:
    if type(payloads) is Scalars:
        return True
    return len(payloads) > 0 and type(payloads[0]) in SCALARS and set(map(type, payloads)) <= SCALARS


def as_scalars(values: Sequence[Any], kinds: set[type]) -> Scalars | None:
    """Return values, of which there is one at least, as payloads; None if not all of them are
    scalars that may stay as they are.
    """
    if not kinds <= SCALARS:
        return None
    if not kinds <= _ALWAYS_PLAIN:
        if kinds == {int}:
            is_plain = min(values) >= LEAST_INT and max(values) <= MOST_INT
        else:
            is_plain = kinds == {str} and all(map(str.isascii, values)) and max(map(len, values)) < LONGEST_TEXT
        if not is_plain:
            return None
    return Scalars(values)


def unpack_scalars(data: bytes | bytearray | memoryview, count: int) -> Scalars:
    """Read what `pack_scalars` has made of a list of `count` scalars. Raises ValueError for
    anything else.
    """
    try:
        scalars = Scalars(_decode_scalars(data))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    if len(scalars) != count or pack_scalars(scalars) != data:  # each scalar is written in one way only
        raise ValueError(f"the bytes are not {count} scalars in their shortest form")
    return scalars


# -- pickles


BufferCallback = Callable[[pickle.PickleBuffer], Any]

_modules = sys.modules
_PLAIN: Final = SCALARS | {bytes}
_FEW: Final = 16
_VIEWS = ("string_view", "binary_view")  # whose elements lie in buffers that slices share


def dumps(value: object, buffer_callback: BufferCallback | None = None, *, longest: float = inf) -> bytes:
    """Return the pickle of `value`, of at most `longest` bytes.

    Raises:
        OverflowError: The pickle would be longer.
        BaseException: Whatever pickling raises.
    """
    if longest == inf and "torch" not in _modules and "pyarrow" not in _modules:
        return pickle.dumps(value, 5, buffer_callback=buffer_callback)
    file = _File(longest)
    _Pickler(file, 5, buffer_callback=buffer_callback).dump(value)
    return b"".join(file.parts)


def is_record(fields: dict[Any, Any]) -> bool:
    """Report whether a dict holds a few plain values, and so no part of something larger, as most
    items do: `pickle` has written it before a pickler of ours could begin.
    """
    if len(fields) > _FEW:
        return False
    for name, each in fields.items():  # noqa: SIM110 - quicker than `all`, and than two calls of `issuperset`
        if type(name) is not str or type(each) not in _PLAIN:
            return False
    return True


class _File:
    def __init__(self, longest: float) -> None:
        self.parts: list[bytes] = []
        self._left = longest

    def write(self, data: Any) -> int:
        part = bytes(data)
        self._left -= len(part)
        if self._left < 0:
            raise OverflowError("the pickle is longer than it may be")
        self.parts.append(part)
        return len(part)


class _Pickler(pickle.Pickler):
    """A pickler that copies what shows less than it holds."""

    def reducer_override(self, x: Any) -> Any:
        """Return what a part of something larger is pickled as; NotImplemented for the rest."""
        kind = type(x)
        torch, arrow = _modules.get("torch"), _modules.get("pyarrow")
        tensor, array = getattr(torch, "Tensor", None), getattr(arrow, "Array", None)
        try:
            # not for a class that says itself how it is pickled, which may be the user's
            if tensor is not None and issubclass(kind, tensor) and kind.__reduce_ex__ is tensor.__reduce_ex__:
                return own_tensor(torch, x).__reduce_ex__(5) if _holds_more(torch, x) else NotImplemented
            if array is not None and issubclass(kind, array) and kind.__reduce__ is array.__reduce__:
                return _own_array(arrow, x).__reduce__()
        except MemoryError:
            raise
        except Exception:  # it has no memory that could be looked at
            return NotImplemented
        return NotImplemented


def _holds_more(torch: Any, x: Any) -> bool:
    if x.layout is not torch.strided or x.is_nested or x.device.type == "meta":
        return False
    along = [(n, stride) for n, stride in zip(x.shape, x.stride(), strict=True) if stride]
    shown = min(prod([n for n, _ in along]), 1 + sum([(n - 1) * stride for n, stride in along])) if x.numel() else 0
    return bool(x.untyped_storage().nbytes() > shown * x.element_size())


def own_tensor(torch: Any, x: Any) -> Any:
    """Return a tensor like `x` in memory of its own, which holds nothing else; a leaf."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        core = x.detach()
        for axis, (n, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
            if n > 1 and not stride:  # one element is shown n times
                core = core.narrow(axis, 0, 1)
        copy = core.clone().expand(x.shape)
        if type(x) is not torch.Tensor:
            copy = copy.as_subclass(type(x))
    copy.__dict__.update(x.__dict__)
    return copy.requires_grad_(x.requires_grad)


def _own_array(arrow: Any, x: Any) -> Any:
    if str(x.type) in _VIEWS:  # older versions do not count their bytes
        return x.cast(f"large_{str(x.type).removesuffix('_view')}").cast(x.type)
    if (
        x.nbytes == x.get_total_buffer_size() and x.nbytes >= LARGE
    ):  # of less, even the bits beside those that are shown are cut off
        return x
    return arrow.concat_arrays([x])


# -- memory


_MOST_KEPT_BYTES: Final = 128 * 2**20  # 16 callers with arrays of 6 MB each have them all at once
_MOST_KEPT: Final = 32
# a count of references proves something only where every thread sees all references at once
_COUNTS_ARE_EXACT: Final = sys.version_info < (3, 13) or sys._is_gil_enabled()

uncleared = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyByteArray_FromStringAndSize", ctypes.pythonapi)
)
"""Returns a bytearray with arbitrary content, given None and its length."""


class Memory:
    """Hands out buffers to one reader, or to the connections of one loop."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []  # the one handed out last comes last
        self._kept_bytes = 0

    def buffer(self, nbytes: int) -> bytearray:
        """Return a buffer of exactly `nbytes` bytes, with arbitrary content."""
        kept = self._kept
        for i in range(len(kept)):
            if len(kept[i]) == nbytes and _references(kept, i) == _OURS:
                kept.append(kept.pop(i))
                return kept[-1]
        fresh: bytearray = uncleared(None, nbytes)
        if nbytes <= _MOST_KEPT_BYTES and _COUNTS_ARE_EXACT:  # else it would never be used again
            self._keep(fresh)
        return fresh

    def _keep(self, fresh: bytearray) -> None:
        self._kept.append(fresh)
        self._kept_bytes += len(fresh)
        while self._kept_bytes > _MOST_KEPT_BYTES or len(self._kept) > _MOST_KEPT:
            self._kept_bytes -= len(self._kept.pop(0))


def _references(kept: list[bytearray], i: int) -> int:
    return sys.getrefcount(kept[i])


# How many references are our own: that of the list and those that counting adds. It is measured
# here, because the number differs between versions of the interpreter.
_OURS: Final = _references([bytearray(1)], 0)
