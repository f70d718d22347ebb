"""The plan of `rsrv serve`: flags, environment and addresses of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rsrv.address import Address
from rsrv.serve.plan import ServeError, ServerPlan, plan
from rsrv.settings import RuntimeSection, load_settings
from rsrv.stub.bls import MAX_CALLS

PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


def planned(text: str = "", *arguments: str, **options: Any) -> ServerPlan:
    return plan(
        load_settings(text), Path("/here"), "/bin/tritonserver", ports=PORTS, arguments=arguments, **options
    )


def test_a_server_follows_its_bundles_and_survives_its_models() -> None:
    """tritonserver gets the flags that lifecycle and stubs need, and then the operator's."""
    found = planned("", "--log-verbose=1", drain_s=7)

    assert (found.argv[0], found.argv[-1], found.drain_s) == ("/bin/tritonserver", "--log-verbose=1", 7)
    assert {
        "--model-repository=/here/models",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--exit-on-error=false",
        "--strict-readiness=false",
        "--exit-timeout-secs=7",
        "--grpc-port=8001",
    } <= set(found.argv)
    assert found.repository == Path("/here/models")


def test_a_model_has_few_threads_of_triton_unless_bundles_call_through_it() -> None:
    """Then each call that a stub may have in flight has one, and answers have one more."""
    for calling, threads in ((False, 2), (True, MAX_CALLS + 1)):
        assert f"--backend-config=python,thread-pool-size={threads}" in planned(calling=calling).argv


def test_addresses_are_those_of_the_operators_flags() -> None:
    """A flag after -- takes precedence, and what is checked and shown follows it."""
    found = planned("", "--http-port=9000", "--grpc-address", "::1")

    assert [str(found.ports[kind]) for kind in PORTS] == ["0.0.0.0:9000", "[::1]:8001", "0.0.0.0:8002"]
    with pytest.raises(ServeError, match="tritonserver's address for http: "):
        planned("", "--http-port=many")


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
    """A page that no control process serves is not named."""
    assert planned(text).page == page


def test_an_address_that_is_none_is_named_by_its_key() -> None:
    """The message has the key of rsrv.yaml."""
    with pytest.raises(ServeError, match=r"metrics\.listen: 'here' is not HOST:PORT"):
        planned("metrics: {listen: here}")


def test_devices_reach_every_process_of_the_server() -> None:
    """The runtimes read them from the environment, where they take precedence over the file."""
    settings = load_settings("")
    assert planned().environment == {}
    runtime = RuntimeSection(devices=["cpu", "cpu"])
    found = plan(
        settings.model_copy(update={"runtime": runtime}),
        Path("/here"),
        "t",
        ports=PORTS,
        threads={"NPROC": "3"},
    )

    assert found.environment == {"RSRV_RUNTIME__DEVICES": '["cpu", "cpu"]', "NPROC": "3"}
    assert found.describe().startswith("""env NPROC=3 'RSRV_RUNTIME__DEVICES=["cpu", "cpu"]' t --model""")
    assert (
        "addresses: http 0.0.0.0:8000, grpc 0.0.0.0:8001, metrics 0.0.0.0:8002\nlive page: "
        in found.describe()
    )
