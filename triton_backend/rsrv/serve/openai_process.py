"""The process of a server's OpenAI endpoints. It starts when a model has a task, and restarts after it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from rsrv.address import parse_address
from rsrv.openai.port import OPERATOR, TaskScanner, closed_reason
from rsrv.serve.child_probes import bind_error
from rsrv.serve.child_process import EXEC_BOUND
from rsrv.serve.plan import ServerPlan
from rsrv.settings import OpenaiSection, Settings
from rsrv.triton_command_line import Options, restrictions

log = logging.getLogger(__name__)

#: Seconds between two checks that a model has a task, that the keys can be read, and that the port is free.
_CHECK_S = 5.0
#: Longest pause before the process starts again, in seconds.
_LONGEST_S = 30.0


async def keep_openai(
    planned: ServerPlan,
    settings: Settings,
    write: Callable[[bytes], None],
    started: Callable[[str], None],
    end: asyncio.Event,
) -> None:
    """Run the process until `end` is set. Then stop the process, and return when it has answered its calls.

    If this coroutine is cancelled, the process is killed. `write` gets whole lines of its log. `started` gets the address of
    each started process.
    """
    section = settings.openai
    if section.listen is None:
        return
    scanner, logged, pause = TaskScanner(planned.repository), "", 1.0
    while not end.is_set():
        if await asyncio.to_thread(scanner.found):
            reason = await asyncio.to_thread(_closed, section, section.listen)
            if reason and reason != logged:
                log.error("OpenAI's endpoints are off: %s. Everything else is served", reason)
            logged = reason
            if not reason:
                began = asyncio.get_running_loop().time()
                status = await _live(planned, settings, section.listen, write, started, end)
                if end.is_set():
                    return
                lived = asyncio.get_running_loop().time() - began
                pause = 1.0 if lived > 60 else min(2 * pause, _LONGEST_S)
                log.error(
                    "the process of OpenAI's endpoints ended with status %d; it starts again in %g s",
                    status,
                    pause,
                )
        with suppress(TimeoutError):
            await asyncio.wait_for(end.wait(), pause if not logged else _CHECK_S)


def _closed(section: OpenaiSection, listen: str) -> str:
    """Return why the port stays closed, or an empty text if it opens."""
    if reason := closed_reason(listen, section.keys_file):
        return f"{reason} (openai.keys_file)"
    if taken := bind_error(parse_address(listen, any_host=True)):
        return f"{listen}: {taken}. Set openai.listen in rsrv.yaml, or RSRV_OPENAI__LISTEN, to a free port, or to null"
    return ""


def _command(planned: ServerPlan, section: OpenaiSection, listen: str) -> list[str]:
    grpc = planned.ports["grpc"]
    server = f"[{grpc.local}]" if ":" in grpc.local else grpc.local
    words = [f"--server={server}:{grpc.port}", f"--listen={listen}"]
    if section.keys_file is not None:
        words.append(f"--keys={section.keys_file}")
    if section.metrics is not None:
        words.append(f"--metrics={section.metrics}")
    return [sys.executable, "-P", "-m", "rsrv.cli.main", "openai", *words]


async def _live(
    planned: ServerPlan,
    settings: Settings,
    listen: str,
    write: Callable[[bytes], None],
    started: Callable[[str], None],
    end: asyncio.Event,
) -> int:
    """Run the process until it ends by itself, or until `end` is set and it has sent its last answer. Return its status."""
    environment = {**os.environ, "RSRV_LOGS__FORMAT": settings.logs.format}
    if secret := restrictions(Options(planned.argv), "grpc").get("model-repository"):
        # Pass the key in the environment, because other users of the machine see the command line.
        environment[OPERATOR] = "=".join(secret)
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-I",
            "-S",
            str(EXEC_BOUND),
            str(os.getpid()),
            *_command(planned, settings.openai, listen),
        ),
        env=environment,
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
        # Do not let Ctrl-C reach the new process: `rsrv serve` gets it, and ends the process in order.
        start_new_session=True,
    )
    started(listen)
    ending = asyncio.ensure_future(_terminate(process, end))
    try:
        assert process.stderr is not None
        async for line in log_lines(process.stderr):
            write(line)
        return await process.wait()
    finally:
        ending.cancel()
        with suppress(ProcessLookupError):
            process.kill()


async def log_lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a log. Lines that are too long for the stream are left out."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return
        yield line


async def _terminate(process: Process, end: asyncio.Event) -> None:
    await end.wait()
    with suppress(ProcessLookupError):
        process.terminate()
