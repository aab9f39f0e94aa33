"""The stalls of F1 as a picture: after how long the next token came, for which share of answers, by kind of blow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from bench.faults.result import Result

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 340, 56, 42, 16
COLOURS = {"SIGKILL": "#d95f02", "SIGSTOP": "#1f77b4", "SIGTERM": "#7570b3", "no blow": "#888888"}
BARS = {"SIGKILL": 1.5, "SIGSTOP": 5.0}
MARKS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
SHARES = (0, 25, 50, 75, 90, 99, 100)


def plot(results: Sequence[Result], path: Path) -> None:
    """Nothing when F1 was not run."""
    stalls = next((one.figures.get("stalls") for one in results if one.name == "F1"), None)
    if not stalls:
        return
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_grid(),
    ]
    drawn = [(kind, stalls[kind]) for kind in COLOURS if stalls.get(kind)]
    for number, (kind, values) in enumerate(drawn):
        colour = COLOURS[kind]
        line = " ".join(f"{_x(value)},{_y(share)}" for share, value in enumerate(values))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        words = f"{kind}: p99 {values[99]:.2g} s"
        if kind in BARS:
            x = _x(BARS[kind])
            parts.append(
                f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{HEIGHT - BOTTOM}" stroke="{colour}" stroke-dasharray="4"/>'
            )
            words += f" (bar {BARS[kind]:g} s, dashed)"
        parts.append(f'<text x="{LEFT + 10}" y="{TOP + 16 + 16 * number}" fill="{colour}">{words}</text>')
    middle = (LEFT + WIDTH) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">seconds from the blow to the next token</text>'
    )
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


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
