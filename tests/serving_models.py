"""Services for tests that run `carpool serve`."""

from __future__ import annotations

import carpool
from tests import models

scale = carpool.Service(carpool.Stage(models.scale, max_batch_size=4))
talks = carpool.Service(models.Talks)
prints = carpool.Service(models.Prints)
