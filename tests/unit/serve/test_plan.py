"""The plan of a node: its servers, its gateway, their ports and their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from rsrv.address import Address
from rsrv.explain import parse_yaml, read_yaml
from rsrv.serve.cores import CoreShare
from rsrv.serve.devices import WorkerDevice
from rsrv.serve.errors import NodeError
from rsrv.serve.plan import NodePlan, Ports, describe, needs_gateway, plan, workers_file
from rsrv.settings import load_settings
from rsrv.settings_fleet import WorkerEntry
from rsrv.stub.bls import MAX_CALLS

CPU = WorkerDevice("", "CPU")
GPU = WorkerDevice("GPU-aa11", "H100 (GPU-aa11)")


def planned(
    text: str = "",
    devices: Sequence[WorkerDevice] = (CPU, CPU),
    environment: Mapping[str, str] | None = None,
    *,
    calling: bool = False,
) -> NodePlan:
    settings = load_settings(text)
    node = settings.node.model_copy(update={"directory": Path("/node")})
    return plan(
        settings.model_copy(update={"node": node}),
        devices,
        [CoreShare((2 * number, 2 * number + 1), 2) for number in range(len(devices))],
        environment or {},
        tritonserver="/bin/tritonserver",
        python="/bin/python3",
        calling=calling,
    )


def addresses(plan: NodePlan) -> list[str]:
    """Return each worker's addresses: HTTP, gRPC, metrics."""
    return [f"{worker.ports.http} {worker.ports.grpc} {worker.ports.metrics}" for worker in plan.workers]


def test_two_workers_are_behind_a_gateway() -> None:
    """Two workers listen on local ports of their own, with a repository each, behind a gateway."""
    found = planned()

    assert addresses(found) == [
        "127.0.0.1:18000 127.0.0.1:18001 127.0.0.1:18002",
        "127.0.0.1:18010 127.0.0.1:18011 127.0.0.1:18012",
    ]
    assert [str(worker.repository) for worker in found.workers] == [
        "/node/worker0/models",
        "/node/worker1/models",
    ]
    assert found.gateway is not None
    assert found.gateway.argv == ("/bin/python3", "-P", "-m", "rsrv_gateway", "--config", "/node/rsrv.yaml")


def test_a_model_has_few_threads_of_triton_unless_bundles_call_through_it() -> None:
    """Then each call that a stub may have in flight has one, and answers have one more."""
    for calling, threads in ((False, 2), (True, MAX_CALLS + 1)):
        for worker in planned(calling=calling).workers:
            assert f"--backend-config=python,thread-pool-size={threads}" in worker.child.argv


def test_the_gateway_reads_where_the_workers_are() -> None:
    """The gateway has the node's settings, with the node's workers file."""
    settings = load_settings(planned("gateway: {mode: lpt_packing}").files[Path("/node/rsrv.yaml")])

    assert settings.gateway.mode == "lpt_packing"
    assert settings.gateway.workers_file == Path("/node/workers.yaml")


def test_the_list_without_those_that_are_to_end() -> None:
    """The file of no workers is an empty list, not an empty file."""
    entries = parse_yaml(workers_file(planned(), {}, {"worker0"}))
    assert isinstance(entries, list)
    assert [entry["name"] for entry in entries] == ["worker1"]
    assert workers_file(planned(), {}, {"worker0", "worker1"}) == "[]\n"


def test_the_list_of_workers_is_one_that_settings_take() -> None:
    """The workers file fits the settings; workers that have not started have no control service."""
    entries = read_yaml(
        "workers:\n" + workers_file(planned(), {"worker1": "unix:/run/1/control.sock"}), of="workers"
    )["workers"]

    assert [WorkerEntry(**entry) for entry in entries] == [
        WorkerEntry(
            name="worker0",
            host="127.0.0.1",
            grpc_port=18001,
            http_port=18000,
            metrics_port=18002,
            control=None,
        ),
        WorkerEntry(
            name="worker1",
            host="127.0.0.1",
            grpc_port=18011,
            http_port=18010,
            metrics_port=18012,
            control="unix:/run/1/control.sock",
        ),
    ]


def test_one_worker_has_the_public_ports_and_no_gateway() -> None:
    """One worker without a gateway has the public ports."""
    found = planned(devices=[CPU])

    assert found.gateway is None
    assert found.files == {}
    assert addresses(found) == ["0.0.0.0:8000 0.0.0.0:8001 127.0.0.1:8002"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gateway: {grpc: '[::]:9001'}", "0.0.0.0:8000 [::]:9001 127.0.0.1:8002"),
        ("gateway: {http: null, admin: null}", "127.0.0.1:18000 0.0.0.0:8001 127.0.0.1:18002"),
        ("gateway: {grpc: null}\nnode: {first_port: 7000}", "0.0.0.0:8000 127.0.0.1:7001 127.0.0.1:8002"),
    ],
)
def test_one_worker_listens_where_the_gateway_would(text: str, expected: str) -> None:
    """One worker listens where the gateway would; all else is local."""
    assert addresses(planned(text, [CPU])) == [expected]


@pytest.mark.parametrize(
    ("text", "workers", "expected"),
    [
        ("", 1, False),
        ("", 2, True),
        ("gateway: {workers: [{host: other}]}", 1, True),
        ("gateway: {workers_dns: other}", 1, True),
        # What Triton cannot do at its ports, or not at all of them.
        ("gateway: {tls_certificate: c, tls_key: k}", 1, True),
        ("gateway: {token_file: t}", 1, True),
        # The workers are for a gateway elsewhere.
        ("gateway: {grpc: null, http: null}", 2, False),
    ],
)
def test_there_is_a_gateway_where_it_is_needed(text: str, workers: int, expected: bool) -> None:
    """A gateway is planned to choose among servers or to guard one."""
    assert needs_gateway(load_settings(text), workers) is expected


def test_servers_without_a_gateway_keep_their_own_ports() -> None:
    """Servers without a gateway have ports of their own, also a single one."""
    text = "gateway: {grpc: null, http: null}"

    assert addresses(planned(text)) == addresses(planned())
    assert addresses(planned(text, [CPU])) == addresses(planned())[:1]


def test_a_server_follows_its_bundles_and_survives_its_models() -> None:
    """tritonserver gets the flags that lifecycle and stubs need, and then the operator's."""
    worker = planned("node: {drain_s: 7, arguments: [--log-verbose=1]}").workers[1]

    assert worker.child.argv[0] == "/bin/tritonserver"
    assert worker.child.argv[-1] == "--log-verbose=1"
    assert worker.child.drain_s == 7
    for flag in (
        "--model-repository=/node/worker1/models",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--exit-on-error=false",
        "--strict-readiness=false",
        "--exit-timeout-secs=7",
        "--grpc-address=127.0.0.1",
        "--grpc-port=18011",
    ):
        assert flag in worker.child.argv


def test_a_worker_sees_its_own_device_only() -> None:
    """A worker sees its own device only, by PCI order, and fails without its GPU."""
    on_gpu = planned(devices=[GPU, CPU]).workers[0].child.environment
    on_cpu = planned().workers[0].child.environment

    assert (on_gpu["CUDA_VISIBLE_DEVICES"], on_gpu["RSRV_RUNTIME__PLATFORM"]) == ("GPU-aa11", "cuda")
    assert on_gpu["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert (on_cpu["CUDA_VISIBLE_DEVICES"], on_cpu["RSRV_RUNTIME__PLATFORM"]) == ("", "cpu")


def test_a_worker_has_its_cores_and_as_many_threads() -> None:
    """A worker has its cores and as many threads, unless the operator sets them."""
    first, second = (worker.child for worker in planned(environment={"OMP_NUM_THREADS": "9"}).workers)

    assert (first.cores, second.cores) == ((0, 1), (2, 3))
    assert first.environment["NPROC"] == first.environment["OPENBLAS_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in first.environment


def test_each_control_service_has_a_port_of_its_own() -> None:
    """control.listen is the first worker's port, and the others follow."""
    found = planned("control: {listen: '0.0.0.0:9100', token_file: t}")

    assert [worker.child.environment["RSRV_CONTROL__LISTEN"] for worker in found.workers] == [
        "0.0.0.0:9100",
        "0.0.0.0:9101",
    ]
    assert "RSRV_CONTROL__LISTEN" not in planned().workers[0].child.environment


def test_metrics_have_one_port_behind_a_gateway_and_else_one_each() -> None:
    """Behind a gateway there is one port for metrics; otherwise each worker has one, from metrics.listen on."""
    two = planned("metrics: {listen: '0.0.0.0:9200'}")
    assert {worker.child.environment["RSRV_METRICS__LISTEN"] for worker in two.workers} == {"null"}

    elsewhere = planned("metrics: {listen: '0.0.0.0:9200'}\ngateway: {grpc: null, http: null}")
    assert [worker.child.environment["RSRV_METRICS__LISTEN"] for worker in elsewhere.workers] == [
        "0.0.0.0:9200",
        "0.0.0.0:9201",
    ]
    none = planned("metrics: {listen: null}\ngateway: {grpc: null, http: null}")
    assert "RSRV_METRICS__LISTEN" not in none.workers[0].child.environment


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        (
            "runtime: {platform: cuda}",
            [CPU],
            "runtime.platform is cuda, and the workers are to run on the CPU",
        ),
        ("runtime: {platform: cpu}", [GPU], "runtime.platform is cpu, and the workers are to run on GPUs"),
        ("gateway: {workers_file: w}", [CPU, CPU], "gateway.workers_file: a node writes its own"),
        (
            "gateway: {http: '0.0.0.0:18010'}",
            [CPU, CPU],
            "gateway.http and worker1's http are both to have port 18010",
        ),
        ("gateway: {grpc: '8001'}", [CPU], "gateway.grpc: '8001' is not HOST:PORT"),
        ("gateway: {grpc: 'a:70000'}", [CPU, CPU], "gateway.grpc: 'a:70000' is not HOST:PORT"),
        ("control: {listen: x, token_file: t}", [CPU, CPU], "control.listen: 'x' is not HOST:PORT"),
        ("node: {first_port: 65000}", [CPU] * 64, "node.first_port: 65000 leaves no ports for worker 54"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(text: str, devices: Sequence[WorkerDevice], message: str) -> None:
    """An impossible plan is refused before any start."""
    with pytest.raises(NodeError) as caught:
        planned(text, devices)

    assert message in str(caught.value)


def test_the_operator_is_told_what_several_workers_cost() -> None:
    """The operator is warned that each worker has its copy of the weights unless they share one."""
    (note,) = planned().notes

    assert "runtime.shared_host_weights" in note
    assert planned("runtime: {shared_host_weights: true}").notes == ()
    assert planned(devices=[CPU]).notes == ()


def test_a_description_is_for_people_and_for_a_shell() -> None:
    """The description has each process with its device, its ports and a command line for a shell."""
    text = describe(planned(devices=[GPU, CPU]))

    assert "worker0 on H100 (GPU-aa11): HTTP 127.0.0.1:18000, gRPC 127.0.0.1:18001" in text
    assert "CUDA_VISIBLE_DEVICES=GPU-aa11" in text
    assert "taskset -c 2,3 /bin/tritonserver" in text
    assert "'--load-model=*'" in text


def test_an_address_for_all_interfaces_is_shown_as_localhost() -> None:
    """A server on 0.0.0.0 is shown as localhost."""
    anywhere = [Address(host, 1).local for host in ("0.0.0.0", "::", "10.0.0.7")]

    assert anywhere == ["127.0.0.1", "::1", "10.0.0.7"]
    assert (
        str(Ports(*[Address("::1", port) for port in (1, 2, 3)]))
        == "HTTP [::1]:1, gRPC [::1]:2, metrics [::1]:3"
    )


@pytest.mark.parametrize(
    ("text", "devices", "pages"),
    [
        ("", [CPU], ("http://127.0.0.1:8004/",)),
        ("", [CPU, CPU], ("http://127.0.0.1:8002/",)),
        ("gateway: {admin: '[::]:9002'}", [CPU, CPU], ("http://[::1]:9002/",)),
        ("gateway: {admin: null}", [CPU, CPU], ()),
        ("metrics: {listen: null}", [CPU], ()),
        ("control: {enabled: false}", [CPU], ()),
        (
            "gateway: {grpc: null, http: null}",
            [CPU, CPU],
            ("http://127.0.0.1:8004/", "http://127.0.0.1:8005/"),
        ),
    ],
)
def test_the_node_knows_where_its_live_page_is(
    text: str, devices: Sequence[WorkerDevice], pages: tuple[str, ...]
) -> None:
    """The live page's address is the gateway's or the one worker's, in the dry run, too."""
    found = planned(text, devices)

    assert found.pages == pages
    assert all(f"live page: {page}\n" in describe(found) for page in pages)
