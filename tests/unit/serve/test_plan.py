"""The plan of `rsrv serve`: the flags, the environment and the addresses of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rsrv.address import Address
from rsrv.serve.plan import ServeError, ServerPlan, plan
from rsrv.settings import RuntimeSection, load_settings
from rsrv.stub.bls import MAX_CALLS

PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


def planned(text: str = "", *arguments: str, directory: str = "/here", **options: Any) -> ServerPlan:
    options = {"links": Path("/run/rsrv-0"), "ports": PORTS, "arguments": arguments, **options}
    return plan(load_settings(text), Path(directory), "/bin/tritonserver", **options)


def test_a_server_follows_its_bundles_and_survives_its_models() -> None:
    """tritonserver gets the flags that the lifecycle of models and the stubs need. The operator's own flags follow them."""
    server_plan = planned("", "--log-verbose=1", drain_s=7)

    assert (server_plan.argv[0], server_plan.argv[-1], server_plan.drain_s) == (
        "/bin/tritonserver",
        "--log-verbose=1",
        7,
    )
    assert {
        "--model-repository=/here/models",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--exit-on-error=false",
        "--strict-readiness=false",
        "--exit-timeout-secs=7",
        "--grpc-port=8001",
    } <= set(server_plan.argv)
    assert server_plan.repository == Path("/here/models")


@pytest.mark.parametrize(
    "character", [" ", "'", '"', "$", ";", "&", "(", ")", "|", "<", "`", "\\", "\n", "\u00fc", "\udce9"]
)
def test_triton_gets_a_link_to_a_folder_whose_path_it_cannot_use(character: str) -> None:
    """If a folder's path has a character that Triton cannot use, Triton gets a link to the folder.

    A shell would split or expand the path of a stub, and the stub's Python cannot use a path beyond ASCII.
    """
    server_plan = planned(directory=f"/with{character}one")

    assert server_plan.repository == Path(f"/with{character}one/models")
    assert server_plan.link is not None
    assert str(server_plan.link).startswith("/run/rsrv-0/folder-")
    assert f"--model-repository={server_plan.link}/models" in server_plan.argv
    assert f"{server_plan.link}\n" in server_plan.describe()


@pytest.mark.parametrize("name", ["plain", "a.b-c_d", "#", "%41", "*", "=", ",", "~", "@", "+"])
def test_triton_gets_the_path_of_a_folder_that_it_can_use(name: str) -> None:
    """If Triton can use a folder's path, it gets this path, which an operator recognises in the log."""
    server_plan = planned(directory=f"/{name}")

    assert (server_plan.link, server_plan.argv[1]) == (None, f"--model-repository=/{name}/models")


def test_a_folder_is_refused_if_no_link_to_it_would_work() -> None:
    """If the path of the link also has a character that Triton cannot use, the folder is refused.

    The error shows the characters and names both settings that can be changed.
    """
    with pytest.raises(ServeError, match=r"characters \[' '\].*--directory.*RSRV_RUNTIME_DIR"):
        planned(directory="/a b", links=Path("/c d"))


def test_a_model_has_few_threads_of_triton_unless_bundles_call_through_it() -> None:
    """Triton's Python backend gets a pool of two threads per model, or a larger one if bundles call models through Triton.

    The larger pool has one thread for each call that a stub may have in flight, and one for answers.
    """
    for calling, threads in ((False, 2), (True, MAX_CALLS + 1)):
        assert f"--backend-config=python,thread-pool-size={threads}" in planned(calling=calling).argv


def test_addresses_are_those_of_the_operators_flags() -> None:
    """Ports and addresses in flags after -- take precedence. The plan shows and checks the addresses from these flags."""
    server_plan = planned("", "--http-port=9000", "--grpc-address", "::1")

    assert [str(server_plan.ports[kind]) for kind in PORTS] == [
        "127.0.0.1:9000",
        "[::1]:8001",
        "127.0.0.1:8002",
    ]
    with pytest.raises(ServeError, match="tritonserver's address for http: "):
        planned("", "--http-port=many")


@pytest.mark.parametrize(
    ("host", "flags"),
    [
        ("127.0.0.1", ("127.0.0.1", "127.0.0.1", "127.0.0.1")),
        ("0.0.0.0", ("0.0.0.0", "0.0.0.0", "0.0.0.0")),
        # Without the prefix `ipv6:`, Triton's HTTP front ends would take an IPv6 address for 255.255.255.255.
        ("::", ("ipv6:::", "[::]", "ipv6:::")),
        ("fd00::7", ("ipv6:fd00::7", "[fd00::7]", "ipv6:fd00::7")),
    ],
)
def test_all_front_ends_listen_at_the_host(host: str, flags: tuple[str, str, str]) -> None:
    """HTTP, gRPC and metrics listen at the host of --host, which each flag spells as its front end needs it.

    The plan shows and checks the same addresses.
    """
    server_plan = planned(host=host)

    assert {f"--{kind}-address={flag}" for kind, flag in zip(PORTS, flags, strict=True)} <= set(
        server_plan.argv
    )
    assert [address.host for address in server_plan.ports.values()] == [host] * 3


def restricted(server_plan: ServerPlan) -> list[str]:
    return [word for word in server_plan.argv if "restricted" in word]


@pytest.mark.parametrize("client_shm", [False, True])
def test_apis_for_operators_need_the_key(*, client_shm: bool) -> None:
    """Over both protocols, APIs for operators need the key. Clients may register shared memory only if the operator allows it."""
    server_plan = planned(client_shm=client_shm).with_key("7f")

    apis = f"model-repository,logging,trace{'' if client_shm else ',shared-memory'}"
    assert restricted(server_plan) == [
        f"--http-restricted-api={apis}:rsrv-key=7f",
        f"--grpc-restricted-protocol={apis}:rsrv-key=7f",
    ]


def test_restrictions_of_the_operator_stay() -> None:
    """rsrv's restriction leaves out APIs that the operator has already restricted.

    tritonserver refuses an API that is in two restrictions.
    """
    server_plan = planned(
        "", "--http-restricted-api=model-repository,health:mine=1", "--grpc-restricted-protocol=trace:a=b"
    )

    assert restricted(server_plan.with_key("7f"))[:2] == [
        "--http-restricted-api=logging,trace,shared-memory:rsrv-key=7f",
        "--grpc-restricted-protocol=model-repository,logging,shared-memory:rsrv-key=7f",
    ]


def test_a_plan_does_not_show_the_key() -> None:
    """The printed command has `$(cat FILE)` in place of the key, so the shell reads the key from its file."""
    assert (
        '--grpc-restricted-protocol=model-repository,logging,trace,shared-memory:rsrv-key="$(cat /here/operator-key)"'
        in planned().describe()
    )


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({}, False),
        ({"client_shm": True}, False),
        ({"host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "client_shm": True}, True),
    ],
)
def test_a_server_that_others_can_take_over_warns(options: dict[str, Any], *, warns: bool) -> None:
    """A warning says if other machines can reach the shared memory API, because clients could take over the server with it."""
    warning = planned(**options).warning
    assert ("register shared memory" in warning) is warns
    assert ("Leave out --host or --client-shm" in warning) is warns


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("", Address("127.0.0.1", 8004)),
        ("metrics: {listen: '0.0.0.0:9004'}", Address("127.0.0.1", 9004)),
        ("metrics: {listen: '[::]:9004'}", Address("::1", 9004)),
        ("metrics: {listen: null}", None),
        ("control: {enabled: false}", None),
    ],
)
def test_the_live_page_is_where_metrics_are(text: str, page: Address | None) -> None:
    """The live page has the address of the metrics. If no control process serves it, the plan has no page."""
    assert planned(text).page == page


def test_an_address_that_is_none_is_named_by_its_key() -> None:
    """The message for a wrong address has the key of rsrv.yaml."""
    with pytest.raises(ServeError, match=r"metrics\.listen: 'here' is not HOST:PORT"):
        planned("metrics: {listen: here}")


def test_devices_reach_every_process_of_the_server() -> None:
    """Devices are passed in the environment, where the runtimes read them. They take precedence over the file."""
    settings = load_settings("")
    assert planned().environment == {}
    runtime = RuntimeSection(devices=["cpu", "cpu"])
    server_plan = plan(
        settings.model_copy(update={"runtime": runtime}),
        Path("/here"),
        "t",
        links=Path("/run/rsrv-0"),
        ports=PORTS,
        variables={"NPROC": "3"},
    )

    assert server_plan.environment == {"RSRV_RUNTIME__DEVICES": '["cpu", "cpu"]', "NPROC": "3"}
    assert server_plan.describe().startswith(
        """env NPROC=3 'RSRV_RUNTIME__DEVICES=["cpu", "cpu"]' t --model"""
    )
    assert (
        "addresses: http 127.0.0.1:8000, grpc 127.0.0.1:8001, metrics 127.0.0.1:8002\nlive page: "
        in server_plan.describe()
    )
