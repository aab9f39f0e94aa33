"""``penstock``: finds the subcommand, runs it, and words its errors in one line.

Each subcommand is a module with ``add_parser(subparsers)`` and ``run(args) -> int``; only the one that is asked for
is imported.  Exit codes: 0 done, 1 failed, 2 asked for wrongly (usage, settings, model), 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from penstock import __version__
from penstock.errors import ConfigError, KernelError, ModelError, PenstockError

COMMANDS = (
    *("serve", "worker", "status", "admin", "chat", "bench", "doctor", "keys", "compress", "decompress", "plan"),
    *("simulate", "calibrate"),
)

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Set before numpy and tokenizers are imported: a process with threads must not fork workers."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

EPILOG = """\
examples:
  penstock serve                     serve the bundled storyteller on http://127.0.0.1:8000
  penstock serve ~/models/llama      serve a Hugging Face folder
  penstock chat                      talk to it
  penstock COMMAND --help            everything else
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit code."""
    os.environ.update(ONE_THREAD)
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser(words).parse_args(words)
        return int(args.run(args))
    except PenstockError as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, (ConfigError, ModelError, KernelError)) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone; say nothing, also not when Python flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Serves large language models with prefill and decode on separate workers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    asked = words[0] if words else ""
    for name in (asked,) if asked in COMMANDS else COMMANDS:
        _module(name).add_parser(subparsers)
    return parser


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"penstock.cli.{name}")


if __name__ == "__main__":
    sys.exit(main())
