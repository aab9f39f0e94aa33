"""One request on workers that may fail: a pure state machine from events to effects.

A request is submitted in *epochs*.  Messages of an earlier epoch, or of a worker without a stage in the current one,
are ignored, so a worker that was given up and wakes again does no harm.  Delivered tokens are kept; a new epoch submits
prompt and delivered tokens, and the output continues unchanged: one prompt, one answer (docs/determinism.md).

::

    WAITING --placed--> FLYING --finish--> DONE
       ^                  |
       +---lost, returned-+        epoch + 1, remaining stages cancelled

A request may migrate between workers while it is decoded: a stage *joins*, and with its first token the stage before it
is over.  Each submitted stage ends exactly once, by ``CancelStage`` or ``StageEnded``
(tests/unit/router/test_request_any_order.py).  Knows no fleet, links or clock.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import msgspec

from penstock.config.limits import FailoverConfig, RequestLimits
from penstock.errors import (
    DeadlineMissed,
    NoWorkers,
    PenstockError,
    QueueFull,
    RequestError,
    StalledRequest,
    WorkerLost,
)
from penstock.router.decide import ChosenWorker, Decision, PlacementRequest
from penstock.router.effects import (
    AbortMigration,
    CancelStage,
    DeliverTokens,
    FailRequest,
    RequestEffects,
    StageEnded,
    SubmitStage,
    WaitForWorker,
)
from penstock.router.poison import CrashRecord
from penstock.router.submission import (
    build_migration_submit,
    build_submits,
    has_mixed_numerics,
    new_tokens,
    recipient_of,
    remaining_qos,
)
from penstock.types import (
    BlockHash,
    FinishReason,
    Qos,
    RequestStage,
    SamplingParams,
    TokenBatch,
    TokenLogprob,
    ValidRequest,
    WorkerId,
)
from penstock.wire.gateway_messages import PageSource, ReturnReason, TokenItem


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverLimits:
    """When a request is given up."""

    max_attempts: int  # submissions without a new token in between
    first_byte_s: float  # to the first token, of a request that says nothing else
    stall_s: float  # between two tokens
    poison_tokens: int = 8  # new tokens clear a request of the deaths before them

    @classmethod
    def from_config(cls, failover: FailoverConfig, limits: RequestLimits) -> FailoverLimits:
        """The limits as configured."""
        return cls(
            max_attempts=failover.max_attempts,
            first_byte_s=limits.first_byte_s,
            stall_s=limits.stall_s,
            poison_tokens=failover.poison_tokens,
        )

    def first_token_s(self, qos: Qos) -> float:
        """Seconds to the first token."""
        return self.first_byte_s if qos.max_wait_s is None else qos.max_wait_s


def context_exceeded(request: ValidRequest, longest: float, *, started: bool) -> PenstockError:
    """No worker has the memory for the request.  ``longest``: the longest context of any worker, if that is why."""
    known, left = len(request.prompt), request.sampling.max_tokens
    if request.open_ended:
        text = f"No worker has the KV memory for {known} tokens of prompt and an answer."
    else:
        text = f"No worker has the KV memory for {known} tokens of prompt and {left} of answer."
    if longest < math.inf:
        text += f" The longest context of any worker is {longest:.0f} tokens."
    return WorkerLost(text) if started else RequestError(text, code="context_length_exceeded")


def message_too_large() -> PenstockError:
    """A message of this request exceeds the largest frame."""
    return RequestError(
        "This request, or a step of its answer, does not fit into one message between processes. Ask for fewer "
        "log-probabilities, or send a shorter prompt.",
        code="message_too_large",
    )


def timed_out(limit_s: float, *, started: bool, waiting: bool, bounded: bool = False) -> PenstockError:
    """No token came within the limit.  ``waiting``: no worker even had it; ``bounded``: it may wait for no longer."""
    if bounded and not started:
        return DeadlineMissed(f"The request waited for {limit_s:g} s, as long as it may, and no token was computed.")
    what = "next" if started else "first"
    if waiting:
        return NoWorkers(f"No worker was free to compute the {what} token within {limit_s:g} s.")
    return StalledRequest(f"No worker computed the {what} token within {limit_s:g} s.")


def implied_finish(sampling: SamplingParams, emitted: Sequence[int]) -> FinishReason | None:
    """The finish reason that follows from the delivered tokens alone, or None."""
    count = len(emitted)
    if count and emitted[-1] in sampling.stop_token_ids:  # before ``min_tokens``, where a grammar leaves nothing else
        return FinishReason.STOP
    return FinishReason.LENGTH if count >= sampling.max_tokens else None


LOST_PART_S = 1.0
"""How long missing parts are awaited after the last one that came."""


class PromptLogprobs:
    """Collects the prompt's log-probabilities of one epoch, which arrive in parts."""

    __slots__ = ("_kept", "_last", "_most", "_parts", "_since")

    def __init__(self, request: ValidRequest) -> None:
        self._most = 0 if request.sampling.prompt_logprobs is None else max(0, len(request.prompt) - 1)
        self._parts: dict[int, tuple[TokenLogprob, ...]] = {}
        self._kept = 0  # of those
        self._last: TokenItem | None = None
        self._since = 0.0  # when the last part came

    def assemble(self, item: TokenItem, now: float) -> TokenItem | None:
        """The item with all that other parts have brought; None while some miss."""
        last = self._last
        received = item.prompt_logprobs or ()
        if item.prompt_start not in self._parts and self._kept + len(received) <= self._most:
            self._parts[item.prompt_start] = received
            self._kept += len(received)
        if last is None and not item.prompt_more:
            last, self._last, self._since = item, item, now
        if last is None:
            return None
        whole: list[TokenLogprob] = []
        while len(whole) < self._most and (part := self._parts.get(len(whole))):
            whole += part
        if len(whole) < last.prompt_start + len(last.prompt_logprobs or ()):
            return None
        self._last = None
        return msgspec.structs.replace(last, prompt_logprobs=tuple(whole), prompt_start=0)

    def is_incomplete(self, now: float) -> bool:
        """Whether the last part has come and others have been missing for ``LOST_PART_S``."""
        return self._last is not None and now - self._since >= LOST_PART_S


SILENT_STAGE_S = 1.0
"""How long a run may be silent until its worker is asked about it: a message of either side may have been lost."""


@dataclass(slots=True)
class StageRun:
    """The run of one stage on a worker."""

    stage: RequestStage
    worker: WorkerId
    incarnation: int
    last_seen: float  # when it was sent, or said something, or was asked about last
    responded: bool = False
    ended: bool = False
    migrating: bool = False  # it fetches an answer that another run still writes

    @property
    def awaits_response(self) -> bool:
        """Whether more messages of it are expected.  A prefill stage sends one."""
        return not self.ended and not (self.responded and self.stage is RequestStage.PREFILL)


PREFILL_TOKEN_WAIT_S = 0.25
"""How long a decode worker's tokens wait for the prefill worker's message, which alone has the prompt's facts."""

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 1.0
"""Between submissions without a new token; the first resubmission is immediate."""

CHECK_INTERVAL_S = 0.25
"""Between two checks of a request without new tokens for a second, and at least between any two checks."""

MAX_CHECK_INTERVAL_S = 1.0
"""The same for one without new tokens for 16 seconds; before that, it grows from four seconds on."""

DEADLINE_MARGIN_S = 0.001
"""A check for a deadline comes so long after it, so that it finds the deadline missed."""

AVOID_S = 0.25
"""How long a worker that returned a request because its queue is full, or it drains, is avoided for it."""

DISTRUST_S = 5.0
"""How long the other end of a failed transfer is avoided for a request, unless there is no other worker."""


_NOBODY: Mapping[tuple[WorkerId, int], float] = MappingProxyType({})
"""Shared by requests without any: a dictionary of its own would take 64 bytes of each stream."""


class RequestPhase(Enum):
    """The state of a routed request."""

    WAITING = "waiting"
    FLYING = "flying"
    DONE = "done"


class RoutedRequest:
    """The state machine of one request.  Methods are its events; each returns the effects, in order.

    The first call is ``begin``.  After DONE every event is ignored.
    """

    __slots__ = (
        "_attempts",
        "_avoid",
        "_base",
        "_distrusted_until",
        "_early",
        "_expected",
        "_failures",
        "_first_held",
        "_idle_since",
        "_last_reason",
        "_limits",
        "_prompt_logprobs",
        "_runs",
        "_started",
        "_turned_away",
        "crashes",
        "emitted",
        "epoch",
        "identity",
        "phase",
        "progress_at",
        "request",
    )

    def __init__(self, request: ValidRequest, limits: FailoverLimits, now: float) -> None:
        self.request = request
        self.phase = RequestPhase.WAITING
        self.epoch = 1
        # What the client has, in order, 4 bytes a token; it was not all delivered here.
        self.emitted = array("I", request.begun.tokens)
        self.identity = request.begun.identity  # of all workers of this answer, once one of them spoke
        self._limits = limits
        self.progress_at = now  # when the last token was delivered, or it began
        self._started = False  # has anything been delivered?
        self._attempts = 0  # submissions since the last new token
        self._failures = 0  # submissions that have failed since then
        self._turned_away = 0  # and those that came back because of a full queue
        self._expected = 0  # expected output of a request without a length
        self._runs: list[StageRun] = []
        self._base = 0  # tokens emitted when this epoch was submitted
        # index -> what came before its turn, and from whom
        self._early: dict[int, tuple[TokenItem, StageRun]] | None = None
        self._first_held: float | None = None  # since when a decode run's tokens wait for the prefill run's word
        self._avoid = self._distrusted_until = _NOBODY  # (worker, incarnation) -> until when
        self._last_reason: ReturnReason | None = None
        self._prompt_logprobs: PromptLogprobs | None = None  # once a part of them came
        self._idle_since = now  # when this epoch was submitted, or a run of it said something last
        self.crashes = CrashRecord(limits.poison_tokens)

    # --- placing ----------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> RequestEffects:
        """Begin: ask for workers."""
        return (WaitForWorker(now),)

    def placement_request(self, now: float) -> PlacementRequest:
        """The request as the placement sees it."""
        return PlacementRequest(
            request=self.request,
            emitted=len(self.emitted),
            identity=self.identity,
            avoid=frozenset(who for who, until in self._avoid.items() if until > now),
            distrusted=frozenset(who for who, until in self._distrusted_until.items() if until > now),
        )

    def on_placed(self, decision: Decision, root: BlockHash, now: float) -> RequestEffects:
        """A decision was made.  ``root`` is the hash chain's root for the decision's identity and this request."""
        if self.phase is not RequestPhase.WAITING:
            return ()
        if not decision.stages or decision.identity is None:
            return self._unplaced(decision.longest_context, decision.longest_prefill_context, now)
        self.phase = RequestPhase.FLYING
        self.identity = decision.identity
        self._base = len(self.emitted)
        self._attempts += 1
        self._expected = decision.expected_tokens
        self._runs = [StageRun(chosen.stage, chosen.worker, chosen.incarnation, now) for chosen in decision.stages]
        self._idle_since = now
        qos = remaining_qos(self.request.qos, now - self.progress_at, started=self._started)
        sent = build_submits(self.request, self.epoch, self.emitted, decision, root, now=now, qos=qos)
        return tuple(
            SubmitStage(chosen.worker, chosen.incarnation, submit, chosen.tokens, chosen.work)
            for chosen, submit in zip(decision.stages, sent, strict=True)
        )

    @property
    def after_failure(self) -> bool:
        """Whether the next submission follows a failure."""
        return self.epoch > 1 and self._last_reason is not None and self._last_reason.is_failure

    @property
    def fails_repeatedly(self) -> bool:
        """Whether it has failed twice without a new token.  The first retry is not charged to the retry budget."""
        return self._failures > 1

    def _unplaced(self, longest: float, longest_read: float, now: float) -> RequestEffects:
        """No worker can serve now.  Wait, unless waiting cannot help.

        ``longest``: the longest context of any worker that writes answers.  An output without a given length
        ends with that.  ``longest_read``: the same of those that read prompts.
        """
        request = self.request
        more = 1 if request.open_ended else request.sampling.max_tokens - len(self.emitted)
        known = len(request.prompt) + len(self.emitted)
        hopeless = request.pooling is None and known + more > longest
        if hopeless and request.open_ended and self.emitted:
            self.phase = RequestPhase.DONE
            return (DeliverTokens(TokenBatch(tokens=(), finish=FinishReason.LENGTH)),)
        if request.pooling is None and known + 1 > longest_read:  # the prefill worker samples one token
            hopeless, longest = True, min(longest, longest_read)
        if hopeless or (self._last_reason is ReturnReason.TOO_LONG and not request.open_ended):
            return self._fail(context_exceeded(request, longest, started=self._started))
        if self._last_reason is ReturnReason.QUEUE_FULL and not self._started:
            return self._fail(QueueFull("All workers' queues are full. Please try again.", retry_after=1))
        soon = min((until for until in self._avoid.values() if until > now), default=math.inf)
        return (WaitForWorker(soon),)

    def can_migrate(self, worker: WorkerId, incarnation: int, epoch: int) -> bool:
        """Whether this worker decodes the request and no migration is in progress."""
        run = self._find_run(worker, incarnation, epoch)
        settled = self._started and not self._early and not any(o.migrating and not o.ended for o in self._runs)
        return settled and run is not None and not run.ended and run.stage is not RequestStage.PREFILL

    def begin_migration(
        self, chosen: ChosenWorker, source: PageSource, root: BlockHash, now: float, *, expected: int = 0
    ) -> RequestEffects:
        """Migrate: ``chosen`` is to continue what ``source`` decodes meanwhile; ``expected``: ``Decision``'s."""
        if self.identity is None:  # nothing was placed
            return ()
        self._runs = [run for run in self._runs if run.worker != chosen.worker]
        self._runs.append(StageRun(RequestStage.DECODE, chosen.worker, chosen.incarnation, now, migrating=True))
        to = recipient_of(chosen, self.identity)
        submit = build_migration_submit(
            self.request, self.epoch, self.emitted, source, root, to=to, now=now, expected=expected
        )
        return (SubmitStage(chosen.worker, chosen.incarnation, submit, chosen.tokens, chosen.work),)

    # --- what workers say -------------------------------------------------------------------------------------------

    def on_tokens(self, item: TokenItem, worker: WorkerId, incarnation: int, now: float) -> RequestEffects:
        """Tokens arrived: those that are next are delivered, what is early is kept, what is known is dropped."""
        run = self._find_run(worker, incarnation, item.epoch)
        if run is None:
            return ()
        run.last_seen = self._idle_since = now
        if item.prompt_more or item.prompt_start:
            if self._prompt_logprobs is None:
                self._prompt_logprobs = PromptLogprobs(self.request)
            whole = self._prompt_logprobs.assemble(item, now)
            if whole is None:
                return ()
            item = whole
        run.responded = True
        if not self._started and run.stage is RequestStage.DECODE and not self._may_begin(item):
            self._hold_early(item, run)
            if self._first_held is None:
                self._first_held = now
            return ()
        effects: RequestEffects = ()
        if run.migrating:  # the stage before it is over
            run.migrating = False
            effects = tuple(self._cancel(other) for other in self._runs if other is not run and not other.ended)
        effects += self._accept(item, run, now)
        return effects + self._accept_early(now)

    def accept_continuation(self, item: TokenItem, worker: WorkerId, incarnation: int, now: float) -> bool:
        """Takes tokens that merely follow those that the client has, all of which it is to get.

        False: nothing was taken; pass the item to ``on_tokens``.  This is the fast path for most tokens.
        """
        sampling = self.request.sampling
        if (
            item.epoch != self.epoch
            or item.index != len(self.emitted)
            or not self._started
            or self.phase is not RequestPhase.FLYING
            or not item.tokens
            or item.finish is not None
            or self._early
            or self.crashes.deaths
            or item.phases
            or item.prompt_logprobs is not None
            or item.index + len(item.tokens) >= sampling.max_tokens  # the last ones say that the answer is over
            or (item.logprobs is None) != (sampling.logprobs is None)
        ):
            return False
        writer = None
        for run in self._runs:
            if run.worker == worker and run.incarnation == incarnation:
                writer = run
            elif run.stage is RequestStage.PREFILL and not run.ended:
                return False
        if (
            writer is None
            or writer.stage is RequestStage.PREFILL
            or not writer.responded
            or writer.migrating
            or writer.ended
        ):
            return False
        writer.last_seen = self._idle_since = self.progress_at = now
        self._attempts = self._failures = self._turned_away = 0
        self.emitted.extend(item.tokens)
        return True

    def decode_tokens_left(self, item: TokenItem) -> int:
        """Tokens that the decode worker still computes after ``item``."""
        left = max(0, self.request.sampling.max_tokens - item.index - len(item.tokens))
        return min(left, self._expected) if self.request.open_ended else left

    def tokens_left(self, item: TokenItem, worker: WorkerId) -> int:
        """Tokens that ``worker`` still computes after ``item``."""
        if any(run.stage is RequestStage.PREFILL and run.worker == worker for run in self._runs):
            return 0
        return self.decode_tokens_left(item)

    def _find_run(self, worker: WorkerId, incarnation: int, epoch: int) -> StageRun | None:
        """The run of this worker and epoch that may still send messages, or None."""
        if self.phase is not RequestPhase.FLYING or epoch != self.epoch:
            return None
        for run in self._runs:
            if run.worker == worker and run.incarnation == incarnation:
                return run
        return None

    def _may_begin(self, item: TokenItem) -> bool:
        """Whether a decode stage's tokens may be the client's first."""
        alone = self._base > 0 and has_mixed_numerics(self.identity)  # no other run will have a word for the client
        return item.index == self._base and (item.prompt_logprobs is not None or alone)

    def _hold_early(self, item: TokenItem, run: StageRun) -> None:
        if self._early is None:
            self._early = {}
        kept = self._early.get(item.index)
        if kept is None or len(item.tokens) > len(kept[0].tokens) or item.finish is not None:
            self._early[item.index] = (item, run)

    def _accept(self, item: TokenItem, run: StageRun, now: float) -> RequestEffects:
        """Deliver what is new in ``item``, or keep it for its turn."""
        have = len(self.emitted)
        if item.index > have:
            self._hold_early(item, run)
            return ()
        skip = have - item.index
        if skip > len(item.tokens) or (skip == len(item.tokens) and item.finish is None):
            return self._own_token(item, run) if self._started else ()
        batch = new_tokens(item, skip, first=not self._started)
        self.emitted.extend(batch.tokens)
        self._attempts = self._failures = self._turned_away = 0
        self.progress_at = now
        self._started = True
        self._first_held = None
        self.crashes.on_progress(len(self.emitted))
        if item.finish is not None:
            return (DeliverTokens(batch), *self._finish(run))
        return (DeliverTokens(batch), *self._own_token(item, run))

    def _accept_early(self, now: float) -> RequestEffects:
        """Deliver early items whose turn has come."""
        effects: RequestEffects = ()
        while self._early and self.phase is RequestPhase.FLYING and (index := min(self._early)) <= len(self.emitted):
            effects += self._accept(*self._early.pop(index), now)
        return effects

    def _own_token(self, item: TokenItem, run: StageRun) -> RequestEffects:
        """A decode run that sampled a token of its own has all its pages: the prefill run is over, its death harmless.

        It is cancelled all the same: the receipt may be lost with the decode worker, and the pages would stay held.
        """
        if run.stage is not RequestStage.DECODE or item.index + len(item.tokens) <= self._base + 1:
            return ()
        return tuple(
            self._cancel(other) for other in self._runs if other.stage is RequestStage.PREFILL and not other.ended
        )

    def _finish(self, writer: StageRun) -> RequestEffects:
        """The response is complete: end its run, and cancel others, which may wait for what will not come."""
        self.phase = RequestPhase.DONE
        # A prefill run is cancelled even so: it holds pages until a decode run, which may be dead, says it wants none.
        ended = () if writer.ended or writer.stage is RequestStage.PREFILL else (self._end(writer),)
        return ended + self._cancel_runs()

    def on_returned(self, epoch: int, text: str, worker: WorkerId, incarnation: int, now: float) -> RequestEffects:
        """A worker returns its stage unfinished.  ``text`` is a ``ReturnReason``, perhaps with details."""
        run, reason = self._find_run(worker, incarnation, epoch), ReturnReason.from_text(text)
        if run is None or run.ended or (reason is ReturnReason.UNKNOWN and not run.awaits_response):
            return ()
        if reason in (ReturnReason.TOO_LONG, ReturnReason.OTHER_PROCESS):
            self._avoid = {**self._avoid, (worker, incarnation): math.inf}
        elif reason in (ReturnReason.QUEUE_FULL, ReturnReason.DRAINING):  # a draining worker may come back
            self._avoid = {**self._avoid, (worker, incarnation): now + AVOID_S}
            self._turned_away += reason is ReturnReason.QUEUE_FULL
        elif reason is ReturnReason.PAGES_LOST:  # this worker is well; the other end may not be
            others = [other for other in self._runs if other is not run]
            self._distrust(others, now)
        elif reason is ReturnReason.TOO_LARGE:
            return (self._end(run), *self._fail(message_too_large()))
        elif reason is ReturnReason.DEADLINE and not self._started:
            return (self._end(run), *self._fail(self._late(self._limits.first_token_s(self.request.qos))))
        elif not reason.harmless:
            self._distrust([run], now)
        if not reason.is_attempt:
            self._attempts = max(0, self._attempts - 1)
        ended = self._end(run)
        if run.migrating:
            self._distrust([run], now)
        if (run.migrating or reason is ReturnReason.HANDED_OVER) and self._writer(but=run) is not None:
            return (ended,)
        return (ended, *self._again(f"{worker} gave it back: {text}", reason, now))

    # --- what happens to workers, clients and time -------------------------------------------------------------------

    def on_worker_lost(self, worker: WorkerId, incarnation: int, reason: str, now: float) -> RequestEffects:
        """A worker has died or is given up.  Its run is cancelled too: the worker may only have been suspended."""
        run = self._find_run(worker, incarnation, self.epoch)
        if run is None or run.ended:
            return ()
        if run.stage is RequestStage.PREFILL and self._first_held is not None and self._can_do_without():
            return (self._end(run), *self._release_held(now))
        writer = self._writer(but=run) if run.migrating else None
        if writer is not None:
            return (self._end(run), AbortMigration(writer.worker, writer.incarnation, self.request.id, self.epoch))
        return self._again(f"{worker} was lost: {reason}", ReturnReason.WORKER_LOST, now)

    def fail_as_poison(self) -> RequestEffects:
        """Fail: the request has crashed too many workers."""
        if self.phase is RequestPhase.DONE:
            return ()
        return self._fail(self.crashes.error(self.request.id, len(self.emitted)))

    def runs_on(self, worker: WorkerId, incarnation: int) -> bool:
        """Whether it has an unfinished stage on this worker."""
        run = self._find_run(worker, incarnation, self.epoch)
        return run is not None and not run.ended

    def silent_stages(self, now: float) -> list[StageRun]:
        """Stages that have been silent for so long that their workers are asked whether they still have them."""
        asked = [run for run in self._runs if now - run.last_seen >= SILENT_STAGE_S and run.awaits_response]
        for run in asked:
            run.last_seen = now
        return asked

    def next_check(self, now: float) -> float:
        """When the next check of it is due: of a run's silence, a deadline, a wait for a prefill."""
        quiet = now - self._idle_since
        if not self._started or quiet >= SILENT_STAGE_S:
            # Without a first token nothing is held only where one worker has all of it: then it merely waits there.
            grows = self._started or (len(self._runs) == 1 and self.request.sampling.prompt_logprobs is None)
            check = now + min(MAX_CHECK_INTERVAL_S, max(CHECK_INTERVAL_S, quiet / 16 if grows else 0.0))
            late = self.progress_at + self._limit_s() + DEADLINE_MARGIN_S
            return late if now < late < check else check
        heard = [run.last_seen for run in self._runs if run.awaits_response]
        return max(now + CHECK_INTERVAL_S, min(heard, default=now) + SILENT_STAGE_S)

    def on_stalled(self, now: float, since: float) -> RequestEffects:
        """No worker of this request has computed or copied anything since ``since``, though all of them report.

        They are chosen again only where there are no others.
        """
        self._distrust(self._runs, now)
        return self._again(f"its workers have made no step for {now - since:.1f} s", ReturnReason.STALLED, now)

    @property
    def idle_since(self) -> float:
        """When it was submitted, or a worker of it said something last."""
        return self._idle_since

    @property
    def pending_stages(self) -> tuple[list[StageRun], float]:
        """The stages of which messages are expected, and since when none of this request's sent any."""
        return [run for run in self._runs if run.awaits_response], self._idle_since

    def on_client_gone(self) -> RequestEffects:
        """The client has disconnected: cancel everything."""
        if self.phase is RequestPhase.DONE:
            return ()
        self.phase = RequestPhase.DONE
        return self._cancel_runs()

    def on_tick(self, now: float, deserted: str | None = None) -> RequestEffects:
        """Check deadlines.  ``deserted``: why no worker can be waited for."""
        if self.phase is RequestPhase.DONE:
            return ()
        if deserted is not None and self.phase is RequestPhase.WAITING:
            return self._fail(NoWorkers(deserted))
        limit = self._limit_s()
        if now - self.progress_at > limit:
            return self._fail(self._late(limit))
        if self._prompt_logprobs is not None and self._prompt_logprobs.is_incomplete(now):
            return self._again("log-probabilities of the prompt were lost on their way", ReturnReason.WORKER_LOST, now)
        held = self._first_held
        if held is not None and now - held >= PREFILL_TOKEN_WAIT_S and self.request.sampling.prompt_logprobs is None:
            return self._release_held(now)
        return ()

    def _limit_s(self) -> float:
        """For which no new token may come."""
        return self._limits.stall_s if self._started else self._limits.first_token_s(self.request.qos)

    def _distrust(self, runs: Sequence[StageRun], now: float) -> None:
        more = {(run.worker, run.incarnation): now + DISTRUST_S for run in runs}
        self._distrusted_until = {**self._distrusted_until, **more}

    def _late(self, limit_s: float) -> PenstockError:
        bounded = self.request.qos.max_wait_s is not None
        return timed_out(limit_s, started=self._started, waiting=self.phase is RequestPhase.WAITING, bounded=bounded)

    def _writer(self, *, but: StageRun) -> StageRun | None:
        """Another run that decodes, or is about to."""
        writers = (run for run in self._runs if run.stage is not RequestStage.PREFILL and not run.ended)
        return next((run for run in writers if run is not but), None)

    def _can_do_without(self) -> bool:
        """Whether the decode stage's tokens suffice without the prefill stage's message."""
        early = self._early or {}
        own = any(item.index + len(item.tokens) > self._base + 1 for item, _ in early.values())
        return own and self._base in early and self.request.sampling.prompt_logprobs is None

    def _release_held(self, now: float) -> RequestEffects:
        self._first_held = None
        return self._accept_early(now)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _again(self, why: str, reason: ReturnReason, now: float) -> RequestEffects:
        """Cancel what is left of this epoch and ask for new workers, if that can help."""
        cancels = self._cancel_runs()
        self.epoch += 1
        self._prompt_logprobs = self._early = None
        self._first_held = None
        self._last_reason = reason
        self._failures += reason.is_failure
        if not self._started:
            self.identity = self.request.begun.identity
        end = implied_finish(self.request.sampling, self.emitted)
        if end is not None:
            self.phase = RequestPhase.DONE
            return (*cancels, DeliverTokens(TokenBatch(tokens=(), finish=end)))
        if self._attempts - self._turned_away >= self._limits.max_attempts:
            self.phase = RequestPhase.DONE
            text = f"Given up after {self._attempts} submissions without a new token; the last: {why}."
            return (*cancels, FailRequest(WorkerLost(text)))
        self.phase = RequestPhase.WAITING
        wait = 0.0 if self._attempts <= 1 else min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (self._attempts - 2))
        return (*cancels, WaitForWorker(now + wait))

    def _fail(self, error: PenstockError) -> RequestEffects:
        self.phase = RequestPhase.DONE
        return (*self._cancel_runs(), FailRequest(error))

    def _end(self, run: StageRun) -> StageEnded:
        run.ended = True
        return StageEnded(run.worker, run.incarnation, self.request.id, self.epoch)

    def _cancel(self, run: StageRun) -> CancelStage:
        run.ended = True
        return CancelStage(run.worker, run.incarnation, self.request.id, self.epoch)

    def _cancel_runs(self) -> RequestEffects:
        cancels = tuple(self._cancel(run) for run in self._runs if not run.ended)
        self._runs = []
        return cancels
