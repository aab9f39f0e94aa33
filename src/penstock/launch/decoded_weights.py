"""Decoded copies of compressed weights, for steps of many rows: measured and made once the weights are loaded.

The process that loads them forks the workers, which share the copies.  It must not start the kernels' threads, so a
child measures, with the threads and on the processors of a worker, on the weights themselves.
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from penstock.config.cpu_cores import RankCores
from penstock.config.decoded_weights import DecodedWeightsBudget
from penstock.config.kv_memory import format_size
from penstock.config.resolve import ServePlan
from penstock.kernels.decoded_copies import (
    MEASURING_S,
    ChosenCopies,
    CopyBudget,
    CopyCandidate,
    ProductTimes,
    RowsOfStep,
    ShapeTimes,
    choose_copies,
)
from penstock.kernels.operands import PackedLinear
from penstock.launch.fork_server import ProcessHasThreads, fork
from penstock.types import Role
from penstock.weights.load import LoadedModel

CHILD_TIMEOUT_S = 30.0
"""For a child on a busy machine; it takes a fraction of a second."""

LOOK_S = 0.02

_EXPERT = re.compile(r"\d+\.experts\.\d+\.")

Measure = Callable[[Sequence[PackedLinear]], Mapping[tuple[int, ...], ShapeTimes]]
"""Times of products with such weights, by ``decoded_copies.shape_of``."""

log = logging.getLogger(__name__)


def with_decoded_copies(
    parts: Sequence[LoadedModel], plan: ServePlan, threads: int, keep_watch: Callable[[], None]
) -> list[LoadedModel]:
    """The models of all ranks of a host, with copies of those compressed weights that gain by them; logs one line.

    ``threads`` decode.  Raises what ``keep_watch`` raises.
    """
    budget = plan.decoded_weights
    if budget is None:
        return list(parts)
    cores = measured_cores(plan)

    def measure(weights: Sequence[PackedLinear]) -> Mapping[tuple[int, ...], ShapeTimes]:
        return measure_in_child(plan.family, weights, cores, keep_watch)

    return add_decoded_copies(parts, plan.family, budget, measure, threads=threads, keep_watch=keep_watch)


def add_decoded_copies(
    parts: Sequence[LoadedModel],
    family: str,
    budget: DecodedWeightsBudget,
    measure: Measure,
    *,
    threads: int = 1,
    keep_watch: Callable[[], None] = lambda: None,
) -> list[LoadedModel]:
    """``with_decoded_copies`` for a kernel family, with its measurements."""
    from penstock.kernels.native import decoded_copies  # not where the extension is not built

    named = {f"{part}/{name}": weight for part, own in enumerate(parts) for name, weight in _multiplied(own).items()}
    weights = decoded_copies.compressed_weights(named)
    if not weights:
        if not budget.all_or_none:
            log.info("decoded copies: none, as no weights are held compressed")
        return list(parts)
    begun = time.monotonic()
    times = measure(list(weights.values()))
    shapes = {name: decoded_copies.shape_of(weight) for name, weight in weights.items()}
    candidates = [
        CopyCandidate(name, decoded_copies.copy_bytes(weight), _rows_of(name), times[shapes[name]])
        for name, weight in weights.items()
        if shapes[name] in times
    ]
    chosen = choose_copies(candidates, CopyBudget(budget.nbytes, budget.all_or_none))
    pairs = [(weights[name], rows) for name, rows in chosen.decoded_from.items()]
    try:
        decoded_copies.add_copies(family, pairs, threads, keep_watch)
    except OSError as error:
        log.warning("decoded copies: none, as %s cannot be had: %s", format_size(chosen.nbytes), error)
        return list(parts)
    log.info("%s (%.2f s)", copies_line(chosen, budget, measured=bool(candidates)), time.monotonic() - begun)
    copied = {id(weights[name].data) for name in chosen.decoded_from}
    return [replace(own, nbytes=own.nbytes + _copied_bytes(own, copied)) for own in parts]


def copies_line(chosen: ChosenCopies, budget: DecodedWeightsBudget, *, measured: bool) -> str:
    """What was done, for the log."""
    if not measured:
        return "decoded copies: none, as products could not be measured"
    if chosen.wanted_bytes == 0:
        return "decoded copies: none, as compressed weights are as fast in steps of any size here"
    if not chosen.decoded_from:
        free = "free beside all else" if budget.all_or_none else "set aside"
        return (
            f"decoded copies: none, as all would take {format_size(chosen.wanted_bytes, up=True)} and "
            f"{format_size(budget.nbytes)} are {free} (--decoded-weights SIZE)"
        )
    least, most = min(chosen.decoded_from.values()), max(chosen.decoded_from.values())
    rows = f"{least}" if least == most else f"{least} (some: {most})"
    some = "" if chosen.nbytes == chosen.wanted_bytes else f" of {format_size(chosen.wanted_bytes, up=True)}"
    return f"decoded copies: {format_size(chosen.nbytes, up=True)}{some}, for products of {rows} rows and more"


def measured_cores(plan: ServePlan) -> RankCores:
    """The threads and processors of a worker that prefills, whose steps have many rows; else of another one."""
    own = [worker for worker in plan.workers if plan.prefill_plan_of(worker) is None]
    roles = (Role.PREFILL, Role.BOTH, Role.DECODE, Role.ENCODE)
    worker = min(own, key=lambda worker: roles.index(worker.role))
    return worker.ranks[0] if worker.ranks else RankCores(threads=worker.threads, cpus=worker.cpus)


def _multiplied(model: LoadedModel) -> Mapping[str, Any]:
    """The weights that something is multiplied with; tables are looked up, and the head may be the embedding."""
    tables = {"positions"}
    if "head" in model.weights or model.spec.pooler is not None:
        tables.add("embed")
    return {name: weight for name, weight in model.weights.items() if name not in tables}


def _rows_of(name: str) -> RowsOfStep:
    own = name.partition("/")[2]
    if own in ("embed", "head"):
        return RowsOfStep.DRAWN
    return RowsOfStep.ROUTED if _EXPERT.match(own) else RowsOfStep.ALL


def _copied_bytes(model: LoadedModel, copied: set[int]) -> int:
    """Bytes of the copies of this model's own weights, each once."""
    from penstock.kernels.native.decoded_copies import copy_bytes

    own = {id(weight.data): weight for weight in model.weights.values() if isinstance(weight, PackedLinear)}
    return sum(copy_bytes(weight) for key, weight in own.items() if key in copied)


# --- the child that measures ------------------------------------------------------------------------------------------


class _Measured(msgspec.Struct, array_like=True):
    """One shape's times on their way out of the child."""

    shape: tuple[int, ...]
    slice_bytes: int
    by_rows: dict[int, tuple[float, float]]


def measure_in_child(
    family: str,
    weights: Sequence[PackedLinear],
    cores: RankCores,
    keep_watch: Callable[[], None],
    budget_s: float = MEASURING_S,
) -> dict[tuple[int, ...], ShapeTimes]:
    """``decoded_copies.measure_shapes`` in a child with these threads and processors; nothing if it fails.

    ``keep_watch`` is called meanwhile.
    """
    reader, writer = os.pipe()

    def body() -> int:
        from penstock.kernels.native.decoded_copies import measure_shapes

        if cores.cpus:
            os.sched_setaffinity(0, cores.cpus)
        found = measure_shapes(family, weights, cores.threads, budget_s)
        said = [
            _Measured(shape, own.slice_bytes, {rows: (t.compressed, t.plain) for rows, t in own.by_rows.items()})
            for shape, own in found.items()
        ]
        os.write(writer, msgspec.msgpack.encode(said))
        return 0

    try:
        child = fork("measure", body, keep=[writer])
    except (OSError, ProcessHasThreads) as error:
        log.warning("products of compressed weights are not measured: %s", error)
        os.close(reader)
        return {}
    finally:
        os.close(writer)
    try:
        return _decoded(_read_all(reader, keep_watch))
    except (msgspec.MsgspecError, TimeoutError) as error:
        log.warning("products of compressed weights are not measured: %s", error)
        return {}
    finally:
        os.close(reader)
        child.kill(signal.SIGKILL)
        os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED)
        os.close(child.pidfd)


def _read_all(reader: int, keep_watch: Callable[[], None]) -> bytes:
    """All that is written until the other end is closed.  Raises TimeoutError."""
    until, said = time.monotonic() + CHILD_TIMEOUT_S, b""
    while time.monotonic() < until:
        keep_watch()
        if not select.select([reader], [], [], LOOK_S)[0]:
            continue
        got = os.read(reader, 1 << 16)
        if not got:
            return said
        said += got
    raise TimeoutError(f"no result after {CHILD_TIMEOUT_S:.0f} s")


def _decoded(said: bytes) -> dict[tuple[int, ...], ShapeTimes]:
    return {
        own.shape: ShapeTimes(own.slice_bytes, {rows: ProductTimes(*both) for rows, both in own.by_rows.items()})
        for own in msgspec.msgpack.decode(said, type=list[_Measured])
    }
