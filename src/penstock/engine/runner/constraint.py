"""What the grammar of one answer allows for its next tokens, as bit masks for the sampler.

The state follows from the request's output alone: a preempted answer, or one that another worker began, is read again
from its first token.  A mask is worked out on another thread while the step that it is for is computed::

    quick   step | forward ......... | draw |        masks are there before the logits are
                 | mask |
    late    step | forward ......... | draws nothing | next steps, without the answer | step | forward | draw |
                 | mask .....................................................|

An answer whose mask is late sits steps out until it is there, so that no other answer waits for it for longer than
``Patience.wait_s``.  Which step a token is drawn in changes nothing about the token.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.grammar.matcher import Matcher, mask_words
from penstock.types import RequestId

if TYPE_CHECKING:
    from penstock.engine.core.request import Request

SLOW_NICENESS = 10
"""Of the thread for answers whose masks are slow: it gives way to those who compute."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a step waits for masks."""

    wait_s: float | None = None  # once the logits are there, for all its rows together; None: however long it takes
    slow_s: float = 0.002  # CPU time of a mask from which on the answer's next ones are worked out before its steps


class MaskJob:
    """The masks of one answer's next token, and of those after each token of a draft.

    Made, and looked at, by the thread that computes steps; ``run`` by whichever thread comes to it first.
    """

    def __init__(self, constraint: Constraint, new: Sequence[int], count: int, draft: Sequence[int] = ()) -> None:
        """``new``: tokens that the matcher does not know yet, the last of the ``count`` of the answer."""
        self.constraint = constraint
        self.count = count
        self.draft = draft
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.masks: list[NDArray[np.uint32]] = []
        self.ends_after: int | None = None  # tokens of the draft after which there is no going on
        self.seconds = 0.0  # of this thread's time
        self._new = new

    def run(self) -> None:
        """Work them out.  Lets other threads run meanwhile."""
        began = time.thread_time()
        try:
            self.constraint.work_out(self, self._new)
        except BaseException as error:  # noqa: BLE001 - told to whoever computes the step
            self.error = error
        finally:
            self.seconds = time.thread_time() - began
            self.done.set()


class Constraint:
    """One request's grammar, and how far its answer has come in it."""

    def __init__(self, request: Request, begin: Callable[[], Matcher]) -> None:
        """``begin``: the grammar's matcher at the beginning of an answer."""
        self._request = request
        self._begin = begin
        self._matcher = begin()
        self._taken = 0  # tokens of the answer that the matcher knows
        self._masks: list[NDArray[np.uint32]] = []
        self.job: MaskJob | None = None  # the last one
        self.slow = False  # the last mask took long
        self.request_id = request.id
        self.late = False  # it was not there in time: what the step has drawn does not count
        self.cut_at: int | None = None  # tokens of the draft after which there is no going on: the answer ends there
        self.stands: int | None = None  # tokens of the draft whose masks were worked out; None: all

    def mask(self, ahead: int = 0) -> NDArray[np.uint32]:
        """[ceil(V / 32)] words for the token after the first ``ahead`` of a draft; written by ``show``."""
        while len(self._masks) <= ahead:
            self._masks.append(np.zeros(mask_words(self._matcher.vocabulary), np.uint32))
        return self._masks[ahead]

    def prepare(self, drawn: Sequence[int], draft: Sequence[int] = ()) -> MaskJob:
        """The job for the next token, and for those after each of ``draft`` unless masks are slow; the last one, if it
        was for the same token.

        ``drawn``: tokens since the request's own output.
        """
        output = self._request.output
        count = len(output) + len(drawn)
        known = self.job
        if known is not None and known.count == count and (self.slow or not draft or not known.done.is_set()):
            return known
        assert known is None or known.done.is_set(), "a mask is being worked out for another token"
        new = (*output[self._taken :], *drawn[max(0, self._taken - len(output)) :])
        self._taken = count
        self.job = MaskJob(self, new, count, () if self.slow else tuple(draft))
        return self.job

    def show(self, draft: Sequence[int], *, in_time: bool) -> None:
        """A step draws now: the masks of the last job, if it is done; else all tokens, and nothing of it counts."""
        job = self.job
        assert job is not None, "prepared before"
        self.late = not in_time
        self.cut_at = self.stands = None
        worked_out: Sequence[NDArray[np.uint32]] = ()
        if in_time:
            alike = _alike(job.draft, draft)
            worked_out = job.masks[: alike + 1]
            self.stands = alike if alike < len(draft) else None
            self.cut_at = job.ends_after if job.ends_after is not None and job.ends_after <= alike else None
        for ahead in range(len(draft) + 1):
            if ahead < len(worked_out):
                self.mask(ahead)[:] = worked_out[ahead]
            else:
                self.mask(ahead).fill(0xFFFFFFFF)

    def work_out(self, job: MaskJob, new: Sequence[int]) -> None:
        """The masks of a job, on any thread; one at a time.

        After a draft token that the grammar forbids comes nothing that could stand, so nothing is worked out any more.
        """
        count, draft, known = job.count, job.draft, 0
        goes_on = (not new or self._matcher.take(new)) and self._write(job, count)
        while goes_on and known < len(draft) and _allows(job.masks[known], draft[known]):
            goes_on = self._matcher.take(draft[known : known + 1]) and self._write(job, count + known + 1)
            known += 1
        if not goes_on:
            job.ends_after = known
            del job.masks[known:]
            job.masks.append(self._end_only())
            self._matcher, self._taken = self._begin(), 0  # one that has failed cannot go back
        elif known:
            self._matcher.give_back(known)

    def _write(self, job: MaskJob, count: int) -> bool:
        """The mask after ``count`` tokens of the answer.  False when there is no going on."""
        mask = np.zeros(mask_words(self._matcher.vocabulary), np.uint32)
        if not self._matcher.write_mask(mask):
            return False
        if count < self._request.sampling.min_tokens:
            self._without_stops(mask)
        job.masks.append(mask)
        return True

    def _end_only(self) -> NDArray[np.uint32]:
        mask = np.zeros(mask_words(self._matcher.vocabulary), np.uint32)
        for token in self._matcher.end_tokens:
            mask[token // 32] |= np.uint32(1 << token % 32)
        return mask

    def _without_stops(self, mask: NDArray[np.uint32]) -> None:
        """``min_tokens``: stop tokens are not drawn yet, unless the grammar leaves nothing else."""
        before = mask.copy()
        for token in self._request.sampling.stop_token_ids:
            mask[token // 32] &= ~np.uint32(1 << token % 32)
        if not mask.any():
            mask[:] = before


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _allows(mask: NDArray[np.uint32], token: int) -> bool:
    return bool(mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))


Work = tuple[Constraint, Sequence[int], Sequence[int]]
"""Whose masks to write, after which tokens and for which draft."""


class MaskThreads:
    """Works masks out beside the steps of one runner: those of a step on one thread, and slow ones on another.

    The threads exist once a grammar was followed.
    """

    def __init__(self, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="slow-masks", initializer=_give_way)
        self._under_way: dict[RequestId, MaskJob] = {}  # of answers that sit out

    def begin(self, work: Sequence[Work], *, may_sit_out: bool = True) -> Lookahead:
        """The masks of a step; ``may_sit_out``: so may its rows."""
        quick: deque[MaskJob] = deque()
        jobs: list[tuple[MaskJob, Sequence[int]]] = []
        for constraint, drawn, draft in work:
            before = constraint.job
            job = constraint.prepare(drawn, draft)
            jobs.append((job, draft))
            if job is before:
                continue  # worked out before the step, or on its way
            if constraint.slow:
                self._slow.submit(job.run)
            else:
                quick.append(job)
        if quick:
            self._beside.submit(_drain, quick)
        return Lookahead(self, jobs, quick, self.patience.wait_s if may_sit_out else None)

    def shown(self, job: MaskJob, draft: Sequence[int]) -> None:
        """The step goes on to draw.  Raises what went wrong with the job."""
        constraint = job.constraint
        in_time = job.done.is_set()
        if job.error is not None:
            raise job.error
        constraint.show(draft, in_time=in_time)
        if in_time:
            constraint.slow = job.seconds > self.patience.slow_s * max(1, len(job.masks))
        else:
            self._under_way[constraint.request_id] = job

    def go_on(self, constraint: Constraint, drawn: Sequence[int]) -> None:
        """A step has drawn these tokens.  Where masks are slow the next one is worked out before the answer's next
        step."""
        if not constraint.slow or constraint.late or constraint.cut_at is not None or not drawn:
            return
        job = self._under_way[constraint.request_id] = constraint.prepare(drawn)
        self._slow.submit(job.run)

    def sitting_out(self) -> frozenset[RequestId]:
        """Requests whose masks are still being worked out."""
        if self._under_way:
            self._under_way = {name: job for name, job in self._under_way.items() if not job.done.is_set()}
        return frozenset(self._under_way)

    def forget(self, request: RequestId) -> None:
        """Nobody waits for the masks of this request any more."""
        self._under_way.pop(request, None)


class Lookahead:
    """The masks of one step: begun on a thread beside the one that computes it, finished by whoever comes first.

    A machine whose cores are all busy may not let that thread run in time.
    """

    def __init__(
        self,
        threads: MaskThreads,
        jobs: Sequence[tuple[MaskJob, Sequence[int]]],
        quick: deque[MaskJob],
        wait_s: float | None,
    ) -> None:
        """``quick``: those that any thread may take; ``wait_s``: for all jobs together, None: for ever."""
        self._threads = threads
        self._jobs = jobs
        self._quick = quick
        self._wait_s = wait_s

    def finish(self) -> None:
        """Returns when all masks are there, or when they are late.  Raises what went wrong."""
        deadline = None if self._wait_s is None else time.monotonic() + self._wait_s
        _drain(self._quick, deadline)
        for job, _ in self._jobs:
            job.done.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        for job, draft in self._jobs:
            self._threads.shown(job, draft)


def _drain(jobs: deque[MaskJob], deadline: float | None = None) -> None:
    """Run them, those that another thread does not come to first."""
    while jobs and (deadline is None or time.monotonic() < deadline):
        try:
            job = jobs.popleft()
        except IndexError:  # the other thread has taken the last
            return
        job.run()


def _give_way() -> None:
    """This thread is nicer than others of the process."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + SLOW_NICENESS)
