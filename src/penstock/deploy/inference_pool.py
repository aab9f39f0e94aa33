"""A fleet's gateways as an InferencePool of the Gateway API Inference Extension, with Penstock's endpoint picker.

::

    HTTPRoute --> InferencePool (all gateway pods) --asks--> Service --> pickers (Deployment, PDB)
                                                                           |  members: a headless Service
                                                                           v
                                                                         gateways

Each picker chooses alike, so there are several and none leads.  Knows no cluster.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.config.fleet_file import PickerOptions
from penstock.deploy.pods import HTTP_PORT, LEAVE_S, SHARED_FILE_MODE, Document, PodFactory, locked_down, pod_frame
from penstock.deploy.workloads import Workload
from penstock.errors import ConfigError

INFERENCE = "inference.networking.k8s.io"
PICKER = "picker"
PICKER_PORT = 9002
HEALTH_PORT = 9003
METRICS_PORT = 9090

TLS_SECRET = "picker-tls"  # noqa: S105 - its name
TLS_FOLDER = "/tls"

STOP_S = 15
"""After a picker has left the Service, for open streams and the process to end."""


def picker_documents(pods: PodFactory, gateways: Workload, options: PickerOptions) -> Iterator[Document]:
    """The pool, the picker, and what leads to either.  Raises ConfigError without a Gateway, which asks the picker."""
    if pods.options.http_gateway is None:
        raise ConfigError("[kubernetes] picker: an InferencePool belongs to a Gateway: add http_gateway = NAME")
    name, selector = pods.fleet.name, pods.labels(gateways.component)
    picker = f"{name}-{PICKER}"
    pool: Document = {
        "selector": {"matchLabels": selector},
        "targetPorts": [{"number": HTTP_PORT}],
        "endpointPickerRef": {"name": picker, "port": {"number": PICKER_PORT}, "failureMode": options.failure_mode},
    }
    yield _document(pods, "InferencePool", f"{INFERENCE}/v1", name) | {"spec": pool}
    # All gateways that exist: the picker asks each whether it is ready.
    members: Document = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector,
        "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": "http"}],
    }
    yield _document(pods, "Service", "v1", f"{name}-gateways") | {"spec": members}
    service: Document = {
        "selector": pods.labels(PICKER),
        "ports": [
            {"name": "grpc", "port": PICKER_PORT, "targetPort": "grpc", "appProtocol": "kubernetes.io/h2c"},
        ],
    }
    if options.tls:
        del service["ports"][0]["appProtocol"]  # h2c is HTTP/2 in clear
    yield _document(pods, "Service", "v1", picker) | {"spec": service}
    chosen = {"matchLabels": {"penstock-workload": picker}}
    deployment: Document = {
        "replicas": options.replicas,
        "selector": chosen,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": _template(pods, picker, options),
    }
    yield _document(pods, "Deployment", "apps/v1", picker) | {"spec": deployment}
    budget: Document = {"maxUnavailable": 1, "selector": chosen}
    yield _document(pods, "PodDisruptionBudget", "policy/v1", picker) | {"spec": budget}
    policy: Document = {
        "podSelector": {"matchLabels": pods.labels(PICKER)},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": p, "protocol": "TCP"} for p in (PICKER_PORT, HEALTH_PORT, METRICS_PORT)]}],
    }
    yield _document(pods, "NetworkPolicy", "networking.k8s.io/v1", picker) | {"spec": policy}


def pool_reference(pods: PodFactory) -> Document:
    """The pool as a backend of an HTTPRoute."""
    return {"group": INFERENCE, "kind": "InferencePool", "name": pods.fleet.name}


def _document(pods: PodFactory, kind: str, version: str, name: str) -> Document:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": pods.labels(PICKER)}}


def _template(pods: PodFactory, picker: str, options: PickerOptions) -> Document:
    files = ["--tls-cert", f"{TLS_FOLDER}/tls.crt", "--tls-key", f"{TLS_FOLDER}/tls.key"]
    members = f"dns:{pods.fleet.name}-gateways:{HTTP_PORT}"
    where = ["--members", members, "--listen", f"tcp://0.0.0.0:{PICKER_PORT}"]
    ports = {"grpc": PICKER_PORT, "health": HEALTH_PORT, "metrics": METRICS_PORT}
    container: Document = {
        "name": "penstock",
        "image": pods.image,
        "args": [PICKER, *where, *(files if options.tls else ["--plaintext"])],
        "resources": {"requests": {"cpu": options.cpu, "memory": options.memory}, "limits": {"memory": options.memory}},
        "securityContext": locked_down(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108 - a volume of the pod
        "ports": [{"name": port, "containerPort": number} for port, number in ports.items()],
        "startupProbe": _probe("readiness") | {"periodSeconds": 1, "failureThreshold": 120},
        "readinessProbe": _probe("readiness") | {"periodSeconds": 5, "failureThreshold": 2},
        "livenessProbe": _probe("liveness") | {"periodSeconds": 10, "failureThreshold": 6},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LEAVE_S)]}}},
    }
    volumes: list[Document] = [{"name": "tmp", "emptyDir": {}}]
    if options.tls:
        container["volumeMounts"].append({"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True})
        secret = {"secretName": pods.secret_name(TLS_SECRET), "defaultMode": SHARED_FILE_MODE}
        volumes.append({"name": "tls", "secret": secret})
    spec = pod_frame(picker, LEAVE_S + STOP_S) | {"containers": [container], "volumes": volumes}
    return {"metadata": {"labels": pods.labels(PICKER) | {"penstock-workload": picker}}, "spec": spec}


def _probe(service: str) -> Document:
    return {"grpc": {"port": HEALTH_PORT, "service": service}, "timeoutSeconds": 5}
