"""``penstock host-keys``: CURVE keys that the processes of one deployment share between hosts, in a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.parsing import COMMANDS
from penstock.wire.curve_keys import CurveKeys

EPILOG = """\
examples:
  penstock host-keys ~/.config/penstock/keys                 four files that only you can read
  scp -rp ~/.config/penstock/keys other-host:.config/penstock/
  penstock worker MODEL --listen tcp://0.0.0.0:9000 --keys ~/.config/penstock/keys

On one host `penstock serve` makes keys of its own at every start.  Whoever has the files can join the deployment;
existing files are never overwritten.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "host-keys",
        help=COMMANDS["host-keys"],
        description="Make the CURVE keys that the processes of one deployment share between hosts.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("folder", type=Path, metavar="DIR", help="made if need be")


def run(args: argparse.Namespace) -> int:
    """0 with the files' paths on standard output; raises ConfigError."""
    for path in CurveKeys.ephemeral().save(args.folder):
        print(path)
    return 0
