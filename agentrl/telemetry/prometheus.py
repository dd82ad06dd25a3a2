"""Serves a run's metrics to Prometheus, at ``/metrics``; imported only where a recipe asks for it."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agentrl.telemetry.prometheus_names import FAMILIES, Family, Sample
from agentrl.types.errors import ConfigError

_COLLECT_S = 8.0
_log = logging.getLogger(__name__)


class PrometheusServer:
    """Answers scrapes from threads of its own, with what `collect` gives at that moment on the run's event loop.

    A run whose event loop stands still for 8 s fails the scrape, so that Prometheus's own ``up`` is 0 then.
    """

    def __init__(self, host: str, port: int, collect: Callable[[], Iterable[Sample]]) -> None:
        self._collect, self._loop = collect, asyncio.get_running_loop()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"telemetry.metrics_port {port} of {host} cannot be served: {error}; choose another, or 0 for any"
            ) from error
        self.port = int(self._server.server_port)
        _log.warning("metrics for Prometheus: http://%s:%d/metrics", host, self.port)

    def collect(self) -> Iterator[Metric]:
        """All families, those without a value too. Raises TimeoutError."""
        found = asyncio.run_coroutine_threadsafe(self._on_loop(), self._loop).result(_COLLECT_S)
        by_family: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        for sample in found:
            by_family[sample.family][sample.labels] = sample.value
        for family in FAMILIES:
            yield _metric(family, by_family[family.name])

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    async def _on_loop(self) -> list[Sample]:
        return list(self._collect())


def _metric(family: Family, values: dict[tuple[str, ...], float]) -> Metric:
    if family.name.endswith("_total"):
        name = family.name.removesuffix("_total")
        metric: Metric = CounterMetricFamily(name, f"{family.meaning}.", labels=family.labels)
    else:
        metric = GaugeMetricFamily(family.name, f"{family.meaning}.", labels=family.labels)
    for labels, value in values.items():
        metric.add_sample(family.name, dict(zip(family.labels, labels, strict=True)), value)
    return metric
