"""What the front process of a catalogue needs to know."""

from __future__ import annotations

from penstock.config.base import Config
from penstock.config.limits import Limits, SchedulingConfig
from penstock.config.schema import EventLoop, TlsConfig


class ModelPlace(Config, frozen=True, kw_only=True):
    """One model of a catalogue, as its front knows it."""

    name: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()  # names of its LoRA adapters
    nbytes: int = 0  # of memory while it is loaded
    pinned: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All that mean it."""
        return (self.name, *self.aliases, *self.adapters)


class StoreConfig(Config, frozen=True, kw_only=True):
    """Everything the front process of a catalogue needs."""

    models: tuple[ModelPlace, ...]
    model_memory: int | None = None  # bytes of all loaded models together
    api_key: str | None = None
    api_keys: str | None = None
    scheduling: SchedulingConfig = SchedulingConfig()
    upstream_key: str  # that the models' own gateways want
    limits: Limits = Limits()
    created: int = 0  # Unix seconds
    event_loop: EventLoop = "auto"
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    tls: TlsConfig | None = None
