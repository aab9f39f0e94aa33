"""``penstock decompress``: a compressed model folder to plain safetensors, as every other program reads them."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.compress import model_folder, total_bytes
from penstock.cli.console import byte_bar
from penstock.cli.parsing import COMMANDS
from penstock.weights.compression_convert import check_folders, decompress_folder

EPILOG = """\
examples:
  penstock decompress ~/models/llama-compressed ~/models/llama
  penstock decompress storyteller /tmp/storyteller     the bundled model, which is compressed

Every tensor is checked against the hash of the original while it is written.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "decompress",
        help=COMMANDS["decompress"],
        description="Write the original tensors of a compressed model folder.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "model", metavar="MODEL", help="a folder that `penstock compress` wrote, or storyteller: the bundled model"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the new folder")
    parser.add_argument("--force", action="store_true", help="replace a model that is in OUT already")


def run(args: argparse.Namespace) -> int:
    """0 when OUT is whole; raises ConfigError, ModelError, PenstockError."""
    source = model_folder(args.model)
    check_folders(source, args.out, force=args.force)
    with byte_bar("decompressing", total_bytes(source)) as add:
        done = decompress_folder(source, args.out, report=lambda one: add(one.original_bytes))
    print(f"{args.out}: {len(done)} tensors, {sum(one.original_bytes for one in done) / 1e6:,.1f} MB")
    return 0
