"""Which addresses lead nowhere but to this host.  Asks no name server."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Does this address stay on the host?  A name other than localhost is taken to lead off it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
