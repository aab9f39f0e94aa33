"""A model over the ranks of a mesh, all of them in this process, next to the same model undivided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from penstock.config.mesh import Mesh
from penstock.engine.models.interface import Model
from penstock.engine.models.registry import build_model
from penstock.engine.runner import sharded_model as engine
from penstock.kernels.compressed import AnyCompressed
from penstock.kernels.native.backend import NativeOps
from penstock.kernels.operands import Array, PageShare, StepBatch
from penstock.kernels.ops import Ops, SharedProgram, StepProgram
from penstock.kernels.reference.attention import ReferenceKv
from penstock.kernels.sampling import GumbelRows, SampleRow
from penstock.parallel.collectives.interface import Collectives
from penstock.parallel.collectives.local import LocalWorld
from penstock.parallel.shard import ModelShard, shard_model
from penstock.types import PAGE_TOKENS
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.inspect import inspect_model
from penstock.weights.load import LoadedModel, load_model


class CompressedOps(NativeOps):
    """Keeps weights compressed on any processor, as families with the instructions for it do."""

    def _keeps_compressed(self, parts: Sequence[AnyCompressed], ends: tuple[int, ...]) -> bool:
        whole = all(part.n % 16 == 0 for part in parts[:-1]) and all(end % 4 == 0 for end in ends)
        return whole and self.compute_dtype == "bf16"


Chunks = Sequence[Sequence[tuple[int, int]]]

CHUNKS: Chunks = (
    ((0, 64),),
    ((0, 37), (1, 40)),
    ((1, 1), (0, 60)),
    ((0, 1), (1, 1), (2, 5)),
    ((2, 1), (1, 1), (0, 1)),
)
"""Steps of some sequences: (sequence, tokens).  Prompts in chunks, alone and in company, then tokens one by one."""

FEW_CHUNKS: Chunks = (((0, 18),), ((0, 2), (1, 3)), ((1, 1), (0, 1)))
"""The same for kernels in an interpreter: a page and a bit."""

Rows = tuple[bytes, bytes] | None
"""Hidden state and logits of a step's output rows."""


def batches(spec: ModelSpec, seed: int = 0, chunks: Chunks = CHUNKS) -> Iterator[StepBatch]:
    """The steps of ``chunks`` with random tokens and pages.  The first one has no output rows."""
    rng = np.random.default_rng(seed)
    table = page_table(spec, rng, chunks)
    known = [0] * len(table)
    for step in chunks:
        positions = [np.arange(known[sequence], known[sequence] + count) for sequence, count in step]
        starts_S1 = np.cumsum([0, *(count for _, count in step)]).astype(np.int32)
        yield StepBatch(
            rng.integers(0, spec.vocab, starts_S1[-1]).astype(np.int32),
            np.concatenate(positions).astype(np.int32),
            starts_S1,
            np.ascontiguousarray(table[[sequence for sequence, _ in step]]),
            starts_S1[1:] - 1 if len(step) > 1 else np.empty(0, np.int32),
        )
        for sequence, count in step:
            known[sequence] += count


def page_table(spec: ModelSpec, rng: np.random.Generator, chunks: Chunks) -> NDArray[np.int32]:
    """Random pages of each sequence, those of one group of layers after those of another."""
    sequences = 1 + max(sequence for step in chunks for sequence, _ in step)
    blocks = page_count(spec, chunks) // sequences
    return rng.permutation(page_count(spec, chunks)).astype(np.int32).reshape(sequences, blocks)


def page_count(spec: ModelSpec, chunks: Chunks) -> int:
    """Pages for all sequences of ``chunks``, of every group of layers."""
    tokens: dict[int, int] = {}
    for step in chunks:
        for sequence, count in step:
            tokens[sequence] = tokens.get(sequence, 0) + count
    return len(tokens) * spec.kv.layer_groups * -(-max(tokens.values()) // PAGE_TOKENS)


class Computes(Protocol):
    """A model that computes steps."""

    spec: ModelSpec
    chunks: Chunks

    @property
    def pages(self) -> memoryview: ...

    def step(self, batch: StepBatch) -> Rows: ...


class WholeModel:
    """A model as a worker without a plan has it."""

    def __init__(self, folder: Path, ops: Ops, chunks: Chunks = CHUNKS) -> None:
        self.spec = inspect_model(folder)
        self.chunks = chunks
        self.loaded = load_model(folder, self.spec, ops)
        self._ops = ops
        self._model = build_model(self.loaded, ops, self.spec.max_positions)
        count = page_count(self.spec, chunks)
        self.pages = memoryview(bytearray(count * ops.page_bytes(self.spec.kv)))
        self._kv = ops.new_kv(self.spec.kv, pages=count, memory=self.pages)

    def step(self, batch: StepBatch) -> Rows:
        return rows_of(self._model, self._ops, batch, self._kv)

    def picked(self, batch: StepBatch, picks: GumbelRows) -> list[int]:
        """The tokens of a step's rows, the last of which are picked."""
        return sampled_tokens(self._ops.record(self._model, self._kv), batch, picks)


@dataclass(frozen=True)
class Rank:
    """What a worker's process would have."""

    shard: ModelShard
    loaded: LoadedModel
    model: Model
    kv: Array
    program: SharedProgram

    def step(self, ops: Ops, batch: StepBatch) -> Rows:
        """What it has of a step; None before the last stage, and without output rows."""
        wanted = batch.sample_rows_R
        self.program.compute(batch, len(wanted), GumbelRows.empty(0))
        if not len(wanted) or not self.shard.is_last:
            return None
        hidden_RD = ops.hidden(ops.to_numpy(self.program.hidden()))
        return as_bytes(ops.to_numpy(hidden_RD)), as_bytes(ops.to_numpy(self.model.logits(ops, hidden_RD)))

    def picked(self, ops: Ops, batch: StepBatch, picks: GumbelRows) -> list[int] | None:
        """The tokens of the last rows of a step, which all ranks of the last stage find together."""
        if not self.shard.is_last or self.shard.mesh.place(self.shard.rank).tensor:
            self.program.compute(batch, 0, picks)
            return None
        return sampled_tokens(self.program, batch, picks)


def rank_of(
    folder: Path,
    ops: Ops,
    shard: ModelShard,
    groups: tuple[Collectives, Collectives],
    pages: memoryview | None,
    chunks: Chunks = CHUNKS,
) -> Rank:
    """One rank, connected to the others of its stage and to those of other stages.  All have the same ``pages``; None:
    each has its own, as on GPUs."""
    tensor, stages = groups
    shape = shard.spec.kv.unshared if pages is None else shard.spec.kv
    kv = ops.new_kv(shape, pages=page_count(shard.whole, chunks), memory=pages)
    loaded = load_model(folder, shard.whole, ops, select=shard.layout)
    model = build_model(replace(loaded, spec=shard.spec), ops, shard.whole.max_positions)
    model = engine.ShardedModel(model, shard, tensor)
    program = engine.stage_program(cast(SharedProgram, ops.record(model, kv)), ops, stages, shard)
    return Rank(shard, loaded, model, kv, program)


class ShardedModel:
    """The same model over a mesh.

    ``unshared``: each rank has pages of its own.  ``connect``: makes more of a rank's connection to those of its stage.
    """

    def __init__(
        self,
        folder: Path,
        ops: Ops,
        mesh: Mesh,
        *,
        unshared: bool = False,
        chunks: Chunks = CHUNKS,
        connect: Callable[[Collectives, int], Collectives] = lambda group, rank: group,
    ) -> None:
        self.spec = inspect_model(folder)
        self.chunks = chunks
        self._ops = ops
        self._world = LocalWorld(mesh.ranks)
        self._count = page_count(self.spec, chunks)
        self._pages = memoryview(bytearray(self._count * ops.page_bytes(self.spec.kv)))
        self._unshared = unshared
        self._connect = connect
        self.ranks = [self._rank(folder, mesh, rank) for rank in range(mesh.ranks)]

    @property
    def pages(self) -> memoryview:
        """Pages of the whole model: put together, where each rank has its own."""
        if self._unshared:
            whole = self._ops.new_kv(self.spec.kv, pages=self._count, memory=self._pages)
            for rank in self.ranks:
                put_together(whole, rank, page_table(self.spec, np.random.default_rng(0), self.chunks))
        return self._pages

    def _rank(self, folder: Path, mesh: Mesh, rank: int) -> Rank:
        tensor = self._connect(self._world.group(rank, mesh.tensor_group(rank)), rank)
        groups = tensor, self._world.group(rank, mesh.pipeline_group(rank))
        pages = None if self._unshared else self._pages
        return rank_of(folder, self._ops, shard_model(self.spec, mesh, rank), groups, pages, self.chunks)

    def step(self, batch: StepBatch) -> Rows:
        """What the ranks of the last stage have, all of them the same."""
        rows = self._world.run([lambda rank=rank: rank.step(self._ops, batch) for rank in self.ranks])
        ends = {own for own, rank in zip(rows, self.ranks, strict=True) if rank.shard.is_last}
        (end,) = ends
        return end

    def picked(self, batch: StepBatch, picks: GumbelRows) -> list[list[int] | None]:
        """The tokens that each rank has of a step's rows, the last of which are picked."""
        return self._world.run([lambda rank=rank: rank.picked(self._ops, batch, picks) for rank in self.ranks])


def put_together(whole: ReferenceKv, rank: Rank, table: NDArray[np.int32]) -> None:
    """Copy the layers and heads of one rank to their places in pages of the whole model."""
    share = rank.shard.spec.kv.share
    if share is None:  # a plan of one rank
        share = PageShare(whole.shape, rank.shard.layers, tuple(range(whole.shape.kv_heads)))
    for layer, (own_group, own) in zip(share.layers, rank.kv.shape.places, strict=True):
        group, place = whole.shape.places[layer]
        assert group == own_group
        columns = np.split(table, whole.shape.layer_groups, axis=1)[group]
        for page in columns.ravel().tolist():
            for slot, head in enumerate(share.heads):
                whole.keys[page, place, head] = rank.kv.keys[page, own, slot]
                whole.values[page, place, head] = rank.kv.values[page, own, slot]


def sampled_tokens(program: StepProgram, batch: StepBatch, picks: GumbelRows) -> list[int]:
    """The tokens of a step's rows, the last of which are picked."""
    row = SampleRow(seed=5, position=9, choice=0, temperature=0.7, logprobs=3)
    sampled = program.run(batch, 0, [row] * (len(batch.sample_rows_R) - len(picks.tokens_F)), picks)
    return [*(one.token for one in sampled), *picks.tokens_F.tolist()]


def rows_of(model: Model, ops: Ops, batch: StepBatch, kv: Array) -> Rows:
    """One step of a model, or of one rank of it."""
    hidden_RD = model.forward(ops, batch, kv)
    if hidden_RD is None:
        return None
    return as_bytes(ops.to_numpy(hidden_RD)), as_bytes(ops.to_numpy(model.logits(ops, hidden_RD)))


def as_bytes(array: NDArray[np.float32]) -> bytes:
    assert np.isfinite(array).all()
    assert len(np.unique(array)) > array.size / 2  # a model that computes nothing would prove nothing
    return array.tobytes()


def answers(model: Computes) -> tuple[list[Rows], bytes]:
    """All steps, and the pages that they leave."""
    return [model.step(batch) for batch in batches(model.spec, chunks=model.chunks)], model.pages.tobytes()
