"""What workers ask of their gateway: who goes on with answers that they want to be relieved of, and what is still
wanted of what they have.

Decides nothing itself (``decide.relieve`` and the flight do).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from penstock.clock import Clock
from penstock.router.effects import Effects
from penstock.router.fleet import Fleet
from penstock.router.links import Links
from penstock.router.placement import Placement
from penstock.router.slices import Slices, logged_errors
from penstock.router.stream import Stream
from penstock.types import RequestId, Role, WorkerId, WorkerState
from penstock.wire.duties import Relieve, StillWanted
from penstock.wire.messages import Cancel, PageSource

Apply = Callable[[Stream, Effects, float], None]


class Relief:
    """Of one gateway."""

    def __init__(
        self,
        fleet: Fleet,
        links: Links,
        placement: Placement,
        streams: Mapping[RequestId, Stream],
        apply: Apply,
        *,
        slices: Slices,
        clock: Clock,
    ) -> None:
        """``is_probe`` is set by whoever sends probes."""
        self._fleet = fleet
        self._links = links
        self._placement = placement
        self._streams = streams
        self._apply = apply
        self._slices = slices
        self._clock = clock
        self.is_probe: Callable[[RequestId], bool] = lambda request: False

    def on(self, message: Relieve | StillWanted, worker: WorkerId, incarnation: int) -> None:
        """A worker asks."""
        if isinstance(message, Relieve):
            self._slices.add(self._relieve(message, worker, incarnation))
        else:
            self._cancel_unwanted(message, worker, incarnation)

    def _cancel_unwanted(self, message: StillWanted, worker: WorkerId, incarnation: int) -> None:
        link = self._links.to(worker, incarnation)
        if link is None:
            return
        for request, epoch in message.requests:
            if self.is_probe(request):
                continue
            stream = self._streams.get(request)
            if stream is None or stream.flight.epoch != epoch or not stream.flight.runs_at(worker, incarnation):
                link.cancel(Cancel(request=request, epoch=epoch))

    def _relieve(self, message: Relieve, worker: WorkerId, incarnation: int) -> Iterator[None]:
        """Find others who go on with what this worker writes.  Where there is nobody and it is about to stop, its
        answers are computed anew."""
        fleet, slot = self._fleet, self._fleet.slot(worker)
        if slot is None:
            return
        source = PageSource(worker=worker, incarnation=incarnation, endpoint=fleet.endpoints[slot])
        # Who stays as it is asks for answers that outgrow it.
        stays = fleet.states[slot] is not WorkerState.DRAINING and fleet.roles[slot] is not Role.PREFILL
        beyond = fleet.context(slot) if stays else 0
        for number, (request, epoch) in enumerate(message.requests):
            if number:
                yield
            stream = self._streams.get(request)
            if not fleet.is_current(worker, incarnation):
                return
            if stream is not None and stream.flight.may_move(worker, incarnation, epoch):
                with logged_errors(f"nobody could be found to go on with {request}"):
                    self._move(stream, source, beyond, ends=fleet.states[slot] is WorkerState.DRAINING)

    def _move(self, stream: Stream, source: PageSource, beyond: int, *, ends: bool) -> None:
        """``ends``: whoever writes it is about to stop."""
        now, flight, worker, incarnation = self._clock.now(), stream.flight, source.worker, source.incarnation
        decision, root = self._placement.relieve(flight, worker, incarnation, now, beyond=beyond)
        if decision.legs:
            joined = flight.joined(decision.legs[0], source, root, now, expected=decision.expected)
            self._apply(stream, joined, now)
        elif ends:
            why = "it drains, and nobody else is ready to go on with its answers"
            effects = flight.lost(worker, incarnation, why, now)
            stream.failed((worker, incarnation), why, effects, now)
            self._apply(stream, effects, now)
