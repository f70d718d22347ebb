"""KServe: the runtime and the example agree, and clusters accept their pods."""

from __future__ import annotations

from typing import Any

import pytest

from rsrv.cli.main import parser
from rsrv.settings import load_settings
from tests.unit.deploy.manifests import ROOT, Manifest, check, read


def manifest(name: str) -> Manifest:
    (document,) = read((ROOT / "deploy" / "kserve" / f"{name}.yaml").read_text())
    return document


@pytest.mark.parametrize("name", ["clusterservingruntime", "inferenceservice"])
def test_it_has_the_fields_of_its_kind(name: str) -> None:
    """Both resources have the required fields of KServe's kinds and no unknown fields."""
    check(manifest(name))


def test_the_two_make_a_pod() -> None:
    """The pod that KServe makes from the runtime and the service fits every supported Kubernetes."""
    runtime, predictor = (
        manifest("clusterservingruntime")["spec"],
        manifest("inferenceservice")["spec"]["predictor"],
    )
    own = {k: v for k, v in predictor.items() if k not in ("model", "minReplicas", "maxReplicas")}
    pod: dict[str, Any] = {"containers": runtime["containers"], "volumes": runtime["volumes"], **own}
    check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "examples"}, "spec": pod})
    mounted = {m["name"] for m in runtime["containers"][0]["volumeMounts"]}
    assert mounted == {v["name"] for v in runtime["volumes"]}


def test_the_service_is_for_the_runtime() -> None:
    """The example names the runtime, and a format and a protocol that the runtime supports."""
    runtime, model = (
        manifest("clusterservingruntime"),
        manifest("inferenceservice")["spec"]["predictor"]["model"],
    )
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in [f["name"] for f in runtime["spec"]["supportedModelFormats"]]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]


def test_ports_are_those_that_kserve_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The container listens on KServe's ports: 8080 for HTTP and probes, 9000 for gRPC, and the annotated port for Prometheus."""
    spec = manifest("clusterservingruntime")["spec"]
    (container,) = spec["containers"]
    for each in container["env"]:
        monkeypatch.setenv(each["name"], each["value"])
    options = parser().parse(container["args"][1:])
    assert (options.http_port, options.grpc_port, str(options.log)) == (8080, 9000, "-")
    assert options.host == "0.0.0.0"
    port = spec["annotations"]["prometheus.kserve.io/port"]
    assert load_settings().metrics.listen == f"0.0.0.0:{port}"
    # KServe sends requests of all protocols to the container's one port.
    assert [port["containerPort"] for port in container["ports"]] == [8080]
    assert spec["protocolVersions"] == ["v2"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == 8080
    assert container["name"] == "kserve-container"
