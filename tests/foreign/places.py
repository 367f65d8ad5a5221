"""The places where carpool calls code that is not ours, and the fate of an exception at each.

`tests/test_foreign_code.py` walks this table: each place, by each driver and each way into it, with each kind of
exception. `python -m tests.pages` writes docs/foreign-code.md from it.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Place(NamedTuple):
    """One place: the files in which it is guarded, the fate of an exception, and the kinds that end otherwise."""

    name: str
    guarded_in: str
    outcome: str
    otherwise: str = ""


PLACES: Final = (
    Place(
        "`__init__` and `setup`",
        "engine/worker/serve.py, batch_function/decorator.py",
        "the service does not start: `StartupError`. `@carpool.batch` raises it where it is applied; an "
        "`async` `setup` fails the first batch, and the next one tries again",
    ),
    Place(
        "`teardown`",
        "engine/worker/serve.py",
        "it is logged, and `close` returns. `@carpool.batch`: `close` raises it, once all else is done",
    ),
    Place(
        "`routes=`",
        "engine/call/invoke.py",
        "its item fails",
    ),
    Place(
        "`preprocess`",
        "engine/call/invoke.py",
        "its item fails",
        "as for `predict`",
    ),
    Place(
        "`predict`",
        "engine/call/retry.py, engine/call/invoke.py",
        "its item fails, or after halving the guilty ones",
        "MemoryError: the batch is run again in smaller calls. `@carpool.batch`: Stop(Async)Iteration are "
        'raised as RuntimeErrors; CancelledError and GeneratorExit are a `ModelError`, "broken off"; in '
        "threads KeyboardInterrupt ends the leader's own call, and its batch goes to the next one",
    ),
    Place(
        "`postprocess`",
        "engine/call/invoke.py",
        "its item fails",
        "as for `predict`",
    ),
    Place(
        "`start` of a model of steps",
        "engine/worker/steps.py",
        "its stream fails, or after halving the guilty ones",
        "MemoryError: the newest half waits again",
    ),
    Place(
        "`step`",
        "engine/worker/steps.py",
        "its stream fails; those of its call begin again in halves, by `resume` if they have had parts",
        "likewise",
    ),
    Place(
        "`resume`",
        "engine/worker/steps.py",
        "as for `start`",
        "likewise",
    ),
    Place(
        "`stop`",
        "engine/worker/steps.py",
        "it is logged",
    ),
    Place(
        "`collect`",
        "engine/worker/steps.py",
        "its stream fails alone",
    ),
    Place(
        "a `predict` that yields",
        "engine/worker/generators.py, engine/worker/steps.py",
        "its stream fails; of a generator for a batch, as for `step`",
    ),
    Place(
        "callbacks: `on_part`",
        "",
        "raised in its caller; the request is cancelled",
    ),
    Place(
        "`decode`",
        "engine/call/retry.py",
        "its item fails",
        "ValueError: 400, a parser's complaint",
    ),
    Place(
        "`encode`",
        "engine/call/retry.py",
        "its item fails",
    ),
    Place(
        "`__len__`, `__iter__` and `tolist` of what `predict` returns",
        "engine/call/retry.py",
        "as if `predict` had raised",
    ),
    Place(
        "`size=`",
        "service/weigh.py",
        "its item fails alone; in `@carpool.batch` its caller gets the exception itself",
    ),
    Place(
        "`__index__` and `__repr__` of what `size=` returns",
        "service/weigh.py",
        "its item fails alone",
    ),
    Place(
        "`length=` and `key=`",
        "service/weigh.py",
        "as for `size=`",
    ),
    Place(
        "`merge=` and `split=`, and `__len__` and `__iter__` of chunks",
        "engine/call/retry.py, batch_function/base.py",
        "that call fails, as if the function had raised",
    ),
    Place(
        "`__reduce__` of an item",
        "engine/drive/callers.py",
        "raised in its caller; in a stream its item fails alone",
        "those that are no Exception: a `ModelError`",
    ),
    Place(
        "`__setstate__` of an item",
        "engine/worker/answer.py",
        "its item fails alone",
    ),
    Place(
        "`__reduce__` of a result",
        "engine/worker/answer.py",
        "its item fails alone",
    ),
    Place(
        "`__setstate__` of a result",
        "engine/drive/callers.py, service/weigh.py",
        "its item fails alone",
    ),
    Place(
        "`__reduce__` of an exception that fails an item",
        "engine/wire/outcome.py",
        "the `ModelError` has no `__cause__`",
    ),
    Place(
        "`__setstate__` of an exception that fails an item",
        "engine/wire/outcome.py",
        "likewise",
    ),
    Place(
        "`__eq__`, `__hash__`, `__bool__`, `__len__`, `__iter__`, `__str__`, `__repr__` and attributes of an item",
        "",
        "never called",
    ),
    Place(
        "types' own readers and writers: `__post_init__`, pydantic's validators, `model_dump`, `tolist`",
        "engine/worker/answer.py, engine/hints/schema.py",
        "its item fails alone",
        "ValueError and TypeError of a reader: 422",
    ),
    Place(
        "`__iter__` and `__next__` of a stream's input",
        "engine/drive/streams.py",
        "raised at the consumer, after the results of the items before it",
        "StopIteration of `__next__`: the end of the input",
    ),
    Place(
        "`__aiter__` and `__anext__` of a stream's input",
        "engine/drive/streams.py",
        "likewise",
        "StopAsyncIteration of `__anext__`: the end of the input",
    ),
    Place(
        "sinks: `output=`",
        "engine/observe/log.py",
        "the line is dropped and logged",
    ),
    Place(
        "`examples`",
        "engine/worker/serve.py, service/assemble.py, http/openapi.py",
        "one that cannot be read is refused where the stage is declared, one that does not run or cannot "
        "be weighed is a `StartupError`, one that cannot be shown is left out of `/openapi.json`, and one "
        "that cannot be tried makes its model unready",
    ),
    Place(
        "policies: `decide`",
        "engine/core/lobby.py",
        "the stage, or the line of a batch function, fails for all requests, present and later, except "
        "those whose batch is done: `Unavailable`, code `stage_failed`, critical in the log, the model is "
        "not ready. A simulation raises it",
        "in a caller's own thread KeyboardInterrupt is taken for Ctrl-C: it ends that call, and the line goes on",
    ),
    Place(
        "policies: `decide` for a busy worker",
        "engine/core/lobby.py",
        "likewise",
        "likewise",
    ),
    Place(
        "policies: `arrived`",
        "engine/core/lobby.py",
        "likewise",
        "likewise",
    ),
    Place(
        "policies: `left`",
        "engine/core/lobby.py",
        "likewise",
        "likewise",
    ),
    Place(
        "policies: `learn`",
        "engine/core/lobby.py",
        "likewise",
        "likewise",
    ),
    Place(
        "policies: `limit`",
        "engine/core/lobby.py",
        "likewise",
        "likewise",
    ),
    Place(
        "policies: `lone_slack_s`",
        "engine/core/lobby.py",
        "the stage, or the line of a batch function, fails as for `decide`",
        "likewise",
    ),
    Place(
        "policies: `learn` of a lone request",
        "engine/core/lobby.py",
        "likewise",
        "likewise",
    ),
    Place(
        "policies: `learn` of a warm-up",
        "engine/core/lobby.py",
        "the service does not start: `StartupError`",
    ),
    Place(
        "policies: `explain`",
        "engine/observe/stats.py",
        "the statistics show the error",
    ),
    Place(
        "execution locks",
        "engine/drive/threads.py, batch_function/tasks.py",
        "the thread or task that acquires or releases it ends with it, and the next one tries",
        "as for `predict`",
    ),
    Place(
        "`__copy__` of an exception that several callers get",
        "engine/drive/failures.py",
        "they all get the same one",
    ),
    Place(
        "protocols: functions of addresses, `respond` and writers",
        "http/protocol_routes.py",
        "its request fails; after the first part, in the protocol's words",
    ),
    Place(
        "protocols: `error` and `fits`",
        "http/protocol_routes.py",
        "the error has our own words; the address is not listed",
    ),
    Place(
        "`count_tokens`",
        "http/protocol_routes.py",
        "its request fails",
    ),
    Place(
        "ASGI's `receive` and `send`",
        "http/asgi.py",
        "raised in the server as it came; the request is cancelled, also if `send` takes longer than 30 s",
    ),
    Place(
        "collectors of metrics",
        "engine/observe/own_metrics.py, engine/worker/own_metrics.py",
        "the process's own metrics are missing from `/metrics`, and it is logged",
    ),
    Place(
        "modules of services that are added",
        "http/admin.py",
        "the order is answered 400, the log has the traceback, and nothing changes",
    ),
    Place(
        "handlers of the log",
        "engine/logger.py",
        "the line is lost",
    ),
    Place(
        "costs and arrivals of a simulation",
        "",
        "raised by the simulation",
        "StopIteration of the arrivals' `__next__`: their end",
    ),
)
