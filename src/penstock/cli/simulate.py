"""``penstock simulate``: what a fleet would make of a trace of real traffic."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from penstock.cli.console import TextStyle, count_bar, text_table
from penstock.cli.parsing import COMMANDS
from penstock.config.fleet_file import NAMES
from penstock.errors import ConfigError
from penstock.launch.model_path import config_folder
from penstock.parallel.plan import parse_devices
from penstock.router.policy.baselines import NAMES as POLICIES
from penstock.sim.cluster import SimulationRun, SimulationSetup, run_json, simulate
from penstock.sim.fleet import DEFAULT, SimulatedFleet, load_fleet, parse_workers
from penstock.sim.plot import plot_run, pyplot
from penstock.sim.results import LatencyTargets
from penstock.sim.roofline import fleet_of
from penstock.sim.trace import read_trace
from penstock.weights.inspect import read_outline

EPILOG = f"""\
examples:
  penstock simulate conversation_trace.jsonl.gz
  penstock simulate conversation_trace.jsonl.gz --workers 32 --rate-scale 4 --policy round-robin --json
  penstock simulate AzureLLMInferenceTrace_conv.csv --workers 12:4 --plot run.png
  penstock simulate conversation_trace.jsonl.gz --model ~/models/llama --devices 8xH100

TRACE is a Mooncake JSONL or an Azure CSV, plain or gzipped.  Fleets of the package: {", ".join(NAMES)};
`penstock calibrate` writes one of this machine.  docs/simulator.md says what is real here and what is modeled.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "simulate",
        help=COMMANDS["simulate"],
        description="Runs the real scheduler and router over a trace, on workers whose steps are arithmetic.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("trace", metavar="TRACE", type=Path, help="Mooncake JSONL or Azure CSV, plain or gzipped")
    parser.add_argument("--fleet", metavar="FILE", help=f"TOML, or a name; default: {DEFAULT}")
    parser.add_argument("--model", metavar="MODEL", help="compute the fleet: for this model, with --devices")
    parser.add_argument("--devices", metavar="NxNAME", help="and on these, as 8xH100 (from data sheets)")
    parser.add_argument("--workers", metavar="N", help="this many instead; 12:4 for prefill and decode workers")
    parser.add_argument("--policy", choices=POLICIES, default=POLICIES[0], help="default: %(default)s")
    parser.add_argument("--always-split", action="store_true", help="no decode worker reads a prompt")
    parser.add_argument("--rate-scale", type=float, default=1.0, metavar="F", help="multiplies the rate of arrivals")
    parser.add_argument("--requests", type=int, metavar="N", help="only the trace's first N")
    parser.add_argument("--page-tokens", type=int, metavar="T", help="default: the trace's blocks, or a page's 16")
    parser.add_argument("--ttft-target", type=float, default=1.0, metavar="S", help="of goodput; default: %(default)g")
    parser.add_argument("--itl-target", type=float, default=0.05, metavar="S", help="the same; default: %(default)g")
    parser.add_argument("--json", action="store_true", help="one JSON object; seconds, shares, requests a second")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the run; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    """Always 0; raises ConfigError."""
    for flag in ("rate_scale", "ttft_target", "itl_target", "requests"):
        value = getattr(args, flag)
        if value is not None and not 0 < value < 1e9:
            raise ConfigError(f"--{flag.replace('_', '-')} must be above 0 and below 1e9, got {value:g}")
    if args.plot is not None:
        pyplot()  # what is missing is said before the run, not behind it
    fleet = chosen_fleet(args)
    if args.workers is not None:
        fleet = fleet.with_groups(*parse_workers(args.workers))
    setup = SimulationSetup(
        fleet=fleet,
        policy=args.policy,
        always_split=args.always_split,
        rate_scale=args.rate_scale,
        targets=LatencyTargets(ttft_s=args.ttft_target, itl_s=args.itl_target),
        page_tokens=args.page_tokens,
    )
    trace = read_trace(args.trace, args.requests)
    with count_bar(trace.name, len(trace.requests), "requests") as progress:
        done = simulate(trace, setup, progress)
    if args.plot is not None:
        plot_run(done, args.plot)
    figures = run_json(done)
    print(msgspec.json.encode(figures).decode() if args.json else show(done, figures, TextStyle()))
    return 0


def chosen_fleet(args: argparse.Namespace) -> SimulatedFleet:
    """The fleet of a file, or one computed from a model and devices.  Raises ConfigError, ModelError."""
    if args.model is None and args.devices is None:
        return load_fleet(args.fleet or DEFAULT)
    if args.model is None or args.devices is None or args.fleet is not None:
        raise ConfigError("--model and --devices go together, and without --fleet")
    return fleet_of(read_outline(config_folder(args.model)), parse_devices(args.devices))


def shown_ways(figures: dict[str, Any]) -> str:
    """How busy the ways of pages are."""
    return ", ".join(f"{figures[f'{way}_utilisation']:.1%}" for way in ("link", "host", "disk"))


def show(run: SimulationRun, figures: dict[str, Any], paint: TextStyle) -> str:
    """For people."""
    fleet = run.setup.fleet
    roles = ", ".join(f"{group.count} {group.role.value}" for group in fleet.workers)
    ttft, itl = figures["ttft_s"], figures["itl_s"]
    rows = [
        ("time to first token, s", *(f"{ttft[name]:.3f}" for name in ("p50", "p90", "p99", "mean"))),
        ("between tokens, ms", *(f"{itl[name] * 1e3:.1f}" for name in ("p50", "p90", "p99", "mean"))),
    ]
    goals = f"TTFT {run.setup.targets.ttft_s:g} s, ITL {run.setup.targets.itl_s * 1e3:g} ms"
    read = figures["read_from_host_tokens"] + figures["read_from_disk_tokens"]
    facts = [
        ("good answers", f"{figures['good_share']:.1%}", f"{figures['goodput']:.2f} a second within {goals}"),
        ("prompt tokens cached", f"{figures['hit_ratio']:.1%}", f"{figures['ideal_hit_ratio']:.1%} were possible"),
        ("utilisation", f"{figures['utilisation']:.1%}", f"{figures['steps']:,} steps"),
        ("links, host memory, disk", shown_ways(figures), f"busy; {read:,} tokens read from below the cache"),
        ("split", f"{figures['split']:,}", "requests read and written by two workers"),
    ]
    if figures["failed"]:
        facts.append((paint("failed", "red"), f"{figures['failed']:,}", "requests that no worker could serve"))
    head = (
        f"{paint(run.trace, 'bold')}: {figures['requests']:,} requests at {run.setup.rate_scale:g} times their rate, "
        f"policy {run.setup.policy}\nfleet {paint(fleet.name, 'bold')} ({roles}); {fleet.source}"
    )
    tail = f"{run.end_s:,.0f} s simulated in {run.wall_s:.1f} s"
    quantile_table = text_table(rows, headers=("", "p50", "p90", "p99", "mean"), right=(1, 2, 3, 4))
    fact_table = text_table([(a, b, paint(c, "dim")) for a, b, c in facts], right=(1,))
    return f"{head}\n\n{quantile_table}\n\n{fact_table}\n\n{paint(tail, 'dim')}"
