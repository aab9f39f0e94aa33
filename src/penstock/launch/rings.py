"""Which API keys open a service: one, those of a file, or both."""

from __future__ import annotations

from pathlib import Path

from penstock.clock import MonotonicClock
from penstock.config.limits import SchedulingConfig
from penstock.edge.auth import FileRing, KeyRing, Ring
from penstock.edge.fronted import FrontedRing


def ring_of(api_key: str | None, api_keys: str | None, scheduling: SchedulingConfig, *, fronted: bool = False) -> Ring:
    """The keys of a process that serves; ``fronted``: the one key is that of a catalogue's front.

    Raises ConfigError.
    """
    if fronted and api_key:
        return FrontedRing(api_key, max_tenants=scheduling.max_tenants)
    besides = [api_key] if api_key else []
    if api_keys is None:
        return KeyRing.of(besides)
    path = Path(api_keys).expanduser()
    return FileRing(path, MonotonicClock(), besides=besides, max_keys=scheduling.max_tenants)
