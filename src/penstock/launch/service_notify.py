"""Tells whatever started this service how it is, by sd_notify(3): a datagram to the socket that NOTIFY_SOCKET names.

systemd reads it of units with ``Type=notify``, ``penstock ray``'s actors of their nodes.  Without NOTIFY_SOCKET nothing
is sent, and a socket that is gone is no error.
"""

from __future__ import annotations

import contextlib
import os
import socket

NOTIFY_SOCKET = "NOTIFY_SOCKET"
READY = "READY=1"
STOPPING = "STOPPING=1"


def notify_service_manager(state: str, *, wait: bool = True) -> None:
    """Send a state such as ``READY``, if there is a receiver.  ``wait``: until it can take one more; otherwise this one
    is lost."""
    address = os.environ.get(NOTIFY_SOCKET, "")
    if address[:1] not in ("/", "@"):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
        out.connect("\0" + address[1:] if address[0] == "@" else address)
        out.send(state.encode(), 0 if wait else socket.MSG_DONTWAIT)
