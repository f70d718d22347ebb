"""A runtime process as stubs start it. Models that are unloaded leave no memory behind."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rsrv.stub.connection import Rejected
from rsrv.stub.endpoint import WireTensor
from rsrv.stub.engine import Engine
from rsrv.stub.request import ArrivalTime, ClientRequest
from rsrv.stub.session import Launcher
from tests.fakes import FakeRequest
from tests.held import Held, has_returned, held, settled
from tests.products import COLUMNS, answer, make_products, question
from tests.status import read_status
from tests.unit.bundle.forge import seal
from tests.unit.runtime.metas import answer_of, assert_y, engine_of
from tests.waiting import wait_until

#: Number of different models. More would take more compilations and show nothing else.
MODELS = 4


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_products(tmp_path_factory.mktemp("products"), MODELS)


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """Yield a launcher of a runtime that ends with a fake tritonserver."""
    # The path is not below tmp_path, because a socket's path may have at most 107 characters.
    home = Path(tempfile.mkdtemp(prefix="rsrv-test-"))
    monkeypatch.setenv("RSRV_RUNTIME_DIR", str(home))
    monkeypatch.setenv("RSRV_RUNTIME_PYTHON", sys.executable)
    monkeypatch.setenv("RSRV_RUNTIME__COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("RSRV_CONTROL__ENABLED", "false")
    # A spare would start after two seconds without a build, and take a descriptor for its socket.
    monkeypatch.setenv("RSRV_RUNTIME__SPARE", "false")
    server = subprocess.Popen(["sleep", "infinity"])
    try:
        yield Launcher(server.pid, "0", tmp_path / "rsrv.yaml", tmp_path, dict(os.environ))
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(home, ignore_errors=True)


def engine(launcher: Launcher, bundle: Path) -> Engine:
    outputs = [WireTensor("y", "f32", (-1, COLUMNS))]
    return engine_of(launcher.open, bundle, bundle.name, outputs=outputs)


def come_and_go(launcher: Launcher, bundle: Path, number: int) -> None:
    """Load a model, send requests, and unload it. For every third model, a request is in flight at the end."""
    stub = engine(launcher, bundle)
    for rows in (1, 3):
        x = question(number, rows)
        request = FakeRequest({"x": x})
        answers = stub.execute([request])
        got = answers[0] if answers is not None else answer_of(request)
        assert_y(got, answer(number, x))
    if number % 3 == 0:
        attachment = stub.session.attachment
        assert attachment is not None
        stub._answer_later(attachment, [ClientRequest(FakeRequest({"x": x}), ArrivalTime.now())])
    stub.close()


def at_rest(launcher: Launcher) -> Held:
    """Return the runtime's numbers after all models and all connections for the status have ended."""
    pid = read_status(launcher.server_pid)["pid"]
    wait_until(lambda: not read_status(launcher.server_pid)["models"], what="the models' end")
    return settled(lambda: held(pid))


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(2 * MODELS, id="twice each"),
        pytest.param(500, id="five hundred", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_models_that_come_and_go_leave_nothing(
    launcher: Launcher, products: list[Path], tmp_path: Path, rounds: int
) -> None:
    """After many models were loaded and unloaded, memory, descriptors and threads are as after the first ones."""
    broken = Path(shutil.copytree(products[0], tmp_path / "broken"))
    (broken / "model.b4.mlir").write_bytes(b"ML\xefR no module at all")
    seal(broken)

    def load_and_unload(round_: int) -> None:
        if round_ % 4 == 0:
            with pytest.raises(Rejected):
                engine(launcher, broken)
        come_and_go(launcher, products[round_ % MODELS], round_ % MODELS)

    for round_ in range(MODELS):
        load_and_unload(round_)
    before = at_rest(launcher)
    for round_ in range(MODELS, rounds):
        load_and_unload(round_)
    pid = read_status(launcher.server_pid)["pid"]

    wait_until(lambda: has_returned(before, held(pid)), what=f"no more than {before}")
