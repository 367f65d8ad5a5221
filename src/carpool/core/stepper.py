"""The stepper of a stage that answers in parts: a queue, a policy, and a running set for each worker.

A worker steps its set without being asked; each step makes a part for every stream of the set, or
for some. An `Order` (who leaves, joins, pauses, goes on) takes effect at the worker's next
boundary, which lies between two steps, and a `Report` follows each step. A stream is a `Request`
whose slot `stream` holds a `Stream`; ids are those of requests, `place` is that of the worker.

Promises, whatever the policy says:

* no set is above its limits (`rows` streams, `limit` units that they may come to hold), from the
  order that joins to the report that ends; one that is larger than the limit runs alone;
* a part counts only for a stream of that worker's set, and nothing comes after an end;
* no stream joins after its deadline;
* a stream that has left is out before the next step that has not begun;
* a stream that has had parts runs again only where the model can resume it.

The calls, which `core/pipeline.py` makes for drivers (events first, then what to do):

    Stepper(name, policy, queue, *, rows, limit=inf, resumable=False, silence_s=inf,
            max_stream_s=inf, max_batch_time_s=inf, patience_s=inf, idempotent=True, measure=None)
    enter(now, requests)                          # Pipeline.submit(now, requests)
    leave(now, request), abandon(now, request)    # Pipeline.cancel(now, request)
    pause(now, request, is_paused)                # Pipeline.pause(now, request, is_paused)
    reported(now, report) -> (parts, ended)       # Pipeline.reported(now, report)
    worker_ready(place)                           # Pipeline.worker_ready(stage, place)
    worker_gone(now, place, unsent) -> Lost       # Pipeline.worker_lost, Pipeline.worker_left
    drain(place), is_empty(place)                 # Pipeline.drain(place); recycling
    trained_steps(rows, step_s, length, start_s)  # Pipeline.trained_steps(...); a warm-up
    poll(now, refuse)                             # Pipeline.poll(now) -> Todo.orders, .parts, .answer

    Order(stage, place, number, join, leave, pause, resume, ask)
    Report(stage, place, seen, stopped, parts, rows, step_s, length, start_s, returned)
    Part(id, value, last, error)

What a worker does with an order: those that leave are stopped, those that join are started
(`start`, or `resume` with `request.stream.kept` where that is not empty) in one call, then pauses
and resumptions are noted, then it steps all that do not pause. It reports after each step. An
order that leaves it nothing to step is reported too, with `rows` = 0 and `stopped`. What it does
after a step depends on the `ask` of the last order that it has seen: `GO_ON` (run ahead),
`ON_LEAVING` (stop for the next order if a stream has ended in this step) or `EVERY_STEP` (always
stop). It also stops when it has nothing to step. A worker that has stopped reads orders until it
has something to step; the coordinator answers a report with `stopped` at once.

A stream with `is_collected` hands on no parts: its worker keeps them and sends the whole answer as
the value of one `Part` with `last`. If its worker is lost it starts again, as nothing of it has
been told.
"""

from __future__ import annotations

from carpool.core.running_set import EVERY_STEP, GO_ON, ON_LEAVING, Order, Part, Report, RunningSet

__all__ = ["EVERY_STEP", "GO_ON", "ON_LEAVING", "Order", "Part", "Report", "RunningSet"]
