"""The fault suite: ``python -m bench.faults [--only F1,L4] [--seconds N] [--scale S] [--json FILE] [--plot FILE]``.

Each run is bounded; ``--scale 0.02`` is a look of a few seconds a run, 1 the full counts of docs/reliability.md.  F1
has parts of two minutes: with ``--resume FILE`` those that are done are kept, and the same command goes on with the
others.  Exits with 1 when a bar is missed.  What this machine lacks (namespaces, a C compiler) is named and not run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

from bench.faults import (
    bits,
    clocks,
    disks,
    files,
    hedges,
    kills,
    loads,
    messages,
    network,
    node_loss,
    resources,
    scale_downs,
    waiting_streams,
)
from bench.faults.plot import plot
from bench.faults.result import Budget, NotHereError, Result, Run, rewritten, table

RUNS: dict[str, Run] = {
    "F1": kills.f1,
    "F2": network.f2,
    "F3": messages.f3,
    "F4": network.f4,
    "F5": disks.f5,
    "F6": bits.f6,
    "F7": files.f7,
    "F8": disks.f8,
    "F9": clocks.f9,
    "F10": resources.f10,
    "F12": scale_downs.f12,
    "F13": kills.f13,
    "F14": node_loss.f14,
    "L1": loads.l1,
    "L2": loads.l2,
    "L3": waiting_streams.l3,
    "L4": loads.l4,
    "L5": loads.l5,
    "L6": loads.l6,
    "L7": hedges.l7,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="F1,L4", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--seconds", type=float, default=20.0, help="of runs that are bounded by time (default: 20)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the counts of the others (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the figures; those of other runs there stay")
    parser.add_argument(
        "--plot", type=Path, metavar="SVG", help="draw the stalls of F1, F13 or F14, the first that is run"
    )
    parser.add_argument("--page", type=Path, metavar="MD", help="put the table of all that --json has into this page")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="parts of F1 or F13 are kept there and not run twice"
    )
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="after which F1, F13 and F14 begin no other part (default: 15)"
    )
    args = parser.parse_args()
    if args.page and not args.json:
        parser.error("--page needs --json FILE: the table is made of what stands there")
    names = args.only.split(",") if args.only else list(RUNS)
    if unknown := [name for name in names if name not in RUNS]:
        parser.error(f"no such run: {', '.join(unknown)}")
    until = time.monotonic() + 60 * args.minutes
    budget = Budget(seconds=args.seconds, scale=args.scale, until=until, resume=args.resume)
    results: list[Result] = []
    known: list[Result] = []
    for name in names:
        results.append(one(name, budget))
        print(f"{name}: {results[-1].verdict} after {results[-1].seconds:.1f} s {results[-1].why}", file=sys.stderr)
        if args.json:
            known = save(args.json, results[-1:])
    if args.page:
        args.page.write_text(rewritten(args.page.read_text(), known))
    if args.plot:
        plot(results, args.plot)
    print(table(results))
    return int(any(result.held is False for result in results))


def one(name: str, budget: Budget) -> Result:
    """One run; what it cannot do here it says, and what broke it, so that the others go on."""
    began, what = time.monotonic(), (RUNS[name].__doc__ or "").split(".")[0]
    try:
        result = RUNS[name](budget)
    except NotHereError as error:
        result = Result(name=name, what=what, held=None, why=f"needs {error}")
    except AssertionError as error:
        result = Result(name=name, what=what, held=False, why=str(error)[:2000])
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        result = Result(name=name, what=what, held=False, why=f"{type(error).__name__}: {error}"[:2000])
    result.seconds = time.monotonic() - began
    return result


def save(path: Path, results: list[Result]) -> list[Result]:
    """Merge into what is there; all that is there now, in order."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known |= {result.name: result.as_json() for result in results}
    path.write_text(json.dumps(known, indent=1) + "\n")
    return [Result(**known[name]) for name in RUNS if name in known]


if __name__ == "__main__":
    sys.exit(main())
