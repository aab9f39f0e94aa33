"""What gateways are told of this worker beside tokens: its reports, and what its prefix cache has.

Each gateway's report says how much of what that very gateway sent is counted in it.  What is lost is not repeated here:
the next report shows the loss, and who has missed something of the cache asks for all of it.

All that is cached is told in slices, one message a turn, and once for all who have asked by then: what changes
meanwhile is told to them behind the last slice, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.config.schema import WorkerConfig
from penstock.engine.core.prefix import PrefixCache
from penstock.engine.service.asks import Gateway
from penstock.engine.service.kv_log import KvLog
from penstock.engine.service.sunk import Nearest, Sunk
from penstock.types import BlockHash
from penstock.wire.messages import Hello, KvEvents, Report
from penstock.wire.transport import Listener


@dataclass(slots=True)
class _Snapshot:
    """All that is cached, on its way to those who asked for it."""

    to: list[Gateway]
    parts: Iterator[KvEvents]
    behind: list[KvEvents] = field(default_factory=list[KvEvents])  # changes since it was begun


class Bulletins:
    """Sends them.  ``prefix`` tells this object of its changes from now on."""

    def __init__(self, config: WorkerConfig, prefix: PrefixCache, listener: Listener) -> None:
        self._listener = listener
        self._name = (config.worker, config.incarnation)
        self._prefix = prefix
        self._log = KvLog(*self._name, prefix.blocks)
        self._sunk: Sunk | None = None
        self._gone: dict[BlockHash, None] = {}  # given up by the cache; no tier was asked for them yet
        self._wanted: list[Gateway] = []  # who have asked for all that is cached
        self._snapshot: _Snapshot | None = None  # that is being told
        prefix.on_change = self._log.note

    def sinks(self, nearest: Nearest, tiers: int) -> None:
        """There are so many tiers below the cache.  To be called before anything is cached."""
        self._sunk = Sunk(nearest)
        self._log = KvLog(*self._name, self._prefix.blocks, self._sunk.all, tiers)
        self._prefix.on_change = self._changed

    def _changed(self, block: BlockHash, known: bool) -> None:
        assert self._sunk is not None, "sinks comes first"
        if known:
            self._gone.pop(block, None)
            self._sunk.rose(block)
            self._log.note(block, True)
        else:  # while a step is planned: no time to look for it below
            self._gone[block] = None

    def _log_all(self, changes: Iterable[tuple[BlockHash, int]]) -> None:
        for block, tier in changes:
            if tier:
                self._log.sank(block, tier)
            else:
                self._log.note(block, False)

    def greeted(self, gateway: Gateway, hello: Hello) -> None:
        """A gateway may want to know all that is cached."""
        if hello.kv_snapshot and gateway not in self._wanted:
            gateway.follows_cache = True
            self._wanted.append(gateway)

    def cache(self, gateways: Sequence[Gateway]) -> None:
        """What has changed in the prefix cache, to all who follow it; all of it, to those who asked."""
        if self._sunk is not None:
            gone, self._gone = tuple(self._gone), {}
            self._log_all(self._sunk.left(gone))
        changes = self._log.take()
        told = self._snapshot.to if self._snapshot is not None else []
        if self._snapshot is not None:
            self._snapshot.behind += changes
        for gateway in gateways:
            if gateway.follows_cache and gateway not in told:
                self._send(gateway, changes)
        self.go_on()

    @property
    def unfinished(self) -> bool:
        """Is there more of a snapshot to be told?"""
        return self._snapshot is not None

    def go_on(self) -> None:
        """Tell one part more of the snapshot that is being told, or begin the next.  To be called when all changes
        have been told."""
        if self._snapshot is None:
            if not self._wanted or self._log:
                return
            self._snapshot, self._wanted = _Snapshot(self._wanted, self._log.snapshot()), []
        snapshot = self._snapshot
        part = next(snapshot.parts)
        last = part.part + 1 == part.parts
        for gateway in snapshot.to:
            if not gateway.away:
                self._send(gateway, [part, *(snapshot.behind if last else ())])
        if last:
            self._snapshot = None

    def _send(self, gateway: Gateway, messages: Iterable[KvEvents]) -> None:
        for message in messages:
            self._listener.send(gateway.peer, message)

    def report(self, gateways: Sequence[Gateway], report: Report) -> None:
        """How this worker is."""
        if self._sunk is not None:
            self._log_all(self._sunk.look())
        busy = max(1, sum(gateway.serial > 0 for gateway in gateways))
        for gateway in gateways:
            own = msgspec.structs.replace(report, heard=gateway.serial, gateways=busy, kv_sequence=self._log.sequence)
            self._listener.send(gateway.peer, own)
