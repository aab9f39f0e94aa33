"""Numbers of workers that decisions compare: one column a number, one place a slot.

A number is what the worker last reported, plus what this gateway has sent it since: of two decisions in a millisecond
the second knows of the first, and nothing is counted twice.  Rates (seconds a step, token, pair, draw, byte) are the
workers' own measurements; one that has measured nothing yet is taken for a typical one of those that have.
Pure: knows no identities, states or requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.types import LOWER_TIERS, PAGE_TOKENS, RequestId
from penstock.wire.gateway_messages import WorkerReport

Numbers: TypeAlias = NDArray[np.float64]
Slots: TypeAlias = NDArray[np.intp]

RATE_TOLERANCE = 0.2
"""Workers whose rates differ by no more than this part are taken to be equally fast: steps of one worker vary by as
much (``engine.core.cost.NOISE``), and what differs in what was learned only must not outweigh a cached prompt."""

IDLE_GRACE_S = 0.25
"""Longer silence of a worker that has nothing to do: it reports twice a second, others ten times."""

_REPORTS_OF_A_MEDIAN = 64
"""At least so many, and as many as there are workers: a report's share of finding it does not grow with them."""

_FADING = 0.9  # what earlier copies count for against the last report's

_BELIEVING = 0.3  # how much the last report's wait for pages counts against earlier ones

_FORGETTING = 0.99  # of what was waited for pages, with each report that tells of none: a slow link is tried again


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
        """Those of some of the workers."""
        step, token, pair, draw, page, fetch, wait, tiers = self
        below = tuple(tier[mask] for tier in tiers)
        return WorkerRates(step[mask], token[mask], pair[mask], draw[mask], page[mask], fetch[mask], wait[mask], below)


_REPORTED, _SENT, _GONE, _RATES = slice(0, 7), slice(7, 14), slice(14, 21), slice(21, 26)
_TIMES, _PAGE = slice(21, 25), 25
_LOADED = [0, 2, 7, 9]  # tokens to read and answers to write, as reported and as sent since
_MEASURED, _HEARD, _GATEWAYS, _BYTES, _SECONDS, _TURN = range(26, 32)
_DOMAIN, _FETCH = 32, 33
_OWN = slice(34, 38)  # the times as they were reported
_WAIT = 38
_TIERS = slice(39, 39 + LOWER_TIERS)  # inf: it has not so many
_CONTEXT = 39 + LOWER_TIERS  # tokens of prompt and answer together
_ROWS = 40 + LOWER_TIERS


class LoadTable:
    """The table.  Grows with ``add``."""

    def __init__(self) -> None:
        self._table: Numbers = np.zeros((_ROWS, 8))
        self._size = 0
        self.hashes: NDArray[np.uint64] = np.zeros(8, np.uint64)  # of the workers' ids: for choices among equals
        self._copied: list[tuple[float, float]] = []  # (bytes, seconds) that were reported last
        self._waited: list[float] = []  # seconds, when bytes came last
        self._missed: list[tuple[float, float]] = []  # (pages, seconds waited) when that was learned from last
        self._turns = 0  # things sent so far
        self._domains: dict[str, int] = {}  # numbered from 1; 0 is none
        self._usual: tuple[float, ...] | None = None  # the median of the workers' rates, some reports ago
        self._reports = 0
        self.tiers = 0  # that the one with most has below its cache

    def add_slot(self, hashed: int) -> None:
        """One slot more, of the worker whose id has this 64-bit hash."""
        if self._size == self._table.shape[1]:
            self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
            self.hashes = np.concatenate((self.hashes, np.zeros_like(self.hashes)))
        self.hashes[self._size] = hashed
        self._copied.append((0.0, 0.0))
        self._waited.append(0.0)
        self._missed.append((0.0, 0.0))
        self._size += 1

    def rename_slot(self, slot: int, hashed: int) -> None:
        """The slot is another worker's, or nobody's.  To be called when it was cleared."""
        self.hashes[slot] = hashed
        used = set(self._table[_DOMAIN, : self._size].tolist())
        self._domains = {name: number for name, number in self._domains.items() if number in used}

    def clear_slot(self, slot: int) -> None:
        """The worker of this slot has ended: nothing is known of the next one."""
        self._table[:, slot] = 0.0
        self._copied[slot] = (0.0, 0.0)
        self._waited[slot] = 0.0
        self._missed[slot] = (0.0, 0.0)

    # --- what happens -----------------------------------------------------------------------------------------------

    def mark_seen(self, slot: int, now: float) -> None:
        """It has given a sign of life."""
        self._table[_HEARD, slot] = now

    def shift_clocks(self, seconds: float) -> None:
        """Nobody was listened to for so long."""
        self._table[_HEARD, : self._size] += seconds

    def on_report(self, slot: int, report: WorkerReport, counters: Mapping[str, float]) -> None:
        """A worker's own numbers, and all counters that it has told so far."""
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
        self._learn_wait(slot, report, counters)
        page_s = self._page_s(slot, counters) * report.page_bytes
        times: tuple[float, ...] = (rates.step, rates.token, rates.pair, rates.sample)
        table[_OWN, slot] = times
        table[_RATES, slot] = (*(self._level(times) if report.measured else times), page_s)
        table[_MEASURED, slot] = report.measured
        table[_GATEWAYS, slot] = report.gateways
        table[_CONTEXT, slot] = report.max_model_len
        domain = self._numbered(report.domain) if report.domain else 0
        table[_DOMAIN, slot], table[_FETCH, slot] = domain, report.fetch_s
        if report.tier_s or self.tiers:
            self.tiers = max(self.tiers, len(report.tier_s))
            table[_TIERS, slot] = (*report.tier_s, *[np.inf] * (LOWER_TIERS - len(report.tier_s)))

    def _numbered(self, domain: str) -> int:
        """The lowest number that no other has."""
        known = self._domains.get(domain)
        if known is None:
            taken = set(self._domains.values())
            known = self._domains[domain] = next(n for n in range(1, len(taken) + 2) if n not in taken)
        return known

    def _level(self, times: tuple[float, ...]) -> tuple[float, ...]:
        """A worker's rates without that by which it differs from the usual one by noise alone."""
        if self._usual is None or self._reports >= max(_REPORTS_OF_A_MEDIAN, self._size):
            usual = self._typical(_MEASURED, _OWN)
            self._usual, self._reports = None if usual is None else tuple(usual.tolist()), 0
        self._reports += 1
        if self._usual is None:
            return times
        return tuple(map(_levelled, times, self._usual))

    def add_sent(self, slot: int, due: ExpectedWork) -> None:
        """Something was sent there that no report counts yet."""
        self._turns += 1
        self._table[_TURN, slot] = self._turns
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

    def _page_s(self, slot: int, counters: Mapping[str, float]) -> float:
        """Seconds of its own processors that a byte from others takes it, of late; 0 before anything came.  That a
        prompt waits for what is on its way is told by ``_learn_wait``."""
        bytes_now, seconds_now = counters.get("bytes_received", 0.0), counters.get("transfer_seconds", 0.0)
        bytes_before, seconds_before = self._copied[slot]
        if bytes_now > bytes_before:
            self._copied[slot] = (bytes_now, seconds_now)
            sums = self._table[(_BYTES, _SECONDS), slot]
            sums = _FADING * sums + (bytes_now - bytes_before, max(0.0, seconds_now - seconds_before))
            self._table[(_BYTES, _SECONDS), slot] = sums
        copied = self._table[_BYTES, slot]
        return float(self._table[_SECONDS, slot] / copied) if copied else 0.0

    def _learn_wait(self, slot: int, report: WorkerReport, counters: Mapping[str, float]) -> None:
        """How long a page lets a prompt wait that is computed but for it, of late.  Told before ``_page_s``.

        A wait that brought nothing, for it was given up, counts with the next bytes that come.  Until then it says that
        as many pages as did not come take that long at least.
        """
        waited, missed = counters.get("transfer_wait_seconds", 0.0), counters.get("pages_missed", 0.0)
        missed_before, waited_before = self._missed[slot]
        nbytes = counters.get("bytes_received", 0.0) - self._copied[slot][0]
        seconds = max(0.0, waited - self._waited[slot])
        known = self._table[_WAIT, slot]
        if nbytes > 0 and report.page_bytes:
            self._waited[slot], self._missed[slot] = waited, (missed, waited)
            now = seconds * report.page_bytes / nbytes
            self._table[_WAIT, slot] = known + (_BELIEVING * (now - known) if known else now)
        elif missed > missed_before:
            self._missed[slot] = (missed, waited)
            self._table[_WAIT, slot] = max(known, (waited - waited_before) / (missed - missed_before))
        else:
            self._table[_WAIT, slot] = _FORGETTING * known

    # --- what is known ----------------------------------------------------------------------------------------------

    def at_slots(self, slots: Slots) -> tuple[WorkerLoad, WorkerRates]:
        """What goes on at these workers, and how long things take them.

        Where nobody has measured anything the rates are the workers' guesses, or 1 a token.
        """
        table = self._table.take(slots, axis=1)
        more = table[_SENT] - table[_GONE]
        tokens, pairs, rows, context, _, batch_tokens, batch_pairs = np.maximum(table[_REPORTED] + more, 0.0)
        rates = table[_RATES]
        if not table[_MEASURED].all():
            _fill(rates[:4], table[_MEASURED] > 0, self._typical(_MEASURED, _TIMES))
        if not rates[4].all():
            _fill(rates[4:], rates[4] > 0, self._typical(_PAGE, slice(_PAGE, _PAGE + 1)))
        if not rates[1].any():
            rates[1] = 1.0
        load = WorkerLoad(tokens, pairs, rows, context, table[4] - more[4], batch_tokens, batch_pairs)
        step, token, pair, draw, page = rates
        tiers = tuple(table[_TIERS][: self.tiers])
        return load, WorkerRates(step, token, pair, draw, page, table[_FETCH], table[_WAIT], tiers)

    def reachable(self, hits: NDArray[np.int32], stored: NDArray[np.int32]) -> NDArray[np.int32]:
        """``hits`` by slot, with those that each can take out of the caches of its domain: ``stored``."""
        domains = self._table[_DOMAIN, : len(hits)].astype(np.intp)
        if not domains.any() or not stored.any():
            return hits
        best = np.zeros(max(self._domains.values(), default=0) + 1, np.int32)
        np.maximum.at(best, domains, stored)
        best[0] = 0
        return np.maximum(hits, best[domains])

    def prefers_fetch(self, slot: int) -> bool:
        """Does it take this worker less to fetch a page than to compute it?"""
        fetch, token = self._table[_FETCH, slot], self._table[_RATES.start + 1, slot]
        return bool(fetch < token * PAGE_TOKENS)

    def with_tiers(
        self, slot: int, hit: int, below: Sequence[NDArray[np.int32]], page_tokens: int = PAGE_TOKENS
    ) -> int:
        """``hit`` and what this worker takes out of its lower tiers sooner than it computes it."""
        computing = self._table[_RATES.start + 1, slot] * page_tokens
        for tier, depths in enumerate(below[: self.tiers]):
            if self._table[_TIERS.start + tier, slot] < computing:
                hit = max(hit, int(depths[slot]))
        return hit

    def quiet_slots(self, slots: Slots, since: float) -> NDArray[np.bool_] | None:
        """Which of these have not been heard of since then; None: all have.

        Those that have nothing to do report less often, and are given ``IDLE_GRACE_S`` more.
        """
        heard = self._table[_HEARD].take(slots)
        if heard.min(initial=since) >= since:
            return None
        load = self._table[_LOADED].take(slots, axis=1).any(axis=0)
        quiet: NDArray[np.bool_] = heard < np.where(load, since, since - IDLE_GRACE_S)
        return quiet if quiet.any() else None

    def contexts(self, slots: Slots) -> Numbers:
        """How many tokens of prompt and answer together each of these has room for."""
        contexts: Numbers = self._table[_CONTEXT].take(slots)
        return contexts

    def last_sent(self, slots: Slots) -> Numbers:
        """When each of these was sent something last: the number of the sending."""
        turns: Numbers = self._table[_TURN].take(slots)
        return turns

    def gateways(self, slots: Slots) -> int:
        """How many gateways give these workers work, by their own account."""
        return int(self._table[_GATEWAYS].take(slots).max(initial=1.0))

    def measured(self, slots: Slots) -> NDArray[np.bool_]:
        """Which of these know by experience how long they take."""
        measured: NDArray[np.bool_] = self._table[_MEASURED].take(slots) > 0
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


# MERGED: What this gateway has at workers, so that their numbers are right between two reports.
# MERGED:
# MERGED: ::
# MERGED:
# MERGED:     sent --a report has heard of it--> counted --> ended
# MERGED:      |  on top of what is reported      |  in what is reported       |  taken off it until the next
# MERGED: report
# MERGED:      +--> begun: its prompt is read, and only its answer is left
# MERGED:
# MERGED: A report that comes over a link was made after everything that came over it before; so the next one
# MERGED: no longer counts
# MERGED: what has ended.  Pure: knows slots and requests, and what they ask (``columns.Due``).


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
    """Of what is due, the reading."""
    return ExpectedWork(tokens=due.tokens, pairs=due.pairs, batch_tokens=due.batch_tokens, batch_pairs=due.batch_pairs)


def _unread(due: ExpectedWork) -> ExpectedWork:
    """Of what is due, all but the reading."""
    return due._replace(tokens=0, pairs=0, batch_tokens=0, batch_pairs=0)
