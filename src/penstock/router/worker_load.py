"""Load and speed of workers, as decisions compare them: a table with a row a number and a column a worker.

A number is what the worker last reported, plus what this gateway has sent since: of two decisions in a millisecond the
second takes account of the first, and nothing counts twice.  ``InFlightWork`` keeps that difference::

    sent --a report counts it--> counted --> ended
     |  on top of the report      |  in the report       |  subtracted until the next report
     +--> prefilled: only its decode is left

A report that comes over a link was made after all that came over it before, so the next one no longer counts what has
ended.  Rates (seconds a step, token, pair, sampled token, byte) are the workers' own measurements; a worker without any
is assumed to be typical of those with some.  Pure: knows no identities or states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.types import LOWER_TIERS, PAGE_TOKENS, RequestId
from penstock.wire.gateway_messages import WorkerReport

Numbers: TypeAlias = NDArray[np.float64]
Slots: TypeAlias = NDArray[np.intp]

RATE_TOLERANCE = 0.2
"""Workers whose rates differ by no more than this part are taken to be equally fast: steps of one worker vary by as
much (``engine.core.cost_model.NOISE``), and what differs in what was learned only must not outweigh a cached prompt."""

IDLE_GRACE_S = 0.25
"""Longer silence of a worker that has nothing to do: it reports twice a second, others ten times."""

_REPORTS_OF_A_MEDIAN = 64
"""The median is computed every 64 reports, or once for as many reports as there are workers."""

_COPY_DECAY = 0.9  # the weight of earlier copies against the last report's

_NEW_WAIT_SHARE = 0.3  # the weight of the last report's wait for pages

_WAIT_DECAY = 0.99  # of the wait for pages, with each report without one: a slow link is tried again


class ExpectedWork(NamedTuple):
    """What a leg asks of its worker, for as long as the worker does not report it itself."""

    tokens: int = 0  # to read
    pairs: int = 0  # (query, key) pairs of their attention
    rows: int = 0  # answers to write
    context: int = 0  # tokens of those
    pages: int = 0
    batch_tokens: int = 0  # of tokens, those of batch work
    batch_pairs: int = 0


NO_WORK = ExpectedWork()


class WorkerLoad(NamedTuple):
    """What is going on at some workers: one number each, as reported and sent since."""

    tokens: Numbers  # of prompts, still to read
    pairs: Numbers
    rows: Numbers  # answers that are written, or will be
    context: Numbers  # tokens of those
    pages: Numbers  # free
    batch_tokens: Numbers  # of tokens, those of batch work
    batch_pairs: Numbers


class WorkerRates(NamedTuple):
    """How long things take at some workers, in seconds."""

    step: Numbers
    token: Numbers
    pair: Numbers
    sample: Numbers
    page: Numbers  # to copy one from another worker
    fetch: Numbers  # to take one out of another's cache
    wait: Numbers  # for one to come, when all that it was handed over with was computed
    tiers: tuple[Numbers, ...] = ()  # to take one out of its own lower tiers, nearest first

    def select(self, mask: NDArray[np.bool_]) -> WorkerRates:
        """The rates of some of the workers."""
        step, token, pair, draw, page, fetch, wait, tiers = self
        below = tuple(tier[mask] for tier in tiers)
        return WorkerRates(step[mask], token[mask], pair[mask], draw[mask], page[mask], fetch[mask], wait[mask], below)


class _Row:
    """The rows of the table; a column is a worker."""

    # ``WorkerLoad`` as the last report has it
    REPORTED_TOKENS, REPORTED_PAIRS, REPORTED_ROWS, REPORTED_CONTEXT = range(4)
    FREE_PAGES, REPORTED_BATCH_TOKENS, REPORTED_BATCH_PAIRS = range(4, 7)
    # ``ExpectedWork`` sent since, and of finished requests that the last report still counts
    SENT_TOKENS, SENT_PAIRS, SENT_ROWS, SENT_CONTEXT, SENT_PAGES, SENT_BATCH_TOKENS, SENT_BATCH_PAIRS = range(7, 14)
    GONE_TOKENS, GONE_PAIRS, GONE_ROWS, GONE_CONTEXT, GONE_PAGES, GONE_BATCH_TOKENS, GONE_BATCH_PAIRS = range(14, 21)
    # seconds, as decisions use them
    STEP_S, TOKEN_S, PAIR_S, SAMPLE_S, PAGE_S = range(21, 26)
    # the same as they were reported
    OWN_STEP_S, OWN_TOKEN_S, OWN_PAIR_S, OWN_SAMPLE_S = range(26, 30)
    MEASURED = 30  # steps that the rates were learned from
    SEEN_AT = 31
    GATEWAYS = 32  # that give the worker requests
    COPIED_BYTES, COPY_S = 33, 34  # received from other workers of late
    LAST_SENT = 35  # the number of the latest Submit
    DOMAIN = 36  # of workers that share their caches; 0 is none
    FETCH_S = 37  # to fetch one page from such a cache
    WAIT_S = 38  # that a prompt waits for one page after all else is computed
    CONTEXT = 39  # tokens of prompt and output together
    TIER_S = 40  # to fetch one page from each lower tier: ``LOWER_TIERS`` rows; inf for one that is not there
    CORES = 40 + LOWER_TIERS  # of workers that share or lend each other cores; 0 is none
    LOCAL_PREFILL = 41 + LOWER_TIERS  # 1: prompts should be computed there, not by prefill workers of its cores
    COUNT = 42 + LOWER_TIERS


_REPORTED = slice(_Row.REPORTED_TOKENS, _Row.REPORTED_BATCH_PAIRS + 1)
_SENT = slice(_Row.SENT_TOKENS, _Row.SENT_BATCH_PAIRS + 1)
_GONE = slice(_Row.GONE_TOKENS, _Row.GONE_BATCH_PAIRS + 1)
_RATES = slice(_Row.STEP_S, _Row.PAGE_S + 1)
_STEP_RATES = slice(_Row.STEP_S, _Row.SAMPLE_S + 1)
_PAGE_RATE = slice(_Row.PAGE_S, _Row.PAGE_S + 1)
_OWN_RATES = slice(_Row.OWN_STEP_S, _Row.OWN_SAMPLE_S + 1)
_TIERS = slice(_Row.TIER_S, _Row.TIER_S + LOWER_TIERS)
_BUSY = [_Row.REPORTED_TOKENS, _Row.REPORTED_ROWS, _Row.SENT_TOKENS, _Row.SENT_ROWS]
_COPIES = (_Row.COPIED_BYTES, _Row.COPY_S)
_PAGES = _Row.FREE_PAGES - _Row.REPORTED_TOKENS  # the index of pages within ``WorkerLoad``


@dataclass(slots=True)
class _TransferCounters:
    """Counters of page transfers when something was learned from them last."""

    nbytes: float = 0.0
    seconds: float = 0.0
    waited_s: float = 0.0  # at the last bytes
    missed: float = 0.0  # pages
    missed_waited_s: float = 0.0  # at the last missed pages


class LoadTable:
    """The table.  Grows with ``add``."""

    def __init__(self) -> None:
        self._table: Numbers = np.zeros((_Row.COUNT, 8))
        self._size = 0
        self.hashes: NDArray[np.uint64] = np.zeros(8, np.uint64)  # of the workers' ids: for choices among equals
        self._transfers: list[_TransferCounters] = []
        self._turns = 0  # things sent so far
        self._names: dict[str, int] = {}  # of domains and core groups, numbered from 1; 0 is none
        self._usual: tuple[float, ...] | None = None  # the median of the workers' rates, some reports ago
        self._reports = 0
        self.tiers = 0  # that the one with most has below its cache

    def add_slot(self, hashed: int) -> None:
        """One slot more, of the worker whose id has this 64-bit hash."""
        if self._size == self._table.shape[1]:
            self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
            self.hashes = np.concatenate((self.hashes, np.zeros_like(self.hashes)))
        self.hashes[self._size] = hashed
        self._transfers.append(_TransferCounters())
        self._size += 1

    def rename_slot(self, slot: int, hashed: int) -> None:
        """Assign a cleared slot to another worker, or to none."""
        self.hashes[slot] = hashed
        used = set(self._table[[_Row.DOMAIN, _Row.CORES], : self._size].ravel().tolist())
        self._names = {name: number for name, number in self._names.items() if number in used}

    def clear_slot(self, slot: int) -> None:
        """The worker of this slot has ended: nothing is known of the next one."""
        self._table[:, slot] = 0.0
        self._transfers[slot] = _TransferCounters()

    # --- what happens -----------------------------------------------------------------------------------------------

    def mark_seen(self, slot: int, now: float) -> None:
        """It has given a sign of life."""
        self._table[_Row.SEEN_AT, slot] = now

    def shift_clocks(self, seconds: float) -> None:
        """Shift all clocks by a time in which this process did not run."""
        self._table[_Row.SEEN_AT, : self._size] += seconds

    def on_report(self, slot: int, report: WorkerReport, counters: Mapping[str, float]) -> None:
        """Store the numbers of a report.  ``counters`` holds all counters of this incarnation."""
        table, rates = self._table, report.rates
        table[_REPORTED, slot] = (
            report.prompt_tokens,
            report.prompt_pairs,
            report.decodes,
            report.context_tokens,
            report.kv_pages_free,
            report.batch_tokens,
            report.batch_pairs,
        )
        page_s = self._learn_transfers(slot, report, counters)
        times: tuple[float, ...] = (rates.step, rates.token, rates.pair, rates.sample)
        table[_OWN_RATES, slot] = times
        table[_RATES, slot] = (*(self._level(times) if report.measured else times), page_s)
        table[_Row.MEASURED, slot] = report.measured
        table[_Row.GATEWAYS, slot] = report.gateways
        table[_Row.CONTEXT, slot] = report.max_model_len
        table[_Row.DOMAIN, slot], table[_Row.FETCH_S, slot] = self._numbered(report.domain), report.fetch_s
        table[_Row.CORES, slot] = self._numbered(report.core_group)
        table[_Row.LOCAL_PREFILL, slot] = report.local_prefill
        if report.tier_s or self.tiers:
            self.tiers = max(self.tiers, len(report.tier_s))
            table[_TIERS, slot] = (*report.tier_s, *[np.inf] * (LOWER_TIERS - len(report.tier_s)))

    def on_repeated_report(self, slot: int) -> None:
        """A report has come that is equal to the one before it.

        Its rates are compared with the usual ones again when it has all counters, as one does every ten seconds.
        """
        self._table[_Row.WAIT_S, slot] *= _WAIT_DECAY

    def _numbered(self, name: str) -> int:
        """The lowest number that no other name has; 0 for none."""
        if not name:
            return 0
        known = self._names.get(name)
        if known is None:
            taken = set(self._names.values())
            known = self._names[name] = next(n for n in range(1, len(taken) + 2) if n not in taken)
        return known

    def _level(self, times: tuple[float, ...]) -> tuple[float, ...]:
        """A worker's rates without that by which it differs from the usual one by noise alone."""
        if self._usual is None or self._reports >= max(_REPORTS_OF_A_MEDIAN, self._size):
            usual = self._typical(_Row.MEASURED, _OWN_RATES)
            self._usual, self._reports = None if usual is None else tuple(usual.tolist()), 0
        self._reports += 1
        if self._usual is None:
            return times
        return tuple(map(_levelled, times, self._usual))

    def add_sent(self, slot: int, due: ExpectedWork) -> None:
        """Something was sent there that no report counts yet."""
        self._turns += 1
        self._table[_Row.LAST_SENT, slot] = self._turns
        self._table[_SENT, slot] += due

    def remove_sent(self, slot: int, due: ExpectedWork) -> None:
        """A report counts it now, or it has ended."""
        self._table[_SENT, slot] -= due

    def add_gone(self, slot: int, due: ExpectedWork) -> None:
        """The last report counts it, and the next will not."""
        self._table[_GONE, slot] += due

    def clear_gone(self, slot: int) -> None:
        """A report is about to come."""
        self._table[_GONE, slot] = 0.0

    def clear_sent(self, slot: int) -> None:
        """Nothing is on its way."""
        self._table[_SENT, slot] = self._table[_GONE, slot] = 0.0

    def _learn_transfers(self, slot: int, report: WorkerReport, counters: Mapping[str, float]) -> float:
        """Learn from a report how long pages from other workers take.  Returns the seconds of copying one page."""
        before = self._transfers[slot]
        nbytes = counters.get("bytes_received", 0.0) - before.nbytes
        waited, missed = counters.get("transfer_wait_seconds", 0.0), counters.get("pages_missed", 0.0)
        wait_s = self._table[_Row.WAIT_S, slot]
        if nbytes > 0 and report.page_bytes:
            seconds = max(0.0, waited - before.waited_s)
            before.waited_s, before.missed, before.missed_waited_s = waited, missed, waited
            now = seconds * report.page_bytes / nbytes
            wait_s += _NEW_WAIT_SHARE * (now - wait_s) if wait_s else now
        elif missed > before.missed:  # the pages that did not come take at least as long as they were waited for
            wait_s = max(wait_s, (waited - before.missed_waited_s) / (missed - before.missed))
            before.missed, before.missed_waited_s = missed, waited
        else:
            wait_s = _WAIT_DECAY * wait_s
        self._table[_Row.WAIT_S, slot] = wait_s
        return self._copy_s(slot, counters) * report.page_bytes

    def _copy_s(self, slot: int, counters: Mapping[str, float]) -> float:
        """The worker's own time to copy a byte, of late; 0 before the first."""
        before = self._transfers[slot]
        nbytes, seconds = counters.get("bytes_received", 0.0), counters.get("transfer_seconds", 0.0)
        if nbytes > before.nbytes:
            sums = self._table[_COPIES, slot]
            sums = _COPY_DECAY * sums + (nbytes - before.nbytes, max(0.0, seconds - before.seconds))
            self._table[_COPIES, slot] = sums
            before.nbytes, before.seconds = nbytes, seconds
        copied = self._table[_Row.COPIED_BYTES, slot]
        return float(self._table[_Row.COPY_S, slot] / copied) if copied else 0.0

    # --- what is known ----------------------------------------------------------------------------------------------

    def at_slots(self, slots: Slots) -> tuple[WorkerLoad, WorkerRates]:
        """What goes on at these workers, and how long things take them.

        Where no worker has measured anything the rates are the workers' estimates, or 1 a token.
        """
        table = self._table.take(slots, axis=1)
        more = table[_SENT] - table[_GONE]
        tokens, pairs, rows, context, _, batch_tokens, batch_pairs = np.maximum(table[_REPORTED] + more, 0.0)
        rates = table[_RATES]
        if not table[_Row.MEASURED].all():
            _fill(rates[:4], table[_Row.MEASURED] > 0, self._typical(_Row.MEASURED, _STEP_RATES))
        if not rates[4].all():
            _fill(rates[4:], rates[4] > 0, self._typical(_Row.PAGE_S, _PAGE_RATE))
        if not rates[1].any():
            rates[1] = 1.0
        load = WorkerLoad(
            tokens, pairs, rows, context, table[_Row.FREE_PAGES] - more[_PAGES], batch_tokens, batch_pairs
        )
        step, token, pair, draw, page = rates
        tiers = tuple(table[_TIERS][: self.tiers])
        return load, WorkerRates(step, token, pair, draw, page, table[_Row.FETCH_S], table[_Row.WAIT_S], tiers)

    def reachable(self, hits: NDArray[np.int32], stored: NDArray[np.int32]) -> NDArray[np.int32]:
        """``hits`` by slot, with those that each can take out of the caches of its domain: ``stored``."""
        domains = self._table[_Row.DOMAIN, : len(hits)].astype(np.intp)
        if not domains.any() or not stored.any():
            return hits
        best = np.zeros(domains.max() + 1, np.int32)
        np.maximum.at(best, domains, stored)
        best[0] = 0
        reachable: NDArray[np.int32] = np.maximum(hits, best[domains])
        return reachable

    def prefers_fetch(self, slot: int) -> bool:
        """Whether this worker fetches a page faster than it computes one."""
        fetch, token = self._table[_Row.FETCH_S, slot], self._table[_Row.TOKEN_S, slot]
        return bool(fetch < token * PAGE_TOKENS)

    def with_tiers(
        self, slot: int, hit: int, below: Sequence[NDArray[np.int32]], page_tokens: int = PAGE_TOKENS
    ) -> int:
        """``hit`` and what this worker takes out of its lower tiers sooner than it computes it."""
        computing = self._table[_Row.TOKEN_S, slot] * page_tokens
        for tier, depths in enumerate(below[: self.tiers]):
            if self._table[_Row.TIER_S + tier, slot] < computing:
                hit = max(hit, int(depths[slot]))
        return hit

    def quiet_slots(self, slots: Slots, since: float) -> NDArray[np.bool_] | None:
        """Which of these have not been heard of since then; None: all have.

        Those that have nothing to do report less often, and are given ``IDLE_GRACE_S`` more.
        """
        heard = self._table[_Row.SEEN_AT].take(slots)
        if heard.min(initial=since) >= since:
            return None
        load = self._table[_BUSY].take(slots, axis=1).any(axis=0)
        quiet: NDArray[np.bool_] = heard < np.where(load, since, since - IDLE_GRACE_S)
        return quiet if quiet.any() else None

    def heard_since(self, slots: Slots, since: float) -> Slots:
        """The slots among these whose workers have been heard of since then."""
        heard: Slots = slots[self._table[_Row.SEEN_AT].take(slots) > since]
        return heard

    def contexts(self, slots: Slots) -> Numbers:
        """How many tokens of prompt and answer together each of these has room for."""
        contexts: Numbers = self._table[_Row.CONTEXT].take(slots)
        return contexts

    def last_sent(self, slots: Slots) -> Numbers:
        """When each of these was sent something last: the number of the sending."""
        turns: Numbers = self._table[_Row.LAST_SENT].take(slots)
        return turns

    def gateways(self, slots: Slots) -> int:
        """How many gateways give these workers work, by their own account."""
        return int(self._table[_Row.GATEWAYS].take(slots).max(initial=1.0))

    def local_prefill(self, slots: Slots) -> NDArray[np.bool_]:
        """Which of these decode workers should compute prompts themselves."""
        local: NDArray[np.bool_] = self._table[_Row.LOCAL_PREFILL].take(slots) > 0
        return local

    def on_other_cores(self, slots: Slots, others: Slots) -> Slots:
        """The workers of ``slots`` that share no cores with any of ``others``."""
        groups = self._table[_Row.CORES].take(slots)
        apart: NDArray[np.bool_] = (groups == 0) | ~np.isin(groups, self._table[_Row.CORES].take(others))
        return slots[apart]

    def measured(self, slots: Slots) -> NDArray[np.bool_]:
        """Which of these know by experience how long they take."""
        measured: NDArray[np.bool_] = self._table[_Row.MEASURED].take(slots) > 0
        return measured

    def _typical(self, known_by: int, rows: slice) -> Numbers | None:
        """The median of those who know, all slots together."""
        known = self._table[known_by, : self._size] > 0
        return np.median(self._table[rows, : self._size][:, known], axis=1) if known.any() else None


def _levelled(own: float, usual: float) -> float:
    if own > usual * (1 + RATE_TOLERANCE):
        return own / (1 + RATE_TOLERANCE)
    return own * (1 + RATE_TOLERANCE) if own * (1 + RATE_TOLERANCE) < usual else usual


def _fill(rates: Numbers, known: NDArray[np.bool_], typical: NDArray[Any] | None) -> None:
    if typical is not None:
        rates[:, ~known] = typical[:, None]


class InFlightWork:
    """Keeps the gateway's own part of ``columns``.  A request is at a slot at most once."""

    def __init__(self, columns: LoadTable) -> None:
        self._columns = columns
        self._sent: list[dict[RequestId, tuple[int, ExpectedWork]]] = []  # by slot: (serial, what it asks)
        self._counted: list[dict[RequestId, ExpectedWork]] = []  # by slot

    def add_slot(self) -> None:
        """One slot more."""
        self._sent.append({})
        self._counted.append({})

    def clear_slot(self, slot: int) -> None:
        """Everything there is over."""
        self._sent[slot].clear()
        self._counted[slot].clear()
        self._columns.clear_sent(slot)

    def on_sent(self, slot: int, request: RequestId, due: ExpectedWork, serial: int) -> None:
        """It was sent there, instead of what it had there before."""
        self.on_ended(slot, request)
        self._sent[slot][request] = (serial, due)
        self._columns.add_sent(slot, due)

    def on_report(self, slot: int, heard: int) -> None:
        """A report has come that counts what was sent up to the serial number ``heard``."""
        self._columns.clear_gone(slot)
        sent = self._sent[slot]
        for request in [request for request, (serial, _) in sent.items() if serial <= heard]:
            due = self._counted[slot][request] = sent.pop(request)[1]
            self._columns.remove_sent(slot, due)

    def on_prefilled(self, slot: int, request: RequestId) -> None:
        """Its prompt is read: a token came."""
        due = self._counted[slot].get(request)
        if due is not None:
            if due.tokens:
                self._columns.add_gone(slot, _read_of(due))
                self._counted[slot][request] = _unread(due)
            return
        serial, due = self._sent[slot].get(request, (0, None))
        if due is not None and due.tokens:
            self._columns.remove_sent(slot, _read_of(due))
            self._sent[slot][request] = (serial, _unread(due))

    def on_ended(self, slot: int, request: RequestId) -> None:
        """It has nothing there any more."""
        due = self._counted[slot].pop(request, None)
        if due is not None:
            self._columns.add_gone(slot, due)
            return
        sent = self._sent[slot].pop(request, None)
        if sent is not None:
            self._columns.remove_sent(slot, sent[1])


def _read_of(due: ExpectedWork) -> ExpectedWork:
    """The prefill part of ``due``."""
    return ExpectedWork(tokens=due.tokens, pairs=due.pairs, batch_tokens=due.batch_tokens, batch_pairs=due.batch_pairs)


def _unread(due: ExpectedWork) -> ExpectedWork:
    """All of ``due`` but the prefill part."""
    return due._replace(tokens=0, pairs=0, batch_tokens=0, batch_pairs=0)
