"""What simulated workers share and use: the clock, links, lower tiers, machines, and the time of a plan.

The clock is a queue of calls.  Links serve transfers in order of arrival.  Lower tiers are modeled by capacity and
order of use; writes are free, reads take the link's time::

    device --evicted--> host --evicted--> disk --evicted--> gone
       ^                  |                 |
       +---- read back ---+-----------------+      a block that was read back stays below, too

The time of ``n`` equal steps is a polynomial, since each is longer than the one before by its additional context.
Workers of one machine slow each other down (``SharedMachine``).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.config.fleet_file import SimRankTimes, SimStepTimes, WorkerGroup
from penstock.engine.core.cost_model import SCALE, CostVector
from penstock.engine.core.plan import StepPlan
from penstock.types import BlockHash, WorkerId


class EventQueue:
    """Calls, in order of their times; of equal times the one that was entered first."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds; never goes back
        self._serial = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def call_at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Have this called then, or now if that is past."""
        self._serial += 1
        heapq.heappush(self._heap, (max(when, self.now), self._serial, call, args))

    def call_after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        """Have this called so much later."""
        self.call_at(self.now + seconds, call, *args)

    def run_next(self) -> bool:
        """Make the next call.  False when there is none."""
        if not self._heap:
            return False
        self.now, _, call, args = heapq.heappop(self._heap)
        call(*args)
        return True


class PlanDuration(NamedTuple):
    """Durations of the steps of a plan."""

    first_s: float  # the first step
    growth_s: float  # each step takes so much longer than the one before

    def total(self, steps: int) -> float:
        """Seconds of ``steps`` steps."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def steps_within(self, seconds: float, most: int) -> int:
        """The step that is under way, or ends, after so long: 1 to ``most``."""
        if seconds <= self.first_s:
            return 1
        half = self.growth_s / 2
        linear = self.first_s - half
        steps = math.ceil(2 * seconds / (linear + math.sqrt(linear * linear + 4 * half * seconds)) - 1e-9)
        return max(1, min(most, steps))


def plan_duration(times: SimStepTimes, plan: StepPlan, slower: float = 1.0) -> PlanDuration:
    """A row writes when it computes one token of an answer; whatever else it computes it reads.

    ``slower``: what everything takes, by what it takes alone.
    """
    rows = context = tokens = pairs = 0
    for row in plan.rows:
        start, count = row.start, row.count
        if count == 1 and start >= len(row.request.prompt):
            rows += 1
            context += start + 1
        else:
            tokens += count
            pairs += count * start + count * (count + 1) // 2
    reading = times.token_s * tokens + times.pair_s * pairs
    if not rows:
        return PlanDuration((times.read_step_s + reading) * slower, 0.0)
    writing = times.step_s + times.row_s * rows + times.context_s * context
    return PlanDuration((writing + reading) * slower, times.context_s * rows * slower)


class RankedStep:
    """How long the ranks of a worker take for a step that one rank alone takes ``seconds`` for.

    Tensor ranks divide all but ``SimRankTimes.undivided_s`` and exchange twice a layer; stages follow one another.
    """

    def __init__(self, ranks: SimRankTimes, group: WorkerGroup) -> None:
        self._ranks = ranks
        self._tensor = group.mesh.tensor
        self.shares = group.stage_shares

    @property
    def stages(self) -> int:
        """Steps that may be in flight."""
        return len(self.shares)

    @property
    def divides(self) -> bool:
        """Whether a step takes another time than on one rank."""
        return self.stages * self._tensor > 1

    def stage_s(self, stage: int, seconds: float, tokens: int, *, busy: int = 1) -> float:
        """Seconds of one stage of a step of so many tokens, while ``busy`` stages compute."""
        ranks = self._ranks
        whole = min(ranks.undivided_s, seconds)
        own = (whole + (seconds - whole) / self._tensor) * (1 + ranks.beside * (busy * self._tensor - 1))
        joins = 2 * ranks.layers * (self._tensor > 1)
        own += joins * (ranks.join_s + ranks.join_token_s * tokens)
        return own * self.shares[stage] + (stage > 0) * (ranks.send_s + ranks.send_token_s * tokens)

    def spacing_s(self, seconds: float, tokens: int) -> float:
        """Seconds from one step's end to the next one's, while all stages compute: those of the slowest."""
        return max(self.stage_s(stage, seconds, tokens, busy=self.stages) for stage in range(self.stages))

    def duration(self, alone: PlanDuration, tokens: int) -> PlanDuration:
        """The time of the steps of a plan, one after the other, of a worker with one stage."""
        first = self.stage_s(0, alone.first_s, tokens)
        return PlanDuration(first, self.stage_s(0, alone.first_s + alone.growth_s, tokens) - first)


def prior_costs(times: SimStepTimes, ranked: RankedStep | None = None) -> CostVector:
    """What a worker that has run for a while expects (``engine.core.cost_model.StepCostModel``'s prior)."""
    step, token, pair = times.step_s, times.token_s, max(times.pair_s, times.context_s)
    draw = max(times.row_s - times.token_s, times.row_s / 100)
    if ranked is not None and ranked.divides:
        alone, step = step, ranked.spacing_s(step, 0)
        part = ranked.spacing_s(alone + 1.0, 0) - step
        token = part * token + ranked.spacing_s(alone, 1) - step
        pair, draw = part * pair, part * draw
    each = (max(step, 1e-6), max(token, 1e-9), max(pair, 1e-15), max(draw, 1e-9))
    return (each[0] * SCALE[0], each[1] * SCALE[1], each[2] * SCALE[2], each[3] * SCALE[3])


class BusyTime:
    """Spans in order of time; those that touch are one."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def add(self, begun: float, until: float) -> None:
        """From then until now."""
        if self._spans and self._spans[-1][1] == begun:
            begun = self._spans.pop()[0]
        self._spans.append((begun, until))

    @property
    def seconds(self) -> float:
        """All together."""
        return sum(end - begin for begin, end in self._spans)

    def between(self, edges: NDArray[np.float64]) -> NDArray[np.float64]:
        """Busy seconds between each two of ``edges``."""
        ends = np.array([(0.0, 0.0), *self._spans])
        reached = np.concatenate(([0.0], np.cumsum(ends[:, 1] - ends[:, 0])))
        place = np.searchsorted(ends[:, 0], edges, side="right") - 1
        until: NDArray[np.float64] = reached[place] + np.clip(edges, ends[place, 0], ends[place, 1]) - ends[place, 0]
        return np.diff(until)


StopSteps = Callable[[], None]


class SharedMachine:
    """A machine whose workers share its cores: which of them compute now."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._computing: dict[WorkerId, StopSteps] = {}

    def slowdown(self, worker: WorkerId) -> float:
        """What a step of this worker takes now, by what it takes alone."""
        return 1 + self._slowdown * (len(self._computing) - (worker in self._computing))

    def set_computing(self, worker: WorkerId, stop: StopSteps | None) -> None:
        """From now on this worker computes, and ``stop`` ends its steps after the present one; None: it has nothing."""
        before = len(self._computing)
        if stop is None:
            self._computing.pop(worker, None)
        else:
            self._computing[worker] = stop
        if self._slowdown and len(self._computing) != before:
            for other, theirs in tuple(self._computing.items()):
                if other != worker:
                    theirs()


class SimLink:
    """One direction of one link."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self.free_at = 0.0  # seconds: when what was given to it so far is through
        self.busy_s = 0.0

    def transfer(self, nbytes: float, now: float, other: SimLink | None = None) -> float:
        """When ``nbytes`` that start now have been transferred; ``other`` is busy with them, too."""
        begin = max(now, self.free_at, other.free_at if other is not None else 0.0)
        took = nbytes / min(self._bytes_s, other._bytes_s if other is not None else self._bytes_s)
        for wire in (self, other):
            if wire is not None:
                wire.free_at = begin + took
                wire.busy_s += took
        return begin + took


class SimTier:
    """A tier of ``capacity`` blocks.  The least recently used is evicted first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._blocks)

    def insert(self, block: BlockHash) -> BlockHash | None:
        """Have this block, as the one used last; returns the one that had to leave."""
        if not self.capacity:
            return block
        self._blocks[block] = None
        self._blocks.move_to_end(block)
        return self._blocks.popitem(last=False)[0] if len(self._blocks) > self.capacity else None


class SimTiers:
    """Host memory above a disk."""

    def __init__(self, host: int, disk: int) -> None:
        self._tiers = (SimTier(host), SimTier(disk))
        self.read = [0, 0]  # blocks, of each

    def __contains__(self, block: BlockHash) -> bool:
        return any(block in tier for tier in self._tiers)

    def insert(self, block: BlockHash) -> list[tuple[BlockHash, int]]:
        """The device gives this block up.  Which blocks now stand in which tier at best: 1 host, 2 disk, 0 none."""
        moved, leaving = [], block
        for number, tier in enumerate(self._tiers, 1):
            dropped = tier.insert(leaving)
            if dropped != leaving:
                moved.append((leaving, number))
            if dropped is None:
                return moved
            leaving = dropped
        return moved if leaving in self else [*moved, (leaving, 0)]

    def nearest(self) -> Iterator[tuple[BlockHash, int]]:
        """Every block, and the nearest tier that has it: 1 host, 2 disk."""
        host, disk = self._tiers
        yield from ((block, 1) for block in host)
        yield from ((block, 2) for block in disk if block not in host)

    def count_blocks(self, hashes: Sequence[BlockHash], start: int, limit: int) -> tuple[int, int]:
        """Count the blocks from ``start`` on, up to the first that is in no tier: how many are in host memory, and how
        many on disk only."""
        host, disk = self._tiers
        counts = [0, 0]
        for block in hashes[start:limit]:
            if block in host:
                counts[0] += 1
            elif block in disk:
                counts[1] += 1
            else:
                break
        return counts[0], counts[1]
