"""Benchmarks that are made of scenes: which of them to run, the rows of their table, and the file that keeps rows."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.gateway.figures import hardware_line


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    scene: str
    what: str
    value: float
    unit: str
    bar: float | None = None
    """At most this."""
    note: str = ""
    """What else there is to know."""

    @property
    def met(self) -> bool:
        """Whether it keeps to its bar, where it has one."""
        return self.bar is None or self.value <= self.bar

    def line(self) -> str:
        """It in the table."""
        bar = "" if self.bar is None else f"<= {self.bar:g}, {'met' if self.met else 'MISSED'}"
        return f"| {self.scene} | {self.what} | {self.value:,.2f} {self.unit} | {bar} | {self.note} |"


def add_options(parser: argparse.ArgumentParser, scenes: Collection[str], *, plot_only: bool = False) -> None:
    """``--only``, ``--json`` and ``--plot``; where the plot shows nothing but rows, ``--plot-only``, too."""
    parser.add_argument("--only", metavar="SCENES", help=f"of {', '.join(scenes)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to those there")
    shown = "all rows of --json" if plot_only else "what was measured"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=f"draw {shown} (needs matplotlib)")
    if plot_only:
        parser.add_argument("--plot-only", action="store_true", help="measure nothing: draw what --json has")


def rows_to_plot(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Row] | None:
    """With ``--plot-only`` the rows of ``--json``, else None.  Ends the process where that or ``--plot`` is missing."""
    if not options.plot_only:
        return None
    if not options.plot or not options.json or not options.json.exists():
        parser.error("--plot-only needs --plot FILE, and a --json FILE with rows that were measured before")
    return load(options.json)


def selected(parser: argparse.ArgumentParser, only: str | None, scenes: Collection[str]) -> list[str]:
    """The scenes that ``--only`` names, or all; where there is no such scene, the process ends with a message."""
    names = only.split(",") if only else list(scenes)
    if unknown := [name for name in names if name not in scenes]:
        parser.error(f"no such scene: {', '.join(unknown)}; there are {', '.join(scenes)}")
    return names


def print_head(more: str = "") -> None:
    """The hardware and the head of the table."""
    print(f"{hardware_line()}{more}\n\n| scene | | measured | bar | |\n|---|---|---:|---|---|", flush=True)


def load(path: Path) -> list[Row]:
    """What ``save`` has written."""
    return [Row(**row) for row in json.loads(path.read_text())]


def save(path: Path, rows: Sequence[Row], scenes: Collection[str]) -> list[Row]:
    """Replace what the file has of the rows' scenes; all that it has then, in the order of scenes."""
    known = load(path) if path.exists() else []
    measured, order = {row.scene for row in rows}, list(scenes)
    every = [*(row for row in known if row.scene not in measured), *rows]
    # Figures that follow from those of a scene have a name of their own, and come last.
    every.sort(key=lambda row: order.index(row.scene) if row.scene in order else len(order))
    path.write_text(json.dumps([asdict(row) for row in every], indent=1) + "\n")
    return every


def finish(measured: Iterable[Sequence[Row]], options: argparse.Namespace, scenes: Collection[str]) -> int:
    """Save the rows of each scene when it is over, and draw their seconds at last, as the options say.

    The exit status: 0 when something was measured and no bar is missed.
    """
    rows: list[Row] = []
    shown: list[Row] = []
    for more in measured:
        rows += more
        shown = save(options.json, more, scenes) if options.json else rows
    if options.plot and shown:
        plot_seconds(shown, options.plot)
    return 0 if rows and all(row.met for row in rows) else 1


def draw_bars(axes: Any, rows: Sequence[Row]) -> None:
    """Each row from the top down, with a black line at its bar; ``axes``: matplotlib's."""
    for number, row in enumerate(rows[::-1]):
        axes.barh(number, row.value, height=0.6, color="#4c78a8" if row.met else "#e45756")
        axes.annotate(f" {row.value:.1f}", (row.value, number), va="center", fontsize=8)
        if row.bar is not None:
            axes.plot([row.bar, row.bar], [number - 0.4, number + 0.4], color="black", lw=2)
    axes.set_yticks(range(len(rows)), [f"{row.scene}: {row.what}" for row in rows[::-1]], fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.margins(x=0.08, y=0.02)


def plot_seconds(rows: Sequence[Row], path: Path) -> None:
    """Draw those that are seconds, each with its bar; needs matplotlib."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row.unit == "s"]
    figure, axes = pyplot.subplots(figsize=(9, 0.8 + 0.3 * len(shown)), layout="constrained")
    draw_bars(axes, shown)
    axes.set(xlabel="seconds; black: the bar")
    figure.savefig(path)
