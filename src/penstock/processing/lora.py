"""The LoRA adapters that clients may name: those given at the start, and those loaded since.

A request carries the fingerprint of the adapter's content, so unloading a name does not affect running requests.
Knows nothing about HTTP or workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.config.schema import LoraConfig, NamedAdapter
from penstock.errors import BadField, Forbidden, ModelError, RequestError, UnknownModel
from penstock.interfaces import JsonObject
from penstock.processing.requests.fields import BodyFields, refuse_unknown
from penstock.types import AdapterRef
from penstock.weights.inspect import inspect_model
from penstock.weights.lora import LoraFileLimits, LoraTarget, lora_targets, named_adapter, read_lora_adapter

MAX_NAME_CHARS = 256
MAX_PATH_CHARS = 4096

LOAD_FIELDS = frozenset({"lora_name", "lora_path", "load_inplace"})
UNLOAD_FIELDS = frozenset({"lora_name", "lora_int_id"})


class LoraRegistry:
    """By name."""

    def __init__(self, config: LoraConfig, model: Path, model_name: str) -> None:
        self._config = config
        self._model = model
        self._model_name = model_name
        self._by_name = {own.name: own for own in config.adapters}
        self._targets: Mapping[str, LoraTarget] | None = None
        self._alone = asyncio.Lock()

    def find(self, name: object) -> AdapterRef | None:
        """What goes with a request for this model, if it is an adapter."""
        own = self._by_name.get(name) if isinstance(name, str) else None
        return None if own is None else AdapterRef(fingerprint=own.fingerprint, folder=own.folder)

    def names(self) -> Sequence[str]:
        """All of them."""
        return tuple(self._by_name)

    async def load(self, body: JsonObject) -> str:
        """The name, once the adapter was read and found sound.  Raises RequestError."""
        self._check_allowed()
        fields = _parsed(body, LOAD_FIELDS)
        name = _text(fields, "lora_name", MAX_NAME_CHARS)
        path = _text(fields, "lora_path", MAX_PATH_CHARS)
        if not path.startswith("/"):
            raise BadField("lora_path", got=path, want="an absolute path")
        if name == self._model_name:
            raise BadField("lora_name", got=name, want="another name than the model's")
        async with self._alone:
            if name in self._by_name and not fields.boolean("load_inplace"):
                raise RequestError(
                    f"There is an adapter '{name}' already. Unload it first, or set 'load_inplace'.",
                    param="lora_name",
                    code="adapter_exists",
                )
            self._by_name[name] = await asyncio.to_thread(self._read, name, Path(path))
        return name

    async def unload(self, body: JsonObject) -> str:
        """The name.  Raises RequestError."""
        self._check_allowed()
        name = _text(_parsed(body, UNLOAD_FIELDS), "lora_name", MAX_NAME_CHARS)
        async with self._alone:
            if name not in self._by_name:
                raise UnknownModel(name, list(self._by_name), mappable=False)
            del self._by_name[name]
        return name

    def _check_allowed(self) -> None:
        if not self._config.allow_updating:
            raise Forbidden(
                "Adapters can only be loaded and unloaded by clients of a service that was started with "
                "--allow-lora-updating.",
                code="lora_updating_off",
            )

    def _read(self, name: str, folder: Path) -> NamedAdapter:
        """On a thread; the lock excludes other writers."""
        config = self._config
        others = [own for own in self._by_name.values() if own.name != name]
        if len(others) >= config.max_adapters:
            raise RequestError(
                f"There are {len(others)} adapters, as many as --max-loras allows. Unload one first.",
                code="too_many_adapters",
            )
        limits = LoraFileLimits(max_rank=config.max_rank, max_bytes=config.max_bytes)
        try:
            if self._targets is None:
                self._targets = lora_targets(inspect_model(self._model))
            own = named_adapter(name, folder, read_lora_adapter(folder, self._targets, limits))
        except ModelError as error:
            raise RequestError(f"{error}.", param="lora_path", code="invalid_adapter") from None
        taken = sum(other.nbytes for other in others)
        if taken + own.nbytes > config.max_bytes:
            raise RequestError(
                f"The adapter has {own.nbytes} bytes; the others have {taken} of the {config.max_bytes} that "
                "--lora-memory allows. Unload one first.",
                param="lora_path",
                code="lora_memory_full",
            )
        return own


def _parsed(body: JsonObject, known: frozenset[str]) -> BodyFields:
    refuse_unknown(body, known)
    return BodyFields(body)


def _text(fields: BodyFields, name: str, most: int) -> str:
    value = fields.required(name)
    if not isinstance(value, str) or not 1 <= len(value) <= most or not value.isprintable():
        raise BadField(name, got=value, want=f"a text of 1 to {most} characters", code="invalid_type")
    return value
