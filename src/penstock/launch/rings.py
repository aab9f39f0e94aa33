"""Which API keys open a service: one, those of a file, or both."""

from __future__ import annotations

from pathlib import Path

from penstock.api.auth import ApiKeys, FileApiKeys, FrontApiKey, StaticApiKeys
from penstock.clock import MonotonicClock
from penstock.config.limits import SchedulingConfig


def ring_of(
    api_key: str | None, api_keys: str | None, scheduling: SchedulingConfig, *, fronted: bool = False
) -> ApiKeys:
    """The keys of a process that serves; ``fronted``: the one key is that of a catalogue's front.

    Raises ConfigError.
    """
    if fronted and api_key:
        return FrontApiKey(api_key, max_tenants=scheduling.max_tenants)
    besides = [api_key] if api_key else []
    if api_keys is None:
        return StaticApiKeys.of(besides)
    path = Path(api_keys).expanduser()
    return FileApiKeys(path, MonotonicClock(), besides=besides, max_keys=scheduling.max_tenants)
