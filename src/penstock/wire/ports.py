"""The ports between rooms: what a caller may rely on, whoever stands behind it.

Each protocol here has one real implementation and one in-memory double, and one suite in ``tests/contract`` that
faces both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from penstock.types import ModelIdentity, TokenBatch, ValidRequest


class TokenStreams(Protocol):
    """From ``ValidRequest`` to tokens, whatever happens to workers in between (``router.service``)."""

    def stream(self, request: ValidRequest) -> AsyncIterator[TokenBatch]:
        """Tokens in order, each once; the last batch has ``finish``.

        Closing the iterator early frees everything the request holds, in every worker.
        Raises CapacityError before the first batch, WorkerError when resubmitting did not help.
        """
        ...

    def identity(self) -> ModelIdentity | None:
        """What is served, or None while no worker has reported yet."""
        ...

    def ready(self) -> bool:
        """Can a request be served now?"""
        ...

    def alive(self) -> str | None:
        """None while all is well, else why not: something runs and nothing moves."""
        ...

    def workers(self) -> Sequence[dict[str, Any]]:
        """One mapping a worker, as ``penstock status --json`` prints it."""
        ...
