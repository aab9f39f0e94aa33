"""The gateway's connections to workers: one link a worker incarnation, each read by one task.

All links together handle a limited number of messages in one turn of the event loop (``MessageBudget``).  What messages
mean is the handler's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec

from penstock.config.limits import TurnLimits
from penstock.types import WorkerId
from penstock.wire.codec import PeerMessage
from penstock.wire.gateway_messages import MAX_NAMED_REQUESTS, AwaitedStage, Cancel, Hello, Tokens
from penstock.wire.transport import AsyncLink


class MessageBudget:
    """Units that are left in this turn.  What takes the last of them may be larger than what was left."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._left = units

    @property
    def has_room(self) -> bool:
        """Whether one more message may be handled in this turn."""
        return self._left > 0

    @property
    def remaining(self) -> int:
        """Units."""
        return self._left

    def spend(self, units: int) -> None:
        """A message is handled."""
        if self._left == self._units:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._left -= units

    def _next_turn(self) -> None:
        self._left = self._units


log = logging.getLogger("penstock.router")


class Connect(Protocol):
    """``Transport.connect_async``."""

    def __call__(self, endpoint: str, *, worker: str = "") -> AsyncLink: ...


MessageHandler = Callable[[WorkerId, int, PeerMessage], None]
"""Called with worker, incarnation and each message that came from it."""


MESSAGE_UNITS = 16
"""To handle a message, whatever is in it.  Each request that it has tokens of is one more."""

NONE_AWAITED: Mapping[WorkerId, Sequence[AwaitedStage]] = {}


class WorkerLink:
    """One incarnation's link.  Cancels that cannot leave at once are kept and leave with a later beat."""

    def __init__(self, worker: WorkerId, incarnation: int, link: AsyncLink, connection: int = 0) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self._connection = connection
        self._link = link
        self._malformed = 0
        self._unsent: list[Cancel] = []
        self._reader: asyncio.Task[None] | None = None

    def start_reading(self, handle: MessageHandler, room: MessageBudget) -> None:
        """Start to hand every message to ``handle``, when a turn has ``room``.  Needs a running event loop."""
        self._reader = asyncio.get_running_loop().create_task(self._read(handle, room), name=f"link {self.worker}")

    async def _read(self, handle: MessageHandler, room: MessageBudget) -> None:
        async for received in self._link:
            rest: PeerMessage | None = received.message
            while rest is not None:
                while not room.has_room:  # noqa: ASYNC110 - there is room in the next turn
                    await asyncio.sleep(0)
                part, rest = split_message(rest, room.remaining)
                room.spend(message_units(part))
                self._handle(handle, part)

    def _handle(self, handle: MessageHandler, message: PeerMessage) -> None:
        try:
            handle(self.worker, self.incarnation, message)
        except Exception:
            log.exception("a message of %s could not be handled", self.worker)

    def send(self, message: PeerMessage) -> bool:
        """False: it will not be sent."""
        return self._link.send(message)

    def cancel(self, cancel: Cancel) -> None:
        """Sent now or with a later beat, as long as the link lives."""
        if self._unsent or not self._link.send(cancel):
            self._unsent.append(cancel)

    def send_heartbeat(self, hello: Hello, awaited: Sequence[AwaitedStage] = (), *, kv_snapshot: bool = False) -> None:
        """Greet, ask about the legs that are awaited (and the whole cache), and send what could not leave before.

        Of very many legs the first: the others are awaited again.
        """
        named = tuple(awaited[:MAX_NAMED_REQUESTS])
        self._link.send(
            msgspec.structs.replace(hello, connection=self._connection, awaited=named, kv_snapshot=kv_snapshot)
        )
        self.flush()

    def flush(self) -> None:
        """Send what could not leave before."""
        while self._unsent and self._link.send(self._unsent[0]):
            del self._unsent[0]

    def close(self) -> asyncio.Task[None] | None:
        """Close the link; the task that read it, if there is one, ends by itself and may be awaited."""
        self._link.close()
        return self._reader

    def take_malformed(self) -> int:
        """Frames of this worker, since this was asked last, that were none of ours."""
        before, self._malformed = self._malformed, self._link.counters.malformed
        return self._malformed - before

    @property
    def dropped(self) -> int:
        """Frames that were malformed or could not be sent."""
        return self._link.counters.malformed + self._link.counters.unsent


def message_units(message: PeerMessage) -> int:
    """What it takes to handle this."""
    return MESSAGE_UNITS + (len(message.items) if isinstance(message, Tokens) else 0)


def split_message(message: PeerMessage, units: int) -> tuple[PeerMessage, PeerMessage | None]:
    """The part that fits into ``units``, and the rest.  Only tokens of many requests are split: the parts mean
    the same one after another, and each is worth handling by itself."""
    if not isinstance(message, Tokens):
        return message, None
    most = max(MESSAGE_UNITS, units - MESSAGE_UNITS)
    if len(message.items) <= most:
        return message, None
    first = msgspec.structs.replace(message, items=message.items[:most])
    return first, msgspec.structs.replace(message, items=message.items[most:])


class WorkerLinks:
    """All links, by worker."""

    def __init__(self, connect: Connect, handle: MessageHandler, units_per_turn: int | None = None) -> None:
        """``units_per_turn``: of messages of all workers (``message_units``)."""
        self._connect = connect
        self._handle = handle
        self._room = MessageBudget(units_per_turn or TurnLimits().message_units_per_turn)
        self._links: dict[WorkerId, WorkerLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._dropped = 0  # by links that are closed
        self._opened = 0
        self.on_disconnected: Callable[[str], None] | None = None
        """Called with the endpoint of a worker when the connection to it ends, from links that are opened then."""

    def open(self, worker: WorkerId, incarnation: int, endpoint: str) -> WorkerLink:
        """Connect to a new incarnation, instead of any earlier one.  Raises ConfigError for a strange endpoint."""
        self.close_link(worker)
        self._opened += 1
        connected = self._connect(endpoint, worker=worker)
        # The supervisor says when a process of this host has ended.
        if self.on_disconnected is not None and endpoint.startswith("tcp://"):
            connected.notify_disconnected(partial(self.on_disconnected, endpoint))
        link = WorkerLink(worker, incarnation, connected, self._opened)
        link.start_reading(self._handle, self._room)
        self._links[worker] = link
        return link

    def link_to(self, worker: WorkerId, incarnation: int) -> WorkerLink | None:
        """The link to this very incarnation, or None."""
        link = self._links.get(worker)
        return link if link is not None and link.incarnation == incarnation else None

    def send_heartbeats(
        self,
        hello: Hello,
        awaited: Mapping[WorkerId, Sequence[AwaitedStage]] = NONE_AWAITED,
        lacking: Collection[WorkerId] = (),
        resting: Collection[WorkerId] = (),
    ) -> None:
        """Greet everybody, ask each about the legs that it has been silent about, and the ``lacking`` for all of their
        caches.  Of the ``resting`` only those are greeted that are asked something."""
        for worker, link in self._links.items():
            if worker in resting and worker not in awaited and worker not in lacking:
                link.flush()
            else:
                link.send_heartbeat(hello, awaited.get(worker, ()), kv_snapshot=worker in lacking)

    def take_malformed(self) -> list[tuple[WorkerId, int, int]]:
        """Workers, with their incarnations, that have sent frames that were none of ours, and how many, since the last
        time."""
        counts = [(link.worker, link.incarnation, link.take_malformed()) for link in self._links.values()]
        return [count for count in counts if count[2]]

    def send_to_all(self, message: PeerMessage) -> None:
        """Send it over every link."""
        for link in self._links.values():
            link.send(message)

    def close_link(self, worker: WorkerId) -> None:
        """Close the link to a worker, if there is one."""
        link = self._links.pop(worker, None)
        if link is None:
            return
        self._dropped += link.dropped
        reader = link.close()
        if reader is not None and not reader.done():
            self._closing.add(reader)
            reader.add_done_callback(self._closing.discard)

    @property
    def dropped(self) -> int:
        """Frames dropped so far, by all links there ever were."""
        return self._dropped + sum(link.dropped for link in self._links.values())

    async def close(self) -> None:
        """Close all links and await their readers."""
        for worker in list(self._links):
            self.close_link(worker)
        if self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)
