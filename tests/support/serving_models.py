"""Services for tests that run `carpool serve`."""

from __future__ import annotations

import carpool
from tests.support import models

talks = carpool.Service(models.Talks)
prints = carpool.Service(models.Prints)
hangs = carpool.Service(carpool.Stage(models.Slow, max_batch_size=4, max_batch_time_s=0.5), timeout_s=4.0)
sleeps = carpool.Service(carpool.Stage(models.Slow, max_batch_size=4, workers=2, max_batch_time_s=2.0), timeout_s=60.0)
patient = carpool.Service(
    carpool.Stage(models.Slow, max_batch_size=8, policy="static", max_queue_delay_s=50.0), timeout_s=60.0
)
