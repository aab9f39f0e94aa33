"""What a worker tells of itself: its counters and its load.  ``kv_events`` sends them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.config.schema import WorkerConfig
from penstock.engine.core.local_prefill import LocalPrefill
from penstock.engine.core.plan import StepPlan
from penstock.engine.core.scheduler import EngineLoad, Scheduler
from penstock.engine.encoder_stage import EncoderCounters
from penstock.kv.transfer.receiver import KvReceiver
from penstock.telemetry.metrics import WORKER_COUNTERS, WORKER_MAXIMA
from penstock.types import ModelIdentity, Role, WorkerState
from penstock.wire.gateway_messages import MAX_GATEWAY_HOSTS, RankReport, StepRates, WorkerReport

log = logging.getLogger("penstock.worker")

LOCAL = "prompts are computed here, too: a decode step takes %.3g ms, one with a chunk of a prompt at most %.3g"
REMOTE = "prompts are computed by prefill workers: a decode step takes %.3g ms, one with a chunk of a prompt up to %.3g"

LONG_STEP_S = 0.25
"""A step that is predicted to take this long is reported before it begins, so that it is not taken for silence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFigures:
    """Figures of the KV store's tiers."""

    counters: Callable[[], dict[str, float]] = dict
    tier_s: Callable[[], tuple[float, ...]] = tuple  # seconds a page of each tier below the cache
    domain: str = ""  # of workers that take pages out of each other's caches
    fetch_s: Callable[[], float] = lambda: 0.0  # seconds a page taken from one of those


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSources:
    """Figures that a report takes from other parts of the worker."""

    encoder: EncoderCounters = field(default_factory=EncoderCounters)
    borrowed_s: Callable[[], float] = lambda: 0.0  # core-seconds computed on cores of other workers
    store: StoreFigures = field(default_factory=StoreFigures)
    ranks: Callable[[], tuple[RankReport, ...]] = tuple  # of a worker that has several


class LoadReporter:
    """Counts, and makes ``WorkerReport`` messages."""

    def __init__(
        self,
        config: WorkerConfig,
        identity: ModelIdentity,
        scheduler: Scheduler,
        receiver: KvReceiver,
        sources: ReportSources,
        *,
        turned_away: Callable[[], int],
    ) -> None:
        """``turned_away``: connections for pages that were refused."""
        self._config = config
        self._identity = identity
        self._scheduler = scheduler
        self._receiver = receiver
        self._counts: dict[str, float] = dict.fromkeys((*WORKER_COUNTERS, *WORKER_MAXIMA), 0)
        self._leaked = 0
        self._checked: tuple[int, EngineLoad, int, int] | None = None  # what it was found for
        self._step_s = 0.0
        self._sources = sources
        self._turned_away = turned_away
        self._was_local = False
        self._local = LocalPrefill(scheduler.cost, config.scheduler.step_budget_ms / 1000)
        self.state = WorkerState.READY
        self.role = config.role

    @property
    def steps(self) -> int:
        """Steps that computed something."""
        return int(self._counts["steps"])

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter of ``telemetry.metrics.WORKER_COUNTERS``.  KeyError for any other name."""
        self._counts[name] += amount

    def count_step(self, plan: StepPlan, seconds: float) -> None:
        """A plan with rows was computed."""
        counts, rows = self._counts, plan.rows
        counts["steps"] += plan.steps
        self._step_s = plan.predicted_s
        counts["step_seconds"] += seconds
        if len(rows) > 1:
            counts["batch_multi_row_steps"] += plan.steps
        counts["batch_rows_max"] = max(counts["batch_rows_max"], len(rows))
        for row in rows:
            if row.request.pooling is not None:
                counts["texts_pooled"] += row.samples
                counts["prompt_tokens_computed"] += row.count
                continue
            if row.samples:
                counts["generation_tokens"] += plan.steps
            if row.draft:
                counts["spec_drafts"] += 1
                counts["spec_draft_tokens"] += len(row.draft)
            if row.count > 1 or not row.samples:
                counts["prompt_tokens_computed"] += row.count

    def is_long_step(self, predicted_s: float) -> bool:
        """A step begins.  True when it will be so long that gateways should hear of it first."""
        if predicted_s < LONG_STEP_S:
            return False
        self._step_s = predicted_s
        return True

    def count_progress(self, tokens: int) -> None:
        """A request got this many tokens from one row of one step: all but the first were draft tokens."""
        counts = self._counts
        counts["generation_tokens"] += tokens - 1
        counts["spec_accepted_tokens"] += tokens - 1

    def report(
        self, *, asked: int, settled: bool, dropped_frames: int, peer_refusals: int = 0, gateway_hosts: int = 0
    ) -> WorkerReport:
        """The worker as it is now.  ``asked``: requests that some gateway still waits for; ``settled``: the scheduler
        knows of all that are not asked for any more, so whatever is still owned then is lost."""
        scheduler, counts, store = self._scheduler, self._counts, self._sources.store
        load = scheduler.load()
        self._count_others()
        counts["dropped_frames"], counts["peer_refusals"] = dropped_frames, peer_refusals
        loading = scheduler.memory.foreign_pages
        state = (self.steps, load, loading, asked)
        if settled and not load.running and state != self._checked:
            # The check takes a millisecond for some thousand pages, and an idle worker reports to each gateway.
            self._checked = state
            # Pages of a request that no gateway waits for are as lost as pages without an owner.
            self._leaked = max(scheduler.check_leaks().total, 0 if asked else load.pages_used - loading)
        return WorkerReport(
            worker=self._config.worker,
            incarnation=self._config.incarnation,
            role=self.role,
            state=self.state,
            pid=os.getpid(),
            identity=self._identity,
            max_model_len=self._config.scheduler.max_model_len,
            cores=self._config.threads,
            gateway_hosts=min(gateway_hosts, MAX_GATEWAY_HOSTS),
            steps=self.steps,
            step_s=self._step_s,
            running=load.running + load.awaiting + load.handing_over,
            queued=load.queued,
            tokens_in_flight=load.tokens_in_flight,
            kv_pages_used=load.pages_used,
            kv_pages_free=load.pages_free,
            kv_pages_leaked=self._leaked,
            kv_pages_loading=loading,
            counters={name: value for name, value in (counts | store.counters()).items() if value},
            prompt_tokens=load.prompt_tokens,
            prompt_pairs=load.prompt_pairs,
            batch_tokens=load.batch_tokens,
            batch_pairs=load.batch_pairs,
            decodes=load.decode_requests,
            context_tokens=load.context_tokens,
            page_bytes=self._receiver.page_bytes,
            domain=store.domain,
            fetch_s=store.fetch_s() if store.domain else 0.0,
            tier_s=store.tier_s(),
            rates=StepRates(*(max(0.0, rate) for rate in scheduler.cost.rates)),
            measured=scheduler.cost.measured_steps,
            hands_over=self._config.transfers_pages,
            ranks=self._sources.ranks(),
            core_group=self._config.core_group,
            local_prefill=self._prefills_locally(),
            predecessor_fault=self._config.predecessor_fault,
        )

    def _prefills_locally(self) -> bool:
        if not self._config.core_group or self.role is not Role.DECODE:
            return False
        before, local = self._was_local, self._local.is_local()
        if local is not before:
            self._was_local = local
            log.info(LOCAL if local else REMOTE, 1000 * self._local.step_s, self._config.scheduler.step_budget_ms)
        return local

    def _count_others(self) -> None:
        """What others count."""
        counts, scheduler, memory = self._counts, self._scheduler, self._scheduler.memory
        transfer = self._receiver.counters
        counts["prefix_cache_queries"] = memory.queried_tokens
        counts["prefix_cache_hits"] = memory.hit_tokens
        counts["preemptions"] = scheduler.preemptions
        counts["requests_yielded"] = scheduler.yields
        counts["requests_expired"] = scheduler.expired
        counts["rows_left_out"] = scheduler.rows_skipped
        counts["pages_received"] = transfer.pages
        counts["bytes_received"] = transfer.bytes
        counts["pages_corrupt"] = transfer.corrupt
        counts["hand_overs_outrun"] = transfer.outrun
        counts["page_connections_refused"] = self._turned_away()
        counts["transfer_wait_seconds"] = transfer.waited_s
        counts["pages_missed"] = transfer.missed
        counts["cached_pages_corrupt"] = memory.damaged_pages
        counts["borrowed_core_seconds"] = self._sources.borrowed_s()
        counts |= _encoder_figures(self._sources.encoder)


def _encoder_figures(images: EncoderCounters) -> dict[str, float]:
    """As reports call them."""
    return {
        "images_encoded": images.images,
        "images_received": images.received,
        "image_slices": images.slices,
        "image_seconds": images.seconds,
        "image_cache_queries": images.queries,
        "image_cache_hits": images.hits,
    }
