"""Pickles in which a row of a batch does not take its batch along.

Most libraries pickle the part of an object's memory that the object shows. torch and pyarrow pickle
all of it: a row of a tensor would take the rows of its neighbours along, whose numbers are others'.
So what shows less than it holds is copied first, wherever it stands in an object. As with numpy,
two views of one memory come as two objects, each with memory of its own. What is not a plain view
(a sparse tensor, one without memory) is left to its library, and what it consists of is looked at.

Neither library is imported here: an object of theirs exists only where it has been.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from math import inf, prod
from typing import Any, Final

from carpool.wire.scalars import SCALARS

BufferCallback = Callable[[pickle.PickleBuffer], Any]

_modules = sys.modules
_PLAIN: Final = SCALARS | {bytes}
_FEW: Final = 16
_LARGE = 64 * 1024  # bytes; of less, even the bits beside those that are shown are cut off
_VIEWS = ("string_view", "binary_view")  # whose elements lie in buffers that slices share


def dumps(value: object, buffer_callback: BufferCallback | None = None, *, longest: float = inf) -> bytes:
    """Return the pickle of `value`.

    Args:
        value: Any object.
        buffer_callback: See `pickle.dumps`.
        longest: The most bytes that the pickle may have.

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
    """A file that takes so many bytes, so that pickling a larger object stops early."""

    def __init__(self, longest: float) -> None:
        self.parts: list[bytes] = []
        self._left = longest

    def write(self, data: Any) -> int:
        """Take the next part of a pickle."""
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
    """Report whether the memory of a tensor holds more than its elements."""
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
    """Return an array of pyarrow like `x`, in memory that holds nothing else."""
    if str(x.type) in _VIEWS:  # older versions do not count their bytes
        return x.cast(f"large_{str(x.type).removesuffix('_view')}").cast(x.type)
    if x.nbytes == x.get_total_buffer_size() and x.nbytes >= _LARGE:
        return x
    return arrow.concat_arrays([x])
