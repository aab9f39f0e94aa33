"""Rows of encoded images by content: kept as long as a request needs them, then until others need the room.

Pure: knows nothing of how rows come about.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from penstock.types import RequestId


class ImageStore:
    """At most ``limit`` bytes, but for rows that requests hold."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rows: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()  # used longest ago first
        self._held: dict[RequestId, frozenset[bytes]] = {}
        self.nbytes = 0

    def __contains__(self, content: bytes) -> bool:
        return content in self._rows

    def get(self, content: bytes) -> NDArray[np.float32] | None:
        """The image's rows [n, D], if they are here; now they are the ones used last."""
        if content in self._rows:
            self._rows.move_to_end(content)
        return self._rows.get(content)

    def put(self, content: bytes, rows_ND: NDArray[np.float32]) -> None:
        """Keep these rows; others that nobody holds make room, and these too if nobody holds them."""
        if content not in self._rows:
            self._rows[content] = rows_ND
            self.nbytes += rows_ND.nbytes
        self._shrink()

    def hold(self, request: RequestId, contents: Iterable[bytes]) -> None:
        """Nothing of ``contents`` leaves until ``release``, also what is yet to come."""
        self._held[request] = frozenset(contents)

    def release(self, request: RequestId) -> None:
        """The request needs its images no more; one that holds none is no error."""
        if self._held.pop(request, None) is not None:
            self._shrink()

    def held_bytes(self, requests: Iterable[RequestId] | None = None) -> int:
        """Of rows that these requests (by default, any) hold."""
        owners = self._held if requests is None else requests
        held = frozenset[bytes]().union(*(self._held.get(owner, frozenset()) for owner in owners))
        return sum(self._rows[content].nbytes for content in held if content in self._rows)

    @property
    def holders(self) -> tuple[RequestId, ...]:
        """Requests that hold images."""
        return tuple(self._held)

    def _shrink(self) -> None:
        if self.nbytes <= self.limit:
            return
        held = frozenset[bytes]().union(*self._held.values())
        for content in [content for content in self._rows if content not in held]:
            self.nbytes -= self._rows.pop(content).nbytes
            if self.nbytes <= self.limit:
                return
