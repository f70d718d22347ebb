"""Settings, order and limits that hold for all tests."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadFileScheduling

# Every run tries the same examples. There is no time limit for making or running an example, because a test must not fail on
# a busy machine. `make test-long` tries more examples.
for name, examples in (("repeatable", 30), ("thorough", 300)):
    settings.register_profile(
        name,
        max_examples=examples,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("repeatable")
# By default, Hypothesis also tries constants of imported modules, which differ between workers and after each change of code.
providers._get_local_constants = lambda: providers._local_constants

# Python writes bytecode, as it does for users. Tests show that no bytecode gets into a model repository. Hundreds of
# processes, and tests with thousands of assertions, also start without compiling their code again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell's background jobs ignore Ctrl-C, and so would the commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

UNIT = Path(__file__).parent / "unit"
#: A unit test is listed if it takes more CPU seconds than this, children included, unless it is marked `long`.
UNIT_CPU_S = 2.0
_CPU_PROPERTY = "cpu_s"
#: Fixtures whose server is shared by all tests that use it. These tests run on one worker of pytest-xdist.
SHARED_SERVERS = ("triton", "fleet")
#: Share of the unit tests among which the end-to-end tests are spread. The other unit tests run last.
_SPREAD = 0.6

_MADE = pytest.StashKey[str]()


@pytest.fixture(autouse=True)
def _root_logger() -> Generator[None]:
    """Undo changes of the root logger by a test, or by a library that it imports, because later tests count log lines."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def pytest_configure(config: pytest.Config) -> None:
    """Put temporary files in a folder with a short path, because the path of a Unix socket has at most 107 characters.

    The path of pytest's default folder has the user's name in it. The workers of pytest-xdist get their folders from the first
    process.
    """
    if config.option.basetemp is None:
        config.option.basetemp = config.stash[_MADE] = tempfile.mkdtemp(prefix="t-")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore the files of long tests if long tests are deselected, because some import PyTorch in each worker."""
    if config.option.markexpr != "not long" or collection_path.suffix != ".py":
        return None
    return "\npytestmark = pytest.mark.long\n" in collection_path.read_text(encoding="utf-8") or None


class _GroupScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Gives each group of tests to one worker of pytest-xdist.

    Marks of groups do not work: pytest-xdist 3.8 writes them to a place that pytest 9.2 does not read.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Keep the tests of a file, and the tests of a shared server, on one worker, so that their fixtures are made once."""
    return _GroupScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@cache
def _group(path: str) -> str:
    """Return the shared server that a file's tests use as a fixture, or else the file. `path` is relative to the repository's root."""
    if path.startswith("tests/e2e/"):
        source = (UNIT.parents[1] / path).read_text(encoding="utf-8")
        for server in SHARED_SERVERS:
            if re.search(rf"\b{server}: ", source):
                return server
    return path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Spread the end-to-end tests among the unit tests.

    Tests of servers mostly wait, and unit tests compute. A mixture keeps the workers busy, and only small tests run in the last
    minutes.
    """
    if not hasattr(config, "workerinput"):
        return
    groups: dict[str, list[pytest.Item]] = {name: [] for name in SHARED_SERVERS}
    units = []
    for item in items:
        if UNIT in item.path.parents:
            units.append(item)
        else:
            groups.setdefault(_group(item.nodeid.partition("::")[0]), []).append(item)
    step = int(_SPREAD * len(units) / len(groups))
    items.clear()
    for number, tests in enumerate(groups.values()):
        items += tests
        items += units[number * step : (number + 1) * step]
    items += units[len(groups) * step :]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude imported and collected objects from later garbage collections, which would take half a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Note the CPU seconds of a unit test."""
    before = _cpu_seconds()
    yield
    if UNIT in item.path.parents and item.get_closest_marker("long") is None:
        item.user_properties.append((_CPU_PROPERTY, _cpu_seconds() - before))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the slow unit tests. They do not fail, because machines differ and the first test with a framework also imports it."""
    taken = {
        report.nodeid: seconds
        for report in terminalreporter.getreports("passed")
        for name, seconds in report.user_properties
        if name == _CPU_PROPERTY and seconds > UNIT_CPU_S
    }
    if taken:
        terminalreporter.section(
            f"unit tests over {UNIT_CPU_S:g} s of CPU: make them faster, or mark them `long`"
        )
        for nodeid, seconds in sorted(taken.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(f"{seconds:5.1f} s  {nodeid}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keep the temporary files of failed tests."""
    made = session.config.stash.get(_MADE, None)
    if made is not None and exitstatus == pytest.ExitCode.OK:
        shutil.rmtree(made, ignore_errors=True)


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
