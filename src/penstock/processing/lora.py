"""The LoRA adapters that clients may name: those given at the start, and those loaded since.

A request carries the fingerprint of the adapter's content, so unloading a name does not affect running requests.
Where gateways share names (``SharedAdapterNames``), a name stands for the same adapter at all of them, also one that
was given at the start: what was loaded or unloaded since replaces it.  Knows nothing about HTTP or workers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from penstock.adapter_records import AdapterRecord
from penstock.config.schema import LoraConfig, NamedAdapter
from penstock.errors import BadField, Conflict, Forbidden, ModelError, RequestError, UnknownModel
from penstock.interfaces import JsonObject
from penstock.processing.requests.fields import BodyFields, refuse_unknown
from penstock.types import AdapterRef
from penstock.weights.inspect import inspect_model
from penstock.weights.lora import LoraFileLimits, LoraTarget, lora_targets, named_adapter, read_lora_adapter

MAX_NAME_CHARS = 256
MAX_PATH_CHARS = 4096

LOAD_FIELDS = frozenset({"lora_name", "lora_path", "load_inplace"})
UNLOAD_FIELDS = frozenset({"lora_name", "lora_int_id"})


MAX_TRIES = 4
"""Of a change that another gateway's change of the same name comes before."""

log = logging.getLogger(__name__)


class SharedAdapterNames(Protocol):
    """Names that all gateways share (``router.shared_adapters``)."""

    def follow(self, listener: Callable[[AdapterRecord], None], given: Sequence[AdapterRecord]) -> None:
        """Call ``listener`` with all records, now and later.  ``given``: of the start, to be shared unless their names
        were loaded or unloaded while serving."""
        ...

    def next_version(self, name: str) -> int:
        """The version of a record that replaces the known one."""
        ...

    async def change(self, record: AdapterRecord) -> AdapterRecord | None:
        """Shares a record, and returns the one that stands; None: there is no room."""
        ...


class LoraRegistry:
    """By name."""

    def __init__(
        self, config: LoraConfig, model: Path, model_name: str, shared: SharedAdapterNames | None = None
    ) -> None:
        """``shared``: used if clients may load adapters; None: the names are this gateway's own."""
        self._config = config
        self._model = model
        self._model_name = model_name
        self._by_name = {own.name: own for own in config.adapters}
        self._targets: Mapping[str, LoraTarget] | None = None
        self._alone = asyncio.Lock()
        self._shared = shared if config.allow_updating else None
        if self._shared is not None:
            self._shared.follow(self._on_record, [_record(own, 1, given=True) for own in config.adapters])

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
            replaces = bool(fields.boolean("load_inplace"))
            if self._shared is None and name in self._by_name and not replaces:
                raise _exists(name)
            own = await asyncio.to_thread(self._read, name, Path(path))
            if self._shared is None:
                self._by_name[name] = own
            else:
                await self._share(self._shared, own, replaces=replaces)
        return name

    async def _share(self, shared: SharedAdapterNames, own: NamedAdapter, *, replaces: bool) -> None:
        """Gives the name to this adapter at all gateways.  Raises RequestError."""
        for _ in range(MAX_TRIES):
            known = self._by_name.get(own.name)
            if known is not None and known.fingerprint == own.fingerprint:
                return
            if known is not None and not replaces:
                raise _exists(own.name, known.folder)
            stands = await shared.change(_record(own, shared.next_version(own.name)))
            if stands is None:
                raise RequestError(
                    "The gateways know too many adapters already. Unload one first.", code="too_many_adapters"
                )
        raise _changing(own.name)

    async def unload(self, body: JsonObject) -> str:
        """The name.  Raises RequestError."""
        self._check_allowed()
        name = _text(_parsed(body, UNLOAD_FIELDS), "lora_name", MAX_NAME_CHARS)
        async with self._alone:
            if name not in self._by_name:
                raise UnknownModel(name, list(self._by_name), mappable=False)
            if self._shared is None:
                del self._by_name[name]
                return name
            for _ in range(MAX_TRIES):
                own = self._by_name.get(name)
                if own is None:
                    return name
                record = _record(own, self._shared.next_version(name), loaded=False)
                if await self._shared.change(record) is None:
                    del self._by_name[name]
                    return name
        raise _changing(name)

    def _on_record(self, record: AdapterRecord) -> None:
        """An adapter was loaded or unloaded, here or at another gateway."""
        known = self._by_name.get(record.name)
        if not record.loaded:
            if self._by_name.pop(record.name, None) is not None:
                log.info("adapter %s was unloaded", record.name)
            return
        if known is not None and known.fingerprint != record.fingerprint:
            log.warning("adapter %s is %s from now on, instead of %s", record.name, record.folder, known.folder)
        reason = self._refusal(record)
        if reason is not None:
            log.error("adapter %s of another gateway is not served here: %s", record.name, reason)
            self._by_name.pop(record.name, None)
            return
        self._by_name[record.name] = NamedAdapter(
            name=record.name,
            folder=record.folder,
            fingerprint=record.fingerprint,
            nbytes=record.nbytes,
            rank=record.rank,
        )

    def _refusal(self, record: AdapterRecord) -> str | None:
        """Why this gateway has no room for an adapter that another one has loaded."""
        config = self._config
        others = [own for own in self._by_name.values() if own.name != record.name]
        if record.name == self._model_name or not record.name.isprintable():
            return "it has no name that an adapter can have"
        if len(others) >= config.max_adapters:
            return f"there are {len(others)}, as many as --max-loras allows"
        if sum(own.nbytes for own in others) + record.nbytes > config.max_bytes:
            return f"it has {record.nbytes} bytes, and there is no room in --lora-memory"
        if record.rank > config.max_rank:
            return f"its rank is {record.rank}, above --max-lora-rank"
        return None

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


def _exists(name: str, folder: str = "") -> RequestError:
    what = f"an adapter '{name}' already" + (f", of {folder}" if folder else "")
    return RequestError(
        f"There is {what}. Unload it first, or set 'load_inplace'.", param="lora_name", code="adapter_exists"
    )


def _changing(name: str) -> Conflict:
    return Conflict(f"Other gateways change the adapter '{name}' at the same time. Try again.", code="adapter_changing")


def _record(own: NamedAdapter, version: int, *, loaded: bool = True, given: bool = False) -> AdapterRecord:
    return AdapterRecord(
        name=own.name,
        version=version,
        fingerprint=own.fingerprint,
        folder=str(Path(own.folder).absolute()),
        nbytes=own.nbytes,
        rank=own.rank,
        loaded=loaded,
        given=given,
    )


def _parsed(body: JsonObject, known: frozenset[str]) -> BodyFields:
    refuse_unknown(body, known)
    return BodyFields(body)


def _text(fields: BodyFields, name: str, most: int) -> str:
    value = fields.required(name)
    if not isinstance(value, str) or not 1 <= len(value) <= most or not value.isprintable():
        raise BadField(name, got=value, want=f"a text of 1 to {most} characters", code="invalid_type")
    return value
