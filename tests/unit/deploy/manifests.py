"""Reading the deployment's manifests, and checking them against the schemas of clusters."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from kubernetes_validate import utils

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "rsrv"
BUNDLES = {"persistentVolumeClaim": {"claimName": "bundles", "readOnly": True}}
#: The oldest version that Chart.yaml allows, and the newest version in the package of schemas.
KUBERNETES = ("1.25", "1.37")

Manifest = dict[str, Any]

#: Schemas of kinds that operators define, because no package has them. They have the required fields and the fields that the chart
#: uses, as in the custom resource definitions of prometheus-operator 0.8x, KEDA 2.18 and KServe 0.16.
_TEXT: Manifest = {"type": "string", "minLength": 1}
_LABELS: Manifest = {"type": "object", "additionalProperties": {"type": "string"}}


def _closed(required: list[str], properties: Manifest) -> Manifest:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


_RELABELING = _closed(
    ["sourceLabels", "regex", "action"],
    {
        "sourceLabels": {"type": "array", "items": _TEXT},
        "regex": _TEXT,
        "action": {"enum": ["drop", "keep"]},
    },
)
_RULE = _closed(
    ["alert", "expr"],
    {
        "alert": _TEXT,
        "expr": _TEXT,
        "for": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
        "labels": _LABELS,
        "annotations": _LABELS,
    },
)
_TRIGGER = _closed(
    ["type", "metadata"],
    {
        "type": {"const": "prometheus"},
        "name": _TEXT,
        "metricType": {"enum": ["Value", "AverageValue"]},
        "metadata": {**_LABELS, "required": ["serverAddress", "query", "threshold"]},
    },
)
OPERATORS: dict[tuple[str, str], Manifest] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): _closed(
        ["selector", "podMetricsEndpoints"],
        {
            "selector": _closed(["matchLabels"], {"matchLabels": _LABELS}),
            "podTargetLabels": {"type": "array", "items": _TEXT},
            "podMetricsEndpoints": {
                "type": "array",
                "minItems": 1,
                "items": _closed(
                    ["port"],
                    {
                        "port": _TEXT,
                        "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
                        "metricRelabelings": {"type": "array", "items": _RELABELING},
                    },
                ),
            },
        },
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _closed(
        ["groups"],
        {
            "groups": {
                "type": "array",
                "items": _closed(
                    ["name", "rules"],
                    {"name": _TEXT, "rules": {"type": "array", "minItems": 1, "items": _RULE}},
                ),
            }
        },
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): _closed(
        ["scaleTargetRef", "triggers"],
        {
            "scaleTargetRef": _closed(["name"], {"name": _TEXT}),
            "minReplicaCount": {"type": "integer", "minimum": 1},
            "maxReplicaCount": {"type": "integer", "minimum": 1},
            "fallback": _closed(
                ["failureThreshold", "replicas"],
                {
                    "failureThreshold": {"type": "integer"},
                    "replicas": {"type": "integer"},
                    "behavior": {"enum": ["static", "currentReplicas", "currentReplicasIfHigher"]},
                },
            ),
            "advanced": _closed(
                ["horizontalPodAutoscalerConfig"],
                {"horizontalPodAutoscalerConfig": _closed(["behavior"], {"behavior": {"type": "object"}})},
            ),
            "triggers": {"type": "array", "minItems": 1, "items": _TRIGGER},
        },
    ),
    ("serving.kserve.io/v1alpha1", "ClusterServingRuntime"): _closed(
        ["supportedModelFormats", "containers"],
        {
            "supportedModelFormats": {
                "type": "array",
                "minItems": 1,
                "items": _closed(
                    ["name"], {"name": _TEXT, "version": _TEXT, "autoSelect": {"type": "boolean"}}
                ),
            },
            "annotations": _LABELS,
            "protocolVersions": {"type": "array", "items": {"enum": ["v1", "v2", "grpc-v2"]}},
            "containers": {"type": "array", "minItems": 1, "items": {"type": "object"}},
            "volumes": {"type": "array", "items": {"type": "object"}},
        },
    ),
    ("serving.kserve.io/v1beta1", "InferenceService"): _closed(
        ["predictor"],
        {
            "predictor": {
                "type": "object",
                "required": ["model"],
                "properties": {
                    "model": _closed(
                        ["modelFormat", "storageUri"],
                        {
                            "modelFormat": _closed(["name"], {"name": _TEXT}),
                            "protocolVersion": {"enum": ["v2", "grpc-v2"]},
                            "runtime": _TEXT,
                            "storageUri": _TEXT,
                            "resources": {"type": "object"},
                        },
                    )
                },
            }
        },
    ),
}


# Without a cache, the package would parse megabytes of schemas for each manifest.
utils.schema_contents = cache(utils.schema_contents)


def read(text: str) -> list[Manifest]:
    """Return all documents of a text. They are read as YAML 1.1, as Kubernetes does: 0440 is octal."""
    return deepcopy(_documents(text))


@cache
def _documents(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document is not None]


class ChartError(Exception):
    """The chart refuses the values."""


def render(values: Mapping[str, Any] | None = None, *, release: str = "demo") -> list[Manifest]:
    """Return the manifests that `helm install` would create with these values. By default, there are bundles, and four GPUs per pod.

    Raises ChartError.
    """
    files = _files(values, release)
    return [each for name, text in files.items() if name.endswith(".yaml") for each in read(text)]


def notes(values: Mapping[str, Any] | None = None) -> str:
    """Return the notes that `helm install` prints."""
    (text,) = [text for name, text in _files(values, "demo").items() if name.endswith("NOTES.txt")]
    return text


def _files(values: Mapping[str, Any] | None, release: str) -> Mapping[str, str]:
    values = values or {}
    chosen = {"bundles": {"volume": BUNDLES}, **values, "gpu": {"perPod": 4, **values.get("gpu", {})}}
    request = {"do": "render", "chart": str(CHART), "values": chosen, "release": release}
    files: Mapping[str, str] = _helm(json.dumps(request))
    return files


def lint() -> Any:
    """Return the messages of `helm lint`."""
    return _helm(json.dumps({"do": "lint", "chart": str(CHART)}))


@cache
def _helm(request: str) -> Any:
    engine = _engine()
    assert engine.stdin is not None
    assert engine.stdout is not None
    print(request, file=engine.stdin, flush=True)
    reply = json.loads(engine.stdout.readline())
    if "error" in reply:
        raise ChartError(reply["error"])
    return reply["answer"]


@cache
def _engine() -> subprocess.Popen[str]:
    helm = Path(__file__).with_name("helm.py")
    process = subprocess.Popen(
        [sys.executable, helm], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    # The process ends at the end of its input.
    atexit.register(process.communicate)
    return process


def one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (manifest,) = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name]
    return manifest


def check(manifest: Manifest) -> None:
    """Raise an error if a cluster would refuse the manifest."""
    key = manifest["apiVersion"], manifest["kind"]
    if key in OPERATORS:
        assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
        jsonschema.validate(manifest["spec"], OPERATORS[key])
        return
    for version in KUBERNETES:
        kubernetes_validate.validate(manifest, version, strict=True)
