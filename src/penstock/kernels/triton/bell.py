"""A descriptor that wakes a host which sleeps for other things, too, when its device is done.

A thread waits for the device, without a core and without the interpreter's lock, and makes the descriptor readable.
Knows no device: it is given something that waits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

log = logging.getLogger(__name__)


class Bell:
    """One for each lane; its thread lives as long as the process."""

    def __init__(self, wait: Callable[[], None]) -> None:
        """``wait`` returns when what was begun is over; what it raises is met again by whoever asks the device."""
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wait = wait
        self._begun: SimpleQueue[None] = SimpleQueue()
        Thread(target=self._watch, name="bell", daemon=True).start()

    def when_over(self) -> None:
        """Something was begun: ring when it is over.  A ring too many does no harm."""
        self._begun.put(None)

    def hush(self) -> None:
        """The descriptor is not readable any more, until the next ring."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return

    def _watch(self) -> None:
        while True:
            self._begun.get()
            try:
                self._wait()
            except RuntimeError as error:
                log.warning("waiting for the device failed: %s", str(error).partition("\n")[0])
            os.eventfd_write(self.descriptor, 1)
