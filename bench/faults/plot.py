"""Stalls as a picture: for which share of answers tokens stood still for how long, by kind of blow.

Of F1, F13 or F14, the first that has been run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from bench.faults.result import Result

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 340, 56, 42, 16
LEGEND_ROW = 16
COLOURS = {
    "SIGKILL": "#d95f02",
    "SIGSTOP": "#1f77b4",
    "SIGTERM": "#7570b3",
    "killed": "#d95f02",
    "stopped": "#1f77b4",
    "cut off": "#1b9e77",
    "no blow": "#888888",
}
BARS = {"SIGKILL": 1.5, "SIGSTOP": 5.0, "killed": 1.5, "stopped": 5.0, "cut off": 10.0}
AXES = {
    "F1": "seconds from the blow to the next token",
    "F13": "seconds from the blow to the next token",
    "F14": "the longest wait of a stream for a token after the blow, in seconds",
}
DASHES = ("", ' stroke-dasharray="2 3"')
"""Of the first and the second way in which a kind of blow was met: a kind is called KIND or KIND|WAY."""

MARKS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
SHARES = (0, 25, 50, 75, 90, 99, 100)


def plot(results: Sequence[Result], path: Path) -> None:
    """Nothing when none of the three was run."""
    found = [one for one in results if one.name in AXES and one.figures.get("stalls")]
    if not found:
        return
    stalls = {name: values for name, values in found[0].figures["stalls"].items() if values}
    height = HEIGHT + LEGEND_ROW * len(stalls) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_grid(),
    ]
    row = 0
    for kind in COLOURS:
        for number, (name, values) in enumerate(pair for pair in stalls.items() if pair[0].split("|")[0] == kind):
            parts += _line(kind, name.partition("|")[2], values, DASHES[number % 2], HEIGHT + LEGEND_ROW * (row + 1))
            row += 1
    middle = (LEFT + WIDTH) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{AXES[found[0].name]}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _line(kind: str, way: str, values: Sequence[float], dash: str, y: int) -> list[str]:
    """The shares of one kind of blow, its bar, and its row of the legend."""
    colour = COLOURS[kind]
    line = " ".join(f"{_x(value)},{_y(share)}" for share, value in enumerate(values))
    words = ", ".join(filter(None, (kind, way))) + f": p99 {values[99]:.2g} s"
    parts = [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    if kind in BARS:
        x = _x(BARS[kind])
        parts.append(
            f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{HEIGHT - BOTTOM}" stroke="{colour}" stroke-dasharray="4"/>'
        )
        words += f" (bar {BARS[kind]:g} s, dashed)"
    sample = f'<path d="M{LEFT} {y - 4}h30" stroke="{colour}" stroke-width="2"{dash}/>'
    return [*parts, sample, f'<text x="{LEFT + 38}" y="{y}" fill="{colour}">{words}</text>']


def _grid() -> list[str]:
    lines = []
    for second in MARKS:
        x = _x(second)
        lines.append(f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        lines.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{second:g}</text>')
    for share in SHARES:
        y = _y(share)
        lines.append(f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - 16}" y2="{y}" stroke="#eee"/>')
        if share != 99:
            lines.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{share} %</text>')
    return lines


def _x(second: float) -> float:
    """On a scale of powers: what is beyond it stands at its end."""
    first, last = math.log(MARKS[0]), math.log(MARKS[-1])
    share = (math.log(min(max(second, MARKS[0]), MARKS[-1])) - first) / (last - first)
    return round(LEFT + (WIDTH - 16 - LEFT) * share, 1)


def _y(share: float) -> float:
    return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share / 100, 1)
