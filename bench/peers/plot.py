"""The comparison as a picture: a roofline with every system on it, and what clients feel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench.peers.places import (
    AGGREGATED,
    COMPRESSED,
    LLAMA,
    OFFLINE_SYSTEMS,
    OPENVINO,
    PLAIN,
    SERVERS,
    SHAPES,
    SPLIT,
    SPLIT_PLAIN,
    TRANSFORMERS,
    VLLM,
)
from bench.peers.records import Record
from bench.peers.series import Series
from bench.peers.work import decode_limit, prefill_limit

COLOURS = {
    PLAIN: "#1f77b4",
    COMPRESSED: "#0b3d91",
    SPLIT: "#0b3d91",
    SPLIT_PLAIN: "#1f77b4",
    AGGREGATED: "#7fb2e5",
    TRANSFORMERS: "#9467bd",
    LLAMA: "#d95f02",
    VLLM: "#2ca02c",
    OPENVINO: "#8c564b",
}
MARKS = {PLAIN: "o", COMPRESSED: "D", TRANSFORMERS: "v", LLAMA: "s", VLLM: "^", OPENVINO: "P"}
Panel = tuple[str, tuple[str, ...], float]
"""Title, the figure's way in a record, and by what it is multiplied."""

PANELS: tuple[Panel, ...] = (
    ("8 clients: output tokens/s (more is better)", ("http8", "output_tokens_per_s"), 1),
    ("long prompts amid answers: p99 ITL, ms", ("stutter", "itl_s", "p99"), 1e3),
    ("start to first token, s", ("start", "first_token_s"), 1),
)
COMPRESSED_PART = 0.70
DECODE, PREFILL = (1, 4, 16), (128, 512, 2048)
ROWS = (*(("decode", n) for n in DECODE), *(("prefill", n) for n in PREFILL))


def draw(records: Sequence[Record], path: Path, model: str = "1b") -> None:
    """Writes a PNG, without the panels of what was not measured.  Falls back to the other shape when there is nothing
    of this one.  Raises ValueError when there is nothing at all."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    if not any(record.model == model and record.error is None and record.round >= 0 for record in records):
        model = next(other for other in SHAPES if other != model)
    series = Series(records, model)
    roofline, panels = measured(series)
    figure = pyplot.figure(figsize=(12, 4.7 * roofline + 3.5 * bool(panels)), layout="constrained")
    heights = [1.35] * roofline + [1.0] * bool(panels)
    if not heights:
        raise ValueError(f"nothing to draw of {model}")
    grid = figure.add_gridspec(len(heights), max(1, len(panels)), height_ratios=heights)
    if roofline:
        _roofline(figure.add_subplot(grid[0, :]), series, model)
    for column, panel in enumerate(panels):
        axes = figure.add_subplot(grid[-1, column])
        _bars(axes, series, panel)
        if column:
            axes.set_yticklabels([])
    figure.suptitle(f"{SHAPES[model].parameters / 1e6:,.0f} M parameters, bf16: medians, with least and most")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def measured(series: Series) -> tuple[bool, tuple[Panel, ...]]:
    """Is there anything for the roofline, and the panels for which there is anything."""
    offline = any(series.spread(system, (m, str(n))) for system in OFFLINE_SYSTEMS for m, n in ROWS)
    return offline, tuple(
        panel for panel in PANELS if any(series.spread(system, panel[1]) is not None for system in SERVERS)
    )


def _roofline(axes: Any, series: Series, model: str) -> None:
    _limits(axes, series, model)
    shift = np.geomspace(0.9, 1.11, len(OFFLINE_SYSTEMS))
    for place, system in enumerate(OFFLINE_SYSTEMS):
        found = [
            (rows, spread)
            for measure, rows in ROWS
            if (spread := series.spread(system, (measure, str(rows)))) is not None
        ]
        if not found:
            continue
        x = np.array([rows for rows, _ in found]) * shift[place]
        y = np.array([spread.median for _, spread in found])
        low = y - [spread.least for _, spread in found]
        high = np.array([spread.most for _, spread in found]) - y
        style = {"marker": MARKS[system], "color": COLOURS[system], "linestyle": "none", "capsize": 2, "markersize": 6}
        axes.errorbar(x, y, (low, high), label=system, **style)
    ticks = (*DECODE, *PREFILL)
    axes.set(xscale="log", yscale="log", ylabel="tokens/s")
    axes.set_xticks(ticks, [*(f"decode\n{n}" for n in DECODE), *(f"prefill\n{n}" for n in PREFILL)])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _limits(axes: Any, series: Series, model: str) -> None:
    read = series.spread("machine", ("roofline", "read_gbs"))
    peak = series.spread("machine", ("roofline", "peak_gflops"))
    if read is None or peak is None:
        return
    shape, ends = SHAPES[model], {"read_gbs": read.median, "peak_gflops": peak.median}
    few, many = np.geomspace(0.85, 20, 60), np.geomspace(100, 2500, 60)
    roof = [decode_limit(shape, n, **ends) for n in few]
    label = f"limit: {read.median:.0f} GB/s, {peak.median:.0f} GFLOP/s"
    axes.plot(few, roof, color="black", linewidth=1, label=label)
    part = [decode_limit(shape, n, part=COMPRESSED_PART, **ends) for n in few]
    axes.plot(few, part, color="black", linewidth=1, linestyle=":", label="limit of weights of 70 %")
    axes.plot(many, [prefill_limit(shape, int(n), **ends) for n in many], color="black", linewidth=1)


def _bars(axes: Any, series: Series, panel: Panel) -> None:
    title, way, by = panel
    spreads = [(system, series.spread(system, way)) for system in reversed(SERVERS)]
    for place, (system, spread) in enumerate(spreads):
        if spread is None:
            continue
        middle = spread.median * by
        reach = [[middle - spread.least * by], [spread.most * by - middle]]
        axes.barh(place, middle, xerr=reach, color=COLOURS[system], capsize=2)
        axes.annotate(f"  {middle:{'.0f' if middle >= 100 else '.3g'}}", (spread.most * by, place), va="center")
    axes.set_yticks(range(len(spreads)), [system for system, _ in spreads])
    axes.set_ylim(-0.6, len(spreads) - 0.4)
    axes.set_title(title, fontsize=11)
    axes.margins(x=0.2)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3, axis="x")
