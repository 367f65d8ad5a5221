"""Metrics of models' own that workers of one stage have sent over the network.

Of a worker that is there the message that came last is kept as it is, which is at most
`MAX_METRICS_BYTES` long. Of those that have gone only what they have counted is kept, as one sum.
Counting comes before keeping: a new series is kept only if it fits into what is left of
`MOST_TEXT`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from carpool.engine.logger import logger
from carpool.engine.worker.own_metrics import OF_NOW, Family, OwnSample

MOST_TEXT = 4 * 2**20
"""How many characters of names, labels and texts are kept of workers that have gone."""

_PER_SERIES = 200  # what one costs besides its text
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")

_Key = tuple[str, str, frozenset[str]]
_Series = tuple[str, frozenset[tuple[str, str]]]


class Counted:
    """Sums of what workers have counted that have ended.

    Args:
        most_text: How many characters of names, labels and texts are kept at most.
    """

    def __init__(self, most_text: int = MOST_TEXT) -> None:
        self._left = most_text
        self._texts: dict[_Key, str] = {}  # by name, kind and bounds
        self._numbers: dict[_Key, dict[_Series, float]] = {}
        self._is_full = False

    def add(self, families: Iterable[Family]) -> None:
        """Add what a worker has counted; what it says of the present is void."""
        for family in families:
            if family.kind in OF_NOW or not family.samples:
                continue
            key = (family.name, family.kind, family.bounds)
            if key not in self._numbers:
                if not self._has_room(len(family.name) + len(family.text) + sum(map(len, family.bounds))):
                    continue
                self._texts[key], self._numbers[key] = family.text, {}
            numbers = self._numbers[key]
            for sample in family.samples:
                series = (sample.name, frozenset(sample.labels.items()))
                text = sum(len(label) + len(value) for label, value in sample.labels.items())
                if series in numbers or self._has_room(len(sample.name) + text):
                    numbers[series] = numbers.get(series, 0.0) + sample.value

    def families(self) -> list[Family]:
        """Return the sums."""
        return [
            Family(name, text, kind, [OwnSample(n, dict(labels), value) for (n, labels), value in numbers.items()])
            for ((name, kind, _), numbers), text in zip(self._numbers.items(), self._texts.values(), strict=True)
        ]

    def _has_room(self, text: int) -> bool:
        """Take room for a series, and report whether there was any."""
        cost = _PER_SERIES + text
        if cost > self._left:
            if not self._is_full:
                self._is_full = True
                logger.warning("the models' own metrics have too many series: new ones of workers that end are lost")
            return False
        self._left -= cost
        return True


class SentMetrics:
    """What the workers of a stage have sent, by place.

    Attributes:
        past: What those have counted that have gone.
    """

    def __init__(self) -> None:
        self.past = Counted()
        self._messages: dict[int, bytes] = {}

    def sent(self, place: int, message: bytes) -> None:
        """Keep what a worker has sent, in the place of its last message."""
        self._messages[place] = message

    def ended(self, place: int) -> None:
        """Add up what a worker has counted, which has gone."""
        message = self._messages.pop(place, None)
        if message is not None:
            self.past.add(_read(message))

    def living(self) -> list[list[Family]]:
        """Return the metrics of each worker that is there."""
        return [_read(message) for message in self._messages.values()]


def _read(message: bytes) -> list[Family]:
    """Return the metrics of a message; those that could not stand on the page are left out."""
    try:
        families = msgspec.msgpack.decode(message, type=list[Family])
    except msgspec.DecodeError:
        return []
    return [each for each in families if _is_plain(each.name) and all(map(_has_plain_names, each.samples))]


def _has_plain_names(sample: OwnSample) -> bool:
    return _is_plain(sample.name) and all(map(_is_plain, sample.labels))


def _is_plain(name: str) -> bool:
    return _NAME.fullmatch(name) is not None
