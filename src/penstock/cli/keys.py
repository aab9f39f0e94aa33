"""``penstock keys``: makes the CURVE keys with which the processes of one deployment know each other."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.wire.keys import Keys

EPILOG = """\
example:
  penstock keys ~/.config/penstock/keys     makes four files there that only you can read
  scp -rp ~/.config/penstock/keys other-host:.config/penstock/

Needed only between hosts: on one host `penstock serve` makes keys of its own at every start.  Whoever has the files
can join the deployment; existing files are never overwritten.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "keys",
        help="make the keys that workers on several hosts share",
        description="Make the CURVE keys that the processes of one deployment share between hosts.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("folder", type=Path, metavar="DIR", help="made if it does not exist")


def run(args: argparse.Namespace) -> int:
    """0 when the files are written; raises ConfigError when one exists or none can be written."""
    for path in Keys.ephemeral().save(args.folder):
        print(path)
    return 0
