"""Bundles that are deleted, truncated or replaced while the runtime reads them: only their own load fails."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors

from rsrv.stub.connection import Rejected
from tests.fakes import FakeRequest
from tests.unit.runtime.conftest import Runtime
from tests.unit.runtime.engines import make_engine, ramp
from tests.unit.runtime.metas import ask
from tests.waiting import PATIENCE_S, wait_until


def delete(bundle: Path) -> None:
    shutil.rmtree(bundle)


def cut_the_weights(bundle: Path) -> None:
    os.truncate(bundle / "weights.safetensors", 100)


def empty_everything(bundle: Path) -> None:
    for path in bundle.iterdir():
        os.truncate(path, 0)


@pytest.mark.parametrize("damage", [delete, cut_the_weights, empty_everything])
def test_a_bundle_that_is_damaged_while_it_is_built_fails_alone(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """A bundle that is damaged during its compilation is rejected.

    Others are served, and the repaired bundle can be loaded.
    """
    mine = tmp_path / "mine"
    shutil.copytree(doublings["b"], mine)
    other = make_engine(runtime, doublings["a"])
    runtime.device.compiles.clear()
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(make_engine, runtime, mine, name="mine")
        runtime.device.compiles.wait_until_held()
        damage(mine)
        runtime.device.compiles.set()

        with pytest.raises(
            Rejected,
            match=r"^(weights\.safetensors|model\.b\d\.mlir): (cannot be read|changed since|was written to)",
        ):
            loading.result(PATIENCE_S)

    assert ask(other, FakeRequest({"x": ramp(1)}))[0].error is None
    shutil.rmtree(mine, ignore_errors=True)
    shutil.copytree(doublings["b"], mine)
    again = make_engine(runtime, mine, name="mine")
    assert ask(again, FakeRequest({"x": ramp(1)}))[0].error is None
    for engine in (other, again):
        engine.close()
    wait_until(lambda: runtime.device.resident == 0)


def test_no_file_of_a_bundle_is_mapped(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime maps no file of a bundle, because the truncation of a mapped file would end the process."""
    mine = tmp_path / "mine"
    shutil.copytree(doublings["a"], mine)
    mapped: list[bool] = []
    real = safetensors.safe_open

    class Opened:
        def __init__(self, path: str, framework: str) -> None:
            self._file = real(path, framework=framework)

        def __enter__(self) -> None:
            mapped.append(str(mine) in Path("/proc/self/maps").read_text())

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(safetensors, "safe_open", Opened)

    engine = make_engine(runtime, mine, name="mine")

    assert mapped == [False]
    assert str(mine) not in Path("/proc/self/maps").read_text()
    engine.close()
