"""The simulator's bars: policies on Mooncake's conversations, split against aggregated fleets on Azure's, and how fast.

    python bench/simulations.py policies --trace conversation_trace.jsonl.gz --json policies.json
    python bench/simulations.py split --trace AzureLLMInferenceTrace_conv.csv --json split.json
    python bench/simulations.py speed --trace conversation_trace.jsonl.gz --json speed.json
    python bench/simulations.py report policies.json split.json speed.json --into docs/simulator.md --plots docs

``policies``: the capacity of round-robin is what it answers a second when far more comes than it can (between the 10th
and the 90th of 100 answers); every policy then runs at shares of that.  ``split``: the same rates for each fleet of
equal size; the aggregated ones differ in the budget of a step; good answers are counted of requests after the first
third, when there are as many answers as there will be.  Rows are written as they are ready; a row that the file
has already is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.router.policy.baselines import NAMES as POLICIES
from penstock.sim.cluster import SimulationRun, SimulationSetup, run_json, simulate
from penstock.sim.fleet import SimulatedFleet, load_fleet, parse_workers
from penstock.sim.plot import pyplot
from penstock.sim.trace import Trace, read_trace

Row = dict[str, Any]

FLOOD = 60.0
"""Times the trace's rate: more than any fleet can take."""

AT = 0.9
"""The bars' share of capacity."""

POLICY_SHARES = (0.3, 0.6, 0.85, 0.9, 0.95, 1.05, 1.2)
SPLIT_RATES = (187.0, 150.0, 170.0, 125.0, 100.0)
"""Requests a second; the aggregated fleet of long steps answers 208 when far more comes (5,000 requests)."""

SPLIT_PAGE = 64
"""Tokens of a page there: that trace's prompts share nothing, so pages of 16 would only take longer."""

AGGREGATED = tuple(("16", budget) for budget in (45.0, 30.0, 100.0))
SPLIT = tuple((workers, 100.0) for workers in ("12:4", "11:5"))
MARK = "<!-- simulations: {} -->"
COLOURS = ("#0b3d91", "#d95f02", "#999999", "#2ca02c", "#9467bd")


class Rows:
    """What was measured so far, in a file.  A row is known by its ``key``."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: list[Row] = json.loads(path.read_text()) if path is not None and path.exists() else []

    def get(self, key: str, trace: Trace, setup: SimulationSetup) -> Row:
        """The row of this key, run unless it is there."""
        for row in self.rows:
            if row["key"] == key:
                return row
        run = simulate(trace, setup)
        row = {"key": key} | run_json(run) | {"throughput": throughput(run)}
        row["arrivals"] = rate_of(trace) * setup.rate_scale
        row["steady"] = steady(run)
        self.rows.append(row)
        if self._path is not None:
            self._path.write_text(json.dumps(self.rows, indent=1) + "\n")
        ttft = row["ttft_s"]
        print(
            f"{key:40s} rate {setup.rate_scale:6.2f}  TTFT {ttft['p50']:7.3f} {ttft['p90']:7.3f} s"
            f"  ITL p90 {row['itl_s']['p90'] * 1e3:5.1f} ms  good {row['goodput']:6.2f}/s"
            f"  hits {row['hit_ratio']:.3f} of {row['ideal_hit_ratio']:.3f}  {row['wall_s']:.1f} s",
            flush=True,
        )
        return row


def throughput(run: SimulationRun) -> float:
    """Answers a second between the 10th and the 90th of 100 ends."""
    ends = np.sort([each.last_at for each in run.results.requests.values()])
    low, high = len(ends) // 10, len(ends) * 9 // 10
    return float((high - low) / max(ends[high] - ends[low], 1e-9))


def steady(run: SimulationRun) -> float:
    """The share of good answers among those to requests that came after the first third: by then there are many."""
    late = list(run.results.requests.values())[len(run.results.requests) // 3 :]
    good = set(map(id, run.results.within_targets()))
    return sum(id(each) in good for each in late) / len(late)


def rate_of(trace: Trace) -> float:
    """Requests a second."""
    return len(trace.requests) / trace.span_s


def policies(options: argparse.Namespace) -> None:
    """Each policy at shares of round-robin's capacity."""
    trace, rows = read_trace(options.trace, options.requests), Rows(options.json)
    fleet = load_fleet(options.fleet)
    flood = rows.get(
        "capacity: round-robin", trace, SimulationSetup(fleet=fleet, policy="round-robin", rate_scale=FLOOD)
    )
    capacity = flood["throughput"] / rate_of(trace)
    print(f"round-robin answers {flood['throughput']:.2f} a second: {capacity:.2f} times the trace's rate")
    for share in sorted(options.shares or POLICY_SHARES, key=lambda share: abs(share - AT)):
        for policy in options.policies:
            setup = SimulationSetup(fleet=fleet, policy=policy, rate_scale=share * capacity)
            rows.get(f"{policy} at {share:g}", trace, setup)


def split(options: argparse.Namespace) -> None:
    """Split and aggregated fleets at the same rates, each of equal size."""
    trace, rows = read_trace(options.trace, options.requests), Rows(options.json)
    for rate in options.rates:
        for fleet in (*AGGREGATED, *SPLIT):
            setup = SimulationSetup(fleet=sized(*fleet), rate_scale=rate / rate_of(trace), page_tokens=SPLIT_PAGE)
            rows.get(f"{named(fleet)} at {rate:g}", trace, setup)


def sized(workers: str, budget_ms: float) -> SimulatedFleet:
    """The default fleet with these workers and this budget of a step that also writes."""
    fleet = load_fleet("default").with_groups(*parse_workers(workers))
    limits = msgspec.structs.replace(fleet.scheduler, step_budget_ms=budget_ms)
    return msgspec.structs.replace(fleet, scheduler=limits)


def speed(options: argparse.Namespace) -> None:
    """The whole trace on 32 workers."""
    trace, rows = read_trace(options.trace, options.requests), Rows(options.json)
    fleet = load_fleet(options.fleet).with_groups(*parse_workers("32"))
    for scale in (1.0, 4.0):
        rows.get(f"speed: 32 workers at {scale:g}", trace, SimulationSetup(fleet=fleet, rate_scale=scale))


# --- report ----------------------------------------------------------------------------------------------------------


def report(options: argparse.Namespace) -> None:
    """Tables into the page, pictures beside it."""
    rows = [row for path in options.files for row in json.loads(path.read_text())]
    page = options.into.read_text()
    for name, lines in (("policies", policy_table(rows)), ("split", split_table(rows)), ("speed", speed_table(rows))):
        table = list(lines)
        if len(table) > 2:
            page = between(page, MARK.format(name), "\n".join(table))
    options.into.write_text(page)
    draw_policies(rows, options.plots / "simulator-policies.png")
    draw_split(rows, options.plots / "simulator-split.png")


def between(page: str, mark: str, text: str) -> str:
    """The page with ``text`` between its two marks.  Raises ValueError when there are not two."""
    head, _, tail = page.split(mark)
    return f"{head}{mark}\n{text}\n{mark}{tail}"


def series(rows: Sequence[Row], name: str) -> list[tuple[float, Row]]:
    """(share, row) of one policy or fleet."""
    found = [(float(row["key"].rpartition(" at ")[2]), row) for row in rows if row["key"].startswith(f"{name} at ")]
    return sorted(found, key=lambda pair: pair[0])


def policy_table(rows: Sequence[Row]) -> Iterator[str]:
    """At the bars' rate."""
    yield "| policy | hits of the ideal | TTFT p50 | p90 | p99 | ITL p99 | good answers/s |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    most = max((row["requests"] for row in rows), default=0)
    for policy in POLICIES:
        for share, row in series(rows, policy):
            if share == AT and row["requests"] == most:
                ttft = " | ".join(f"{row['ttft_s'][name]:.2f} s" for name in ("p50", "p90", "p99"))
                hits = row["hit_ratio"] / row["ideal_hit_ratio"]
                itl_ms = row["itl_s"]["p99"] * 1e3
                yield f"| `{policy}` | {hits:.1%} | {ttft} | {itl_ms:.0f} ms | {row['goodput']:.2f} |"


def split_table(rows: Sequence[Row]) -> Iterator[str]:
    """The best of either kind at each rate."""
    yield "| arrivals/s | aggregated | good | TTFT p90 | ITL p90 | split | good | TTFT p90 | ITL p90 | ratio |"
    yield "|---:|---|---:|---:|---:|---|---:|---:|---:|---:|"
    by_kind = [{share for fleet in kind for share, _ in series(rows, named(fleet))} for kind in (AGGREGATED, SPLIT)]
    shares = sorted(set.intersection(*by_kind))
    for share in shares:
        whole, parts = (best_of(rows, kind, share) for kind in (AGGREGATED, SPLIT))
        cells = [
            f"{row['key'].partition(' at ')[0]} | {row['steady']:.0%} | {row['ttft_s']['p90']:.2f} s"
            f" | {row['itl_s']['p90'] * 1e3:.0f} ms"
            for row in (whole, parts)
        ]
        yield f"| {share:g} | {cells[0]} | {cells[1]} | {parts['steady'] / max(whole['steady'], 1e-9):.2f} |"


def named(fleet: tuple[str, float]) -> str:
    """A fleet of the split, in a row's key."""
    return f"{fleet[0]}, {fleet[1]:g} ms"


def best_of(rows: Sequence[Row], fleets: Sequence[tuple[str, float]], share: float) -> Row:
    """The row with most good answers of these fleets at this rate."""
    found = [row for fleet in fleets for at, row in series(rows, named(fleet)) if at == share]
    return max(found, key=lambda row: float(row["steady"]))


def speed_table(rows: Sequence[Row]) -> Iterator[str]:
    """How long it took."""
    yield "| run | requests | simulated | took |"
    yield "|---|---:|---:|---:|"
    for row in rows:
        if row["key"].startswith("speed: "):
            name = row["key"].removeprefix("speed: ")
            yield f"| {name} | {row['requests']:,} | {row['simulated_s']:,.0f} s | {row['wall_s']:.1f} s |"


def below_share(row: Row) -> float:
    """Of prompt tokens, those whose KV came from lower tiers."""
    return float(row["read_from_host_tokens"] + row["read_from_disk_tokens"]) / row["prompt_tokens"]


def draw_policies(rows: Sequence[Row], path: Path) -> None:
    """First tokens, hits, goodput, pace, how busy workers are and what lower tiers give, over the rate."""
    panels = (
        ("p90 of time to first token, s", lambda row: row["ttft_s"]["p90"], "log"),
        ("cached tokens of the ideal", lambda row: row["hit_ratio"] / row["ideal_hit_ratio"], "linear"),
        ("good answers/s", lambda row: row["goodput"], "linear"),
        ("p99 between tokens, ms", lambda row: row["itl_s"]["p99"] * 1e3, "log"),
        ("utilisation of workers", lambda row: row["utilisation"], "linear"),
        ("prompt tokens read from host and disk", below_share, "linear"),
    )
    if not any(series(rows, policy) for policy in POLICIES):
        return
    plot = pyplot()
    figure, grid = plot.subplots(2, 3, figsize=(15, 7.5), layout="constrained")
    least = min(row["requests"] for policy in POLICIES for _, row in series(rows, policy))
    for axes, (title, value, scale) in zip(grid.flat, panels, strict=True):
        for policy, colour in zip(POLICIES, COLOURS, strict=True):
            points = [(share, row) for share, row in series(rows, policy) if row["requests"] == least]
            axes.plot(
                [share for share, _ in points], [value(row) for _, row in points], "o-", color=colour, label=policy
            )
        axes.set(title=title, yscale=scale, xlabel="arrivals, of round-robin's capacity")
        axes.grid(alpha=0.3)
    grid[0][0].legend()
    figure.suptitle(f"Mooncake conversations ({least:,} requests), 16 simulated workers of the default fleet")
    figure.savefig(path, dpi=80)
    plot.close(figure)


def draw_split(rows: Sequence[Row], path: Path) -> None:
    """Good answers over the rate, by fleet."""
    kinds = (("aggregated", AGGREGATED, "--"), ("split", SPLIT, "-"))
    if not any(series(rows, named(fleet)) for fleet in SPLIT):
        return
    plot = pyplot()
    figure, axes = plot.subplots(figsize=(8, 5), layout="constrained")
    for kind, fleets, style in kinds:
        for (workers, budget), colour in zip(fleets, COLOURS, strict=False):
            points = series(rows, named((workers, budget)))
            label = f"{kind} {workers}, steps of {budget:g} ms"
            x, y = [rate for rate, _ in points], [row["steady"] * rate for rate, row in points]
            axes.plot(x, y, f"o{style}", color=colour, label=label, markersize=4)
    axes.set(xlabel="arrivals/s", ylabel="good answers/s")
    axes.set_title("Azure conversations, 16 workers: TTFT 1 s, ITL 50 ms")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=80)
    plot.close(figure)


def build_parser() -> argparse.ArgumentParser:
    """Commands and flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (policies, split, speed):
        sub = commands.add_parser(command.__name__, help=command.__doc__)
        sub.set_defaults(run=command)
        sub.add_argument("--trace", type=Path, required=True)
        sub.add_argument("--fleet", default="default")
        sub.add_argument("--requests", type=int, help="only the first so many")
        sub.add_argument("--shares", type=float, nargs="+", help="of capacity (policies)")
        sub.add_argument("--rates", type=float, nargs="+", default=SPLIT_RATES, help="arrivals a second (split)")
        sub.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
        sub.add_argument("--json", type=Path, help="rows; those that are there are not run again")
    sub = commands.add_parser("report", help=report.__doc__)
    sub.set_defaults(run=report)
    sub.add_argument("files", type=Path, nargs="+")
    sub.add_argument("--into", type=Path, required=True, help="a page with marks")
    sub.add_argument("--plots", type=Path, required=True, help="a folder")
    return parser


def main() -> None:
    """Run what was asked for."""
    options = build_parser().parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
