"""carpool's services of `bench.protocols.bulk`, and those of their models that run offline, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import carpool
from bench.peers.servers.carpool_models import DoubleField
from bench.shapes.servers.carpool_embed import Embed, words
from examples.digits import Digits

trivial = carpool.Service(carpool.Stage(DoubleField, max_batch_size=64), name="trivial")
digits = carpool.Service(carpool.Stage(Digits, max_batch_size=64), name="digits")
sentences = carpool.Service(carpool.Stage(Embed, max_batch_size=64, length=words), name="sentences", timeout_s=60)

OFFLINE: Mapping[str, tuple[Callable[[], carpool.Model], type]] = {
    "digits": (Digits, list[float]),
    "sentences": (Embed, str),
}
"""The model of a case, and the type of its items."""
