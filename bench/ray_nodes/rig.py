"""The cluster, its fleet, and clients: those of ``tests/cluster/test_ray.py``, which all scenes share."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import TracebackType
from typing import Any

from bench.faults.result import NotHereError

from cluster.keyed_load import Identical, KeyedLoad, undisturbed
from cluster.ray_fleet import RayFleet, missing
from cluster.ray_hosts import RayHosts
from cluster.server import PATIENCE_S, PenstockServer

Rows = dict[str, dict[str, Any]]


class Rig:
    """Use: ``with Rig(streams) as rig:``.  The fleet is up from the first scene that asks for it on."""

    def __init__(self, streams: int) -> None:
        """``streams``: at a time.  Raises NotHereError."""
        if why := missing():
            raise NotHereError(why)
        self.streams = streams
        self.ray = RayHosts()
        self.wanted: dict[int, Identical] = {}
        self._stack, self._folder = ExitStack(), ""
        self._fleet: RayFleet | None = None

    def __enter__(self) -> Rig:
        with PenstockServer(["--aggregated"]) as server:
            self.wanted = undisturbed(server, self.streams)
        with ExitStack() as stack:
            self._folder = stack.enter_context(TemporaryDirectory())
            stack.enter_context(self.ray)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def own_folder(self) -> Path:
        """For a fleet's file and keys; it is removed with the rig."""
        return Path(mkdtemp(dir=self._folder))

    def up(self) -> tuple[RayFleet, float]:
        """Start the fleet, which is not there; the seconds from the command to its end, which is when it is ready."""
        fleet = self._fleet or RayFleet(self.ray, self.own_folder())
        began = time.monotonic()
        fleet.command("up")
        seconds = time.monotonic() - began
        fleet.wait_whole()
        self._fleet = fleet
        return fleet, seconds

    def fleet(self) -> RayFleet:
        """Both nodes, ready."""
        if self._fleet is None:
            self.up()
        assert self._fleet is not None
        self._fleet.wait_whole()
        return self._fleet

    def down(self) -> None:
        """End the fleet, if it is there."""
        if self._fleet is not None:
            self._fleet.command("down")
            self._fleet = None

    @contextmanager
    def load(self, urls: list[str], headers: dict[str, str]) -> Iterator[KeyedLoad]:
        """So many streams at a time without a pause, which have begun to be answered; they end with the block."""
        load = KeyedLoad(urls, self.streams, headers=headers)
        with load.running():
            load.wait_answers(self.streams, PATIENCE_S)
            yield load


def ready_rows(fleet: RayFleet, names: Collection[str], *, other_than: tuple[str, int] | None = None) -> Rows | None:
    """What ``penstock ray status`` shows if these nodes are ready; None: they are not, or it does not say.

    ``other_than``: a node, and the actor that it must not have any more.
    """
    try:
        rows: Rows = fleet.nodes()
    except ValueError:
        return None
    if any(rows.get(name, {}).get("state") != "ready" for name in names):
        return None
    if other_than is not None and rows[other_than[0]].get("actor_pid") in (None, other_than[1]):
        return None
    return rows
