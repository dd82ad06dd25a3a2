"""What operators can look at while a run goes on, and afterwards."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentrl.config.base import ConfigModel


class TelemetryConfig(ConfigModel):
    """Spans and metrics of a run, beside metrics.jsonl."""

    trace_episodes: Annotated[int, Field(ge=0)] = 2000
    """Episodes whose spans are written, the first that each start of the run plays; 0 for none. One of four turns takes
    some 5 KB in ``traces/``. Raise it to look at a long run's later steps."""
    otlp_endpoint: str | None = None
    """URL to which spans also go, as OpenTelemetry's OTLP over HTTP, such as ``http://collector:4318/v1/traces``; needs
    the extra ``otel``. None sends nothing."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on which the run serves its metrics to Prometheus, at ``/metrics``; 0 takes a free one, which the log names.
    Needs the extra ``metrics``. None serves nothing."""
    metrics_host: str = "127.0.0.1"
    """Address that this port is bound to. Set ``0.0.0.0`` where Prometheus runs on another machine: whoever reaches the
    port can read the numbers."""
