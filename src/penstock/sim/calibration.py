"""Step times of this machine, measured with a real scheduler and runner, without processes or messages.

Prompts are computed in chunks of several sizes, and batches of several sizes decoded at several lengths.  Each step is
timed from plan to commit.  Pages are copied and verified as a receiver does.  ``fit_step_times`` turns samples into a
fleet's times: least squares of relative errors without negative weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from penstock.config.fleet_file import SimStepTimes
from penstock.config.schema import SchedulerConfig
from penstock.engine.core.cost_model import StepCostModel
from penstock.engine.core.events import AddRequest, CancelRequest
from penstock.engine.core.plan import StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.models.registry import build_model
from penstock.engine.runner.model_runner import ModelRunner
from penstock.errors import ConfigError
from penstock.hashing import chain_root
from penstock.kernels.select import make_ops
from penstock.kv.checksum import PageChecksum
from penstock.kv.page_memory import KvLayout, KvMemory
from penstock.sim.results import FloatArray
from penstock.types import ModelIdentity, PageId, RequestId, RequestStage, SamplingParams
from penstock.weights.inspect import compute_dtype_for, inspect_model
from penstock.weights.load import load_model
from penstock.wire.transfer_messages import PageReady


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """A step that computed ``count`` prompt tokens from position ``start``."""

    start: int
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """A step that wrote one token of each of ``rows`` answers with ``context`` tokens together."""

    rows: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepFit:
    """The times, and the median relative error that they leave of reading and of writing steps."""

    times: SimStepTimes
    prefill_error: float
    decode_error: float


def fit_step_times(readings: Sequence[PrefillSample], writings: Sequence[DecodeSample]) -> StepFit:
    """Raises ConfigError for too few measurements."""
    if len(readings) < 3 or len(writings) < 3:
        raise ConfigError(f"{len(readings)} steps that read and {len(writings)} that write are too few to fit")
    read = np.array([(1.0, r.count, r.count * r.start + r.count * (r.count + 1) / 2) for r in readings])
    write = np.array([(1.0, w.rows, w.context) for w in writings])
    read_s, write_s = np.array([r.seconds for r in readings]), np.array([w.seconds for w in writings])
    (read_step, token, pair), (step, row, context) = nonnegative(read, read_s), nonnegative(write, write_s)
    times = SimStepTimes(step_s=step, row_s=row, context_s=context, read_step_s=read_step, token_s=token, pair_s=pair)
    return StepFit(
        times,
        _error(read @ np.array((read_step, token, pair)), read_s),
        _error(write @ np.array((step, row, context)), write_s),
    )


def nonnegative(columns: FloatArray, seconds: FloatArray) -> tuple[float, ...]:
    """Weights of ``columns[measurement, feature]`` with the least squared relative error, none below 0.

    The best of all sets of features whose own least squares need no negative weight.
    """
    features = columns.shape[1]
    scaled = columns / seconds[:, None]
    best, least = np.zeros(features), np.inf
    for mask in range(1, 1 << features):
        chosen = [feature for feature in range(features) if mask >> feature & 1]
        weights = np.zeros(features)
        weights[chosen] = np.linalg.lstsq(scaled[:, chosen], np.ones(len(seconds)), rcond=None)[0]
        error = float(((scaled @ weights - 1) ** 2).sum())
        if (weights >= 0).all() and error < least:
            best, least = weights, error
    return tuple(float(weight) for weight in best)


def _error(predicted: FloatArray, seconds: FloatArray) -> float:
    return float(np.median(np.abs(predicted / seconds - 1)))


NEVER_MS = 1e9
"""A step's budget that no step exceeds."""

READ_AT_ONCE = 512
"""Tokens of a prompt in a step, where what follows is measured."""

COPIED_BYTES = 32 << 20
"""In how many pieces of memory copying is measured: more than caches hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationExtent:
    """What is measured."""

    chunks: Sequence[int] = (32, 128, 512)
    rows: Sequence[int] = (1, 2, 4, 8, 16)
    context: int = 1536  # tokens at most
    steps: int = 24  # that write, of each batch and length
    rounds: int = 3
    threads: int = 1


class CalibrationBench:
    """A worker's engine on this machine.  Raises ModelError, KernelError, ConfigError for what cannot be served."""

    def __init__(self, folder: Path, extent: CalibrationExtent) -> None:
        self.extent = extent
        spec = inspect_model(folder)
        if spec.pooler is not None:
            raise ConfigError(f"{folder}: this model only reads; calibrate one that writes")
        dtype = compute_dtype_for(spec, "auto")
        ops = make_ops(compute_dtype=dtype, threads=extent.threads)
        loaded = load_model(folder, spec, ops)
        self.length = min(spec.max_positions, extent.context)
        self.vocab = spec.vocab
        self.max_positions = spec.max_positions
        self.layers = spec.layers
        self.identity = ModelIdentity(fingerprint=loaded.fingerprint, numerics=ops.numerics)
        self.layout = KvLayout.for_shape(spec.kv, dtype)
        self._reaches = spec.kv.reaches
        self._pages = max(extent.rows) * (self.length // self.layout.page_tokens + 2) * len(self._reaches)
        self._memory = KvMemory.anonymous(self.layout, self._pages)
        kv = ops.new_kv(spec.kv, pages=self._pages, memory=self._memory.buffer)
        self._runner = ModelRunner(build_model(loaded, ops, spec.max_positions), ops, kv)
        self._asked = 0

    @property
    def progress_steps(self) -> int:
        """How often ``progress`` will be called by ``readings`` and ``writings``."""
        return self.extent.rounds * (len(self.extent.chunks) + 2 * len(self.extent.rows))

    # --- steps ------------------------------------------------------------------------------------------------------

    def prefill_samples(self, progress: Callable[[], None]) -> list[PrefillSample]:
        """Medians of all rounds."""
        seconds: dict[tuple[int, int], list[float]] = {}
        for _ in range(self.extent.rounds):
            for chunk in self.extent.chunks:
                scheduler = self._scheduler(chunk)
                self._ask(scheduler, 1, self.length - 2)
                for plan, took in self._steps(scheduler):
                    (row,) = plan.rows
                    seconds.setdefault((row.start, row.count), []).append(took)
                    if row.samples:
                        break
                progress()
        return [PrefillSample(start, count, median(took)) for (start, count), took in sorted(seconds.items())]

    def decode_samples(self, progress: Callable[[], None]) -> list[DecodeSample]:
        """The same of batches of answers, after short prompts and after long ones."""
        seconds: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for _ in range(self.extent.rounds):
            for rows in self.extent.rows:
                for length in (min(32, self.length // 4), self._longest(rows)):
                    seconds.setdefault((rows, length), []).extend(self._written(rows, length))
                    progress()
        return [
            DecodeSample(rows, round(median(context for context, _ in seen)), median(took for _, took in seen))
            for (rows, _), seen in sorted(seconds.items())
        ]

    def _longest(self, rows: int) -> int:
        """Tokens of prompts whose answers are still being written when the last of them is read."""
        meanwhile = rows * (self.length // READ_AT_ONCE + 2)
        return max(self.length // 4, self.length - self.extent.steps - meanwhile)

    def _written(self, rows: int, length: int) -> Iterator[tuple[int, float]]:
        """(tokens of context, seconds) of steps in which all answers are written."""
        scheduler = self._scheduler(READ_AT_ONCE)
        self._ask(scheduler, rows, length)
        left = self.extent.steps
        for plan, took in self._steps(scheduler):
            if len(plan.rows) == rows and all(row.count == 1 and row.request.output for row in plan.rows):
                yield sum(row.start + 1 for row in plan.rows), took
                left -= 1
            if left == 0:
                break

    def _scheduler(self, chunk: int) -> Scheduler:
        config = SchedulerConfig(
            pages=self._pages,
            page_tokens=self.layout.page_tokens,
            reaches=self._reaches,
            max_model_len=self.length,
            max_running=max(self.extent.rows),
            max_chunk_tokens=chunk,
            max_step_tokens=max(chunk, *self.extent.rows),
            step_budget_ms=NEVER_MS,
            prefill_step_budget_ms=NEVER_MS,
        )
        return Scheduler(config, StepCostModel())

    def _ask(self, scheduler: Scheduler, rows: int, length: int) -> None:
        for _ in range(rows):
            self._asked += 1
            number = self._asked
            scheduler.apply(
                AddRequest(
                    id=RequestId(f"{number}"),
                    epoch=1,
                    stage=RequestStage.WHOLE,
                    prompt=tuple((number * 31 + place * 7 + 9) % self.vocab for place in range(length)),
                    sampling=SamplingParams(seed=number, max_tokens=self.length - length, temperature=0.0),
                    arrival=float(number),
                    root=chain_root(self.identity),
                ),
                0.0,
            )

    def _steps(self, scheduler: Scheduler) -> Iterator[tuple[StepPlan, float]]:
        """Each step and its seconds, until the caller closes the iterator; then all requests are removed."""
        try:
            while True:
                began = time.perf_counter()
                plan = scheduler.plan(began)
                if not plan.rows:
                    scheduler.commit(plan, (), began)
                    return
                scheduler.commit(plan, self._runner.run(plan), began)
                yield plan, time.perf_counter() - began
        finally:
            for number in range(self._asked + 1):
                scheduler.apply(CancelRequest(id=RequestId(f"{number}"), epoch=1), 0.0)
            for gone in scheduler.plan(0.0).removed:
                self._runner.remove_request(gone)

    # --- pages ------------------------------------------------------------------------------------------------------

    def copy_bytes_s(self) -> float:
        """Bytes a second of a receiver that copies and verifies pages."""
        seal, memory, size = PageChecksum(self.identity, self.layout), self._memory, self.layout.page_bytes
        pages = min(self._pages // 2, max(1, COPIED_BYTES // size))
        frames = [
            PageReady(
                request=RequestId("r"),
                epoch=1,
                index=page,
                page=PageId(page),
                tokens=self.layout.page_tokens,
                generation=1,
                checksum=seal.checksum(memory.view(PageId(page)), 1),
            )
            for page in range(pages)
        ]
        took = []
        for _ in range(max(2, self.extent.rounds)):
            began = time.perf_counter()
            for page, frame in enumerate(frames):
                seal.copy_checked(frame, memory.view(PageId(page)), memory.view(PageId(pages + page)))
            took.append(time.perf_counter() - began)
        return pages * size / median(took)
