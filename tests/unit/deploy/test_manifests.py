"""``penstock manifests``: what is printed for one fleet of two nodes, and what cluster, systemd and Compose accept.

After a change that is meant: ``penstock manifests KIND fleet.toml --image penstock:1 --out golden`` in this folder.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.unit.deploy.schemas import (
    FLEET,
    GROUP_FLEET,
    HERE,
    POOL,
    TLS_SETTINGS,
    compose_error,
    unit_findings,
    validate,
)

from penstock.cli.main import main
from penstock.config.fleet_file import read_fleet_file
from penstock.config.load import load_serve, load_worker


def manifests(capsys: pytest.CaptureFixture[str], kind: str, fleet: Path, *words: str) -> str:
    assert main(["manifests", kind, str(fleet), "--image", "penstock:1", *words]) == 0
    return capsys.readouterr().out


def kubernetes(capsys: pytest.CaptureFixture[str], fleet: Path, *words: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(manifests(capsys, "kubernetes", fleet, *words)))


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    """By name."""
    return {one["metadata"]["name"]: one for one in documents if one["kind"] == kind}


def changed(folder: Path, *changes: tuple[str, str]) -> Path:
    """The fleet file with other text."""
    text = FLEET.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "fleet.toml"
    path.write_text(text)
    return path


def with_group(folder: Path) -> Path:
    path = folder / "groups.toml"
    path.write_text(GROUP_FLEET)
    return path


# --- what is printed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("kubernetes", ["two-hosts.yaml"]),
        ("helm", ["values.yaml"]),
        ("systemd", ["penstock-a.service", "penstock-b.service"]),
        ("compose", ["compose.yaml"]),
    ],
)
def test_a_fleet_of_two_nodes_is_printed_as_it_was(
    kind: str, names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = manifests(capsys, kind, FLEET)
    written = manifests(capsys, kind, FLEET, "--out", str(tmp_path)).split()
    assert written == [str(tmp_path / name) for name in names]
    for name in names:
        text = (tmp_path / name).read_text()
        assert text == (HERE / "golden" / name).read_text()
        assert text in printed


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("kubernetes", ["two-stages.yaml"]),
        ("systemd", ["penstock-a.service", "penstock-b.service"]),
        ("compose", ["compose.yaml"]),
    ],
)
def test_a_group_over_two_nodes_is_printed_as_it_was(
    kind: str, names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifests(capsys, kind, HERE / "groups.toml", "--out", str(tmp_path))
    for name in names:
        assert (tmp_path / name).read_text() == (HERE / "golden" / "groups" / name).read_text()


def test_a_group_over_two_nodes_has_a_pod_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not for each stage, of which a node may have several."""
    fleet = tmp_path / "groups.toml"
    fleet.write_text((HERE / "groups.toml").read_text().replace("tp2,pp2", "tp2,pp4"))
    documents = kubernetes(capsys, fleet)
    for document in documents:
        validate(document)
    assert set(of_kind(documents, "Deployment")) == {"two-stages-gateway"}
    spec = of_kind(documents, "LeaderWorkerSet")["two-stages-both"]["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (2, 2)
    for template, rank in (("leaderTemplate", "0"), ("workerTemplate", "$(LWS_WORKER_INDEX)")):
        args = spec["leaderWorkerTemplate"][template]["spec"]["containers"][0]["args"]
        assert args[args.index("--nnodes") + 1] == "2"
        assert args[args.index("--node-rank") + 1] == rank
        assert args[args.index("--parallel") + 1] == "tp2,pp4"


def test_nodes_of_a_group_need_the_same_settings_in_pods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = tmp_path / "groups.toml"
    own = 'address = "10.0.0.2"\nsettings = { max_running = 3 }'
    fleet.write_text((HERE / "groups.toml").read_text().replace('address = "10.0.0.2"', own))
    assert main(["manifests", "kubernetes", str(fleet)]) == 2
    assert "nodes a and b have a group together and differ in max_running" in capsys.readouterr().err


def test_every_document_is_valid_strictly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = kubernetes(capsys, with_group(tmp_path), "--namespace", "models")
    for document in documents:
        validate(document)
    assert {one["metadata"]["namespace"] for one in documents} == {"models"}
    assert {one["kind"] for one in documents} == {
        *("ConfigMap", "Service", "Deployment", "LeaderWorkerSet", "PodDisruptionBudget"),
        *("HorizontalPodAutoscaler", "ScaledObject", "NetworkPolicy"),
    }


@pytest.mark.parametrize("kind", ["Deployment", "LeaderWorkerSet", "ScaledObject"])
def test_the_check_finds_a_misspelt_field(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = next(iter(of_kind(kubernetes(capsys, with_group(tmp_path)), kind).values()))
    document["spec"]["minReadySecond"] = 1
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(document)


def test_units_are_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    manifests(capsys, "systemd", FLEET, "--out", str(tmp_path), "--executable", "/bin/true", "--user", "root")
    assert unit_findings(analyze, tmp_path) == ""


def test_the_compose_file_is_valid_and_its_fleet_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = yaml.safe_load(manifests(capsys, "compose", changed(tmp_path, ("/models/llama", "/models/a$b"))))
    assert compose_error(document) == ""
    text = document["configs"]["fleet"]["content"]
    inside = tmp_path / "inside.toml"
    inside.write_text(text.replace("$$", "$"))
    fleet = read_fleet_file(str(inside))
    assert fleet.model == "/models/a$b"
    assert {node.name: node.address for node in fleet.nodes} == {"a": "a", "b": "b"}
    services = document["services"]
    assert not any("api_keys" in volume for volume in services["b"]["volumes"]), "b has no clients"


# --- what it means ----------------------------------------------------------------------------------------------------


def test_workers_of_all_nodes_are_summed_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = kubernetes(capsys, changed(tmp_path, ("autoscale", "# autoscale")))
    counts = {name: one["spec"]["replicas"] for name, one in of_kind(documents, "Deployment").items()}
    assert counts == {"two-hosts-gateway": 2, "two-hosts-prefill": 2, "two-hosts-decode": 3}


def test_nodes_with_other_settings_have_workers_of_another_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = changed(tmp_path, ('address = "10.0.0.2"', 'address = "10.0.0.2"\nsettings = { kv_memory = "1GiB" }'))
    documents = kubernetes(capsys, fleet)
    settings = of_kind(documents, "ConfigMap")["two-hosts-settings"]["data"]
    assert "kv_memory" in settings["two-hosts-decode-tp2-2.toml"]
    assert "kv_memory" not in settings["two-hosts-decode-tp2.toml"]
    assert of_kind(documents, "Deployment")["two-hosts-decode-tp2-2"]["spec"]["replicas"] == 2


def pod_specs(documents: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, one in of_kind(documents, "Deployment").items():
        yield name, one["spec"]["template"]["spec"]
    for name, one in of_kind(documents, "LeaderWorkerSet").items():
        group = one["spec"]["leaderWorkerTemplate"]
        yield name, group["leaderTemplate"]["spec"]
        yield name, group["workerTemplate"]["spec"]


def test_pods_write_nothing_and_may_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pods = list(pod_specs(kubernetes(capsys, with_group(tmp_path))))
    assert len(pods) == 5
    for _, pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        for container in (*pod["initContainers"], *pod["containers"]):
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            volumes = {volume["name"] for volume in pod["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_the_settings_of_pods_are_read_by_their_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = kubernetes(capsys, with_group(tmp_path))
    for name, text in of_kind(documents, "ConfigMap")["two-hosts-settings"]["data"].items():
        file = tmp_path / name
        file.write_text(text)
        flags = {"keys": "/keys/host-keys"}
        if name == "two-hosts-gateway.toml":
            config = load_serve(flags | {"members": "dns:two-hosts-workers:9000"}, {}, file)
        else:
            config = load_worker(flags, {}, file)
        assert config.max_model_len == 8192
        assert config.supervise.drain_s == 60.0


def test_a_pod_has_the_time_to_drain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for drain_s in (60.0, 300.0):
        fleet = changed(tmp_path, ("drain_s = 60.0", f"drain_s = {drain_s}"))
        grace = {name: pod["terminationGracePeriodSeconds"] for name, pod in pod_specs(kubernetes(capsys, fleet))}
        assert grace == {
            "two-hosts-gateway": drain_s + 20,
            "two-hosts-prefill": drain_s + 15,
            "two-hosts-decode": drain_s + 15,
        }
        assert f"TimeoutStopSec={drain_s + 15:.0f}\n" in manifests(capsys, "systemd", fleet)
        services = yaml.safe_load(manifests(capsys, "compose", fleet))["services"]
        assert {one["stop_grace_period"] for one in services.values()} == {f"{drain_s + 15:.0f}s"}


def test_a_worker_over_several_pods_is_a_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = of_kind(kubernetes(capsys, with_group(tmp_path)), "LeaderWorkerSet")["two-hosts-both"]["spec"]
    group = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], group["size"], group["restartPolicy"]) == (2, 2, "RecreateGroupOnPodRestart")
    leader, follower = (group[template]["spec"]["containers"][0] for template in ("leaderTemplate", "workerTemplate"))
    assert "--parallel tp2,pp2 --nnodes 2 --master-addr tcp://$(POD_IP):9100 --node-rank 0" in " ".join(leader["args"])
    assert "tcp://$(LWS_LEADER_ADDRESS):9100 --node-rank $(LWS_WORKER_INDEX)" in " ".join(follower["args"])
    assert "livenessProbe" in leader
    assert "livenessProbe" not in follower, "it listens nowhere: its leader knows whether it is there"
    assert "penstock-member" not in group["workerTemplate"]["metadata"]["labels"], "gateways look for leaders"


def test_no_key_is_in_any_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = changed(tmp_path, ('api_keys = "/etc/penstock/api-keys.json"', 'api_key = "sesame-open-now"'))
    text = manifests(capsys, "kubernetes", fleet)
    assert "sesame" not in text
    (gateway,) = [pod for name, pod in pod_specs(list(yaml.safe_load_all(text))) if name == "two-hosts-gateway"]
    (variable,) = gateway["containers"][0]["env"]
    assert variable["name"] == "PENSTOCK_API_KEY"
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "two-hosts-api-key", "key": "api-key"}
    assert "create secret generic two-hosts-api-key --from-literal=api-key=KEY" in text


def test_https_and_folders_to_write_have_volumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = 'max_model_len = 8192\ntls_cert = "/a.pem"\ntls_key = "/a.key"\nkv_disk = "/kv"\naudit_log = "/log/audit"'
    documents = kubernetes(capsys, changed(tmp_path, ("max_model_len = 8192", more)))
    for document in documents:
        validate(document)
    pods = dict(pod_specs(documents))
    gateway = pods["two-hosts-gateway"]["containers"][0]
    assert gateway["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert of_kind(documents, "Service")["two-hosts"]["spec"]["ports"][0]["port"] == 443
    settings = tomllib.loads(of_kind(documents, "ConfigMap")["two-hosts-settings"]["data"]["two-hosts-gateway.toml"])
    assert settings["tls_cert"] == "/keys/tls/tls.crt"
    mounts = {mount["mountPath"] for mount in pods["two-hosts-decode"]["containers"][0]["volumeMounts"]}
    assert "/kv" in mounts
    assert "/log" in {mount["mountPath"] for mount in gateway["volumeMounts"]}
    units = manifests(capsys, "systemd", tmp_path / "fleet.toml")
    assert "ReadWritePaths=/kv\nReadWritePaths=/log\n" in units


def test_containers_see_changes_of_api_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`penstock keys` replaces the file: one that is mounted alone would stay as it was."""
    more = 'max_model_len = 8192\ntls_cert = "/etc/letsencrypt/live/a/fullchain.pem"\ntls_key = "/a.key"'
    document = yaml.safe_load(manifests(capsys, "compose", changed(tmp_path, ("max_model_len = 8192", more))))
    (a, _) = tomllib.loads(document["configs"]["fleet"]["content"])["nodes"]
    assert a["settings"]["api_keys"] == "/files/a/api_keys/api-keys.json"
    volumes = document["services"]["a"]["volumes"]
    assert "/etc/penstock:/files/a/api_keys:ro" in volumes
    assert "/etc/letsencrypt/live/a/fullchain.pem:/files/tls_cert:ro" in volumes, "links of certbot lead elsewhere"


@pytest.mark.parametrize("folder", ["", "~/", "~me/", "/", "/etc/", "/home/me/", "/root/", "./", "../"])
def test_no_container_gets_a_folder_that_api_keys_share_with_all(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = changed(tmp_path, ("/etc/penstock/api-keys.json", f"{folder}keys.json"))
    assert main(["manifests", "compose", str(fleet)]) == 2
    assert "to a folder of its own" in capsys.readouterr().err
    fleet = changed(tmp_path, ("/etc/penstock/api-keys.json", f"{folder}own/clients/keys.json"))
    mounted = yaml.safe_load(manifests(capsys, "compose", fleet))["services"]["a"]["volumes"][-1]
    assert mounted.endswith("own/clients:/files/a/api_keys:ro")
    assert mounted[0] in "/.~", "otherwise it is the name of a volume"


PATHS = """max_model_len = 8192
kv_disk = "/kv/"
response_store = "/var/responses"
audit_log = "/log/audit.jsonl"
trace_file = "/tmp/trace"
draft_model = "/drafts/small"
lora = ["sql=/adapters/sql", "own=/models/own"]
"""


def test_containers_have_what_settings_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their roots are read-only, and have no models."""
    document = yaml.safe_load(manifests(capsys, "compose", changed(tmp_path, ("max_model_len = 8192", PATHS))))
    assert compose_error(document) == ""
    for service in document["services"].values():
        read = [volume for volume in service["volumes"] if isinstance(volume, str)]
        assert read[-2:] == ["/adapters/sql:/adapters/sql:ro", "/drafts/small:/drafts/small:ro"]
        assert not any("own" in volume for volume in read), "it is below the models"
        written = [volume for volume in service["volumes"] if volume not in read]
        assert [(one["source"], one["target"]) for one in written] == [
            (folder, folder) for folder in ("/kv", "/log", "/var/responses")
        ]
        assert not any(one["bind"]["create_host_path"] for one in written), "Docker would make them as root"


@pytest.mark.parametrize("setting", ['kv_disk = "kv"', 'audit_log = "~/audit"', 'draft_model = "x"', 'lora = "a=~/a"'])
@pytest.mark.parametrize("kind", ["compose", "kubernetes"])
def test_paths_of_containers_and_pods_are_absolute(
    kind: str, setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["manifests", kind, str(changed(tmp_path, ("max_model_len = 8192", setting)))]) == 2
    assert "have no such folder; give an absolute path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cpu", "threads"),
    [("8", 4), ("7", 3), ("7500m", 3), ("7.999", 3), ("2500m", 1), ("0.5", 1), ("100m", 1), ("12000.5m", 6)],
)
def test_both_ranks_of_a_pod_divide_its_whole_processors(
    cpu: str, threads: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a number of threads each would use all processors of the host, since pods have no limit of them."""
    fleet = changed(tmp_path, ("resources = {", f'resources = {{ decode = {{ cpu = "{cpu}" }},'))
    settings = of_kind(kubernetes(capsys, fleet), "ConfigMap")["two-hosts-settings"]["data"]
    assert tomllib.loads(settings["two-hosts-decode.toml"])["threads"] == threads


def test_a_route_leads_to_the_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = '[kubernetes]\nhttp_gateway = "edge/public"\nhostnames = ["llm.example.org"]'
    documents = kubernetes(capsys, changed(tmp_path, ("[kubernetes]", more)))
    route = of_kind(documents, "HTTPRoute")["two-hosts"]
    validate(route)
    assert route["spec"]["parentRefs"] == [{"name": "public", "namespace": "edge"}]
    assert route["spec"]["hostnames"] == ["llm.example.org"]
    (rule,) = route["spec"]["rules"]
    paths = [match["path"]["value"] for match in rule["matches"]]
    assert "/v1/chat/completions" in paths
    assert len(paths) <= 64, "more are refused"
    assert not any("/v1/load_lora_adapter".startswith(path) for path in paths), "that is for operators"
    (to,) = rule["backendRefs"]
    service = of_kind(documents, "Service")[to["name"]]
    assert [port["port"] for port in service["spec"]["ports"]] == [to["port"]]
    rule["timeout"] = rule.pop("timeouts")
    with pytest.raises(jsonschema.ValidationError):
        validate(route)


def test_a_route_leads_to_the_pool_of_gateways_and_that_to_its_picker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = changed(tmp_path, ("[kubernetes]", POOL))
    documents = kubernetes(capsys, fleet)
    for document in documents:
        validate(document)
    (to,) = of_kind(documents, "HTTPRoute")["two-hosts"]["spec"]["rules"][0]["backendRefs"]
    assert to == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "two-hosts"}
    pool = of_kind(documents, "InferencePool")[to["name"]]["spec"]
    reference = pool["endpointPickerRef"]
    assert (reference["name"], reference["failureMode"]) == ("two-hosts-picker", "FailClose")
    gateway = of_kind(documents, "Deployment")["two-hosts-gateway"]["spec"]["template"]
    wanted, labels = pool["selector"]["matchLabels"], gateway["metadata"]["labels"]
    assert wanted.items() <= labels.items()
    assert pool["targetPorts"] == [{"number": gateway["spec"]["containers"][0]["ports"][0]["containerPort"]}]
    service = of_kind(documents, "Service")["two-hosts-picker"]["spec"]
    assert [port["port"] for port in service["ports"]] == [reference["port"]["number"]]
    picker = of_kind(documents, "Deployment")["two-hosts-picker"]["spec"]
    assert picker["replicas"] == 3
    assert service["selector"].items() <= picker["template"]["metadata"]["labels"].items()
    assert not wanted.items() <= picker["template"]["metadata"]["labels"].items(), "it is no gateway itself"
    assert "two-hosts-picker" in of_kind(documents, "PodDisruptionBudget")
    assert "two-hosts-picker" in of_kind(documents, "NetworkPolicy")
    assert "create secret tls two-hosts-picker-tls" in manifests(capsys, "kubernetes", fleet)


@pytest.mark.parametrize("tls", [True, False])
def test_the_command_of_a_picker_is_one(tls: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool = f'[kubernetes]\nhttp_gateway = "edge"\npicker = {{ tls = {str(tls).lower()} }}'
    documents = kubernetes(capsys, changed(tmp_path, ("[kubernetes]", pool)))
    pod = of_kind(documents, "Deployment")["two-hosts-picker"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert main([*container["args"], "--print-config"]) == 0
    config = tomllib.loads(capsys.readouterr().out)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert config["listen"] == f"tcp://0.0.0.0:{ports['grpc']}"
    assert (config["health_port"], config["metrics_port"]) == (ports["health"], ports["metrics"])
    name, port = config["members"].removeprefix("dns:").split(":")
    members = of_kind(documents, "Service")[name]["spec"]
    assert (members["clusterIP"], members["ports"][0]["port"]) == ("None", int(port))
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert ("/tls" in mounts) == tls
    assert config.get("tls_cert", "/tls/tls.crt" if not tls else None) == "/tls/tls.crt"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    probed = {container[probe]["grpc"]["service"] for probe in ("readinessProbe", "livenessProbe", "startupProbe")}
    assert probed == {"readiness", "liveness"}


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (("[kubernetes]", "[kubernetes]\npicker = {}"), "add http_gateway = NAME"),
        (
            ("[kubernetes]", "[kubernetes]\npicker = { replica = 1 }"),
            "kubernetes.picker: no such field: replica; did you mean replicas?",
        ),
        (
            ("drain_s = 60.0 }\n\n[kubernetes]", TLS_SETTINGS),
            "the Gateway ends TLS",
        ),
        (('address = "10.0.0.2"', 'address = "10.0.0.2"\ngateways = 1'), "nodes a and b differ in api_keys"),
        (("max_model_len = 8192", 'transfer = "shm"'), "moves pages within one host"),
        (("max_model_len = 8192", "max_modl_len = 1"), "did you mean max_model_len?"),
        (('prometheus = "http', '# prometheus = "http'), "add prometheus = URL to [kubernetes]"),
        (("prefill = { max = 6", "both = { max = 6"), "[kubernetes.autoscale] both: the fleet has none"),
        (("min = 2, max = 4", "min = 5, max = 4"), "max = 4 is less than min = 5"),
        (('model = "/models/llama"', 'model = "~/llama"'), "give an absolute path"),
        (("max_model_len = 8192", 'lora = "a=/models/a,b=/b"'), "/b: pods have models of /models only"),
        (("max_model_len = 8192", 'draft_model = "/models2"'), "/models2: pods have models of /models only"),
        (('cpu = "8"', 'cpu = "eight"'), "fleet.toml"),
        (('name = "two hosts"', 'name = "2"'), "it must begin with a letter"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    change: tuple[str, str], because: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["manifests", "kubernetes", str(changed(tmp_path, change))]) == 2
    error = capsys.readouterr().err
    assert because in error
    assert len(error.splitlines()) == 1
