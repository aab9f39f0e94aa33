"""``python -m bench.gpu run``: check kernels, measure every bar, write table, JSON and pictures."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.gpu.figures import Findings

LIMIT_S = 520.0
"""Under nine minutes, the writing included."""

EPILOG = """\
examples:
  PYTHONPATH=src python -m bench.gpu run --out results                       on a GPU: under nine minutes
  PYTHONPATH=src python -m bench.gpu run --out results --into docs/benchmarks-gpu.md
  PYTHONPATH=src python -m bench.gpu run --dry                               anywhere: every step, tiny, no figures

From the repository's root.  Needs torch, triton, numpy, ml_dtypes, msgspec, blake3 and xxhash, and nothing that is
compiled: without the C++ extension, blocks are hashed and pages checked in Python, which no figure here contains.
A machine without a network is given the packages it lacks as a folder:
  pip install --target deps --python-version 3.12 --only-binary=:all: --no-deps ml_dtypes msgspec blake3 xxhash
  PYTHONPATH=src:deps python -m bench.gpu run
"""

NEEDED = ("torch", "triton", "numpy", "ml_dtypes", "msgspec", "blake3", "xxhash")


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description="Check the kernels of one GPU and measure the engine on it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="check and measure", epilog=EPILOG, formatter_class=parser.formatter_class)
    run.add_argument("--dry", action="store_true", help="tiny shapes in Triton's interpreter; nothing is a measurement")
    run.add_argument("--out", type=Path, metavar="DIR", help="where findings.json and the pictures go")
    run.add_argument("--into", type=Path, metavar="PAGE", help="put the tables between the marks of this page")
    run.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds in all (default: %(default)s)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """0 when every check passed, 1 when one failed, 2 when it cannot run here."""
    args = build_parser().parse_args(arguments)
    from importlib.util import find_spec

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"bench.gpu needs {', '.join(missing)}; see python -m bench.gpu run --help", file=sys.stderr)
        return 2
    if args.into is not None and (complaint := unfit_page(args.into)):
        print(f"bench.gpu: --into {args.into}: {complaint}", file=sys.stderr)
        return 2
    if args.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    import torch

    if not args.dry and not torch.cuda.is_available():
        print("bench.gpu: torch finds no GPU here; --dry walks every step without one", file=sys.stderr)
        return 2
    from bench.gpu.run import run

    findings = run(dry=args.dry, limit_s=args.limit)
    write(findings, args.out, args.into)
    return 1 if findings.failed else 0


def unfit_page(page: Path) -> str:
    """Why the tables cannot go there, said before minutes of measuring; empty: they can."""
    from bench.gpu.report import put_into

    try:
        put_into(page.read_text(encoding="utf-8"), "")
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def write(findings: Findings, out: Path | None, into: Path | None) -> None:
    """Everything to its files; the tables to the terminal as well."""
    from bench.gpu.report import picture, put_into, section

    text = section(findings)
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "findings.json").write_text(json.dumps(findings.as_json(), indent=1), encoding="utf-8")
        for name, y in (("decode", "of_read_rate"), ("decode", "tokens_per_s")):
            lines = findings.tables.get(name, [])
            if lines:
                drawing = picture(f"{name}: {y} by batch", lines, "batch", y)
                (out / f"{name}-{y}.svg").write_text(drawing, encoding="utf-8")
    if into is not None:
        into.write_text(put_into(into.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
