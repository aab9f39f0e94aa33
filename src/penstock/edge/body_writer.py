"""An ASGI extension: the body of an answer written straight to its connection, without a message and a wait a piece.

A server that has it puts a ``BodyWriter`` under ``BODY_WRITER`` into the scope's ``extensions``.  The head and the end
of an answer go the ordinary way, by ``send``; between the two its parts may go by ``write``, and keep their order.
Knows nothing about who writes, and what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

BODY_WRITER = "penstock.body_writer"


class BodyWriter(Protocol):
    """Of one answer."""

    @property
    def usable(self) -> bool:
        """May parts of the body be written now?  Its head is out, says no length, and asks for a body."""
        ...

    @property
    def paused(self) -> bool:
        """Does the client read more slowly than it is written to?  What is written all the same waits in memory."""
        ...

    def write(self, body: bytes) -> bool:
        """A part of the body, not empty; is it ``paused`` now?  Nothing happens when the client has gone."""
        ...

    def when_writable(self, ready: Callable[[], None]) -> None:
        """Call this once, when it is no longer paused or the client has gone; while it is paused."""
        ...
