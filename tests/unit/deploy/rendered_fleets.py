"""Fleet files of all sorts, and what the Helm chart and ``penstock manifests kubernetes`` make of them."""

from __future__ import annotations

import os
import subprocess
import tomllib
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from tests.clients.packages import need_helm
from tests.unit.deploy.schemas import FLEET, GROUP_FLEET, HERE, POOL

from penstock.cli.main import main
from penstock.cli.manifests import as_yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts/penstock"
IMAGE = "registry.example:5000/penstock:1"
Documents = dict[tuple[str, str], dict[str, Any]]


def helm(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Without a cluster, and with nothing of the user's."""
    home = {f"HELM_{kind}_HOME": str(folder / kind) for kind in ("CONFIG", "CACHE", "DATA")}
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "KUBECONFIG": "/dev/null"} | home
    return subprocess.run([need_helm(), *words], env=environ, capture_output=True, text=True, timeout=60, check=False)


def by_kind_and_name(text: str) -> Documents:
    found: Documents = {}
    for document in yaml.safe_load_all(text):
        if document is not None:
            key = (document["kind"], document["metadata"]["name"])
            assert key not in found
            found[key] = document
    return found


def generated(fleet: Path, folder: Path, image: str = IMAGE) -> Documents | str:
    """What ``penstock manifests kubernetes`` makes of a fleet file."""
    out = folder / "out"
    for old in out.glob("*.yaml"):
        old.unlink()
    if written("kubernetes", fleet, out, "--image", image, "--namespace", "models"):
        return "refused"
    (file,) = out.glob("*.yaml")
    return by_kind_and_name(file.read_text())


def written(kind: str, fleet: Path, out: Path, *words: str) -> int:
    """The exit code of ``penstock manifests``, whose files are in this folder then."""
    with redirect_stdout(StringIO()):  # their paths
        return main(["manifests", kind, str(fleet), "--out", str(out), *words])


def rendered(fleet: Path, folder: Path, image: str = IMAGE) -> tuple[Documents | str, Documents | str]:
    """What the generator and the chart make of a fleet file; text: of the error."""
    values = folder / "values.yaml"
    raw = tomllib.loads(fleet.read_text())
    repository, _, tag = image.rpartition(":")
    values.write_text(as_yaml([raw | {"image": {"repository": repository, "tag": tag}}]))
    run = helm("template", "any", CHART, "-f", values, "--namespace", "models", folder=folder)
    chart = by_kind_and_name(run.stdout) if run.returncode == 0 else run.stderr
    return generated(fleet, folder, image), chart


def differing(generated: Documents, chart: Documents) -> list[tuple[str, str]]:
    """The documents that both do not have alike."""
    return [key for key in sorted(generated.keys() | chart.keys()) if generated.get(key) != chart.get(key)]


ROUTE = (
    '[kubernetes]\nhttp_gateway = "edge/public"\nhostnames = ["llm.example.org", "10.0.0.1"]\nmodels_claim = "models"'
)
WRITTEN = """max_model_len = 8192
tls_cert = "/a.pem"
tls_key = "/a.key"
kv_key = "/kv.key"
kv_disk = "/kv/"
audit_log = "/log/audit"
trace_file = "/tmp/trace"
response_store = "/var/responses"
served_model_name = "<a> & \\"b\\" é"
log-json = true
kv_memory = "1GiB"
"""
OTHER_SETTINGS = (
    'address = "10.0.0.2"\nsettings = { kv_memory = 1073741824, scheduling = { interactive_tpot_ms = 0.25 } }'
)
AUTOSCALED_GROUPS = GROUP_FLEET.replace("prefill = { max = 6", "both = { min = 2, max = 6")
TWO_NODES = (HERE / "groups.toml").read_text()
"""Of which one group is on both."""
LAST_NODE = 'workers = [{ role = "decode", count = 2, group = "tp2" }]\n'
BOTH_KINDS = """workers = [{ role = "decode", count = 2, group = "tp2" }]

[[groups]]
nodes = ["b", "a"]
group = "pp2"

[[groups]]
nodes = ["a", "b"]
group = "tp2,pp3"
count = 3
role = "both"
"""
OF_PAIRS = "\n[[groups]]\nnodes = ['b', 'a']\ngroup = 'pp2, tp2'\n"
OWN_STAGES = 'workers = [{ count = 1, group = "tp2,pp2" }]\n'
FLEETS = {
    "two nodes": FLEET.read_text(),
    "groups over pods": GROUP_FLEET,
    "groups over pods that are scaled": AUTOSCALED_GROUPS,
    "one group over pods": GROUP_FLEET.replace('"both", count = 2', '"both", count = 1'),
    "a group over two nodes": TWO_NODES,
    "groups over nodes with several stages each": TWO_NODES.replace("tp2,pp2", "tp2,pp5"),
    "groups over nodes with unequal parts": TWO_NODES.replace("tp2,pp2", "pp3"),
    "groups over nodes that are scaled": TWO_NODES.replace(
        "[kubernetes]", '[kubernetes]\nprometheus = "http://p"\nautoscale = { both = { max = 3 } }'
    ),
    "groups over nodes of one kind": TWO_NODES + OF_PAIRS,
    "groups over nodes and over stages": TWO_NODES.replace(
        'address = "10.0.0.2"\n', 'address = "10.0.0.2"\n' + OWN_STAGES
    ),
    "groups over nodes of several kinds": FLEET.read_text().replace(LAST_NODE, BOTH_KINDS),
    "a picker": FLEET.read_text().replace("[kubernetes]", POOL),
    "a picker with defaults": FLEET.read_text().replace("[kubernetes]", f"{ROUTE}\npicker = {{}}"),
    "a picker without TLS": FLEET.read_text().replace(
        "[kubernetes]", f'{ROUTE}\npicker = {{ tls = false, replicas = 1, cpu = "500m", memory = "1Gi" }}'
    ),
    "https, files that are written": FLEET.read_text().replace("max_model_len = 8192", WRITTEN),
    "a route": FLEET.read_text().replace("[kubernetes]", ROUTE),
    "a route of the same namespace": FLEET.read_text().replace("[kubernetes]", '[kubernetes]\nhttp_gateway = "edge"'),
    "a key of clients": FLEET.read_text().replace('api_keys = "/etc/penstock/api-keys.json"', 'api_key = "sesame"'),
    "the bundled model": FLEET.read_text().replace('model = "/models/llama"', ""),
    "a model of the Hub": FLEET.read_text().replace("/models/llama", "org/name"),
    "adapters and a draft model": FLEET.read_text().replace(
        "max_model_len = 8192", 'draft_model = "/models/small"\nlora = ["a=/models/a", "b=/models/llama/b/"]'
    ),
    "models elsewhere": FLEET.read_text().replace("[kubernetes]", '[kubernetes]\nmodels_path = "/m"'),
    "kinds that differ in settings": FLEET.read_text().replace('address = "10.0.0.2"', OTHER_SETTINGS),
    "kinds without groups": FLEET.read_text()
    .replace('address = "10.0.0.2"', OTHER_SETTINGS)
    .replace('group = "tp2"', 'profile = ""'),
    "resources": FLEET.read_text().replace(
        'cpu = "8", memory = "32Gi" }',
        'cpu = "7500m", gpus = 2 }, gateway = { cpu = "3" }, decode = { memory = "1Gi", cpu = "1" }',
    ),
    "long drains": FLEET.read_text().replace("drain_s = 60.0 }", "drain_s = 300.5 }\nfailover = { no_path_s = 95.0 }"),
    "short drains": FLEET.read_text().replace("drain_s = 60.0", "drain_s = 2.0"),
    "a strange name": FLEET.read_text().replace("two hosts", "--A fleet, whose name is Long, and has ÄÖÜ & more --"),
    "a name that is a word of YAML": FLEET.read_text().replace("two hosts", "on"),
}


def documented_fleets(page: str) -> list[str]:
    """The fleet files on this page of the documentation."""
    blocks = (block.partition("\n```")[0] for block in (ROOT / page).read_text().split("```toml\n")[1:])
    return [text for text in blocks if "[[nodes]]" in text]
