"""BLAKE3 of many tensors by several threads, which are gone when it is over: whoever loads weights is about to fork.

Reads tensor by tensor in the order given, so that beside a load that reads in the same order each byte comes from the
drive once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from blake3 import blake3

from penstock.errors import ModelError
from penstock.weights.reader import Checkpoint

READ_BYTES = 1 << 20
JOIN_S = 0.05
"""How often the caller hears of a long hashing."""


class Hashing:
    """``start``, then ``join``; use as a context manager, so that no thread is left whatever happens."""

    def __init__(self, checkpoint: Checkpoint, names: list[str]) -> None:
        self._checkpoint = checkpoint
        self._waiting = names[::-1]
        self._digests: dict[str, bytes] = {}
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self.done = 0  # bytes in files

    def start(self, threads: int) -> None:
        """Begin; ``threads`` at most."""
        for _ in range(min(threads, len(self._waiting))):
            thread = threading.Thread(target=self._work)
            thread.start()
            self._threads.append(thread)

    def join(self, watch: Callable[[], None]) -> dict[str, bytes]:
        """All digests by name; ``watch`` is called meanwhile.  Raises ModelError, and what ``watch`` raises."""
        for thread in self._threads:
            while thread.is_alive():
                thread.join(JOIN_S)
                watch()
        self._threads.clear()
        if self._error is not None:
            raise self._error
        return self._digests

    def __enter__(self) -> Hashing:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        buffer = bytearray(READ_BYTES)
        try:
            while self._waiting and not self._stopped:
                name = self._waiting.pop()
                self._digests[name] = self._digest(name, buffer)
        except IndexError:
            return  # another thread took the last one
        except BaseException as error:  # noqa: BLE001 - raised again by ``join``
            self._error = error
            self._stopped = True

    def _digest(self, name: str, buffer: bytearray) -> bytes:
        place = self._checkpoint.place(name)
        if self._checkpoint.matrix(name) is not None:
            digest = self._checkpoint.digest(name)
            self._count(place.nbytes)
            return digest
        hasher = blake3()
        view = memoryview(buffer)
        done = 0
        while done < place.nbytes and not self._stopped:
            got = os.preadv(place.file, [view[: place.nbytes - done]], place.offset + done)
            if got == 0:
                raise ModelError(f"{self._checkpoint.path_of(name)}: tensor {name!r}: it ends before its time")
            hasher.update(view[:got])
            done += got
            self._count(got)
        return hasher.digest()

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
