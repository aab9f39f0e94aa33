"""``penstock``: finds the subcommand, runs it, and words its errors in one line.

Each subcommand is a module with ``add_parser(subparsers)`` and ``run(args) -> int``; only the one that is asked for
is imported, and none for ``penstock --help``.  Exit codes: 0 done, 1 failed, 2 asked for wrongly (usage, settings,
model), 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType

from penstock import __version__
from penstock.cli.parsing import COMMANDS, EXIT_USAGE, HOST_KEYS_VERBS, CommandParser
from penstock.errors import ConfigError, KernelError, ModelError, PenstockError

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Set before numpy and tokenizers are imported: a process with threads must not fork workers."""

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

EPILOG = """\
examples:
  penstock serve                     serve the bundled storyteller on http://127.0.0.1:8000
  penstock serve ~/models/llama      serve a Hugging Face folder
  penstock run ORG/NAME              serve a model of the Hub, and talk to it
  penstock chat                      talk to it
  penstock COMMAND --help            everything else
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit code."""
    os.environ.update(ONE_THREAD)
    words, rest = _without_rest(_as_of_today(sys.argv[1:] if argv is None else argv))
    try:
        args = _parser(words).parse_args(words)
        if rest:
            args.rest = rest
        return int(args.run(args))
    except PenstockError as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, (ConfigError, ModelError, KernelError)) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone; say nothing, also not when Python flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _as_of_today(words: Sequence[str]) -> list[str]:
    """The command line, where older forms go on: ``penstock keys DIR`` and ``host-keys DIR`` make shared keys."""
    match list(words):
        case ["keys", word] if word not in ("add", "list", "revoke") and not word.startswith("-"):
            return ["host-keys", "shared", word]
        case ["host-keys", word] if word not in HOST_KEYS_VERBS and not word.startswith("-"):
            return ["host-keys", "shared", word]
        case whole:
            return whole


def _without_rest(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The words, and those behind ``--`` that are for another program: ``penstock launch AGENT -- ARGS``."""
    if words[:1] != ["launch"] or "--" not in words:
        return words, ()
    end = words.index("--")
    return words[:end], words[end + 1 :]


def _parser(words: Sequence[str]) -> CommandParser:
    asked = words[0] if words else ""
    return command_parser((asked,) if asked in COMMANDS else ())


def command_parser(complete: Iterable[str]) -> CommandParser:
    """The parser of ``penstock``; of these commands with all their flags, of the others with their names."""
    parser = CommandParser(
        prog="penstock",
        description="Serves large language models with prefill and decode on separate workers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    wanted = frozenset(complete)
    for name, summary in COMMANDS.items():
        if name in wanted:
            _module(name).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"penstock.cli.{name.replace('-', '_')}")


if __name__ == "__main__":
    sys.exit(main())
