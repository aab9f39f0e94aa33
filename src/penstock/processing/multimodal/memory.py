"""Bounds the memory that threads use together, before they allocate it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ByteSemaphore:
    """Bounds the bytes held at a time.  A thread that needs more than are left waits, unless nothing is held."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._changed = threading.Condition()

    @contextmanager
    def acquire(self, nbytes: int) -> Iterator[None]:
        """Holds ``nbytes`` until the end of the block.  Blocks the thread until they are available."""
        with self._changed:
            self._changed.wait_for(lambda: not self.held or self.held + nbytes <= self.limit)
            self.held += nbytes
        try:
            yield
        finally:
            with self._changed:
                self.held -= nbytes
                self._changed.notify_all()
