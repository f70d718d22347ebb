"""The import of a bundle's model.py, which may succeed, fail or hang. The stub reports a long import to the runtime."""

import os
import queue
from collections.abc import Mapping
from concurrent import futures
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rsrv.hooks.loader import HookError, Hooks, load_hooks
from rsrv.stub import hook_import
from rsrv.stub.connection import Rejected
from rsrv.stub.hook_import import HookImport
from rsrv.stub.session import Attachment, Session
from tests.fakes import FakeBackstop
from tests.waiting import PATIENCE_S, wait_until

#: A model.py whose third line waits until the test opens the pipe for writing.
WAITS = (
    "from pathlib import Path\n\nPath({pipe!r}).read_text()\n\n\ndef preprocess(inputs):\n    return inputs\n"
)


class RecordingSession:
    """A session that records reports and connections.

    If `rejects` is True, each connection is refused, as if another runtime had replaced the session's own.
    """

    def __init__(self, *, rejects: bool = False) -> None:
        self.rejects = rejects
        self.reports: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self.opened = self.closed = 0

    def open_connection(self, key: str) -> "RecordingSession":
        self.opened += 1
        if self.rejects:
            raise Rejected(f"{key} is not loaded")
        return self

    def report(self, report: Mapping[str, Any], patience: float) -> None:
        self.reports.put(report)

    def close(self) -> None:
        self.closed += 1


def imported(text: str, folder: Path) -> tuple[HookImport[Hooks], FakeBackstop]:
    (file := folder / "model.py").write_text(text)
    backstop = FakeBackstop()
    return HookImport(file, partial(load_hooks, file), backstop), backstop


def limit(monkeypatch: pytest.MonkeyPatch, file_import: HookImport[Hooks], line: int) -> None:
    """Limit the import to the timeout of hooks, which begins only when the import has reached this line.

    Without this, the limit would be at least a minute.
    """

    def wait(results: list[Any], period: float) -> None:
        wait_until(lambda: results[0].done() or file_import._place()[0] == line)
        futures.wait(results, period)

    monkeypatch.setattr(hook_import, "wait", wait)
    monkeypatch.setattr(hook_import, "import_limit_s", lambda seconds: seconds)


def result(file_import: HookImport[Hooks], session: RecordingSession, timeout: float | None = 90.0) -> Hooks:
    attachment = SimpleNamespace(key="a@1", settings={"stub": {"hook_timeout_s": timeout}})
    return file_import.result(cast("Session", session), cast("Attachment", attachment))


def test_a_file_is_executed_once_for_all_replicas(tmp_path: Path) -> None:
    """All replicas share the hooks of one import.

    The runtime gets a report before the import begins, and the backstop is armed during it.
    """
    file_import, backstop = imported("def preprocess(inputs):\n    return {'x': inputs['x'] + 1}\n", tmp_path)
    session = RecordingSession()

    hooks = result(file_import, session)

    assert hooks.preprocess is not None
    assert hooks.preprocess({"x": np.ones(1)})["x"] == 2
    assert result(file_import, session, timeout=None) is hooks
    assert (session.opened, session.closed) == (1, 1)
    assert session.reports.get(timeout=PATIENCE_S)["importing"][1] == 0
    assert session.reports.empty()
    assert [backstop.told.get(timeout=PATIENCE_S) for _ in range(2)] == [180.0, "cancel"]
    assert backstop.told.empty()


def test_a_model_without_the_file_has_no_hooks(tmp_path: Path) -> None:
    """Without model.py, nothing is executed and there are no hooks."""
    file, session = tmp_path / "model.py", RecordingSession()
    assert result(HookImport(file, partial(load_hooks, file), FakeBackstop()), session) == Hooks()
    assert session.opened == 0


@pytest.mark.parametrize("statement", ["raise OSError('away')", "import sys; sys.exit('away')"])
def test_an_error_of_the_file_is_the_loads_and_the_next_attempt_executes_it_again(
    statement: str, tmp_path: Path
) -> None:
    """An error in model.py, even sys.exit(), makes the load fail. The next attempt executes the file again."""
    file_import, _ = imported(statement, tmp_path)
    with pytest.raises((OSError, SystemExit), match="away"):
        result(file_import, RecordingSession())
    (tmp_path / "model.py").write_text("def preprocess(inputs):\n    return inputs\n")
    assert result(file_import, RecordingSession()).preprocess is not None


@pytest.mark.parametrize("rejects", [False, True])
def test_an_import_that_hangs_fails_the_load_with_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, rejects: bool
) -> None:
    """If an import hangs, the load fails at the limit, and the error has the line at which the import hangs.

    Until then, a connected runtime gets reports. The next attempt to load waits for the same import.
    """
    os.mkfifo(pipe := tmp_path / "pipe")
    file_import, _ = imported(WAITS.format(pipe=str(pipe)), tmp_path)
    limit(monkeypatch, file_import, 3)
    session = RecordingSession(rejects=rejects)

    with pytest.raises(HookError, match=r"has taken \d+ s and is at line 3"):
        result(file_import, session, timeout=0.1)

    assert "Path(" in caplog.text
    assert (session.opened, session.closed) == (1, 0 if rejects else 1)
    if not rejects:
        reports = [session.reports.get(timeout=PATIENCE_S)["importing"] for _ in range(11)]
        assert [line for _, line in reports] == [0, *[3] * 10]
        assert all(seconds >= 0 for seconds, _ in reports)
    pipe.write_text("")
    assert result(file_import, session).preprocess is not None


@pytest.mark.parametrize("keep", ["LOOP = asyncio.get_event_loop()", "asyncio.get_event_loop()"])
def test_an_import_has_an_event_loop_as_on_the_main_thread(tmp_path: Path, keep: str) -> None:
    """The thread that imports model.py has an event loop, as the main thread would have.

    If model.py keeps the loop in a variable, it stays open for the hooks. Otherwise it is closed.
    """
    keeps_loop = "LOOP" in keep
    use = "{'open': not LOOP.is_closed(), 'end': LOOP.close()}" if keeps_loop else "inputs"
    file_import, _ = imported(
        f"import asyncio\n{keep}\ndef preprocess(inputs):\n    return {use}\n", tmp_path
    )
    hooks = result(file_import, RecordingSession())
    assert hooks.preprocess is not None
    assert hooks.preprocess({}) == ({"open": True, "end": None} if keeps_loop else {})


def test_what_needs_the_main_thread_fails_with_a_hint(tmp_path: Path) -> None:
    """If model.py fails because it needs the main thread, the error explains that model.py is imported on another thread."""
    file_import, _ = imported("import signal\nsignal.signal(signal.SIGUSR2, signal.SIG_IGN)\n", tmp_path)
    with pytest.raises(ValueError, match=r"main thread.*model\.py is imported on a thread of its own"):
        result(file_import, RecordingSession())


def test_the_line_is_that_of_the_bundles_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reported line is a line of the bundle's model.py, not of a library's file with the same name."""
    os.mkfifo(pipe := tmp_path / "pipe")
    (library := tmp_path / "library").mkdir()
    (library / "model.py").write_text(WAITS.format(pipe=str(pipe)))
    text = f"import runpy\n\n\n\nrunpy.run_path({str(library / 'model.py')!r})\n\ndef preprocess(x):\n    return x\n"
    file_import, _ = imported(text, tmp_path)
    limit(monkeypatch, file_import, 5)
    with pytest.raises(HookError, match="is at line 5"):
        result(file_import, RecordingSession(), timeout=0.1)
    pipe.write_text("")
    assert result(file_import, RecordingSession()).preprocess is not None


def test_a_runtime_that_does_not_answer_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the runtime does not answer the first report about an import, it gets no further reports.

    Each unanswered report takes time, and the backstop could end the process meanwhile.
    """

    class Silent(RecordingSession):
        def report(self, report: Mapping[str, Any], patience: float) -> None:
            super().report(report, patience)
            raise TimeoutError

    os.mkfifo(pipe := tmp_path / "pipe")
    file_import, _ = imported(WAITS.format(pipe=str(pipe)), tmp_path)
    limit(monkeypatch, file_import, 3)
    session = Silent()
    with pytest.raises(HookError, match="is at line 3"):
        result(file_import, session, timeout=0.1)
    assert session.reports.qsize() == session.closed == 1
    pipe.write_text("")
    assert result(file_import, RecordingSession()).preprocess is not None
