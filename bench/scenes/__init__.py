"""Benchmarks that are made of scenes: which of them to run, the rows of their table, and the file that keeps rows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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


def add_options(parser: argparse.ArgumentParser, scenes: Collection[str]) -> None:
    """``--only``, ``--json`` and ``--plot``."""
    parser.add_argument("--only", metavar="SCENES", help=f"of {', '.join(scenes)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to those there")
    parser.add_argument("--plot", type=Path, metavar="FILE")


def selected(parser: argparse.ArgumentParser, only: str | None, scenes: Collection[str]) -> list[str]:
    """The scenes that ``--only`` names, or all; where there is no such scene, the process ends with a message."""
    names = only.split(",") if only else list(scenes)
    if unknown := [name for name in names if name not in scenes]:
        parser.error(f"no such scene: {', '.join(unknown)}; there are {', '.join(scenes)}")
    return names


def print_head(more: str = "") -> None:
    """The hardware and the head of the table."""
    print(f"{hardware_line()}{more}\n\n| scene | | measured | bar | |\n|---|---|---:|---|---|", flush=True)


def save(path: Path, rows: Sequence[Row], scenes: Collection[str]) -> list[Row]:
    """Replace what the file has of the rows' scenes; all that it has then, in the order of scenes."""
    known = [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []
    measured, order = {row.scene for row in rows}, list(scenes)
    every = [*(row for row in known if row.scene not in measured), *rows]
    # Figures that follow from those of a scene have a name of their own, and come last.
    every.sort(key=lambda row: order.index(row.scene) if row.scene in order else len(order))
    path.write_text(json.dumps([asdict(row) for row in every], indent=1) + "\n")
    return every
