"""Weights that are overwritten in place and only partly written. They are never served, and the error names them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.calls import Refused, caller, outcome
from tests.e2e.harness import EXPLICIT, HURRY, RunningTriton, make_repository, running_triton
from tests.e2e.lives import COLUMNS, Living, place, version, write_version
from tests.status import read_status
from tests.waiting import wait_until

pytestmark = pytest.mark.long

WEIGHTS = "weights.safetensors"
TORN = f"{WEIGHTS} does not match the manifest: it is being written"
#: The versions of an answer. Each is a pair: the version of the weights, and the version of the code.
ONE, TWO = (1, 0), (2, 0)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Path]:
    """Return two versions of one model, which have different weights."""
    folder = tmp_path_factory.mktemp("versions")
    return {ONE: write_version(folder / "one", 1), TWO: write_version(folder / "two", 2)}


@contextmanager
def serving(folder: Path, version: Path, mode: str) -> Iterator[tuple[RunningTriton, Living]]:
    """Yield a server of `torn` and `steady`. The repository links the bundles' files of weights, so it has no copies of them."""
    for name in ("torn", "steady"):
        place(version, folder / "bundles" / name)
    repository = make_repository(folder, settings=f"lifecycle: {{mode: {mode}, poll_s: 0.1}}\n")
    assert os.path.samefile(folder / "bundles/torn" / WEIGHTS, repository / "torn/1/bundle" / WEIGHTS)
    with running_triton(
        repository, folder / "server.log", extra_args=[*EXPLICIT, HURRY], spare=True
    ) as server:
        life = Living(server)
        yield server, life
        life.close()


def tear(bundle: Path, new: Path) -> None:
    """Overwrite a bundle in place, as an unfinished `cp` does: the last weight is missing.

    An answer from this bundle would mix two versions.
    """
    (bundle / "manifest.yaml").write_bytes((new / "manifest.yaml").read_bytes())
    with (bundle / WEIGHTS).open("r+b") as file:
        file.write((new / WEIGHTS).read_bytes()[: -4 * COLUMNS])


def finish(bundle: Path, new: Path) -> None:
    """Overwrite a whole bundle in place."""
    for file in bundle.iterdir():
        with file.open("r+b") as opened:
            opened.write((new / file.name).read_bytes())
            opened.truncate()


@contextmanager
def traffic(server: RunningTriton) -> Iterator[list[tuple[int, int] | Refused]]:
    """Collect the answers of `torn` during the block. Each answer must come from a single version."""
    stop = threading.Event()
    results: list[tuple[int, int] | Refused] = []

    def ask() -> None:
        with caller(server) as call:
            while not stop.is_set():
                results.append(outcome(lambda: version(call, "torn")))

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield results
        finally:
            stop.set()
        asking.result()


def test_a_torn_file_leaves_the_old_version_serving(
    versions: dict[tuple[int, int], Path], tmp_path: Path
) -> None:
    """In dynamic mode, a bundle is partly overwritten under load. The old version is served until the bundle is complete or restored."""
    with serving(tmp_path, versions[ONE], "dynamic") as (server, life):
        bundle = tmp_path / "bundles" / "torn"
        with traffic(server) as results:
            wait_until(lambda: ONE in results)
            tear(bundle, versions[TWO])
            wait_until(lambda: TORN in life.failures.get("torn", ""), what="the failure")
            assert TORN in server.log_text()
            count = len(results)
            wait_until(lambda: len(results) > count + 10)
            assert set(results) == {ONE}
            finish(bundle, versions[TWO])
            wait_until(lambda: results[-1] == TWO, what="the new version")
            wait_until(lambda: not life.failures, what="the failure's end")

            results.clear()
            tear(bundle, versions[ONE])
            wait_until(lambda: TORN in life.failures.get("torn", ""), what="the second failure")
            finish(bundle, versions[TWO])
            wait_until(lambda: not life.failures, what="its end")
            assert set(results) == {TWO}


def test_a_runtime_that_follows_a_crash_refuses_torn_weights(
    versions: dict[tuple[int, int], Path], tmp_path: Path
) -> None:
    """In static mode, a bundle is partly overwritten before the runtime crashes.

    The next runtime refuses the torn weights by name until their content is restored.
    """
    with serving(tmp_path, versions[ONE], "static") as (server, life), caller(server) as call:
        bundle = tmp_path / "bundles" / "torn"
        with traffic(server) as results:
            wait_until(lambda: ONE in results)
            tear(bundle, versions[TWO])
            os.kill(read_status(server.pid)["pid"], signal.SIGKILL)
            wait_until(lambda: outcome(lambda: version(call, "steady")) == ONE, 60, what="the next runtime")
            wait_until(lambda: f"torn: not loaded: {TORN}" in server.log_text(), 60, what="the refusal")
            wait_until(lambda: isinstance(results[-1], Refused), what="a refused request")
            refused = len(results)
            wait_until(lambda: TORN in life.broken("torn"), what="the failure")
            assert version(call, "steady") == ONE
            wait_until(lambda: len(results) > refused + 10)
            count = len(results)
            finish(bundle, versions[ONE])
            wait_until(lambda: results[-1] == ONE, 90, what="the model")
            wait_until(lambda: not life.broken("torn"), what="the failure's end")
            assert {result for result in results if not isinstance(result, Refused)} == {ONE}
            assert not any(result == ONE for result in results[refused:count])
