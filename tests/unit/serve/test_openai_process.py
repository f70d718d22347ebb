"""The process of OpenAI's endpoints: its start, and the reasons why its port may stay closed."""

from __future__ import annotations

import asyncio
import os
from hashlib import sha256
from pathlib import Path

import pytest

from local_triton import free_ports
from rsrv.openai.port import TaskScanner, closed_reason
from rsrv.serve.openai_process import keep_openai, log_lines
from rsrv.settings import load_settings
from tests.unit.serve.test_plan import planned
from tests.waiting import looped

KEYS = f"a: {{sha256: {sha256(b'secret').hexdigest()}}}\n"


@pytest.mark.parametrize(
    ("listen", "keys", "reason"),
    [
        ("127.0.0.1:8005", None, ""),
        ("0.0.0.0:8005", KEYS, ""),
        (":8005", None, "callers need keys"),
        ("0.0.0.0:8005", None, "callers need keys"),
        ("127.0.0.1:8005", "", "has no key"),
        ("nowhere", None, "is not HOST:PORT"),
    ],
)
def test_a_port_for_other_machines_needs_keys(
    tmp_path: Path, listen: str, keys: str | None, reason: str
) -> None:
    """A port that other machines can reach needs a file of keys. If the file cannot be read, the port stays closed."""
    file = None if keys is None else tmp_path / "keys.yaml"
    if file is not None:
        file.write_text(keys or "")
    text = closed_reason(listen, file)
    assert (reason in text) if reason else text == ""
    assert "No such file" in closed_reason(listen, tmp_path / "missing.yaml")


def write_model(repository: Path, name: str, text: str, time: int) -> None:
    (repository / name).mkdir(parents=True, exist_ok=True)
    (file := repository / name / "config.pbtxt").write_text(text)
    os.utime(file, ns=(time, time))


def test_a_task_is_found_when_a_model_gets_it_or_loses_it(tmp_path: Path) -> None:
    """The scanner notices when a model gets or loses a task, because it reads changed configurations again.

    It skips folders without a configuration.
    """
    scanner = TaskScanner(tmp_path)
    (tmp_path / "empty").mkdir()
    write_model(tmp_path, "plain", 'parameters { key: "rsrv_axes" }', 1)
    assert not scanner.found()
    write_model(tmp_path, "plain", 'parameters { key: "task" }', 2)
    assert scanner.found()
    write_model(tmp_path, "plain", "", 3)
    assert not scanner.found()


@looped
async def test_a_line_that_is_too_long_does_not_end_the_log() -> None:
    """A log line that is too long is left out, and later lines are still read.

    If reading ended with an error, the process would be killed and never start again.
    """
    stream = asyncio.StreamReader(limit=16)
    stream.feed_data(b"before\n" + b"x" * 100 + b"\nbehind\n")
    stream.feed_eof()
    assert [line async for line in log_lines(stream)] == [b"before\n", b"behind\n"]


@looped
async def test_the_process_starts_with_the_first_task_and_ends_with_the_server(tmp_path: Path) -> None:
    """The process starts with the first task, and ends in order with the server. Its log is written as whole lines."""
    plan = planned(directory=str(tmp_path))
    plan.repository.mkdir()
    plan.key_file.write_text("key")
    plan.key_file.chmod(0o600)
    write_model(plan.repository, "embed", 'parameters { key: "task" }', 1)
    (port,) = free_ports(1)
    lines: list[bytes] = []
    started, end = asyncio.Event(), asyncio.Event()
    logged = asyncio.Event()

    def write(line: bytes) -> None:
        lines.append(line)
        if b"serving http://" in line:
            logged.set()

    settings = load_settings(f"openai: {{listen: '127.0.0.1:{port}'}}")
    keeping = asyncio.ensure_future(keep_openai(plan, settings, write, lambda _: started.set(), end))
    await logged.wait()
    assert started.is_set()
    end.set()
    await keeping
    assert all(line.endswith(b"\n") for line in lines)
    assert not any(b"Traceback" in line for line in lines)
