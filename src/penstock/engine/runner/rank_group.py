"""One worker of several ranks: the leader plans and says what is computed, all ranks compute it.

::

    leader     plan -> StepBatch --record--> each follower          program.run -> tokens are drawn
    follower             record -> the same StepBatch               program.run -> nothing is drawn

Page numbers are the leader's and the same on all ranks.  No follower decides anything: whatever a step depends on is in
its record.  The leader is a rank of the last stage, which has the logits.

A record is little-endian::

    begin    1, tokens T, sequences S, columns P, rows R     uint32 each
             tokens [T], positions [T], starts [S + 1], table [S, P], rows [R]     int32
    advance  2, tokens T, cells C                            every sequence has one token, one further than before
             tokens [T], then of each new page: index in the table and page        int32
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.config.mesh import Mesh, Place
from penstock.errors import GroupError
from penstock.kernels.operands import Array, StepBatch
from penstock.kernels.ops import StepProgram
from penstock.kernels.sampling import GumbelRows, Sampled, SampleRow
from penstock.types import PAGE_TOKENS

_BEGIN, _ADVANCE = 1, 2
_BEGIN_HEAD = struct.Struct("<5I")
_ADVANCE_HEAD = struct.Struct("<3I")

Ints = NDArray[np.int32]


def leader_of(mesh: Mesh) -> int:
    """The rank that leads: the first one of the last stage."""
    return mesh.rank(Place(tensor=0, stage=mesh.pipeline - 1))


class StepEncoder:
    """Makes the record of each step.  ``groups``: groups of layers, whose page tables stand side by side."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._last: StepBatch | None = None
        self._position = -1  # of its first token

    def record(self, batch: StepBatch) -> bytes:
        """The record of the next step.  A batch that was passed before has been moved on in place, by one token."""
        last, position = self._last, int(batch.positions_T[0])
        self._last, before, self._position = batch, self._position, position
        if batch is last and position == before + 1:
            return self._advance(batch)
        if any(given is not None for given in (batch.turns_T3, batch.given, batch.states_SW, batch.adapters_S)):
            raise GroupError("a step has what ranks cannot be told")
        parts = (batch.tokens_T, batch.positions_T, batch.starts_S1, batch.table_SP, batch.sample_rows_R)
        sizes = len(batch.tokens_T), *batch.table_SP.shape, len(batch.sample_rows_R)
        return b"".join((_BEGIN_HEAD.pack(_BEGIN, *sizes), *(_int_bytes(part) for part in parts)))

    def _advance(self, batch: StepBatch) -> bytes:
        positions_T, columns = batch.positions_T, batch.table_SP.shape[1]
        (rows,) = np.nonzero(positions_T % PAGE_TOKENS == 0)  # each begins a block
        own = columns // self._groups
        at = (rows * columns + positions_T[rows] // PAGE_TOKENS)[:, None] + own * np.arange(self._groups)
        cells = np.stack((at.ravel(), batch.table_SP.ravel()[at.ravel()]), axis=1)
        head = _ADVANCE_HEAD.pack(_ADVANCE, len(positions_T), len(cells))
        return b"".join((head, _int_bytes(batch.tokens_T), _int_bytes(cells)))


class StepDecoder:
    """Makes the batch of each record.  A batch that goes on is the same object as before, moved on in place."""

    def __init__(self) -> None:
        self._batch: StepBatch | None = None

    def batch(self, record: bytes) -> StepBatch:
        """The step's batch.  Raises GroupError for a record that does not follow those before it."""
        kind = int.from_bytes(record[:4], "little")
        if kind == _BEGIN:
            self._batch = self._begun(record)
        elif kind == _ADVANCE and self._batch is not None:
            self._advance(self._batch, record)
        else:
            raise GroupError(f"a record of a step of kind {kind}")
        assert self._batch is not None
        return self._batch

    def _begun(self, record: bytes) -> StepBatch:
        _, tokens, sequences, columns, rows = _BEGIN_HEAD.unpack_from(record)
        sizes = tokens, tokens, sequences + 1, sequences * columns, rows
        values = _ints(record, _BEGIN_HEAD.size, sum(sizes)).copy()
        tokens_T, positions_T, starts_S1, table, rows_R = np.split(values, np.cumsum(sizes[:-1]))
        return StepBatch(tokens_T, positions_T, starts_S1, table.reshape(sequences, columns), rows_R)

    def _advance(self, batch: StepBatch, record: bytes) -> None:
        _, tokens, cells = _ADVANCE_HEAD.unpack_from(record)
        if tokens != len(batch.tokens_T):
            raise GroupError(f"a record of {tokens} tokens goes on from a step of {len(batch.tokens_T)}")
        values = _ints(record, _ADVANCE_HEAD.size, tokens + 2 * cells)
        batch.tokens_T[:] = values[:tokens]
        batch.positions_T[:] += 1
        at, pages = values[tokens:].reshape(cells, 2).T
        batch.table_SP.reshape(-1)[at] = pages


class StepChannel(Protocol):
    """Carries records from the leader to one follower after another (``parallel.collectives.shm``)."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send_message(self, message: bytes, to: int) -> None: ...

    def recv_message(self, source: int) -> bytes: ...


def _nothing() -> None:
    """What follows a step."""


class LeaderProgram:
    """The leader's ``StepProgram``: followers have the record before it computes."""

    def __init__(
        self, program: StepProgram, channel: StepChannel, groups: int, on_step: Callable[[], None] = _nothing
    ) -> None:
        """``groups``: of layers.  ``on_step``: called after each step."""
        self._program = program
        self._on_step = on_step
        self._channel = channel
        self._encoder = StepEncoder(groups)
        self._followers = [rank for rank in range(channel.size) if rank != channel.rank]

    def run(
        self,
        batch: StepBatch,
        scored: int,
        rows: list[SampleRow],
        picks: GumbelRows,
        ready: Callable[[], None] | None = None,
    ) -> list[Sampled]:
        record = self._encoder.record(batch)
        for rank in self._followers:
            self._channel.send_message(record, rank)
        sampled = self._program.run(batch, scored, rows, picks, ready)
        self._on_step()
        return sampled

    def hidden(self) -> Array:
        return self._program.hidden()


def follow(program: StepProgram, channel: StepChannel, leader: int, on_step: Callable[[], None]) -> None:
    """Compute the leader's steps until this process is ended.  ``on_step``: called after each of them."""
    decoder, none = StepDecoder(), GumbelRows.empty(0)
    while True:
        batch = decoder.batch(channel.recv_message(leader))
        program.run(batch, len(batch.sample_rows_R), [], none)
        on_step()


def _int_bytes(array: NDArray[np.int32] | NDArray[np.int64]) -> bytes:
    return np.ascontiguousarray(array, "<i4").tobytes()


def _ints(record: bytes, begin: int, count: int) -> Ints:
    if len(record) != begin + 4 * count:
        raise GroupError(f"a record of {len(record)} bytes, {begin + 4 * count} were expected")
    return np.frombuffer(record, "<i4", count, begin)
