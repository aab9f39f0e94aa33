"""``penstock worker``: one worker for gateways on other hosts; declares its flags and hands them to the launcher."""

from __future__ import annotations

import argparse

from penstock.cli.parsing import COMMANDS
from penstock.cli.settings_flags import ENGINE_FLAGS, Flag, Kind, add_flags, add_model_and_config, settings_of
from penstock.config.load import dump_toml, load_worker

EPILOG = """\
example:
  penstock worker MODEL --role prefill --listen tcp://10.0.0.1:9000 --keys ~/penstock-keys      on one host
  penstock worker MODEL --role decode --listen tcp://10.0.0.2:9000 --keys ~/penstock-keys       on another
  penstock serve MODEL --join tcp://10.0.0.1:9000 --join tcp://10.0.0.2:9000 --keys ~/penstock-keys

one model over two hosts (docs/parallel.md):
  penstock worker MODEL --parallel pp2 --nnodes 2 --master-addr tcp://10.0.0.1:9100 --listen tcp://10.0.0.1:9000 \
      --keys ~/penstock-keys                                                                 on one, which is joined
  penstock worker MODEL --parallel pp2 --nnodes 2 --master-addr tcp://10.0.0.1:9100 --node-rank 1 \
      --keys ~/penstock-keys                                                                 on the other
  penstock serve MODEL --join tcp://10.0.0.1:9000 --keys ~/penstock-keys

Every host needs keys (`penstock host-keys --help`) and the same model.  Everything between hosts is
encrypted and authenticated with them; a worker without keys does not start.  KV pages travel from prefill to decode
directly, so the decode worker must reach the prefill worker at the address that was joined.
"""


WORKER_FLAGS = (
    Flag("role", "prefill|decode|both|encode", "the requests that gateways send to it (default: both)"),
    Flag("listen", "tcp://HOST:PORT", "default: tcp://127.0.0.1:9000"),
    Flag("keys", "DIR", "keys that all hosts share, or this node's (`penstock host-keys`); required"),
    Flag(
        "transfer",
        "auto|tcp|tcp-clear|curve|nixl",
        "how KV pages are transferred (default: auto, tcp: sockets, encrypted off the loopback; docs/kv-transfer.md)",
    ),
    Flag(
        "mixed-with",
        "CLASS",
        "numerics class of the workers of the other role, if it is another (docs/gpu.md, Mixed fleets)",
    ),
    Flag("pages-port", "PORT", "where other workers fetch pages (default: any free one)"),
    Flag("nnodes", "N", "machines that the stages of --parallel are on (default: 1; docs/parallel.md)"),
    Flag("node-rank", "R", "which of them this is, from 0; gateways join the worker at 0 (default: 0)"),
    Flag("master-addr", "tcp://HOST:PORT", "where machine 0 listens for the others"),
    Flag("name", "ID", "its id in the fleet (default: role, host and port; with keys of a node: node, role and port)"),
    Flag("audit-log", "FILE", "append messages and connections that keys do not allow, as JSON (docs/security.md)"),
    Flag("log-json", "", "log one JSON object per line", Kind.ON),
)


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
    add_model_and_config(parser)
    add_flags(parser, WORKER_FLAGS)
    add_flags(parser.add_argument_group("engine"), ENGINE_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Run the worker until stopped.  0 after an orderly end.

    Raises ConfigError, ModelError, KernelError, RestartLimitReached.
    """
    config = load_worker(settings_of(args), config_file=getattr(args, "config", None))
    if getattr(args, "print_config", False):
        print(dump_toml(config, "penstock worker"), end="")
        return 0
    from penstock.launch.compose import serve_worker

    return serve_worker(config)
