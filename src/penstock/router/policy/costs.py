"""What a request costs at each of some workers, in seconds of somebody's waiting.

A step takes ``step + token * tokens + pair * (query, key) pairs + draw * draws`` seconds, by rates that each worker has
learned from its own steps.  From that follow, for a request of ``known`` tokens of which ``cached`` are there already:

    wait     what lies before it: all prompt tokens that the worker has still to read (for an interactive request those
             of batch work do not count)
    read     its own prompt, without what is cached
    fetch    pages that it takes out of the caches of others on its host or out of its own lower tiers, by its measured
             time to take one from there, where that is less than computing them; they count as ``cached`` in the others
    disturb  answers that are written there, each of which waits while it is read; no fewer are expected than the
             candidates write on the average, for an idle worker of a busy fleet does not stay idle
    move     pages that a decode worker lacks, by its measured time to copy one, for which who is written there waits
             too, and by the measured time that prompts waited for one when all was computed
    write    its answer, in steps with all others that are written there
    slow     what those others lose by its being in their steps

The sum is what everybody together waits longer.  Pure arithmetic on columns; chooses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from penstock.router.columns import Due, Load, Numbers, Rates, Slots
from penstock.router.policy.port import View
from penstock.types import PAGE_TOKENS


class Reading(NamedTuple):
    """The cost of reading the prompt, at each candidate."""

    cached: Numbers  # tokens, here
    fetch: Numbers  # seconds
    compute: Numbers  # tokens
    wait: Numbers
    read: Numbers
    disturb: Numbers


class Writing(NamedTuple):
    """The cost of writing the answer, at each candidate."""

    step: Numbers  # seconds of the next step without the request
    write: Numbers
    slow: Numbers


def pages_of(tokens: int, page_tokens: int = PAGE_TOKENS) -> int:
    """KV pages that hold so many tokens."""
    return -(-tokens // page_tokens)


def pairs_of(compute: Numbers, cached: Numbers) -> Numbers:
    """(query, key) pairs of the attention of ``compute`` tokens after ``cached`` ones."""
    return compute * (cached + 0.5 * (compute + 1))


def reading(view: View, slots: Slots, load: Load, rates: Rates) -> Reading:
    """One token at least is computed, for the next one is drawn from it."""
    cached = here = np.minimum(view.hits.take(slots) * float(view.page_tokens), view.known - 1)
    compute = view.known - cached
    work = rates.token * compute + rates.pair * pairs_of(compute, cached)
    fetch = np.zeros(len(slots))
    for there, bringing in sources(view, slots, rates, here):
        left = view.known - there
        rest = rates.token * left + rates.pair * pairs_of(left, there)
        sooner = (there > here) & (bringing + rest < fetch + work)
        fetch, work, compute = (
            np.where(sooner, one, other) for one, other in ((bringing, fetch), (rest, work), (left, compute))
        )
    return Reading(
        cached=here,
        fetch=fetch,
        compute=compute,
        wait=waiting(load, rates, urgent=view.urgent),
        read=rates.step + work + rates.draw,
        disturb=np.maximum(load.rows, load.rows.mean()) * work,
    )


def sources(view: View, slots: Slots, rates: Rates, here: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """Beside its cache: (tokens that a candidate then has, seconds of taking them), from others, from each tier."""
    if view.reach is not view.hits:
        there = np.minimum(view.reach.take(slots) * float(view.page_tokens), view.known - 1)
        yield there, rates.fetch * np.ceil((there - here) / view.page_tokens)
    so_far, bringing = here, np.zeros(len(slots))
    for depths, page_s in zip(view.below, rates.tiers, strict=False):
        there = np.maximum(so_far, np.minimum(depths.take(slots) * float(view.page_tokens), view.known - 1))
        pages = np.ceil((there - so_far) / view.page_tokens)
        bringing = bringing + np.where(pages > 0, pages, 0.0) * np.where(pages > 0, page_s, 0.0)
        so_far = there
        yield there, bringing


def waiting(load: Load, rates: Rates, *, urgent: bool) -> Numbers:
    """What lies before a request; batch work lies before other batch work alone."""
    seconds: Numbers = rates.token * load.tokens + rates.pair * load.pairs
    if urgent:
        seconds = np.maximum(seconds - rates.token * load.batch_tokens - rates.pair * load.batch_pairs, 0.0)
    return seconds


def writing(view: View, load: Load, rates: Rates) -> Writing:
    """Every answer is in every step, and the one that is added makes all of them longer."""
    row = rates.token + rates.draw
    step = rates.step + row * load.rows + rates.pair * load.context
    more = row + rates.pair * view.known
    return Writing(step=step, write=view.write * (step + more), slow=view.write * load.rows * more)


def moving(view: View, slots: Slots, load: Load, rates: Rates) -> Numbers:
    """Copying what a decode worker lacks, between two of its steps, and what its link takes that nothing hides."""
    lacking = np.maximum(pages_of(view.known, view.page_tokens) - view.hits.take(slots), 0)
    return lacking * (rates.page * (1 + load.rows) + rates.wait)


def short_of(view: View, load: Load) -> Numbers:
    """Pages that a worker lacks to take the request at once."""
    return np.maximum(pages_of(view.known, view.page_tokens) - load.pages, 0.0)


def due_of(
    known: int, hit: int, *, reads: bool, writes: bool, batch: bool = False, page_tokens: int = PAGE_TOKENS
) -> Due:
    """What a leg asks of a worker that has the first ``hit`` pages of ``known`` tokens."""
    cached = min(hit * page_tokens, known - 1)
    compute = known - cached if reads else 0
    pairs = int(compute * (cached + 0.5 * (compute + 1)))
    return Due(
        tokens=compute,
        pairs=pairs,
        batch_tokens=compute if batch else 0,
        batch_pairs=pairs if batch else 0,
        rows=int(writes),
        context=known if writes else 0,
        pages=pages_of(known, page_tokens),
    )
