"""Numbers of workers that decisions compare: one column a number, one place a slot.

A number is what the worker last reported, plus what this gateway has sent it since: of two decisions in a millisecond
the second knows of the first, and nothing is counted twice.  Rates (seconds a step, token, pair, draw, byte) are the
workers' own measurements; one that has measured nothing yet is taken for a typical one of those that have.
Pure: knows no identities, states or requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.wire.messages import Report

Numbers: TypeAlias = NDArray[np.float64]
Slots: TypeAlias = NDArray[np.intp]

_FADING = 0.9  # what earlier copies count for against the last report's


class Due(NamedTuple):
    """What a leg asks of its worker, for as long as the worker does not report it itself."""

    tokens: int = 0  # to read
    pairs: int = 0  # (query, key) pairs of their attention
    rows: int = 0  # answers to write
    context: int = 0  # tokens of those
    pages: int = 0


NOTHING_DUE = Due()


class Load(NamedTuple):
    """What is going on at some workers: one number each, as reported and sent since."""

    tokens: Numbers  # of prompts, still to read
    pairs: Numbers
    rows: Numbers  # answers that are written, or will be
    context: Numbers  # tokens of those
    pages: Numbers  # free


class Rates(NamedTuple):
    """How long things take at some workers, in seconds."""

    step: Numbers
    token: Numbers
    pair: Numbers
    draw: Numbers
    page: Numbers  # to copy one from another worker


_REPORTED, _SENT, _GONE, _RATES = slice(0, 5), slice(5, 10), slice(10, 15), slice(15, 20)
_TIMES, _PAGE = slice(15, 19), 19
_MEASURED, _HEARD, _GATEWAYS, _BYTES, _SECONDS, _TURN = range(20, 26)
_ROWS = 26


class Columns:
    """The table.  Grows with ``add``."""

    def __init__(self) -> None:
        self._table: Numbers = np.zeros((_ROWS, 8))
        self._size = 0
        self.hashes: NDArray[np.uint64] = np.zeros(8, np.uint64)  # of the workers' ids: for choices among equals
        self._copied: list[tuple[float, float]] = []  # (bytes, seconds) that were reported last
        self._turns = 0  # things sent so far

    def add(self, hashed: int) -> None:
        """One slot more, of the worker whose id has this 64-bit hash."""
        if self._size == self._table.shape[1]:
            self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
            self.hashes = np.concatenate((self.hashes, np.zeros_like(self.hashes)))
        self.hashes[self._size] = hashed
        self._copied.append((0.0, 0.0))
        self._size += 1

    def clear(self, slot: int) -> None:
        """The worker of this slot has ended: nothing is known of the next one."""
        self._table[:, slot] = 0.0
        self._copied[slot] = (0.0, 0.0)

    # --- what happens -----------------------------------------------------------------------------------------------

    def heard(self, slot: int, now: float) -> None:
        """It has given a sign of life."""
        self._table[_HEARD, slot] = now

    def forgive(self, seconds: float) -> None:
        """Nobody was listened to for so long."""
        self._table[_HEARD, : self._size] += seconds

    def report(self, slot: int, report: Report) -> None:
        """A worker's own numbers."""
        table, rates = self._table, report.rates
        table[_REPORTED, slot] = (
            report.prompt_tokens,
            report.prompt_pairs,
            report.answers,
            report.context_tokens,
            report.kv_pages_free,
        )
        page_s = self._page_s(slot, report.counters) * report.page_bytes
        table[_RATES, slot] = (rates.step, rates.token, rates.pair, rates.draw, page_s)
        table[_MEASURED, slot] = report.measured
        table[_GATEWAYS, slot] = report.gateways

    def sent(self, slot: int, due: Due) -> None:
        """Something was sent there that no report counts yet."""
        self._turns += 1
        self._table[_TURN, slot] = self._turns
        self._table[_SENT, slot] += due

    def counted(self, slot: int, due: Due) -> None:
        """A report counts it now, or it has ended."""
        self._table[_SENT, slot] -= due

    def gone(self, slot: int, due: Due) -> None:
        """The last report counts it, and the next will not."""
        self._table[_GONE, slot] += due

    def forget_gone(self, slot: int) -> None:
        """A report is about to come."""
        self._table[_GONE, slot] = 0.0

    def forget_sent(self, slot: int) -> None:
        """Nothing is on its way."""
        self._table[_SENT, slot] = self._table[_GONE, slot] = 0.0

    def _page_s(self, slot: int, counters: Mapping[str, float]) -> float:
        """Seconds a byte of what it copies from others, of late; 0 before it has copied anything."""
        bytes_now, seconds_now = counters.get("bytes_received", 0.0), counters.get("transfer_seconds", 0.0)
        bytes_before, seconds_before = self._copied[slot]
        if bytes_now > bytes_before:
            self._copied[slot] = (bytes_now, seconds_now)
            sums = self._table[(_BYTES, _SECONDS), slot]
            sums = _FADING * sums + (bytes_now - bytes_before, max(0.0, seconds_now - seconds_before))
            self._table[(_BYTES, _SECONDS), slot] = sums
        copied = self._table[_BYTES, slot]
        return float(self._table[_SECONDS, slot] / copied) if copied else 0.0

    # --- what is known ----------------------------------------------------------------------------------------------

    def at(self, slots: Slots) -> tuple[Load, Rates]:
        """What goes on at these workers, and how long things take them.

        Where nobody has measured anything the rates are the workers' guesses, or 1 a token.
        """
        table = self._table.take(slots, axis=1)
        more = table[_SENT] - table[_GONE]
        tokens, pairs, rows, context = np.maximum(table[:4] + more[:4], 0.0)
        rates = table[_RATES]
        if not table[_MEASURED].all():
            _fill(rates[:4], table[_MEASURED] > 0, self._typical(_MEASURED, _TIMES))
        if not rates[4].all():
            _fill(rates[4:], rates[4] > 0, self._typical(_PAGE, slice(_PAGE, _PAGE + 1)))
        if not rates[1].any():
            rates[1] = 1.0
        return Load(tokens, pairs, rows, context, table[4] - more[4]), Rates(*rates)

    def quiet(self, slots: Slots, since: float) -> NDArray[np.bool_] | None:
        """Which of these have not been heard of since then; None: all have."""
        heard = self._table[_HEARD].take(slots)
        return heard < since if heard.min(initial=since) < since else None

    def turns(self, slots: Slots) -> Numbers:
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


def _fill(rates: Numbers, known: NDArray[np.bool_], typical: NDArray[Any] | None) -> None:
    if typical is not None:
        rates[:, ~known] = typical[:, None]
