"""Meta models in the status."""

import os
import threading
from pathlib import Path

from rsrv.stub.connection import RuntimeConnection
from tests.builders import write_meta
from tests.status import read_status
from tests.unit.runtime.conftest import Runtime


def test_a_meta_model_shows_while_those_that_it_calls_are_built(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """A meta model is in the status while its callees are built."""
    meta = write_meta(tmp_path / "meta", "def run(inputs, call): ...", ["a", "b"])
    runtime.device.compiles.clear(after=1)  # Holds all sizes of `b`, and some of `a`.
    lane = RuntimeConnection(runtime.open())
    calls = {name: str(doublings[name]) for name in "ab"}
    loading = threading.Thread(
        target=lane.register, args=[{"model": "meta", "bundle": str(meta), "calls": calls}]
    )
    loading.start()
    runtime.device.compiles.wait_until_held()

    try:
        assert read_status(os.getpid())["metas"]["meta"]["models"] == ["a", "b"]
    finally:
        runtime.device.compiles.set()
        loading.join()
        lane.close()
