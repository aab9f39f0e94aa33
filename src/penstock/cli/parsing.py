"""The parser of all commands: an error is one line, with a hint for typos and for flags of other servers.

Knows words of vLLM, llama-server and ollama, and nothing about what a command does.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

EXIT_USAGE = 2

HOST_KEYS_VERBS = ("init", "add", "rights", "rotate", "revoke", "list", "shared")
"""Subcommands of ``penstock host-keys``; its older form has a folder there."""

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "serve": "serve a model behind the OpenAI API",
        "run": "serve a model and talk to it, in one",
        "launch": "start a coding agent that uses a model served here",
        "pull": "download a model from the Hugging Face Hub",
        "worker": "run one worker for a gateway on another host",
        "node": "run the workers and gateways that a fleet file has for this host",
        "manifests": "print what Kubernetes, Helm, systemd or Compose need to run a fleet file",
        "probe": "find out whether a worker or a gateway is ready, or alive",
        "picker": "choose the gateway of each request for a proxy (Envoy, an InferencePool)",
        "ray": "run the nodes of a fleet file on a Ray cluster",
        "ps": "list the services that run on this host",
        "status": "show a running service: its model, rates and workers",
        "admin": "change a worker's role, drain or restart it",
        "chat": "talk to a model in the terminal",
        "bench": "measure any server of the OpenAI API",
        "doctor": "show what this machine has and what is missing",
        "keys": "add, list and revoke API keys of tenants",
        "host-keys": "make, rotate and revoke the keys of hosts",
        "compress": "make a model's bf16 weights 30 %% smaller without loss",
        "decompress": "undo that",
        "shard": "store a model so that each rank of a plan reads its own bytes",
        "plan": "compute whether a model fits on given devices, before anything is loaded",
        "simulate": "replay a trace of requests on a simulated fleet",
        "calibrate": "measure this machine for the simulator",
        "completion": "print shell completion for bash, zsh or fish",
    }
)
"""Subcommands and what each does, for ``penstock --help``, which imports none of them."""

FOREIGN_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        # vLLM and SGLang
        "--model": "MODEL is the first argument: penstock serve MODEL",
        "--model-path": "MODEL is the first argument: penstock serve MODEL",
        "--max-num-seqs": "use --max-running",
        "--max-running-requests": "use --max-running",
        "--max-num-batched-tokens": "use --max-chunk-tokens",
        "--chunked-prefill-size": "use --max-chunk-tokens",
        "--context-length": "use --max-model-len",
        "--gpu-memory-utilization": "use --kv-memory SIZE; by default KV pages take what is free on a GPU",
        "--mem-fraction-static": "use --kv-memory SIZE; by default KV pages take what is free on a GPU",
        "--kv-cache-dtype": "use --kv-dtype",
        "--enable-prefix-caching": "leave it out: prefixes are always cached",
        "--enable-chunked-prefill": "leave it out: prompts are always prefilled in chunks (--max-chunk-tokens)",
        "--tp": "use --parallel tpN",
        "--tp-size": "use --parallel tpN",
        "--pp-size": "use --parallel ppN",
        "--data-parallel-size": "use --prefill N and --decode M: workers of one model",
        "--quantization": "leave it out: the model's files say how its weights are quantized",
        "--lora-modules": "use --lora NAME=DIR",
        "--enable-lora": "use --lora NAME=DIR",
        "--speculative-config": "use --speculate and --draft-model",
        "--speculative-model": "use --draft-model",
        "--trust-remote-code": "leave it out: code of models is never run",
        "--root-path": "let the proxy in front strip the prefix",
        # llama-server
        "-m": "MODEL is the first argument: penstock serve FILE.gguf",
        "-hf": "MODEL is the first argument: penstock serve ORG/NAME",
        "--hf-repo": "MODEL is the first argument: penstock serve ORG/NAME",
        "-c": "use --max-model-len",
        "--ctx-size": "use --max-model-len",
        "-ngl": "use --device cuda; a model is wholly on the GPU or wholly on processors",
        "--gpu-layers": "use --device cuda; a model is wholly on the GPU or wholly on processors",
        "--n-gpu-layers": "use --device cuda; a model is wholly on the GPU or wholly on processors",
        "-np": "use --max-running",
        "-b": "use --max-chunk-tokens",
        "--batch-size": "use --max-chunk-tokens",
        "-t": "use --threads",
        "-a": "use --served-model-name",
        "--alias": "use --served-model-name",
        "-md": "use --draft-model",
        "--model-draft": "use --draft-model",
        "-ctk": "use --kv-dtype",
        "--cache-type-k": "use --kv-dtype",
        "--ssl-key-file": "use --tls-key",
        "--ssl-cert-file": "use --tls-cert",
        "--ssl-keyfile": "use --tls-key",
        "--ssl-certfile": "use --tls-cert",
        "--allowed-origins": "use --allowed-origin",
        "--cors-origins": "use --allowed-origin",
        "--uvicorn-log-level": "use --log-requests, or --log-json",
    }
)
"""What other servers call a flag, and what to type here."""

FOREIGN_COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "list": "penstock ps, for what runs; downloaded models are in ~/.cache/huggingface/hub",
        "ls": "penstock ps, for what runs; downloaded models are in ~/.cache/huggingface/hub",
        "show": "penstock plan MODEL",
        "stop": "Ctrl-C or SIGTERM, where `penstock serve` runs",
        "start": "penstock serve",
        "server": "penstock serve",
        "benchmark": "penstock bench",
        "quantize": "penstock compress",
        "help": "penstock --help",
        "version": "penstock --version",
    }
)
"""What other servers call a command, and what to type here."""

LATE_ARGUMENT = "late_argument"
"""A command's default of this name names its optional last argument, which may stand behind flags."""

_UNKNOWN = re.compile(r"argument COMMAND: invalid choice: '(?P<name>[^']*)'")


_FOREIGN_HELP = tuple(flag for flag in FOREIGN_FLAGS if re.fullmatch("-h[a-z]+", flag))


class CommandParser(argparse.ArgumentParser):
    """argparse's parser, whose errors are one line and say what was meant."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: object = None) -> argparse.Namespace:  # type: ignore[override]
        """As argparse's.  Arguments that are not known end the process with 2 and a hint."""
        given = sys.argv[1:] if args is None else list(args)
        hidden = [word for word in given if word in _FOREIGN_HELP]  # argparse would take -hf for -h
        found, unknown = self.parse_known_args([word for word in given if word not in hidden], argparse.Namespace())
        unknown = hidden + unknown
        late = getattr(found, LATE_ARGUMENT, None)
        if late is not None and getattr(found, late) is None and len(unknown) == 1 and unknown[0][:1] != "-":
            setattr(found, late, unknown.pop())  # argparse takes a second argument before flags only
        if unknown:
            command = getattr(found, "command", None)
            self._command_parser(command).error(unknown_arguments(unknown, self._flags_of(command)))
        return found

    def error(self, message: str) -> NoReturn:
        """Print the error and where help is, and exit with 2."""
        if match := _UNKNOWN.match(message):
            message = self._unknown_command(match["name"])
        sys.stderr.write(f"{self.prog}: error: {message}\nusage: {self.prog} --help\n")
        sys.exit(EXIT_USAGE)

    def _subparsers_by_name(self) -> dict[str, argparse.ArgumentParser]:
        actions = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return dict(actions[0].choices) if actions else {}

    def _command_parser(self, command: str | None) -> argparse.ArgumentParser:
        return self._subparsers_by_name().get(command or "", self)

    def _flags_of(self, command: str | None) -> list[str]:
        parser = self._command_parser(command)
        return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]

    def _unknown_command(self, name: str) -> str:
        names = list(self._subparsers_by_name())
        if hint := FOREIGN_COMMANDS.get(name):
            return f"there is no command {name!r} here; try: {hint}"
        near = difflib.get_close_matches(name, names, n=1)
        return f"there is no command {name!r}" + (f"; did you mean {near[0]}?" if near else "")


def unknown_arguments(unknown: Sequence[str], flags: Sequence[str]) -> str:
    """The complaint about arguments that a command does not have, with a hint for each flag that has one."""
    hints = []
    for word in unknown:
        name = word.partition("=")[0].replace("_", "-")
        if not name.startswith("-"):
            continue
        if name in flags:  # written with underscores
            hints.append(f"{word.partition('=')[0]}: did you mean {name}?")
        elif hint := FOREIGN_FLAGS.get(name):
            hints.append(f"{word.partition('=')[0]}: {hint}")
        elif near := difflib.get_close_matches(name, flags, n=1, cutoff=0.75):
            hints.append(f"{name}: did you mean {near[0]}?")
    head = f"unrecognized arguments: {' '.join(unknown)}"
    return "; ".join((head, *hints))
