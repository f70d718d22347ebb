"""`rsrv serve` as a user runs it: it serves bundles with a real server until Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from local_triton import EXEC_BOUND, LAUNCHER, LOOPBACK, free_ports, path_with_tritonserver
from rsrv.wire.paths import base_directory
from tests.e2e.harness import compilation_cache, is_alive, make_repository
from tests.e2e.lives import COLUMNS, answer, place, write_version
from tests.waiting import PATIENCE_S, wait_until

QUICK = "lifecycle: {poll_s: 0.1}\n"


class Terminal:
    """A running `rsrv serve`, and its output."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, ports: Sequence[int]) -> None:
        self.process = process
        self.folder = folder
        self.http_port, self.grpc_port, self.metrics_port = ports

    @property
    def server_pid(self) -> int:
        """Return the pid of the last tritonserver that `rsrv serve` has started."""
        return int(re.findall(r"tritonserver is process (\d+)", self.text)[-1])

    @property
    def text(self) -> str:
        return (self.folder / "output").read_text()

    def wait_for(self, words: str, timeout: float = PATIENCE_S) -> None:
        wait_until(lambda: words in self.text or self.status is not None, timeout, what=repr(words))
        assert words in self.text, f"rsrv serve ended with {self.status}:\n{self.text}"

    @property
    def status(self) -> int | None:
        """Return the exit status of `rsrv serve`, or None while it runs."""
        return self.process.poll()


@contextmanager
def serving(
    folder: Path, *arguments: str, gpu: Mapping[str, str] | None = None, settings: str = ""
) -> Iterator[Terminal]:
    """Run `rsrv serve bundles` in this folder, on free ports.

    `gpu`: variables that name the machine's GPUs. Without them, the server uses the CPU.
    """
    (folder / "rsrv.yaml").write_text(QUICK + settings)
    numbers = free_ports(3)
    kinds = ("http", "grpc", "metrics")
    ports = [f"--{kind}-port={number}" for kind, number in zip(kinds, numbers, strict=True)]
    environment = {
        **os.environ,
        "RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(compilation_cache()),
        "RSRV_METRICS__LISTEN": "null",
        "PATH": path_with_tritonserver(),
        **(gpu or {}),
    }
    command = [sys.executable, "-m", "rsrv.cli.main", "serve", "bundles", "--config=rsrv.yaml"]
    if gpu is None:
        command.append("--devices=cpu")
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(EXEC_BOUND), str(os.getpid()), *command, *ports, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield Terminal(process, folder, numbers)
    finally:
        process.kill()
        process.wait()


def with_cats(folder: Path) -> Path:
    """Put a bundle into the folder, and return the folder."""
    (folder / "bundles").mkdir(parents=True)
    place(write_version(folder / "first", 1), folder / "bundles" / "cats")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_cats(tmp_path)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """A server for two tests. The second test stops it."""
    with serving(with_cats(tmp_path_factory.mktemp("service")), "--drain=3000") as terminal:
        terminal.wait_for("Stop with Ctrl-C")
        yield terminal


def test_a_folder_of_any_name_is_served_followed_and_stopped(tmp_path: Path) -> None:
    """One command serves the bundles, prints the addresses, follows changes, and ends with Ctrl-C.

    Triton's shell and its stubs cannot use the folder's name, so they use a link to the folder. At the end, the link is removed.
    """
    folder = with_cats(tmp_path / 'it\'s $(one) & "two"; gr\u00fcn')
    (folder / "bundles" / "cats" / "model.py").write_text("def preprocess(inputs):\n    return inputs\n")
    with serving(folder) as terminal:
        terminal.wait_for("Stop with Ctrl-C")
        assert "cats is ready" in terminal.text
        assert f"gRPC       localhost:{terminal.grpc_port}" in terminal.text
        assert answer(terminal.grpc_port, "cats") == 1
        place(write_version(folder / "second", 2), folder / "bundles" / "dogs")
        terminal.wait_for("dogs is ready")
        assert answer(terminal.grpc_port, "dogs") == 2
        place(write_version(folder / "third", 3), folder / "bundles" / "cats")
        terminal.wait_for("cats serves its new bundle")
        wait_until(lambda: answer(terminal.grpc_port, "cats") == 3, what="the new answer")
        shutil.rmtree(folder / "bundles" / "dogs")
        terminal.wait_for("dogs is removed")
        (link,) = [link for link in base_directory().glob("folder-*") if link.resolve() == folder / ".rsrv"]
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(PATIENCE_S) == 0, terminal.text
        assert terminal.text.endswith("Ctrl-C again stops at once.\n")
    assert not link.is_symlink()


def listening(pid: int) -> set[str]:
    """Return the addresses at which a process and its descendants listen."""
    process = psutil.Process(pid)
    sockets = [
        connection
        for member in [process, *process.children(recursive=True)]
        for connection in _connections(member)
        if connection.status == psutil.CONN_LISTEN
    ]
    return {connection.laddr.ip.removeprefix("::ffff:") for connection in sockets}


def _connections(process: psutil.Process) -> list[Any]:
    """Return the TCP sockets of a process, or nothing if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return list(process.net_connections("tcp"))
    return []


def is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except InferenceServerException as error:
        return error.status() in ("StatusCode.UNAVAILABLE", "403")
    return False


def test_a_server_is_for_this_machine_and_its_operators_key(service: Terminal) -> None:
    """The server listens only on the loopback address. Loads, logs, traces and shared memory need the operator's key.

    Other requests need no key.
    """
    assert listening(service.process.pid) == {LOOPBACK}
    key = (service.folder / ".rsrv" / "operator-key").read_text().strip()
    http = tritonclient.http.InferenceServerClient(f"{LOOPBACK}:{service.http_port}")
    grpc = tritonclient.grpc.InferenceServerClient(f"{LOOPBACK}:{service.grpc_port}")
    for client, header in ((http, "rsrv-key"), (grpc, "triton-grpc-protocol-rsrv-key")):
        assert is_refused(client.get_model_repository_index)
        assert is_refused(partial(client.load_model, "cats"))
        assert is_refused(client.get_log_settings)
        assert is_refused(client.get_trace_settings)
        assert is_refused(client.get_system_shared_memory_status)
        client.load_model("cats", headers={header: key})
        assert client.get_inference_statistics("cats")
        assert client.get_model_config("cats")
        assert client.is_server_ready()
        client.close()
    assert answer(service.grpc_port, "cats") == 1


def test_connections_that_clients_keep_do_not_delay_a_stop(service: Terminal) -> None:
    """At a stop, Triton itself would wait for an idle HTTP connection and for a gRPC stream. `rsrv serve` stops without this wait."""
    http = HTTPConnection(LOOPBACK, service.http_port, timeout=60)
    http.request("GET", "/v2/models/cats")
    assert http.getresponse().read()
    client = tritonclient.grpc.InferenceServerClient(f"{LOOPBACK}:{service.grpc_port}")
    client.start_stream(lambda result, error: None)
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(PATIENCE_S) == 0, service.text
    client.stop_stream()
    client.close()
    http.close()
    log = (service.folder / ".rsrv" / "serve.log").read_text()
    assert "successfully unloaded 'cats'" in log
    assert "all models are unloaded, but tritonserver would wait" in log


@pytest.mark.long
def test_flags_that_xla_refuses_are_said_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA_FLAGS are wrong, so each runtime ends at its start. `rsrv serve` reports the reason, and the model as failed and not as cold."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_nonsense=1")
    with serving(folder) as terminal:
        terminal.wait_for("Stop with Ctrl-C")
        text = "the runtime did not start: XLA_FLAGS in the environment of tritonserver cannot be used: Unknown flag"
        assert text in terminal.text
        assert "Serving 0 of 1 models, 1 failed" in terminal.text


def test_what_a_server_says_of_models_is_true(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that fails is not reported as cold, and an alias is not counted as a model.

    The server ignores jax's variables for debugging.
    """
    place(write_version(folder / "broken", 2), folder / "bundles" / "dogs")
    (folder / "bundles" / "dogs" / "model.py").write_text(
        "import no_such_module\n\n\ndef preprocess(i): return i\n"
    )
    monkeypatch.setenv("JAX_DISABLE_JIT", "1")
    with serving(folder, settings="aliases: {pets: {cats: 1}}\n") as terminal:
        terminal.wait_for("dogs has failed: ")
        terminal.wait_for("Stop with Ctrl-C")
        assert "Serving 1 of 2 models, 1 failed" in terminal.text
        assert "cold" not in terminal.text
        assert answer(terminal.grpc_port, "pets") == 1
        assert "are ignored: JAX_DISABLE_JIT" in (folder / ".rsrv" / "serve.log").read_text()


@pytest.mark.long
def test_a_directory_whose_name_is_not_utf_8_is_used(folder: Path) -> None:
    """A directory's name is not UTF-8. The server works, and messages with the name are printed."""
    with serving(folder, "--directory", os.fsdecode(b"latin \xe9")) as terminal:
        terminal.wait_for("Stop with Ctrl-C")
        assert answer(terminal.grpc_port, "cats") == 1
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(PATIENCE_S) == 0, terminal.text
        assert r"latin \udce9/serve.log" in terminal.text


@pytest.mark.long
def test_a_service_logs_objects_and_its_server_comes_back(folder: Path) -> None:
    """With `--log -`, the log goes to the output as JSON. A server that dies is replaced.

    When the command is killed, all its processes end.
    """
    with serving(folder, "--log", "-", settings="logs: {format: json}\n") as service:
        service.wait_for("Serving 1 of 1 models")
        assert answer(service.grpc_port, "cats") == 1
        first = service.server_pid
        before = list(base_directory().glob(f"{first}-*"))
        os.kill(first, signal.SIGKILL)
        service.wait_for("starting it again in 1 s")
        wait_until(lambda: service.server_pid != first, 30, what="another server")
        wait_until(lambda: answer(service.grpc_port, "cats") == 1, 60, what="the model again")
        # The directories of the dead server were removed.
        assert before
        assert not any(map(Path.exists, before))
        lines = service.text.split("\n")[:-1]
        loggers = {json.loads(line)["logger"] for line in lines if line.startswith("{")}
        assert loggers >= {"rsrv.serve.supervise", "rsrv.runtime.process", "rsrv.control"}
        assert [line for line in lines if re.search(r"^\d{4}-\d\d-\d\d .* rsrv", line)] == []
        pids = [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if any(f"{folder}/.rsrv/" in word for word in process.info["cmdline"] or ())
        ]
        assert len(pids) > 3

        service.process.kill()

        wait_until(lambda: not any(map(is_alive, pids)), 20, what="the end of all processes")
        wait_until(
            lambda: not list(base_directory().glob(f"{service.server_pid}-*")), 10, what="an empty place"
        )


@pytest.mark.long
def test_an_empty_folder_gets_a_bundle_and_a_server_that_hangs_is_replaced(folder: Path) -> None:
    """A server without models is started again for its first bundle. A server that does not answer is killed and replaced."""
    shutil.rmtree(folder / "bundles" / "cats")
    with serving(folder, "--log", "-") as service:
        service.wait_for("Serving 0 of 0 models")
        place(write_version(folder / "second", 2), folder / "bundles" / "cats")
        service.wait_for("cats is ready")
        assert answer(service.grpc_port, "cats") == 2
        service.wait_for("Serving 1 of 1 models")
        first = service.server_pid
        os.kill(first, signal.SIGSTOP)
        wait_until(lambda: service.server_pid != first, 100, what="another server")
        wait_until(lambda: answer(service.grpc_port, "cats") == 2, 60, what="the model again")
        assert "has not answered for 60 s and was killed" in service.text


@pytest.mark.long
def test_a_broken_bundle_is_named_and_the_others_are_served(folder: Path) -> None:
    """A bundle without its weights is reported with the missing file. The server starts, and serves the other bundle."""
    broken = write_version(folder / "second", 2)
    (broken / "weights.safetensors").unlink()
    place(broken, folder / "bundles" / "dogs")
    with serving(folder) as terminal:
        terminal.wait_for("Stop with Ctrl-C")
        assert "Serving 1 of 2 models" in terminal.text
        assert "dogs is not served: weights.safetensors: is missing" in terminal.text
        assert answer(terminal.grpc_port, "cats") == 1


def test_a_port_that_is_taken_ends_it_before_anything_is_loaded(folder: Path) -> None:
    """If a port is taken, the command ends with a message that names the port, and starts no server."""
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with serving(folder, f"--http-port={port}") as terminal:
            assert terminal.process.wait(PATIENCE_S) == 1
            assert terminal.text.startswith(f"rsrv serve: {LOOPBACK}:{port} cannot be used for http")


def test_the_plain_command_of_triton_serves(folder: Path) -> None:
    """`tritonserver --model-repository=gen/` serves without other flags. If the default ports are taken, the test adds flags for ports."""
    make_repository(folder)
    ports: tuple[int, ...] = (8000, 8001, 8002)
    flags = []
    if not all(map(_is_free, ports)):
        ports = tuple(free_ports(3))
        flags = [
            f"--{kind}-port={port}" for kind, port in zip(("http", "grpc", "metrics"), ports, strict=True)
        ]
    command = [str(LAUNCHER), "--model-repository=gen/", *flags]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(EXEC_BOUND), str(os.getpid()), *command],
            cwd=folder,
            env={
                **os.environ,
                "RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(compilation_cache()),
                "RSRV_METRICS__LISTEN": "null",
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: process.poll() is not None or _listens(ports[0]), what="Triton's HTTP port")
        assert process.poll() is None, (folder / "output").read_text()
        assert answer(ports[1], "cats") == 1
        body = json.dumps(
            {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, COLUMNS], "data": [0] * COLUMNS}]}
        )
        url = f"http://{LOOPBACK}:{ports[0]}/v2/models/cats/infer"
        with urlopen(Request(url, body.encode()), timeout=PATIENCE_S) as reply:
            outputs = {tensor["name"]: tensor["data"] for tensor in json.load(reply)["outputs"]}
        assert outputs["second"] == [1] * COLUMNS
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    """Return True if a server listens on this port.

    The check connects to the port. A check that bound the port could prevent the server from listening on it.
    """
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


def _is_free(port: int) -> bool:
    """Return True if no process listens on this port, on any address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
