"""Do four gateways on hosts of their own keep to the rates of a tenant while one is killed, and their Redis with it?

Four ``penstock serve --join``, each a host of its own with respect to rates, and one worker.  A client at each asks for
more than the tenant's rate allows, from empty buckets on, for 60 seconds:

- ``shares``: the hosts divide the rate among themselves.  One is killed after 20 s, another is started after 40 s.
- ``redis``: the buckets are in a Redis.  It is killed after 15 s, a host after 30 s, and an empty one takes its place
  after 45 s.

Each with requests a minute and with tokens a minute.  Bar: what is admitted is at most 1.1 of the rate, over the 60 s.

    python -m bench.rates                                     # six minutes
    python -m bench.rates --only shares --json rows.json --plot docs/rates.svg

Exits with 1 when the bar is missed.  The scene ``redis`` needs redis-server (Debian's redis-server).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.faults.result import NotHereError
from bench.scenes import Row, add_options, print_head, save, selected

from cluster.rated_hosts import MINUTE_S, REQUESTS, TOKENS, Minute, minute_with_redis, minute_without_redis

BAR = 1.1
SCENES = {"shares": minute_without_redis, "redis": minute_with_redis}
UNITS = {"requests": REQUESTS, "tokens": TOKENS}
WINDOW_S = 5.0
"""What a point of the plot is the sum of."""


def rows_of(scene: str, unit: str, minute: Minute) -> Row:
    """The line of the table."""
    told = "; ".join(f"{what} after {at:.0f} s" for at, what in minute.events)
    parts = ", ".join(f"{part:,}" for part in minute.parts)
    return Row(scene, f"{unit} a minute: admitted in {minute.seconds:.1f} s", minute.ratio, "of the rate", BAR,
               f"{told}; {parts} of {minute.rate:,} a minute")  # fmt: skip


def plot(minutes: dict[str, Minute], path: Path) -> None:
    """What was admitted in each five seconds, by the rate."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    shown = [scene for scene in SCENES if any(name.startswith(scene) for name in minutes)]
    figure, panels = pyplot.subplots(1, len(shown), figsize=(5.5 * len(shown), 3.6), layout="constrained",
                                     squeeze=False, sharey=True)  # fmt: skip
    for scene, axes in zip(shown, panels[0], strict=True):
        for unit in UNITS:
            minute = minutes.get(f"{scene}, {unit}")
            if minute is None:
                continue
            counts = [0.0] * int(MINUTE_S / WINDOW_S)
            for at, units in minute.admissions:
                if at < MINUTE_S:
                    counts[int(at / WINDOW_S)] += units / (minute.rate * WINDOW_S / 60)
            axes.plot([WINDOW_S * (number + 0.5) for number in range(len(counts))], counts, "o-", ms=3, label=unit)
        for number, (at, what) in enumerate(minute.events):
            axes.axvline(at, color="gray", lw=0.8, ls=":")
            axes.annotate(what, (at + 0.5, 0.06 + 0.09 * number), fontsize=8, color="gray")
        axes.axhline(1.0, color="black", lw=0.8)
        axes.set(title=scene, xlabel="seconds", xlim=(0, MINUTE_S), ylim=(0, None))
        axes.legend(loc="upper left")
    panels[0][0].set_ylabel(f"admitted in {WINDOW_S:g} s, of the rate")
    figure.savefig(path)


def measure(names: Sequence[str]) -> tuple[list[Row], dict[str, Minute]]:
    """Run the scenes, and print their rows."""
    rows: list[Row] = []
    minutes: dict[str, Minute] = {}
    for scene in names:
        if scene == "redis" and shutil.which("redis-server") is None:
            raise NotHereError("redis-server")
        for unit, what in UNITS.items():
            with tempfile.TemporaryDirectory() as folder:
                minute = minutes[f"{scene}, {unit}"] = SCENES[scene](Path(folder), what)
            rows.append(rows_of(scene, unit, minute))
            print(rows[-1].line(), flush=True)
    return rows, minutes


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.rates", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, SCENES)
    options = parser.parse_args()
    names = selected(parser, options.only, SCENES)
    print_head()
    rows, minutes = measure(names)
    if options.json:
        save(options.json, rows, SCENES)
    if options.plot:
        plot(minutes, options.plot)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
