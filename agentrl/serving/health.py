"""How a server is, and what it counts: by the numbers that its processes share."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agentrl.serving.board import Number
from agentrl.serving.bodies import HealthBody
from agentrl.serving.table import SessionTable

SILENT_S = 10.0
"""A process that has not been seen for so long does not answer."""
_COUNTERS = {
    Number.OPENED: "Sessions that were opened.",
    Number.CLOSED: "Sessions that their holders closed.",
    Number.REAPED: "Sessions that were ended because nobody used them.",
    Number.EXPIRED: "Sessions that were ended because they were too old.",
    Number.LOST: "Sessions that died with their process.",
    Number.STEPS: "Steps that were carried out.",
    Number.REPEATED: "Calls that came again under their id and did nothing.",
    Number.FENCED: "Calls that were refused because another holds the session.",
    Number.REFUSED: "Sessions that were refused for want of room.",
    Number.FAILED: "Calls by WebSocket that were answered with a failure.",
    Number.FAILED_OPENS: "Sessions whose environment could not be made.",
    Number.RELAYED: "Calls that were passed on to another process.",
    Number.RESTARTS: "Processes that died and were replaced.",
}


class _Numbers:
    """The numbers as Prometheus wants them; collected anew at every scrape."""

    def __init__(self, table: SessionTable) -> None:
        self._table = table

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        board = self._table.board
        sessions = GaugeMetricFamily("agentrl_env_sessions", "Sessions that live.", labels=["worker"])
        for worker in range(board.num_workers):
            sessions.add_metric([str(worker)], board.of(worker, Number.SESSIONS))
        yield sessions
        yield GaugeMetricFamily("agentrl_env_free", "Sessions that would still be taken.", value=self._table.free)
        for number, meaning in _COUNTERS.items():
            yield CounterMetricFamily(f"agentrl_env_{number.name.lower()}", meaning, value=board.total(number))


def metrics_text(table: SessionTable) -> bytes:
    """The page that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Numbers(table))
    return generate_latest(registry)


def report_health(table: SessionTable) -> HealthBody:
    """How the whole server is, as one of its processes sees it."""
    board = table.board
    silent = [worker for worker in range(board.num_workers) if board.silence_s(worker) > SILENT_S]
    problems = [f"process {worker} does not answer" for worker in silent]
    problems += [f"environment {name} cannot be made: {why}" for name, why in table.failing.items()]
    draining = any(board.of(worker, Number.DRAINING) for worker in range(board.num_workers))
    if len(table.failing) == len(table.hosts) or len(silent) == board.num_workers:
        status = "unhealthy"
    else:
        status = "degraded" if problems else "healthy"
    return HealthBody(
        status=status,
        problems=problems,
        sessions=board.total(Number.SESSIONS),
        free=0 if draining else table.free,
        draining=draining,
        environments=list(table.hosts),
    )
