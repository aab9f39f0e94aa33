"""``penstock run``: serves a model and talks to it, in one; ``penstock chat`` with a service of its own."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.bundled import STORYTELLER
from penstock.cli import chat
from penstock.cli.local_service import exit_on_signals, find_service, started_service, temporary_folder
from penstock.cli.parsing import COMMANDS, LATE_ARGUMENT
from penstock.cli.pull import download_with_progress
from penstock.config.load import load_client
from penstock.launch.model_path import is_hub_name
from penstock.launch.run_folder import ServiceRecord

EPILOG = """\
examples:
  penstock run storyteller                               the bundled model: a conversation
  penstock run Qwen/Qwen3-0.6B "Why is the sky blue?"    ask once
  penstock run ~/models/llama --system "Be brief."
  cat notes.txt | penstock run ~/models/llama "Summarize this:"

Uses a service of yours that serves MODEL on this host already; else it starts one and stops it at the end.
Settings of that service come from the environment, such as PENSTOCK_MAX_MODEL_LEN=8192 (`penstock serve --help`).

In a conversation: Ctrl-C stops a response, Ctrl-D ends.  Commands:
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "run",
        help=COMMANDS["run"],
        description="Serve a model and talk to it, or ask it once.",
        epilog=EPILOG + chat.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, wait=0.0, **{LATE_ARGUMENT: "prompt"})
    parser.add_argument("model", metavar="MODEL", help=f"a folder, a .gguf file, org/name, or {STORYTELLER}")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="ask this and end; none: a conversation")
    parser.add_argument("--api-key", metavar="KEY", help="of a service that runs already; default: PENSTOCK_API_KEY")
    chat.add_chat_flags(parser)


def run(args: argparse.Namespace) -> int:
    """As ``chat.run``; raises ConfigError if the service cannot start."""
    record = find_service(args.model)
    if record is not None:
        return _talk(args, record)
    if is_hub_name(args.model) and not Path(args.model).exists():
        download_with_progress(args.model)  # before the service starts quietly
    with (
        exit_on_signals(),
        temporary_folder() as folder,
        started_service(args.model, folder) as own,
    ):
        return _talk(args, own)


def _talk(args: argparse.Namespace, record: ServiceRecord) -> int:
    _, api_key = load_client(record.url, args.api_key)
    given = vars(args) | {"url": record.url, "api_key": api_key if record.needs_key else None, "model": record.model}
    return chat.run(argparse.Namespace(**given))
