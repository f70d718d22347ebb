"""`rsrv.client` and its commands against real servers."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from local_triton import TritonServer
from rsrv.cli.main import main
from rsrv.client import AsyncClient, Client, InputError, RequestError
from tests.e2e import bundles
from tests.e2e.calls import PROTOCOLS
from tests.e2e.gateways import running_gateway
from tests.e2e.harness import RunningTriton, StartTriton, make_repository, running_triton
from tests.waiting import PATIENCE_S, wait_until

WORDS = np.arange(4, dtype=np.uint32)[None]


def url(server: RunningTriton, protocol: str) -> str:
    return server.server.grpc_url if protocol == "grpc" else f"http://{server.server.http_url}"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_type_travels(triton: RunningTriton, protocol: str) -> None:
    """Inputs and outputs of all types are right. The client refuses a request with too many rows, and reports an unknown model."""
    inputs = {
        f"x_{token}": np.arange(10).reshape(2, 5).astype(dtype) for token, dtype in bundles.DTYPES.items()
    }
    with Client(url(triton, protocol)) as client:
        answer = client.infer("every_dtype", inputs)
        for name, array in inputs.items():
            assert answer[name.replace("x", "y")].dtype == array.dtype
            np.testing.assert_array_equal(answer[name.replace("x", "y")], array[:, ::-1])
        with pytest.raises(InputError, match=r"2000 rows, and a request has at most \d+"):
            client.infer("every_dtype", {name: np.resize(array, (2000, 5)) for name, array in inputs.items()})
        with pytest.raises(RequestError, match="nothing: Request for unknown model: 'nothing'"):
            client.infer("nothing", x=1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_full_queue_is_waited_for(triton: RunningTriton, protocol: str) -> None:
    """24 requests arrive together, and only two may wait. All are answered, because the client sends refused requests again."""

    async def send() -> list[np.ndarray]:
        async with AsyncClient(url(triton, protocol), timeout_s=600) as client:
            answers = await asyncio.gather(*(client.infer("short_queue", x=WORDS) for _ in range(24)))
            return [answer["y"] for answer in answers]

    expected = bundles.stepped(WORDS, np.full(1, bundles.STEADY_STEPS, np.int32))
    for answer in asyncio.run(send()):
        np.testing.assert_array_equal(answer, expected)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_request_fails_at_its_deadline(triton: RunningTriton, protocol: str) -> None:
    """A request that takes longer than its deadline fails at the deadline."""
    with Client(url(triton, protocol)) as client:
        client.signature("elastic")
        with pytest.raises(RequestError, match="deadline"):
            client.infer("elastic", x=WORDS, steps=[[100_000]], timeout_s=0.3)


_KILLED = """
import os, sys
import rsrv.client.shared_memory
from rsrv.client import Client
rsrv.client.shared_memory.LEAST_BYTES = 0
client = Client(sys.argv[1])
client.infer("exact", x=[[0.0] * 64])
assert client.transport == "shared memory"
if sys.argv[2:]:
    os.kill(os.getpid(), 9)
"""


def test_shared_memory_is_used_and_never_left_behind(
    start_triton: StartTriton,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Clients send requests in shared memory to a server that allows it.

    Nothing of this memory is left after a client closes or dies, or after the server dies.
    """
    monkeypatch.setattr("rsrv.client.shared_memory.LEAST_BYTES", 0)
    server = start_triton(
        make_repository(tmp_path, bundles.ensure() / "exact"),
        expected=None,
        make=partial(TritonServer, client_shared_memory=True),
    )

    def regions() -> list[str]:
        return list(server.grpc.get_system_shared_memory_status().regions)

    def files() -> list[Path]:
        return list(Path("/dev/shm").glob("rsrv-client-*"))

    x = np.random.default_rng(0).integers(-50, 51, (2_000, 64)).astype(np.float32)
    expected = x @ bundles.exact_kernel()
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(url(server, protocol))) for protocol in PROTOCOLS]
        for client, protocol in zip(clients, PROTOCOLS, strict=True):
            np.testing.assert_array_equal(client.map("exact", x).arrays()["y"], expected)
            assert client.transport == "shared memory"
            assert main(["doctor", "--url", url(server, protocol)]) == 0
            assert capsys.readouterr().out.endswith(": shared memory\n")
        assert regions()
        assert not files()
        # A server that starts again does not know the clients' regions.
        server.server.kill()
        server.server.start().wait_ready(PATIENCE_S)
        for client in clients:
            np.testing.assert_array_equal(client.map("exact", x).arrays()["y"], expected)
    assert not regions()
    # The first client is killed and leaves a region. The next client removes this region.
    for protocol, arguments, remaining in (("grpc", ["die"], 1), ("http", [], 0)):
        command = [sys.executable, "-c", _KILLED, url(server, protocol), *arguments]
        subprocess.run(command, check=not arguments)
        assert (len(regions()), files()) == (remaining, [])


def test_a_server_that_refuses_shared_memory_gets_bytes(
    triton: RunningTriton, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a server refuses shared memory, the client sends bytes. Its report and the client's doctor name the reason."""
    monkeypatch.setattr("rsrv.client.shared_memory.LEAST_BYTES", 0)
    with Client(url(triton, "grpc")) as client:
        assert client.infer("exact", x=np.zeros((1, 64), np.float32))["y"].shape == (1, 6)
        assert client.transport.startswith("bytes (the server refuses shared memory: ")
    assert main(["doctor", "--url", url(triton, "grpc")]) == 0
    printed = capsys.readouterr().out
    assert "bytes (the server refuses shared memory: " in printed
    assert "rsrv serve --client-shm" in printed


def test_an_interrupted_map_goes_on(triton: RunningTriton, tmp_path: Path) -> None:
    """`rsrv map` is killed before its end. The next command with --resume sends only the other rows, and the output file is complete."""
    x = np.random.default_rng(0).integers(-50, 51, (20_000, 64)).astype(np.float32)
    rows, out = tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(rows, x)
    program = "import sys; from rsrv.cli.main import main; sys.exit(main())"
    options = ["-o", str(out), "--rows-per-request", "1", "--url", url(triton, "grpc"), "--resume"]
    command = [sys.executable, "-c", program, "map", "exact", str(rows), *options]
    process = subprocess.Popen(command)
    partial = out.with_suffix(".partial")
    wait_until(lambda: process.poll() is not None or (partial.exists() and partial.stat().st_size > 10_000))
    process.kill()
    process.wait()
    assert not out.exists()
    end = subprocess.run(command, check=True, capture_output=True, text=True)
    match = re.search(r"20000 rows in \S+: (\d+) sent", end.stdout)
    assert match, end
    assert 0 < int(match[1]) < 20_000
    np.testing.assert_array_equal(np.load(out), x @ bundles.exact_kernel())
    assert not partial.exists()


def test_one_request_from_the_command_line(
    triton: RunningTriton, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rsrv infer` takes numbers and files, prints outputs or writes them to a file, and explains a wrong input."""
    x = np.arange(64, dtype=np.float32)[None]
    np.save(tmp_path / "x.npy", x)
    address = ["--url", url(triton, "http")]
    expected = (x @ bundles.exact_kernel()).tolist()
    for value in (str(tmp_path / "x.npy"), json.dumps(x.tolist())):
        assert main(["infer", "exact", f"x={value}", "--json", *address]) == 0
        assert json.loads(capsys.readouterr().out) == {"y": expected}
    out = tmp_path / "out.npz"
    assert main(["infer", "exact", f"x={tmp_path / 'x.npy'}", "--out", str(out), *address]) == 0
    assert np.load(out)["y"].tolist() == expected
    assert main(["infer", "exact", "x=[[1]]", *address]) == 1
    assert "rsrv infer: input x: expected shape [-1, 64]" in capsys.readouterr().err


def test_a_wrong_address_fails_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The client does not wait for a server that has never answered. Its error says what to check."""
    for address in ("localhost:1", "http://localhost:1"):
        with (
            Client(address) as client,
            pytest.raises(RequestError, match="check that the server runs") as error,
        ):
            client.infer("m", x=1)
        assert error.value.attempts == 1
        assert main(["doctor", "--url", address]) == 1
        assert "bytes (no connection to the server: " in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("shared", [False, True], ids=["bytes", "shared"])
def test_a_data_set_outlives_its_server(
    start_triton: StartTriton, tmp_path: Path, protocol: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed and started again while a data set is sent. No row is lost, wrong or doubled."""
    if shared:
        monkeypatch.setattr("rsrv.client.shared_memory.LEAST_BYTES", 0)
    server = start_triton(
        make_repository(tmp_path, bundles.ensure() / "exact"),
        expected=None,
        make=partial(TritonServer, client_shared_memory=shared),
    )
    x = np.random.default_rng(0).integers(-50, 51, (20_000, 64)).astype(np.float32)
    with Client(url(server, protocol)) as client:
        rows: list[np.ndarray] = []
        for number, outputs in client.map("exact", x, rows_per_request=4):
            rows.append(outputs["y"])
            if number == 5_000:
                server.server.kill()
                server.server.start()
            assert number + 1 == len(rows)
        assert (client.transport == "shared memory") == shared
    np.testing.assert_array_equal(np.stack(rows), x @ bundles.exact_kernel())


@pytest.mark.long
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_data_set_outlives_a_rolling_restart(tmp_path: Path, protocol: str) -> None:
    """Two servers behind a gateway are restarted one after the other. No row of a data set is lost, wrong or doubled."""
    repository = make_repository(tmp_path, bundles.ensure() / "exact")
    x = np.random.default_rng(0).integers(-50, 51, (20_000, 64)).astype(np.float32)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running_triton(repository, tmp_path / f"{name}.log", expected=None))
            for name in "ab"
        ]
        gateway = stack.enter_context(running_gateway(tmp_path, servers))
        address = gateway.url if protocol == "grpc" else f"http://{gateway.http_url}"
        client = stack.enter_context(Client(address))
        rows: list[np.ndarray] = []
        for number, outputs in client.map("exact", x, rows_per_request=4):
            assert number == len(rows)
            rows.append(outputs["y"])
            if number in (5_000, 12_000):
                server = servers[number > 5_000]
                server.server.process.terminate()
                server.server.process.wait()
                server.server.start().wait_ready(PATIENCE_S)
    np.testing.assert_array_equal(np.stack(rows), x @ bundles.exact_kernel())
