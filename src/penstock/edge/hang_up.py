"""An ASGI extension: who serves a request is told that its client has gone, without a task that waits for it.

A server that has it puts a ``HangUp`` under ``HANG_UP`` into the scope's ``extensions``; it may be used when the body
has been read.  Knows nothing about who listens, and what for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

HANG_UP = "penstock.hang_up"


class HangUp(Protocol):
    """Of one request."""

    def when_gone(self, call: Callable[[], None] | None) -> None:
        """Call this once, from the event loop, when the client is gone, or if it is already; None: nobody listens."""
        ...
