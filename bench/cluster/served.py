"""The services behind `carpool serve`: `carpool serve bench.cluster.served:trivial --on ray`."""

from __future__ import annotations

from bench.cluster import models

trivial = models.service(models.Trivial)
timed = models.service(models.Timed)
