"""What a request costs at each of some workers, in seconds of somebody's waiting.

A step takes ``step + token * tokens + pair * (query, key) pairs + draw * draws`` seconds, by rates that each worker has
learned from its own steps.  From that follow, for a request of ``known`` tokens of which ``cached`` are there already:

    wait     what lies before it: all prompt tokens that the worker has still to read
    read     its own prompt, without what is cached
    disturb  answers that are written there, each of which waits while it is read; no fewer are expected than the
             candidates write on the average, for an idle worker of a busy fleet does not stay idle
    move     pages that a decode worker lacks, by its measured time to copy one; who is written there waits too
    write    its answer, in steps with all others that are written there
    slow     what those others lose by its being in their steps

The sum is what everybody together waits longer.  Pure arithmetic on columns; chooses nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.router.columns import Due, Load, Numbers, Rates, Slots
from penstock.router.policy.port import View
from penstock.types import PAGE_TOKENS


class Reading(NamedTuple):
    """The cost of reading the prompt, at each candidate."""

    cached: Numbers  # tokens
    compute: Numbers  # tokens
    wait: Numbers
    read: Numbers
    disturb: Numbers


class Writing(NamedTuple):
    """The cost of writing the answer, at each candidate."""

    step: Numbers  # seconds of the next step without the request
    write: Numbers
    slow: Numbers


def pages_of(tokens: int) -> int:
    """KV pages that hold so many tokens."""
    return -(-tokens // PAGE_TOKENS)


def pairs_of(compute: Numbers, cached: Numbers) -> Numbers:
    """(query, key) pairs of the attention of ``compute`` tokens after ``cached`` ones."""
    return compute * (cached + 0.5 * (compute + 1))


def reading(view: View, slots: Slots, load: Load, rates: Rates) -> Reading:
    """One token at least is computed, for the next one is drawn from it."""
    cached = np.minimum(view.hits.take(slots) * float(PAGE_TOKENS), view.known - 1)
    compute = view.known - cached
    work = rates.token * compute + rates.pair * pairs_of(compute, cached)
    return Reading(
        cached=cached,
        compute=compute,
        wait=rates.token * load.tokens + rates.pair * load.pairs,
        read=rates.step + work + rates.draw,
        disturb=np.maximum(load.rows, load.rows.mean()) * work,
    )


def writing(view: View, load: Load, rates: Rates) -> Writing:
    """Every answer is in every step, and the one that is added makes all of them longer."""
    row = rates.token + rates.draw
    step = rates.step + row * load.rows + rates.pair * load.context
    more = row + rates.pair * view.known
    return Writing(step=step, write=view.write * (step + more), slow=view.write * load.rows * more)


def moving(view: View, slots: Slots, load: Load, rates: Rates) -> Numbers:
    """Copying what a decode worker lacks, between two of its steps."""
    lacking = np.maximum(pages_of(view.known) - view.hits.take(slots), 0)
    return lacking * rates.page * (1 + load.rows)


def short_of(view: View, load: Load) -> Numbers:
    """Pages that a worker lacks to take the request at once."""
    return np.maximum(pages_of(view.known) - load.pages, 0.0)


def due_of(known: int, hit: int, *, reads: bool, writes: bool) -> Due:
    """What a leg asks of a worker that has the first ``hit`` pages of ``known`` tokens."""
    cached = min(hit * PAGE_TOKENS, known - 1)
    compute = known - cached if reads else 0
    return Due(
        tokens=compute,
        pairs=int(compute * (cached + 0.5 * (compute + 1))),
        rows=int(writes),
        context=known if writes else 0,
        pages=pages_of(known),
    )
