"""The fleet file as values of the Helm chart in ``charts/penstock``, and what of that chart follows from the package.

::

    fleet.toml --helm_values--> values.yaml --Helm, charts/penstock/templates--> what kubernetes_documents makes
                                     |
                 values_schema: FleetFile and the settings of a node, as JSON Schema

The templates do the work of ``workloads``, ``pods`` and ``kubernetes`` once more, in Helm's language; a test renders
both and compares each object.  Pure: values to values.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import msgspec

from penstock.config.fleet_file import FleetFile, PodKind
from penstock.config.load import NODE_OWNED, SECRETS, SIZES, TEXT_LISTS
from penstock.config.schema import ServeConfig
from penstock.deploy.kubernetes import ROUTED_PATHS
from penstock.deploy.workloads import GATEWAY_SETTINGS, WORKER_SETTINGS

Schema = dict[str, Any]

MESH_PATTERN = "^$|^ *(tp[1248]|pp[1-9][0-9]{0,3}) *(, *(tp[1248]|pp[1-9][0-9]{0,3}) *)?$"
SIZE_PATTERN = r"^\s*\d+(\.\d+)?\s*([kmgtKMGT]?[iI]?[bB]?)\s*$"


def helm_values(raw: Mapping[str, Any], *, image: str) -> dict[str, Any]:
    """The values; ``raw``: a fleet file as TOML was read.  Clients' keys are left out: releases keep their values."""
    values = copy.deepcopy(dict(raw))
    for table in (values, *values.get("nodes", ())):
        settings = table.get("settings", {})
        for key in [key for key in settings if key.replace("-", "_") in SECRETS]:
            del settings[key]
    repository, _, tag = image.rpartition(":")
    if not repository or "/" in tag:  # without a tag, or the colon is that of a port
        repository, tag = image, "latest"
    return values | {"image": {"repository": repository, "tag": tag}}


def chart_files() -> dict[str, str]:
    """The text of each file of the chart that follows from the package, by its path in the chart."""
    settings = {"gateway": sorted(GATEWAY_SETTINGS), "worker": sorted(WORKER_SETTINGS)}
    return {
        "values.schema.json": json.dumps(values_schema(), indent=1) + "\n",
        "files/settings.json": json.dumps(settings, indent=1) + "\n",
        "files/paths.json": json.dumps(ROUTED_PATHS, indent=1) + "\n",
    }


def values_schema() -> Schema:
    """What Helm checks values with before it renders anything.  No field is unknown but those of Helm itself."""
    schema = msgspec.json.schema(FleetFile)
    found: Schema = schema["$defs"]
    found |= {name: one for name, one in _settings_schemas() if name not in found}
    for fields in (found["FleetFile"]["properties"], found["FleetNode"]["properties"]):
        fields["settings"] = {"$ref": "#/$defs/Settings"}
    for workers in ("WorkerGroup", "MultiNodeGroup"):
        found[workers]["properties"]["group"]["pattern"] = MESH_PATTERN
    options = found["KubernetesOptions"]["properties"]
    for key in ("resources", "autoscale"):
        options[key]["propertyNames"] = {"enum": list(get_args(PodKind))}
    text = {"type": "string"}
    found["FleetFile"]["properties"] |= {
        "image": {"type": "object", "properties": {"repository": text, "tag": text}, "additionalProperties": False},
        "global": {"type": "object"},  # Helm's, where the chart is a part of another
    }
    return {"title": "Values of the chart of Penstock: a fleet file (docs/fleet.md)"} | schema


def _settings_schemas() -> Iterator[tuple[str, Schema]]:
    """Each table of the settings by its name, and all together as "Settings".  A key may have ``-`` for ``_``."""
    schemas: dict[str, Schema] = msgspec.json.schema(ServeConfig)["$defs"]
    properties: dict[str, Schema] = schemas.pop("ServeConfig")["properties"]
    yield from schemas.items()
    kinds = {key: _as_given(key, kind) for key, kind in properties.items() if key not in NODE_OWNED}
    yield (
        "Settings",
        {
            "type": "object",
            "properties": {key: kind for key, kind in kinds.items() if "_" not in key},
            "patternProperties": {f"^{key.replace('_', '[-_]')}$": kind for key, kind in kinds.items() if "_" in key},
            "additionalProperties": False,
        },
    )


def _as_given(key: str, kind: Schema) -> Schema:
    """A setting as files may have it: sizes also as "2GiB", lists also as text with commas."""
    kind = {name: value for name, value in kind.items() if name != "default"}
    if key in SIZES:
        return {"anyOf": [kind, {"type": "string", "pattern": SIZE_PATTERN}]}
    if key in TEXT_LISTS:
        return {"anyOf": [kind, {"type": "string"}]}
    return kind
