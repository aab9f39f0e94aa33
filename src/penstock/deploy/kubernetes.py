"""A fleet in Kubernetes: one list of documents, in the order in which they are applied.

::

    clients --> Service --> gateways (Deployment, PDB, HPA)
                               |  members: all addresses of the headless Service
                               v
    headless Service --> workers: a Deployment a kind, a LeaderWorkerSet where stages are in pods of their own
                                  PDB, KEDA's ScaledObject on predicted seconds of queueing

Kubernetes places and replaces pods; requests and KV pages never pass through it.  Pods that Deployments make have new
names, so one that is lost with its host is replaced without anybody confirming that the host is gone.  Knows no
cluster: ``kubectl apply`` is the reader's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from penstock.api.key_permissions import ROUTE_PATHS, UNRESTRICTED_PATHS
from penstock.config.fleet_file import KubernetesOptions
from penstock.deploy.inference_pool import TLS_SECRET, picker_documents, pool_reference
from penstock.deploy.pods import (
    HTTP_PORT,
    PAGES_PORT,
    TLS,
    WORKER_PORT,
    Document,
    PodFactory,
)
from penstock.deploy.settings_file import number_text
from penstock.deploy.workloads import FleetWorkloads, Workload
from penstock.errors import ConfigError
from penstock.types import Role

KNOWN_S = 35
"""For how long a worker's pod must be ready before the next one is replaced: gateways hear of it from DNS, which caches
answers for up to 30 s."""

SCALE_DOWN_S = 300
"""A lower number of pods must have been enough for so long."""

LWS = "leaderworkerset.x-k8s.io/v1"
KEDA = "keda.sh/v1alpha1"
GATEWAY_API = "gateway.networking.k8s.io/v1"

ROUTED_PATHS = tuple(path for path in (*chain(*ROUTE_PATHS.values()), *UNRESTRICTED_PATHS) if path.startswith("/v1/"))
"""Those of clients, with what is below them.  Not all of /v1 but two: a Gateway may compare ``/v1/%6Coad_lora_adapter``
as it is written, and Penstock decodes it."""


def kubernetes_documents(
    fleet: FleetWorkloads, options: KubernetesOptions, *, image: str, namespace: str | None = None
) -> list[Document]:
    """All documents.  Raises ConfigError for what a pod cannot have."""
    pods = PodFactory(fleet=fleet, options=options, image=image)
    gateways = pods.prepared(fleet.gateways)
    workers = [pods.prepared(workload) for workload in fleet.workers]
    _check_scaling(fleet, options)
    found = [_settings(pods, [gateways, *workers]), *_services(pods, gateways)]
    found += [_deployment(pods, gateways), _disruption_budget(pods, gateways)]
    for workload in workers:
        make = _leader_worker_set if workload.hosts > 1 else _deployment
        found += [make(pods, workload), _disruption_budget(pods, workload)]
    found += [*_scalers(pods, gateways, workers), *_network_policies(pods), *_routes(pods, gateways)]
    if options.picker is not None:
        found += picker_documents(pods, gateways, options.picker)
    if namespace is not None:
        for document in found:
            document["metadata"] = {"name": document["metadata"]["name"], "namespace": namespace} | document["metadata"]
    return found


def needed_secrets(fleet: FleetWorkloads, options: KubernetesOptions, image: str) -> Iterator[tuple[str, str]]:
    """The name of each Secret that must exist, and the options of ``kubectl create secret`` that make it."""
    pods = PodFactory(fleet=fleet, options=options, image=image)
    makes = {
        "host-keys": "generic {} --from-file=host-keys/",
        "api-keys": "generic {} --from-file=api-keys=API_KEYS_FILE",
        "tls": "tls {} --cert=CERTIFICATE.pem --key=KEY.pem",
        "kv-key": "generic {} --from-file=kv-key=KEY_FILE",
        "api-key": "generic {} --from-literal=api-key=KEY",
        TLS_SECRET: "tls {} --cert=CERTIFICATE.pem --key=KEY.pem",
    }
    needed = dict.fromkeys(secret for workload in fleet.all for secret in pods.secrets(workload))
    picker = [TLS_SECRET] if options.picker is not None and options.picker.tls else []
    for secret in [*needed, *([] if "api-keys" in needed else ["api-key"]), *picker]:
        name = pods.secret_name(secret)
        yield name, makes[secret].format(name)


def _document(pods: PodFactory, kind: str, version: str, name: str, component: str = "") -> Document:
    meta: Document = {"name": name, "labels": pods.labels(component)}
    return {"apiVersion": version, "kind": kind, "metadata": meta}


def _settings(pods: PodFactory, workloads: list[Workload]) -> Document:
    files = {f"{workload.name}.toml": workload.config_toml for workload in workloads}
    return _document(pods, "ConfigMap", "v1", f"{pods.fleet.name}-settings") | {"data": files}


def _services(pods: PodFactory, gateways: Workload) -> Iterator[Document]:
    name = pods.fleet.name
    port: Document = {"name": "http", "port": 443 if TLS in pods.secrets(gateways) else 80, "targetPort": "http"}
    selector = pods.labels(gateways.component)
    yield _document(pods, "Service", "v1", name) | {"spec": {"selector": selector, "ports": [port]}}
    # All pods that exist, ready or not: whether a worker lives is judged by heartbeats, and one that is late with a
    # probe must not lose its requests for that.
    spec: Document = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": pods.labels() | {"penstock-member": "true"},
        "ports": [{"name": "worker", "port": WORKER_PORT, "targetPort": "worker"}],
    }
    yield _document(pods, "Service", "v1", f"{name}-workers") | {"spec": spec}


def _deployment(pods: PodFactory, workload: Workload) -> Document:
    """A single pod is replaced after the new one is there, so that its requests have a worker to move to."""
    single = _least(pods, workload) == 1 or workload.group is None
    update: Document = {"maxSurge": 1, "maxUnavailable": 0} if single else {"maxSurge": 0, "maxUnavailable": 1}
    spec: Document = {
        "replicas": workload.count,
        "minReadySeconds": 0 if workload.group is None else KNOWN_S,
        "progressDeadlineSeconds": 3600,
        "selector": {"matchLabels": {"penstock-workload": workload.name}},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": update},
        "template": pods.template(workload),
    }
    if _is_scaled(pods, workload):
        del spec["replicas"]  # an apply must not undo what the autoscaler has decided
    return _document(pods, "Deployment", "apps/v1", workload.name, workload.component) | {"spec": spec}


def _leader_worker_set(pods: PodFactory, workload: Workload) -> Document:
    """A group is one worker: when a pod of it is replaced, all are.

    Not before all have started once, since images and weights may take long to come (lws#725).
    """
    spec: Document = {
        "replicas": workload.count,
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 1 if _least(pods, workload) == 1 else 0},
        },
        "leaderWorkerTemplate": {
            "size": workload.hosts,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": pods.template(workload),
            "workerTemplate": pods.template(workload, machine=1),
        },
    }
    if _is_scaled(pods, workload):
        del spec["replicas"]
    document = _document(pods, "LeaderWorkerSet", LWS, workload.name, workload.component)
    document["metadata"]["annotations"] = {
        "leaderworkerset.sigs.k8s.io/experimental-recreate-group-after-start": "true"
    }
    return document | {"spec": spec}


def _disruption_budget(pods: PodFactory, workload: Workload) -> Document:
    selector = {"matchLabels": {"penstock-workload": workload.name}}
    spec: Document = {"maxUnavailable": 1, "selector": selector}
    return _document(pods, "PodDisruptionBudget", "policy/v1", workload.name, workload.component) | {"spec": spec}


def _is_scaled(pods: PodFactory, workload: Workload) -> bool:
    return workload.component in pods.options.autoscale


def _least(pods: PodFactory, workload: Workload) -> int:
    """How many there may be at a time when nothing is wrong."""
    scaled = pods.options.autoscale
    return next((wanted.min for kind, wanted in scaled.items() if kind == workload.component), workload.count)


def _check_scaling(fleet: FleetWorkloads, options: KubernetesOptions) -> None:
    components = [workload.component for workload in fleet.all]
    for kind, wanted in options.autoscale.items():
        where = f"[kubernetes.autoscale] {kind}"
        if kind not in components:
            raise ConfigError(f"{where}: the fleet has none; it has {', '.join(dict.fromkeys(components))}")
        if components.count(kind) > 1:
            raise ConfigError(f"{where}: the fleet has several kinds of {kind} workers, which have one wait together")
        if wanted.max < wanted.min:
            raise ConfigError(f"{where}: max = {wanted.max} is less than min = {wanted.min}")
        if kind != fleet.gateways.component and options.prometheus is None:
            raise ConfigError(f"{where}: KEDA asks Prometheus for the wait: add prometheus = URL to [kubernetes]")


def _scalers(pods: PodFactory, gateways: Workload, workers: list[Workload]) -> Iterator[Document]:
    for workload in (gateways, *workers):
        for kind, wanted in pods.options.autoscale.items():
            if kind != workload.component:
                continue
            many = workload.hosts > 1
            target: Document = {
                "apiVersion": LWS if many else "apps/v1",
                "kind": "LeaderWorkerSet" if many else "Deployment",
                "name": workload.name,
            }
            down = {"scaleDown": {"stabilizationWindowSeconds": SCALE_DOWN_S}}
            if workload.group is None:
                usage = {"type": "Utilization", "averageUtilization": wanted.cpu_percent}
                spec: Document = {
                    "scaleTargetRef": target,
                    "minReplicas": wanted.min,
                    "maxReplicas": wanted.max,
                    "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": usage}}],
                    "behavior": down,
                }
                yield _document(pods, "HorizontalPodAutoscaler", "autoscaling/v2", workload.name) | {"spec": spec}
                continue
            spec = {
                "scaleTargetRef": target,
                "minReplicaCount": wanted.min,
                "maxReplicaCount": wanted.max,
                "advanced": {"horizontalPodAutoscalerConfig": {"behavior": down}},
                "triggers": [_wait_trigger(pods, workload, wanted.wait_s)],
            }
            yield _document(pods, "ScaledObject", KEDA, workload.name, workload.component) | {"spec": spec}


def _wait_trigger(pods: PodFactory, workload: Workload, wait_s: float) -> Document:
    """The wait that the gateways predict, which does not depend on how many pods there are: so a value, no average."""
    query = f'max(penstock:predicted_queue_seconds{{pod=~"{pods.fleet.gateways.name}-.+",role="{workload.component}"}})'
    return {
        "type": "prometheus",
        "metricType": "Value",
        "metadata": {
            "serverAddress": pods.options.prometheus,
            "query": query,
            "threshold": number_text(wait_s),
            "ignoreNullValues": "false",  # no figure is no reason for fewer pods
        },
    }


def _routes(pods: PodFactory, gateways: Workload) -> Iterator[Document]:
    """From a Gateway to the Service, or to the InferencePool if there is one.

    What is for operators and probes stays within the cluster: the one key of PENSTOCK_API_KEY would open it.
    """
    if pods.options.http_gateway is None:
        return
    if TLS in pods.secrets(gateways):
        raise ConfigError("[kubernetes] http_gateway: the Gateway ends TLS, so leave out tls_cert and tls_key")
    namespace, _, name = pods.options.http_gateway.rpartition("/")
    rule: Document = {
        "matches": [{"path": {"type": "PathPrefix", "value": path}} for path in ROUTED_PATHS],
        "backendRefs": [pool_reference(pods) if pods.options.picker else {"name": pods.fleet.name, "port": 80}],
        "timeouts": {"request": "0s"},  # none: a stream takes as long as it takes
    }
    spec: Document = {"parentRefs": [{"name": name} | ({"namespace": namespace} if namespace else {})], "rules": [rule]}
    if pods.options.hostnames:
        spec["hostnames"] = list(pods.options.hostnames)
    yield _document(pods, "HTTPRoute", GATEWAY_API, pods.fleet.name) | {"spec": spec}


def _network_policies(pods: PodFactory) -> Iterator[Document]:
    name, roles = pods.fleet.name, [role.value for role in Role]
    component = {"key": "app.kubernetes.io/component", "operator": "In", "values": roles}
    gateway = pods.labels(pods.fleet.gateways.component)
    front: Document = {
        "podSelector": {"matchLabels": gateway},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": HTTP_PORT, "protocol": "TCP"}]}],
    }
    yield _document(pods, "NetworkPolicy", "networking.k8s.io/v1", f"{name}-gateway") | {"spec": front}
    ports = [{"port": port, "protocol": "TCP"} for port in (WORKER_PORT, PAGES_PORT)]
    workers: Document = {
        "podSelector": {"matchLabels": pods.labels(), "matchExpressions": [component]},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": {"matchLabels": gateway}}], "ports": ports[:1]},
            # Ranks of one worker choose ports among themselves.
            {"from": [{"podSelector": {"matchLabels": pods.labels(), "matchExpressions": [component]}}]},
        ],
    }
    yield _document(pods, "NetworkPolicy", "networking.k8s.io/v1", f"{name}-workers") | {"spec": workers}
