"""``penstock compress``: a model folder to a smaller one that gives the same answers."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import time
from pathlib import Path

from penstock.bundled import STORYTELLER, storyteller
from penstock.cli.console import byte_bar, text_table
from penstock.cli.parsing import COMMANDS
from penstock.config.base import expanded_path
from penstock.errors import ConfigError, ModelError
from penstock.parallel.stored_cuts import folder_cuts
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.compression_convert import ConvertedTensor, check_folders, compress_folder, verify_folder
from penstock.weights.stored_slices import Cuts

EPILOG = """\
examples:
  penstock compress ~/models/llama ~/models/llama-compressed --verify
  penstock serve ~/models/llama-compressed       the same tokens, bit for bit, from 30 % less memory
  penstock compress ~/models/llama ~/models/llama-gpu --for gpu

bf16 matrices become about 70 % of their size, or 75 % in the layout for GPUs, everything else stays as it is; nothing
is lost.  Either layout can be served anywhere, is converted when a model is loaded elsewhere, and can be MODEL for the
other.  Matrices that ranks divide (--parallel) are stored in the slices that each rank reads, but for GPUs.  An
interrupted run goes on where it stopped when it is started again.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "compress",
        help=COMMANDS["compress"],
        description="Compress the bf16 weights of a model folder without loss.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="the new folder")
    parser.add_argument(
        "--for", dest="layout", choices=("cpu", "gpu"), default="cpu", help="whose layout to write (default: cpu)"
    )
    add_conversion_flags(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="a row for every tensor, not for every kind")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the bits a weight of every tensor (matplotlib)")


def add_conversion_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of a command that writes a folder from another one."""
    parser.add_argument("--verify", action="store_true", help="read both folders again and compare every tensor's hash")
    parser.add_argument("--force", action="store_true", help="replace a model that is in OUT already")
    parser.add_argument("--threads", type=int, metavar="N", help="default: one for each core")


def conversion_threads(args: argparse.Namespace) -> int:
    """The threads of such a command.  Raises ConfigError."""
    threads: int = args.threads if args.threads is not None else os.cpu_count() or 1
    if threads < 1:
        raise ConfigError(f"--threads must be at least 1, got {threads}")
    return threads


def run(args: argparse.Namespace) -> int:
    """0 when OUT is whole; raises ConfigError, ModelError, PenstockError."""
    threads = conversion_threads(args)
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'penstock[plot]'")
    source = model_folder(args.model)
    check_folders(source, args.out, force=args.force)
    cuts = _cuts(source, verbose=args.verbose)
    began = time.perf_counter()
    with byte_bar("compressing", total_bytes(source)) as add:
        layout = "" if args.layout == "cpu" else args.layout
        done = compress_folder(
            source, args.out, threads=threads, report=lambda one: add(one.original_bytes), layout=layout, cuts=cuts
        )
    took = time.perf_counter() - began
    print(report_table(done) if args.verbose else summary_table(done))
    before, after = sum(one.original_bytes for one in done), sum(one.nbytes for one in done)
    print(
        f"{args.out}: {after / 1e6:,.1f} MB, {100 * after / max(1, before):.1f} % of {before / 1e6:,.1f} MB, "
        f"in {took:.1f} s"
    )
    if args.verify:
        count = verify_folder(source, args.out)
        print(f"verified: all {count} tensors decode to the bytes of {source}")
    if args.plot is not None:
        plot_bits(done, args.plot)
        print(f"{args.plot}: bits a weight of every tensor")
    return 0


def _cuts(source: Path, *, verbose: bool) -> Cuts:
    """Where ranks would cut its matrices; nowhere in what they cannot divide, or what is not a model to serve."""
    try:
        return folder_cuts(source)
    except (ConfigError, ModelError) as error:
        if verbose:
            print(f"every matrix is stored whole, not in slices for ranks: {error}")
        return {}


def model_folder(name: str) -> Path:
    """The folder that MODEL means.  Raises ConfigError if there is none."""
    path = expanded_path(name, "MODEL")
    if path.is_dir():
        return path
    if name == STORYTELLER:
        return Path(storyteller())
    raise ConfigError(f"{name}: no such folder")


def total_bytes(folder: Path) -> int:
    """Bytes of all tensors, decoded."""
    with Checkpoint(folder) as checkpoint:
        return sum(file.original_bytes(info) for file in checkpoint.files for info in file.tensors.values())


def report_table(done: list[ConvertedTensor]) -> str:
    """One line a tensor."""
    rows = [
        (
            one.name,
            one.original.dtype.lower(),
            " x ".join(map(str, one.original.shape)),
            f"{one.bits_a_weight:.2f}",
            f"{100 * one.nbytes / max(1, one.original_bytes):.1f} %" if one.original.code else "plain",
        )
        for one in done
    ]
    return text_table(rows, headers=("tensor", "type", "shape", "bits a weight", "of its size"))


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def kinds_of(done: list[ConvertedTensor]) -> dict[str, list[ConvertedTensor]]:
    """By kind: the tensors whose names differ in the number of a layer or an expert only."""
    kinds: dict[str, list[ConvertedTensor]] = {}
    for one in done:
        kinds.setdefault(_NUMBER.sub("*", one.name), []).append(one)
    return kinds


def summary_table(done: list[ConvertedTensor]) -> str:
    """One line a kind."""
    rows = []
    for name, own in kinds_of(done).items():
        before, after = sum(one.original_bytes for one in own), sum(one.nbytes for one in own)
        share = f"{100 * after / max(1, before):.1f} %" if any(one.original.code for one in own) else "plain"
        rows.append((name, str(len(own)), f"{before / 1e6:,.1f}", f"{after / 1e6:,.1f}", share))
    headers = ("tensors", "count", "MB before", "MB after", "of its size")
    return text_table(rows, headers=headers, right=(1, 2, 3, 4))


def plot_bits(done: list[ConvertedTensor], path: Path) -> None:
    """Bits a weight of every compressed tensor, in the order of the file.  Raises ConfigError if it cannot be saved."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    compressed = [one for one in done if one.original.code]
    figure, axes = pyplot.subplots(figsize=(10, 4), layout="constrained")
    axes.plot([one.bits_a_weight for one in compressed], ".-")
    axes.axhline(16, color="grey", linestyle=":")
    axes.set(xlabel="tensor", ylabel="bits a weight", ylim=(10, 16.5), title="bf16 weights, compressed without loss")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be drawn ({error})") from error
    finally:
        pyplot.close(figure)
