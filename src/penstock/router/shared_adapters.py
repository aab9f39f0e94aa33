"""The names of LoRA adapters, shared by the gateways of all hosts (``penstock.adapter_records``).

::

    gateway --ChangeAdapter--> home of the name --AdapterNames--> its other gateways
    gateway <--AdapterChanged-- home
    gateway --AdapterNames--> all workers --AdapterNames--> their other gateways, and those that come later

A gateway that knows of adapters says so to each worker that becomes ready, so names outlive workers and gateways as
long as one process is there that knows them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeAlias

import msgspec

from penstock.adapter_records import MAX_ADAPTER_VERSION, AdapterRecord, AdapterRecords
from penstock.clock import Clock
from penstock.router.fleet import Fleet
from penstock.router.home_calls import HomeCalls, WorkerHomes
from penstock.router.links import WorkerLinks
from penstock.types import WorkerId
from penstock.wire.gateway_messages import AdapterChanged, AdapterNames, ChangeAdapter

MAX_GIVEN_TRIES = 3
"""Of a gateway that starts with an adapter, while others start with others of that name: the last one counts."""

AdapterListener: TypeAlias = Callable[[AdapterRecord], None]
"""Called with each record that replaces another one, or is the first of its name."""


class SharedAdapters:
    """``processing.lora.SharedAdapterNames`` of one gateway; from its event loop."""

    def __init__(self, fleet: Fleet, links: WorkerLinks, homes: WorkerHomes, clock: Clock) -> None:
        self._fleet = fleet
        self._links = links
        self._calls = HomeCalls[AdapterChanged](homes, clock)
        self._records = AdapterRecords()
        self._listeners: list[AdapterListener] = []
        self._given: tuple[AdapterRecord, ...] = ()  # not shared yet
        self._sharing: asyncio.Task[None] | None = None

    def follow(self, listener: AdapterListener, given: Sequence[AdapterRecord] = ()) -> None:
        """Call ``listener`` with all records, now and later.  ``given``: of this gateway's start, to be shared once a
        worker is ready, unless their names were loaded or unloaded while serving."""
        self._given += tuple(given)
        self._listeners.append(listener)
        for record in self._records.all():
            listener(record)

    def next_version(self, name: str) -> int:
        """The version of a record that replaces the known one."""
        known = self._records.find(name)
        return 1 if known is None else min(known.version + 1, MAX_ADAPTER_VERSION)

    async def change(self, record: AdapterRecord) -> AdapterRecord | None:
        """Has a record accepted by the home of its name, and returns the record that stands; None: there is no room.

        Without a home, or without its answer, the record stands until another one is known.
        """
        digest = blake2b(record.name.encode(), digest_size=16).digest()
        answer = await self._calls.ask(digest, ChangeAdapter(record=record))
        stands = record if answer is None else answer.record
        if stands is None or stands.name != record.name:
            return None
        self._add((stands,))
        if stands == record:
            self._links.send_to_all(AdapterNames(records=(record,)))
        return stands

    def on_changed(self, worker: WorkerId, incarnation: int, message: AdapterChanged) -> None:
        """The answer of a worker.  One that was not asked is ignored."""
        self._calls.on_answer(worker, incarnation, message)

    def on_names(self, message: AdapterNames) -> None:
        """What other gateways have changed."""
        self._add(message.records)

    def on_ready(self, worker: WorkerId) -> None:
        """A worker has become ready: it may have been started anew."""
        slot = self._fleet.slot(worker)
        link = None if slot is None else self._links.link_to(worker, self._fleet.incarnations[slot])
        if link is not None and len(self._records):
            link.send(AdapterNames(records=self._records.all()))
        if self._given and self._sharing is None:
            self._sharing = asyncio.get_running_loop().create_task(self._share_given(), name="adapters of the start")

    async def _share_given(self) -> None:
        given, self._given = self._given, ()
        for record in given:
            for _ in range(MAX_GIVEN_TRIES):
                known = self._records.find(record.name)
                if known is not None and (not known.given or known.fingerprint == record.fingerprint):
                    break
                await self.change(msgspec.structs.replace(record, version=self.next_version(record.name)))

    def tick(self, now: float) -> None:
        """``HomeCalls.tick``."""
        self._calls.tick(now)

    def close(self) -> None:
        """No more answers will come."""
        self._calls.close()

    def _add(self, records: Sequence[AdapterRecord]) -> None:
        for record in self._records.add(records):
            for listener in self._listeners:
                listener(record)
