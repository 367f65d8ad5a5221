"""The statistics extension of the Open Inference Protocol, from what carpool counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from carpool.engine.observe.snapshot import ServiceSnapshot, StageSnapshot
from carpool.http.protocols.base import ModelOfApp

_NS = 1e9


def of_models(models: Sequence[ModelOfApp]) -> dict[str, Any]:
    """Return the statistics of models."""
    found = [(model.name, model.snapshot()) for model in models]
    return {"model_stats": [_of(name, snapshot) for name, snapshot in found if snapshot is not None]}


def _of(name: str, snapshot: ServiceSnapshot) -> dict[str, Any]:
    ok = snapshot.outcomes.get("ok", 0)
    failed = sum(n for outcome, n in snapshot.outcomes.items() if outcome != "ok")
    queue_s = sum(stage.mean_queue_s for stage in snapshot.stages)
    compute_s = sum(stage.mean_compute_s for stage in snapshot.stages)
    last = snapshot.stages[-1]
    return {
        "name": name,
        "version": "1",
        "last_inference": 0,
        "inference_count": ok,
        "execution_count": sum(stage.batches for stage in snapshot.stages),
        "inference_stats": {
            "success": _times(ok, snapshot.mean_latency_s),
            "fail": _times(failed, 0.0),
            "queue": _times(ok, queue_s),
            "compute_input": _times(ok, 0.0),
            "compute_infer": _times(ok, compute_s),
            "compute_output": _times(ok, 0.0),
            "cache_hit": _times(0, 0.0),
            "cache_miss": _times(0, 0.0),
        },
        "response_stats": {},
        "batch_stats": _batches(last),
        "memory_usage": [],
    }


def _batches(stage: StageSnapshot) -> list[dict[str, Any]]:
    """Return how often each batch size was run, with the mean time of all."""
    return [
        {
            "batch_size": size,
            "compute_input": _times(n, 0.0),
            "compute_infer": _times(n, stage.mean_compute_s),
            "compute_output": _times(n, 0.0),
        }
        for size, n in stage.batch_sizes.items()
    ]


def _times(count: int, mean_s: float) -> dict[str, int]:
    return {"count": count, "ns": int(count * mean_s * _NS)}
