"""Where spans of requests go, and how many may wait for that (docs/tracing.md)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.config.base import Config, Positive, Seconds


class TraceLimits(Config, frozen=True, kw_only=True):
    """Spans never keep an answer waiting: those that there is no room for are lost."""

    max_queued_spans: Positive = 16_384  # that wait to be sent; the oldest are dropped
    max_batch_spans: Positive = 512  # sent at a time
    send_every_s: Seconds = 1.0  # between two batches that are not full
    send_timeout_s: Seconds = 5.0  # for one batch, repetitions included
    flush_s: Seconds = 1.0  # for a gateway that ends to send what waits


class TraceConfig(TraceLimits, frozen=True, kw_only=True):
    """Of one gateway."""

    endpoint: str | None = None  # URL of a collector (OTLP over HTTP)
    file: str | None = None
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0  # of requests whose callers do not say

    @property
    def wanted(self) -> bool:
        """Is anything recorded?"""
        return self.endpoint is not None or self.file is not None
