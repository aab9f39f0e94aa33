"""The base class of all configuration, and what its fields and checks share."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Milliseconds = Annotated[float, msgspec.Meta(gt=0)]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all configuration: frozen, keyword-only, strict."""


def host_and_port(endpoint: str) -> tuple[str, int]:
    """The parts of ``tcp://HOST:PORT``, an IPv6 address without its brackets."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether the address is of the loopback.  Resolves no names: any other than localhost counts as remote."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
