"""What ``penstock manifests`` prints, run in namespaces: pods as the kubelet runs them, units as systemd, services as
Compose; and what they do when they end under streams."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import yaml

from penstock.wire.curve_keys import CurveKeys

from .asking import Stream, ask, penstock
from .containers import NETWORK, USER, Container, ContainerHost
from .front import KEY, TOKENS, Front
from .server import PATIENCE_S, START_S, PenstockServer

READY = re.compile(r" ready after | ready: \d+ of \d+ workers joined")
"""What the log of a worker, or of a gateway, says."""

FLEET = """
name = "two hosts"
keys = "{keys}"

[settings]
kv_memory = "64MiB"
failover = {{ no_path_s = 60.0 }}
membership = {{ dns_poll_s = 0.2 }}

[kubernetes.resources]
prefill = {{ cpu = "1", memory = "2Gi" }}
decode = {{ cpu = "1", memory = "2Gi" }}

[[nodes]]
name = "a"
address = "{network}.11"
gateways = 1
http_host = "0.0.0.0"
workers = [{{ role = "prefill", count = 1 }}, {{ role = "decode", count = 1 }}]

[[nodes]]
name = "b"
address = "{network}.12"
workers = [{decode}]
"""


@dataclass
class Place:
    """Where a test's containers run, and what they have in common."""

    host: ContainerHost
    keys: Path
    fleet: Path
    containers: list[Container] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # of addresses, as the cluster's DNS has them

    @property
    def hosts_file(self) -> Path:
        return self.host.folder / "hosts"

    def name_addresses(self, **names: str) -> None:
        """Names of more addresses; those with an empty one are gone.  The file is written in place: it is mounted."""
        self.names = {address: name for address, name in (self.names | names).items() if name}
        lines = [f"{address} {name}\n" for address, name in self.names.items()]
        self.hosts_file.write_text("".join(("127.0.0.1 localhost\n", *lines)))

    def folder(self, name: str) -> Path:
        """One that containers may write to."""
        path = self.host.folder / "volumes" / name
        path.mkdir(parents=True)
        path.chmod(0o777)
        return path

    def owned_keys(self) -> Path:
        """The folder of keys, as the user of containers owns it."""
        if os.geteuid() == 0:
            for path in (self.keys, *self.keys.iterdir()):
                os.chown(path, USER, USER)
        return self.keys


@contextmanager
def place(folder: Path, decode: str = '{ role = "decode", count = 1 }') -> Iterator[Place]:
    keys, fleet = folder / "keys", folder / "fleet.toml"
    CurveKeys.ephemeral().save(keys)
    fleet.write_text(FLEET.format(keys=keys, network=NETWORK, decode=decode))
    with ExitStack() as stack:
        there = Place(stack.enter_context(ContainerHost(folder)), keys, fleet)
        there.name_addresses()
        try:
            yield there
        except BaseException:
            for container in there.containers:
                print(f"--- {container.name}\n{container.read_log()[-3000:]}")
            raise
        finally:
            for container in there.containers:
                container.kill()


def printed(kind: str, there: Place, *words: str) -> str:
    run = penstock("manifests", kind, str(there.fleet), *words)
    assert run.returncode == 0, run.stderr
    return run.stdout


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
    PenstockServer.wait_for(condition, timeout_s, what)


# --- ends under streams -----------------------------------------------------------------------------------------------

STREAMS = 4
BEGUN = 50
"""Characters of each stream, before something ends."""


class Endable(Protocol):
    """What is told to end."""

    @property
    def grace_s(self) -> float: ...

    def end(self) -> int: ...


@dataclass(frozen=True)
class Drained:
    """How it ended while streams ran; ``code`` is -9 if it was killed when the grace period was over."""

    code: int
    seconds: float
    grace_s: float
    texts: list[str]
    """Of the streams; of one that broke off also why."""


def drain(front: Front, streams: int, chosen: Callable[[], Endable]) -> Drained:
    """``chosen``: what is ended, once the streams have begun."""
    with front.streams(streams) as asked:
        for stream in asked:
            stream.read(BEGUN)
        ending, began = chosen(), time.monotonic()
        code = ending.end()
        seconds = time.monotonic() - began
        return Drained(code, seconds, ending.grace_s, [_rest(stream) for stream in asked])


def _rest(stream: Stream) -> str:
    try:
        return stream.read()
    except (AssertionError, httpx.TransportError) as error:
        return f"{stream.text} ... {error!r}"


def whole_answer() -> str:
    """What one host answers."""
    with PenstockServer(["--aggregated"]) as server:
        return ask(server, max_tokens=TOKENS)


# --- pods -------------------------------------------------------------------------------------------------------------


class Pod:
    """A pod of a template, run as the kubelet does: init containers, probes, preStop, SIGTERM, grace period."""

    def __init__(
        self,
        there: Place,
        documents: Sequence[dict[str, Any]],
        template: dict[str, Any],
        name: str,
        number: int,
        **env: str,
    ) -> None:
        self.spec = template["spec"]
        self.address = f"{NETWORK}.{number}"
        self.member = template["metadata"]["labels"].get("penstock-member") == "true"
        self._there = there
        self._documents = documents
        self._container = self.spec["containers"][0]
        volumes = {volume["name"]: self._volume(volume, name) for volume in self.spec["volumes"]}
        known = {"metadata.name": name, "status.podIP": self.address}
        environ = {one["name"]: self._value(one["valueFrom"], known) for one in self._container.get("env", ())} | env
        (first,) = self.spec["initContainers"]
        self._made(first, f"{name}-init", f"{NETWORK}.{number + 100}", volumes, {}).run_to_end(first["command"])
        self.running = self._made(self._container, name, self.address, volumes, environ)
        args = [re.sub(r"\$\((\w+)\)", lambda found: environ[found[1]], word) for word in self._container["args"]]
        self.running.start(["penstock", *args])  # the image's entry point
        if self.member:
            there.name_addresses(**{self.address: "two-hosts-workers"})

    def _made(
        self, container: dict[str, Any], name: str, address: str, volumes: Any, environ: dict[str, str]
    ) -> Container:
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        mounts |= {"/etc/hosts": self._there.hosts_file}
        made = Container(self._there.host, name, address, mounts=mounts, environ=environ)
        self._there.containers.append(made)
        return made

    def _volume(self, volume: dict[str, Any], pod: str) -> Path:
        folder = self._there.folder(f"{pod}-{volume['name']}")
        if "configMap" in volume:
            (settings,) = [one["data"] for one in self._documents if one["kind"] == "ConfigMap"]
            for name, text in settings.items():
                (folder / name).write_text(text)
        if "secret" in volume:
            assert volume["secret"]["secretName"] == "two-hosts-host-keys"
            data = folder / "..data"  # files of Secrets are links, and belong to root and the group of the pod
            data.mkdir()
            for key in self._there.keys.iterdir():
                (data / key.name).write_bytes(key.read_bytes())
                (data / key.name).chmod(volume["secret"]["defaultMode"])
                if os.geteuid() == 0:
                    os.chown(data / key.name, 0, self.spec["securityContext"]["fsGroup"])
                (folder / key.name).symlink_to(f"..data/{key.name}")
        return folder

    @staticmethod
    def _value(source: dict[str, Any], known: dict[str, str]) -> str:
        if "fieldRef" in source:
            return known[source["fieldRef"]["fieldPath"]]
        assert source["secretKeyRef"] == {"name": "two-hosts-api-key", "key": "api-key"}
        return KEY

    def probe(self, which: str) -> str | None:
        """Why the probe fails."""
        probe = self._container[which]
        timeout_s = probe.get("timeoutSeconds", 1)
        if "exec" in probe:
            try:
                done = self.running.execute(probe["exec"]["command"], timeout_s)
            except subprocess.TimeoutExpired:
                return "it took too long"
            return None if done.returncode == 0 else done.stdout + done.stderr
        port = {one["name"]: one["containerPort"] for one in self._container["ports"]}[probe["httpGet"]["port"]]
        with ExitStack() as stack:
            client = stack.enter_context(httpx.Client(timeout=timeout_s, trust_env=False))
            url = f"http://127.0.0.1:{self._relayed(port)}{probe['httpGet']['path']}"
            try:
                answer = client.get(url, headers={"Host": f"{self.address}:{port}"})
            except httpx.TransportError as error:
                return str(error)
        return None if answer.status_code == 200 else answer.text

    def _relayed(self, port: int) -> int:
        if not hasattr(self, "_relay"):
            self._relay = self._there.host.relay(self.address, port)
        return self._relay

    def front(self) -> Front:
        return Front(f"http://127.0.0.1:{self._relayed(8000)}")

    def wait_ready(self) -> None:
        # A probe is a process: asking all the time would take the processors from what starts.
        wait_for(lambda: READY.search(self.read_log()) is not None, f"{self.running.name} started")
        for which in ("startupProbe", "readinessProbe"):
            wait_for(lambda which=which: self._checked(which), f"{self.running.name}: {which}")

    def _checked(self, which: str) -> bool:
        self.read_log()
        return self.probe(which) is None

    def read_log(self) -> str:
        """While it runs."""
        log = self.running.read_log()
        assert self.running.running, log
        return log

    @property
    def grace_s(self) -> float:
        """From the preStop hook on."""
        return float(self.spec["terminationGracePeriodSeconds"])

    def end(self) -> int:
        """The exit code, as of a pod that is deleted.  It leaves the Service first."""
        began = time.monotonic()
        if self.member:
            self._there.name_addresses(**{self.address: ""})
        hook = self._container.get("lifecycle", {}).get("preStop")
        if hook is not None:
            assert self.running.execute(hook["exec"]["command"], PATIENCE_S).returncode == 0
        return self.running.terminate(self.grace_s - (time.monotonic() - began))


def templates(documents: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of the pods of each Deployment."""
    return {one["metadata"]["name"]: one["spec"]["template"] for one in documents if one["kind"] == "Deployment"}


@dataclass
class Cluster:
    """The pods of ``FLEET``, all ready."""

    there: Place
    documents: Sequence[dict[str, Any]]
    gateway: Pod
    prefill: Pod
    decode: list[Pod]

    @property
    def pods(self) -> list[Pod]:
        return [self.gateway, self.prefill, *self.decode]

    def busy(self, front: Front) -> Pod:
        """A decode pod that has requests."""
        workers = front.workers()
        return next(pod for pod in self.decode if workers[pod.running.name]["running"])


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    with place(folder) as there:
        documents = list(yaml.safe_load_all(printed("kubernetes", there)))
        deployments = {one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == "Deployment"}
        counts = {"two-hosts-gateway": 1, "two-hosts-prefill": 1, "two-hosts-decode": 2}
        assert {name: spec["replicas"] for name, spec in deployments.items()} == counts
        pods = [
            Pod(there, documents, deployments[workload]["template"], f"{workload}-{number}", number)
            for number, workload in enumerate((*counts, "two-hosts-decode"), start=20)
        ]
        for pod in pods:
            pod.wait_ready()
        gateway, prefill, *decode = pods
        yield Cluster(there, documents, gateway, prefill, decode)


# --- units and containers of nodes ------------------------------------------------------------------------------------


@dataclass
class Node:
    """A node's process, and how it is started, stopped and looked at."""

    container: Container
    command: Sequence[str]
    grace_s: float
    healthcheck: Sequence[str] = ()

    def start(self) -> None:
        self.container.start(self.command)

    def end(self) -> int:
        """The exit code."""
        return self.container.terminate(self.grace_s)

    def is_healthy(self) -> bool:
        assert self.container.running, self.container.read_log()
        return self.container.execute(self.healthcheck, PATIENCE_S).returncode == 0


NodesOf = Callable[[Place], Iterator[tuple[str, Node]]]


def units(there: Place) -> Iterator[tuple[str, Node]]:
    """The unit of each node, as systemd runs it."""
    printed("systemd", there, "--executable", "/usr/local/bin/penstock", "--out", str(there.host.folder / "units"))
    for number, node in enumerate("ab"):
        parser = configparser.RawConfigParser(strict=False)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string((there.host.folder / "units" / f"penstock-{node}.service").read_text())
        unit = dict(parser["Service"])
        assert (unit["KillMode"], unit["KillSignal"], unit["Restart"]) == ("mixed", "SIGTERM", "always")
        environ = dict(word.split("=", 1) for word in unit["Environment"].split()) | {"PENSTOCK_API_KEY": KEY}
        mounts = {
            "/tmp": there.folder(f"{node}-tmp"),  # PrivateTmp
            f"/run/{unit['RuntimeDirectory']}": there.folder(f"{node}-run"),
            f"/var/cache/{unit['CacheDirectory']}": there.folder(f"{node}-cache"),
            "/etc/penstock/fleet.toml": there.fleet,
            str(there.keys): there.owned_keys(),
            "/etc/hosts": there.hosts_file,
        }
        container = Container(there.host, node, f"{NETWORK}.{11 + number}", mounts=mounts, environ=environ)
        yield node, Node(container, shlex.split(unit["ExecStart"]), float(unit["TimeoutStopSec"]))


def services(there: Place) -> Iterator[tuple[str, Node]]:
    """The service of each node, as Compose runs it."""
    document = yaml.safe_load(printed("compose", there))
    fleet = there.host.folder / "inside.toml"
    fleet.write_text(document["configs"]["fleet"]["content"].replace("$$", "$"))
    for number, (node, service) in enumerate(document["services"].items()):
        variables = {"${PENSTOCK_API_KEY:?the key of clients}": KEY}
        environ = {name: variables[value] for name, value in service.get("environment", {}).items()}
        (config,) = service["configs"]
        there.owned_keys()
        mounts = dict(map(_volume, service["volumes"]))
        mounts |= {path: there.folder(f"{node}-tmpfs") for path in service["tmpfs"]}
        mounts |= {config["target"]: fleet, "/etc/hosts": there.hosts_file}
        address = f"{NETWORK}.{11 + number}"
        there.name_addresses(**{address: node})
        outer_first = dict(sorted(mounts.items()))  # as Docker mounts them
        container = Container(there.host, node, address, mounts=outer_first, environ=environ)
        kind, *healthcheck = service["healthcheck"]["test"]
        assert kind == "CMD"
        grace_s = float(service["stop_grace_period"].removesuffix("s"))
        yield node, Node(container, ["penstock", *service["command"]], grace_s, healthcheck)


def _volume(volume: str | dict[str, Any]) -> tuple[str, Path]:
    """Where a container has it, and the host's path."""
    if isinstance(volume, str):
        outside, inside, how = volume.split(":")
        assert how == "ro"
        return inside, Path(outside)
    assert not volume["bind"]["create_host_path"]
    return volume["target"], Path(volume["source"])


@dataclass
class Nodes:
    """The nodes of ``FLEET``, ready."""

    nodes: dict[str, Node]
    front: Front

    def is_whole(self) -> bool:
        """Whether the gateway knows all workers as ready."""
        names = {"a-prefill-0", "a-decode-0", "b-decode-0"}
        try:
            return {name for name, row in self.front.workers().items() if row["state"] == "ready"} == names
        except httpx.TransportError:
            assert all(node.container.running for node in self.nodes.values())
            return False

    def drain(self, name: str, streams: int = STREAMS) -> Drained:
        """End this node under streams."""
        return drain(self.front, streams, lambda: self.nodes[name])

    def start_again(self, name: str) -> None:
        """As Restart=always and the next `up` do; until the fleet is whole."""
        self.nodes[name].start()
        wait_for(self.is_whole, "whole again")


def started(there: Place, nodes_of: NodesOf) -> Nodes:
    """They end with ``there``."""
    nodes = dict(nodes_of(there))
    there.containers += [node.container for node in nodes.values()]
    for node in nodes.values():
        node.start()
    front = Front(f"http://127.0.0.1:{there.host.relay(nodes['a'].container.address, 8000)}")
    found = Nodes(nodes, front)
    wait_for(found.is_whole, "whole")
    for node in nodes.values():
        if node.healthcheck:
            wait_for(node.is_healthy, "healthy")
    return found
