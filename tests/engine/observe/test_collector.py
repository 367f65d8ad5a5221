"""`carpool.collector`: what a program's own registry tells of services and batch functions."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

import carpool


def doubled(xs: list[int]) -> list[int]:
    return [2 * x for x in xs]


def scraped(registry: CollectorRegistry) -> dict[str, Metric]:
    """All metrics by name, read as a scraper does."""
    return {m.name: m for m in text_string_to_metric_families(generate_latest(registry).decode())}


def value(metrics: dict[str, Metric], name: str, **labels: str) -> float | None:
    """The only sample of this name with these labels."""
    found = [
        sample.value
        for metric in metrics.values()
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) <= 1
    return found[0] if found else None


def service(name: str) -> carpool.Service:
    return carpool.Service(carpool.Stage(doubled, max_batch_size=8, run_in="thread"), name=name)


def test_a_registry_tells_of_functions_and_services() -> None:
    """Counts, sizes and times of functions, and the metrics of services, by name; a closed service is left out."""
    f = carpool.batch(lambda xs: [1 / x for x in xs])
    g = carpool.batch(doubled)
    registry = CollectorRegistry(auto_describe=True)
    with service("one").run() as one, service("two").run() as two:
        registry.register(carpool.collector(g, one, two, shares=f))
        assert f.many([1, 2]) == [1.0, 0.5]
        with pytest.raises(ZeroDivisionError):
            f(0)
        g(1)
        assert [one.predict(1), two.predict(2), two.predict(3)] == [2, 4, 6]
        seen = scraped(registry)
    assert value(seen, "carpool_function_calls_total", function="shares", outcome="ok") == 2
    assert value(seen, "carpool_function_calls_total", function="shares", outcome="error") == 1
    assert value(seen, "carpool_function_calls_total", function="doubled", outcome="ok") == 1
    assert value(seen, "carpool_function_batch_size_count", function="shares") == 2
    assert value(seen, "carpool_function_batch_size_sum", function="shares") == 3
    assert value(seen, "carpool_function_latency_seconds_count", function="shares") == 2
    assert value(seen, "carpool_function_running", function="shares") == 0
    assert value(seen, "carpool_requests_total", model="one", outcome="ok") == 1
    assert value(seen, "carpool_requests_total", model="two", outcome="ok") == 2
    after = scraped(registry)
    assert value(after, "carpool_requests_total", model="one", outcome="ok") is None
    assert value(after, "carpool_function_calls_total", function="doubled", outcome="ok") == 1


def test_a_service_of_this_loop_is_read_here_and_from_other_threads() -> None:
    """A scrape may come from a route on the service's loop, or from a thread of its own."""

    async def main() -> None:
        async with service("here").run_async() as here:
            registry = CollectorRegistry()
            registry.register(carpool.collector(here))
            assert await here.predict(1) == 2
            for seen in (scraped(registry), await asyncio.to_thread(scraped, registry)):
                assert value(seen, "carpool_requests_total", model="here", outcome="ok") == 1

    asyncio.run(main())


def test_a_registry_refuses_two_collectors_of_the_same_metrics() -> None:
    """Two would repeat each metric in one answer: one collector takes all."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(carpool.collector(carpool.batch(doubled)))
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(carpool.collector(carpool.batch(doubled)))


def test_a_function_and_a_service_may_have_one_name() -> None:
    """The two forms of one model: their metrics differ in name."""
    with carpool.Service(carpool.Stage(doubled, max_batch_size=4, run_in="thread")).run() as service:
        collected = carpool.collector(carpool.batch(doubled), service)
        assert service.service.name == doubled.__name__
        assert {metric.name for metric in collected.collect()} >= {"carpool_requests", "carpool_function_calls"}


def test_what_cannot_be_collected_is_refused() -> None:
    """With the way on: what to give, and how to tell two of one name apart."""
    f = carpool.batch(doubled)
    wrong: Any = doubled
    with pytest.raises(TypeError, match=r"collector takes handles .*@carpool\.batch, not <function doubled"):
        carpool.collector(wrong)
    with pytest.raises(ValueError, match=r"two sources are called doubled: .*collector\(other=doubled\)"):
        carpool.collector(f, carpool.batch(doubled))
    with pytest.raises(ValueError, match="at least one"):
        carpool.collector()


def test_without_prometheus_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with other extras."""
    for name in [name for name in sys.modules if name.startswith("prometheus_client")]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("carpool.metrics", "carpool.engine.observe.prometheus", "carpool.engine.observe.function_stats"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match=r"pip install 'carpool\[metrics\]'"):
        _ = carpool.collector
