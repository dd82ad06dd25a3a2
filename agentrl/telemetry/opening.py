"""Opens what a recipe's section `telemetry` asks for."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from agentrl.telemetry.config import TelemetryConfig
from agentrl.telemetry.run_traces import RunTraces
from agentrl.telemetry.span_files import TRACES, SpanFile, SpanSinks
from agentrl.telemetry.spans import SpanSink
from agentrl.types.errors import ConfigError


def check_telemetry(config: TelemetryConfig) -> None:
    """Raises ConfigError if a package that the section needs is not installed."""
    if config.otlp_endpoint is not None and not _is_installed("opentelemetry.exporter.otlp.proto.http"):
        raise ConfigError(
            f"telemetry.otlp_endpoint {config.otlp_endpoint} needs OpenTelemetry, which is not installed: "
            "pip install 'agentrl[otel]', or take the field out"
        )
    if config.metrics_port is not None and not _is_installed("prometheus_client"):
        raise ConfigError(
            f"telemetry.metrics_port {config.metrics_port} needs prometheus-client, which is not installed: "
            "pip install 'agentrl[metrics]', or take the field out"
        )


def open_span_sink(config: TelemetryConfig, run: Path, process: str) -> SpanSink | None:
    """Where a process of a run writes its spans; None if no episode is traced."""
    if config.trace_episodes == 0:
        return None
    file = SpanFile(run / TRACES, process)
    if config.otlp_endpoint is None:
        return file
    from agentrl.telemetry.otlp import OtlpSink

    return SpanSinks([file, OtlpSink(config.otlp_endpoint, run.name, process)])


def open_traces(config: TelemetryConfig, run: Path) -> RunTraces:
    """The traces of a run's own process."""
    return RunTraces(open_span_sink(config, run, "run"), config.trace_episodes)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that it would be in
        return False
