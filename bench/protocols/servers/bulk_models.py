"""carpool's services of `bench.protocols.bulk`."""

from __future__ import annotations

import carpool
from bench.peers.servers.carpool_models import DoubleField
from examples.digits import Digits

trivial = carpool.Service(carpool.Stage(DoubleField, max_batch_size=64), name="trivial")
digits = carpool.Service(carpool.Stage(Digits, max_batch_size=64), name="digits")
