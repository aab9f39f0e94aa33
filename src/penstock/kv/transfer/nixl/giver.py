"""The sending end over NIXL: this worker's pages, to be read by whoever was told where."""

from __future__ import annotations

import logging
import threading

from penstock.kv.transfer.nixl.house import House, HouseEmptyError
from penstock.kv.transfer.nixl.words import Begin, Ready
from penstock.wire.page_doors import AGENT_BYTES

log = logging.getLogger("penstock.worker")


class Giver:
    """Has a process in which these pages are mapped; without NIXL, and when it fails, ``ready`` is None."""

    def __init__(self, begin: Begin, memory: int) -> None:
        """``memory``: the descriptor of the pages; the caller's.  Starts nothing."""
        self.ready: Ready | None = None
        self.settled = threading.Event()  # the process has come up, or has not
        self._begin = begin
        self._memory = memory
        self._house: House | None = None
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Of its process."""
        return None if self._house is None else self._house.pid

    def start(self) -> None:
        """Pages are about to be given.  May be called again and again."""
        if self.settled.is_set() or self._thread is not None:
            return
        house: House | None = None
        try:
            house = House(self._begin, self._memory)
            thread = threading.Thread(target=self._listen, args=(house,), name="kv-nixl-give", daemon=True)
            thread.start()
        except (OSError, RuntimeError) as error:  # no more descriptors or threads
            if house is not None:
                house.close()
            log.warning("pages are given by sockets, NIXL cannot be had: %s", error)
            self.settled.set()
            return
        self._house, self._thread = house, thread

    def close(self) -> None:
        """Nobody can read anything any more.  May be called twice."""
        if self._house is not None and self._thread is not None:
            self._house.end()
            self._thread.join()
            self._house.close()

    def _listen(self, house: House) -> None:
        try:
            first = house.hear(None)
            if not isinstance(first, Ready) or len(first.agent) > AGENT_BYTES:
                reason = getattr(first, "reason", "it says too much")
                log.warning("pages are given by sockets, NIXL cannot be had: %s", reason)
                return
            self.ready = first
            self.settled.set()
            house.hear(None)
        except HouseEmptyError:
            if self.ready is not None:
                log.warning("pages are given by sockets from now on: the process of NIXL has ended")
        finally:
            self.ready = None
            self.settled.set()
