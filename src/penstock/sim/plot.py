"""A run as a picture: first tokens, intervals, what was good, cached and busy over time.

Needs matplotlib, which no installed Penstock has by itself.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.sim.cluster import SimulationRun
from penstock.sim.results import FloatArray

BUCKETS = 60
"""Places on the axis of time."""


def pyplot(flag: str = "--plot") -> Any:
    """Matplotlib's interface.  Raises ConfigError where it is not installed."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    try:
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise ConfigError(f"{flag} needs matplotlib: pip install 'penstock[plot]'") from None


def plot_run(run: SimulationRun, path: Path) -> None:
    """Writes it there, in the format of its suffix.  Raises ConfigError."""
    plot = pyplot()
    figure, axes = plot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    measures, targets = run.results, run.setup.targets
    _shares(axes[0][0], measures.ttfts(), None, targets.ttft_s)
    axes[0][0].set(xlabel="time to first token, s", xscale="log")
    intervals, counts = measures.intervals
    _shares(axes[0][1], intervals * 1e3, counts, targets.itl_s * 1e3)
    axes[0][1].set(xlabel="between tokens, ms", xscale="log")
    edges = np.linspace(0.0, max(run.end_s, 1e-9), BUCKETS + 1)
    _over_time(axes[1][0], run, edges)
    _cached(axes[1][1], run, edges)
    fleet = run.setup.fleet
    figure.suptitle(
        f"{run.trace} at {run.setup.rate_scale:g} times its rate, {fleet.count} workers of {fleet.name}, "
        f"policy {run.setup.policy}"
    )
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from None
    finally:
        plot.close(figure)


def _shares(axes: Any, values: FloatArray, counts: FloatArray | None, target: float) -> None:
    """The share of values that are no greater."""
    order = np.argsort(values)
    reached = np.cumsum(np.ones(len(values)) if counts is None else counts[order])
    if len(values):
        axes.plot(values[order], reached / reached[-1])
    axes.axvline(target, color="grey", linestyle=":", label=f"target {target:g}")
    axes.set_ylim(0, 1)
    axes.set_ylabel("share")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)


def _per_second(times: list[float], edges: FloatArray) -> FloatArray:
    counted, _ = np.histogram(times, bins=edges)
    a_second: FloatArray = counted / np.diff(edges)
    return a_second


def _over_time(axes: Any, run: SimulationRun, edges: FloatArray) -> None:
    requests = run.results.requests.values()
    middle = (edges[1:] + edges[:-1]) / 2
    axes.plot(middle, _per_second([each.arrival for each in requests], edges), color="grey", label="come")
    axes.plot(middle, _per_second([each.last_at for each in run.results.within_targets()], edges), label="good answers")
    axes.set(xlabel="s", ylabel="requests/s")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)


def _cached(axes: Any, run: SimulationRun, edges: FloatArray) -> None:
    requests = list(run.results.requests.values())
    arrivals = [each.arrival for each in requests]
    asked, _ = np.histogram(arrivals, bins=edges, weights=[each.prompt for each in requests])
    cached, _ = np.histogram(arrivals, bins=edges, weights=[each.cached for each in requests])
    middle = (edges[1:] + edges[:-1]) / 2
    axes.plot(middle, np.divide(cached, asked, out=np.zeros(len(middle)), where=asked > 0), label="prompt cached")
    spans = np.diff(edges)
    busy = np.array([worker.busy.between(edges) for worker in run.workers]) / spans
    axes.plot(middle, busy.mean(axis=0), label="workers busy, mean")
    axes.fill_between(middle, busy.min(axis=0), busy.max(axis=0), alpha=0.2, label="least and most")
    axes.set(xlabel="s", ylabel="share")
    axes.set_ylim(0, 1.05)
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
