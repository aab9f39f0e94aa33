"""The base class of all configuration, and the types that its fields share."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Milliseconds = Annotated[float, msgspec.Meta(gt=0)]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all configuration: frozen, keyword-only, strict."""


# MERGED: Which addresses lead nowhere but to this host.  Asks no name server.


def is_loopback(host: str) -> bool:
    """Does this address stay on the host?  A name other than localhost is taken to lead off it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
