"""The adapters of one worker: which are in memory, in which slot, and which are being read.

::

    wanted --read and packed on a thread--> packed --a slot and room are free--> in memory --long unused--> forgotten

An adapter is known by the fingerprint of its content: one that was changed on disk is another one, and refused under
the old fingerprint.  Those of the start are in memory before the worker is forked; any other is read when a request
names it, by a worker that was started anew as well.  Knows nothing about requests but which adapters they use.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from penstock.engine.models.interface import Model
from penstock.errors import AdapterRefused, ModelError
from penstock.kernels.lora import NO_ADAPTER, AdapterTable, PackedAdapter
from penstock.kernels.operands import Array, PackedLinear, StepBatch
from penstock.kernels.ops import Ops
from penstock.types import AdapterRef
from penstock.weights.load import LoadedModel
from penstock.weights.lora import LoraAdapter, LoraFileLimits, lora_targets, read_lora_adapter


class LoraModel:
    """A ``Model`` with LoRA adapters.  ``products``: those of the model that ``table`` was made for, in its order."""

    def __init__(self, model: Model, table: AdapterTable, products: Mapping[str, PackedLinear]) -> None:
        self._model = model
        self._table = table
        self._products = tuple(products.values())
        self._sites = {id(weight): site for site, weight in enumerate(self._products)}

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        adding = cast(Ops, _AddingOps(ops, batch, self._table, self._sites))
        return self._model.forward(adding, batch, kv)

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return self._model.logits(ops, hidden_RD)


class _AddingOps:
    """The operations of one step; what is not said here is the backend's own."""

    def __init__(self, ops: Ops, batch: StepBatch, table: AdapterTable, sites: Mapping[int, int]) -> None:
        self._ops = ops
        self._batch = batch
        self._table = table
        self._sites = sites
        self._wanted = False  # only wanted rows are left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x_TK: Array, weight: PackedLinear) -> Array:
        out_TN = self._ops.linear(x_TK, weight)
        self._add(x_TK, weight, out_TN)
        return out_TN

    def linear_add(self, x_TK: Array, weight: PackedLinear, hidden_TN: Array) -> None:
        self._ops.linear_add(x_TK, weight, hidden_TN)
        self._add(x_TK, weight, hidden_TN)

    def rows(self, x_TD: Array, rows_R: NDArray[np.int32]) -> Array:
        """See ``Ops.rows``.  A model goes on with the wanted rows once it has picked them."""
        self._wanted = self._wanted or rows_R is self._batch.sample_rows_R
        return self._ops.rows(x_TD, rows_R)

    def _add(self, x_TK: Array, weight: PackedLinear, out_TN: Array) -> None:
        site = self._sites.get(id(weight))
        if site is not None:
            self._ops.lora_add(x_TK, self._batch, self._table, site, out_TN, wanted=self._wanted)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLimits:
    """How many adapters may be in memory, how much of it they may take, and their largest rank."""

    slots: int
    nbytes: int
    max_rank: int


@dataclass(slots=True)
class _Resident:
    slot: int
    nbytes: int


class LoraManager:
    """See above.  Made before the fork, with the adapters of the start; no thread is left then."""

    def __init__(
        self, ops: Ops, products: Mapping[str, PackedLinear], room: LoraLimits, read: Callable[[Path], LoraAdapter]
    ) -> None:
        """``products`` by the names of the model's layout; ``read`` reads a folder and raises ModelError."""
        self._products = products
        self._sites = {name: site for site, name in enumerate(products)}
        self._table: AdapterTable = ops.adapter_table(tuple(products.values()), room.slots)
        self._room = room
        self._read = read
        self._resident: OrderedDict[str, _Resident] = OrderedDict()  # used longest ago first
        self._coming: dict[str, Future[PackedAdapter]] = {}
        self._promised: set[str] = set()  # to requests that the scheduler has not heard of yet
        self._pool: ThreadPoolExecutor | None = None

    @classmethod
    def for_model(cls, ops: Ops, loaded: LoadedModel, room: LoraLimits) -> LoraManager:
        """The manager for a model in memory.  Raises ModelError if its family is not known."""
        targets = lora_targets(loaded.spec)
        limits = LoraFileLimits(max_rank=room.max_rank, max_bytes=room.nbytes)
        names = {target.weight for target in targets.values() if not target.refused}
        products = {name: w for name, w in loaded.weights.items() if name in names and isinstance(w, PackedLinear)}
        return cls(ops, products, room, lambda folder: read_lora_adapter(folder, targets, limits))

    @classmethod
    def disabled(cls, ops: Ops, room: LoraLimits) -> LoraManager:
        """The manager for a model that cannot have adapters."""

        def refuse(folder: Path) -> LoraAdapter:
            raise ModelError(f"{folder}: a model that only reads has no adapters")

        return cls(ops, {}, room, refuse)

    def with_adapters(self, model: Model) -> LoraModel:
        """The model with these adapters."""
        return LoraModel(model, self._table, self._products)

    def load(self, ref: AdapterRef) -> None:
        """Read it now, on this thread.  Raises AdapterRefused."""
        packed = self._packed(ref)
        if not self._place(ref.fingerprint, packed, frozenset()):
            raise AdapterRefused(f"{ref.folder}: no room next to the other adapters (max_loras, lora_memory)")

    def is_ready(self, ref: AdapterRef, in_use: Callable[[], Set[str]] = frozenset) -> bool:
        """Whether a request with this adapter can be computed now; if not, the adapter is being read or waits for room.

        Raises AdapterRefused when it cannot be had.
        """
        fingerprint = ref.fingerprint
        if fingerprint not in self._resident:
            coming = self._coming.get(fingerprint)
            if coming is None:
                coming = self._coming[fingerprint] = self._begin(ref)
            if not coming.done():
                return False
            try:
                packed = coming.result()
            except AdapterRefused:
                del self._coming[fingerprint]
                raise
            if not self._place(fingerprint, packed, in_use()):
                return False
            del self._coming[fingerprint]
        self._resident.move_to_end(fingerprint)
        self._promised.add(fingerprint)
        return True

    def on_scheduled(self) -> None:
        """The scheduler knows of all requests that were ready."""
        self._promised.clear()

    def slot_of(self, fingerprint: str) -> int:
        """The slot of an adapter in memory, or of none.  Raises KeyError for one that was never ready."""
        return self._resident[fingerprint].slot if fingerprint else NO_ADAPTER

    def fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of the adapters in memory, least recently used first."""
        return tuple(self._resident)

    def _begin(self, ref: AdapterRef) -> Future[PackedAdapter]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        return self._pool.submit(self._packed, ref)

    def _packed(self, ref: AdapterRef) -> PackedAdapter:
        try:
            adapter = self._read(Path(ref.folder))
        except ModelError as error:
            raise AdapterRefused(str(error)) from error
        if adapter.fingerprint != ref.fingerprint:
            raise AdapterRefused(f"{ref.folder}: was changed since it was listed; load it again")
        try:
            return self._table.pack({self._sites[name]: parts for name, parts in adapter.parts.items()})
        except ValueError as error:
            raise AdapterRefused(f"{ref.folder}: {error}") from error

    def _place(self, fingerprint: str, packed: PackedAdapter, in_use: Set[str]) -> bool:
        """Put it where room is, or can be made: what no request uses goes, the longest unused first."""
        if not self._make_room(packed.nbytes, in_use):
            return False
        slot = min(set(range(self._room.slots)) - {own.slot for own in self._resident.values()})
        self._table.put(slot, packed)
        self._resident[fingerprint] = _Resident(slot, packed.nbytes)
        return True

    def _make_room(self, nbytes: int, in_use: Set[str]) -> bool:
        used = in_use | self._promised
        unused = [fingerprint for fingerprint in self._resident if fingerprint not in used]
        while len(self._resident) >= self._room.slots or self._taken() + nbytes > self._room.nbytes:
            if not unused:
                # Alone it always fits: its file was no larger than the limit when it was read.
                return not self._resident
            gone = unused.pop(0)
            self._table.clear(self._resident.pop(gone).slot)
            log.info("adapter %s forgotten to make room", gone[:12])
        return True

    def _taken(self) -> int:
        return sum(own.nbytes for own in self._resident.values())
