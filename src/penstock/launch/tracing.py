"""Whether spans are recorded.  OpenTelemetry's SDK (``otlp``) is imported only if they are."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from penstock.config.limits import TraceConfig
from penstock.config.schema import ServeConfig
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.launch.otlp import OtlpTracer

_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.json.http", "opentelemetry.exporter.otlp.json.file")


def trace_config(asked: ServeConfig) -> TraceConfig:
    """The trace settings, checked before any process starts.  Raises ConfigError."""
    config = TraceConfig(
        endpoint=asked.trace_endpoint,
        file=asked.trace_file,
        sample=asked.trace_sample,
        **msgspec.structs.asdict(asked.trace),
    )
    if config.enabled:
        _check(config)
    return config


def _check(config: TraceConfig) -> None:
    if not all(map(_is_there, _NEEDED)):
        flag = "--trace-endpoint" if config.endpoint is not None else "--trace-file"
        raise ConfigError(f"{flag} needs OpenTelemetry, which is not installed: pip install 'penstock[trace]'")
    if config.endpoint is not None:
        url = urlsplit(config.endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--trace-endpoint: expected a URL such as http://127.0.0.1:4318, got {config.endpoint}")
    if config.file is not None and not Path(config.file).expanduser().absolute().parent.is_dir():
        raise ConfigError(f"--trace-file {config.file}: there is no such folder")


def open_tracer(config: TraceConfig, *, model: str, process: str) -> OtlpTracer | None:
    """The tracer of this process, to be closed at its end; None: spans are not recorded."""
    if not config.enabled:
        return None
    from penstock.launch.otlp import OtlpTracer

    return OtlpTracer(config, {"penstock.model": model, "service.instance.id": process})


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing, too
        return False
