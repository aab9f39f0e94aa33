"""``python -m bench.peers``: install the peers, make the models, run the comparison, write the report."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.peers import curve, install, matrix, models
from bench.peers.places import CODED, PEERS, SHAPES, Workplace, cores, default_workdir
from bench.peers.records import Records

EPILOG = """\
examples:
  python -m bench.peers install                      each peer in a virtual environment of its own (15 minutes)
  python -m bench.peers models                       random weights of the shape of Llama-3.2-1B, and of 97 M parameters
  python -m bench.peers run                          five rounds of everything
  python -m bench.peers run --measures decode,prefill --systems penstock,llama.cpp --rounds 1
  python -m bench.peers run --measures decode --systems penstock-q8_0,penstock-q8_0-int8,llama.cpp-q8_0
  python -m bench.peers curve --model 100m --plot docs/curve.png     eight clients over the size of a step
  python -m bench.peers report --into docs/benchmarks.md --plot docs/peers.png

Run it from the repository's root, with Penstock built or installed.  A run that was cut goes on where it stopped;
`run --measures http8` and a later `run --measures decode` write into one file.  Only one thing should run on the
machine meanwhile.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description="Compare Penstock with transformers, llama.cpp, vLLM and OpenVINO on this machine's processor.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--workdir",
        type=Path,
        default=default_workdir(),
        help="environments, models, results: some 20 GB (default: %(default)s)",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_install(commands.add_parser("install", help="install the peers, with exact versions"))
    _add_models(commands.add_parser("models", help="make the checkpoints, one for each system's format"))
    _add_run(commands.add_parser("run", help="measure; appends to the results"))
    _add_curve(commands.add_parser("curve", help="measure eight clients over the size of a step, and print the points"))
    _add_report(commands.add_parser("report", help="medians, ratios, spread and a plot out of the results"))
    return parser


def _add_install(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_install)
    parser.add_argument("--peers", type=_names(PEERS), default=PEERS, metavar="P,P", help="default: all")
    parser.add_argument("--python", default=sys.executable, help="makes the environments (default: this one)")
    parser.add_argument("--torch-index", metavar="URL", help="a further package index, with CPU builds of torch")


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_models)
    parser.add_argument("--model", type=_names(SHAPES), default=tuple(SHAPES), metavar="M,M", help="default: 1b,100m")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_run)
    parser.add_argument("--model", choices=tuple(SHAPES), default="1b", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="in all, done ones included (default: 5)")
    parser.add_argument(
        "--systems",
        type=_names(matrix.SYSTEMS),
        default=matrix.SYSTEMS,
        metavar="S,S",
        help="default: " + ", ".join(matrix.SYSTEMS),
    )
    parser.add_argument(
        "--measures",
        type=_names(matrix.MEASURES),
        default=matrix.MEASURES,
        metavar="M,M",
        help="default: " + ", ".join(matrix.MEASURES),
    )
    parser.add_argument(
        "--threads", type=int, default=cores(), metavar="N", help="of every system (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="timed steps of decode (default: 16)")
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="of decode in a round (default: 5)")
    parser.add_argument("--requests", type=int, default=48, metavar="N", help="of eight clients (default: 48)")
    parser.add_argument(
        "--stutter-seconds",
        type=float,
        default=8.0,
        metavar="S",
        help="long prompts amid answers, at least (default: 8)",
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="default: results.jsonl in the work folder")


def _add_curve(parser: argparse.ArgumentParser) -> None:
    known = tuple(dict.fromkeys(setting.system for setting in curve.settings()))
    parser.set_defaults(command=_curve)
    parser.add_argument("--model", choices=tuple(SHAPES), default="1b", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="in all, done ones included (default: 3)")
    parser.add_argument(
        "--systems", type=_names(known), default=known, metavar="S,S", help=f"default: {', '.join(known)}"
    )
    parser.add_argument(
        "--threads", type=int, default=cores(), metavar="N", help="of every system (default: %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=48, metavar="N", help="of eight clients (default: 48)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="default: results.jsonl in the work folder")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the points as well (needs matplotlib)")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_report)
    parser.add_argument("--results", type=Path, metavar="FILE", help="default: results.jsonl in the work folder")
    parser.add_argument(
        "--into",
        type=Path,
        metavar="PAGE",
        help="put it between the page's two <!-- peers --> lines; else it is printed",
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw it as well (needs matplotlib)")


def _names(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of comma-separated names."""
    allowed = tuple(known)

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name for name in text.split(",") if name)
        unknown = [name for name in names if name not in allowed]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'}: known are {', '.join(allowed)}")
        return names

    return parse


def _install(args: argparse.Namespace, place: Workplace) -> int:
    install.install(place, args.peers, python=args.python, torch_index=args.torch_index)
    return 0


def _models(args: argparse.Namespace, place: Workplace) -> int:
    models.make(place, args.model)
    return 0


def _run(args: argparse.Namespace, place: Workplace) -> int:
    absent = models.missing(place, args.model, args.systems)
    if absent:
        raise install.InstallError(f"not there: {', '.join(absent)}\nmake them: python -m bench.peers models")
    makers = {CODED.get(system, (system,))[0] for system in args.systems}
    lacking = [peer for peer in install.missing(place) if peer in makers]
    if lacking:
        raise install.InstallError(f"not installed: {', '.join(lacking)}\nfirst: python -m bench.peers install")
    wanted = matrix.Wanted(
        model=args.model,
        rounds=args.rounds,
        systems=args.systems,
        measures=args.measures,
        threads=args.threads,
        steps=args.steps,
        turns=args.turns,
        requests=args.requests,
        stutter_s=args.stutter_seconds,
    )
    failures = matrix.Matrix(place, Records(args.results or place.results), wanted).run()
    return 1 if failures else 0


def _curve(args: argparse.Namespace, place: Workplace) -> int:
    records = Records(args.results or place.results)
    wanted = curve.Wanted(args.model, args.rounds, args.systems, args.threads, args.requests)
    failures = curve.measure(place, records, wanted)
    found = curve.points(records, args.model)
    print("\n".join(curve.table(found)))
    if args.plot is not None:
        curve.draw(found, args.plot, args.model)
    return 1 if failures else 0


def _report(args: argparse.Namespace, place: Workplace) -> int:
    from bench.peers import plot, report

    records = list(Records(args.results or place.results))
    if not records:
        raise install.InstallError(f"no results in {args.results or place.results}: python -m bench.peers run")
    text = report.section(records)
    if args.into is None:
        print(text)
    else:
        args.into.write_text(report.put_into(args.into.read_text(encoding="utf-8"), text), encoding="utf-8")
    if args.plot is not None:
        plot.draw(records, args.plot)
    return 0


def main() -> int:
    args = build_parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers are ended on the way out
    place = Workplace(args.workdir.expanduser().absolute())
    try:
        code: int = args.command(args, place)
        return code
    except (install.InstallError, ValueError) as error:
        print(f"bench.peers: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
