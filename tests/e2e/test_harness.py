"""The harness itself, shown on an echo model that uses nothing of this project."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc
import tritonclient.http

from examples.build import SMALL
from local_triton import ServerFailed, group_lives
from rsrv_bundle import read_bundle
from rsrv_gen import cli as rsrv_gen
from tests.e2e.harness import (
    ROOT,
    RunningTriton,
    StartTriton,
    aborted_by_a_lock,
    despite,
    is_alive,
    wait_until,
)
from tests.unit.gen.bundles_for_tests import write_bundle

ECHO_CONFIG = """
name: "echo"
backend: "python"
max_batch_size: 0
input [{ name: "x" data_type: TYPE_FP32 dims: [-1, 3] }]
output [{ name: "x" data_type: TYPE_FP32 dims: [-1, 3] }]
instance_group [{ kind: KIND_CPU count: 1 }]
"""

# Gives back the very tensors that it got: no numpy, which this Triton's stub corrupts when it is version 2.
ECHO_MODEL = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        return [pb.InferenceResponse([pb.get_input_tensor_by_name(request, "x")]) for request in requests]
"""

BROKEN_MODEL = """
class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError("broken on purpose")
"""


def write_model(repository: Path, name: str, source: str) -> None:
    """A Python model with the echo model's tensors."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(source)
    (repository / name / "config.pbtxt").write_text(ECHO_CONFIG.replace('"echo"', f'"{name}"'))


@pytest.fixture
def echo_repository(tmp_path: Path) -> Path:
    """A repository with the echo model only."""
    write_model(tmp_path / "repository", "echo", ECHO_MODEL)
    return tmp_path / "repository"


def infer(protocol: ModuleType, client: object, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """One request to the echo model."""
    tensor = protocol.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    answer: npt.NDArray[np.float32] = client.infer("echo", [tensor]).as_numpy("x")  # type: ignore[attr-defined]
    return answer


def test_both_protocols_return_what_was_sent(start_triton: StartTriton, echo_repository: Path) -> None:
    """The server serves a Python model over gRPC and HTTP, and every element arrives where it belongs."""
    running = start_triton(echo_repository)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(infer(tritonclient.grpc, running.grpc, x), x)
    np.testing.assert_array_equal(infer(tritonclient.http, running.http, x), x)
    assert running.log_path.is_file()


def test_a_stopped_server_leaves_no_process(start_triton: StartTriton, echo_repository: Path) -> None:
    """SIGTERM ends the server with status 0, and its stubs with it."""
    running = start_triton(echo_repository)
    stubs = running.stub_pids("echo")
    assert len(stubs) == 1
    assert running.server.terminate() == 0
    wait_until(lambda: not any(map(is_alive, stubs)), 10, what="end of the stubs")


def test_a_killed_server_leaves_no_process(start_triton: StartTriton, echo_repository: Path) -> None:
    """SIGKILL to the server takes its stubs with it."""
    running = start_triton(echo_repository)
    stubs = running.stub_pids()
    running.server.kill()
    wait_until(lambda: not any(map(is_alive, stubs)), 10, what="end of the stubs")


def test_a_process_that_nobody_has_asked_after_is_no_life() -> None:
    """A group whose last process has ended, and waits for its parent to notice, does not live."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True)
    assert group_lives(process.pid)
    assert process.stdin is not None
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not group_lives(process.pid)
    assert process.wait() == 0


def test_a_killed_test_run_leaves_no_server(echo_repository: Path) -> None:
    """When the process that started a server is killed, the server goes too."""
    starter = (
        "import sys, pathlib; from local_triton import TritonServer\n"
        "server = TritonServer(pathlib.Path(sys.argv[1]), log_path=pathlib.Path(sys.argv[2])).start()\n"
        "server.wait_ready(60)\n"
        "print(server.pid, flush=True)\n"
        "server.process.wait()\n"
    )
    command = [
        sys.executable,
        "-c",
        starter,
        str(echo_repository),
        str(echo_repository.parent / "server.log"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_alive(pid)
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), 10, what="end of the server")


def test_a_model_that_fails_is_named_with_its_reason(
    start_triton: StartTriton, echo_repository: Path
) -> None:
    """Waiting for a server with a broken model ends as soon as the server gives up, with the model's own words."""
    write_model(echo_repository, "broken", BROKEN_MODEL)
    with pytest.raises(ServerFailed, match="broken on purpose"):
        start_triton(echo_repository)


def test_a_model_that_fails_need_not_stop_the_others(
    start_triton: StartTriton, echo_repository: Path
) -> None:
    """Without exit_on_error the broken model is listed as unavailable and the other one serves."""
    write_model(echo_repository, "broken", BROKEN_MODEL)
    running: RunningTriton = start_triton(echo_repository, exit_on_error=False)
    states = running.server.model_states()
    assert states["echo"][0] == "READY"
    assert states["broken"][0] == "UNAVAILABLE"
    assert "broken on purpose" in states["broken"][1]
    x = np.ones((1, 3), np.float32)
    np.testing.assert_array_equal(infer(tritonclient.grpc, running.grpc, x), x)


@pytest.mark.parametrize(
    ("said", "tries"),
    [
        ("terminate called after throwing an instance of 'boost::interprocess::lock_exception'\n", 2),
        ("terminate called after throwing an instance of 'std::bad_alloc'\n", 1),
    ],
)
def test_a_check_is_repeated_once_if_triton_aborted_by_its_own_fault(
    start_triton: StartTriton, echo_repository: Path, said: str, tries: int
) -> None:
    """A server that aborts for another reason fails the test at once, and so does the second server."""
    servers: list[RunningTriton] = []

    def check(server: RunningTriton) -> None:
        servers.append(server)
        with server.log_path.open("a") as log:
            log.write(said)
        os.kill(server.pid, signal.SIGABRT)
        raise AssertionError("the server is gone")

    with pytest.raises(AssertionError, match="the server is gone"):
        despite(aborted_by_a_lock, lambda: start_triton(echo_repository), check)
    assert len(servers) == tries


def test_the_shared_server_has_the_small_examples(triton: RunningTriton, example_bundles: Path) -> None:
    """Each of these bundles became a model that is ready, but for those that meta models call."""
    manifests = {name: read_bundle(example_bundles / name, digest=False).manifest for name in SMALL}
    called = {name for manifest in manifests.values() for name in manifest.meta_calls}
    names = manifests.keys() - called
    assert names
    assert called
    states = triton.server.model_states()
    assert {name: states[name][0] for name in names} == dict.fromkeys(names, "READY")
    assert called.isdisjoint(states)


def test_a_generated_model_is_loaded_once_by_a_polling_server(
    start_triton: StartTriton, echo_repository: Path, tmp_path: Path
) -> None:
    """Python can't leave compiled files in a generated directory, so a poll sees no change after the load.

    The generated model.py is replaced by one that needs nothing of this project.
    """
    gen = tmp_path / "gen"
    assert rsrv_gen.main([str(write_bundle(tmp_path / "toy")), "-o", str(gen)]) == 0
    (gen / "toy" / "1" / "model.py").write_text(ECHO_MODEL)
    running = start_triton(gen, extra_args=["--model-control-mode=poll", "--repository-poll-secs=1"])

    def is_ready(model: str) -> bool:
        return running.server.model_states().get(model, ("", ""))[0] == "READY"

    # A model that appears is loaded by a later poll than the first; the one after that has seen all of both.
    for name in ("later", "last"):
        (echo_repository / "echo").rename(echo_repository / name)
        config = echo_repository / name / "config.pbtxt"
        config.write_text(config.read_text().replace('name: "echo"', ""))
        shutil.copytree(echo_repository / name, echo_repository / "echo")
        (echo_repository / name).rename(gen / name)
        wait_until(partial(is_ready, name), what=f"{name} to load")
    assert is_ready("toy")
    assert running.log_text().count("successfully loaded 'toy'") == 1
