"""``wire.ports.PolledTokens`` of one request: its flight begins with the first look at it.

Knows nothing about workers and flights but how they are begun and ended.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.router.stream import Stream
from penstock.types import TokenBatch, ValidRequest


class RoutedTokens:
    """For one consumer, which either polls or iterates."""

    __slots__ = ("_begin", "_end", "_finished", "_over", "_request", "_stream")

    def __init__(
        self, request: ValidRequest, begin: Callable[[ValidRequest], Stream], end: Callable[[Stream], None]
    ) -> None:
        """``begin`` raises NoWorkers and RequestError; ``end`` frees what the flight holds."""
        self._request: ValidRequest | None = request
        self._begin = begin
        self._end = end
        self._stream: Stream | None = None
        self._finished = False  # the last batch was given
        self._over = False

    # --- polled -----------------------------------------------------------------------------------------------------

    def begin(self, ready: Callable[[], None]) -> Callable[[], TokenBatch | None]:
        """See ``PolledTokens``."""
        stream = self._begun()
        stream.notify(ready)
        return stream.poll

    def close(self) -> None:
        """See ``PolledTokens``."""
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
        """See ``TokenStream``."""
        self.close()

    def _begun(self) -> Stream:
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
