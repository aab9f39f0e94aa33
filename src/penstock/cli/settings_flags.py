"""Flags that ``serve`` and ``worker`` share, as one table, and what both do with all their flags.

A flag's value is text: ``config.load`` parses and checks it like a value from the environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any, NamedTuple


class Kind(Enum):
    """How often a flag may occur, and whether it has a value."""

    VALUE = auto()
    LIST = auto()  # a value each time
    ON = auto()  # no value
    ON_OFF = auto()  # --flag or --no-flag


class Flag(NamedTuple):
    """One flag of a setting."""

    name: str
    metavar: str
    help: str
    kind: Kind = Kind.VALUE


ENGINE_FLAGS = (
    Flag("threads", "N", "kernel threads of each worker (default: cores / workers)"),
    Flag("parallel", "PLAN", "ranks that divide the model in each worker: tp2, pp2, tp2,pp2, auto (docs/parallel.md)"),
    Flag("tensor-parallel-size", "N", "the same as --parallel tpN"),
    Flag("pipeline-parallel-size", "N", "the same as --parallel ppN"),
    Flag("device", "auto|cpu|cuda", "default: auto, a GPU if one suits the model"),
    Flag("gpu-lanes", "off", "removed; ignored with a line in the log (docs/gpu.md, Prompts and answers)"),
    Flag("max-model-len", "T", "longest prompt and output together (default: the model's)"),
    Flag("kv-memory", "SIZE", "KV pages of each worker, as 512MiB or 2GB"),
    Flag("kv-peers", "", "workers of this host read KV pages from each other's caches (default: yes)", Kind.ON_OFF),
    Flag("kv-host", "SIZE", "more KV pages, in memory that all workers here share"),
    Flag("kv-disk", "DIR", "keep KV pages here, also for the next start (docs/kv-store.md)"),
    Flag("kv-disk-size", "SIZE", "the most disk space that they take (default: 8GiB)"),
    Flag("kv-redis", "URL", "keep KV pages in a Redis, as redis://HOST:6379/0"),
    Flag("kv-mooncake", "HOST:PORT", "keep KV pages in the Mooncake store whose master listens there"),
    Flag("kv-mooncake-size", "SIZE", "memory that each worker gives to that store (default: none)"),
    Flag("kv-key", "FILE", "encrypt KV pages on disk and in remote tiers with this key"),
    Flag("image-cache", "SIZE", "encoded images kept in each worker (default: 256MiB)"),
    Flag(
        "decoded-weights",
        "auto|SIZE",
        "decoded copies of compressed weights, for steps of many rows (default: auto, all that gain by it or none)",
    ),
    Flag("dtype", "auto|bf16|fp32", "type of matrix products (default: auto, as stored)"),
    Flag(
        "kv-dtype",
        "auto|fp8_e4m3",
        "type of KV pages (default: auto, as --dtype). fp8_e4m3: half the bytes, but the OUTPUT DIFFERS; GPUs only",
    ),
    Flag(
        "activation-dtype",
        "auto|int8",
        "inputs of quantized weights (default: auto, as --dtype). int8: faster, but the OUTPUT DIFFERS; CPUs only",
    ),
    Flag(
        "kernels",
        "FAMILY",
        "avx512_bf16, amx_bf16, avx512, avx2, portable or reference; on a GPU triton or reference",
    ),
    Flag("max-chunk-tokens", "T", "prompt tokens of one request in one step"),
    Flag("weights-cache", "DIR|off", "remember hashes of weights here (default: in the user's cache)"),
    Flag("accept-new-weights", "", "serve weights that differ from those of the last start", Kind.ON),
    Flag("max-running", "N", "requests in one step (default: 256)"),
    Flag(
        "speculate",
        "off|auto|lookup|head|draft",
        "speculative decoding; the output is the same (default: off). auto: the model's own draft head, else lookup",
    ),
    Flag("draft-model", "DIR", "the draft head or draft model"),
    Flag(
        "sparse-attention",
        "",
        "in long contexts attend to only part of it: faster, but the OUTPUT DIFFERS (default: no)",
        Kind.ON,
    ),
    Flag("sparse-sinks", "T", "first tokens that are always attended to (default: 64)"),
    Flag("sparse-window", "T", "last tokens that are always attended to (default: 1024)"),
    Flag("sparse-blocks", "N", "blocks of 64 tokens that each token chooses (default: 32)"),
    Flag("sparse-from", "T", "positions before it attend to everything (default: 4096)"),
    Flag("max-loras", "N", "LoRA adapters in memory at once (default: 16)"),
    Flag("lora-memory", "SIZE", "memory of LoRA adapters in each worker (default: 1GiB)"),
    Flag("max-lora-rank", "R", "default: 256"),
    Flag("max-draft-tokens", "N", "draft tokens of one request in one step (default: 8)"),
)

_NO_SETTINGS = frozenset({"run", "command", "config", "print_config"})


def add_flags(group: argparse._ActionsContainer, flags: Iterable[Flag]) -> None:
    """Declare the flags."""
    for flag in flags:
        options: dict[str, Any] = {"help": flag.help}
        match flag.kind:
            case Kind.ON:
                options["action"] = "store_true"
            case Kind.ON_OFF:
                options["action"] = argparse.BooleanOptionalAction
            case Kind.LIST:
                options |= {"metavar": flag.metavar, "action": "append"}
            case Kind.VALUE:
                options["metavar"] = flag.metavar
        group.add_argument(f"--{flag.name}", **options)


def add_model_and_config(parser: argparse.ArgumentParser) -> None:
    """Declare MODEL, the configuration file, and the flag that prints one."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a folder, a .gguf file or org/name; none: the storyteller"
    )
    add_config(parser)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Declare the configuration file, and the flag that prints one."""
    add_flags(parser, (Flag("config", "FILE", "settings as TOML"),))
    parser.add_argument(
        "--print-config", action="store_true", help="print the settings in force as such a file, and end"
    )


def settings_of(args: argparse.Namespace) -> dict[str, object]:
    """The settings among parsed arguments: those that were given."""
    return {key: value for key, value in vars(args).items() if key not in _NO_SETTINGS}
