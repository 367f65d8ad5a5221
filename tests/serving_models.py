"""Services for tests that run `carpool serve`."""

from __future__ import annotations

import carpool
from tests import models

talks = carpool.Service(models.Talks)
prints = carpool.Service(models.Prints)
