"""A program with a service, for replicas of Ray Serve."""

from __future__ import annotations

from carpool import Service, Stage
from tests.on_ray.models import Place

service = Service(Stage(Place, max_batch_size=4, workers=2), name="place")
