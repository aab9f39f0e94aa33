"""One worker of several ranks: the leader plans and says what is computed, all ranks compute it.

::

    leader     plan -> StepBatch --record--> each follower          program.run -> tokens are drawn
    follower             record -> the same StepBatch               program.compute -> its part of them

Page numbers are the leader's and the same on all ranks.  No follower decides anything: whatever a step depends on is in
its record.  The leader is the first rank of the last stage, where the logits come together.

Where stages compute several steps at once, records come ahead of the leader's own part of them.  A record is
little-endian, of words of 4 bytes::

    begin    1, place, tokens T, sequences S, columns P, rows R, scored, picks F
             tokens [T], positions [T], starts [S + 1], table [S, P], rows [R]
             of the picks: seeds [F] (8 bytes each), positions [F], choices [F], temperatures [F] (fp32)
    advance  2, place, tokens T, cells C                     every sequence has one token, one further than before
             tokens [T], then of each new page: index in the table and page

Both sides remember the last ``PLACES`` steps that began: one that advances is named by its place.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.engine.models.interface import Model
from penstock.errors import GroupError
from penstock.kernels.host_ops import AdvancingPages
from penstock.kernels.operands import Array, StepBatch
from penstock.kernels.ops import Ops, SharedProgram, StepProgram
from penstock.kernels.sampling import GumbelRows, Sampled, SampleRow
from penstock.types import PAGE_TOKENS

_BEGIN, _ADVANCE = 1, 2
_BEGIN_HEAD = struct.Struct("<8I")
_ADVANCE_HEAD = struct.Struct("<4I")

PLACES = 16
"""Steps that are remembered; more than are ever computed at once."""

SCORED_ROWS = 64
"""Prompt positions scored at once: bounds the logits held in memory to this many rows of the vocabulary."""


def scored_pieces(scored: int) -> Iterator[NDArray[np.int32]]:
    """The output rows that are scored, a piece at a time: the same pieces on all ranks."""
    for first in range(0, scored, SCORED_ROWS):
        yield np.arange(first, min(first + SCORED_ROWS, scored), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class SharedStep:
    """What every rank knows of a step: its batch, how many rows are only scored, and how the last rows are picked."""

    batch: StepBatch
    scored: int
    picks: GumbelRows


class StepEncoder:
    """Makes the record of each step.  ``groups``: groups of layers, whose page tables stand side by side."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._known: list[tuple[SharedStep, AdvancingPages] | None] = [None] * PLACES
        self._places: dict[int, int] = {}  # of batches that are known, by identity
        self._next = 0  # the place that the next step to begin takes

    def record(self, step: SharedStep) -> bytes:
        """The record of the next step.  Arrays that were passed before have been moved on in place, by one token."""
        place = self._places.get(id(step.batch))
        if place is not None:
            known = self._known[place]
            cells = known[1].begun() if known is not None and known[0].picks is step.picks else None
            if cells is not None:
                tokens = step.batch.tokens_T.tobytes()
                return _ADVANCE_HEAD.pack(_ADVANCE, place, len(tokens) // 4, len(cells) // 8) + tokens + cells
            self._forget(place)
        place, self._next = self._next, (self._next + 1) % PLACES
        self._forget(place)
        batch = step.batch
        if len(batch.positions_T) == len(batch.table_SP):  # a token each, so it may go on
            pages = AdvancingPages(batch.positions_T, batch.table_SP, self._groups, PAGE_TOKENS)
            self._known[place] = step, pages
            self._places[id(batch)] = place
        return self._begin(place, step)

    def _forget(self, place: int) -> None:
        known, self._known[place] = self._known[place], None
        if known is not None:
            del self._places[id(known[0].batch)]

    def _begin(self, place: int, step: SharedStep) -> bytes:
        batch, picks = step.batch, step.picks
        if any(given is not None for given in (batch.turns_T3, batch.given, batch.states_SW, batch.adapters_S)):
            raise GroupError("a step has what ranks cannot be told")
        sizes = len(batch.tokens_T), *batch.table_SP.shape, len(batch.sample_rows_R), step.scored, len(picks.tokens_F)
        parts = (batch.tokens_T, batch.positions_T, batch.starts_S1, batch.table_SP, batch.sample_rows_R)
        drawn = (
            (picks.seeds_F, "<u8"),
            (picks.positions_F, "<u4"),
            (picks.choices_F, "<u4"),
            (picks.temperatures_F, "<f4"),
        )
        head = _BEGIN_HEAD.pack(_BEGIN, place, *sizes)
        return b"".join((head, *(_bytes(part, "<i4") for part in parts), *(_bytes(*part) for part in drawn)))


class StepDecoder:
    """Makes the step of each record.  One that goes on is the same object as before, moved on in place."""

    def __init__(self) -> None:
        self._known: list[SharedStep | None] = [None] * PLACES

    def step(self, record: bytes) -> SharedStep:
        """The step.  Raises GroupError for a record that does not follow those before it."""
        kind, place = int.from_bytes(record[:4], "little"), int.from_bytes(record[4:8], "little")
        step = self._known[place] if place < PLACES else None
        if kind == _BEGIN and place < PLACES and len(record) >= _BEGIN_HEAD.size:
            step = self._known[place] = _begun(record)
        elif kind == _ADVANCE and step is not None and len(record) >= _ADVANCE_HEAD.size:
            _advance(step, record)
        else:
            raise GroupError(f"a record of a step of kind {kind}, place {place}")
        return step


def _begun(record: bytes) -> SharedStep:
    _, _, tokens, sequences, columns, rows, scored, picks = _BEGIN_HEAD.unpack_from(record)
    sizes = np.cumsum((tokens, tokens, sequences + 1, sequences * columns, rows, 2 * picks, picks, picks, picks))
    words = _words(record, _BEGIN_HEAD.size, int(sizes[-1]))
    tokens_T, positions_T, starts_S1, table, rows_R, seeds, at, choices, temperatures = np.split(words, sizes[:-1])
    batch = StepBatch(tokens_T, positions_T, starts_S1, table.reshape(sequences, columns), rows_R)
    drawn = GumbelRows(
        np.frombuffer(seeds.tobytes(), "<u8"),  # aligned
        at.view("<u4"),
        choices.view("<u4"),
        temperatures.view("<f4"),
        np.zeros(picks, np.int32),
    )
    return SharedStep(batch, scored, drawn)


def _advance(step: SharedStep, record: bytes) -> None:
    _, _, tokens, cells = _ADVANCE_HEAD.unpack_from(record)
    batch, positions_F = step.batch, step.picks.positions_F
    if tokens != len(batch.tokens_T):
        raise GroupError(f"a record of {tokens} tokens goes on from a step of {len(batch.tokens_T)}")
    words = _words(record, _ADVANCE_HEAD.size, tokens + 2 * cells)
    at, pages = words[tokens:].reshape(cells, 2).T
    if cells and not 0 <= at.min() <= at.max() < batch.table_SP.size:
        raise GroupError("a new page is outside of the table")
    batch.tokens_T[:] = words[:tokens]
    batch.positions_T[:] += 1
    batch.table_SP.reshape(-1)[at] = pages
    positions_F += 1


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
        self._launched: list[StepBatch] = []

    def launch(self, batch: StepBatch, scored: int, picks: GumbelRows) -> None:
        """Let the followers begin a step whose arrays stay as they are until it is ``run``.  Steps that are launched
        are run in the same order."""
        record = self._encoder.record(SharedStep(batch, scored, picks))
        for rank in self._followers:
            self._channel.send_message(record, rank)
        self._launched.append(batch)

    def run(
        self,
        batch: StepBatch,
        scored: int,
        rows: list[SampleRow],
        picks: GumbelRows,
        ready: Callable[[], None] | None = None,
    ) -> list[Sampled]:
        if not self._launched:
            self.launch(batch, scored, picks)
        if self._launched.pop(0) is not batch:
            raise GroupError("steps are run in another order than they were launched in")
        sampled = self._program.run(batch, scored, rows, picks, ready)
        self._on_step()
        return sampled

    def hidden(self) -> Array:
        return self._program.hidden()


@dataclass(frozen=True, slots=True)
class Follower:
    """A rank that computes the leader's steps.  ``scores``: it has a part of the head, as the leader."""

    model: Model
    ops: Ops
    program: SharedProgram
    scores: bool

    def run(self, channel: StepChannel, leader: int, on_step: Callable[[], None]) -> None:
        """Until this process is ended.  ``on_step``: called after each step."""
        decoder = StepDecoder()
        while True:
            step = decoder.step(channel.recv_message(leader))
            self.program.compute(step.batch, step.scored, step.picks)
            if self.scores:
                for rows_R in scored_pieces(step.scored):
                    self.model.logits(self.ops, self.ops.rows(self.program.hidden(), rows_R))
            on_step()


def _bytes(array: NDArray[Any], dtype: str) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


def _words(record: bytes, begin: int, count: int) -> NDArray[np.int32]:
    if len(record) != begin + 4 * count:
        raise GroupError(f"a record of {len(record)} bytes, {begin + 4 * count} were expected")
    return np.frombuffer(record, "<i4", count, begin).copy()
