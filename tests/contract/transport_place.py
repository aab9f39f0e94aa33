"""Where a transport is tested: how to wait for a message, and a message that is easily told from others."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass

from penstock.types import RequestId
from penstock.wire.gateway_messages import Cancel
from penstock.wire.transport import Link, Listener, Received, Transport

PATIENCE_S = 60.0
"""However busy the machine is."""

_names = itertools.count()


@dataclass
class Place:
    """A transport, and where to listen on it."""

    transport: Transport
    endpoint: str

    def wait_for(self, end: Listener | Link, *others: Listener | Link) -> Received:
        """The next message at ``end``.  Fails when it does not come."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if (received := end.recv()) is not None:
                return received
            self.transport.wait(0.1, [end, *others])
        raise AssertionError("nothing came")

    def quiet(self, end: Listener | Link, seconds: float = 0.3) -> bool:
        """Nothing comes for a while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if end.recv() is not None:
                return False
            if not self.transport.wait(deadline - time.monotonic(), [end]):
                break
        return end.recv() is None


def note(number: int) -> Cancel:
    return Cancel(request=RequestId("r"), epoch=number)


def fresh_name() -> str:
    """A name that nobody has used."""
    return f"test-{os.getpid()}-{next(_names)}"
