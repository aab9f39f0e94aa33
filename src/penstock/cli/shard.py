"""``penstock shard``: a model folder to one of which every rank of a plan reads its own bytes only."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from penstock.cli.compress import add_conversion_flags, conversion_threads, kinds_of, model_folder, total_bytes
from penstock.cli.console import byte_bar, text_table
from penstock.cli.parsing import COMMANDS
from penstock.parallel.stored_cuts import folder_cuts
from penstock.weights.compression_convert import ConvertedTensor, check_folders, shard_folder, verify_folder

EPILOG = """\
examples:
  penstock shard ~/models/llama ~/models/llama-shard --verify
  penstock serve ~/models/llama-shard --parallel tp2   each rank reads its slices and proves them by their checksums

Matrices that ranks divide are stored in slices of rows or columns, each with its checksum, and files say the hashes of
all tensors: no rank reads the rest.  Weights, names, the fingerprint and the tokens stay as they are, with any plan and
without one.  MODEL may be compressed and stays so; penstock compress writes slices at once, and penstock decompress
the original tensors again.  An interrupted run goes on where it stopped when it is started again.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "shard",
        help=COMMANDS["shard"],
        description="Store the matrices of a model folder in the slices that ranks read.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, plain or compressed")
    parser.add_argument("out", type=Path, metavar="OUT", help="the new folder")
    add_conversion_flags(parser)


def run(args: argparse.Namespace) -> int:
    """0 when OUT is whole; raises ConfigError, ModelError, PenstockError."""
    threads = conversion_threads(args)
    source = model_folder(args.model)
    check_folders(source, args.out, force=args.force)
    cuts = folder_cuts(source)
    began = time.perf_counter()
    with byte_bar("sharding", total_bytes(source)) as add:
        done = shard_folder(source, args.out, threads=threads, report=lambda one: add(one.original_bytes), cuts=cuts)
    took = time.perf_counter() - began
    print(slices_table(done))
    sliced, after = sum(bool(one.original.slices) for one in done), sum(one.nbytes for one in done)
    print(f"{args.out}: {after / 1e6:,.1f} MB, {sliced} of {len(done)} tensors in slices, in {took:.1f} s")
    if args.verify:
        count = verify_folder(source, args.out)
        print(f"verified: all {count} tensors have the bytes of {source}")
    return 0


def slices_table(done: list[ConvertedTensor]) -> str:
    """One line a kind (``compress.kinds_of``)."""
    rows = []
    for name, own in kinds_of(done).items():
        found = own[0].original
        cut = f"{len(found.slices)} of {found.axis}" if found.slices else "whole"
        rows.append((name, str(len(own)), f"{sum(one.nbytes for one in own) / 1e6:,.1f}", cut))
    return text_table(rows, headers=("tensors", "count", "MB", "slices"), right=(1, 2))
