"""``penstock manifests``: documents with which Kubernetes, systemd or Compose run a fleet file."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from penstock import __version__
from penstock.cli.parsing import COMMANDS
from penstock.config.fleet_file import FleetFile, read_fleet_file
from penstock.deploy.compose import compose_document
from penstock.deploy.kubernetes import kubernetes_documents, needed_secrets
from penstock.deploy.systemd import systemd_units
from penstock.deploy.workloads import fleet_workloads, resource_name
from penstock.errors import ConfigError

EPILOG = """\
examples:
  penstock manifests kubernetes fleet.toml --namespace models | kubectl apply -f -
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
        description="Print what Kubernetes, systemd or Compose need to run a fleet file.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("kind", choices=("kubernetes", "systemd", "compose"), help="who runs the fleet")
    parser.add_argument("fleet", metavar="FLEET", help="the file")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write files there instead of printing")
    image = f"penstock:{__version__}"
    parser.add_argument("--image", default=image, help=f"of containers (default: {image}; docs/container.md)")
    parser.add_argument("--namespace", help="kubernetes: of all resources (default: that of kubectl)")
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
        case "systemd":
            return systemd_units(
                fleet, args.fleet, executable=args.executable, fleet_path=args.fleet_path, user=args.user
            )
        case _:
            raw = tomllib.loads(Path(args.fleet).expanduser().read_text(encoding="utf-8"))
            document = compose_document(fleet, raw, args.fleet, image=args.image)
            return {"compose.yaml": f"# Made by `penstock manifests compose`.\n{as_yaml([document])}"}


def _titled(files: dict[str, str]) -> Iterable[str]:
    """The texts, each of several below its name."""
    for name, text in files.items():
        yield text if len(files) == 1 else f"# {name}\n{text}"


def _kubernetes(args: argparse.Namespace, fleet: FleetFile) -> str:
    workloads, options = fleet_workloads(fleet, args.fleet), fleet.kubernetes
    documents = kubernetes_documents(workloads, options, image=args.image, namespace=args.namespace)
    where = f"-n {args.namespace} " if args.namespace else ""
    lines = ["# Made by `penstock manifests kubernetes`.  Secrets that it needs:"]
    for _, words in needed_secrets(workloads, options, args.image):
        lines.append(f"#   kubectl {where}create secret {words}")
    return "\n".join(lines) + f"\n---\n{as_yaml(documents)}"


class _Dumper(yaml.SafeDumper):
    """YAML 1.1 as ``kubectl`` reads it, with texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        """References to what stood before are hard to read."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def as_yaml(documents: Iterable[Any]) -> str:
    """Documents as text, keys in their order."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=LINE_CHARS)
