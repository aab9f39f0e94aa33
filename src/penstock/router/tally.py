"""Counts what becomes of requests: first tokens, gaps, ends; and how many are not over.

Knows nothing about workers.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.router.placement import Placement
from penstock.router.stream import Stream
from penstock.telemetry.registry import Metrics
from penstock.types import TokenBatch
from penstock.wire.messages import TokenItem


class Tally:
    """Of one gateway."""

    def __init__(self, metrics: Metrics, placement: Placement) -> None:
        self._metrics = metrics
        self._placement = placement
        self.open = 0  # requests that are not over

    def delivered(self, stream: Stream, batch: TokenBatch, now: float) -> None:
        """These tokens went on to the client; the last of them end the request."""
        request, metrics = stream.flight.request, self._metrics
        self._placement.answered(request.id)
        if stream.first_at is None:
            stream.first_at = now
            metrics.first_token(now - request.arrival, stream.queued_s, len(request.prompt))
            metrics.levels.queued(request.claim.service, stream.queued_s)
            metrics.more_tokens(len(batch.tokens) if batch.pooled is None else 0, None)
        else:
            metrics.more_tokens(len(batch.tokens), now - stream.last_at)
        stream.last_at = now
        if stream.spans is not None:
            stream.spans.delivered(len(batch.tokens), now)
        if batch.finish is not None:
            self.settled(stream, batch.finish.value, now)

    def went_on(self, delivered: Sequence[tuple[Stream, TokenItem]], now: float) -> None:
        """More tokens of answers that have begun went on to their clients.  Those of one step had the last step in
        common, too, so most gaps are counted together."""
        metrics, since, streams, tokens = self._metrics, -1.0, 0, 0
        for stream, item in delivered:
            count = len(item.tokens)
            if stream.last_at != since or count != tokens:
                metrics.more_tokens(tokens, now - since, streams)
                since, streams, tokens = stream.last_at, 0, count
            streams += 1
            stream.last_at = now
            if stream.spans is not None:
                stream.spans.delivered(count, now)
        metrics.more_tokens(tokens, now - since, streams)

    def settled(self, stream: Stream, reason: str, now: float) -> None:
        """A flight is over: count it, once."""
        if stream.settled:
            return
        stream.settled = True
        self.open -= 1
        first = stream.first_at
        self._placement.ended(stream.flight)
        decode_s = None if first is None else now - first
        self._metrics.finished(reason, now - stream.flight.request.arrival, decode_s)
        if stream.spans is not None:
            stream.spans.ended(reason, now, error=reason == "error")
