"""``penstock completion``: prints a script with which a shell completes commands and flags.  shtab writes it."""

from __future__ import annotations

import argparse

import shtab

from penstock.cli.parsing import COMMANDS

EPILOG = """\
examples:
  penstock completion bash > ~/.local/share/bash-completion/completions/penstock
  penstock completion zsh > ~/.zfunc/_penstock         with `fpath+=~/.zfunc` before compinit in ~/.zshrc
  penstock completion fish > ~/.config/fish/completions/penstock.fish
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "completion",
        help=COMMANDS["completion"],
        description="Print shell completion for all commands and flags.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(args: argparse.Namespace) -> int:
    """0 with the script on standard output."""
    from penstock.cli.main import command_parser

    print(shtab.complete(command_parser(COMMANDS), shell=args.shell))
    return 0
