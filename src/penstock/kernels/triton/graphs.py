"""Repeated work at fixed addresses, captured as CUDA graphs: one launch instead of hundreds.

Work runs eagerly the first time its key is seen (kernels are compiled then), is captured the second time, and replayed
from then on.  Graphs share one memory pool, so the next graph overwrites a graph's outputs; the pool has the size that
the largest needs, if that is captured first.  Work that cannot be captured runs eagerly, and the log says why.

Knows nothing about steps.  This module imports torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

MOST_GRAPHS = 96
"""The most graphs; further keys run eagerly."""

MOST_REFUSALS = 4
"""Failed captures until no other is tried: a single failure may be a lack of memory."""

log = logging.getLogger(__name__)

Work = Callable[[], tuple[Tensor, ...]]
"""Reads and writes memory at fixed addresses; returns its outputs."""


class GraphRunner(Protocol):
    """Runs work by its key."""

    def run(self, key: Hashable, work: Work) -> tuple[Tensor, ...]:
        """The outputs of ``work``, valid until the next run.  ``work`` need not be called for a known key."""
        ...


class EagerRunner(GraphRunner):
    """Nothing is captured: for the interpreter, for tests, and to measure what capturing is worth."""

    def run(self, key: Hashable, work: Work) -> tuple[Tensor, ...]:
        return work()


class ReplayableGraph(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Begin it again."""
        ...


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A graph, and where it puts what."""

    graph: ReplayableGraph
    outputs: tuple[Tensor, ...]


class CudaGraphRunner(GraphRunner):
    """Captures work as CUDA graphs and replays them."""

    def __init__(self, device: torch.device, capture: Callable[[Work], CapturedGraph] | None = None) -> None:
        """``capture``: by default on the device, on a stream of its own; raises RuntimeError for work that cannot be
        captured."""
        self._device = device
        self._capture_work = capture or _Recorder(device)
        self._seen: set[Hashable] = set()
        self._captured: dict[Hashable, CapturedGraph] = {}
        self._refusals: set[Hashable] = set()
        self.refused: str | None = None  # why something is not captured, the last time

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, key: Hashable, work: Work) -> tuple[Tensor, ...]:
        captured = self._captured.get(key)
        if captured is None:
            if self._stays(key):
                return work()
            if key not in self._seen:
                self._seen.add(key)
                return work()
            captured = self._capture(key, work)
            if captured is None:
                return work()
        captured.graph.replay()
        return captured.outputs

    def _stays(self, key: Hashable) -> bool:
        """Whether work of this key runs eagerly."""
        return key in self._refusals or len(self._refusals) >= MOST_REFUSALS or len(self._captured) >= MOST_GRAPHS

    def _capture(self, key: Hashable, work: Work) -> CapturedGraph | None:
        try:
            made = self._captured[key] = self._capture_work(work)
        except RuntimeError as error:
            self._refusals.add(key)
            self.refused = str(error.__context__ or error).partition("\n")[0]  # ending a broken capture fails as well
            count = len(self._refusals)
            log.warning(
                "steps of one size are launched kernel by kernel, which is slower: they cannot be captured (%s); %s",
                self.refused,
                f"{count} of {MOST_REFUSALS} sizes until none is tried"
                if count < MOST_REFUSALS
                else "no more are tried",
            )
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            return None
        return made


class _Recorder:
    """Captures on one stream, all graphs into one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = work()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return CapturedGraph(graph, tuple(map(_unowned, outputs)))


class _Place:
    """Memory by its address, without a reference to it."""

    def __init__(self, memory: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 2,
        }


def _unowned(output: Tensor) -> Tensor:
    """The same memory, left to the pool: the next graph puts its own outputs there, or all would stay side by side.

    The pool itself lives as long as a graph of it.
    """
    if not output.nbytes or not output.is_contiguous():
        return output
    raw = torch.as_tensor(_Place(output), device=output.device)
    return raw.view(output.dtype).view(output.shape) if raw.data_ptr() == output.data_ptr() else output
