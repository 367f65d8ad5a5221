"""What the callers of one batch get where user code has failed: each an exception of its own, which it can be given.

An exception that several callers share goes to the first as it is and to the others as copies, since each raise adds to
its traceback. Some exceptions say something to whoever calls, awaits or iterates, and would say it to the wrong one:

* StopIteration and StopAsyncIteration mean "this is the end": `map(f, xs)` would stop there in silence, and a future
  refuses the first one. They become a RuntimeError with the original as its cause, as in generators (PEP 479);
* GeneratorExit and CancelledError mean "you are being ended": the caller is not. They become a ModelError.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any, cast

from carpool.call.retry import Failed
from carpool.errors import ModelError


def shared_out(results: list[Any]) -> tuple[list[Any], dict[int, Exception] | None]:
    """Errors apart from results."""
    if Failed not in set(map(type, results)):
        return results, None
    failed = {i: value.error for i, value in enumerate(results) if isinstance(value, Failed)}
    return results, each_its_own(failed)


def for_all(error: BaseException, n: int) -> tuple[list[Any], dict[int, Exception]]:
    """What `shared_out` gives where the whole batch of `n` has failed."""
    return [None] * n, each_its_own(dict.fromkeys(range(n), error))


def each_its_own(errors: dict[int, BaseException]) -> dict[int, Exception]:
    """What can be raised to each caller, by its place; the first who shares an exception gets it as it is."""
    own: dict[int, Exception] = {}
    given: dict[int, Exception] = {}
    for i, error in errors.items():
        first = given.get(id(error))
        if first is None:
            own[i] = given[id(error)] = _to_be_raised(error)
        else:
            own[i] = _copy_of(first)
    return own


def _to_be_raised(error: BaseException) -> Exception:
    kind = type(error).__name__
    told: Exception
    if isinstance(error, StopIteration | StopAsyncIteration):
        told = RuntimeError(f"the batched function raised {kind}")
    elif isinstance(error, GeneratorExit | asyncio.CancelledError):
        told = ModelError(f"the batch was broken off: {kind}", type_name=kind)
    else:
        return cast(Exception, error)
    told.__cause__ = error
    return told


def _copy_of(error: Exception) -> Exception:
    """A twin, whose cause is the original; the original itself where it cannot be copied, which is user code too."""
    try:
        twin = copy.copy(error)
        if type(twin) is not type(error):
            return error
        twin.__cause__ = error
    except BaseException:
        return error
    return twin
