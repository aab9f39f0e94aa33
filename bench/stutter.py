"""Split against aggregated: do running answers stutter when long prompts arrive?

Prints the table and draws the plot of docs/benchmarks.md::

    python bench/stutter.py --rounds 3 --plot docs/stutter.svg --save stutter.json

Each round measures all set-ups one after the other, every other round backwards, so that a machine whose speed changes
with the hour is unfair to none.  Figures are over the gaps of all rounds together.  What lending cores costs::

    python bench/stutter.py --setups split kept --rounds 6 --duration 10
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

SETUPS = {
    "split": ["--transfer", "shm"],
    "aggregated": ["--aggregated"],
    "kept": ["--transfer", "shm", "--no-lend-cores"],  # split, and no core is lent
}
LOAD = ["--random-input-len", "64", "--random-output-len", "512", "--ignore-eos", "--num-prompts", "256"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; default: the bundled model")
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=["split", "aggregated"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=30.0)
    parser.add_argument("--long-prompt-len", type=int, default=2000)
    parser.add_argument("--running-answers", type=int, default=8)
    parser.add_argument("--port", type=int, default=8199)
    parser.add_argument("--plot", type=Path, metavar="SVG")
    parser.add_argument("--save", type=Path, metavar="JSON")
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in args.setups}
    for number in range(args.rounds):
        for name in args.setups[:: -1 if number % 2 else 1]:
            results[name].append(measure(args, SETUPS[name], seed=number))
            print(f"round {number + 1}, {name}: {json.dumps(results[name][-1]['running']['itl_s'])}", file=sys.stderr)
    if args.save:
        args.save.write_text(json.dumps(results))
    print(table(results))
    if args.plot:
        plot(results, args.plot)


def measure(args: argparse.Namespace, flags: list[str], *, seed: int) -> dict[str, Any]:
    """One fresh service, one run of the scenario."""
    penstock = [sys.executable, "-m", "penstock"]
    url = f"http://127.0.0.1:{args.port}"
    serve = [*penstock, "serve", *([args.model] if args.model else []), "--port", str(args.port), *flags]
    scenario = ["--long-prompt-len", str(args.long_prompt_len), "--long-prompt-every", "1"]
    scenario += ["--running-answers", str(args.running_answers), "--duration", str(args.duration)]
    with tempfile.NamedTemporaryFile(suffix=".json") as saved, tempfile.TemporaryFile() as log:
        server = subprocess.Popen(serve, stdout=log, stderr=log)
        try:
            subprocess.run([*penstock, "chat", "--url", url, "--wait", "120", "hello"], check=True, capture_output=True)
            bench = [*penstock, "bench", "--base-url", url, *scenario, *LOAD, "--seed", str(seed), "--disable-tqdm"]
            bench += ["--save-detailed", "--save-result", saved.name]
            subprocess.run(bench, check=True, stdout=subprocess.DEVNULL)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        return json.loads(Path(saved.name).read_text())


def during(results: list[dict[str, Any]]) -> np.ndarray:
    """Gaps in milliseconds that overlap the time in which long prompts arrived."""
    kept = [g for r in results for at, g in r["detail"]["gaps"] if at + g >= 0 and at <= r["duration_s"]]
    return 1000 * np.asarray(kept)


def first_tokens(results: list[dict[str, Any]]) -> np.ndarray:
    """Milliseconds to the first token of the long prompts."""
    return 1000 * np.asarray([p["events"][0] - p["due"] for r in results for p in r["detail"]["long"] if p["events"]])


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "| | ITL p50 | p90 | p99 | p99.9 | max | time in gaps over 50 ms | running answers, events/s "
        "| long prompts: TTFT p50 | p99 | failed |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, runs in results.items():
        gaps, ttft = during(runs), first_tokens(runs)
        failed = sum(r["running"]["failed"] + r["long"]["failed"] for r in runs)
        speed = np.mean([r["running"]["events_per_s"] for r in runs])
        quantiles = " | ".join(f"{np.percentile(gaps, q):.1f} ms" for q in (50, 90, 99, 99.9, 100))
        stuck = f"{100 * gaps[gaps > 50].sum() / gaps.sum():.1f} %"
        waits = " | ".join(f"{np.percentile(ttft, q):.0f} ms" for q in (50, 99))
        lines.append(f"| {name} | {quantiles} | {stuck} | {speed:.0f} | {waits} | {failed} |")
    return "\n".join(lines)


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Left: every gap of the first round over time.  Right: the share of gaps that are longer, in all rounds."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, runs in results.items():
        first = runs[0]
        at, gap = np.asarray([(a, g) for a, g in first["detail"]["gaps"] if a + g >= 0 and a <= first["duration_s"]]).T
        (dots,) = left.plot(at, 1000 * gap, ".", markersize=2, label=name, rasterized=True)
        gaps = np.sort(during(runs))
        longer = 1 - np.arange(len(gaps)) / len(gaps)
        right.plot(gaps, longer, color=dots.get_color(), label=name)
    left.set(
        xlabel="seconds since the first long prompt",
        ylabel="gap between two tokens, ms",
        yscale="log",
        ylim=(0.1, None),
    )
    right.set(
        xlabel="gap between two tokens, ms",
        ylabel="share of gaps that are longer",
        xscale="log",
        yscale="log",
        xlim=(0.5, None),
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(markerscale=6)
    figure.suptitle("Running answers while a long prompt arrives every second")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
