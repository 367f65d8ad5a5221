"""Spans for OpenTelemetry, of requests, and of batches with links to their members."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from carpool.version import __version__

if TYPE_CHECKING:
    from carpool.engine.core.batch import Batch
    from carpool.engine.observe.picture import Branch
    from carpool.engine.observe.stats import StageStats
    from carpool.http.exchange import Exchange, Head, Notes

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
    """Return a provider that sends spans by OTLP over HTTP. Raises ImportError."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "carpool"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
