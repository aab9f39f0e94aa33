"""``penstock calibrate``: how long steps take on this machine, as a fleet file for ``penstock simulate``."""

from __future__ import annotations

import argparse
import os
import platform
import re
from pathlib import Path
from typing import Any

import msgspec

from penstock.cli.console import TextStyle, count_bar, text_table
from penstock.cli.parsing import COMMANDS
from penstock.config.fleet_file import LinkSpeeds, SimMemory, SimRankTimes, SimSchedulerLimits
from penstock.errors import ConfigError
from penstock.launch.model_path import locate_model
from penstock.sim.calibration import (
    CalibrationBench,
    CalibrationExtent,
    DecodeSample,
    PrefillSample,
    StepFit,
    fit_step_times,
)
from penstock.sim.fleet import SimulatedFleet, check_fleet, fleet_toml, parse_workers, profile_toml

EPILOG = """\
examples:
  penstock calibrate                            the bundled storyteller, one thread
  penstock calibrate ~/models/llama --threads 8 --workers 2:2 --out here.toml
  penstock simulate TRACE --fleet here.toml
  penstock calibrate --profile here >> fleet.toml      for the nodes of a fleet file that has no figures yet

Nothing else should run meanwhile.  Fleets of the package (h100, h200) are given, not measured.  Of ranks that divide a
model, what their exchanges cost is not measured: it is 0 until you write it into [profile.NAME.ranks].
"""

KV_BYTES = 4 << 30
CONTEXT, ROUNDS = 1536, 3


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "calibrate",
        help=COMMANDS["calibrate"],
        description="Times steps that read and that write, and copies of KV pages; writes a fleet file.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a folder, .gguf file or Hub name; default: bundled")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of a worker's kernels; default: 1")
    parser.add_argument("--context", type=int, default=CONTEXT, metavar="T", help="tokens; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", default="2", metavar="N", help="of the fleet file, as 4 or 2:2; default: 2")
    parser.add_argument("--kv-memory", type=int, default=KV_BYTES, metavar="B", help="of each; default: %(default)s")
    parser.add_argument("--profile", metavar="NAME", help="only its tables [profile.NAME], to append to a fleet file")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the fleet file there; default: print it")
    parser.add_argument("--json", action="store_true", help="print measurements and fleet as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Always 0; raises ConfigError, ModelError, KernelError."""
    if args.profile is not None and not re.fullmatch("[a-z0-9][a-z0-9-]{0,39}", args.profile):
        raise ConfigError(f"--profile {args.profile}: expected lower-case letters, digits and -, 40 at most")
    cores = len(os.sched_getaffinity(0))
    for flag, least, most in (("threads", 1, cores), ("context", 128, 1 << 20), ("rounds", 1, 1000)):
        if not least <= getattr(args, flag) <= most:
            raise ConfigError(f"--{flag} must be from {least} to {most}, got {getattr(args, flag)}")
    groups = parse_workers(args.workers)
    located = locate_model(args.model)
    bench = CalibrationBench(
        located.path, CalibrationExtent(context=args.context, rounds=args.rounds, threads=args.threads)
    )
    with count_bar("measuring", bench.progress_steps + 1, "runs") as turn:
        readings = bench.prefill_samples(lambda: turn(1))
        writings = bench.decode_samples(lambda: turn(1))
        bytes_s = bench.copy_bytes_s()
        turn(1)
    found = fit_step_times(readings, writings)
    layout = bench.layout
    token_bytes = -(-layout.page_bytes // layout.page_tokens)
    fleet = check_fleet(
        SimulatedFleet(
            name=located.name,
            source=f"measured: {bench.identity.numerics}, {args.threads} threads, {platform.machine()}, {cores} cores",
            workers=groups,
            steps=found.times,
            ranks=SimRankTimes(layers=bench.layers),
            memory=SimMemory(token_bytes=token_bytes, device_bytes=args.kv_memory),
            links=LinkSpeeds(worker_bytes_s=bytes_s, host_bytes_s=bytes_s),
            scheduler=SimSchedulerLimits(max_model_len=bench.max_positions, max_running=256, max_step_tokens=2048),
        )
    )
    text = fleet_toml(fleet) if args.profile is None else _profile_only(fleet, args.profile)
    if args.out is not None:
        _write(args.out, text)
    if args.json:
        print(msgspec.json.encode(calibration_as_json(fleet, found, readings, writings)).decode())
    else:
        print(calibration_table(fleet, found, TextStyle()) if args.out is not None else text, end="")
    return 0


def _profile_only(fleet: SimulatedFleet, name: str) -> str:
    return f"\n# {fleet.name}; {fleet.source}.  Exchanges of ranks are not measured.\n{profile_toml(fleet, name)}"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}") from None


def calibration_as_json(
    fleet: SimulatedFleet, found: StepFit, readings: list[PrefillSample], writings: list[DecodeSample]
) -> dict[str, Any]:
    """Everything that was measured, in seconds, tokens and bytes."""
    return {
        "fleet": msgspec.to_builtins(fleet),
        "reading_error": found.prefill_error,
        "writing_error": found.decode_error,
        "readings": readings,
        "writings": writings,
    }


def calibration_table(fleet: SimulatedFleet, found: StepFit, paint: TextStyle) -> str:
    """For people."""
    times = fleet.steps
    read, write = f"off by {found.prefill_error:.1%}", f"off by {found.decode_error:.1%}"
    rows = [
        ("a step that reads", f"{times.read_step_s * 1e3:.3f} ms", paint(f"{read} in the median", "dim")),
        ("  each prompt token", f"{times.token_s * 1e6:.3f} us", f"{1 / times.token_s:,.0f} a second"),
        ("  each pair of attention", f"{times.pair_s * 1e9:.4f} ns", ""),
        ("a step that writes", f"{times.step_s * 1e3:.3f} ms", paint(f"{write} in the median", "dim")),
        ("  each answer", f"{times.row_s * 1e6:.3f} us", ""),
        ("  1,000 tokens of context", f"{times.context_s * 1e9:.3f} us", ""),
        (
            "KV pages copied",
            f"{fleet.links.worker_bytes_s / 1e9:.2f} GB/s",
            f"{fleet.memory.token_bytes:,} bytes a token",
        ),
    ]
    return f"{paint(fleet.name, 'bold')}; {fleet.source}\n{text_table(rows, right=(1,))}\n"
