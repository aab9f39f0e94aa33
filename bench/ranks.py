"""Decode steps of a model over ranks beside one process: in turns, step by step, in one run.

    ./dev bench ranks                                   1 B shape, 16 layers, random weights: two threads, one, tp2, pp2
    ./dev bench ranks --model DIR --rows 1,8 --steps 300 --json FILE
    ./dev bench ranks --systems "1 thread,2 replicas,pp2"     pipeline stages beside processes that share nothing
    ./dev bench ranks --record                                what the leader's record of a step takes
    ./dev bench ranks --memory                                weights of each rank, and all memory of a service
    ./dev bench ranks --plot FILE.svg --read STEPS.json,MEMORY.json       draws what two runs saved

Over stages, a step is one of ``BURST`` micro-batches in flight, from the end of the first to that of the last; of
replicas, one of the steps that they compute at the same time.  "Undisturbed" are steps in which no thread was taken off
its processor against its will; the other figures are of all steps.  CPU seconds are those of all threads of all ranks.
Each rank and each thread has a processor of its own.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import resource
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast
from urllib.request import Request, urlopen

import numpy as np
from bench.peers.checkpoint import write_checkpoint
from bench.peers.places import SHAPES
from bench.peers.processes import memory_bytes

from penstock.config.mesh import Mesh, parse_mesh
from penstock.engine.models.registry import build_model
from penstock.engine.runner.rank_group import Follower, LeaderProgram, SharedStep, StepEncoder
from penstock.engine.runner.sharded_model import ShardedModel, stage_program
from penstock.kernels.operands import StepBatch
from penstock.kernels.ops import Ops, SharedProgram, StepProgram
from penstock.kernels.sampling import GumbelRows
from penstock.kernels.select import make_ops
from penstock.parallel.collectives.shm import SPIN_US, ShmMesh
from penstock.parallel.shard import ModelShard, shard_model
from penstock.types import PAGE_TOKENS
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.inspect import inspect_model
from penstock.weights.load import LoadedModel, load_model

Found = dict[Any, dict[str, Any]]

CONTEXT = 256
BLOCKS = 64
"""Pages of a sequence."""

ASK = struct.Struct("<HHH")
"""What a leader is asked for: rows, tokens of a chunk, steps in flight."""

SYSTEMS = ("2 threads", "1 thread", "tp2", "pp2")

BURST = 6
"""Micro-batches of a pipeline that are asked for at once."""

PLANS = ("tp1", "tp2", "pp2", "tp2,pp2")
"""Of the services whose memory is measured."""

START_S = 180
"""For a service to be ready."""

RECORDED_ROWS, RECORDED_CONTEXT = 64, 4096
"""Of the step whose record is measured."""


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

    def __init__(self, name: str, ranks: list[Rank], mesh: Mesh, most_rows: int, *, spin_us: float = SPIN_US) -> None:
        self.name = name
        self._spin_us = spin_us
        self._mesh = mesh
        self._ranks = ranks
        self._most_rows = most_rows
        self._group = ShmMesh(mesh)
        self._counts = np.frombuffer(mmap.mmap(-1, mesh.ranks * 16), np.int64).reshape(mesh.ranks, 2)
        pages = mesh.pipeline * most_rows * BLOCKS
        self._pages = mmap.mmap(-1, pages * ranks[0].shard.whole.kv.page_bytes("bf16"))
        self._pids: list[int] = []

    def beside(self, cpu: int) -> System:
        """The same once more, on another processor: a system with one thread."""
        (rank,) = self._ranks
        return System(self.name, [replace(rank, cpus=(cpu,))], self._mesh, self._most_rows)

    def start(self) -> None:
        """Fork all ranks."""
        ask, self._ask = os.pipe()
        self._answer, answer = os.pipe()
        leader = self._mesh.leader
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

    def step_of(self, rows: int) -> StepTime:
        """A step of answers; over stages, one of ``BURST`` that follow each other."""
        if self._mesh.pipeline == 1:
            return self.step(rows)
        burst = self.step(rows, flights=BURST)
        return replace(burst, cpu=tuple(seconds / BURST for seconds in burst.cpu))

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
        sharded = ShardedModel(model, own.shard, self._group.tensor(rank, spin_us=self._spin_us))
        program = cast(SharedProgram, ops.record(sharded, kv))
        return sharded, ops, stage_program(program, ops, self._group.pipeline(rank), own.shard)

    def _follow(self, rank: int, leader: int) -> None:
        model, ops, program = self._program(rank)
        Follower(model, ops, program, scores=False).run(self._group.everybody(rank), leader, self._count(rank))

    def _lead(self, ask: int, answer: int) -> None:
        rank = self._mesh.leader
        _, _, own = self._program(rank)
        program: StepProgram = own
        if self._mesh.ranks > 1:
            program = LeaderProgram(own, self._group.everybody(rank), self._ranks[rank].shard.whole.kv.layer_groups)
        count, batches = self._count(rank), dict[tuple[int, int, int], tuple[StepBatch, GumbelRows]]()
        spec = self._ranks[rank].shard.whole
        while asked := os.read(ask, ASK.size):
            rows, chunk, flights = ASK.unpack(asked)
            batch_of = [
                batches.setdefault(
                    (rows, chunk, number), first_chunk(chunk, spec) if chunk else first_step(rows, spec, number)
                )
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


class Replicas:
    """Processes that compute the same steps at the same time and share nothing but the machine."""

    def __init__(self, name: str, systems: list[System]) -> None:
        self.name = name
        self._systems = systems

    def start(self) -> None:
        """Fork all."""
        for each in self._systems:
            each.start()

    def step_of(self, rows: int) -> StepTime:
        """As of a system, of each step of one of them."""
        for each in self._systems:
            each.ask(rows)
        found, count = [each.answer() for each in self._systems], len(self._systems)
        cpu = tuple(seconds / count for each in found for seconds in each.cpu)
        return StepTime(max(each.seconds for each in found) / count, cpu, sum(each.switches for each in found))

    def stop(self) -> None:
        """End all."""
        for each in self._systems:
            each.stop()


def first_step(rows: int, spec: ModelSpec, place: int = 0) -> tuple[StepBatch, GumbelRows]:
    """A step that writes one token of each sequence.  ``place``: of its pages, among batches that take turns."""
    starts_S1 = np.arange(rows + 1, dtype=np.int32)
    table_SP = (np.arange(rows * BLOCKS, dtype=np.int32) + place * rows * BLOCKS).reshape(rows, BLOCKS)
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
    """One of ``SYSTEMS``, loaded; "tp2 spin 200": ranks spin so many microseconds before they sleep.

    ``prompts``: stages are cut for prefill.
    """
    name, _, spin = name.partition(" spin ")
    threads = int(name.split(maxsplit=1)[0]) if "thread" in name else 1
    mesh = Mesh() if "thread" in name else parse_mesh(name)
    ranks = []
    for rank in range(mesh.ranks):
        shard, ops = shard_model(spec, mesh, rank, prompts=prompts), make_ops(compute_dtype="bf16")
        loaded = load_model(folder, spec, ops, select=shard.layout if mesh.ranks > 1 else None)
        cpus = cores[:threads] if mesh.ranks == 1 else (cores[rank % len(cores)],)
        ranks.append(Rank(shard, loaded, threads, cpus))
    label = f"{name} spin {spin}" if spin else name
    return System(label, ranks, mesh, most_rows, spin_us=float(spin or SPIN_US))


def system_of(name: str, folder: Path, spec: ModelSpec, most_rows: int, cores: tuple[int, ...]) -> System | Replicas:
    """The same, or "2 replicas": of one thread each."""
    if "replicas" not in name:
        return system(name, folder, spec, most_rows, cores)
    one = system("1 thread", folder, spec, most_rows, cores)
    return Replicas(name, [one, *(one.beside(cpu) for cpu in cores[1 : int(name.split(maxsplit=1)[0])])])


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
    parser.add_argument("--record", action="store_true", help="only the leader's record of a step of 64 answers")
    parser.add_argument("--memory", action="store_true", help="only the memory of services over these plans")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the figures of --read")
    parser.add_argument("--read", default="", metavar="STEPS,MEMORY", help="two files that --json saved")
    args = parser.parse_args()
    if args.record:
        show_record()
        return
    if args.plot:
        steps, memory = (json.loads(Path(name).read_text(encoding="utf-8")) for name in args.read.split(","))
        plot(steps, memory, args.plot)
        return
    rows = [int(each) for each in args.rows.split(",")]
    cores = tuple(sorted(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as made:
        folder = args.model or Path(made)
        if args.model is None:
            write_checkpoint(folder, SHAPES[args.shape], 1, lambda *_: None)
        if args.memory:
            save({plan: memory_of(folder, plan) for plan in PLANS}, show_memory, args.json)
            return
        spec = inspect_model(folder)
        systems = [system_of(name, folder, spec, max(rows), cores) for name in args.systems.split(",")]
    with started(systems):
        found = {count: measured(systems, count, args.steps, 60 * args.minutes / len(rows)) for count in rows}
    save(found, show, args.json)


def save(found: Found, shown: Callable[[Found], None], path: Path | None) -> None:
    """Show the figures, and keep them for a picture."""
    shown(found)
    if path:
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")


@contextmanager
def started(systems: Sequence[System | Replicas]) -> Iterator[None]:
    """All of them run meanwhile."""
    for each in systems:
        each.start()
    try:
        yield
    finally:
        for each in systems:
            each.stop()


def measured(
    systems: Sequence[System | Replicas], rows: int, steps: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Medians of each system's steps."""
    kept: dict[str, list[StepTime]] = {each.name: [] for each in systems}
    until = time.monotonic() + seconds
    for each in systems:
        each.step_of(rows)
    while min(sum(not each.switches for each in own) for own in kept.values()) < steps and time.monotonic() < until:
        for each in systems:
            kept[each.name].append(each.step_of(rows))
    return {name: figures(own) for name, own in kept.items()}


def figures(steps: list[StepTime]) -> dict[str, float]:
    """Of one system's steps."""
    calm = [step.seconds for step in steps if not step.switches]
    return {
        "ms": 1e3 * statistics.median(step.seconds for step in steps),
        "fast_ms": 1e3 * float(np.percentile([step.seconds for step in steps], 10)),
        "cpu_ms": 1e3 * statistics.median(sum(step.cpu) for step in steps),
        "steps": len(steps),
        "undisturbed": len(calm),
        "undisturbed_ms": 1e3 * statistics.median(calm) if calm else float("nan"),
    }


def memory_of(folder: Path, plan: str) -> dict[str, list[float]]:
    """MB of each rank's weights, and of all processes of a service with one worker, where a shared page counts once."""
    with tempfile.TemporaryFile() as log, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        words = [sys.executable, "-m", "penstock", "serve", str(folder), "--aggregated", "--kv-memory", "64MiB"]
        server = subprocess.Popen([*words, "--parallel", plan, "--port", str(port)], stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(server, url, log)
            body = json.dumps({"model": folder.name, "prompt": [1] * 64, "max_tokens": 8}).encode()
            headers = {"content-type": "application/json"}
            with urlopen(Request(f"{url}/v1/completions", body, headers)) as answer:
                answer.read()
            with urlopen(f"{url}/admin/workers") as answer:
                (worker,) = json.loads(answer.read())["workers"]
            found = memory_bytes(server.pid)
            log.seek(0)
            loaded = re.search(rb"weights loaded in .* s: ([0-9. +]+) MiB", log.read())
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    assert loaded is not None
    ranks = worker["ranks"]
    weights = [rank["weight_bytes"] / 1e6 for rank in ranks] if ranks else [float(loaded[1]) * 1.048576]
    return {"weights_mb": weights, "pss_mb": [found["pss"] / 1e6]}


def wait_ready(server: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    """Raises RuntimeError if the service ends, or is not ready within ``START_S``."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        try:
            with urlopen(f"{url}/ready") as answer:
                answer.read()
                return
        except OSError:
            time.sleep(0.1)
    log.seek(0)
    raise RuntimeError(log.read().decode())


def show_memory(found: dict[str, dict[str, list[float]]]) -> None:
    """A table of plans."""
    print("plan       MB of weights, by rank        all processes, MB    of one process")
    (alone,) = found[PLANS[0]]["pss_mb"]
    for plan, own in found.items():
        ranks = " ".join(f"{each:.0f}" for each in own["weights_mb"])
        print(f"{plan:9}  {ranks:28}  {own['pss_mb'][0]:17.0f}  {own['pss_mb'][0] / alone:13.3f}x")


def plot(steps: dict[str, dict[str, dict[str, float]]], memory: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Speed over plans on the left, memory of each rank on the right."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    width = 0.8 / len(steps)
    for place, (rows, systems) in enumerate(steps.items()):
        first = next(iter(systems.values()))["ms"]
        heights = [first / own["ms"] for own in systems.values()]
        at = [number + (place - (len(steps) - 1) / 2) * width for number in range(len(systems))]
        bars = left.bar(at, heights, width, label=f"{rows} answers" if rows != "1" else "1 answer")
        left.bar_label(bars, fmt="%.2f", fontsize=8)
        left.set_xticks(range(len(systems)), list(systems))
    left.set(ylabel=f"tokens a second, {next(iter(next(iter(steps.values()))))} = 1")
    left.set_ylim(top=1.25 * left.get_ylim()[1])
    left.legend(loc="upper right", ncols=len(steps))
    for number, own in enumerate(memory.values()):
        below = 0.0
        for weights in own["weights_mb"]:
            right.bar(number, weights, 0.6, bottom=below, edgecolor="white", color="#0b5cad")
            below += weights
    together = [own["pss_mb"][0] for own in memory.values()]
    right.plot(
        together,
        "_",
        color="#ff7f0e",
        markersize=42,
        markeredgewidth=3,
        label="all processes: what ranks share counts once",
    )
    right.set_ylim(top=1.2 * right.get_ylim()[1])
    right.legend(loc="upper left", markerscale=0.4)
    right.set_xticks(range(len(memory)), ["one process", *list(memory)[1:]])
    right.set(ylabel="MB of weights, one box for each rank")
    figure.suptitle("A model over ranks: decode speed, and who has the weights")
    figure.savefig(path)


def show(found: dict[int, dict[str, dict[str, float]]]) -> None:
    """A table, each system beside the first one."""
    print(
        "rows  system        ms a step   speed   fastest tenth   speed   CPU ms    CPU   steps   undisturbed  ms a step"
        "   speed"
    )
    for rows, systems in found.items():
        first = next(iter(systems.values()))
        for name, own in systems.items():
            speed, cpu = first["ms"] / own["ms"], own["cpu_ms"] / first["cpu_ms"]
            fast = first["fast_ms"] / own["fast_ms"]
            calm = first["undisturbed_ms"] / own["undisturbed_ms"]
            print(
                f"{rows:4}  {name:12}  {own['ms']:9.3f}  {speed:5.3f}x  {own['fast_ms']:14.3f}  {fast:5.3f}x"
                f"  {own['cpu_ms']:7.2f}  {cpu:5.3f}x  {own['steps']:5.0f}  {own['undisturbed']:12.0f}"
                f"  {own['undisturbed_ms']:9.3f}  {calm:5.3f}x"
            )


def show_record() -> None:
    """Bytes and time of the record of a step in which all answers go on, and how often it has new pages."""
    starts_S1 = np.arange(RECORDED_ROWS + 1, dtype=np.int32)
    pages = RECORDED_CONTEXT // PAGE_TOKENS
    table_SP = np.arange(RECORDED_ROWS * pages, dtype=np.int32).reshape(RECORDED_ROWS, pages)
    positions_T = np.arange(RECORDED_ROWS, dtype=np.int32) % PAGE_TOKENS  # a sixteenth begins a page in each step
    tokens_T = np.full(RECORDED_ROWS, 100_000, np.int32)
    batch, picks = (
        StepBatch(tokens_T, positions_T, starts_S1, table_SP, starts_S1[:-1]),
        GumbelRows.empty(RECORDED_ROWS),
    )
    encoder, step = StepEncoder(groups=1), SharedStep(batch, 0, picks)
    first = len(encoder.record(step))
    times, sizes = [], []
    for _ in range(RECORDED_CONTEXT - 2 * PAGE_TOKENS):
        batch.positions_T[:] += 1
        begun = time.perf_counter()
        record = encoder.record(step)
        times.append(1e6 * (time.perf_counter() - begun))
        sizes.append(len(record))
    print(f"{RECORDED_ROWS} answers, {RECORDED_CONTEXT:,} tokens each: {first:,} bytes when they begin")
    print(f"and when they go on {statistics.median(sizes):.0f} bytes, at most {max(sizes)}; made in", end=" ")
    print(f"{statistics.median(times):.2f} us, p99 {statistics.quantiles(times, n=100)[98]:.2f} us")


if __name__ == "__main__":
    main()
