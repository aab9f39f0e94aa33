"""Are manifests valid, does Helm render what the generator prints, and does what they start drain within its grace?

Scenes:

- ``kubernetes``: ``penstock manifests kubernetes`` of fleet files of all sorts, those of the documentation among them.
  Each document is checked strictly: by the schemas of Kubernetes, or the published ones of custom resources.  Then one
  of each kind gets a field that does not exist, which has to be found.
- ``helm``: what the chart renders of the same files.  Needs helm (``scripts/client-packages``).
- ``pods``: the commands of pods run in namespaces, as the kubelet runs them.  A decode pod with streams is deleted, and
  then the gateway with streams: preStop hook, SIGTERM, and SIGKILL when the grace period is over.
- ``systemd``: units of the same fleet files by systemd-analyze; then a node's unit gets SIGTERM under streams, first
  that without and then that with the gateway.
- ``compose``: the same, by the schema of Compose files, and with the commands and the user of containers.

Bars: no error, no difference, no stream that breaks off or differs, and everything ends by itself within its grace.

    python -m bench.manifests                                 # three minutes; pods and nodes: root or user namespaces
    python -m bench.manifests --only kubernetes --fleets 3
    python -m bench.manifests --json rows.json --plot docs/manifests.svg

What this machine lacks is named in the row that it is needed for.  Exits with 1 when a bar is missed or nothing was
measured.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import yaml
from bench.faults.result import NotHereError
from bench.scenes import Row, add_options, finish, plot_seconds, print_head, rows_to_plot, selected
from tests.clients.packages import need_helm
from tests.unit.deploy.rendered_fleets import (
    FLEETS,
    Documents,
    differing,
    documented_fleets,
    generated,
    rendered,
    written,
)
from tests.unit.deploy.schemas import compose_error, schema_error, unit_findings

from cluster.manifest_processes import (
    STREAMS,
    Drained,
    NodesOf,
    cluster,
    drain,
    place,
    services,
    started,
    units,
    wait_for,
    whole_answer,
)

PAGES = ("docs/fleet.md", "docs/simulator.md")
MISSPELT = "minReadySecond"


@dataclass(frozen=True)
class Part:
    """Of a scene."""

    what: str
    """The row that stands for it where it is not measured."""
    measure: Callable[[str, Path, int], Iterator[Row]]
    """By scene, a folder of its own, and how many fleet files; raises NotHereError."""


@dataclass
class Findings:
    """Of checks."""

    checked: int = 0
    wrong: int = 0
    first: str = ""
    """What was found first."""

    def add(self, finding: str) -> None:
        """Of one thing; empty: nothing."""
        self.checked += 1
        self.wrong += bool(finding)
        self.first = self.first or finding

    def row(self, scene: str, what: str, of: str) -> Row:
        """No finding is the bar."""
        return Row(
            scene, what, self.wrong, "", 0, "; ".join(filter(None, (f"of {self.checked} {of}".rstrip(), self.first)))
        )


# --- documents --------------------------------------------------------------------------------------------------------


def fleet_files(folder: Path, most: int) -> Iterator[tuple[str, Path]]:
    """With what each is."""
    texts = FLEETS | {f"{page}, {n}": text for page in PAGES for n, text in enumerate(documented_fleets(page))}
    for name, text in list(texts.items())[:most]:
        fleet = folder / "fleet.toml"
        fleet.write_text(text)
        yield name, fleet


def kubernetes(scene: str, folder: Path, most: int) -> Iterator[Row]:
    """What the cluster would get."""
    kinds, samples, schemas, refused, misspelt = Counter(), {}, Findings(), Findings(), Findings()
    for name, fleet in fleet_files(folder, most):
        documents = generated(fleet, folder)
        refused.add(f"{name}: refused" if isinstance(documents, str) else "")
        for document in documents.values() if not isinstance(documents, str) else ():
            kinds[document["kind"]] += 1
            samples.setdefault(document["kind"], document)
            schemas.add(schema_error(document))
    for document in copy.deepcopy(list(samples.values())):
        document.get("spec", document)[MISSPELT] = 1
        misspelt.add("" if schema_error(document) else document["kind"])
    for kind, count in kinds.most_common():
        yield Row(scene, kind, count, "", None, f"of {refused.checked} fleet files")
    yield refused.row(scene, "fleet files that are refused", "")
    yield schemas.row(scene, "schema errors, strict", "documents")
    yield misspelt.row(scene, "kinds in which a misspelt field is not found", "")


def chart(scene: str, folder: Path, most: int) -> Iterator[Row]:
    """What Helm makes of the same files."""
    try:
        need_helm()
    except (pytest.skip.Exception, pytest.fail.Exception) as missing:
        raise NotHereError(f"helm: {missing}") from None
    findings, fleets = Findings(), 0
    for name, fleet in fleet_files(folder, most):
        fleets += 1
        printed, by_helm = rendered(fleet, folder)
        if isinstance(printed, str) or isinstance(by_helm, str):
            findings.add(f"{name}: {printed if isinstance(printed, str) else by_helm}")
            continue
        for finding in differences(name, printed, by_helm):
            findings.add(finding)
    yield findings.row(scene, "documents that differ from the generator's", f"documents, {fleets} fleet files")


def differences(name: str, printed: Documents, by_helm: Documents) -> Iterator[str]:
    """Of each document; empty: none."""
    other = set(differing(printed, by_helm))
    for key in printed.keys() | by_helm.keys():
        yield f"{name}: {' '.join(key)}" if key in other else ""


def unit_files(scene: str, folder: Path, most: int) -> Iterator[Row]:
    """The units of all nodes."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        raise NotHereError("systemd-analyze")
    findings, count = Findings(), 0
    for name, fleet in fleet_files(folder, most):
        with tempfile.TemporaryDirectory() as out:
            code = written("systemd", fleet, Path(out), "--executable", "/bin/true", "--user", "root")
            count += len(list(Path(out).glob("*.service")))
            found = unit_findings(analyze, Path(out)) if code == 0 else "refused"
            findings.add(f"{name}: {found}" if found else "")
    yield findings.row(scene, "fleet files whose units have errors", f"with {count} units")


def compose_files(scene: str, folder: Path, most: int) -> Iterator[Row]:
    """With the services of all nodes."""
    findings = Findings()
    for name, fleet in fleet_files(folder, most):
        out = folder / "compose"
        if written("compose", fleet, out):
            findings.add(f"{name}: refused")
            continue
        error = compose_error(yaml.safe_load((out / "compose.yaml").read_text()))
        findings.add(f"{name}: {error}" if error else "")
    yield findings.row(scene, "schema errors", "files")


# --- ends under streams -----------------------------------------------------------------------------------------------


@cache
def wanted() -> str:
    """What every stream must say."""
    return whole_answer()


def drain_rows(scene: str, ended: Sequence[tuple[str, Drained]]) -> Iterator[Row]:
    """The seconds of each, and what all of them must not do."""
    for what, drained in ended:
        told = f"exit code {drained.code}"
        name = f"{what}, {len(drained.texts)} streams: ends after"
        yield Row(scene, name, drained.seconds, "s", drained.grace_s, told)
    texts = [text for _, drained in ended for text in drained.texts]
    broken = [text for text in texts if text != wanted()]
    told = "; ".join([f"of {len(texts)}", *(text[-120:] for text in broken[:1])])
    yield Row(scene, "streams that broke off or differ", len(broken), "", 0, told)
    codes = [drained.code for _, drained in ended if drained.code != 0]
    yield Row(scene, "exit codes other than 0", len(codes), "", 0, ", ".join(map(str, codes)))


def pods(scene: str, folder: Path, _: int) -> Iterator[Row]:
    """Four pods, of which two end."""
    with cluster(folder) as there:
        front = there.gateway.front()
        wait_for(lambda: len(front.workers()) == 1 + len(there.decode), "joined by all")
        ended = [("decode pod", drain(front, STREAMS, lambda: there.busy(front)))]
        ended.append(("gateway pod", drain(front, STREAMS, lambda: there.gateway)))
    yield from drain_rows(scene, ended)


def nodes(nodes_of: NodesOf, scene: str, folder: Path) -> Iterator[Row]:
    """Two nodes, of which b has no gateway."""
    with place(folder) as there:
        fleet = started(there, nodes_of)
        ended = [("node with a decode worker", fleet.drain("b"))]
        fleet.start_again("b")
        ended.append(("node with the gateway", fleet.drain("a")))
    yield from drain_rows(scene, ended)


SCENES: dict[str, tuple[Part, ...]] = {
    "kubernetes": (Part("schema errors, strict", kubernetes),),
    "helm": (Part("documents that differ from the generator's", chart),),
    "pods": (Part("pods that end under streams", pods),),
    "systemd": (
        Part("fleet files whose units have errors", unit_files),
        Part("units that end under streams", lambda scene, folder, _: nodes(units, scene, folder)),
    ),
    "compose": (
        Part("schema errors", compose_files),
        Part("containers that end under streams", lambda scene, folder, _: nodes(services, scene, folder)),
    ),
}


def measure(scene: str, most: int) -> Iterator[Row]:
    """Prints the rows, also those that this machine cannot measure."""
    for part in SCENES[scene]:
        try:
            with tempfile.TemporaryDirectory() as folder:
                for row in part.measure(scene, Path(folder), most):
                    print(row.line(), flush=True)
                    yield row
        except NotHereError as missing:
            print(f"| {scene} | {part.what} | NOT MEASURED | | needs {missing} |", flush=True)


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.manifests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, SCENES, plot_only=True)
    parser.add_argument("--fleets", type=int, default=1000, help="how many fleet files at most (default: all)")
    options = parser.parse_args()
    if (known := rows_to_plot(parser, options)) is not None:
        plot_seconds(known, options.plot)
        return 0
    names = selected(parser, options.only, SCENES)
    print_head()
    return finish((list(measure(name, options.fleets)) for name in names), options, SCENES)


if __name__ == "__main__":
    sys.exit(main())
