"""Decode steps of a model over ranks beside one process: in turns, step by step, in one run.

    python -m bench.ranks                               1 B shape, 16 layers, random weights: two threads, one, tp2, pp2
    python -m bench.ranks --model DIR --rows 1,8 --steps 300 --json FILE

"Undisturbed" are steps in which no thread was taken off its processor against its will; the other figures are of all
steps.  CPU seconds are those of all threads of all ranks.  Each rank and each thread has a processor of its own.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from bench.peers.checkpoint import write_checkpoint
from bench.peers.places import SHAPES

from penstock.config.mesh import Mesh, parse_mesh
from penstock.engine.models.registry import build_model
from penstock.engine.runner.rank_group import Follower, LeaderProgram, leader_of
from penstock.engine.runner.sharded_model import ShardedModel, stage_program
from penstock.kernels.operands import StepBatch
from penstock.kernels.ops import Ops, SharedProgram, StepProgram
from penstock.kernels.sampling import GumbelRows
from penstock.kernels.select import make_ops
from penstock.parallel.collectives.shm import ShmMesh
from penstock.parallel.shard import ModelShard, shard_model
from penstock.types import PAGE_TOKENS
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.inspect import inspect_model
from penstock.weights.load import LoadedModel, load_model

CONTEXT = 256
BLOCKS = 64
"""Pages of a sequence."""

ASK = struct.Struct("<HHH")
"""What a leader is asked for: rows, tokens of a chunk, steps in flight."""

SYSTEMS = ("2 threads", "1 thread", "tp2", "pp2")


@dataclass(frozen=True)
class Rank:
    """What the process of one rank needs, loaded before it is forked."""

    shard: ModelShard
    loaded: LoadedModel
    threads: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class StepTime:
    """What one step took.  ``cpu``: seconds of each rank.  ``switches``: times that one was taken off its processor."""

    seconds: float
    cpu: tuple[float, ...]
    switches: int


class System:
    """A model over ranks, or one process: forked, and asked for one step at a time."""

    def __init__(self, name: str, ranks: list[Rank], mesh: Mesh, most_rows: int) -> None:
        self.name = name
        self._mesh = mesh
        self._ranks = ranks
        self._most_rows = most_rows
        self._group = ShmMesh(mesh)
        self._counts = np.frombuffer(mmap.mmap(-1, mesh.ranks * 16), np.int64).reshape(mesh.ranks, 2)
        self._pages = mmap.mmap(-1, most_rows * BLOCKS * ranks[0].shard.whole.kv.page_bytes("bf16"))
        self._pids: list[int] = []

    def beside(self, cpu: int) -> System:
        """The same once more, on another processor: a system with one thread."""
        (rank,) = self._ranks
        return System(self.name, [replace(rank, cpus=(cpu,))], self._mesh, self._most_rows)

    def start(self) -> None:
        """Fork all ranks."""
        ask, self._ask = os.pipe()
        self._answer, answer = os.pipe()
        leader = leader_of(self._mesh)
        for rank in range(self._mesh.ranks):
            pid = os.fork()
            if not pid:
                try:
                    os.sched_setaffinity(0, self._ranks[rank].cpus)
                    self._lead(ask, answer) if rank == leader else self._follow(rank, leader)
                finally:
                    os._exit(1)
            self._pids.append(pid)

    def step(self, rows: int, chunk: int = 0, flights: int = 0) -> StepTime:
        """One step, of ``rows`` answers or of ``chunk`` tokens of a prompt; with ``flights`` one of so many that follow
        each other through the stages."""
        self.ask(rows, chunk, flights)
        return self.answer()

    def ask(self, rows: int, chunk: int = 0, flights: int = 0) -> None:
        """Begin it."""
        self._before = self._counts.copy()
        os.write(self._ask, ASK.pack(rows, chunk, flights))

    def answer(self) -> StepTime:
        """Wait for it."""
        seconds = float(np.frombuffer(os.read(self._answer, 8), np.float64)[0])
        cpu, switches = (self._counts - self._before).T
        return StepTime(seconds, tuple((cpu / 1e9).tolist()), int(switches.sum()))

    def stop(self) -> None:
        """End all ranks."""
        for pid in self._pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)

    def _program(self, rank: int) -> tuple[ShardedModel, Ops, SharedProgram]:
        own = self._ranks[rank]
        ops = make_ops(compute_dtype="bf16", threads=own.threads)
        model = build_model(replace(own.loaded, spec=own.shard.spec), ops, own.shard.whole.max_positions)
        pages = len(self._pages) // own.shard.whole.kv.page_bytes("bf16")
        kv = ops.new_kv(own.shard.spec.kv, pages=pages, memory=memoryview(self._pages))
        sharded = ShardedModel(model, own.shard, self._group.tensor(rank))
        program = cast(SharedProgram, ops.record(sharded, kv))
        return sharded, ops, stage_program(program, ops, self._group.pipeline(rank), own.shard)

    def _follow(self, rank: int, leader: int) -> None:
        model, ops, program = self._program(rank)
        Follower(model, ops, program, scores=False).run(self._group.everybody(rank), leader, self._count(rank))

    def _lead(self, ask: int, answer: int) -> None:
        rank = leader_of(self._mesh)
        _, _, own = self._program(rank)
        program: StepProgram = own
        if self._mesh.ranks > 1:
            program = LeaderProgram(own, self._group.everybody(rank), self._ranks[rank].shard.whole.kv.layer_groups)
        count, batches = self._count(rank), dict[tuple[int, int, int], tuple[StepBatch, GumbelRows]]()
        spec = self._ranks[rank].shard.whole
        while asked := os.read(ask, ASK.size):
            rows, chunk, flights = ASK.unpack(asked)
            batch_of = [
                batches.setdefault((rows, chunk, number), first_chunk(chunk, spec) if chunk else first_step(rows, spec))
                for number in range(self._mesh.pipeline if flights else 1)
            ]
            for batch, picks in batch_of:
                go_on(batch, picks, chunk)
            begun = time.perf_counter()
            if flights:
                seconds = self._in_flight(cast(LeaderProgram, program), batch_of, chunk, flights)
            else:
                program.run(batch_of[0][0], 0, [], batch_of[0][1])
                seconds = time.perf_counter() - begun
            count()
            os.write(answer, np.float64(seconds).tobytes())

    def _in_flight(
        self, program: LeaderProgram, own: list[tuple[StepBatch, GumbelRows]], chunk: int, flights: int
    ) -> float:
        """Seconds from one step's end to the next one's, of ``flights`` that follow each other."""
        for batch, picks in own:
            program.launch(batch, 0, picks)
        ends = []
        for flight in range(flights):
            batch, picks = own[flight % len(own)]
            program.run(batch, 0, [], picks)
            ends.append(time.perf_counter())
            if flight + len(own) < flights:
                go_on(batch, picks, chunk)
                program.launch(batch, 0, picks)
        return (ends[-1] - ends[0]) / (flights - 1)

    def _count(self, rank: int) -> Callable[[], None]:
        def count() -> None:
            switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            self._counts[rank] = time.process_time_ns(), switches

        return count


def first_step(rows: int, spec: ModelSpec) -> tuple[StepBatch, GumbelRows]:
    """A step that writes one token of each sequence."""
    starts_S1 = np.arange(rows + 1, dtype=np.int32)
    table_SP = np.arange(rows * BLOCKS, dtype=np.int32).reshape(rows, BLOCKS)
    tokens_T = (np.arange(rows) * 31 % spec.vocab).astype(np.int32)
    picks = GumbelRows.empty(rows)
    picks.temperatures_F[:] = 1.0
    positions_T = np.full(rows, CONTEXT, np.int32)
    return StepBatch(tokens_T, positions_T, starts_S1, table_SP, starts_S1[:-1]), picks


def first_chunk(tokens: int, spec: ModelSpec) -> tuple[StepBatch, GumbelRows]:
    """A step that computes so many tokens of a prompt, and draws from the last."""
    batch, picks = first_step(1, spec)
    tokens_T = (np.arange(tokens) * 31 % spec.vocab).astype(np.int32)
    starts_S1 = np.array((0, tokens), np.int32)
    positions_T = np.arange(tokens, dtype=np.int32)
    return StepBatch(tokens_T, positions_T, starts_S1, batch.table_SP, starts_S1[1:] - 1), picks


def go_on(batch: StepBatch, picks: GumbelRows, chunk: int = 0) -> None:
    """One token further, or back to where it began when the pages are full.  A chunk is computed again."""
    if chunk:
        return
    at = batch.positions_T[0] + 1
    batch.positions_T[:] = picks.positions_F[:] = at if at < BLOCKS * PAGE_TOKENS else CONTEXT


def system(
    name: str, folder: Path, spec: ModelSpec, most_rows: int, cores: tuple[int, ...], *, prompts: bool = False
) -> System:
    """One of ``SYSTEMS``, loaded.  ``prompts``: stages are cut for prefill."""
    threads = int(name.split(maxsplit=1)[0]) if "thread" in name else 1
    mesh = Mesh() if "thread" in name else parse_mesh(name)
    ranks = []
    for rank in range(mesh.ranks):
        shard, ops = shard_model(spec, mesh, rank, prompts=prompts), make_ops(compute_dtype="bf16")
        loaded = load_model(folder, spec, ops, select=shard.layout if mesh.ranks > 1 else None)
        cpus = cores[:threads] if mesh.ranks == 1 else (cores[rank % len(cores)],)
        ranks.append(Rank(shard, loaded, threads, cpus))
    return System(name, ranks, mesh, most_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: random weights of --shape")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="1b", help="default: %(default)s")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="default: %(default)s")
    parser.add_argument("--rows", default="1,8", help="answers in a step (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=300, help="undisturbed ones of each system, at most (default: 300)"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of all steps, at most (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows = [int(each) for each in args.rows.split(",")]
    cores = tuple(sorted(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as made:
        folder = args.model or Path(made)
        if args.model is None:
            write_checkpoint(folder, SHAPES[args.shape], 1, lambda *_: None)
        spec = inspect_model(folder)
        systems = [system(name, folder, spec, max(rows), cores) for name in args.systems.split(",")]
    for each in systems:
        each.start()
    try:
        found = {count: measured(systems, count, args.steps, 60 * args.minutes / len(rows)) for count in rows}
    finally:
        for each in systems:
            each.stop()
    show(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


def measured(systems: list[System], rows: int, steps: int, seconds: float) -> dict[str, dict[str, float]]:
    """Medians of each system's steps."""
    kept: dict[str, list[StepTime]] = {each.name: [] for each in systems}
    until = time.monotonic() + seconds
    for each in systems:
        each.step(rows)
    while min(sum(not each.switches for each in own) for own in kept.values()) < steps and time.monotonic() < until:
        for each in systems:
            kept[each.name].append(each.step(rows))
    return {name: figures(own) for name, own in kept.items()}


def figures(steps: list[StepTime]) -> dict[str, float]:
    """Of one system's steps."""
    calm = [step.seconds for step in steps if not step.switches]
    return {
        "ms": 1e3 * statistics.median(step.seconds for step in steps),
        "cpu_ms": 1e3 * statistics.median(sum(step.cpu) for step in steps),
        "steps": len(steps),
        "undisturbed": len(calm),
        "undisturbed_ms": 1e3 * statistics.median(calm) if calm else float("nan"),
    }


def show(found: dict[int, dict[str, dict[str, float]]]) -> None:
    """A table, each system beside the first one."""
    print("rows  system        ms a step   speed   CPU ms    CPU   steps   undisturbed  ms a step   speed")
    for rows, systems in found.items():
        first = next(iter(systems.values()))
        for name, own in systems.items():
            speed, cpu = first["ms"] / own["ms"], own["cpu_ms"] / first["cpu_ms"]
            calm = first["undisturbed_ms"] / own["undisturbed_ms"]
            print(
                f"{rows:4}  {name:12}  {own['ms']:9.3f}  {speed:5.3f}x  {own['cpu_ms']:7.2f}  {cpu:5.3f}x"
                f"  {own['steps']:5.0f}  {own['undisturbed']:12.0f}  {own['undisturbed_ms']:9.3f}  {calm:5.3f}x"
            )


if __name__ == "__main__":
    main()
