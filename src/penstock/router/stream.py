"""The consumer's end of one request: tokens that were delivered and not yet consumed.

Waiting tokens are consumed as one batch, so a slow consumer has less work for each token.  Nothing is held back for
that.  Each token is delivered once, which bounds the buffer.  ``RequestStats`` counts what is delivered;
``RoutedTokens`` is the stream as the router's callers see it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from penstock.errors import PenstockError
from penstock.router.effects import RequestEffects
from penstock.router.placement import Placement
from penstock.router.request import RoutedRequest
from penstock.router.tracing import RequestSpans, WorkerKey
from penstock.telemetry.registry import Metrics
from penstock.types import TokenBatch, ValidRequest
from penstock.wire.gateway_messages import TokenItem

MAX_BATCH_TOKENS = 64
"""Tokens of one answer that are joined to a batch: others have a turn before the rest is made text of."""


class RequestStream:
    """A flight and its buffer.  One consumer."""

    __slots__ = (
        "_armed",
        "_batches",
        "_error",
        "_ready",
        "counted_epoch",
        "finished",
        "first_at",
        "last_at",
        "queued_s",
        "routed",
        "spans",
        "stopped",
    )

    def __init__(self, flight: RoutedRequest, spans: RequestSpans | None = None) -> None:
        self.routed = flight
        self.spans = spans  # None: not recorded
        self.finished = False  # the flight is over and has been counted
        self.stopped = False  # the consumer has what it wanted, though the flight was not over
        self.first_at: float | None = None  # when the first token came
        self.last_at = 0.0
        self.queued_s = 0.0
        self.counted_epoch = 1  # the latest epoch that was counted as a resubmission after a failure
        # While something waits.  A deque would take 0.7 KiB, of all streams at once after a step of their worker.
        self._batches: list[TokenBatch | TokenItem] | None = None
        self._error: PenstockError | None = None
        self._ready: Callable[[], None] = _nobody
        self._armed = False  # it is to be called with what comes next

    def on_failure(self, place: WorkerKey, reason: str, effects: RequestEffects, now: float) -> None:
        """Record a failure, as ``RequestSpans.on_failure``."""
        if self.spans is not None:
            self.spans.on_failure(place, reason, effects, now)

    def count_retry(self) -> bool:
        """Whether the next submission is a retry.  True once an epoch."""
        flight = self.routed
        counted, self.counted_epoch = (
            self.counted_epoch,
            max(self.counted_epoch, flight.epoch if flight.after_failure else 0),
        )
        return self.counted_epoch > counted

    def put(self, batch: TokenBatch | TokenItem) -> None:
        """Deliver to the consumer.  Of an item, its tokens and their logprobs."""
        if self._batches is None:
            self._batches = [batch]
        else:
            self._batches.append(batch)
        if self._armed:
            self._armed = False
            self._ready()

    def fail(self, error: PenstockError) -> None:
        """The consumer gets what is buffered, and then this."""
        self._error = error
        if self._armed:
            self._armed = False
            self._ready()

    def poll(self) -> TokenBatch | None:
        """What waits, as one batch, or None.  Once nothing is buffered it raises what ``fail`` was given."""
        batches = self._batches
        if not batches:
            if self._error is not None:
                raise self._error
            self._armed = self._ready is not _nobody
            return None
        batch = _joined(batches) if len(batches) > 1 else batches.pop()
        if not batches:
            self._batches = None
        if batches or self._error is not None:
            self._ready()
        else:
            self._armed = self._ready is not _nobody
        return batch if isinstance(batch, TokenBatch) else TokenBatch(tokens=batch.tokens, logprobs=batch.logprobs)

    def notify(self, ready: Callable[[], None] | None) -> None:
        """Call this whenever ``poll`` has something that was not there when it was asked last; now, if something is.
        None: stop."""
        self._ready = ready or _nobody
        self._armed = ready is not None and not self._batches and self._error is None
        if not self._armed:
            self._ready()

    async def wait(self) -> None:
        """Until ``poll`` has something."""
        came = asyncio.get_running_loop().create_future()
        self.notify(lambda: None if came.done() else came.set_result(None))
        try:
            await came
        finally:
            self.notify(None)


def _nobody() -> None:
    """The callback of a stream without a consumer."""


def _joined(batches: list[TokenBatch | TokenItem]) -> TokenBatch:
    """Takes the first batches that fit into one.  What goes with the first tokens of an answer comes from the first."""
    first, taken = batches[0], 1
    tokens, logprobs, finish = list(first.tokens), first.logprobs, first.finish
    while taken < len(batches) and finish is None:
        after = batches[taken]
        if len(tokens) + len(after.tokens) > MAX_BATCH_TOKENS:
            break
        if after.tokens:  # one without only ends the answer
            if (after.logprobs is None) != (logprobs is None):
                break
            if logprobs is not None and after.logprobs is not None:
                logprobs += after.logprobs
        taken += 1
        tokens += after.tokens
        finish = after.finish
    del batches[:taken]
    known = isinstance(first, TokenBatch)
    return TokenBatch(
        tokens=tuple(tokens),
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs if known else None,
        finish=finish,
        cached_tokens=first.cached_tokens if known else 0,
        pooled=first.pooled,
    )


class RequestStats:
    """Statistics of one gateway's requests."""

    def __init__(self, metrics: Metrics, placement: Placement) -> None:
        self._metrics = metrics
        self._placement = placement
        self.open_requests = 0  # requests that are not over

    def on_delivered(self, stream: RequestStream, batch: TokenBatch, now: float) -> None:
        """These tokens went on to the client; the last of them end the request."""
        request, metrics = stream.routed.request, self._metrics
        self._placement.on_first_token(request.id)
        if stream.first_at is None:
            stream.first_at = now
            prompt_tokens = 0 if request.usage_deferred else len(request.prompt)
            metrics.on_first_token(now - request.arrival, stream.queued_s, prompt_tokens)
            metrics.levels.on_queued(request.qos.service, stream.queued_s)
            tokens = len(batch.tokens) if batch.pooled is None else 0
            metrics.on_tokens(tokens, None, counted=not request.usage_deferred)
        else:
            metrics.on_tokens(len(batch.tokens), now - stream.last_at, counted=not request.usage_deferred)
        stream.last_at = now
        if stream.spans is not None:
            stream.spans.on_delivered(len(batch.tokens), now)
        if batch.finish is not None:
            self.on_finished(stream, batch.finish.value, now)

    def on_continued(self, delivered: Sequence[tuple[RequestStream, TokenItem]], now: float) -> None:
        """More tokens of answers that have begun went on to their clients.  Those of one step had the last step in
        common, too, so most gaps are counted together."""
        metrics, since, streams, tokens = self._metrics, -1.0, 0, 0
        for stream, item in delivered:
            count = len(item.tokens)
            if stream.routed.request.usage_deferred:
                metrics.on_tokens(count, now - stream.last_at, counted=False)
            elif stream.last_at != since or count != tokens:
                metrics.on_tokens(tokens, now - since, streams)
                since, streams, tokens = stream.last_at, 0, count
            streams += not stream.routed.request.usage_deferred
            stream.last_at = now
            if stream.spans is not None:
                stream.spans.on_delivered(count, now)
        metrics.on_tokens(tokens, now - since, streams)

    def on_finished(self, stream: RequestStream, reason: str, now: float) -> None:
        """A flight is over: count it, once."""
        if stream.finished:
            return
        stream.finished = True
        self.open_requests -= 1
        first = stream.first_at
        self._placement.on_finished(stream.routed)
        decode_s = None if first is None else now - first
        self._metrics.on_finished(reason, now - stream.routed.request.arrival, decode_s)
        if stream.spans is not None:
            stream.spans.on_finished(reason, now, error=reason == "error")


class RoutedTokens:
    """For one consumer, which either polls or iterates."""

    __slots__ = ("_begin", "_end", "_finished", "_over", "_request", "_stream")

    def __init__(
        self,
        request: ValidRequest,
        begin: Callable[[ValidRequest], RequestStream],
        end: Callable[[RequestStream], None],
    ) -> None:
        """``begin`` raises NoWorkers and RequestError; ``end`` frees what the flight holds."""
        self._request: ValidRequest | None = request
        self._begin = begin
        self._end = end
        self._stream: RequestStream | None = None
        self._finished = False  # the last batch was given
        self._over = False

    # --- polled -----------------------------------------------------------------------------------------------------

    def begin(self, ready: Callable[[], None]) -> Callable[[], TokenBatch | None]:
        """Begin the stream; ``ready`` is called when a poll has something new."""
        stream = self._begun()
        stream.notify(ready)
        return stream.poll

    def close(self) -> None:
        """Release everything the request holds."""
        stream, self._stream, self._over = self._stream, None, True
        if stream is not None:
            stream.notify(None)
            self._end(stream)

    # --- iterated ---------------------------------------------------------------------------------------------------

    def __aiter__(self) -> RoutedTokens:
        return self

    async def __anext__(self) -> TokenBatch:
        if self._finished:
            self.close()
        if self._over:
            raise StopAsyncIteration
        stream = self._begun()
        try:
            while (batch := stream.poll()) is None:
                await stream.wait()
        except BaseException:
            self.close()
            raise
        self._finished = batch.finish is not None
        return batch

    async def aclose(self) -> None:
        """Close the stream."""
        self.close()

    def _begun(self) -> RequestStream:
        request, self._request = self._request, None
        if request is not None:
            try:
                self._stream = self._begin(request)
            except BaseException:
                self._over = True
                raise
        if self._stream is None:
            raise RuntimeError("the tokens of this request are over")
        return self._stream
