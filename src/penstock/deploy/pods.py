"""The pods of a fleet in Kubernetes: commands, probes, files and limits.  ``kubernetes`` puts them into workloads.

::

    Secrets (keys) --init container copies, mode 0600--> /keys      memory of the pod, since a key that others may
    ConfigMap (settings) -------------------------------> /etc/penstock         read is refused
    claim or host folder (models) ----------------------> its path, read-only
    /tmp                                                  the only other folder that is written

A probe of a worker is ``penstock probe`` in its container, since workers speak no HTTP.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from posixpath import dirname
from typing import Any, TypeAlias

from penstock.config.fleet_file import KubernetesOptions, PodResources
from penstock.deploy.workloads import (
    FleetWorkloads,
    Workload,
    absolute_path,
    is_path,
    read_folders,
    written_folders,
)
from penstock.errors import ConfigError

Document: TypeAlias = dict[str, Any]

HTTP_PORT = 8000
WORKER_PORT = 9000
PAGES_PORT = 9001
MASTER_PORT = 9100
"""Where the first pod of a group listens for the others."""

USER = 10001
"""Of the image (Dockerfile)."""

CONFIG_FOLDER = "/etc/penstock"
KEYS_FOLDER = "/keys"
SECRETS_FOLDER = "/secrets"

LEAVE_S = 5
"""Between leaving the Service and SIGTERM: for proxies to hear of it, so that none sends a request to a closed port."""

GRACE_MARGIN_S = 15
"""After ``drain_s``, for processes to end."""

PROBE_PERIOD_S = 10
PROBE_TIMEOUT_S = 10
"""A probe is a process that connects and asks; on a busy host that takes seconds."""

WORKER_LIVE_FAILURES = 9
"""90 s: the supervisor in the pod replaces a hung process itself after ``busy_s`` (60 s) at the latest."""

STARTUP_FAILURES = 720
STARTUP_PERIOD_S = 5
"""An hour in all.  Not a judgment: the supervisor ends a start that makes no progress (``start_s``)."""

HOST_KEYS = "host-keys"
API_KEYS = "api-keys"
API_KEY = "api-key"
TLS = "tls"
KV_KEY = "kv-key"

AWAY_S = 30
"""For a host that cannot be reached, before its pods are replaced elsewhere."""

SHARED_FILE_MODE = 0o440
"""For the group of the pod's volumes."""


KEY_PLACES = {
    "api_keys": f"{KEYS_FOLDER}/{API_KEYS}/{API_KEYS}",
    "tls_cert": f"{KEYS_FOLDER}/{TLS}/tls.crt",
    "tls_key": f"{KEYS_FOLDER}/{TLS}/tls.key",
    "kv_key": f"{KEYS_FOLDER}/{KV_KEY}/{KV_KEY}",
}
"""Settings that name files with keys, and where a pod has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedResources:
    """What a pod reserves, in quantities of Kubernetes."""

    cpu: str
    memory: str
    gpus: int = 0


OF_GATEWAYS = ReservedResources(cpu="2", memory="4Gi")
OF_WORKERS = ReservedResources(cpu="4", memory="16Gi")
"""Unless the fleet file has others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFactory:
    """Makes the pods of one fleet."""

    fleet: FleetWorkloads
    options: KubernetesOptions
    image: str

    def labels(self, component: str = "") -> dict[str, str]:
        """The labels of all resources of the fleet, or of those of one component."""
        found = {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": self.fleet.name}
        return found | ({"app.kubernetes.io/component": component} if component else {})

    def prepared(self, workload: Workload) -> Workload:
        """The workload with settings as a pod needs them: keys where it has them, and as many threads as processors.

        A pod sees all processors of its host, so without a number its workers would use them all.
        """
        settings: dict[str, Any] = {key: KEY_PLACES.get(key, value) for key, value in workload.settings.items()}
        if workload.group is not None and "threads" not in settings:
            cores = _whole_cores(self.resources(workload).cpu)
            settings["threads"] = max(1, cores // math.ceil(workload.mesh.ranks / workload.hosts))
        return replace(workload, settings=settings)

    def resources(self, workload: Workload) -> ReservedResources:
        """What a pod of it reserves."""
        given = {str(kind): one for kind, one in self.options.resources.items()}
        wanted = given.get(workload.component, PodResources())
        default = OF_GATEWAYS if workload.group is None else OF_WORKERS
        return ReservedResources(
            cpu=wanted.cpu or default.cpu, memory=wanted.memory or default.memory, gpus=wanted.gpus
        )

    def grace_s(self, workload: Workload) -> int:
        """Seconds from the decision to end a pod to SIGKILL."""
        return math.ceil(self.fleet.drain_s) + GRACE_MARGIN_S + (LEAVE_S if workload.group is None else 0)

    def secrets(self, workload: Workload) -> tuple[str, ...]:
        """The Secrets that its pods have as files."""
        needs = {API_KEYS: "api_keys", TLS: "tls_cert", KV_KEY: "kv_key"}
        return (HOST_KEYS, *(secret for secret, key in needs.items() if key in workload.settings))

    def secret_name(self, secret: str) -> str:
        return f"{self.fleet.name}-{secret}"

    def template(self, workload: Workload, machine: int = 0) -> Document:
        """The template of a prepared workload's pods; ``machine``: 0, or 1 for the other pods of each worker."""
        container: Document = {
            "name": "penstock",
            "image": self.image,
            "args": self._args(workload, machine),
            "resources": _quantities(self.resources(workload)),
            "securityContext": locked_down(),
            "volumeMounts": self._mounts(workload),
        }
        extras = {"env": self._environment(workload), "ports": _ports(workload, machine)}
        container |= {key: value for key, value in extras.items() if value}
        if machine == 0:
            container |= self._gateway_probes(workload) if workload.group is None else _worker_probes()
        if workload.group is None:
            container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(LEAVE_S)]}}}
        joined = {"penstock-member": "true"} if workload.group is not None and machine == 0 else {}
        meta = {
            "labels": self.labels(workload.component) | {"penstock-workload": workload.name} | joined,
            "annotations": {"penstock-settings": hashlib.sha256(workload.config_toml.encode()).hexdigest()[:16]},
        }
        return {"metadata": meta, "spec": self._pod(workload, container)}

    def _pod(self, workload: Workload, container: Document) -> Document:
        return pod_frame(workload.name, self.grace_s(workload)) | {
            "initContainers": [self._keys_container(workload)],
            "containers": [container],
            "volumes": self._volumes(workload),
        }

    # --- the command ------------------------------------------------------------------------------------------------

    def _args(self, workload: Workload, machine: int) -> list[str]:
        model = [] if self.fleet.model is None else [self.fleet.model]
        keys = ["--keys", f"{KEYS_FOLDER}/{HOST_KEYS}"]
        config = ["--config", f"{CONFIG_FOLDER}/{workload.name}.toml"]
        if workload.group is None:
            where = ["--host", "0.0.0.0", "--port", str(HTTP_PORT)]  # noqa: S104 - a NetworkPolicy limits who reaches it
            return [
                "serve",
                *model,
                *config,
                *where,
                "--members",
                f"dns:{self.fleet.name}-workers:{WORKER_PORT}",
                *keys,
            ]
        words = ["worker", *model, *config, "--role", workload.component, *keys]
        if workload.mesh.ranks > 1:
            words += ["--parallel", workload.mesh.name]
        if workload.hosts > 1:
            # Other pods reach ranks of the first one at the address that it listens at, so 0.0.0.0 would not do.
            host = "$(POD_IP)" if machine == 0 else "$(LWS_LEADER_ADDRESS)"
            words += ["--nnodes", str(workload.hosts), "--master-addr", f"tcp://{host}:{MASTER_PORT}"]
            words += ["--node-rank", "0" if machine == 0 else "$(LWS_WORKER_INDEX)"]
        if machine == 0:
            words += [
                "--listen",
                f"tcp://0.0.0.0:{WORKER_PORT}",
                "--pages-port",
                str(PAGES_PORT),
                "--name",
                "$(POD_NAME)",
            ]
        return words

    def _environment(self, workload: Workload) -> list[Document]:
        if workload.group is None:
            if API_KEYS in self.secrets(workload):
                return []
            key = {"name": self.secret_name(API_KEY), "key": API_KEY}
            return [{"name": "PENSTOCK_API_KEY", "valueFrom": {"secretKeyRef": key}}]
        fields = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
        return [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]

    def _gateway_probes(self, workload: Workload) -> Document:
        scheme = {"scheme": "HTTPS"} if TLS in self.secrets(workload) else {}

        def get(path: str) -> Document:
            return {"httpGet": {"path": path, "port": "http", **scheme}}

        # Requests without a worker fail after no_path_s; only a gateway that is stuck for longer is at fault itself.
        failures = max(6, math.ceil((self.fleet.no_path_s + 30) / PROBE_PERIOD_S))
        every = {"periodSeconds": PROBE_PERIOD_S, "timeoutSeconds": 5}
        return {
            "startupProbe": get("/version") | {"periodSeconds": 2, "failureThreshold": 150},
            "readinessProbe": get("/ready") | {"periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 2},
            "livenessProbe": get("/health") | every | {"failureThreshold": failures},
        }

    # --- files ------------------------------------------------------------------------------------------------------

    def _keys_container(self, workload: Workload) -> Document:
        copies = [
            f"mkdir -p -m 0700 {KEYS_FOLDER}/{secret} && "
            f"install -m 0600 -t {KEYS_FOLDER}/{secret} {SECRETS_FOLDER}/{secret}/*"
            for secret in self.secrets(workload)
        ]
        mounts: list[Document] = [{"name": "keys", "mountPath": KEYS_FOLDER}]
        mounts += [
            {"name": f"secret-{secret}", "mountPath": f"{SECRETS_FOLDER}/{secret}", "readOnly": True}
            for secret in self.secrets(workload)
        ]
        return {
            "name": "keys",
            "image": self.image,
            "command": ["sh", "-ec", "\n".join(copies) + "\n"],
            "resources": _quantities(ReservedResources(cpu="100m", memory="64Mi")),
            "securityContext": locked_down(),
            "volumeMounts": mounts,
        }

    def _models(self, workload: Workload) -> tuple[str, Document] | None:
        """Where pods have models, and the volume; None: the bundled model, or one of the Hub.

        Raises ConfigError for a model, draft model or adapter that they do not have there.
        """
        model, path = self.fleet.model, self.options.models_path
        if path is None and model is not None and is_path(model):
            path = dirname(absolute_path("model", model, "pods"))
        for folder in read_folders(workload.settings, "pods"):
            if path is None or not PurePosixPath(folder).is_relative_to(path):
                raise ConfigError(
                    f"{folder}: pods have {'no models' if path is None else f'models of {path} only'}; let models_path "
                    "of [kubernetes] name a folder that has all models and adapters"
                )
        if path is None:
            return None
        if self.options.models_claim is not None:
            return path, {"persistentVolumeClaim": {"claimName": self.options.models_claim, "readOnly": True}}
        return path, {"hostPath": {"path": path, "type": "Directory"}}

    def _mounts(self, workload: Workload) -> list[Document]:
        models = self._models(workload)
        found: list[Document] = [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a volume of the pod
            {"name": "settings", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True},
        ]
        if models is not None:
            found.append({"name": "models", "mountPath": models[0], "readOnly": True})
        written = enumerate(written_folders(workload.settings, "pods"))
        return [*found, *({"name": f"written-{number}", "mountPath": path} for number, path in written)]

    def _volumes(self, workload: Workload) -> list[Document]:
        models = self._models(workload)
        found: list[Document] = [
            {"name": "tmp", "emptyDir": {}},
            {"name": "settings", "configMap": {"name": f"{self.fleet.name}-settings"}},
            {"name": "keys", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        ]
        found += [
            {
                "name": f"secret-{secret}",
                "secret": {"secretName": self.secret_name(secret), "defaultMode": SHARED_FILE_MODE},
            }
            for secret in self.secrets(workload)
        ]
        if models is not None:
            found.append({"name": "models", **models[1]})
        written = enumerate(written_folders(workload.settings, "pods"))
        return [*found, *({"name": f"written-{number}", "emptyDir": {}} for number, _ in written)]


def pod_frame(workload: str, grace_s: int) -> Document:
    """What the pods of every workload of this name have around their containers."""
    away = "node.kubernetes.io"
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"penstock-workload": workload}},
            }
        ],
        # Answers go on elsewhere within seconds; a lost host's pods are replaced after half a minute, not five.
        "tolerations": [
            {"key": f"{away}/{what}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": AWAY_S}
            for what in ("not-ready", "unreachable")
        ],
    }


def _ports(workload: Workload, machine: int) -> list[Document]:
    ports = {"http": HTTP_PORT} if workload.group is None else {"worker": WORKER_PORT, "pages": PAGES_PORT}
    if machine:
        ports = {}
    elif workload.hosts > 1:
        ports["master"] = MASTER_PORT
    return [{"name": name, "containerPort": port} for name, port in ports.items()]


def _worker_probes() -> Document:
    def probe(what: str) -> Document:
        command = ["penstock", "probe", what, "--keys", f"{KEYS_FOLDER}/{HOST_KEYS}", f"tcp://127.0.0.1:{WORKER_PORT}"]
        return {"exec": {"command": command}, "timeoutSeconds": PROBE_TIMEOUT_S}

    every = {"periodSeconds": PROBE_PERIOD_S}
    return {
        "startupProbe": probe("--ready") | {"periodSeconds": STARTUP_PERIOD_S, "failureThreshold": STARTUP_FAILURES},
        "readinessProbe": probe("--ready") | every | {"failureThreshold": 3},
        "livenessProbe": probe("--live") | every | {"failureThreshold": WORKER_LIVE_FAILURES},
    }


def _whole_cores(cpu: str) -> int:
    """The processors of a quantity of Kubernetes, as "8", "3.5" or "7500m", rounded down."""
    whole = int(cpu.removesuffix("m").partition(".")[0])
    return whole // 1000 if cpu.endswith("m") else whole


def _quantities(resources: ReservedResources) -> Document:
    """No limit of processors: a throttled worker stands still for the rest of each period."""
    gpus = {"nvidia.com/gpu": resources.gpus} if resources.gpus else {}
    return {
        "requests": {"cpu": resources.cpu, "memory": resources.memory, **gpus},
        "limits": {"memory": resources.memory, **gpus},
    }


def locked_down() -> Document:
    """The security context of every container."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
