"""All ranks in one process, stepped in turn: for tests, and for kernels that run in an interpreter.

Each rank runs in a thread of its own, and only one of them at a time: until it waits for others or ends.  So a run is
the same every time, and a process that allows one operation at a time can compute all ranks.
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.errors import GroupError
from penstock.kernels.operands import Array
from penstock.parallel.collectives.interface import Collectives

T = TypeVar("T")


class LocalWorld:
    """The ranks of one process, numbered from 0."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._condition = threading.Condition()
        self._turn = 0
        self._alive = set[int]()
        self._idle_turns = 0  # one after another in which no rank got on
        self._over = ""  # why the group has ended
        self._meetings: dict[tuple[int, ...], _Meeting] = {}
        self._sent: defaultdict[tuple[int, int], deque[Array]] = defaultdict(deque)

    def group(self, rank: int, members: Sequence[int]) -> Collectives:
        """One rank's connection to a group: some of the ranks, numbered there in this order, itself among them."""
        meeting = self._meetings.setdefault(tuple(members), _Meeting(len(members)))
        return _LocalCollectives(self, meeting, tuple(members), rank)

    def run(self, steps: Sequence[Callable[[], T]]) -> list[T]:
        """Run one function a rank to its end, in turn; returns what they return.

        Raises what the first of them raised; then the others are ended, and the world is over.
        """
        if len(steps) != self._ranks:
            raise ValueError(f"{len(steps)} functions for {self._ranks} ranks")
        results: dict[int, T] = {}
        errors: list[BaseException] = []
        self._alive, self._turn, self._idle_turns = set(range(self._ranks)), 0, 0

        def run_rank(rank: int) -> None:
            try:
                self._await_turn(rank)
                results[rank] = steps[rank]()
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)
                self._over = self._over or f"rank {rank} has ended: {error}"
            self._leave(rank)

        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(self._ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self._ranks)]

    def wait(self, rank: int, ready: Callable[[], bool]) -> None:
        """Let other ranks run until this is true.  Raises GroupError if it cannot become true, or a rank has ended."""
        while not ready():
            self._idle_turns += 1
            if self._idle_turns > len(self._alive):
                self._over = self._over or f"rank {rank} waits for one that does not call the same operation"
            with self._condition:
                self._pass_turn(rank)
            self._await_turn(rank)
        self._idle_turns = 0

    def post(self, source: int, to: int, array: Array) -> None:
        """Keep what one rank sends to another."""
        self._sent[source, to].append(array)
        self._idle_turns = 0

    def posted(self, source: int, to: int) -> deque[Array]:
        """What one rank has sent to another, and is not received yet."""
        return self._sent[source, to]

    def fail(self, why: str) -> GroupError:
        """The error of a group that is over."""
        self._over = self._over or why
        return GroupError(why)

    def _await_turn(self, rank: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == rank)
            if self._over:
                raise GroupError(self._over)

    def _pass_turn(self, rank: int) -> None:
        """To the next rank that has not ended; this one if there is no other."""
        later = [(other - rank - 1) % self._ranks for other in self._alive]
        if later:
            self._turn = (rank + 1 + min(later)) % self._ranks
        self._condition.notify_all()

    def _leave(self, rank: int) -> None:
        with self._condition:
            self._alive.discard(rank)
            self._idle_turns = 0
            self._pass_turn(rank)


class _Meeting:
    """One collective operation of a group at a time: what each rank gave, until all have taken all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.given: dict[int, tuple[str, list[Array]]] = {}
        self.taken = set[int]()

    def clear_if_taken(self) -> None:
        """Make room for the next operation once the last rank has taken its arrays."""
        if len(self.taken) == self.size:
            self.given.clear()
            self.taken.clear()


class _LocalCollectives:
    """The ``Collectives`` of one rank of a ``LocalWorld``."""

    def __init__(self, world: LocalWorld, meeting: _Meeting, members: tuple[int, ...], rank: int) -> None:
        self._world = world
        self._meeting = meeting
        self._members = members
        self._world_rank = rank
        self.rank = members.index(rank)
        self.size = len(members)

    def all_gather(self, own: Array) -> list[Array]:
        arrays = self._meet(f"all_gather of {len(own)} rows", [own])
        return [copy.deepcopy(given[0]) for given in arrays]

    def all_to_all(self, parts: Sequence[Array]) -> list[Array]:
        if len(parts) != self.size:
            raise ValueError(f"{len(parts)} arrays for {self.size} ranks")
        arrays = self._meet("all_to_all", parts)
        return [copy.deepcopy(given[self.rank]) for given in arrays]

    def send(self, array: Array, to: int) -> None:
        self._world.post(self._world_rank, self._members[to], copy.deepcopy(array))

    def recv(self, source: int, shape: tuple[int, ...]) -> Array:
        sender = self._members[source]
        waiting = self._world.posted(sender, self._world_rank)
        self._world.wait(self._world_rank, lambda: len(waiting) > 0)
        array = waiting.popleft()
        if tuple(array.shape) != shape:
            raise self._world.fail(f"rank {sender} sent an array {list(array.shape)}, expected {list(shape)}")
        return array

    def _meet(self, what: str, arrays: Sequence[Array]) -> list[list[Array]]:
        """What every rank gave, by rank."""
        meeting = self._meeting
        self._world.wait(self._world_rank, lambda: self.rank not in meeting.given)
        meeting.given[self.rank] = (what, [copy.deepcopy(array) for array in arrays])
        self._world.wait(self._world_rank, lambda: len(meeting.given) == self.size)
        different = {given for given, _ in meeting.given.values()} - {what}
        if different:
            raise self._world.fail(f"a rank calls {what} where another calls {different.pop()}")
        found = [meeting.given[rank][1] for rank in range(self.size)]
        meeting.taken.add(self.rank)
        meeting.clear_if_taken()
        return found
