"""carpool's numbers in a program's own Prometheus registry."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from carpool.batch_function.tasks import AsyncBatch
from carpool.batch_function.threads import ThreadBatch
from carpool.engine.logger import logger
from carpool.engine.observe.function_stats import FunctionSnapshot
from carpool.service.handle import AsyncHandle
from carpool.service.thread_handle import Handle

try:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector

    from carpool.engine.observe.prometheus import function_metrics, service_metrics
except ImportError as error:
    raise ImportError(
        "carpool.collector needs the package prometheus-client: pip install 'carpool[metrics]'"
    ) from error

T = TypeVar("T")

Source = AsyncHandle | Handle | ThreadBatch[Any, Any] | AsyncBatch[Any, Any]

_LOOP_ANSWERS_S = 2.0  # a loop that is blocked for longer is left out, since the scraper would give up


def collector(*sources: Source, **named: Source) -> Collector:
    """Return a collector of the numbers of services and batch functions.

    Register it once: `prometheus_client.REGISTRY.register(carpool.collector(f, handle))`. The
    metrics of services are those of `carpool serve`, those of functions begin with
    `carpool_function_`. A service that does not run at the time is left out.

    Args:
        *sources: Handles of services, and batch functions; of a method, the bound one.
        **named: The same, for functions whose label is to be another than their name.

    Raises:
        TypeError: One is neither a handle nor a batch function.
        ValueError: There are none, or two functions or two services have the same name.
    """
    if not sources and not named:
        raise ValueError("collector needs at least one handle or batch function")
    labelled = [(_name_of(source), source) for source in sources] + list(named.items())
    for _, source in labelled:
        if not isinstance(source, AsyncHandle | Handle | ThreadBatch | AsyncBatch):
            raise TypeError(
                "collector takes handles of services (what run(), run_async() and start() give) and functions under"
                f" @carpool.batch, not {source!r}"
            )
    names = [(name, isinstance(source, AsyncHandle | Handle)) for name, source in labelled]
    twice = next((name for name, is_service in names if names.count((name, is_service)) > 1), None)
    if twice is not None:
        raise ValueError(
            f"two sources are called {twice}: give one of them another name, as in collector(other={twice})"
        )
    return _Sources(labelled)


class _Sources(Collector):
    def __init__(self, labelled: list[tuple[str, Source]]) -> None:
        self._handles = [source for _, source in labelled if isinstance(source, AsyncHandle | Handle)]
        self._functions = [(name, each) for name, each in labelled if isinstance(each, ThreadBatch | AsyncBatch)]
        self._most_ok = dict.fromkeys([name for name, _ in self._functions], 0)

    def describe(self) -> Iterable[Metric]:
        """Yield the metrics without numbers, whose names a registry compares with those it has."""
        if self._handles:
            yield from service_metrics([], 0.0)
        if self._functions:
            yield from function_metrics([])

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for handle in self._handles:
            for metric in _metrics_of(handle):
                if metric.name in found:
                    found[metric.name].samples.extend(metric.samples)
                else:
                    found[metric.name] = metric
        yield from found.values()
        if self._functions:
            yield from function_metrics([self._snapshot(name, each) for name, each in self._functions])

    def _snapshot(self, name: str, function: ThreadBatch[Any, Any] | AsyncBatch[Any, Any]) -> FunctionSnapshot:
        """Return the numbers of a function; its good answers never become fewer, or Prometheus
        would see a new process.
        """
        seen = function.stats()
        self._most_ok[name] = max(self._most_ok[name], seen.ok)
        return replace(seen, name=name, ok=self._most_ok[name])


def _name_of(source: Any) -> str:
    if isinstance(source, AsyncHandle | Handle):
        return source.service.name
    return source.__name__ if isinstance(source, ThreadBatch | AsyncBatch) else ""


def _metrics_of(handle: AsyncHandle | Handle) -> list[Metric]:
    inner = handle._inner if isinstance(handle, Handle) else handle
    driver = inner.driver
    if driver is None or not inner.takes_calls:
        return []
    try:
        return _on_loop(driver.loop, lambda: list(service_metrics([driver.stats], driver.clock())))
    except (TimeoutError, RuntimeError) as error:  # RuntimeError: the loop has just been closed
        about = {"model": inner.service.name}
        logger.warning(
            "no metrics of service %s: its loop does not answer (%r)", inner.service.name, error, extra=about
        )
        return []


def _on_loop(loop: asyncio.AbstractEventLoop, work: Callable[[], T]) -> T:
    try:
        if asyncio.get_running_loop() is loop:
            return work()
    except RuntimeError:  # this thread has none
        pass
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def call() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    loop.call_soon_threadsafe(call)
    return done.result(_LOOP_ANSWERS_S)
