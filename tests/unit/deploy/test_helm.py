"""The Helm chart: what of it follows from the package, and, where helm is installed, that it renders what
``penstock manifests kubernetes`` prints, for any fleet file.

``scripts/client-packages`` installs helm and kubectl; the tests that need them are long ones.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import tomli_w
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.certificates import write_certificate
from tests.clients.packages import need_helm, need_kubectl
from tests.unit.deploy.rendered_fleets import (
    CHART,
    FLEETS,
    IMAGE,
    LAST_NODE,
    Documents,
    by_kind_and_name,
    differing,
    documented_fleets,
    helm,
    rendered,
)
from tests.unit.deploy.schemas import FLEET, KUBERNETES, TLS_SETTINGS

import penstock
from penstock.cli.main import main
from penstock.cli.manifests import as_yaml
from penstock.deploy.helm import chart_files
from penstock.deploy.settings_file import number_text, settings_text

# --- what follows from the package ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(chart_files()))
def test_the_chart_has_what_follows_from_the_package(name: str) -> None:
    assert (CHART / name).read_text() == chart_files()[name], "scripts/helm-chart writes it"


def test_the_chart_is_of_the_packages_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert {chart["version"], chart["appVersion"]} == {penstock.__version__}


def values_of(capsys: pytest.CaptureFixture[str], fleet: Path, image: str = IMAGE) -> dict[str, Any]:
    assert main(["manifests", "helm", str(fleet), "--image", image]) == 0
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        (IMAGE, ("registry.example:5000/penstock", "1")),
        ("registry.example:5000/penstock", ("registry.example:5000/penstock", "latest")),
        ("penstock", ("penstock", "latest")),
    ],
)
def test_the_values_are_the_fleet_file_and_an_image(
    image: str, parts: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    values = values_of(capsys, FLEET, image)
    assert values.pop("image") == {"repository": parts[0], "tag": parts[1]}
    assert values == tomllib.loads(FLEET.read_text())


def test_no_key_of_clients_is_among_the_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = tmp_path / "fleet.toml"
    text = FLEET.read_text().replace('api_keys = "/etc/penstock/api-keys.json"', 'api-key = "sesame"')
    fleet.write_text(text.replace("max_model_len", 'api_key = "open now"\nmax_model_len'))
    values = values_of(capsys, fleet)
    assert "sesame" not in str(values)
    assert "open now" not in str(values)


def check(values: dict[str, Any]) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(defaults | values, schema, cls=jsonschema.Draft202012Validator)


def test_values_fit_their_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check({})
    check(values_of(capsys, FLEET))
    check({"settings": {"kv-memory": "1.5GiB", "kv_host": 1 << 30, "lora": "a=/a,b=/b", "log-json": True}})
    check({"groups": [{"nodes": ["a", "b"], "group": "tp2,pp2"}], "kubernetes": {"picker": {}}})
    check({"settings": {"supervise": {"drain_s": 5}, "allowed_origin": ["https://example.org"]}})


WRONG_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"settings": {"max_modl_len": 1}}, "max_modl_len"),
    ({"settings": {"max_model_len": "long"}}, "max_model_len"),
    ({"settings": {"kv_memory": "1 GB of it"}}, "kv_memory"),
    ({"settings": {"supervise": {"drain": 1}}}, "drain"),
    ({"settings": {"join": "tcp://10.0.0.1:9000"}}, "join"),
    ({"replicaCount": 3}, "replicaCount"),
    ({"kubernetes": {"resources": {"decoder": {"cpu": "1"}}}}, "decoder"),
    ({"kubernetes": {"resources": {"decode": {"cpu": "eight"}}}}, "cpu"),
    ({"kubernetes": {"autoscale": {"decode": {"min": 1}}}}, "max"),
    ({"nodes": [{"name": "a", "address": "a", "workers": [{"role": "deocde", "count": 1}]}]}, "role"),
    ({"nodes": [{"name": "a", "address": "a", "workers": [{"group": "tp3", "count": 1}]}]}, "group"),
    ({"nodes": [{"name": "a", "address": "a", "workers": [{"count": 0}]}]}, "count"),
    ({"groups": [{"nodes": ["a"], "group": "pp2"}]}, "nodes"),
    ({"groups": [{"nodes": ["a", "b"], "group": "pp"}]}, "group"),
    ({"groups": [{"nodes": ["a", "b"], "gruop": "pp2"}]}, "gruop"),
    ({"kubernetes": {"picker": {"replicas": 0}}}, "replicas"),
    ({"kubernetes": {"picker": {"failure_mode": "open"}}}, "failure_mode"),
]


@pytest.mark.parametrize(("values", "where"), WRONG_VALUES)
def test_a_wrong_value_does_not_fit(values: dict[str, Any], where: str) -> None:
    with pytest.raises(jsonschema.ValidationError) as caught:
        check(values)
    error = jsonschema.exceptions.best_match([caught.value])
    assert where in f"{error.json_path} {error.message} {caught.value}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (60.0, "60"),
        (-0.5, "-0.5"),
        (0.0, "0"),
        (12.25, "12.25"),
        (0.00001, "0.00001"),
        (1e-7, "1e-7"),
        (1.5e-12, "1.5e-12"),
        (1e20, "100000000000000000000"),
        (1e21, "1e+21"),
        (1 << 60, "1152921504606846976"),
        (0.1 + 0.2, "0.30000000000000004"),
    ],
)
def test_numbers_are_written_as_go_writes_them(value: float, text: str) -> None:
    assert number_text(value) == text
    assert tomllib.loads(f"value = {text}")["value"] == value


LETTERS = "aB0-_. \"'\\\n\t\x00\x7f<&>#=éλ\u2028\U0001f600"
TEXTS = st.text(LETTERS)
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(1 << 53), 1 << 53),
    st.floats(-1e15, 1e15),
    TEXTS,
)
KEYS = st.text(LETTERS, min_size=1)
INNER = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(KEYS, SCALARS, max_size=3))
TABLES = st.dictionaries(KEYS, st.one_of(INNER, st.lists(INNER, max_size=2)), max_size=4)


@settings(max_examples=30, deadline=None)
@given(TABLES)
def test_a_settings_file_is_read_as_what_it_was_written_from(table: dict[str, Any]) -> None:
    assert tomllib.loads(settings_text(table)) == table


def test_text_that_go_takes_for_a_number_is_quoted() -> None:
    texts = ["1e3", "0o17", "0x1F", "1.5E-3", "0b1"]
    assert as_yaml([texts]) == "".join(f"- '{text}'\n" for text in texts)


# --- what helm renders ------------------------------------------------------------------------------------------------


def assert_equal(generated: Documents | str, chart: Documents | str) -> None:
    assert not isinstance(generated, str), generated
    assert not isinstance(chart, str), chart
    for key in differing(generated, chart):
        assert chart.get(key) == generated.get(key), key


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(FLEETS))
def test_the_chart_renders_what_the_generator_prints(name: str, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEETS[name])
    assert_equal(*rendered(fleet, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("page", ["docs/fleet.md", "docs/simulator.md"])
def test_fleets_of_the_documentation_are_rendered_equally(page: str, tmp_path: Path) -> None:
    texts = documented_fleets(page)
    for text in texts:
        fleet = tmp_path / "fleet.toml"
        fleet.write_text(text)
        assert_equal(*rendered(fleet, tmp_path))
    assert texts or page != "docs/fleet.md"


PATHS = st.sampled_from(["/data/a", "/data/a/", "/tmp/x", "/b"])
SECONDS = st.floats(0.5, 400, allow_nan=False)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "max_model_len": st.integers(1, 1 << 40),
        "max-running": st.integers(1, 4096),
        "kv_memory": st.sampled_from(["2GiB", 1 << 31, "1.5g"]),
        "threads": st.integers(1, 64),
        "served_model_name": st.text("aB0-_. \"'\\<&>#=éλ\U0001f600", min_size=1),
        "lora": st.sampled_from([["a=/m/a", "b=/m/b"], "a=/m/a, b=/m/b/"]),
        "draft_model": st.just("/m/small"),
        "log_json": st.booleans(),
        "supervise": st.fixed_dictionaries({}, optional={"drain_s": SECONDS, "wedge_s": st.floats(0.5, 10)}),
        "failover": st.fixed_dictionaries({}, optional={"no_path_s": SECONDS}),
        "scheduling": st.fixed_dictionaries({"interactive_tpot_ms": st.floats(0.001, 1e5)}),
        "api_keys": st.just("/keys.json"),
        "kv_key": st.just("/kv.key"),
        "kv_disk": PATHS,
        "audit_log": PATHS,
        "trace_file": PATHS,
        "response_store": PATHS,
        "transfer": st.sampled_from(["auto", "tcp"]),
    },
)
GROUPS = st.sampled_from(["", "", "tp1", "tp2", "pp2", "tp2,pp2", "pp3, tp4"])
ROLES = ["prefill", "decode", "both"]
RESOURCES = st.fixed_dictionaries(
    {},
    optional={
        "cpu": st.sampled_from(["1", "8", "1500m", "2.5"]),
        "memory": st.sampled_from(["4Gi", "1000000"]),
        "gpus": st.integers(0, 4),
    },
)
RANGES = st.fixed_dictionaries(
    {"max": st.integers(2, 40)},
    optional={"min": st.integers(1, 3), "wait_s": st.floats(0.0001, 3600), "cpu_percent": st.integers(1, 100)},
)
CLUSTERS = st.fixed_dictionaries(
    {"prometheus": st.just("http://prometheus:9090")},
    optional={
        "models_claim": st.just("models"),
        "models_path": st.just("/m"),
        "resources": st.dictionaries(st.sampled_from([*ROLES, "gateway"]), RESOURCES),
        "http_gateway": st.sampled_from(["edge", "net/edge"]),
        "hostnames": st.lists(st.sampled_from(["a.example", "1.example"]), max_size=2),
    },
)
PICKERS = st.fixed_dictionaries(
    {},
    optional={
        "replicas": st.integers(1, 64),
        "failure_mode": st.sampled_from(["FailOpen", "FailClose"]),
        "tls": st.booleans(),
        "cpu": st.sampled_from(["2", "0.5", "100m"]),
        "memory": st.sampled_from(["1Gi", "300000000"]),
    },
)


@st.composite
def node_groups(draw: st.DrawFn, names: list[str]) -> list[dict[str, Any]]:
    """Groups over nodes of equal settings."""
    groups = []
    for _ in range(draw(st.integers(1, 2))):
        chosen = draw(st.lists(st.sampled_from(names), min_size=2, unique=True))
        stages = draw(st.integers(len(chosen), 7))
        group: dict[str, Any] = {"nodes": chosen, "group": draw(st.sampled_from(["pp{}", "tp2,pp{}"])).format(stages)}
        groups.append(group | draw(st.fixed_dictionaries({}, optional={"count": st.integers(1, 3)})))
    return groups


@st.composite
def fleets(draw: st.DrawFn) -> dict[str, Any]:
    """Fleet files that can run in a cluster."""
    same = draw(SETTINGS)
    nodes = []
    over = draw(st.booleans())  # has groups over nodes
    for number in range(draw(st.integers(2 if over else 1, 3))):
        workers = [
            {"role": role, "count": draw(st.integers(1, 3)), "group": draw(GROUPS)}
            for role in draw(st.lists(st.sampled_from(ROLES), min_size=1, unique=True))
        ]
        node: dict[str, Any] = {"name": f"n{number}", "address": f"10.0.0.{number}", "workers": workers}
        if number <= over or draw(st.booleans()):  # gateways need the same settings, and nodes of a group
            node |= {"gateways": draw(st.integers(1, 2)), "settings": same}
        elif draw(st.booleans()):
            node["settings"] = draw(SETTINGS)
        nodes.append(node)
    fleet: dict[str, Any] = {"name": draw(st.sampled_from(["f", "Two hosts"])), "settings": draw(SETTINGS)}
    model = draw(st.sampled_from([None, "/models/a", "/models/a/", "org/name"]))
    cluster = draw(CLUSTERS)
    groups = draw(node_groups([node["name"] for node in nodes if "gateways" in node])) if over else []
    if draw(st.booleans()):
        cluster = {"http_gateway": "edge"} | cluster | {"picker": draw(PICKERS)}
    roles = [worker["role"] for node in nodes for worker in node["workers"]] + ["both" for _ in groups]
    single = [role for role in ROLES if roles.count(role) == 1]
    if draw(st.booleans()):
        cluster["autoscale"] = draw(st.dictionaries(st.sampled_from([*single, "gateway"]), RANGES, max_size=2))
    if any({"lora", "draft_model"} & one["settings"].keys() for one in (fleet, *nodes) if "settings" in one):
        cluster["models_path"] = "/m"
    fleet |= {"groups": groups} if groups else {}
    return fleet | ({"model": model} if model else {}) | {"nodes": nodes, "kubernetes": cluster}


@pytest.mark.long
def test_any_fleet_is_rendered_equally(tmp_path: Path) -> None:
    need_helm()

    # Half a second each; what fails is shown as it is, for to make it smaller would take minutes.
    phases = (Phase.reuse, Phase.generate)

    @settings(max_examples=30, deadline=None, phases=phases, suppress_health_check=list(HealthCheck))
    @given(fleets())
    def compare(raw: dict[str, Any]) -> None:
        fleet = tmp_path / "fleet.toml"
        fleet.write_text(tomli_w.dumps(raw))
        assert_equal(*rendered(fleet, tmp_path))

    compare()


# --- what a user of Helm sees -----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "defaults",
        "two nodes",
        "https, files that are written",
        "groups over pods",
        "a group over two nodes",
        "a picker",
    ],
)
def test_lint_finds_nothing(name: str, tmp_path: Path) -> None:
    words: list[str | Path] = []
    if name != "defaults":
        values = tmp_path / "values.yaml"
        values.write_text(as_yaml([tomllib.loads(FLEETS[name])]))
        words = ["-f", values]
    run = helm("lint", "--strict", CHART, *words, folder=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 chart(s) failed" in run.stdout


@pytest.mark.long
def test_defaults_are_the_bundled_model_named_after_the_release(tmp_path: Path) -> None:
    run = helm("template", "Trial", CHART, "--namespace", "models", "--set", "name=", folder=tmp_path)
    assert run.returncode != 0, "a release has a name in lower case"
    run = helm("template", "trial", CHART, "--namespace", "models", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    documents = by_kind_and_name(run.stdout)
    for document in documents.values():
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    counts = {name: one["spec"]["replicas"] for (kind, name), one in documents.items() if kind == "Deployment"}
    assert counts == {"trial-gateway": 2, "trial-prefill": 1, "trial-decode": 2}
    pod = documents["Deployment", "trial-decode"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == f"penstock:{penstock.__version__}"
    assert not [volume for volume in pod["volumes"] if volume["name"] == "models"]


@pytest.mark.long
@pytest.mark.parametrize(("values", "where"), WRONG_VALUES)
def test_helm_refuses_a_wrong_value_and_names_it(values: dict[str, Any], where: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(as_yaml([values]))
    run = helm("template", "any", CHART, "-f", file, folder=tmp_path)
    assert run.returncode != 0
    assert "values don't meet the specifications of the schema" in run.stderr
    assert where in run.stderr


def with_group(text: str, own: str = "") -> tuple[str, str]:
    """The change that adds a group over nodes, and settings of the last node."""
    return LAST_NODE, f"{LAST_NODE}{own}\n[[groups]]\n{text}\n"


MODEL_OF_HUB = (
    'model = "/models/llama"\nkeys = "/etc/penstock/host-keys"\n\n[settings]',
    'model = "org/name"\n\n[settings]\nlora = ["a=/a"]',
)
WRONG_FLEETS = [
    (("drain_s = 60.0 }\n\n[kubernetes]", TLS_SETTINGS), "the Gateway ends TLS"),
    (('address = "10.0.0.2"', 'address = "10.0.0.2"\ngateways = 1'), "nodes a and b differ in api_keys"),
    (("max_model_len = 8192", 'transfer = "shm"'), "moves pages within one host"),
    (("max_model_len = 8192", 'tls_cert = "/a.pem"'), "HTTPS needs a certificate and its key"),
    (("max_model_len = 8192", 'kv_disk = "kv"'), "give an absolute path"),
    (("max_model_len = 8192", 'lora = "a=a"'), "give an absolute path"),
    (("max_model_len = 8192", 'lora = "a=/models/a, b=/b"'), "/b: pods have models of /models only"),
    (("max_model_len = 8192", 'draft_model = "/models2"'), "/models2: pods have models of /models only"),
    (MODEL_OF_HUB, "/a: pods have no models"),
    (('prometheus = "http', '# prometheus = "http'), "add prometheus: URL to kubernetes"),
    (("prefill = { max = 6", "both = { max = 6"), "kubernetes.autoscale.both: the fleet has none"),
    (("min = 2, max = 4", "min = 5, max = 4"), "max = 4 is less than min = 5"),
    (('model = "/models/llama"', 'model = "~/llama"'), "give an absolute path"),
    (('name = "two hosts"', 'name = "2"'), "it must begin with a letter"),
    (("gateways = 2", "gateways = 0"), "no node has gateways"),
    (("[kubernetes]", "[kubernetes]\npicker = {}"), "kubernetes.picker: an InferencePool belongs to a Gateway"),
    (with_group('nodes = ["a", "c"]\ngroup = "pp2"'), "nodes a, c: there is no node c"),
    (with_group('nodes = ["a", "b", "a"]\ngroup = "pp3"'), "one is listed twice"),
    (with_group('nodes = ["a", "b"]\ngroup = "pp2"\nrole = "decode"'), "role decode: a worker on several nodes"),
    (with_group('nodes = ["b", "a"]\ngroup = "tp2"'), "each node has a stage at least, so pp2 would work"),
    (
        with_group('nodes = ["a", "b"]\ngroup = "pp2"', "settings = { max_running = 3 }"),
        "nodes a and b have a group together and differ in max_running",
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("change", "because"), WRONG_FLEETS)
def test_what_a_cluster_cannot_have_is_refused_with_the_reason(
    change: tuple[str, str], because: str, tmp_path: Path
) -> None:
    text = FLEET.read_text()
    assert change[0] in text
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(text.replace(*change))
    generated, chart = rendered(fleet, tmp_path)
    assert isinstance(generated, str)
    assert isinstance(chart, str)
    assert because in chart


@pytest.mark.long
@pytest.mark.parametrize("name", ["two nodes", "https, files that are written", "a key of clients", "a picker"])
def test_the_notes_name_the_secrets_that_pods_have(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEETS[name])
    assert main(["manifests", "helm", str(fleet), "--namespace", "models"]) == 0
    values = capsys.readouterr().out
    (tmp_path / "values.yaml").write_text(values)
    words = ("install", "any", CHART, "-f", tmp_path / "values.yaml", "-n", "models", "--dry-run=client")
    run = helm(*words, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    notes = run.stdout.partition("\nNOTES:\n")[2]
    commands = [line.strip() for line in notes.splitlines() if "create secret" in line]
    assert commands == [line.removeprefix("#   ") for line in values.splitlines() if "create secret" in line]
    assert made_secrets(commands, tmp_path) == wanted_secrets(run.stdout)


def made_secrets(commands: list[str], folder: Path) -> dict[str, set[str]]:
    """The names of the Secrets that these commands make, with their keys."""
    (folder / "host-keys").mkdir()
    for file in ("host-keys/public.key", "host-keys/secret.key", "API_KEYS_FILE", "KEY_FILE"):
        (folder / file).write_text("{}")
    certificate, key = write_certificate(folder, "a")
    certificate.rename(folder / "CERTIFICATE.pem")
    key.rename(folder / "KEY.pem")
    found = {}
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "kubectl"
        run = subprocess.run(
            [need_kubectl(), *words, "--dry-run=client", "-o", "yaml"],
            cwd=folder,
            env={"HOME": str(folder), "KUBECONFIG": "/dev/null"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        secret = yaml.safe_load(run.stdout)
        kubernetes_validate.validate(secret, KUBERNETES, strict=True)
        found[secret["metadata"]["name"]] = set(secret["data"])
    return found


def wanted_secrets(text: str) -> dict[str, set[str]]:
    """The Secrets of an installation's pods, with the keys that their commands name."""
    files = {
        "two-hosts-host-keys": {"public.key", "secret.key"},
        "two-hosts-api-keys": {"api-keys"},
        "two-hosts-tls": {"tls.crt", "tls.key"},
        "two-hosts-kv-key": {"kv-key"},
        "two-hosts-api-key": {"api-key"},
        "two-hosts-picker-tls": {"tls.crt", "tls.key"},
    }
    return {name: keys for name, keys in files.items() if f'"{name}"' in text}
