"""The policy of least cost: the worker where all requests together wait least because of this one.

A step takes ``step + token * tokens + pair * (query, key) pairs + sample * sampled tokens`` seconds, by rates that each
worker has learned from its own steps.  For a request of ``known_tokens``, of which some are cached, the cost is the sum
of

    wait          prompt tokens that the worker computes first (for an interactive request, without batch work)
    prefill       the request's own prompt, without what is cached
    fetch         pages from caches of other workers on its host or from its own lower tiers, at the measured time of
                  one page, where that is less than computing them; they count as cached then
    interference  requests decoded there, each of which waits during the prefill; at least as many as the candidates
                  decode on average, since an idle worker of a busy fleet does not stay idle
    transfer      pages that a decode worker lacks, at the measured time to copy one, for which its other requests wait
                  too, and the measured time that prompts waited for a page after all else was computed
    decode        the request's own output, in steps shared with all requests decoded there
    slowdown      what those requests lose to the longer steps

Prefill and decode are weighed separately, so that all pairs of workers are compared at the price of two passes.

- **Disaggregated or not.**  A worker for both stages is compared with the best pair.  A decode worker may prefill a
  prompt if that takes no longer than one of its steps: its requests wait no longer than they do anyway, and no page is
  transferred.
- **Shared cores.**  Decode workers that share their cores with prefill workers say when that spares responses nothing
  (``engine.core.local_prefill``).  Then they compute the prompts, too, and the prefill workers of these cores idle and
  lend them; prefill workers of other hosts are still compared.
- **A hot prefix is copied.**  Open requests that begin alike share the price of recomputing it on another worker, since
  with the copy they need not queue at the one that has it.
- **Several gateways** act on reports of the same age.  For each request a gateway scores a random 1/N of the fleet (N
  gateways), plus the workers with the longest cached prefix and the key's own worker.
- **Ties.**  Among costs within ``SLACK``, and no less of the prompt cached, the worker is taken that the session (or
  the beginning of the prompt) maps to, the same for all gateways.  A session's own worker may also cost more by the
  time to prefill the whole prompt, but never hold less of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.router.policy.base import (
    CandidateScores,
    PlacementView,
    Policy,
    PolicyChoice,
    rendezvous_pick,
    splitmix64,
    top_scores,
)
from penstock.router.worker_load import ExpectedWork, Numbers, Slots, WorkerLoad, WorkerRates
from penstock.types import PAGE_TOKENS, RequestStage


class PrefillCosts(NamedTuple):
    """The cost of the prefill at each candidate."""

    cached: Numbers  # tokens, here
    fetch: Numbers  # seconds
    compute: Numbers  # tokens
    wait: Numbers
    prefill: Numbers
    interference: Numbers


class DecodeCosts(NamedTuple):
    """The cost of decoding at each candidate."""

    step: Numbers  # seconds of the next step without the request
    decode: Numbers
    slowdown: Numbers


def pages_of(tokens: int, page_tokens: int = PAGE_TOKENS) -> int:
    """The number of KV pages that hold ``tokens`` tokens."""
    return -(-tokens // page_tokens)


def attention_pairs(compute: Numbers, cached: Numbers) -> Numbers:
    """(query, key) pairs of the attention of ``compute`` tokens after ``cached`` ones."""
    return compute * (cached + 0.5 * (compute + 1))


def prefill_costs(view: PlacementView, slots: Slots, load: WorkerLoad, rates: WorkerRates) -> PrefillCosts:
    """At least one token is computed: the next one is sampled from it."""
    cached = here = np.minimum(view.hits.take(slots) * float(view.page_tokens), view.known_tokens - 1)
    compute = view.known_tokens - cached
    work = rates.token * compute + rates.pair * attention_pairs(compute, cached)
    fetch = np.zeros(len(slots))
    for there, bringing in prefix_sources(view, slots, rates, here):
        left = view.known_tokens - there
        rest = rates.token * left + rates.pair * attention_pairs(left, there)
        sooner = (there > here) & (bringing + rest < fetch + work)
        fetch, work, compute = (
            np.where(sooner, one, other) for one, other in ((bringing, fetch), (rest, work), (left, compute))
        )
    return PrefillCosts(
        cached=here,
        fetch=fetch,
        compute=compute,
        wait=queue_wait(load, rates, urgent=view.interactive),
        prefill=rates.step + work + rates.sample,
        interference=np.maximum(load.rows, load.rows.sum() / len(load.rows)) * work,
    )


def prefix_sources(
    view: PlacementView, slots: Slots, rates: WorkerRates, here: Numbers
) -> Iterator[tuple[Numbers, Numbers]]:
    """Sources other than its cache: (tokens that a candidate then has, seconds to fetch them)."""
    if view.reachable_hits is not view.hits:
        there = np.minimum(view.reachable_hits.take(slots) * float(view.page_tokens), view.known_tokens - 1)
        yield there, rates.fetch * np.ceil((there - here) / view.page_tokens)
    so_far, bringing = here, np.zeros(len(slots))
    for depths, page_s in zip(view.tier_hits, rates.tiers, strict=False):
        there = np.maximum(so_far, np.minimum(depths.take(slots) * float(view.page_tokens), view.known_tokens - 1))
        pages = np.ceil((there - so_far) / view.page_tokens)
        bringing = bringing + np.where(pages > 0, pages, 0.0) * np.where(pages > 0, page_s, 0.0)
        so_far = there
        yield there, bringing


def queue_wait(load: WorkerLoad, rates: WorkerRates, *, urgent: bool) -> Numbers:
    """The work queued before a request; batch requests wait for interactive ones, not the other way round."""
    seconds: Numbers = rates.token * load.tokens + rates.pair * load.pairs
    if urgent:
        seconds = np.maximum(seconds - rates.token * load.batch_tokens - rates.pair * load.batch_pairs, 0.0)
    return seconds


def decode_costs(view: PlacementView, load: WorkerLoad, rates: WorkerRates) -> DecodeCosts:
    """The costs of one more response in every decode step, which makes each step longer."""
    step = decode_step(load, rates)
    more = rates.token + rates.sample + rates.pair * view.known_tokens
    return DecodeCosts(
        step=step, decode=view.expected_output * (step + more), slowdown=view.expected_output * load.rows * more
    )


def decode_step(load: WorkerLoad, rates: WorkerRates) -> Numbers:
    """Seconds of a step in which all responses of a worker are decoded."""
    step: Numbers = rates.step + (rates.token + rates.sample) * load.rows + rates.pair * load.context
    return step


def transfer_costs(view: PlacementView, slots: Slots, load: WorkerLoad, rates: WorkerRates) -> Numbers:
    """Seconds to copy the pages that a decode worker lacks, between its steps, and of waits for them."""
    lacking = np.maximum(pages_of(view.known_tokens, view.page_tokens) - view.hits.take(slots), 0)
    return lacking * (rates.page * (1 + load.rows) + rates.wait)


def missing_pages(view: PlacementView, load: WorkerLoad) -> Numbers:
    """Pages that a worker lacks to admit the request at once."""
    return np.maximum(pages_of(view.known_tokens, view.page_tokens) - load.pages, 0.0)


def expected_work(
    known: int, hit: int, *, reads: bool, writes: bool, batch: bool = False, page_tokens: int = PAGE_TOKENS
) -> ExpectedWork:
    """The work of a stage on a worker that has the first ``hit`` pages of ``known`` tokens."""
    cached = min(hit * page_tokens, known - 1)
    compute = known - cached if reads else 0
    pairs = int(compute * (cached + 0.5 * (compute + 1)))
    return ExpectedWork(
        tokens=compute,
        pairs=pairs,
        batch_tokens=compute if batch else 0,
        batch_pairs=pairs if batch else 0,
        rows=int(writes),
        context=known if writes else 0,
        pages=pages_of(known, page_tokens),
    )


SLACK = 0.02
"""Costs that differ by less than this share of the lesser one are equal."""

PREFILL_SCORES = ("cost_s", "wait_s", "read_s", "fetch_s", "disturb_s", "compute", "cached", "short")
DECODE_SCORES = ("cost_s", "wait_s", "move_s", "write_s", "slow_s", "answers", "cached", "short")
AGGREGATED_SCORES = (
    "cost_s",
    "wait_s",
    "read_s",
    "fetch_s",
    "disturb_s",
    "write_s",
    "slow_s",
    "compute",
    "cached",
    "short",
)


class _Found(NamedTuple):
    """The best candidate of a stage."""

    slot: int
    cost: float
    short: bool
    weighed: CandidateScores


class _At(NamedTuple):
    """Candidates, and what is known of each."""

    slots: Slots
    load: WorkerLoad
    rates: WorkerRates
    short: Numbers  # pages that it lacks

    @classmethod
    def of(cls, view: PlacementView, slots: Slots) -> _At:
        slots = _looked_at(view, slots)
        load, rates = view.loads.at_slots(slots)
        return cls(slots, load, rates, missing_pages(view, load))

    def those(self, mask: NDArray[np.bool_]) -> _At:
        """A subset of the candidates."""
        rates = self.rates.select(mask)
        return _At(self.slots[mask], WorkerLoad(*(column[mask] for column in self.load)), rates, self.short[mask])


class LeastCost(Policy):
    """The policy of the module's docstring."""

    name = "penstock"

    def choose(self, view: PlacementView) -> PolicyChoice:
        if view.single_token:  # the prefill worker samples the one token that is wanted
            found = _better(_whole(view, _at(view, view.prefill)), _whole(view, _at(view, view.aggregated)))
            return PolicyChoice() if found is None else _chosen(found, "one token is wanted")
        whole = _whole(view, _at(view, view.aggregated))
        if not len(view.prefill) or not len(view.decode):
            return PolicyChoice() if whole is None else _chosen(whole, "no workers for two legs")
        readers, writers = view.prefill, _At.of(view, view.decode)
        local = view.loads.local_prefill(writers.slots)
        if local.any() and not view.always_split:
            whole = _better(whole, _whole(view, writers.those(local)))
            readers = view.loads.on_other_cores(readers, writers.slots[local])
            if not len(readers) and whole is not None:
                return _chosen(whole, "prefill workers have no cores but those of the decode workers")
        prefill = _prefill(view, _At.of(view, readers))
        writing = decode_costs(view, writers.load, writers.rates)
        decode = _decode(view, writers, writing)
        both = (prefill.short or decode.short, prefill.cost + decode.cost)
        if not view.always_split:
            whole = _better(whole, _whole(view, _quick(view, writers, writing.step)))
            if whole is not None and (whole.short, whole.cost) <= both:
                return _chosen(whole, f"whole {whole.cost * 1e3:.3g} ms, split {both[1] * 1e3:.3g} ms")
        legs = ((RequestStage.DECODE, decode.slot), (RequestStage.PREFILL, prefill.slot))
        why = f"split {both[1] * 1e3:.3g} ms" + (f", whole {whole.cost * 1e3:.3g} ms" if whole else "")
        return PolicyChoice(legs, (decode.weighed, prefill.weighed), why)

    def choose_decode(self, view: PlacementView) -> PolicyChoice:
        at = _At.of(view, view.decode)
        found = _decode(view, at, decode_costs(view, at.load, at.rates))
        return PolicyChoice(
            ((RequestStage.DECODE, found.slot),), (found.weighed,), "its worker wants to be relieved of it"
        )


def _at(view: PlacementView, slots: Slots) -> _At | None:
    return _At.of(view, slots) if len(slots) else None


def _prefill(view: PlacementView, at: _At) -> _Found:
    reading = prefill_costs(view, at.slots, at.load, at.rates)
    cost = reading.wait + _shared(view, reading.prefill + reading.fetch) + reading.interference
    spent = (reading.wait, reading.prefill, reading.fetch, reading.interference)
    table = np.array((cost, *spent, reading.compute, reading.cached, at.short))
    return _best(view, RequestStage.PREFILL, at, (PREFILL_SCORES, table))


def _decode(view: PlacementView, at: _At, writing: DecodeCosts) -> _Found:
    _, load, rates, short = at
    move = transfer_costs(view, at.slots, load, rates)
    wait = queue_wait(load, rates, urgent=view.interactive)
    cached = np.minimum(view.hits.take(at.slots) * float(view.page_tokens), view.known_tokens)
    cost = wait + move + writing.decode + writing.slowdown
    table = np.array((cost, wait, move, writing.decode, writing.slowdown, load.rows, cached, short))
    return _best(view, RequestStage.DECODE, at, (DECODE_SCORES, table))


def _whole(view: PlacementView, at: _At | None) -> _Found | None:
    if at is None:
        return None
    reading = prefill_costs(view, at.slots, at.load, at.rates)
    writing = decode_costs(view, at.load, at.rates)
    reads = _shared(view, reading.prefill + reading.fetch)
    cost = reading.wait + reads + reading.interference + writing.decode + writing.slowdown
    spent = (reading.wait, reading.prefill, reading.fetch, reading.interference, writing.decode, writing.slowdown)
    table = np.array((cost, *spent, reading.compute, reading.cached, at.short))
    return _best(view, RequestStage.WHOLE, at, (AGGREGATED_SCORES, table))


def _quick(view: PlacementView, at: _At, step: Numbers) -> _At | None:
    """Decode workers that have room and, by measured rates, prefill this prompt within one ``step``."""
    deepest = max(float(depths.take(at.slots).max()) for depths in (view.reachable_hits, *view.tier_hits))
    least = view.known_tokens - view.page_tokens * deepest  # tokens that are to be read, at least
    if least * at.rates.token.min() > step.max():
        return None
    reading = prefill_costs(view, at.slots, at.load, at.rates)
    known = view.loads.measured(at.slots) & (at.short == 0)
    quick = known & (reading.prefill + reading.fetch - at.rates.step <= step) & (reading.wait <= step)
    return at.those(quick) if quick.any() else None


def _looked_at(view: PlacementView, slots: Slots) -> Slots:
    """All candidates; with several gateways a random part, those with the longest prefix, and the key's own."""
    gateways = view.loads.gateways(slots)
    count = max(2, -(-len(slots) // gateways))
    if gateways < 2 or count >= len(slots):
        return slots
    luck = splitmix64(view.loads.hashes.take(slots), view.tie_break)
    taken = np.zeros(len(slots), np.bool_)
    taken[np.argpartition(luck, count)[:count]] = True
    taken[rendezvous_pick(view.loads, slots, view.affinity_key)] = True
    hits = view.hits.take(slots)
    best = hits.max()
    if best > 0:
        holders = np.flatnonzero(hits == best)
        taken[holders[np.argpartition(luck[holders], count)[:count] if len(holders) > count else slice(None)]] = True
    return slots[taken]


def _shared(view: PlacementView, read: Numbers) -> Numbers:
    """The cost of the prefill when requests with the same prefix share the price of a copy."""
    if not view.prefix_sharers:
        return read
    least = float(read.min())
    shared: Numbers = least + (read - least) / (1 + view.prefix_sharers)
    return shared


def _best(view: PlacementView, leg: RequestStage, at: _At, table: tuple[tuple[str, ...], Numbers]) -> _Found:
    """The candidate with room, then of least cost, then by affinity."""
    slots, cost, cached = at.slots, table[1][0], table[1][-2]
    order = cost
    if at.short.any() and not at.short.all():
        order = np.where(at.short > 0, np.inf, cost)
    least = float(order.min())
    equals = np.flatnonzero(order <= least * (1 + SLACK))
    held = cached[equals]
    enough = held[order[equals] == least].max()
    equals = equals[held >= enough]
    chosen = rendezvous_pick(view.loads, slots[equals], view.affinity_key) if len(equals) > 1 else 0
    place = int(equals[chosen])
    if view.has_session:
        place = _home(view, at, (order, cached), place)
    return _Found(
        int(slots[place]), float(cost[place]), bool(at.short[place] > 0), top_scores(leg, slots, table, order)
    )


def _home(view: PlacementView, at: _At, of: tuple[Numbers, Numbers], place: int) -> int:
    """The session's own worker, if it costs little more; ``of``: costs and cached tokens."""
    home = rendezvous_pick(view.loads, at.slots, view.affinity_key)
    order, cached = of
    alone = float(at.rates.step[home] + at.rates.token[home] * view.known_tokens)  # to read it all
    return home if cached[home] >= cached[place] and order[home] <= order[place] + alone else place


def _better(one: _Found | None, other: _Found | None) -> _Found | None:
    found = [each for each in (one, other) if each is not None]
    return min(found, key=lambda each: (each.short, each.cost), default=None)


def _chosen(found: _Found, because: str) -> PolicyChoice:
    return PolicyChoice(((RequestStage.WHOLE, found.slot),), (found.weighed,), because)
