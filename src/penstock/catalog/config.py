"""The catalog of ``penstock serve --catalogue models.toml``: its models and their settings.

    [[model]]
    name = "small"                      # as clients call it
    path = "~/models/Llama-3.2-1B"      # a folder, a .gguf file or a Hub name, as for penstock serve
    aliases = ["gpt-4o-mini"]
    pinned = true
    kv_memory = "512MiB"                # any setting of penstock serve that concerns the model or its workers

Settings that an entry omits are those of the command line.  Unknown keys are errors; no model is read.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import Any

import msgspec

from penstock.config.base import Config, expanded_path
from penstock.config.decoded_weights import DECODED_WEIGHTS_AUTO
from penstock.config.limits import AuditLimits, RequestLimits, SchedulingConfig
from penstock.config.load import parse_setting
from penstock.config.schema import EventLoop, ServeConfig, TlsConfig
from penstock.errors import ConfigError
from penstock.processing.model_aliases import check_aliases, parse_aliases

MAX_BYTES = 1 << 20
MAX_MODELS = 256
DEFAULT_KV_BYTES = 256 << 20
"""Default KV memory of each worker: a tenth of the free memory would be too much for one model of many.

On a GPU, a worker takes all that is free there, as without a catalog."""

ENTRY_SETTINGS = (
    *("prefill", "decode", "aggregated", "prefill_cores", "decode_cores", "threads", "transfer", "lend_cores"),
    *("parallel", "tensor_parallel_size", "pipeline_parallel_size", "prefill_parallel", "decode_parallel"),
    *("kv_memory", "decoded_weights", "max_model_len", "dtype", "kv_dtype", "activation_dtype", "kernels"),
    *("max_chunk_tokens", "max_running"),
    *("speculate", "max_draft_tokens", "lora", "max_loras", "lora_memory", "max_lora_rank", "allow_lora_updating"),
    *("response_cache", "device", "gpu_lanes", "generation_config"),
)
"""The settings that an entry may have."""

_NAME = re.compile(r"[A-Za-z0-9][\w./:-]{0,127}")


class CatalogEntry(Config, frozen=True, kw_only=True):
    """One model.  ``settings``: those with which ``penstock serve`` would serve it alone."""

    name: str
    path: str
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    settings: ServeConfig

    @property
    def workers(self) -> int:
        """The number of its workers."""
        own = self.settings
        return 1 if own.aggregated or own.device == "cuda" else (own.prefill or 1) + (own.decode or 1)


def load_catalog(config: ServeConfig) -> tuple[CatalogEntry, ...]:
    """The entries of ``config.catalogue``, in order.  Raises ConfigError with file, entry and field."""
    path = expanded_path(config.catalogue or "", "catalogue")
    try:
        raw = path.read_bytes()
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes")
        table = tomllib.loads(raw.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    given = table.pop("model", None)
    if table or not isinstance(given, list) or not 1 <= len(given) <= MAX_MODELS:
        raise ConfigError(f"{path}: expected 1 to {MAX_MODELS} tables [[model]] and nothing else")
    entries = tuple(_entry(item, f"{path}: model {number}", config) for number, item in enumerate(given, start=1))
    _check_names(entries, path)
    return entries


def _entry(given: Any, where: str, base: ServeConfig) -> CatalogEntry:
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: expected a table")
    values: dict[str, Any] = {key.replace("-", "_"): value for key, value in given.items()}
    name, path = _text(values, "name", where), _text(values, "path", where)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: name {name!r}: expected letters, digits and ./:_- only, 128 at most")
    aliases, pinned = values.pop("aliases", []), values.pop("pinned", False)
    if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias.strip() for alias in aliases):
        raise ConfigError(f"{where}: aliases must be a list of texts")
    if not isinstance(pinned, bool):
        raise ConfigError(f"{where}: pinned must be true or false")
    settings = _settings(values, f"{where} ({name})", base)
    served = msgspec.structs.replace(
        settings,
        model=path,
        served_model_name=name,
        catalogue=None,
        model_memory=None,
        model_alias=_own_aliases(name, aliases, settings),
    )
    return CatalogEntry(name=name, path=path, aliases=tuple(aliases), pinned=pinned, settings=served)


def _own_aliases(name: str, aliases: Sequence[str], settings: ServeConfig) -> tuple[str, ...]:
    """What the model's own gateway is to know of names that clients send: its aliases, and patterns that mean it."""
    adapters = [text.partition("=")[0] for text in settings.lora]
    meant = {name: name} | dict.fromkeys(aliases, name) | {adapter: adapter for adapter in adapters}
    patterns = [f"{pattern}={meant[to]}" for pattern, to in parse_aliases(settings.model_alias) if to in meant]
    own = (*(f"{escape(alias)}={name}" for alias in aliases), *patterns)
    check_aliases(own, (name, *adapters))
    return own


def _settings(values: Mapping[str, Any], where: str, base: ServeConfig) -> ServeConfig:
    unknown = sorted(values.keys() - set(ENTRY_SETTINGS))
    if unknown:
        raise ConfigError(f"{where}: no such setting of a model: {unknown[0]}; there are {', '.join(ENTRY_SETTINGS)}")
    changes = {key: parse_setting(ServeConfig, key, value, f"{where}: {key}") for key, value in values.items()}
    if changes.get("aggregated"):
        changes = {"prefill": None, "decode": None} | changes
    elif "prefill" in changes or "decode" in changes:
        changes = {"aggregated": False} | changes
    device = changes.get("device", base.device)
    if changes.get("kv_memory") is None and base.kv_memory is None and device != "cuda":
        changes["kv_memory"] = DEFAULT_KV_BYTES
    if changes.get("decoded_weights", base.decoded_weights) == DECODED_WEIGHTS_AUTO:
        changes["decoded_weights"] = 0  # what is free is for models that are loaded later
    return msgspec.structs.replace(base, **changes)


def _text(values: dict[str, Any], key: str, where: str) -> str:
    value = values.pop(key, None)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: {key} must be a text, got {value!r:.80}")
    return value


def _check_names(entries: tuple[CatalogEntry, ...], path: Path) -> None:
    seen: set[str] = set()
    for entry in entries:
        for name in (entry.name, *entry.aliases, *(text.partition("=")[0] for text in entry.settings.lora)):
            if name in seen:
                raise ConfigError(f"{path}: the name {name!r} occurs twice")
            seen.add(name)


class CatalogModel(Config, frozen=True, kw_only=True):
    """One model of a catalog, as its front knows it."""

    name: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()  # names of its LoRA adapters
    nbytes: int = 0  # of memory while it is loaded
    pinned: bool = False
    max_model_len: int | None = None  # tokens, as set; None: known when it was loaded

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients may use for it."""
        return (self.name, *self.aliases, *self.adapters)


class FrontConfig(Config, frozen=True, kw_only=True):
    """The configuration of a catalog's front process."""

    models: tuple[CatalogModel, ...]
    model_memory: int | None = None  # bytes of all loaded models together
    api_key: str | None = None
    api_keys: str | None = None
    scheduling: SchedulingConfig = SchedulingConfig()
    audit_log: str | None = None  # file of refusals and of what operators do; None: none
    audit: AuditLimits = AuditLimits()
    upstream_key: str  # of the models' own gateways
    limits: RequestLimits = RequestLimits()
    created: int = 0  # Unix seconds
    event_loop: EventLoop = "auto"
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    tls: TlsConfig | None = None
    response_store: str | None = None  # file of responses that later requests continue; None: none are kept
    model_alias: tuple[str, ...] = ()  # PATTERN=NAME: names that clients may send for a model
