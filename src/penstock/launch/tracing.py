"""Whether spans are recorded.  OpenTelemetry's SDK (``otlp``) is imported only if they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass
