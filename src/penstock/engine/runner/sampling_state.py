"""What is kept of one request between steps: how its next token is sampled, and which pages it has.

Everything here can be rebuilt from the request, and is when the request object is another one (a later epoch) or has
fewer output tokens than were counted.

A grammar's masks for the next tokens follow from the request's output alone.  A mask is computed on another thread
while the step that it is for is computed::

    quick   step | forward ......... | sample |        masks are there before the logits are
                 | mask |
    late    step | forward ......... | samples nothing | next steps, without the request | step | forward | sample |
                 | mask .....................................................|

A request whose mask is late sits out steps until it is there, so that no other request waits for it for longer than
``MaskWait.wait_s``.  Which step a token is sampled in changes nothing about the token.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.errors import GrammarRefused
from penstock.grammar.matcher import GrammarMatcher, mask_words
from penstock.kernels.sampling import SampleRow
from penstock.types import Grammar, RequestId, SamplingParams

if TYPE_CHECKING:
    from penstock.engine.core.request import Request

SLOW_NICENESS = 10
"""Of the thread for answers whose masks are slow: it gives way to those who compute."""


@dataclass(frozen=True, slots=True)
class MaskWait:
    """How long a step waits for masks."""

    wait_s: float | None = None  # once the logits are there, for all its rows together; None: however long it takes
    slow_s: float = 0.002  # CPU time of a mask from which on the answer's next ones are worked out before its steps


class MaskJob:
    """The masks of one answer's next token, and of those after each token of a draft.

    Made, and looked at, by the thread that computes steps; ``run`` by whichever thread comes to it first.
    """

    def __init__(
        self, constraint: GrammarConstraint, new: Sequence[int], count: int, draft: Sequence[int] = ()
    ) -> None:
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
            self.constraint.compute_masks(self, self._new)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that computes the step
            self.error = error
        finally:
            self.seconds = time.thread_time() - began
            self.done.set()


class GrammarConstraint:
    """One request's grammar, and how far its answer has come in it."""

    def __init__(self, request: Request, begin: Callable[[], GrammarMatcher]) -> None:
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
        self.masked_drafts: int | None = None  # tokens of the draft whose masks were worked out; None: all

    def mask(self, ahead: int = 0) -> NDArray[np.uint32]:
        """[ceil(V / 32)] words for the token after the first ``ahead`` of a draft; written by ``apply_masks``."""
        while len(self._masks) <= ahead:
            self._masks.append(np.zeros(mask_words(self._matcher.vocabulary), np.uint32))
        return self._masks[ahead]

    def next_job(self, drawn: Sequence[int], draft: Sequence[int] = ()) -> MaskJob:
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

    def apply_masks(self, draft: Sequence[int], *, in_time: bool) -> None:
        """A step draws now: the masks of the last job, if it is done; else all tokens, and nothing of it counts."""
        job = self.job
        assert job is not None, "prepared before"
        self.late = not in_time
        self.cut_at = self.masked_drafts = None
        worked_out: Sequence[NDArray[np.uint32]] = ()
        if in_time:
            alike = _alike(job.draft, draft)
            worked_out = job.masks[: alike + 1]
            self.masked_drafts = alike if alike < len(draft) else None
            self.cut_at = job.ends_after if job.ends_after is not None and job.ends_after <= alike else None
        for ahead in range(len(draft) + 1):
            if ahead < len(worked_out):
                self.mask(ahead)[:] = worked_out[ahead]
            else:
                self.mask(ahead).fill(0xFFFFFFFF)

    def compute_masks(self, job: MaskJob, new: Sequence[int]) -> None:
        """The masks of a job, on any thread; one at a time.

        After a draft token that the grammar forbids comes nothing that could stand, so nothing is worked out any more.
        """
        count, draft, known = job.count, job.draft, 0
        goes_on = (not new or self._matcher.accept_tokens(new)) and self._write(job, count)
        while goes_on and known < len(draft) and _allows(job.masks[known], draft[known]):
            goes_on = self._matcher.accept_tokens(draft[known : known + 1]) and self._write(job, count + known + 1)
            known += 1
        if not goes_on:
            job.ends_after = known
            del job.masks[known:]
            job.masks.append(self._end_only())
            self._matcher, self._taken = self._begin(), 0  # one that has failed cannot go back
        elif known:
            self._matcher.rollback(known)

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


MaskWork = tuple[GrammarConstraint, Sequence[int], Sequence[int]]
"""Whose masks to write, after which tokens and for which draft."""


class MaskThreads:
    """Computes masks while one runner computes steps: those of a step on one thread, slow ones on another.

    The threads exist once a grammar was followed.
    """

    def __init__(self, patience: MaskWait | None = None) -> None:
        self.mask_wait = patience or MaskWait()
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="slow-masks", initializer=_give_way)
        self._under_way: dict[RequestId, MaskJob] = {}  # of answers that sit out

    def begin(self, work: Sequence[MaskWork], *, may_sit_out: bool = True) -> StepMasks:
        """The masks of a step; ``may_sit_out``: so may its rows."""
        quick: deque[MaskJob] = deque()
        jobs: list[tuple[MaskJob, Sequence[int]]] = []
        for constraint, drawn, draft in work:
            before = constraint.job
            job = constraint.next_job(drawn, draft)
            jobs.append((job, draft))
            if job is before:
                continue  # worked out before the step, or on its way
            if constraint.slow:
                self._slow.submit(job.run)
            else:
                quick.append(job)
        if quick:
            self._beside.submit(_drain, quick)
        return StepMasks(self, jobs, quick, self.mask_wait.wait_s if may_sit_out else None)

    def apply(self, job: MaskJob, draft: Sequence[int]) -> None:
        """The step goes on to draw.  Raises what went wrong with the job."""
        constraint = job.constraint
        in_time = job.done.is_set()
        if job.error is not None:
            raise job.error
        constraint.apply_masks(draft, in_time=in_time)
        if in_time:
            constraint.slow = job.seconds > self.mask_wait.slow_s * max(1, len(job.masks))
        else:
            self._under_way[constraint.request_id] = job

    def begin_next(self, constraint: GrammarConstraint, drawn: Sequence[int]) -> None:
        """A step has drawn these tokens.  Where masks are slow the next one is worked out before the answer's next
        step."""
        if not constraint.slow or constraint.late or constraint.cut_at is not None or not drawn:
            return
        job = self._under_way[constraint.request_id] = constraint.next_job(drawn)
        self._slow.submit(job.run)

    def waiting_requests(self) -> frozenset[RequestId]:
        """Requests whose masks are still being worked out."""
        if self._under_way:
            self._under_way = {name: job for name, job in self._under_way.items() if not job.done.is_set()}
        return frozenset(self._under_way)

    def remove(self, request: RequestId) -> None:
        """The request has left."""
        self._under_way.pop(request, None)


class StepMasks:
    """The masks of one step: begun on another thread, finished by the thread that comes first.

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
            self._threads.apply(job, draft)


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


FIRST_CAPACITY = 64


class TokenCounts:
    """How often each id stands in an answer, as two arrays; constant time a token."""

    __slots__ = ("_counts", "_ids", "_place", "total")

    def __init__(self) -> None:
        self._ids = np.empty(FIRST_CAPACITY, np.int32)
        self._counts = np.empty(FIRST_CAPACITY, np.int32)
        self._place: dict[int, int] = {}
        self.total = 0

    @property
    def ids(self) -> NDArray[np.int32]:
        """Distinct ids, in order of first appearance."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> NDArray[np.int32]:
        """How often each of ``ids``."""
        return self._counts[: len(self._place)]

    def add(self, token: int) -> None:
        """One more token."""
        self.total += 1
        place = self._place.get(token)
        if place is not None:
            self._counts[place] += 1
            return
        place = len(self._place)
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
        self._ids[place] = token
        self._counts[place] = 1
        self._place[token] = place


class SamplingState:
    """One request's state."""

    __slots__ = ("_banned", "_counts", "_pages", "_pages_P", "_plain", "_row", "constraint", "request")

    def __init__(self, request: Request, constraint: GrammarConstraint | None = None) -> None:
        sampling = request.sampling
        self.request = request
        self.constraint = constraint  # bans stop tokens itself, as far as they can be spared
        self._row = SampleRow(
            seed=sampling.seed,
            position=0,
            choice=sampling.choice,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            bias_ids=np.array(list(sampling.logit_bias), np.int32),
            bias_values=np.array(list(sampling.logit_bias.values()), np.float32),
            logprobs=sampling.logprobs,
        )
        if sampling.repetition_penalty != 1.0:
            self._row.prompt_ids = np.unique(np.array(request.prompt, np.int32))
        penalised = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
        self._counts = TokenCounts() if penalised else None
        self._banned = banned_ids(sampling, constrained=constraint is not None)
        cut = sampling.top_k is not None or sampling.top_p < 1.0 or sampling.min_p > 0.0
        self._plain = constraint is None and not (
            cut or penalised or sampling.logit_bias or sampling.banned or sampling.logprobs is not None
        )
        self._pages: list[list[int]] = []
        self._pages_P: list[NDArray[np.int32]] = []

    def sample_row(self, position: int, drawn: Sequence[int]) -> SampleRow:
        """How the token at ``position`` is drawn, after the request's output and ``drawn``, drawn since.

        The row is the answer's own and is overwritten by the next call.
        """
        row = self._row
        row.position = position
        row.banned_ids = self._banned_at(position)
        if self._counts is not None:
            row.output_ids, row.output_counts = self._count(self._counts, drawn)
        if self.constraint is not None:
            row.allowed = self.constraint.mask()
        return row

    def draft_sample_rows(self, position: int, draft: Sequence[int]) -> list[SampleRow]:
        """How the tokens at ``position`` and the positions after it are drawn: each after so much of ``draft``.

        Rows of their own: drawing from one and guessing wrongly in the next leaves nothing behind.
        """
        found: list[SampleRow] = []
        first = self.sample_row(position, ())
        ids, counts = first.output_ids, first.output_counts
        for index in range(len(draft) + 1):
            if self._counts is not None:
                output = np.array([*self.request.output, *draft[:index]], np.int32)
                ids, often = np.unique(output, return_counts=True)
                counts = often.astype(np.int32)
            found.append(
                replace(
                    first,
                    position=position + index,
                    banned_ids=self._banned_at(position + index),
                    output_ids=ids,
                    output_counts=counts,
                    allowed=None if self.constraint is None else self.constraint.mask(index),
                )
            )
        return found

    def gumbel_only(self, position: int) -> bool:
        """Whether the token at ``position``, and so every later one, is sampled by temperature alone."""
        return self._plain and not len(self._banned_at(position))

    def _banned_at(self, position: int) -> NDArray[np.int32]:
        """Ids that cannot be drawn for this position."""
        begin, short, later = self._banned
        drawn = position - len(self.request.prompt)
        return begin if drawn == 0 else short if drawn < self.request.sampling.min_tokens else later

    def pages(self) -> list[NDArray[np.int32]]:
        """The request's pages by block, one array a group of layers.  Compared on every call: a preempted request comes
        back with others."""
        held = [own.pages for own in self.request.page_tables]
        if held != self._pages:
            self._pages = [list(pages) for pages in held]
            self._pages_P = [np.array(pages, np.int32) for pages in held]
        return self._pages_P

    def _count(self, counts: TokenCounts, drawn: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        output = self.request.output
        known = len(output) + len(drawn)
        if counts.total > known:
            counts = self._counts = TokenCounts()
        for index in range(counts.total, known):
            counts.add(output[index] if index < len(output) else drawn[index - len(output)])
        return counts.ids, counts.counts


TokenIdArray = NDArray[np.int32]


def banned_ids(sampling: SamplingParams, *, constrained: bool) -> tuple[TokenIdArray, TokenIdArray, TokenIdArray]:
    """What cannot be drawn: first, while the answer is too short to end, and later."""
    ends = sampling.stop_token_ids if sampling.min_tokens and not constrained else ()
    short = (*sampling.banned, *ends)
    first, early, later = (
        np.array(ids, np.int32) for ids in ((*short, *sampling.banned_first), short, sampling.banned)
    )
    return first, early, later


def no_grammars(grammar: Grammar) -> GrammarMatcher:
    """For engines that follow none."""
    raise GrammarRefused("this engine follows no grammar")


class SamplingStates:
    """All answers by request."""

    def __init__(self, matcher_of: Callable[[Grammar], GrammarMatcher] = no_grammars) -> None:
        """``matcher_of``: a grammar's matcher at the beginning of an answer, for requests that hold none themselves."""
        self._by_id: dict[str, SamplingState] = {}
        self._matcher_of = matcher_of

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request: Request) -> SamplingState:
        """The state of this very request object, made anew if it belonged to an earlier one of the same id."""
        answer = self._by_id.get(request.id)
        if answer is None or answer.request is not request:
            grammar, constraint = request.sampling.grammar, None
            if grammar is not None:
                in_use = request.grammar
                begin = partial(self._matcher_of, grammar) if in_use is None else in_use.matcher
                constraint = GrammarConstraint(request, begin)
            answer = self._by_id[request.id] = SamplingState(request, constraint)
        return answer

    def remove(self, request: str) -> None:
        """Drop a request's state, if there is any."""
        self._by_id.pop(request, None)
