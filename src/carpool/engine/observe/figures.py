"""The figures of running services as plain data, for the dashboard and `carpool top`.

They are the numbers of `/metrics`, before anything is divided or averaged: a page that shows them
compares two moments.

`PastFigures` keeps those of the last ten minutes, one sample for each `EVERY_S` seconds, as JSON
and without what only the latest figures are shown of, in at most `MOST_BYTES`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any, Final

import msgspec

from carpool.engine.core.roster import PlaceRecord
from carpool.engine.observe.picture import Dot, Picture
from carpool.engine.observe.snapshot import DURATION_BOUNDS, Durations, StreamStats
from carpool.engine.observe.stats import StageStats, Stats, explained
from carpool.engine.policy.cost import CostModel

_LATE_SHARE = 0.05  # of the answers may be later than the SLO before that is a problem
_LARGEST_INT = 2**53  # which JavaScript can distinguish from the next one
_FEW = 0.01  # of the requests may fail before that is bad, and not only worth a look
_RULES = {
    "full": "the batch is full",
    "free": "a worker is free, so nothing waits",
    "delay": "the delay is over",
    "size": "the batch has the size that pays best",
    "tight": "the first request has no more time to wait",
    "shed": "some requests cannot be in time any more",
    "probe": "a size is tried of which little is known",
    "cold": "nothing is known yet, so batches grow step by step",
    "closing": "the service ends, so nothing waits",
    "quarantine": "a request that may have killed a worker runs alone",
    "gather": "it waits a moment for clients that are about to return",
}


def figures(services: Sequence[Stats], now: float) -> dict[str, Any]:
    return {
        "time": now,
        "bounds_s": list(DURATION_BOUNDS),
        "services": [_service(stats, now) for stats in services],
    }


def _service(stats: Stats, now: float) -> dict[str, Any]:
    return {
        "name": stats.name,
        "run": stats.run,
        "outcomes": {**stats.outcomes, "cancelled": stats.cancelled},
        "in_flight": stats.core.unanswered,
        "latency": _histogram(stats.latency),
        "slo_s": stats.slo_s,
        "within_slo": stats.within_slo,
        "stages": [_stage(stage, now) for stage in stats.stages],
        "streams": None if stats.streams is None else _streams(stats.streams),
        "graph": None if stats.picture is None else _graph(stats.picture, stats),
    }


def _graph(picture: Picture, stats: Stats) -> dict[str, Any]:
    return {
        "width": picture.width,
        "height": picture.height,
        "dots": [_dot(dot, stats) for dot in picture.dots],
        "links": [list(link) for link in picture.links],
    }


def _dot(dot: Dot, stats: Stats) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": dot.kind, "name": dot.name, "x": dot.x, "y": dot.y}
    if dot.node is not None:
        waited = stats.stages[dot.node.crew.lobby.stage].waited_at(dot.node)
        found |= {
            "stage": dot.node.crew.lobby.stage,
            "place": stats.places[dot.node].name,
            "queued": dot.node.queued,
            "running": dot.node.running,
            "entered": waited.count,
            "waited_s": waited.sum_s,
        }
    return found


def _stage(stage: StageStats, now: float) -> dict[str, Any]:
    crew, roster = stage.crew, stage.roster
    why = {key: value for key, value in explained(crew.lobby.policy, now, crew).items() if _is_plain(value)}
    return {
        "name": stage.name,
        "has_failed": roster is not None and roster.failed,
        "queued": len(crew.queue),
        "queued_bytes": crew.queue.nbytes,
        "most_queued": crew.queue.max_size,
        "running": len(crew.in_flight),
        "queue": _histogram(stage.queue_time),
        "compute": _histogram(stage.compute_time),
        "idle_gap": _histogram(stage.idle_gap),
        "batch_sizes": {str(n): count for n, count in sorted(stage.batch_sizes.items())},
        "reasons": {reason: count for reason, count in stage.reasons.items() if count},
        "items": stage.items,
        "early_answers": crew.lobby.early,
        "places": list(stage.places),
        "padding": stage.padding,
        "workers": [] if roster is None else [_worker(n, stage, roster.places[n]) for n in sorted(roster.places)],
        "restarts": 0 if roster is None else roster.restarts,
        "split_batches": stage.split_batches,
        "out_of_memory": stage.out_of_memory,
        "safe_batch_size": stage.safe_batch_size,
        "policy": why,
        "decision": _decision(stage, why),
        "cost": _cost(crew.lobby.policy),
    }


def _decision(stage: StageStats, why: dict[str, Any]) -> str:
    if stage.roster is not None and stage.roster.failed:
        return "it has failed, so no batch goes any more"
    if "rule" in why and not stage.batch_sizes:
        return "no batch has gone yet"
    return in_words(why, len(stage.crew.queue))


def _worker(place: int, stage: StageStats, record: PlaceRecord) -> dict[str, Any]:
    name = stage.worker_name(place)
    found = {"place": place, "name": name, "state": str(record.state), "restarts": max(0, record.starts - 1)}
    if (hello := stage.elsewhere.get(place)) is not None:
        found |= {"where": hello.whereabouts, "host": hello.host, "pid": hello.pid, **hello.place_in_cluster}
    return found


def _streams(streams: StreamStats) -> dict[str, Any]:
    return {
        "ends": dict(streams.ends),
        "good": streams.good,
        "rows": streams.stepper.running,
        "paused": streams.pausing,
        "parts": streams.stepper.parts,
        "first_part": _histogram(streams.first_part),
        "part": _histogram(streams.part),
    }


def _histogram(durations: Durations) -> dict[str, Any]:
    return {"counts": list(durations.counts), "sum_s": durations.sum_s}


def _cost(policy: Any) -> dict[str, Any] | None:
    cost = getattr(policy, "cost", None)
    if not isinstance(cost, CostModel) or not cost.samples:
        return None
    curve, measured = cost.curve(), cost.points()
    return {"sizes": [n for n, _ in curve], "seconds": [s for _, s in curve], "measured": measured}


def in_words(why: dict[str, Any], queued: int) -> str:
    if "error" in why:
        return f"its policy raises: {why['error']}"
    if why.get("policy") == "onebyone":
        return f"each item goes alone, as soon as a worker is free{f'; {queued} wait now' if queued else ''}"
    rule = str(why.get("rule", ""))
    text = _RULES.get(rule, rule)
    gather_s = why.get("gather_s") or 0.0
    size = why.get("expected_batch_size")
    words = [f"the last batch went because {text}" if text else f"policy {why.get('policy', '')}"]
    if gather_s:
        words.append(f"it gathers for up to {1000 * gather_s:.1f} ms, as clients are about to return")
    if size:
        words.append(f"it makes batches of up to {size:.0f} on purpose")
    if queued:
        words.append(f"{queued} wait now")
    return "; ".join(words)


def _is_plain(value: object) -> bool:
    if type(value) is float:
        return -inf < value < inf
    if type(value) is int:
        return abs(value) < _LARGEST_INT
    return type(value) is str or type(value) is bool or value is None


def problems(
    before: dict[str, Any] | None, now: dict[str, Any], long_before: dict[str, Any] | None = None
) -> list[dict[str, str]]:
    """Return what is wrong, worst first, in words and with the next step.

    Args:
        before: The figures a few seconds ago; None if there are none.
        now: The figures.
        long_before: Those since which workers have died lately. The effects on requests last longer
            than the death of a worker.
    """
    found: list[tuple[int, str, str]] = []
    earlier = _by_run(before)
    long_ago = _by_run(long_before or before)
    for service in now["services"]:
        old, stages = earlier.get(service["run"], service), long_ago.get(service["run"], service)["stages"]
        for stage, stage_before in zip(service["stages"], stages, strict=True):
            found += _of_stage(service["name"], stage, stage_before, hurts=_hurts(old, service))
    for service in now["services"]:  # what stages do explains what becomes of requests, so it comes first
        if service["run"] in earlier:
            stages = long_ago.get(service["run"], service)["stages"]
            lacks = any(map(_lacks_workers, stages, service["stages"]))
            found += _of_traffic(earlier[service["run"]], service, lacks_workers=lacks)
    found.sort(key=lambda each: each[0])
    return [{"level": "bad" if rank == 0 else "warn", "text": text, "step": step} for rank, text, step in found]


def _by_run(figures: dict[str, Any] | None) -> dict[int, dict[str, Any]]:
    return {} if figures is None else {service["run"]: service for service in figures["services"]}


def _counts(before: dict[str, Any], now: dict[str, Any]) -> dict[str, int]:
    return {outcome: n - before["outcomes"].get(outcome, 0) for outcome, n in now["outcomes"].items()}


def _hurts(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Report whether callers of a service have noticed lately if workers were missing."""
    counts = _counts(before, now)
    return any(counts.get(outcome, 0) > 0 for outcome in ("overloaded", "expired", "unavailable"))


def _died(before: dict[str, Any], now: dict[str, Any]) -> int:
    return int(now.get("restarts", 0) - before.get("restarts", 0))


def _of_stage(model: str, stage: dict[str, Any], before: dict[str, Any], *, hurts: bool) -> list[tuple[int, str, str]]:
    """Return what is wrong with a stage; if `hurts`, workers that died or are missing are the
    cause.
    """
    name, states = f"Stage {stage['name']} of {model}", [worker["state"] for worker in stage["workers"]]
    ready = states.count("ready")
    if stage["has_failed"]:
        return [
            (
                0,
                f"{name} has failed: its workers died again and again, and all requests are answered 503.",
                "Look in the log for what the last workers said, mend it, and start the server anew.",
            )
        ]
    found = []
    if states and not ready:
        found.append(
            (
                0,
                f"{name} has no worker that is ready ({', '.join(sorted(set(states)))}).",
                "If they load, wait; if they die, the log says why.",
            )
        )
    elif ready < len(states):
        found.append(
            (
                0 if hurts and _lacks_workers(before, stage) else 1,
                f"{len(states) - ready} of {len(states)} workers of {name[0].lower()}{name[1:]} are not ready.",
                "They are being replaced. If this goes on, the log says why they end.",
            )
        )
    if (died := _died(before, stage)) > 0:
        found.append(
            (
                0 if hurts else 1,
                f"Workers of stage {stage['name']} of {model} have died lately: {died}.",
                "They were replaced, and their requests were run again. The log says why they ended.",
            )
        )
    if stage["queued"] >= stage["most_queued"]:
        found.append((0, f"The queue of {name[0].lower()}{name[1:]} is full.", "Add workers, or send less."))
    return found


def _lacks_workers(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Report whether workers of a stage have died lately, or since, and are not ready again."""
    return _died(before, now) > 0 or any(map(_is_lost, now["workers"]))


def _is_lost(worker: dict[str, Any]) -> bool:
    """Report whether a worker has died and none is in its place again; a new one only loads."""
    is_loading = worker["state"] in ("starting", "loading", "warming")
    return worker["state"] in ("hung", "dead") or (is_loading and worker.get("restarts", 0) > 0)


def _of_traffic(before: dict[str, Any], now: dict[str, Any], *, lacks_workers: bool) -> list[tuple[int, str, str]]:
    model = now["name"]
    counts = _counts(before, now)
    total = sum(counts.values())
    found = []
    if any(stage["has_failed"] for stage in now["stages"]):
        counts["unavailable"] = 0  # it is said of the stage that all requests are answered so
    refused = ("are refused, since more come than can be served", "Add workers, or have clients send less.")
    if lacks_workers:
        refused = ("are refused", "Workers were missing: see to that first.")
    for outcome, rank, text, step in (
        ("overloaded", 0, *refused),
        ("expired", 0, "miss their deadline", "Look where the time goes below: in the queue, or in the model?"),
        ("unavailable", 0, "are answered 503", "Look at the workers below, and in the log."),
        ("model_error", 0, "make the model raise", "The log has the tracebacks."),
        ("invalid_item", 1, "do not fit the model's input", "Tell the clients; /docs shows what fits."),
    ):
        if counts.get(outcome, 0) > 0:
            if counts[outcome] < _FEW * total:
                rank = 1
            found.append((rank, f"{_share(counts[outcome], total)} of the requests for {model} {text}.", step))
    answered = counts.get("ok", 0)
    if now["slo_s"] is not None and answered:
        late = answered - (now["within_slo"] - before["within_slo"])
        if late > _LATE_SHARE * answered:
            slo_ms = 1000 * now["slo_s"]
            found.append(
                (
                    1,
                    f"{_share(late, answered)} of the answers of {model} come later than the SLO of {slo_ms:g} ms.",
                    "Add workers, lower max_batch_size, or send less.",
                )
            )
    return found


def _share(part: int, whole: int) -> str:
    percent = 100 * part / whole
    return f"{percent:.0f} %" if percent >= 1 else "Less than 1 %"


EVERY_S: Final = 5.0
KEPT_S: Final = 600.0
MOST_BYTES: Final = 4 * 2**20
LATELY_S: Final = 10.0
"""How many seconds ago the figures are, at least, by which it is said what is wrong now."""
DEATHS_S: Final = 60.0
"""How many seconds a worker's death counts as a cause of that."""

_OF_A_SERVICE = ("name", "run", "outcomes", "latency", "within_slo", "slo_s", "streams", "graph")
_OF_A_STAGE = ("name", "batch_sizes", "queue", "compute", "idle_gap", "queued")


class PastFigures:
    """A bounded ring of figures, see `figures`, oldest first."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._samples: deque[tuple[float, bytes]] = deque()  # when, and the figures as JSON
        self._nbytes = 0
        self._latest: deque[dict[str, Any]] = deque()  # those of the last minute, whole

    def note(self, figures: dict[str, Any]) -> None:
        now = figures["time"]
        sample = msgspec.json.encode({"time": now, "services": [_slim(each) for each in figures["services"]]})
        self._samples.append((now, sample))
        self._nbytes += len(sample)
        while self._samples and (self._nbytes > self._most_bytes or now - self._samples[0][0] > KEPT_S):
            self._nbytes -= len(self._samples.popleft()[1])
        self._latest.append(figures)
        while len(self._latest) > 1 and now - self._latest[1]["time"] >= DEATHS_S:
            self._latest.popleft()

    def before(self, now: float, ago_s: float = LATELY_S) -> dict[str, Any] | None:
        """Return the newest figures that are `ago_s` old, else the oldest; None without any."""
        found = None
        for each in self._latest:
            if found is None or now - each["time"] >= ago_s:
                found = each
        return found

    def as_json(self) -> bytes:
        return b"[" + b",".join([sample for _, sample in self._samples]) + b"]"


def _slim(service: dict[str, Any]) -> dict[str, Any]:
    stages = [{name: stage[name] for name in _OF_A_STAGE} for stage in service["stages"]]
    return {**{name: service[name] for name in _OF_A_SERVICE}, "stages": stages}
