"""The base class of all configuration, and what its fields and checks share."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.errors import ConfigError

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Milliseconds = Annotated[float, msgspec.Meta(gt=0)]

IPC_NAME_MAX = 107  # unix(7)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all configuration: frozen, keyword-only, strict."""


def expanded_path(path: str | Path, what: str) -> Path:
    """The path with the home folder in the place of ``~`` or ``~USER``.  ``what``: the setting or argument, for errors.

    Raises ConfigError if there is no such user, or no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise ConfigError(f"{what} {path}: {user} has no home folder on this host; write the whole path") from None


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


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError unless it is ``ipc:///path``, ``ipc://@name`` (an abstract name) or ``tcp://host:port``."""
    kind, _, rest = endpoint.partition("://")
    if kind == "ipc" and rest.startswith(("@", "/")) and 1 < len(rest.encode()) <= IPC_NAME_MAX:
        return
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
        return
    raise ConfigError(f"{endpoint!r} is not an endpoint; ipc:///path, ipc://@name and tcp://host:port are")
