"""Which tiers of the KV store were asked for."""

from __future__ import annotations

from penstock.config.schema import EngineSettings

_TIERS = ("kv_host", "kv_disk", "kv_redis", "kv_mooncake")


def stores_asked(config: EngineSettings) -> list[str]:
    """Their flags: ``--kv-host``, then those that outlive the service."""
    return [f"--{name.replace('_', '-')}" for name in _TIERS if getattr(config, name) is not None]
