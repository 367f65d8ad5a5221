"""Adds to an answer on its way out: an id, times, a line in the log, spans.

An app has an `Observer` only where something of this is asked for. Then answers take the long way
through `Connection._write`, and each request carries `Notes`.

`Tracer` makes spans for OpenTelemetry, of requests, and of batches with links to their members.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from random import getrandbits, random
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool.engine.clock import monotonic
from carpool.engine.core.transit import asked
from carpool.engine.logger import GuardedLogger
from carpool.engine.observe.log import printable
from carpool.http.compression import Compression
from carpool.http.exchange import REQUEST_ID, Exchange, Head, HttpResponse, InStage, Notes, RequestIds
from carpool.version import __version__

if TYPE_CHECKING:
    from carpool.engine.core.batch import Batch
    from carpool.engine.drive.aio import Driver
    from carpool.engine.observe.picture import Branch
    from carpool.engine.observe.stats import StageStats

access_logger = GuardedLogger(logging.getLogger("carpool.access"), {})
"""Writes the access log."""

_TRACEPARENT = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_LONGEST_PATH = 256
_FIRST_ERROR, _LEFT = 400, 499  # the latter is no answer, but what logs of proxies say of a client that left
_PROBED = frozenset({b"livez", b"readyz", b"healthz", b"metrics", b"health", b"live", b"ready", b"ping"})
"""How the addresses end at which supervisors and Prometheus ask, those of protocols among them."""
_ZERO_TRACE, _ZERO_SPAN = b"0" * 32, b"0" * 16


class Lines(NamedTuple):
    """Which requests get a line in the log; those that fail, or whose clients leave, always do.

    Attributes:
        share: How many of the others, from 0 to 1; probes that are answered 200 never do.
        slow_s: A request that takes longer than this gets one, whatever the share; infinity for
            nothing.
    """

    share: float
    slow_s: float

    def has(self, exchange: Exchange, status: int, took_s: float) -> bool:
        """Report whether an answered request gets a line."""
        if not self.share and self.slow_s == inf:
            return False
        is_broken = getattr(exchange, "is_broken", False)  # an answer in parts, whose head has said 200
        if status >= _FIRST_ERROR or is_broken or took_s > self.slow_s:
            return True
        head = exchange.head
        if head.method != b"POST" and head.path.rpartition(b"/")[2] in _PROBED:
            return False
        return self.share >= 1 or random() < self.share


class Observer:
    """Watches the requests of an app."""

    def __init__(
        self,
        lines: Lines,
        tells_times: bool,
        compression: Compression | None,
        spans: Tracer | None,
        ids: RequestIds,
    ) -> None:
        self._lines = lines
        self._tells_times = tells_times
        self._compression = compression
        self._spans = spans
        self._ids = ids
        self._running: dict[tuple[StageStats, int], list[InStage]] = {}  # in graphs, by stage and place
        self.wanted_headers = frozenset(
            {b"traceparent", b"tracestate", *((b"accept-encoding",) if compression is not None else ())}
        )

    # -- a request

    def noted(self, route: Callable[[Exchange], None]) -> Callable[[Exchange], None]:
        """Return a route that begins the notes of its request."""

        def begin(exchange: Exchange) -> None:
            exchange.notes = self._new_notes(exchange.head, monotonic())
            route(exchange)

        return begin

    def watch(self, driver: Driver) -> None:
        """Have the batches of a service noted."""
        for stage in driver.stats.stages:
            stage.watcher = self

    def batch_started(self, stage: StageStats, batch: Batch) -> None:
        """Note the batch of each request that is noted."""
        if stage.in_graph:
            members = self._noted_in_graph(stage, batch)
        else:
            members = []
            for request in batch.requests:
                notes: Notes | None = getattr(request, "notes", None)
                if notes is not None:
                    notes.stages.append(InStage(stage.name, request.arrived, batch.started, batch.id, batch.n))
                    members.append(notes)
        if self._spans is not None:
            self._spans.batch_started(stage, batch, members)

    def _noted_in_graph(self, stage: StageStats, batch: Batch) -> list[Notes]:
        """Note a batch at the places of its requests, and return the notes of each request once."""
        members: dict[Notes, None] = {}
        here: dict[int, InStage] = {}
        for request in batch.requests:
            notes: Notes | None = getattr(asked(request), "notes", None)
            place = stage.in_graph.get(request.node)
            if notes is None or place is None:
                continue
            members[notes] = None
            found = next((each for each in notes.stages if each.stage == place.name and each.branches), None)
            if found is None:
                found = InStage(place.name, request.arrived, batch.started, batch.id, batch.n)
                found.branches = place.branches
                notes.stages.append(found)
            else:
                found.items += not request.losses  # else it has been here before
                found.arrived = min(found.arrived, request.arrived)
                found.batch, found.n = batch.id, batch.n
            here[id(found)] = found
        self._running[stage, batch.place] = list(here.values())
        return list(members)

    def batch_completed(self, stage: StageStats, place: int) -> None:
        """Note that a worker has answered its batch."""
        if stage.in_graph:
            left = monotonic()
            for each in self._running.pop((stage, place), ()):
                each.left = left
        if self._spans is not None:
            self._spans.batch_completed(stage, place)

    # -- its answer

    def headers(self, exchange: Exchange, now: float, *, has_ended: bool = True) -> tuple[tuple[bytes, bytes], ...]:
        """Return the headers that an answer gets.

        Args:
            has_ended: Whether the answer is complete, so that its times are known.
        """
        notes = self._notes_of(exchange, now)
        headers = [(b"traceparent", b"00-%b-%b-01" % (notes.trace, notes.span))]
        if not notes.request_id:
            notes.request_id = exchange.head.request_id or self._ids.new()
        headers.append((REQUEST_ID, notes.request_id))
        if self._tells_times and has_ended:
            headers.append((b"server-timing", server_timing(notes, now)))
        return tuple(headers)

    def answering(self, exchange: Exchange, response: HttpResponse, now: float) -> HttpResponse:
        """Return an answer as it leaves, and note that it does."""
        notes = self._notes_of(exchange, now)
        notes.request_id = next((value for name, value in response.headers if name == REQUEST_ID), b"")
        added = self.headers(exchange, now)
        if notes.request_id and any(name == REQUEST_ID for name, _ in response.headers):
            added = tuple(header for header in added if header[0] != REQUEST_ID)
        response = response._replace(headers=response.headers + added)
        response = self.compressed(exchange.head, response)
        self.answered(exchange, response.status, len(response.body), now)
        return response

    @property
    def compresses(self) -> bool:
        return self._compression is not None

    def compressed(self, head: Head, response: HttpResponse) -> HttpResponse:
        if self._compression is None or head.method == b"HEAD" or not response.describes_its_body:
            return response
        return self._compression.compressed(response, head.headers.get(b"accept-encoding", b""))

    def answered(self, exchange: Exchange, status: int, nbytes: int, now: float) -> None:
        """Note the end of an answer: a line in the log, and the end of its span."""
        notes = self._notes_of(exchange, now)
        if self._spans is not None:
            self._spans.end(exchange, notes, status, now)
        if self._lines.has(exchange, status, now - notes.began):
            self._write_line(exchange, notes, status, nbytes, now)

    def left(self, exchange: Exchange, now: float) -> None:
        """Note that the client has left before its answer, or the end of it."""
        self.answered(exchange, _LEFT, 0, now)

    def _write_line(self, exchange: Exchange, notes: Notes, status: int, nbytes: int, now: float) -> None:
        head = exchange.head
        method, path = (_escaped(text) for text in (head.method, head.path))
        stages = [
            {
                "stage": each.stage,
                "queued_ms": round(1000 * (each.started - each.arrived), 3),
                "computed_ms": round(1000 * (until - each.started), 3),
                "batch": each.batch,
                "batch_size": each.n,
                **({"items": each.items} if each.items > 1 else {}),
            }
            for each, until in notes.with_ends(now)
        ]
        about = {
            "request_id": notes.request_id.decode("latin-1"),
            "caller": head.caller or None,
            "model": head.model.name if head.model is not None else None,
            "method": method,
            "path": path,
            "status": status,
            "bytes": nbytes,
            "took_ms": round(1000 * (now - notes.began), 3),
            "trace_id": notes.trace.decode(),
            "stages": stages or None,
        }
        words = [f"{method} {path} {status} {nbytes} B {about['took_ms']} ms", f"id={about['request_id']}"]
        if head.caller:
            words.append(f"caller={head.caller}")
        words += [
            f"{each['stage']}: queued {each['queued_ms']} ms, computed {each['computed_ms']} ms in batch"
            f" {each['batch']} of {each['batch_size']};"
            for each in stages
        ]
        access_logger.info("%s", " ".join(words).rstrip(";"), extra=about)

    def _new_notes(self, head: Head, now: float) -> Notes:
        match = _TRACEPARENT.fullmatch(head.headers.get(b"traceparent", b""))
        trace = match[1] if match and match[1] != _ZERO_TRACE and match[2] != _ZERO_SPAN else b""
        notes = Notes(now, trace or b"%032x" % getrandbits(128), b"%016x" % getrandbits(64))
        if self._spans is not None:
            self._spans.begin(head, notes)
        return notes

    def _notes_of(self, exchange: Exchange, now: float) -> Notes:
        notes = getattr(exchange, "notes", None)
        if notes is None:
            notes = exchange.notes = self._new_notes(exchange.head, now)
        return notes


def new_observer(
    lines: Lines, tells_times: bool, traces: bool, compression: Compression | None, ids: RequestIds
) -> Observer | None:
    """Return the observer of requests by some settings; None if none of them asks for one.

    Raises:
        ValueError: `lines.share` is no share, `lines.slow_s` is no time, or a package for tracing
            is missing.
    """
    if not 0 <= lines.share <= 1:
        raise ValueError(f"access_log must be a share of the requests, from 0 to 1, not {lines.share!r}")
    if not lines.slow_s >= 0:
        raise ValueError(f"access_log_slow_ms must be a number of milliseconds, not {1000 * lines.slow_s:g}")
    if not lines.share and lines.slow_s == inf and not tells_times and not traces and compression is None:
        return None
    return Observer(lines, tells_times, compression, Tracer() if traces else None, ids)


def server_timing(notes: Notes, now: float) -> bytes:
    """Return the `Server-Timing` header, which browsers show."""
    parts = []
    for each, until in notes.with_ends(now):
        about = f'desc="{_token(each.stage)}"'
        parts.append(f"queue;dur={1000 * (each.started - each.arrived):.3f};{about}")
        parts.append(f"compute;dur={1000 * (until - each.started):.3f};{about}")
        parts.append(f'batch;desc="{each.n}"')
        if each.items > 1:
            parts.append(f'items;desc="{each.items}"')
    parts.append(f"total;dur={1000 * (now - notes.began):.3f}")
    return ", ".join(parts).encode()


def _token(name: str) -> str:
    """Return the name of a stage as it may stand between quotes in a header."""
    return "".join(c if c.isascii() and c.isprintable() and c not in '"\\' else "_" for c in name)


def _escaped(text: bytes) -> str:
    """Return bytes from outside as they may stand in a line of the log."""
    return printable(text[:_LONGEST_PATH].decode("utf-8", "backslashreplace")).replace("\n", "\\n").replace("\t", "\\t")


_SERVER_ERROR = 500
_NS = 1_000_000_000


@dataclass(slots=True)
class _InBranch:
    """When a request was in a branch, and at which places."""

    began: float
    ended: float
    places: list[str] = field(default_factory=list)


class Tracer:
    """Makes the spans of a server.

    A program that has set up OpenTelemetry keeps its own provider. Otherwise spans are sent where
    OpenTelemetry's environment variables say, by OTLP over HTTP.

    Raises:
        ValueError: A package of OpenTelemetry is missing.
    """

    def __init__(self) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.trace import TracerProvider

            provider = trace.get_tracer_provider()
            if not isinstance(provider, TracerProvider):
                provider = _new_provider()
                trace.set_tracer_provider(provider)
        except ImportError as error:
            raise ValueError(
                f"trace needs a package that is missing ({error.name}): pip install 'carpool[otel]'"
            ) from None
        self._trace = trace
        self._tracer = provider.get_tracer("carpool", __version__)
        self._batches: dict[tuple[int, int], Any] = {}  # spans of batches, by their stage and place

    def begin(self, head: Head, notes: Notes) -> None:
        """Begin the span of a request, and note its ids."""
        trace = self._trace
        context = None
        header = head.headers.get(b"traceparent")
        if header is not None and header[3:35] == notes.trace:
            flags = trace.TraceFlags(int(header[53:55], 16))
            parent = trace.SpanContext(int(header[3:35], 16), int(header[36:52], 16), True, flags)
            context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        method = head.method.decode("ascii", "replace")
        model = head.ask.endpoint.name if head.ask is not None else ""
        about = {"http.request.method": method, "carpool.model": model, "enduser.id": head.caller}
        span = self._tracer.start_span(
            f"{method} {model or 'page'}",
            context,
            trace.SpanKind.SERVER,
            {name: value for name, value in about.items() if value},
        )
        notes.tracing = span
        ids = span.get_span_context()
        notes.trace, notes.span = b"%032x" % ids.trace_id, b"%016x" % ids.span_id

    def end(self, exchange: Exchange, notes: Notes, status: int, now: float) -> None:
        """End the span of a request, and note those of its branches."""
        span, notes.tracing = notes.tracing, None
        if span is None:
            return
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("carpool.request_id", notes.request_id.decode("latin-1"))
        if status >= _SERVER_ERROR:
            span.set_status(self._trace.StatusCode.ERROR)
        self._note_branches(span, notes, now)
        span.end()

    def _note_branches(self, span: Any, notes: Notes, now: float) -> None:
        """Make a span of each branch in which a request was, within that of the branch around it.

        All items of a list are in one.
        """
        found: dict[tuple[Branch, ...], _InBranch] = {}
        for each, until in notes.with_ends(now):
            for depth in range(1, len(each.branches) + 1):
                inside = found.setdefault(each.branches[:depth], _InBranch(each.arrived, until))
                inside.began, inside.ended = min(inside.began, each.arrived), max(inside.ended, until)
                inside.places.append(each.stage)
        if not found:
            return
        zero_ns = time.time_ns() - int(now * _NS)
        spans: dict[tuple[Branch, ...], Any] = {(): span}
        for branches in sorted(found, key=len):
            inside = found[branches]
            name = branches[-1].name
            made = spans[branches] = self._tracer.start_span(
                f"branch {name}",
                self._trace.set_span_in_context(spans[branches[:-1]]),
                attributes={"carpool.branch": name, "carpool.places": inside.places},
                start_time=zero_ns + int(inside.began * _NS),
            )
            made.end(zero_ns + int(inside.ended * _NS))

    def batch_started(self, stage: StageStats, batch: Batch, members: Sequence[Notes]) -> None:
        """Begin the span of a batch, with links to those of its members."""
        links = [self._trace.Link(notes.tracing.get_span_context()) for notes in members if notes.tracing is not None]
        about: dict[str, str | int] = {
            "carpool.stage": stage.name,
            "carpool.batch.id": batch.id,
            "carpool.batch.size": batch.n,
            "carpool.batch.reason": batch.reason,
            "carpool.worker": batch.place,
        }
        self.batch_completed(stage, batch.place)  # one that was lost with its worker
        self._batches[id(stage), batch.place] = self._tracer.start_span(
            f"batch {stage.name}", self._no_parent(), attributes=about, links=links, start_time=time.time_ns()
        )

    def batch_completed(self, stage: StageStats, place: int) -> None:
        """End the span of the batch that a worker had."""
        span = self._batches.pop((id(stage), place), None)
        if span is not None:
            span.end()

    def _no_parent(self) -> Any:
        """Return the context of a span that begins a trace of its own."""
        return self._trace.set_span_in_context(self._trace.INVALID_SPAN)


def _new_provider() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "carpool"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
