"""What gateways are told of this worker beside tokens: its reports, and what its prefix cache has.

Each gateway's report says how much of what that very gateway sent is counted in it.  What is lost is not repeated here:
the next report shows the loss, and who has missed something of the cache asks for all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.config.schema import WorkerConfig
from penstock.engine.core.prefix import PrefixCache
from penstock.engine.service.asks import Gateway
from penstock.engine.service.kv_log import KvLog
from penstock.wire.messages import Hello, Report
from penstock.wire.transport import Listener


class Bulletins:
    """Sends them.  ``prefix`` tells this object of its changes from now on."""

    def __init__(self, config: WorkerConfig, prefix: PrefixCache, listener: Listener) -> None:
        self._listener = listener
        self._log = KvLog(config.worker, config.incarnation, prefix.blocks)
        self._wanted: list[Gateway] = []  # by whom all that is cached is to be told
        prefix.on_change = self._log.note

    def greeted(self, gateway: Gateway, hello: Hello) -> None:
        """A gateway may want to know all that is cached."""
        if hello.kv_snapshot and gateway not in self._wanted:
            gateway.follows_cache = True
            self._wanted.append(gateway)

    def cache(self, gateways: Sequence[Gateway]) -> None:
        """What has changed in the prefix cache, to all who follow it; all of it, to those who asked."""
        followers = [gateway for gateway in gateways if gateway.follows_cache]
        for message in self._log.take():
            for gateway in followers:
                self._listener.send(gateway.peer, message)
        wanted, self._wanted = self._wanted, []
        for gateway in wanted:
            for message in self._log.snapshot():
                self._listener.send(gateway.peer, message)

    def report(self, gateways: Sequence[Gateway], report: Report) -> None:
        """How this worker is."""
        busy = max(1, sum(gateway.serial > 0 for gateway in gateways))
        for gateway in gateways:
            own = msgspec.structs.replace(report, heard=gateway.serial, gateways=busy, kv_sequence=self._log.sequence)
            self._listener.send(gateway.peer, own)
