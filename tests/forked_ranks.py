"""Ranks of a group as processes of their own, forked from the test, which exchange over shared memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import GroupError
from penstock.parallel.collectives.interface import Collectives
from penstock.parallel.collectives.shm import ShmMemory

Rank = Callable[[Collectives], Any]


def run_forked(
    ranks: Sequence[Rank],
    *,
    slot_bytes: int = 1 << 12,
    spin_us: float = 20.0,
    connect: Callable[[int], Collectives] | None = None,
) -> list[Any]:
    """Run one function in each process; returns what they return, as JSON has it.  ``connect``: a rank, in its process;
    by default over shared memory.

    Raises the GroupError of the first rank that had one.  A rank that raises ends the group.
    """
    memory = ShmMemory(len(ranks), slot_bytes=slot_bytes)
    connect = connect or (lambda rank: memory.group(rank, spin_us=spin_us))
    children = [_fork(memory, rank, fn, connect) for rank, fn in enumerate(ranks)]
    found = []
    for child, pipe in children:
        with os.fdopen(pipe) as lines:
            found.append(json.loads(lines.read() or '["died", null]'))
        os.waitpid(child, 0)
    for kind, value in found:
        if kind == "GroupError":
            raise GroupError(value)
    assert [kind for kind, _ in found] == ["result"] * len(ranks), found
    return [value for _, value in found]


def _fork(memory: ShmMemory, rank: int, fn: Rank, connect: Callable[[int], Collectives]) -> tuple[int, int]:
    """The process and the pipe that its answer comes through."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    answer: tuple[str, Any] = ("died", None)
    try:
        answer = ("result", fn(connect(rank)))
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        memory.end()
        answer = (type(error).__name__, str(error))
    finally:
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
