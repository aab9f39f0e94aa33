"""``penstock pull``: downloads a model into the cache from which ``penstock serve ORG/NAME`` serves it."""

from __future__ import annotations

import argparse
import logging

from penstock.cli.parsing import COMMANDS
from penstock.errors import ConfigError
from penstock.launch.hub_download import UNWANTED_FILES, WANTED_FILES, DownloadedModel, download_model, format_bytes
from penstock.launch.model_path import is_hub_name

EPILOG = f"""\
examples:
  penstock pull Qwen/Qwen3-0.6B
  penstock pull org/name --revision v1.0
  HF_TOKEN=hf_... penstock pull meta-llama/Llama-3.2-1B-Instruct     a gated model
  HF_ENDPOINT=https://mirror.example.org penstock pull org/name      from a mirror

Downloads only what serving needs: {", ".join(WANTED_FILES)};
not {", ".join(UNWANTED_FILES)}.
They go to the Hub's own cache (HF_HUB_CACHE, or hub in HF_HOME, or ~/.cache/huggingface/hub).
An interrupted download goes on where it stopped when the same command is run again.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "pull",
        help=COMMANDS["pull"],
        description="Download a model from the Hugging Face Hub, to serve it later.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="ORG/NAME", help="the model's name on the Hub")
    parser.add_argument("--revision", metavar="R", help="a branch, a tag or a commit (default: main)")


def download_with_progress(name: str, revision: str | None = None) -> DownloadedModel:
    """Download a Hub model; shows its progress on standard error."""
    logger = logging.getLogger("penstock")
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
    return download_model(name, revision=revision)


def run(args: argparse.Namespace) -> int:
    """0 when all files are there; raises ConfigError, ModelError."""
    if not is_hub_name(args.model):
        raise ConfigError(f"{args.model} is no name of a model on the Hub; expected ORG/NAME, as Qwen/Qwen3-0.6B")
    found = download_with_progress(args.model, args.revision)
    done = f"{format_bytes(found.fetched)} downloaded" if found.fetched else "nothing to download"
    print(f"{args.model}: {done}; {found.files} files, {format_bytes(found.size)}, in {found.folder}")
    print(f"serve it: penstock serve {found.folder if args.revision else args.model}")
    return 0
