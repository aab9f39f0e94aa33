"""Do four gateways on hosts of their own keep to a tenant's rates, count tokens once and end few workers together?

Four ``penstock serve --join``, each a host of its own with respect to rates, and workers that all of them have.

In the first two scenes a client at each asks for more than the tenant's rate allows, from empty buckets on, for 60
seconds, once with requests a minute and once with tokens a minute:

- ``shares``: the hosts divide the rate among themselves.  One is killed after 20 s, another is started after 40 s.
- ``redis``: the buckets are in a Redis.  It is killed after 15 s, a host after 30 s, and an empty one takes its place
  after 45 s.  Needs redis-server (Debian's redis-server) and the extra redis.

Bar: what is admitted is at most 1.1 of the rate, over the 60 s.

- ``poison``: each of four requests is asked for at another gateway first, until it has failed, and, when all gateways
  have the worker that comes next, at each of them with another key and seed.  The worker that has it gets SIGSEGV each
  time.  Bar: a request ends two workers in all.
- ``metering``: requests with idempotency keys, each sent to all gateways: one after the other, from each gateway on,
  and at all at once.  Bar: no token is counted twice for the tenant, and none is left out.

    python -m bench.rates                                     # eight minutes
    python -m bench.rates --only shares --json rows.json --plot docs/rates.svg
    python -m bench.rates --only poison,metering

What this machine lacks is named, and the other scenes are measured.  Exits with 1 when a bar is missed or nothing was
measured.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.faults.result import NotHereError
from bench.scenes import Row, add_options, print_head, save, selected

from cluster.gateway_hosts import GATEWAYS, POISON, STRICT, Ending, Hosts, Meter, Metered, end_workers, error_code
from cluster.rated_hosts import MINUTE_S, REQUESTS, TOKENS, Minute, minute_with_redis, minute_without_redis

BAR = 1.1
ENDED_BAR = 2
RATED = {"shares": minute_without_redis, "redis": minute_with_redis}
SCENES = (*RATED, "poison", "metering")
UNITS = {"requests": REQUESTS, "tokens": TOKENS}
WINDOW_S = 5.0
"""What a point of the plot is the sum of."""

REFUSED = (422, "poison_request")


@dataclass
class Found:
    """What the plot shows."""

    minutes: dict[str, Minute] = field(default_factory=dict)
    endings: list[Ending] = field(default_factory=list)
    metered: list[Metered] = field(default_factory=list)


# --- rates ------------------------------------------------------------------------------------------------------------


def rated(scene: str, found: Found) -> Iterator[Row]:
    """Raises NotHereError."""
    if scene == "redis" and shutil.which("redis-server") is None:
        raise NotHereError("redis-server")
    if scene == "redis" and find_spec("redis") is None:
        raise NotHereError("the extra redis")
    for unit, what in UNITS.items():
        with tempfile.TemporaryDirectory() as folder:
            minute = found.minutes[f"{scene}, {unit}"] = RATED[scene](Path(folder), what)
        yield row_of(scene, unit, minute)


def row_of(scene: str, unit: str, minute: Minute) -> Row:
    """The line of the table."""
    told = "; ".join(f"{what} after {at:.0f} s" for at, what in minute.events)
    parts = ", ".join(f"{part:,}" for part in minute.parts)
    return Row(scene, f"{unit} a minute: admitted in {minute.seconds:.1f} s", minute.ratio, "of the rate", BAR,
               f"{told}; {parts} of {minute.rate:,} a minute")  # fmt: skip


# --- what workers die of ----------------------------------------------------------------------------------------------


def poison(found: Found) -> Iterator[Row]:
    """One worker: with several, one could die before the death of another is known."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        hosts = Hosts(stack, Path(folder), config=STRICT, services=GATEWAYS, workers=1)
        for first in range(GATEWAYS):
            found.endings.append(end_workers(hosts, first, f"{POISON}, {first} times"))
        others = [error_code(hosts.ask(number, f"other-{number}"))[0] for number in range(GATEWAYS)]
    ended = [ending.ended for ending in found.endings]
    verdicts = [verdict for ending in found.endings for verdict in ending.verdicts]
    told = f"{GATEWAYS} requests, each at another gateway first: {', '.join(map(str, ended))}"
    yield Row("poison", "workers one request ended, at most", max(ended), "", ENDED_BAR, told)
    told = f"of {len(verdicts)}, {GATEWAYS * GATEWAYS} of them after the verdict"
    yield Row("poison", "asked for and not refused", sum(verdict != REFUSED for verdict in verdicts), "", 0, told)
    told = f"of {GATEWAYS}, one at each gateway afterwards"
    yield Row("poison", "other requests that failed", sum(status != 200 for status in others), "", 0, told)


# --- what is counted --------------------------------------------------------------------------------------------------


def metering(found: Found) -> Iterator[Row]:
    """As often one after the other as at all at once; then a key at each alone, so that nothing is counted later."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        meter = Meter(Hosts(stack, Path(folder), services=GATEWAYS))
        for first in range(GATEWAYS):
            found.metered += [meter.one_after_the_other(first), meter.at_once()]
        found.metered += [meter.at_one(number) for number in range(GATEWAYS)]
    keys = Counter(each.how for each in found.metered)
    surplus = [count for each in found.metered for count in each.surplus]
    total = totals(found.metered)
    told = f"{sum(keys.values())} keys: {', '.join(f'{count} {how}' for how, count in keys.items())}"
    yield Row("metering", "tokens counted twice", sum(max(0, count) for count in surplus), "", 0, told)
    told = f"of {total['asked']:,.0f}: prompts and responses, each once"
    yield Row("metering", "tokens not counted", sum(max(0, -count) for count in surplus), "", 0, told)
    differ = sum(len(set(each.answers)) - 1 for each in found.metered)
    yield Row("metering", "responses of a key that differ", differ, "", 0, f"of {total['responses']:,.0f}")
    for name in ("sent", "generated", "billed", "replayed"):
        yield Row("metering", f"tokens of responses {name}", total[name], "")


def totals(metered: Sequence[Metered]) -> dict[str, float]:
    """Of all keys: responses, and tokens."""
    return {
        "responses": sum(len(each.answers) for each in metered),
        "asked": sum(each.tokens + each.prompt for each in metered),
        "sent": sum(len(each.answers) * each.tokens for each in metered),
        "generated": sum(each.total("generated") for each in metered),
        "billed": sum(each.total("completion") for each in metered),
        "replayed": sum(each.total("replayed") for each in metered),
    }


# --- the plot ---------------------------------------------------------------------------------------------------------


def plot(found: Found, path: Path) -> None:
    """A panel for each scene."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    shown = [scene for scene in RATED if any(name.startswith(scene) for name in found.minutes)]
    scenes = [*shown, *(["poison"] if found.endings else []), *(["metering"] if found.metered else [])]
    figure, panels = pyplot.subplots(1, len(scenes), figsize=(4.5 * len(scenes), 3.6), layout="constrained",
                                     squeeze=False)  # fmt: skip
    for scene, axes in zip(scenes, panels[0], strict=True):
        if scene in RATED:
            draw_minutes(axes, scene, found.minutes)
        elif scene == "poison":
            axes.bar([f"gateway {number}" for number in range(GATEWAYS)], [each.ended for each in found.endings])
            axes.axhline(ENDED_BAR, color="black", lw=2)
            axes.set(title="poison", xlabel="asked first", ylabel="workers one request ended", ylim=(0, ENDED_BAR + 1))
        else:
            total = totals(found.metered)
            names = ("sent", "replayed", "generated", "billed")
            bars = axes.bar(names, [total[name] for name in names])
            axes.bar_label(bars, fmt="{:,.0f}", fontsize=8)
            axes.axhline(sum(each.tokens for each in found.metered), color="black", lw=2)
            axes.set(title="metering", ylabel="tokens of responses; black: each once")
    figure.savefig(path)


def draw_minutes(axes: Any, scene: str, minutes: dict[str, Minute]) -> None:
    """What was admitted in each five seconds, by the rate; ``axes``: matplotlib's."""
    for unit in UNITS:
        minute = minutes.get(f"{scene}, {unit}")
        if minute is None:
            continue
        counts = [0.0] * int(MINUTE_S / WINDOW_S)
        for at, units in minute.admissions:
            if at < MINUTE_S:
                counts[int(at / WINDOW_S)] += units / (minute.rate * WINDOW_S / 60)
        axes.plot([WINDOW_S * (number + 0.5) for number in range(len(counts))], counts, "o-", ms=3, label=unit)
    for number, (at, what) in enumerate(minute.events if minute else ()):
        axes.axvline(at, color="gray", lw=0.8, ls=":")
        axes.annotate(what, (at + 0.5, 0.06 + 0.09 * number), fontsize=8, color="gray")
    axes.axhline(1.0, color="black", lw=0.8)
    axes.set(title=scene, xlabel="seconds", xlim=(0, MINUTE_S), ylim=(0, 1.8))
    axes.set_ylabel(f"admitted in {WINDOW_S:g} s, of the rate")
    axes.legend(loc="upper left")


# --- all --------------------------------------------------------------------------------------------------------------


def measure(scene: str, found: Found) -> Iterator[Row]:
    """Raises NotHereError."""
    if scene in RATED:
        return rated(scene, found)
    return poison(found) if scene == "poison" else metering(found)


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.rates", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, SCENES)
    options = parser.parse_args()
    names = selected(parser, options.only, SCENES)
    print_head()
    rows, found = [], Found()
    for scene in names:
        try:
            for row in measure(scene, found):
                rows.append(row)
                print(row.line(), flush=True)
        except NotHereError as missing:
            print(f"{scene} is not measured: needs {missing}", file=sys.stderr, flush=True)
        if options.json:
            save(options.json, rows, SCENES)
    if options.plot and rows:
        plot(found, options.plot)
    return 0 if rows and all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
