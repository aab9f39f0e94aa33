"""``penstock worker``: one worker for gateways on other hosts; declares its flags and hands them to the launcher."""

from __future__ import annotations

import argparse

from penstock.cli.parsing import COMMANDS
from penstock.config.dump import dump_toml
from penstock.config.load import load_worker

EPILOG = """\
example:
  penstock worker MODEL --role prefill --listen tcp://10.0.0.1:9000 --keys ~/penstock-keys      on one host
  penstock worker MODEL --role decode --listen tcp://10.0.0.2:9000 --keys ~/penstock-keys       on another
  penstock serve MODEL --join tcp://10.0.0.1:9000 --join tcp://10.0.0.2:9000 --keys ~/penstock-keys

Every host needs the same keys (`penstock host-keys DIR`, copied) and the same model.  Everything between hosts is
encrypted and authenticated with them; a worker without keys does not start.  KV pages travel from prefill to decode
directly, so the decode worker must reach the prefill worker at the address that was joined.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "worker",
        help=COMMANDS["worker"],
        description="Run one worker for gateways on other hosts (penstock serve --join).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a folder, a .gguf file or org/name; none: the storyteller"
    )
    parser.add_argument("--role", metavar="prefill|decode|both|encode", help="what gateways send to it (default: both)")
    parser.add_argument("--listen", metavar="tcp://HOST:PORT", help="default: tcp://127.0.0.1:9000")
    parser.add_argument("--keys", metavar="DIR", help="the deployment's keys (`penstock host-keys DIR`); needed")
    parser.add_argument(
        "--transfer",
        metavar="auto|tcp|tcp-clear|curve|nixl",
        help="how KV pages travel (default: auto, tcp: sockets, encrypted off the loopback; docs/kv-transfer.md)",
    )
    parser.add_argument(
        "--mixed-with",
        metavar="CLASS",
        help="numerics class of the workers of the other role, if it is another (docs/gpu.md, Mixed fleets)",
    )
    parser.add_argument("--pages-port", metavar="PORT", help="where other workers fetch pages (default: any free one)")
    parser.add_argument("--name", metavar="ID", help="its id in the fleet (default: role, host and port)")
    add_config_flags(parser)
    parser.add_argument("--log-json", action="store_true", help="log one JSON object a line")
    add_engine_flags(parser.add_argument_group("engine"))


NO_SETTINGS = ("run", "command", "config", "print_config")
"""Of what is parsed, whatever is no setting."""


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Where settings come from, and how they are shown."""
    parser.add_argument("--config", metavar="FILE", help="settings as TOML")
    parser.add_argument(
        "--print-config", action="store_true", help="print the settings that are in force as such a file, and end"
    )


def add_engine_flags(group: argparse._ArgumentGroup) -> None:
    """Flags that ``serve`` has, too."""
    group.add_argument("--threads", metavar="N", help="own kernel threads of each worker (default: cores / workers)")
    group.add_argument("--device", metavar="auto|cpu|cuda", help="default: auto, a GPU if one suits the model")
    group.add_argument(
        "--gpu-lanes", metavar="off", help="removed; ignored with a line in the log (docs/gpu.md, Prompts and answers)"
    )
    group.add_argument("--max-model-len", metavar="T", help="longest prompt and answer together (default: the model's)")
    group.add_argument("--kv-memory", metavar="SIZE", help="KV pages of each worker, as 512MiB or 2GB")
    add_store_flags(group)
    group.add_argument("--image-cache", metavar="SIZE", help="encoded images kept in each worker (default 256MiB)")
    group.add_argument("--dtype", metavar="auto|bf16|fp32", help="type of matrix products (default: auto, as stored)")
    group.add_argument(
        "--kv-dtype",
        metavar="auto|fp8_e4m3",
        help="what KV pages are in (default: auto, as --dtype). fp8_e4m3: half the bytes, OTHER ANSWERS, GPUs only",
    )
    group.add_argument(
        "--kernels",
        metavar="FAMILY",
        help="avx512_bf16, amx_bf16, avx512, avx2, portable or reference; on a GPU triton or reference",
    )
    group.add_argument("--max-chunk-tokens", metavar="T", help="prompt tokens of one request in one step")
    group.add_argument(
        "--weights-cache", metavar="DIR|off", help="remember hashes of weights here (default: in the user's cache)"
    )
    group.add_argument(
        "--accept-new-weights", action="store_true", help="serve weights that differ from those of the last start"
    )
    group.add_argument("--max-running", metavar="N", help="requests in one step (default: 256)")
    group.add_argument(
        "--speculate",
        metavar="off|auto|lookup|head|draft",
        help="guess tokens ahead; the same answers (default: off). auto: by the model's own head, else by lookup",
    )
    group.add_argument("--draft-model", metavar="DIR", help="the head or the small model that guesses")
    add_sparse_flags(group)
    group.add_argument("--max-loras", metavar="N", help="LoRA adapters in memory at once (default: 16)")
    group.add_argument("--lora-memory", metavar="SIZE", help="what they may take in each worker (default: 1GiB)")
    group.add_argument("--max-lora-rank", metavar="R", help="default: 256")
    group.add_argument("--max-draft-tokens", metavar="N", help="guessed for one request in one step (default: 8)")


def add_sparse_flags(group: argparse._ArgumentGroup) -> None:
    """How much of a long context each token reads."""
    group.add_argument(
        "--sparse-attention",
        action="store_true",
        help="in long contexts attend to only part of it: faster, but the OUTPUT DIFFERS (default: no)",
    )
    group.add_argument("--sparse-sinks", metavar="T", help="first tokens that are always read (default: 64)")
    group.add_argument("--sparse-window", metavar="T", help="last tokens that are always read (default: 1024)")
    group.add_argument("--sparse-blocks", metavar="N", help="blocks of 64 tokens that each token chooses (default: 32)")
    group.add_argument("--sparse-from", metavar="T", help="positions before it read everything (default: 4096)")


def add_store_flags(group: argparse._ArgumentGroup) -> None:
    """Where KV pages stand beside the workers' own memory."""
    group.add_argument(
        "--kv-peers",
        action=argparse.BooleanOptionalAction,
        help="workers of this host take KV pages out of each other's caches (default: yes)",
    )
    group.add_argument("--kv-host", metavar="SIZE", help="more KV pages in memory that all workers here share")
    group.add_argument(
        "--kv-disk", metavar="DIR", help="keep KV pages here, also for the next start (docs/kv-store.md)"
    )
    group.add_argument("--kv-disk-size", metavar="SIZE", help="what they may take (default: 8GiB)")
    group.add_argument("--kv-redis", metavar="URL", help="keep KV pages in a Redis, as redis://HOST:6379/0")
    group.add_argument(
        "--kv-mooncake", metavar="HOST:PORT", help="keep KV pages in the Mooncake store whose master listens there"
    )
    group.add_argument(
        "--kv-mooncake-size", metavar="SIZE", help="memory that each worker gives to that store (default: none)"
    )
    group.add_argument("--kv-key", metavar="FILE", help="encrypt KV pages on disk and in remote tiers with this key")


def run(args: argparse.Namespace) -> int:
    """Work until told to stop.  0 after an orderly end; raises ConfigError, ModelError, KernelError, GaveUp."""
    flags = {key: value for key, value in vars(args).items() if key not in NO_SETTINGS}
    config = load_worker(flags, config_file=getattr(args, "config", None))
    if getattr(args, "print_config", False):
        print(dump_toml(config, "penstock worker"), end="")
        return 0
    from penstock.launch.compose import serve_worker

    return serve_worker(config)
