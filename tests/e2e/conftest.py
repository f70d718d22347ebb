"""Fixtures of the end-to-end tests: the example bundles, a repository made of them, and real servers."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

import example_bundles as examples
import native_front
from examples.build import DETECTOR, MINILM, UNTRAINED
from rsrv.serve import demo
from tests.e2e import bundles, stateful
from tests.e2e.gateways import Fleet, running_fleet
from tests.e2e.harness import RunningTriton, StartTriton, log_tails, make_repository, running_triton

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test in this folder as e2e."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """When a test fails, show the end of the log of each server that runs."""
    report = yield
    if report.failed and HERE in item.path.parents:
        report.sections.extend(log_tails())
    return report


@pytest.fixture(scope="session", autouse=True)
def native_library() -> None:
    """Build the native front. Without this library, Triton does not batch requests of models with the Python front."""
    native_front.ensure()


@pytest.fixture(scope="session")
def example_bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example bundles that need no training, and with the demo's bundle `digits`, which is in the source tree."""
    folder, built = tmp_path_factory.mktemp("examples"), examples.ensure(UNTRAINED)
    for bundle in (*(built / name for name in UNTRAINED), demo.DATA / demo.BUNDLES / demo.MODEL):
        (folder / bundle.name).symlink_to(bundle)
    return folder


@pytest.fixture(scope="session")
def pipeline_bundles() -> Path:
    """The folder of the detector and the text pipeline, for long tests. Building the detector includes its training."""
    return examples.ensure((*DETECTOR, *MINILM))


@pytest.fixture(scope="session")
def pipelines(pipeline_bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """A server with the detector and the text pipeline. Long tests share it, so each test must restore what it changes."""
    folder = tmp_path_factory.mktemp("pipelines")
    # Compiling all twelve modules of the encoder would take most of the server's start.
    fewer = {name: bundles.with_sizes(pipeline_bundles / name, folder / name, [4]) for name in MINILM[1:]}
    sources = (fewer.get(name, pipeline_bundles / name) for name in (*DETECTOR, *MINILM))
    with running_triton(make_repository(folder, *sources), folder / "server.log") as running:
        yield running


@pytest.fixture(scope="session")
def triton(example_bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """A server with small example bundles, all test bundles and `sums`.

    All tests share it, so each test must restore what it changes.
    """
    folder = tmp_path_factory.mktemp("triton")
    made = (example_bundles, bundles.ensure(), stateful.ensure() / "sums")
    repository = make_repository(folder, *made, settings=bundles.SETTINGS)
    # `hooked` and `short_queue` cause the first two findings. On a busy machine, a client that sends without pauses causes the third.
    expected = ("requests_fail", "queue_full", "waits_in_triton")
    (meeting := folder / "meeting").mkdir()
    env = {bundles.MEETING: str(meeting)}
    with running_triton(repository, folder / "server.log", env=env, expected=expected) as running:
        yield running


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two servers with plain models, and a gateway. All tests share them, so each test must restore what it changes."""
    with running_fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture
def start_triton(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StartTriton]:
    """Start servers for one test, which may kill them. They end with the test."""
    numbers = count(1)
    # Long tests overload and break servers, so any finding is expected.
    expected = () if request.node.get_closest_marker("long") is None else None
    with ExitStack() as servers:

        def start(model_repository: Path, **options: object) -> RunningTriton:
            log_path = tmp_path / f"server{next(numbers)}.log"
            options = {"expected": expected, **options}
            return servers.enter_context(running_triton(model_repository, log_path, **options))  # type: ignore[arg-type]

        yield start
