"""Bundles that crash their parser, and a runtime that parses in another process first."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rsrv.stub.connection import Rejected
from rsrv_bundle.inspection import Inspector
from rsrv_bundle.modules import Signature
from tests.unit.bundle.forge import seal
from tests.unit.bundle.test_inspection import CRASHED, CRASHING
from tests.unit.runtime.conftest import StartRuntime
from tests.unit.runtime.test_hostile_peers import Client
from tests.waiting import wait_until


@pytest.fixture
def inspector() -> Iterator[Inspector]:
    with closing(Inspector()) as made:
        yield made


def test_a_bundle_that_crashes_the_parser_is_refused_and_the_others_are_served(
    start_runtime: StartRuntime, inspector: Inspector, doubling: Path, tmp_path: Path
) -> None:
    """A bundle that crashes the parser is rejected with the file's name, and other models load and serve."""
    runtime = start_runtime(inspector=inspector)
    before = Client(runtime, doubling)
    bad = shutil.copytree(doubling, tmp_path / "bad")
    (bad / "model.b4.mlir").write_bytes(CRASHING)
    seal(bad)

    with pytest.raises(Rejected, match=f"model.b4.mlir: ({CRASHED})"):
        runtime.connect().register({"model": "bad", "bundle": str(bad)})

    assert before.works()
    other = shutil.copytree(doubling, tmp_path / "other")
    after = Client(runtime, other)
    assert after.works()


def test_the_inspector_ends_when_nothing_is_built(
    start_runtime: StartRuntime, inspector: Inspector, doubling: Path
) -> None:
    """The inspector's process ends when nothing is built, because models need its memory."""
    runtime = start_runtime(inspector=inspector)
    client = Client(runtime, doubling)
    wait_until(lambda: inspector._child is None)
    assert client.works()


def test_a_module_that_is_exchanged_while_it_is_read_is_not_compiled(
    start_runtime: StartRuntime, inspector: Inspector, doubling: Path, tmp_path: Path
) -> None:
    """A module that is replaced after its inspection is not compiled: the runtime rejects the bundle."""
    bundle = shutil.copytree(doubling, tmp_path / "bundle")
    module = bundle / "model.b8.mlir"

    class Exchanging(Inspector):
        def __call__(self, blob: bytes, file: str) -> Signature:
            signature = super().__call__(blob, file)
            if file == module.name:
                module.write_bytes(CRASHING)
            return signature

    with closing(Exchanging()) as exchanging:
        runtime = start_runtime(inspector=exchanging)
        with pytest.raises(Rejected, match=r"model\.b8\.mlir: was written to while the model was loaded"):
            runtime.connect().register({"model": "m", "bundle": str(bundle)})
        runtime.stop()
