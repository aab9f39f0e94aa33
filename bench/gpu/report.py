"""What a run found as Markdown and as a picture.  Pure: figures in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.gpu.figures import BARS, Bar, Findings

MARK = "<!-- gpu -->"
"""The lines of a page between which the figures stand."""

WIDTH, HEIGHT, MARGIN = 640, 300, 56


def put_into(page: str, text: str) -> str:
    """The page with ``text`` between its two marks.  Raises ValueError when it has not just two."""
    parts = page.split(MARK)
    if len(parts) != 3:
        raise ValueError(f"the page must have the line {MARK} twice, it has it {len(parts) - 1} times")
    return f"{parts[0]}{MARK}\n\n{text.strip()}\n\n{MARK}{parts[2]}"


def section(findings: Findings) -> str:
    """Everything between the marks."""
    return "\n".join(
        [*_about(findings), "", *_bars(findings), "", *_checks(findings), "", *_tables(findings.tables)]
    ).strip()


def owed(findings: Findings) -> list[Bar]:
    """Bars without a figure."""
    return [bar for bar in BARS if bar.key not in findings.figures]


def _about(findings: Findings) -> Iterator[str]:
    machine = ", ".join(f"{name} {value}" for name, value in findings.machine.items())
    kind = "A dry run: nothing here is a measurement." if findings.dry else "Medians of one run."
    yield f"{kind} {machine}; {findings.seconds:.0f} s."
    if findings.roofline:
        roof = findings.roofline
        yield (
            f"\nIn this run: copies {roof['copy_bytes_per_s'] / 1e12:.2f} TB/s (both ways counted), reads "
            f"{roof['read_bytes_per_s'] / 1e12:.2f} TB/s, bf16 products {roof['matmul_flops'] / 1e12:.0f} TFLOP/s."
        )


def _bars(findings: Findings) -> Iterator[str]:
    yield "| | bar | found | |"
    yield "|---|---|---:|---|"
    for bar in BARS:
        value, note = findings.figures.get(bar.key), findings.notes.get(bar.key, "")
        if value is None:
            yield f"| {bar.what} | {bar.wanted} | owed | {note} |".replace("  |", " |")
            continue
        if findings.dry:
            yield f"| {bar.what} | {bar.wanted} | walked | |"
            continue
        verdict = "" if bar.least is None and bar.most is None else "met" if bar.met(value) else "**missed**"
        told = ", ".join(part for part in (verdict, note) if part)
        yield f"| {bar.what} | {bar.wanted} | {value:.3g} {bar.unit} | {told} |".replace("  |", " |")


def _checks(findings: Findings) -> Iterator[str]:
    failed = findings.failed
    yield f"{len(findings.checks) - len(failed)} of {len(findings.checks)} checks passed."
    for check in failed:
        yield f"- **{check.name}**: {check.found}"


def _tables(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    for name, lines in tables.items():
        if not lines:
            continue
        columns = list(lines[0])
        yield f"### {name}"
        yield ""
        yield "| " + " | ".join(columns) + " |"
        yield "|" + "---:|" * len(columns)
        for line in lines:
            yield "| " + " | ".join(_cell(line[column]) for column in columns) + " |"
        yield ""


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def picture(title: str, lines: Sequence[Mapping[str, Any]], x: str, y: str) -> str:
    """SVG: one polyline over the logarithm of ``x``; no library is needed."""
    points = [(float(line[x]), float(line[y])) for line in lines if float(line[x]) > 0]
    low, high = min(a for a, _ in points), max(a for a, _ in points)
    top = max(b for _, b in points) or 1.0
    span = max(_log(high) - _log(low), 1e-9)

    def at(a: float, b: float) -> str:
        across = MARGIN + (WIDTH - 2 * MARGIN) * (_log(a) - _log(low)) / span
        return f"{across:.1f},{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * b / top:.1f}"

    marks = [
        f'<text x="{at(a, 0).split(",")[0]}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{a:g}</text>'
        for a, _ in points
    ]
    dots = [f'<circle cx="{at(a, b).split(",")[0]}" cy="{at(a, b).split(",")[1]}" r="3"/>' for a, b in points]
    line = " ".join(at(a, b) for a, b in points)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            'font-size="12">',
            f'<text x="{WIDTH / 2}" y="20" text-anchor="middle">{title}</text>',
            f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">{x}</text>',
            f'<text x="8" y="{MARGIN - 12}">{y}, up to {top:.3g}</text>',
            f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="2"/>',
            *dots,
            *marks,
            "</svg>",
        ]
    )


def _log(value: float) -> float:
    from math import log2

    return log2(value)
