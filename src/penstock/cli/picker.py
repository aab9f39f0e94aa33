"""``penstock picker``: declares its flags and hands them to the launcher."""

from __future__ import annotations

import argparse

from penstock.cli.parsing import COMMANDS
from penstock.cli.settings_flags import Flag, Kind, add_config, add_flags, settings_of
from penstock.config.load import dump_toml, load_picker
from penstock.errors import ConfigError
from penstock.launch.members.registry import KINDS_TEXT

EPILOG = """\
examples:
  penstock picker --members file:gateways.json                   gateways of a list; Envoy on this host asks it
  penstock picker --members dns:fleet-gateways:8000 --listen tcp://0.0.0.0:9002 --tls-cert C.pem --tls-key K.pem

It answers Envoy's external processing filter (ext_proc): the same Idempotency-Key, or the same session of a client,
goes to the same gateway as long as that can serve.  Members are gateways at their HTTP ports; the kinds are those of
`penstock serve --members`.  examples/envoy.yaml is an Envoy that asks it, and docs/fleet.md has an InferencePool.
"""

PICKER_FLAGS = (
    Flag("members", "KIND:WHERE", f"where to learn of gateways: {KINDS_TEXT}; required"),
    Flag("listen", "tcp://HOST:PORT", "for proxies (default: tcp://127.0.0.1:9002)"),
    Flag("tls-cert", "FILE", "show proxies this certificate (PEM, with its chain)"),
    Flag("tls-key", "FILE", "its private key (PEM); both are read again when they change"),
    Flag("plaintext", "", "listen in clear off the loopback, where a mesh encrypts", Kind.ON),
    Flag("health-port", "PORT", "of grpc.health.v1 in clear, for probes (default: 9003)"),
    Flag("metrics-port", "PORT", "of /metrics (default: 9090)"),
    Flag("https-gateways", "", "gateways speak HTTPS; their certificates are not verified", Kind.ON),
    Flag("log-json", "", "log one JSON object per line", Kind.ON),
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "picker",
        help=COMMANDS["picker"],
        description="Choose the gateway of each request for a proxy (an endpoint picker of an InferencePool).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=run)
    add_config(parser)
    add_flags(parser, PICKER_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Run the picker until stopped.  0 after an orderly end; raises ConfigError."""
    config = load_picker(settings_of(args), config_file=getattr(args, "config", None))
    if getattr(args, "print_config", False):
        print(dump_toml(config, "penstock picker"), end="")
        return 0
    try:
        from penstock.launch.picker.server import run_picker
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("envoy", "google", "grpc", "grpc_health"):
            raise
        raise ConfigError(f"{error.name} is not installed: pip install 'penstock[picker]'") from None
    return run_picker(config)
