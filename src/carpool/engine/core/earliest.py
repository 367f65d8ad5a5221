"""The earliest of the times of many things, without a look at each of them for each question."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Final, Generic, TypeVar

T = TypeVar("T")

FEW: Final = 16
"""Up to so many things are looked at for each question, which costs less than to keep a heap."""


class Earliest(Generic[T]):
    """The earliest of some time over many things that come, go and change.

    Each thing has an entry in a heap that is no later than its time (`time_of`, infinity for one
    that has gone), and is corrected when it comes to the front. So the cost of a question does not
    grow with the number of things. The heap is made by the first question about many of them; while
    it `is_kept`, `note` must be called.
    """

    __slots__ = ("_heap", "_most", "_n", "_time_of", "is_kept")

    def __init__(self, time_of: Callable[[T], float]) -> None:
        self._time_of = time_of
        self._heap: list[tuple[float, int, T]] = []
        self._n = self._most = 0
        self.is_kept = False

    def note(self, thing: T) -> None:
        if not self.is_kept:
            return
        if len(self._heap) > self._most:  # it was not read for long
            self.forget()
            return
        self._n += 1
        heappush(self._heap, (-inf, self._n, thing))

    def forget(self) -> None:
        """Drop the heap; the next question makes it again if it must."""
        self._heap.clear()
        self.is_kept = False

    def least(self, things: Callable[[], Iterable[T]], n: int, but: Collection[T] = ()) -> float:
        """Return the earliest time of all `n` things but some; infinity if there is none. `n` may
        be a few more.
        """
        if n <= FEW:
            if self.is_kept:
                self.forget()
            return min([self._time_of(each) for each in things() if each not in but], default=inf)
        self._keep(things, n)
        heap, aside, time = self._heap, [], inf
        while heap:
            noted, number, thing = heap[0]
            time = self._time_of(thing)
            if time == inf:
                heappop(heap)
            elif time != noted:
                heapreplace(heap, (time, number, thing))
            elif thing in but:
                aside.append(heappop(heap))
            else:
                break
        else:
            time = inf
        for entry in aside:
            heappush(heap, entry)
        return time

    def until(self, time: float, things: Callable[[], Iterable[T]], n: int) -> Iterator[T]:
        """Yield the things whose times are not later than `time`, the earliest first.

        None may change while this iterates. The other arguments are those of `least`.
        """
        if n <= FEW:
            self.forget()
            yield from sorted([each for each in things() if self._time_of(each) <= time], key=self._time_of)
            return
        found: dict[T, None] = {}
        try:
            while self.least(things, n) <= time < inf:
                thing = heappop(self._heap)[2]
                if thing not in found:
                    found[thing] = None
                    yield thing
        finally:
            for thing in found:
                self.note(thing)

    def _keep(self, things: Callable[[], Iterable[T]], n: int) -> None:
        self._most = 4 * n + 4 * FEW
        heap = self._heap
        if not self.is_kept or len(heap) > self._most:
            heap[:] = [(self._time_of(each), number, each) for number, each in enumerate(things())]
            heapify(heap)
            self._n, self.is_kept = len(heap), True
