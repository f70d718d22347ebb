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

# The same examples on every run and no time limit for one of them, nor for making them: a test must not fail because the
# machine is busy. `make test-long` tries more examples.
for name, examples in (("repeatable", 30), ("thorough", 300)):
    settings.register_profile(
        name,
        max_examples=examples,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("repeatable")
# Hypothesis tries numbers and texts of the modules that are imported: other ones on each worker, and after each change.
providers._get_local_constants = lambda: providers._local_constants

# Python may write bytecode, as it does for users: tests show that none gets into a model repository, and thousands of
# assertions and hundreds of processes need not be compiled on every run.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell's background jobs ignore Ctrl-C, and so would the commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

UNIT = Path(__file__).parent / "unit"
#: CPU seconds of this process and its children above which a unit test is listed, unless it is marked `long`
UNIT_CPU_S = 2.0
_CPU_PROPERTY = "cpu_s"
#: Fixtures whose server all of their users share: they run on one worker of pytest-xdist.
SHARED_SERVERS = ("triton", "fleet")
#: The part of the unit tests among which the end-to-end tests are spread.
_SPREAD = 0.6

_MADE = pytest.StashKey[str]()


@pytest.fixture(autouse=True)
def _root_logger() -> Generator[None]:
    """Take back what a test's code, or a library that it imports, changes in the root logger: later tests count lines."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def pytest_configure(config: pytest.Config) -> None:
    """Keep temporary files where paths are short: those of Unix sockets end at 107 characters.

    pytest's own place has the user's name in it. The workers of pytest-xdist get theirs from the first process.
    """
    if config.option.basetemp is None:
        config.option.basetemp = config.stash[_MADE] = tempfile.mkdtemp(prefix="t-")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of long tests where these are not wanted: some import PyTorch, in each worker."""
    if config.option.markexpr != "not long" or collection_path.suffix != ".py":
        return None
    return "\npytestmark = pytest.mark.long\n" in collection_path.read_text(encoding="utf-8") or None


class _GroupScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Gives each group of tests to one worker of pytest-xdist.

    Not by its marks of groups, which release 3.8 writes to where pytest 9.2 does not look.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Keep the tests of a file, and those of a shared server, on one worker: their fixtures are made once."""
    return _GroupScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@cache
def _group(path: str) -> str:
    """Return the shared server that a file's tests take as a fixture, else the file; `path`: from the root."""
    if path.startswith("tests/e2e/"):
        source = (UNIT.parents[1] / path).read_text(encoding="utf-8")
        for server in SHARED_SERVERS:
            if re.search(rf"\b{server}: ", source):
                return server
    return path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Spread the end-to-end tests among the unit tests.

    Tests of servers wait, and unit tests compute: so the workers have both at any time, and the last minutes have small
    tests only.
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
    """Leave what is imported and collected out of garbage collections: going through it takes half a second each time."""
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
    """List the slow unit tests. They do not fail: machines differ, and the first user of a framework imports it."""
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
        for nodeid, seconds in sorted(taken.items(), key=lambda one: -one[1]):
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
