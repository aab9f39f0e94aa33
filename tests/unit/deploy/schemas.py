"""The fleet file that is made into manifests, and what they must be valid by, strictly."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

HERE = Path(__file__).parent
FLEET = HERE / "fleet.toml"
KUBERNETES = "1.37"
SOURCES = {
    "LeaderWorkerSet": "leaderworkerset.json",
    "ScaledObject": "scaledobject.json",
    "HTTPRoute": "httproute.json",
    "InferencePool": "inferencepool.json",
}

TLS_SETTINGS = 'drain_s = 60.0 }\ntls_cert = "/c"\ntls_key = "/k"\n\n[kubernetes]\nhttp_gateway = "edge"'
STAGES = '{ role = "decode", count = 2, group = "tp2" }]'
GROUP_FLEET = FLEET.read_text().replace(STAGES, STAGES[:-1] + ', { role = "both", count = 2, group = "tp2,pp2" }]')
POOL = '[kubernetes]\nhttp_gateway = "edge/public"\npicker = { replicas = 3, failure_mode = "FailClose" }'


def validate(document: dict[str, Any]) -> None:
    """Strictly: a field that is not known is an error.  By the cluster's own schemas, or the published ones of CRDs."""
    source = SOURCES.get(document["kind"])
    if source is None:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    jsonschema.validate(document["spec"], published(source))
    for template in ("leaderTemplate", "workerTemplate") if document["kind"] == "LeaderWorkerSet" else ():
        pod = document["spec"]["leaderWorkerTemplate"][template]
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **pod}, KUBERNETES, strict=True)


def schema_error(document: dict[str, Any]) -> str:
    """What ``validate`` finds; empty: nothing."""
    try:
        validate(document)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        return f"{document['kind']}: {error.message}"
    return ""


def compose_error(document: dict[str, Any]) -> str:
    """What the schema of Compose files finds; empty: nothing."""
    try:
        jsonschema.validate(document, published("compose.json"))
    except jsonschema.ValidationError as error:
        return error.message
    return ""


def published(name: str) -> dict[str, Any]:
    return json.loads((HERE / "published" / name).read_text())["schema"]


def unit_findings(analyze: str, folder: Path) -> str:
    """What this systemd-analyze finds in the units of a folder; empty: nothing."""
    units = sorted(map(str, folder.glob("*.service")))
    run = subprocess.run([analyze, "verify", *units], capture_output=True, text=True, check=False)
    return run.stderr or (f"exit code {run.returncode}" if run.returncode else "")
