"""Eight clients over a setting: what each server trades throughput for, and which points of peers one of ours meets.

The setting is the size of a step: how long one may take that also computes a prompt (Penstock), or how many tokens it
may have (llama.cpp, vLLM).  A peer's point is met if a point of ours has at least its tokens a second, with no greater
TTFT (p50) and no greater ITL (p99).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.peers import matrix, online
from bench.peers.offline import MeasureError
from bench.peers.places import AGGREGATED, LLAMA, OWN_SERVERS, SHAPES, SPLIT, VLLM, Workplace
from bench.peers.plot import COLOURS
from bench.peers.processes import compile_sources
from bench.peers.records import ABOUT, Record, Records
from bench.peers.series import Series
from bench.peers.servers import running

CURVE: Final = "curve"
STEP_MS: Final = (25, 50, 100, 200, 400)
STEP_TOKENS: Final = (64, 256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of a server's curve."""

    system: str
    label: str
    flags: tuple[str, ...] = ()
    step_ms: int | None = None  # Penstock's, in a file of settings

    @property
    def measure(self) -> str:
        return f"{CURVE} {self.label}"

    def arguments(self, folder: Path) -> tuple[str, ...]:
        """Flags of the server's command; what they name is written to ``folder``."""
        if self.step_ms is None:
            return self.flags
        file = folder / f"{CURVE}-{self.step_ms}.toml"
        file.write_text(f"[scheduling]\ninteractive_tpot_ms = {self.step_ms}\n", encoding="utf-8")
        return (*self.flags, "--config", str(file))


def settings() -> Iterator[Setting]:
    """All points, each system's in the order of the setting."""
    for system in (SPLIT, AGGREGATED):
        yield from (Setting(system, f"{ms} ms", step_ms=ms) for ms in STEP_MS)
    sizes = [str(tokens) for tokens in STEP_TOKENS]
    yield from (Setting(LLAMA, f"{size} tokens", ("-b", size, "-ub", size)) for size in sizes)
    chunked = "--enable-chunked-prefill"
    yield from (Setting(VLLM, f"{size} tokens", ("--max-num-batched-tokens", size, chunked)) for size in sizes)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which part of the curves."""

    model: str
    rounds: int
    systems: tuple[str, ...]
    threads: int
    requests: int


def measure(place: Workplace, records: Records, wanted: Wanted) -> int:
    """All that is missing, in an order that turns; returns how many points failed."""
    matrix.keep_to_cores(wanted.threads)
    records.add(Record(model=wanted.model, round=-1, system=matrix.MACHINE, measure=ABOUT, figures=matrix.about()))
    compile_sources()
    matrix.warm_page_cache(place, wanted.model)
    points = [setting for setting in settings() if setting.system in wanted.systems]
    failures = 0
    for number in range(wanted.rounds):
        for setting in matrix.turned(points, number):
            if (wanted.model, number, setting.system, setting.measure) in records.done():
                continue
            record = _measured(place, setting, wanted, number)
            records.add(record)
            told = matrix.short(record.figures) if record.error is None else f"failed: {record.error}"
            print(f"round {number + 1}/{wanted.rounds}  {setting.system:21s} {setting.label:12s} {told}", flush=True)
            failures += record.error is not None
    return failures


def _measured(place: Workplace, setting: Setting, wanted: Wanted, number: int) -> Record:
    own: dict[str, Any] = {"model": wanted.model, "round": number, "system": setting.system, "measure": setting.measure}
    load = online.Load(seed=100 + number, requests=wanted.requests)
    place.logs.mkdir(parents=True, exist_ok=True)
    try:
        flags = setting.arguments(place.logs)
        with running(place, setting.system, wanted.model, wanted.threads, flags) as server:
            return Record(figures=online.http8(server, load), **own)
    except (MeasureError, OSError) as error:
        return Record(error=str(error), **own)


# --- what follows -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Point:
    """Medians over the rounds; seconds."""

    system: str
    label: str
    tokens_per_s: float
    ttft_p50: float
    itl_p50: float
    itl_p99: float
    tokens_per_event: float

    @property
    def is_own(self) -> bool:
        return self.system in OWN_SERVERS

    def meets(self, other: Point) -> bool:
        """As many tokens a second, and nobody waits longer."""
        return (
            self.tokens_per_s >= other.tokens_per_s
            and self.ttft_p50 <= other.ttft_p50
            and self.itl_p99 <= other.itl_p99
        )


def points(records: Iterable[Record], model: str) -> list[Point]:
    """Those that were measured, in the order of ``settings``."""
    series = Series(records, model)
    paths = (("output_tokens_per_s",), ("ttft_s", "p50"), ("itl_s", "p50"), ("itl_s", "p99"), ("tokens_per_event",))
    found = []
    for setting in settings():
        spreads = [series.spread(setting.system, (setting.measure, *path)) for path in paths]
        medians = [spread.median for spread in spreads if spread is not None]
        if len(medians) == len(paths):
            found.append(Point(setting.system, setting.label, *medians))
    return found


def table(found: Sequence[Point]) -> list[str]:
    """Markdown.  The last column names the point of ours with the most tokens a second that meets a peer's."""
    own = [point for point in found if point.is_own]
    lines = [
        "| | a step has up to | tokens/s | TTFT p50, s | ITL p50, ms | p99 | tokens an event | met by |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for point in found:
        met = ""
        if not point.is_own:
            best = max((one for one in own if one.meets(point)), key=lambda one: one.tokens_per_s, default=None)
            met = "**none**" if best is None else f"{best.system.removeprefix('penstock-')}, {best.label}"
        lines.append(
            f"| {point.system} | {point.label} | {point.tokens_per_s:.1f} | {point.ttft_p50:.2f} | "
            f"{point.itl_p50 * 1e3:.0f} | {point.itl_p99 * 1e3:.0f} | {point.tokens_per_event:.2f} | {met} |"
        )
    return lines


def draw(found: Sequence[Point], path: Path, model: str) -> None:
    """Writes a picture: tokens a second over TTFT and over ITL, a line a server.  Raises ValueError for no points."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    if not found:
        raise ValueError("no point of a curve was measured")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for system in dict.fromkeys(point.system for point in found):
        line = [point for point in found if point.system == system]
        rates = [point.tokens_per_s for point in line]
        for axes, values in (
            (left, [point.ttft_p50 for point in line]),
            (right, [1e3 * point.itl_p99 for point in line]),
        ):
            axes.plot(values, rates, marker="o", color=COLOURS[system], label=system)
            style = {"fontsize": 8, "xytext": (4, 4), "textcoords": "offset points"}
            for end in (0, -1):
                axes.annotate(line[end].label, (values[end], rates[end]), **style)
    left.set(xlabel="TTFT p50, s", ylabel="output tokens/s", xscale="log")
    right.set(xlabel="ITL p99, ms", xscale="log")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3, which="both")
    left.legend(loc="best", fontsize=9)
    parameters = SHAPES[model].parameters / 1e6
    figure.suptitle(f"Eight clients, {parameters:,.0f} M parameters, over the size of a step (up and left is better)")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
