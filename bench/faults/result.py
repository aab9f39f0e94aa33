"""What a run has found: figures, whether the bar holds, and how that is shown."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate


@dataclass(kw_only=True)
class Result:
    """Of one run.  ``held`` is None where it could not be run; ``why`` says what is missing or what was broken."""

    name: str
    what: str
    held: bool | None
    figures: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """In a word."""
        return {True: "held", False: "missed", None: "not run"}[self.held]

    @property
    def words(self) -> str:
        """Its figures, what a plot shows left out, and why it is as it is."""
        plain = {key: value for key, value in self.figures.items() if not isinstance(value, dict | list)}
        told = ", ".join(f"{key} {_shown(value)}" for key, value in plain.items())
        return ". ".join(part for part in (told, "" if self.held else self.why) if part)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much a run may do: ``seconds`` of disturbance, or ``scale`` of its full counts, and for how long."""

    seconds: float
    scale: float
    until: float = math.inf  # of the monotonic clock: what has parts begins none after it
    resume: Path | None = None  # where those keep parts that are done

    def over(self) -> bool:
        """Is there no time left for another part?"""
        return time.monotonic() >= self.until

    def count(self, full: int, least: int = 1) -> int:
        """So many of ``full`` things, at least ``least``."""
        return max(least, round(full * self.scale))


Run = Callable[[Budget], Result]

BEGIN, END = "<!-- figures of python -m bench.faults -->", "<!-- end of figures -->"
"""Lines of a page between which the table stands."""


class NotHereError(Exception):
    """This machine lacks what a run needs; the message says what."""


def judged(name: str, what: str, checks: dict[str, bool], figures: dict[str, Any]) -> Result:
    """Held if all checks are; else the names of those that are not say why."""
    broken = [check for check, good in checks.items() if not good]
    return Result(name=name, what=what, held=not broken, figures=figures, why="; ".join(broken))


def table(results: Sequence[Result]) -> str:
    """For people and for docs/reliability.md."""
    rows = [(one.name, one.what, one.verdict, one.words.replace("|", "/").replace("\n", " ")) for one in results]
    return tabulate(rows, headers=("", "fault or load", "", "figures"), tablefmt="pipe")


def rewritten(page: str, results: Sequence[Result]) -> str:
    """A page with the table of these results in the place of the one that it had.  Raises ValueError without one."""
    before, found, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"the page has no lines {BEGIN} and {END}")
    rows = table(results).splitlines()
    widths = [re.sub(r"-+", "---", rows[1]), *(re.sub(r" {2,}", " ", row) for row in rows[2:])]
    head = re.sub(r" {2,}", " ", rows[0])
    return "".join((before, found, "\n", "\n".join([head, *widths]), "\n", closed, after))


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of all are not above; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]
