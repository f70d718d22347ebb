"""The Helm chart: clusters accept its manifests, and its parts agree with each other."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import tomllib
from base64 import b64decode
from typing import Any

import promql_parser
import pytest

from rsrv.cli.main import parser
from rsrv.settings import load_settings
from rsrv_bundle import yaml12
from tests.unit.deploy.manifests import (
    CHART,
    ROOT,
    ChartError,
    Manifest,
    check,
    lint,
    notes,
    one,
    read,
    render,
)

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def with_gateway(**values: Any) -> dict[str, Any]:
    """Return values of a release with a gateway. The arguments are values of the gateway."""
    return {"gateway": {"enabled": True, **values}}


GATEWAY = with_gateway()
#: Values without a gateway, the default.
ALONE: dict[str, Any] = {}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cpu": {"gpu": {"perPod": 0}, "tolerations": []},
    "mig": {"gpu": {"perPod": 7, "resource": "nvidia.com/mig-1g.10gb"}},
    "gateway": GATEWAY,
    "picker": with_gateway(picker=True, tls={"secret": "certificate"}),
    "tls-and-token": with_gateway(tls={"secret": "certificate", "clients": True}, tokenSecret="clients"),
    "keda": {"autoscaling": {"kind": "keda"}, "podMonitor": {"enabled": True, "labels": {"team": "a"}}},
    "hpa": {"autoscaling": {"kind": "hpa", "queueWait": 0.25}},
    "alerts-and-dashboards": {
        "prometheusRule": {"enabled": True, "labels": {"release": "monitoring"}},
        "dashboards": {"enabled": True, "annotations": {"grafana_folder": "rsrv"}},
    },
    "bundles-in-an-image": {"bundles": {"volume": {"hostPath": {"path": "/srv"}}, "subPath": "bundles"}},
    "own-secrets": {
        "restrict": {"existingSecret": "mine"},
        **with_gateway(existingSecret="mine-too"),
        "serviceAccount": {"name": "somebody"},
    },
    "cache-kept": {"cache": {"volume": {"persistentVolumeClaim": {"claimName": "cache"}}}},
    "openai": {"openai": {"keysSecret": "keys"}},
    "no-network-policy": {"networkPolicy": {"enabled": False}},
    "everything": {
        **GATEWAY,
        "settings": {"runtime": {"memory_fraction": 0.8}, "models": {"mlp": {"weight": 2.0}}},
        "tritonArguments": ["--log-verbose=1"],
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "imagePullSecrets": [{"name": "registry"}],
        "podLabels": {"a": "b"},
        "podAnnotations": {"c": "d"},
        "nodeSelector": {"gpu": "h100"},
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "service": {"type": "LoadBalancer", "annotations": {"e": "f"}},
        "networkPolicy": {
            "clients": [{"namespaceSelector": {}}],
            "monitoring": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
            "egress": [{"ports": [{"port": 4317}]}],
        },
    },
}


def pods(manifests: list[Manifest]) -> list[Manifest]:
    return [m["spec"]["template"] for m in manifests if m["kind"] == "Deployment"]


def server(manifests: list[Manifest]) -> Manifest:
    spec: Manifest = one(manifests, "Deployment", "demo-rsrv-server")["spec"]["template"]["spec"]
    return spec


def environment(manifests: list[Manifest]) -> dict[str, str]:
    env = server(manifests)["containers"][0]["env"]
    return {each["name"]: each["value"] for each in env if "value" in each}


def command(manifests: list[Manifest]) -> tuple[list[str], list[str]]:
    """Return the command of the servers' container, and the flags that it passes to tritonserver."""
    words = server(manifests)["containers"][0]["args"]
    cut = words.index("--")
    return words[:cut], words[cut + 1 :]


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_is_accepted(values: dict[str, Any]) -> None:
    """With any options, the oldest and the newest Kubernetes accept all manifests, and names are unique."""
    manifests = render(values)
    for manifest in manifests:
        check(manifest)
    names = [(m["kind"], m["metadata"]["name"]) for m in manifests]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_what_is_named_is_there(values: dict[str, Any]) -> None:
    """Selectors find pods. Named ports, mounted volumes, ConfigMaps and Secrets exist."""
    manifests = render(values)
    labels = [pod["metadata"]["labels"] for pod in pods(manifests)]
    made = {(m["kind"], m["metadata"]["name"]) for m in manifests}
    for manifest in manifests:
        selector = manifest.get("spec", {}).get("selector") or manifest.get("spec", {}).get("podSelector")
        if selector:
            match_labels = selector.get("matchLabels", selector)
            matching = [i for i, have in enumerate(labels) if match_labels.items() <= have.items()]
            assert len(matching) == 1, (manifest["kind"], manifest["metadata"]["name"])
            ports = {
                p["name"] for c in pods(manifests)[matching[0]]["spec"]["containers"] for p in c["ports"]
            }
            if manifest["kind"] == "Service":
                assert {p["targetPort"] for p in manifest["spec"]["ports"]} <= ports
            if manifest["kind"] == "PodMonitor":
                assert {p["port"] for p in manifest["spec"]["podMetricsEndpoints"]} <= ports
            if manifest["kind"] == "NetworkPolicy":
                assert {p["port"] for rule in manifest["spec"]["ingress"] for p in rule["ports"]} <= ports
    external = {("Secret", name) for name in ("mine", "mine-too", "certificate", "clients", "keys")}
    external.add(("ServiceAccount", "somebody"))
    for pod in pods(manifests):
        spec = pod["spec"]
        volumes = {v["name"]: v for v in spec["volumes"]}
        for container in spec["containers"]:
            assert {m["name"] for m in container["volumeMounts"]} <= set(volumes)
        named = {("ConfigMap", v["configMap"]["name"]) for v in volumes.values() if "configMap" in v}
        named |= {("Secret", v["secret"]["secretName"]) for v in volumes.values() if "secret" in v}
        named |= {("ServiceAccount", spec["serviceAccountName"])}
        assert named <= made | external


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_no_pod_may_do_more_than_it_must(values: dict[str, Any]) -> None:
    """Every pod runs as uid 1000 with a read-only root, writable places, no capabilities and no token."""
    for pod in pods(render(values)):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsUser"] == 1000
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "/tmp" in {m["mountPath"] for m in container["volumeMounts"]}


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_settings_are_ones_that_rsrv_takes(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """rsrv loads the rendered settings and environment, and they have the content of the values."""
    manifests = render(values)
    for name, value in environment(manifests).items():
        if name.startswith("RSRV_") and name != "RSRV_RESTRICT_KEY":
            monkeypatch.setenv(name, value)
    text = one(manifests, "ConfigMap", "demo-rsrv-server")["data"]["rsrv.yaml"]
    settings = load_settings(text)
    assert settings.metrics.listen == "0.0.0.0:8004"
    words, flags = command(manifests)
    options = parser().parse(words[1:])
    assert [str(path) for path in (*options.bundles, options.config, options.log)] == [
        "/bundles",
        "/etc/rsrv/rsrv.yaml",
        "-",
    ]
    assert (options.drain, options.host) == (30, "0.0.0.0")
    if values is VARIANTS["everything"]:
        assert settings.runtime.memory_fraction == 0.8
        assert flags[-1] == "--log-verbose=1"


def test_the_documented_command_makes_pods_of_the_named_image() -> None:
    """The command on the page sets one image. All pods have it, and the clients' Service selects pods that the image can start."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (line,) = [part for part in page.split("```") if "helm install demo" in part]
    words = shlex.split(line[line.index("helm install") :].replace("\\\n", ""))
    flags = [words[at + 1].split("=", 1) for at, word in enumerate(words) if word == "--set"]
    values: dict[str, Any] = {}
    for key, value in flags:
        *path, last = key.split(".")
        at = values
        for part in path:
            at = at.setdefault(part, {})
        at[last] = int(value) if value.isdecimal() else value
    for chosen in (values, {**values, **GATEWAY}):
        images = {each["image"] for pod in pods(render(chosen)) for each in pod["spec"]["containers"]}
        assert images == {f"registry.example/rsrv:{VERSION}"}
    (selected,) = [
        pod
        for pod in pods(render(values))
        if one(render(values), "Service", "demo-rsrv")["spec"]["selector"].items()
        <= pod["metadata"]["labels"].items()
    ]
    assert selected["spec"]["containers"][0]["name"] == "server"


def test_a_gateway_may_have_a_smaller_image() -> None:
    """A gateway may have its own image. By default, its tag is the servers' tag. The command is the same in both images."""
    for image, expected in (({"repository": "small"}, f"small:{VERSION}"), ({"tag": "2"}, "rsrv:2")):
        manifests = render(with_gateway(image=image))
        container = one(manifests, "Deployment", "demo-rsrv-gateway")["spec"]["template"]["spec"][
            "containers"
        ][0]
        assert (container["image"], container["command"]) == (expected, ["rsrv-gateway"])


def test_a_gateway_finds_the_servers_and_their_control_services() -> None:
    """The gateway's settings have the headless Service, the control port and the servers' token."""
    manifests = render(GATEWAY)
    settings = load_settings(one(manifests, "ConfigMap", "demo-rsrv-gateway")["data"]["rsrv.yaml"]).gateway
    assert settings.mode == "lpt_packing"
    assert (settings.http, settings.grpc, settings.admin) == ("0.0.0.0:8000", "0.0.0.0:8001", "0.0.0.0:8002")
    assert settings.workers_dns == "demo-rsrv-workers.prod.svc.cluster.local"
    assert one(manifests, "Service", "demo-rsrv-workers")["spec"]["clusterIP"] == "None"
    ports = {p["name"]: p["containerPort"] for p in server(manifests)["containers"][0]["ports"]}
    assert settings.workers_ports.control == str(ports["control"])
    assert settings.workers_ports.grpc_port == ports["grpc"]
    env = environment(manifests)
    assert env["RSRV_CONTROL__LISTEN"].endswith(f":{ports['control']}")
    secrets = [v["secret"] for pod in pods(manifests) for v in pod["spec"]["volumes"] if "secret" in v]
    assert secrets.count({"secretName": "demo-rsrv-control", "defaultMode": 0o440}) == 2


def test_a_gateway_that_packs_has_the_servers_placement() -> None:
    """A gateway has the servers' settings of placement and models.

    Servers follow the placement of a gateway only if it has one replica and packs, and if no value says otherwise.
    """
    shared = {"placement": {"replicas": 2}, "models": {"cats": {"replicas": "all"}}}
    manifests = render({"settings": shared, **with_gateway(replicas=1)})
    settings = load_settings(one(manifests, "ConfigMap", "demo-rsrv-gateway")["data"]["rsrv.yaml"])
    assert settings.placement.replicas == 2
    assert settings.models["cats"].replicas == "all"
    assert environment(manifests)["RSRV_PLACEMENT__MODE"] == "external"
    others: tuple[dict[str, Any], ...] = (
        ALONE,
        with_gateway(replicas=2),
        with_gateway(replicas=1, settings={"mode": "round_robin"}),
        {**with_gateway(replicas=1), "settings": {"placement": {"mode": "least_outstanding"}}},
    )
    for values in others:
        assert "RSRV_PLACEMENT__MODE" not in environment(render(values))


def test_clients_go_to_the_gateway_if_there_is_one() -> None:
    """If there is a gateway, the clients' Service selects its pods. Without one, it selects the servers' pods."""
    for values, component in (
        (GATEWAY, "gateway"),
        (ALONE, "server"),
        (VARIANTS["picker"], "server"),
    ):
        selector = one(render(values), "Service", "demo-rsrv")["spec"]["selector"]
        assert selector["app.kubernetes.io/component"] == component


def test_a_gateway_mounts_the_files_that_its_settings_name() -> None:
    """TLS files and the clients' token are entries of Secrets, at the paths in the gateway's settings. The token's file is private."""
    manifests = render(VARIANTS["tls-and-token"])
    settings = load_settings(one(manifests, "ConfigMap", "demo-rsrv-gateway")["data"]["rsrv.yaml"]).gateway
    pod = one(manifests, "Deployment", "demo-rsrv-gateway")["spec"]["template"]["spec"]
    mounts = {m["mountPath"]: m["name"] for m in pod["containers"][0]["volumeMounts"]}
    secrets = {v["name"]: v["secret"] for v in pod["volumes"] if "secret" in v}
    files = {
        "tls.crt": settings.tls_certificate,
        "tls.key": settings.tls_key,
        "ca.crt": settings.tls_client_ca,
        "token": settings.token_file,
    }
    for entry, path in files.items():
        assert path is not None
        assert path.name == entry
        secret = secrets[mounts[str(path.parent)]]
        assert secret["secretName"] == ("clients" if entry == "token" else "certificate")
        assert secret["defaultMode"] == 0o440
    service = one(manifests, "Service", "demo-rsrv")
    assert [port.get("appProtocol") for port in service["spec"]["ports"]] == [None, None]
    for manifest in (GATEWAY, ALONE):
        ports = one(render(manifest), "Service", "demo-rsrv")["spec"]["ports"]
        assert ports[1]["appProtocol"] == "kubernetes.io/h2c"


def test_a_picker_is_reached_by_envoy_which_reaches_the_servers() -> None:
    """The picker has its own Service and no ports for clients. The network policies let Envoy connect to the picker and the servers."""
    manifests = render(VARIANTS["picker"])
    container = one(manifests, "Deployment", "demo-rsrv-gateway")["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][-2:] == ["--picker", "0.0.0.0:9002"]
    assert {p["name"] for p in container["ports"]} == {"picker", "metrics"}
    assert one(manifests, "Service", "demo-rsrv-picker")["spec"]["ports"] == [
        {"name": "picker", "port": 9002, "targetPort": "picker"}
    ]
    for name, ports in (("server", {"http", "grpc"}), ("gateway", {"picker"})):
        rules = one(manifests, "NetworkPolicy", f"demo-rsrv-{name}")["spec"]["ingress"]
        assert ports in [{p["port"] for p in rule["ports"]} for rule in rules if "from" not in rule]


def test_a_gateways_memory_holds_its_buffers() -> None:
    """The default memory limit is enough for the default message size. A larger message size needs more memory."""
    (limit,) = one(render(GATEWAY), "Deployment", "demo-rsrv-gateway")["spec"]["template"]["spec"][
        "containers"
    ][0]["resources"]["limits"].values()
    assert limit == "3Gi"
    render(with_gateway(settings={"max_message_bytes": 2**30}, resources={"limits": {"memory": "6G"}}))


def test_what_only_operators_may_ask_wants_a_key() -> None:
    """Triton's dangerous APIs need a key, which is in a Secret."""
    manifests = render()
    closed = "shared-memory,model-repository,logging,trace"
    assert command(manifests)[1] == [
        f"--http-restricted-api={closed}:rsrv-key=$(RSRV_RESTRICT_KEY)",
        f"--grpc-restricted-protocol={closed}:rsrv-key=$(RSRV_RESTRICT_KEY)",
    ]
    env = server(manifests)["containers"][0]["env"]
    assert [each["name"] for each in env if "valueFrom" in each] == ["RSRV_RESTRICT_KEY"]


@pytest.mark.parametrize("apis", [["model-repository"], ["model-repository", "shared-memory"]])
def test_clients_share_memory_only_if_the_values_say_so(apis: list[str]) -> None:
    """The chart restricts the listed APIs, and `rsrv serve` restricts the others.

    Clients may register shared memory only if this API is not listed.
    """
    words, flags = command(render({"restrict": {"apis": apis}}))
    options = parser().parse(words[1:])

    assert options.client_shm is ("shared-memory" not in apis)
    assert flags[0].startswith(f"--http-restricted-api={','.join(apis)}:")


def test_a_gateway_has_the_key() -> None:
    """The gateway has the key's name, and the key's value in a private file from the Secret."""
    manifests = render(GATEWAY)
    text = one(manifests, "ConfigMap", "demo-rsrv-gateway")["data"]["rsrv.yaml"]
    own = yaml12.parse(text)["gateway"]
    pod = one(manifests, "Deployment", "demo-rsrv-gateway")["spec"]["template"]["spec"]
    (flag,) = [f for f in command(manifests)[1] if "grpc" in f]
    assert f":{own['worker_repository_key']}=" in flag
    mounts = {m["mountPath"]: m["name"] for m in pod["containers"][0]["volumeMounts"]}
    folder, _, entry = own["worker_repository_value_file"].rpartition("/")
    (volume,) = [v for v in pod["volumes"] if v["name"] == mounts[folder]]
    assert volume["secret"] == {"secretName": "demo-rsrv-restrict", "defaultMode": 0o440}
    assert entry in one(manifests, "Secret", "demo-rsrv-restrict")["data"]


def test_a_pod_has_time_to_drain() -> None:
    """A pod's grace period covers the preStop pause, the time limit for requests in flight, and ten seconds more.

    In the preStop pause, Kubernetes removes the pod from the endpoints.
    """
    manifests = render({"drain": {"endpoints": 7, "requests": 20}})
    spec = server(manifests)
    assert spec["terminationGracePeriodSeconds"] == 7 + 20 + 10
    assert spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    assert command(manifests)[0][-2:] == ["--drain", "20"]
    assert command(render({"drain": {"requests": 0}}))[0][-2:] == ["--drain", "1"]


def test_the_first_start_may_take_its_time() -> None:
    """The startup probe allows startupSeconds. The other probes begin after it."""
    container = server(render({"startupSeconds": 601}))["containers"][0]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 601
    assert probe["httpGet"]["path"] == "/v2/health/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"


def test_shared_memory_is_memory_of_the_right_size() -> None:
    """/dev/shm is a volume in memory with the size of the values."""
    spec = server(render({"sharedMemory": "8Gi"}))
    volume = {v["name"]: v for v in spec["volumes"]}["shm"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    mounts = {m["name"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
    assert mounts["shm"] == "/dev/shm"


def test_the_cache_is_left_to_its_owner() -> None:
    """The group of the cache's volume changes only once, because rsrv refuses a cache that other users can write."""
    spec = server(render(VARIANTS["cache-kept"]))
    assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    mounts = {m["name"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
    image = (ROOT / "docker" / "Dockerfile").read_text()
    assert f"RSRV_RUNTIME__COMPILATION_CACHE_DIR={mounts['cache']}/" in image
    assert f'"--directory", "{mounts["state"]}"' in image


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_a_pod_asks_for_all_gpus_of_its_machine_and_serves_from_no_cpu_in_their_place(gpus: int) -> None:
    """A pod that requests GPUs has the platform cuda, so that it does not serve slowly from the CPU if it gets none.

    A pod serves from the CPU only if the values ask for no GPU.
    """
    manifests = render({"gpu": {"perPod": gpus}, "podMonitor": {"enabled": True}})
    limits = server(manifests)["containers"][0]["resources"]["limits"]
    assert limits.get("nvidia.com/gpu") == (str(gpus) if gpus else None)
    assert environment(manifests)["RSRV_RUNTIME__PLATFORM"] == ("cuda" if gpus else "cpu")
    monitor = one(manifests, "PodMonitor", "demo-rsrv-server")
    ports = [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]]
    assert ports == ["metrics", "rsrv-metrics"]


@pytest.mark.parametrize("kind", ["none", "keda", "hpa"])
def test_one_alone_says_how_many_pods_there_are(kind: str) -> None:
    """A Deployment with an autoscaler has no replica count, because an upgrade would reset it. One without an autoscaler has a count."""
    manifests = render({"autoscaling": {"kind": kind}, "replicas": 3})
    deployment = one(manifests, "Deployment", "demo-rsrv-server")
    assert deployment["spec"].get("replicas") == (3 if kind == "none" else None)
    scalers = {m["kind"] for m in manifests} & {"ScaledObject", "HorizontalPodAutoscaler"}
    assert scalers == {"none": set(), "keda": {"ScaledObject"}, "hpa": {"HorizontalPodAutoscaler"}}[kind]


def test_queries_are_promql_about_these_pods() -> None:
    """KEDA's queries are PromQL, and select only pods of this Deployment."""
    manifests = render({"autoscaling": {"kind": "keda"}}, release="x")
    (scaler,) = [m for m in manifests if m["kind"] == "ScaledObject"]
    queries = [trigger["metadata"]["query"] for trigger in scaler["spec"]["triggers"]]
    for query in queries:
        promql_parser.parse(query)
        assert query.count("{") == query.count('namespace="prod",pod=~"x-rsrv-server-.+"')
    assert [t["metadata"]["threshold"] for t in scaler["spec"]["triggers"]] == ["0.05", "64"]


def test_the_adapters_metric_is_the_one_that_is_scaled_on() -> None:
    """prometheus-adapter's rule makes the metric that the HorizontalPodAutoscaler reads, for this release only."""
    (values,) = read((ROOT / "deploy" / "prometheus-adapter.yaml").read_text())
    (rule,) = values["rules"]["external"]
    (scaler,) = [m for m in render(VARIANTS["hpa"]) if m["kind"] == "HorizontalPodAutoscaler"]
    (metric,) = scaler["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    assert metric["external"]["target"] == {"type": "Value", "value": "250m"}
    ((label, release),) = metric["external"]["metric"]["selector"]["matchLabels"].items()
    assert release == "demo"
    assert f'{label}!=""' in rule["seriesQuery"]
    monitor = one(render({"podMonitor": {"enabled": True}}), "PodMonitor", "demo-rsrv-server")
    assert label in [re.sub(r"\W", "_", each) for each in monitor["spec"]["podTargetLabels"]]
    promql_parser.parse(rule["seriesQuery"])
    query = rule["metricsQuery"]
    promql_parser.parse(query.replace("<<.LabelMatchers>>", f'namespace="prod",{label}="{release}"'))
    assert query.count("{") == query.count("{<<.LabelMatchers>>}")


def test_the_operator_gets_the_same_alerts() -> None:
    """The PrometheusRule has the rules file without a change, braces included, and the requested labels."""
    rule = one(render(VARIANTS["alerts-and-dashboards"]), "PrometheusRule", "demo-rsrv")
    assert rule["metadata"]["labels"]["release"] == "monitoring"
    (rules,) = read((CHART / "files" / "rules" / "rsrv.yml").read_text())
    assert rule["spec"] == rules


def test_grafanas_sidecar_gets_the_same_dashboards() -> None:
    """The ConfigMap has the sidecar's label and each dashboard's file, and is below Kubernetes' limit."""
    boards = one(render(VARIANTS["alerts-and-dashboards"]), "ConfigMap", "demo-rsrv-dashboards")
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert boards["metadata"]["annotations"] == {"grafana_folder": "rsrv"}
    files = {
        path.name: path.read_text(encoding="utf-8") for path in (CHART / "files" / "dashboards").iterdir()
    }
    assert boards["data"] == files
    # Kubernetes' limit for one object.
    assert sum(map(len, files.values())) < 1 << 20


def test_servers_connect_to_no_other_host() -> None:
    """The servers' network policy allows no egress. Only the gateway may send requests to the servers."""
    policy = one(render(GATEWAY), "NetworkPolicy", "demo-rsrv-server")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []
    for rule in policy["ingress"]:
        if {"http", "grpc", "control"} & {p["port"] for p in rule["ports"]}:
            (peer,) = rule["from"]
            assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"


def test_bundles_have_to_be_somewhere() -> None:
    """Without a volume for the bundles, rendering fails, and the error says so."""
    with pytest.raises(ChartError, match=r"bundles\.volume: name the volume"):
        render({"bundles": {}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpu": {"perPod": None}}, r"gpu\.perPod: say how many GPUs each machine has"),
        (
            {"settings": {"gateway": {"admin": "0.0.0.0:8002"}}},
            r"settings\.gateway: the servers have no such",
        ),
        ({"sharedMemory": "64Gi"}, r"sharedMemory: 64Gi counts as memory of the pod, whose limit .*: 32Gi"),
        (with_gateway(settings={"tls_key": "/a"}), r"gateway\.settings\.tls_key: the chart sets"),
        (with_gateway(settings={"grpc": "0.0.0.0:1"}), r"gateway\.settings\.grpc: the chart sets"),
        (with_gateway(settings={"workers_dns": "a"}), r"gateway\.settings\.workers_dns: the chart sets"),
        (with_gateway(settings={"replicas": 2}), r"replicas: .* write settings\.placement\.replicas"),
        (with_gateway(tls={"clients": True}), r"gateway\.tls\.clients: .* need gateway\.tls\.secret"),
        (
            with_gateway() | {"openai": {"keysSecret": "keys"}},
            r"openai\.keysSecret: .* run `rsrv openai --server`",
        ),
        (
            with_gateway(resources={"limits": {"memory": "2G"}}),
            r"memory: 2G is less than the 2684354560 bytes",
        ),
        (
            with_gateway(settings={"max_message_bytes": 2**30}),
            r"memory: 3Gi is less than the 5905580032 bytes",
        ),
    ],
    ids=str,
)
def test_what_cannot_work_is_not_rendered(values: dict[str, Any], message: str) -> None:
    """Values with which a pod would fail are an error of `helm install`. The error says what to write."""
    with pytest.raises(ChartError, match=message):
        render(values)


@pytest.mark.parametrize(
    "values",
    [
        {"gpus": {"perPod": 1}},
        {"gpu": {"perPod": -1}},
        {"autoscaling": {"kind": "vpa"}},
        {"drain": {"requests": "30s"}},
        {"bundles": {"volume": {"a": {}, "b": {}}}},
        {"tritonArguments": ["log-verbose=1"]},
        {"drain": {"servers": 30}},
        {"rollout": {"maxUnavailable": 0}},
        {"rollout": {"maxUnavailable": "0%"}},
        {"rollout": {"maxSurge": "one"}},
        {"autoscaling": {"min": 5}},
        {"fullnameOverride": "Capitals"},
        {"fullnameOverride": "4letters"},
        {"sharedMemory": "0"},
        {"restrict": {"apis": ["bogus"]}},
        {"restrict": {"apis": ["health"]}},
        {"podLabels": {"app.kubernetes.io/name": "mine"}},
        {"podAnnotations": {"checksum/settings": "mine"}},
        {"prometheusRule": {"labels": {"helm.sh/chart": "mine"}}},
        {"podMonitor": {"interval": "1m"}},
        {"podMonitor": {"interval": "31s"}},
        {"settings": {"runtim": {"memory_fraction": 0.8}}},
        {"settings": {"runtime": {"memory_fractoin": 0.8}}},
        {"settings": {"runtime": {"idle": {"devise": "30s"}}}},
        {"settings": {"models": {"cats": {"weigth": 2}}}},
        with_gateway(settings={"mod": "round_robin"}),
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_refused(values: dict[str, Any]) -> None:
    """A misspelt or impossible value is an error of `helm install`."""
    with pytest.raises(ChartError):
        render(values)


@pytest.mark.parametrize("value", ["123", "true", "1e3", "null", "it's", 'a"b'])
def test_texts_stay_texts(value: str) -> None:
    """Texts that YAML would read as a number or a boolean, and texts with quotes, are rendered unchanged."""
    flag = f"--trace-config={value}"
    manifests = render(
        {
            "bundles": {"volume": {"hostPath": {"path": "/srv"}}, "subPath": value},
            "priorityClassName": value,
            "runtimeClassName": value,
            "serviceAccount": {"name": value},
            "restrict": {"existingSecret": value},
            "tritonArguments": [flag],
        }
    )
    spec = server(manifests)
    mounts = {m["mountPath"]: m for m in spec["containers"][0]["volumeMounts"]}
    assert mounts["/bundles"]["subPath"] == value
    assert [spec[key] for key in ("priorityClassName", "runtimeClassName", "serviceAccountName")] == [
        value
    ] * 3
    (key,) = [each for each in spec["containers"][0]["env"] if each["name"] == "RSRV_RESTRICT_KEY"]
    assert key["valueFrom"]["secretKeyRef"]["name"] == value
    assert command(manifests)[1][-1] == flag


def test_a_release_may_be_called_like_a_number() -> None:
    """If the name of a release is a number, its labels and names are still text."""
    for manifest in render({**GATEWAY, "fullnameOverride": "true"}, release="123"):
        check(manifest)
        assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == "123"


def test_pods_are_replaced_with_their_keys() -> None:
    """The checksums of pods include the chart's own Secrets, which are new with each rendering. So new keys replace the pods."""
    first, second = (render(GATEWAY, release=name) for name in ("one", "two"))
    for release, manifests in (("one", first), ("two", second)):
        data = one(manifests, "Secret", f"{release}-rsrv-restrict")["data"]
        token = one(manifests, "Secret", f"{release}-rsrv-control")["data"]
        for pod in pods(manifests):
            have = pod["metadata"]["annotations"]
            assert have["checksum/restrict"] == hashlib.sha256(data["key"].encode()).hexdigest()
            assert have["checksum/control"] == hashlib.sha256(token["token"].encode()).hexdigest()
        assert len(b64decode(data["key"])) == len(b64decode(token["token"])) == 32
    checksums = [
        {p["metadata"]["annotations"]["checksum/restrict"] for p in pods(m)} for m in (first, second)
    ]
    assert len(checksums[0] | checksums[1]) == 2
    for pod in pods(render(VARIANTS["own-secrets"])):
        assert pod["metadata"]["annotations"].keys() == {"checksum/settings"}


def test_the_notes_say_what_scaling_lacks() -> None:
    """If there is an autoscaler and no PodMonitor, the notes warn. Otherwise they do not."""
    for kind, monitored, warned in (("keda", False, True), ("hpa", False, True), ("keda", True, False)):
        text = notes({"autoscaling": {"kind": kind}, "podMonitor": {"enabled": monitored}})
        assert ("podMonitor is not enabled" in text) is warned
    assert "podMonitor" not in notes()


def test_every_value_has_a_default_and_a_schema() -> None:
    """values.yaml and values.schema.json have the same keys, two levels deep."""
    (defaults,) = read((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    del schema["global"]
    assert list(defaults) == list(schema)
    for key, value in defaults.items():
        if "properties" in schema[key]:
            assert list(value) == list(schema[key]["properties"])


def test_helm_lints_it() -> None:
    """`helm lint` finds no error."""
    report = lint()
    assert report["total_charts_linted"] == 1
    assert not report["errors"]


def test_versions_are_the_projects() -> None:
    """The chart and its image have the version of the package."""
    (chart,) = read((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)
    assert f"image: rsrv:{VERSION}" in (ROOT / "deploy/kserve/clusterservingruntime.yaml").read_text()
