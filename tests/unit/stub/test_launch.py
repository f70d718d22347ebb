"""Starting the runtime: the retries, and the reason if there is no runtime."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from rsrv.stub.connection import LaunchError, greet
from rsrv.stub.replica import StubProcess
from rsrv.stub.replicas import Replicas
from rsrv.stub.replies import Responses
from rsrv.stub.session import Launcher, Session
from rsrv.stub.tensors import Tensors
from rsrv.wire.paths import FAILURE, runtime_directory
from rsrv.wire.socket import connect, listen
from tests.fakes import FakePbUtils

#: A program in place of the runtime's interpreter. It adds a line to "$0.starts" at each start. Its first start is killed, its
#: second start ends without a message, and each later start fails with an error.
_SCRIPT = """#!/bin/sh
echo started >> "$0.starts"
case $(wc -l < "$0.starts") in
    1) kill -9 $$ ;;
    2) exit 0 ;;
    *) echo "No module named rsrv" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    python = tmp_path / "python"
    python.write_text(_SCRIPT)
    python.chmod(0o700)
    monkeypatch.setenv("RSRV_RUNTIME_PYTHON", str(python))
    # The directory is not below tmp_path, because a socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="rsrv-test-") as home:
        monkeypatch.setenv("RSRV_RUNTIME_DIR", home)
        yield python


def test_a_first_load_outlives_runtimes_that_are_killed_while_they_start(
    interpreter: Path, tmp_path: Path
) -> None:
    """If a runtime is killed or ends without a message while it starts, the first load starts another one.

    If the runtime reports an error, it is not started again.
    """
    launcher = Launcher(os.getpid(), "0", tmp_path / "rsrv.yaml", tmp_path, dict(os.environ))
    session = Session(launcher.open, "m", "/models/m")
    model = Replicas(
        lambda device: session, Mock(), "m", StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils))
    )

    with pytest.raises(LaunchError, match=r"it ended without a message.*RSRV_RUNTIME_PYTHON"):
        model.load()

    assert (tmp_path / "python.starts").read_text().splitlines() == ["started"] * 3


def test_a_device_is_woken_although_runtimes_are_killed_while_they_start(
    interpreter: Path, tmp_path: Path
) -> None:
    """If an operator wakes a device and its runtime is killed while it starts, another runtime is started.

    The command fails if the runtime reports an error.
    """
    launcher = Launcher(os.getpid(), "0", tmp_path / "rsrv.yaml", tmp_path, dict(os.environ))

    with pytest.raises(LaunchError, match="it ended without a message"):
        launcher.start()

    assert (tmp_path / "python.starts").read_text().splitlines() == ["started"] * 3


def test_a_further_device_that_cannot_start_delays_one_load_a_minute(
    interpreter: Path, tmp_path: Path
) -> None:
    """If the runtime of a further device cannot start, only one load per minute tries it again.

    Other loads fail at once with the reason of the latest attempt. The runtime of device 0 is started for each load.
    """
    (tmp_path / "python.starts").write_text("\n\n")

    def launch(device: str) -> int:
        launcher = Launcher(os.getpid(), device, tmp_path / "rsrv.yaml", tmp_path, dict(os.environ))
        with pytest.raises(LaunchError, match="it ended without a message"):
            launcher.open()
        return (tmp_path / "python.starts").read_text().count("started")

    assert [launch("1"), launch("1"), launch("0"), launch("0")] == [1, 1, 2, 3]
    failure = runtime_directory(os.getpid(), "1") / FAILURE
    os.utime(failure, (failure.stat().st_mtime - 61,) * 2)
    assert [launch("1"), launch("1")] == [4, 4]


def test_a_device_that_cannot_be_had(
    interpreter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the configured device cannot be used, the error names the setting, and does not blame the Python installation."""
    monkeypatch.setenv("RSRV_RUNTIME_PYTHON", sys.executable)
    settings = tmp_path / "rsrv.yaml"
    settings.write_text("runtime: {platform: cpu, devices: [0]}")
    launcher = Launcher(os.getpid(), "0", settings, tmp_path, dict(os.environ))

    with pytest.raises(
        LaunchError, match=r"runtime\.devices: 0 is a GPU, and runtime\.platform is cpu"
    ) as error:
        launcher.open()

    assert "RSRV_RUNTIME_PYTHON" not in str(error.value)


def test_a_runtime_that_takes_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a runtime accepts no connection, the error names the likely reason and the limit to raise."""
    monkeypatch.setattr("rsrv.stub.connection.GREETING_TIMEOUT_S", 0.01)
    with (
        listen(tmp_path / "socket"),
        pytest.raises(LaunchError, match=r"accepted no connection .* \(ulimit -Hn"),
    ):
        greet(connect(tmp_path / "socket"))
