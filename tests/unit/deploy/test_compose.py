"""compose.yaml and the files that its containers read are valid, complete and consistent."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
from check_jsonschema.builtin_schemas import get_builtin_schema

from tests.unit.deploy.manifests import ROOT, Manifest, read

DOCKER = ROOT / "docker"


def compose() -> Manifest:
    (document,) = read((DOCKER / "compose.yaml").read_text())
    return document


def services(*profiles: str) -> dict[str, Any]:
    return {
        name: service
        for name, service in compose()["services"].items()
        if not service.get("profiles") or set(service["profiles"]) & set(profiles)
    }


def test_it_is_what_the_specification_says() -> None:
    """compose.yaml fits the schema of the Compose specification."""
    jsonschema.validate(compose(), get_builtin_schema("vendor.compose-spec"))


@pytest.mark.parametrize(("profile", "server"), [("gpu", "rsrv"), ("cpu", "rsrv-cpu")])
def test_a_profile_has_one_server(profile: str, server: str) -> None:
    """Each profile starts one server with Prometheus and Grafana; without a profile there is no server."""
    assert set(services(profile)) == {server, "prometheus", "grafana"}
    assert set(services()) == {"prometheus", "grafana"}


def test_gpus_are_asked_for_only_where_there_are_some() -> None:
    """The GPU server reserves all NVIDIA devices and never serves from the CPU; the CPU server reserves none."""
    (device,) = compose()["services"]["rsrv"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    other = compose()["services"]["rsrv-cpu"]
    assert "deploy" not in other
    platforms = [
        service["environment"]["RSRV_RUNTIME__PLATFORM"] for service in (compose()["services"]["rsrv"], other)
    ]
    assert platforms == ["cuda", "cpu"]


def test_everything_that_is_mounted_is_there() -> None:
    """Mounted files and folders exist, and every named volume is declared and used."""
    document = compose()
    used = set()
    for name, service in document["services"].items():
        for volume in service["volumes"]:
            source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
            if not source.startswith("."):
                used.add(source)
            elif not source.startswith("../build"):  # Built by `make bundles`.
                assert (DOCKER / source).exists(), (name, source)
    assert used == set(document["volumes"])
    for service in services("gpu", "cpu").values():
        if "build" in service:
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_all_ports_are_published_to_this_machine_only() -> None:
    """The ports that the image exposes are published. All ports are published on 127.0.0.1 only, and containers have no capabilities."""
    exposed = re.findall(r"^EXPOSE (.*)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)[-1].split()
    for name in ("rsrv", "rsrv-cpu"):
        published = compose()["services"][name]["ports"]
        assert published == [f"127.0.0.1:{port}:{port}" for port in exposed]
    for service in services("gpu", "cpu").values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_the_servers_have_what_they_need_of_a_container() -> None:
    """Each server's container has shared memory, an init process, time to stop, and writable places."""
    image = (DOCKER / "Dockerfile").read_text()
    for service in (compose()["services"][name] for name in ("rsrv", "rsrv-cpu")):
        assert service["init"] is True
        assert service["shm_size"] == "${RSRV_SHM_SIZE:-1gb}"
        assert service["stop_grace_period"] == "40s"
        assert service["read_only"] is True
        written = {v.split(":")[-1] for v in service["volumes"] if not v.endswith(":ro")}
        assert written == set(re.findall(r'"(/var/[^"]+)"', image[image.index("VOLUME") :]))
        assert service["tmpfs"] == ["/tmp"]


def test_images_of_others_are_pinned() -> None:
    """The images of Prometheus and Grafana have a fixed version."""
    for name, service in services().items():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name


def test_prometheus_asks_the_servers_where_they_are() -> None:
    """Each target of Prometheus is the name of a service with an exposed port. The rules are mounted."""
    (config,) = read((DOCKER / "prometheus.yml").read_text())
    names = {
        a
        for s in services("gpu").values()
        for a in s.get("networks", {}).get("default", {}).get("aliases", [])
    }
    exposed = re.findall(r"^EXPOSE (.*)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)[-1].split()
    targets = [
        t for job in config["scrape_configs"] for each in job["static_configs"] for t in each["targets"]
    ]
    assert sorted(targets) == ["rsrv-server:8002", "rsrv-server:8004"]
    for target in targets:
        name, _, port = target.partition(":")
        assert name in names
        assert port in exposed
    mounted = {v.split(":")[1]: v.split(":")[0] for v in compose()["services"]["prometheus"]["volumes"]}
    (rules,) = config["rule_files"]
    folder, _, pattern = rules.rpartition("/")
    assert [*(DOCKER / mounted[folder]).glob(pattern)]


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    """The provisioned data source is the Prometheus of this file, and the dashboards' folder is mounted."""
    (sources,) = read((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    (source,) = sources["datasources"]
    (port,) = compose()["services"]["prometheus"]["ports"]
    assert source["url"] == f"http://prometheus:{port.rpartition(':')[2]}"
    (boards,) = read((DOCKER / "grafana/provisioning/dashboards/rsrv.yaml").read_text())
    (provider,) = boards["providers"]
    mounted = {v.split(":")[1]: v.split(":")[0] for v in compose()["services"]["grafana"]["volumes"]}
    assert [*(DOCKER / mounted[provider["options"]["path"]]).glob("*.json")]
    assert compose()["services"]["grafana"]["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
