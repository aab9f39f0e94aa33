"""Products of few rows whose segments ranks divide, joined out of the memory of all: the join is the all-reduce.

::

    rank 0     product --> parts, one half | join: say so to all, wait for all, read all ranks' parts --> out
    rank 1     product --> parts, one half | join: the same                                           --> out

Each rank has memory that the others read and write by addresses in a table.  Where the addresses come from is none of
the kernels' business: memory of one process, or a peer's that is mapped (CUDA IPC).  A product leaves its parts there
and is joined by a second kernel, as on one device, so a captured step has no launch more than without ranks.

Words say how far a rank is.  Program p of a join counts its turns, and writes the number into every rank's memory, then
waits until all ranks have written theirs to its own.  A product's kernel is complete when the join behind it begins, so
a rank that has begun turn n has all its parts of turn n, and has read those of turn n - 1, whose half it leaves alone.
Turns decide which half is written, so a captured step may have any number of joins.  Whoever waits ends when the group
is over; what it computes then is of no use.

The additions are those of ``matmul``: parts are leaves, or whole nodes, of the one tree.  This module imports torch and
triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.operands import TREE_SEGMENTS, PackedLinear
from penstock.kernels.triton.linear import WeightForm
from penstock.kernels.triton.matmul import BLOCK, FEW_ROWS, Halves, Operand, joined_block, launch_product
from penstock.kernels.triton.numerics import UNFUSED, TritonContext

JOIN_PROGRAMS = 64
"""Of every join: as many words has a rank for each other one."""

APART_ROWS = 8
"""Rows up to which peers read a part for each segment.  With more, one program joins the rank's own segments first, and
peers read one part a rank: fewer programs, but less between devices."""

_WORD = 8


@triton.jit
def words_of(words_R, rank):
    """The words [ranks + 1, programs] in the memory of a rank: turns of every rank, then whether the group is over."""
    return tl.load(words_R + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def await_turn(word, over, turn):
    """Until a rank has begun this turn, or the group is over.  One thread reads both words, so that all threads of the
    program leave together."""
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    ended = tl.atomic_add(over, 0, sem="relaxed", scope="sys")
    while (seen < turn) & (ended == 0):
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        ended = tl.atomic_add(over, 0, sem="relaxed", scope="sys")


@triton.jit(do_not_specialize=["t", "rank"])
def join_ranks_kernel(
    parts_R, words_R, out, rank, out_stride, half, t, n, RANKS: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr, POSTS: tl.constexpr, JOINS: tl.constexpr,
):  # fmt: skip
    """out [T, N] = the tree over EACH parts [T, N] of each of RANKS ranks; or, ADD, out += that.

    ``parts_R``, ``words_R``: addresses.  POSTS: begins the turn, for all ranks to see; JOINS: waits for them and joins.
    Grid: as many programs on all ranks, in all turns.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    own = words_of(words_R, rank)
    turn = tl.load(own + rank * programs + program)
    if POSTS:
        turn += 1
        for peer in tl.static_range(RANKS):
            there = words_of(words_R, peer) + rank * programs + program
            tl.atomic_xchg(there, turn, sem="release", scope="sys")
    if JOINS:
        for peer in tl.static_range(RANKS):
            await_turn(own + peer * programs + program, own + RANKS * programs, turn)
        offset = (turn - 1) % 2 * half
        for block in range(program, tl.cdiv(t * n, BLOCK), programs):
            joined_block(parts_R, offset, out, out_stride, block, t, n, RANKS * EACH, EACH, BLOCK, ADD)


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """What one rank lets the others read and write: words, then two halves of fp32 parts.  Zeroed: no turn has begun.

    One piece of memory, so that a peer maps it with one handle.
    """

    memory: Tensor  # int64
    ranks: int
    programs: int
    half: int  # numbers of a half

    @classmethod
    def allocate(cls, form: TritonContext, ranks: int, *, half: int, programs: int = JOIN_PROGRAMS) -> PeerMemory:
        """For one of ``ranks`` ranks, which have the same sizes.  ``half``: numbers of the largest product's parts."""
        words = (ranks + 1) * programs + half  # two halves of 4 bytes each
        return cls(torch.zeros(words, dtype=torch.int64, device=form.device), ranks, programs, half)

    @property
    def address(self) -> int:
        """Where it begins, for this process."""
        return self.memory.data_ptr()

    @property
    def words(self) -> Tensor:
        """int64 [ranks + 1, programs]."""
        return self.memory[: (self.ranks + 1) * self.programs].view(self.ranks + 1, self.programs)

    @property
    def parts(self) -> Tensor:
        """fp32 [2, half]."""
        return self.memory[(self.ranks + 1) * self.programs :].view(torch.float32).view(2, self.half)

    def end(self) -> None:
        """The group is over: whoever waits here does so no longer."""
        self.words[self.ranks, 0] = 1

    def table(self, rank: int, addresses: Sequence[int], between: Callable[[], None] | None = None) -> PeerTable:
        """A rank's table, of the memory of all ranks as this process has it, by rank."""
        first = torch.tensor(addresses, dtype=torch.int64, device=self.memory.device)
        return PeerTable(self, rank, first + _WORD * (self.ranks + 1) * self.programs, first, between)


@dataclass(frozen=True, slots=True)
class PeerTable:
    """Where the parts and the words of all ranks are: ``peers`` of a rank's ``Collectives``, if it has one.

    ``between``: where ranks do not run at the same time (tests), called when this rank's turn has begun; returns when
    that of all ranks has.
    """

    own: PeerMemory
    rank: int
    parts_R: Tensor  # int64
    words_R: Tensor  # int64
    between: Callable[[], None] | None

    def operand(self, weight: PackedLinear, rows: int) -> Operand | None:
        """What multiplies a rank's columns of K; None for what does not fit here, the same on all ranks."""
        form: WeightForm = weight.data
        whole = len(form.operands) == 1 and len(weight.segments) * self.own.ranks == TREE_SEGMENTS
        fits = 0 < rows <= FEW_ROWS and self._parts_of(len(weight.segments), rows) * rows * weight.n <= self.own.half
        return form.operands[0] if weight.partial and whole and fits else None

    def multiply(self, form: TritonContext, x_TK: Tensor, operand: Operand, out_TN: Tensor, *, add: bool) -> None:
        """out [T, N] becomes the sum of all ranks' x W^T, or grows by it.  ``operand``: as found for these rows."""
        own, (t, n) = self.own, (len(x_TK), operand.n)
        each = self._parts_of(operand.segments, t)
        parts_STN = own.parts[0, : each * t * n].view(each, t, n)
        halves = Halves(own.words[self.rank, :1], own.half)
        launch_product(form, x_TK, operand, parts_STN, apart=each > 1, halves=halves)
        for posts, joins in ((True, True),) if self.between is None else ((True, False), (False, True)):
            join_ranks_kernel[(own.programs,)](
                self.parts_R, self.words_R, out_TN, self.rank, out_TN.stride(0), own.half, t, n, RANKS=own.ranks,
                EACH=each, BLOCK=BLOCK, ADD=add, POSTS=posts, JOINS=joins, **UNFUSED,
            )  # fmt: skip
            if not joins:
                self._meet()

    def _parts_of(self, segments: int, rows: int) -> int:
        """How many parts a rank has of a product."""
        return segments if rows <= APART_ROWS else 1

    def _meet(self) -> None:
        assert self.between is not None
        self.between()


def peers_of(group: object) -> PeerTable | None:
    """The table of ranks that read each other's memory, if they do."""
    found = getattr(group, "peers", None)
    return found if isinstance(found, PeerTable) else None
