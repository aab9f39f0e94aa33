"""``penstock manifests``: documents with which Kubernetes, Helm, systemd or Compose run a fleet file."""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from penstock import __version__
from penstock.cli.parsing import COMMANDS
from penstock.config.base import expanded_path
from penstock.config.fleet_file import FleetFile, read_fleet_file
from penstock.deploy.compose import compose_document
from penstock.deploy.helm import helm_values
from penstock.deploy.kubernetes import kubernetes_documents, needed_secrets
from penstock.deploy.systemd import systemd_units
from penstock.deploy.workloads import fleet_workloads, resource_name
from penstock.errors import ConfigError

EPILOG = """\
examples:
  penstock manifests kubernetes fleet.toml --namespace models | kubectl apply -f -
  penstock manifests helm fleet.toml > values.yaml            helm install FLEET charts/penstock -f values.yaml
  penstock manifests systemd fleet.toml --out units/          one unit for each node: copy each to its host
  penstock manifests compose fleet.toml > compose.yaml        one service for each node, on this host

The fleet file is that of `penstock node` (docs/fleet.md).  Nothing is applied: this command prints text.
"""

LINE_CHARS = 120


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "manifests",
        help=COMMANDS["manifests"],
        description="Print what Kubernetes, Helm, systemd or Compose need to run a fleet file.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("kind", choices=("kubernetes", "helm", "systemd", "compose"), help="who runs the fleet")
    parser.add_argument("fleet", metavar="FLEET", help="the file")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write files there instead of printing")
    image = f"penstock:{__version__}"
    parser.add_argument("--image", default=image, help=f"of containers (default: {image}; docs/container.md)")
    parser.add_argument("--namespace", help="kubernetes, helm: of all resources (default: that of kubectl)")
    parser.add_argument(
        "--executable",
        default="/opt/penstock/bin/penstock",
        metavar="PATH",
        help="systemd: the program on the hosts (default: /opt/penstock/bin/penstock)",
    )
    parser.add_argument(
        "--fleet-path",
        default="/etc/penstock/fleet.toml",
        metavar="PATH",
        help="systemd: the fleet file on the hosts (default: /etc/penstock/fleet.toml)",
    )
    parser.add_argument("--user", default="penstock", help="systemd: who runs it (default: penstock)")


def run(args: argparse.Namespace) -> int:
    """0 with the documents on standard output, or with the paths of the files; raises ConfigError."""
    fleet = read_fleet_file(args.fleet)
    files = _files(args, fleet)
    if args.out is None:
        print("\n".join(_titled(files)), end="")
        return 0
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (args.out / name).write_text(text, encoding="utf-8")
            print(args.out / name)
    except OSError as error:
        raise ConfigError(f"cannot write to {args.out}: {error.strerror}") from None
    return 0


def _files(args: argparse.Namespace, fleet: FleetFile) -> dict[str, str]:
    """The text of each file by its name."""
    if not fleet.nodes:
        raise ConfigError(f"{args.fleet}: it has [[workers]] for the simulator and no [[nodes]] that could run")
    match args.kind:
        case "kubernetes":
            return {f"{resource_name(fleet.name, args.fleet)}.yaml": _kubernetes(args, fleet)}
        case "helm":
            return {"values.yaml": _helm(args, fleet)}
        case "systemd":
            return systemd_units(
                fleet, args.fleet, executable=args.executable, fleet_path=args.fleet_path, user=args.user
            )
        case _:
            document = compose_document(fleet, _raw(args), args.fleet, image=args.image)
            return {"compose.yaml": f"# Made by `penstock manifests compose`.\n{as_yaml([document])}"}


def _titled(files: dict[str, str]) -> Iterable[str]:
    """The texts, each of several below its name."""
    for name, text in files.items():
        yield text if len(files) == 1 else f"# {name}\n{text}"


def _raw(args: argparse.Namespace) -> dict[str, Any]:
    """The file as TOML was read, of which ``read_fleet_file`` has checked that it can be."""
    return tomllib.loads(expanded_path(args.fleet, "FLEET").read_text(encoding="utf-8"))


def _kubernetes(args: argparse.Namespace, fleet: FleetFile) -> str:
    workloads, options = fleet_workloads(fleet, args.fleet), fleet.kubernetes
    documents = kubernetes_documents(workloads, options, image=args.image, namespace=args.namespace)
    return f"{_title(args, fleet)}\n---\n{as_yaml(documents)}"


def _helm(args: argparse.Namespace, fleet: FleetFile) -> str:
    _kubernetes(args, fleet)  # raises ConfigError for what a pod cannot have, more plainly than the chart does
    return f"{_title(args, fleet)}\n{as_yaml([helm_values(_raw(args), image=args.image)])}"


def _title(args: argparse.Namespace, fleet: FleetFile) -> str:
    where = f"-n {args.namespace} " if args.namespace else ""
    lines = [f"# Made by `penstock manifests {args.kind}`.  Secrets that it needs:"]
    for _, words in needed_secrets(fleet_workloads(fleet, args.fleet), fleet.kubernetes, args.image):
        lines.append(f"#   kubectl {where}create secret {words}")
    return "\n".join(lines)


class _Dumper(yaml.SafeDumper):
    """YAML 1.1 as ``kubectl`` reads it, with texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        """References to what stood before are hard to read."""
        return True


_NUMBER_OF_GO = re.compile(r"[-+]?(0[obx][0-9a-f_]+|[0-9.]+e[-+]?[0-9]+)", re.IGNORECASE)
"""Text that readers of YAML in Go take for a number, and PyYAML does not."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if _NUMBER_OF_GO.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def as_yaml(documents: Iterable[Any]) -> str:
    """Documents as text, keys in their order."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=LINE_CHARS)
