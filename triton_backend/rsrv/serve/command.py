"""`rsrv serve`: one command from bundles to a server that follows them."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from rsrv.serve import demo, node, view
from rsrv.serve.errors import NodeError
from rsrv.serve.plan import NodeWorker
from rsrv.serve.triton_install import Installation, InstallError, default_folder
from rsrv.text import os_error

LOG_FILE = "serve.log"
#: where NVIDIA's container has its server
CONTAINER = Path("/opt/tritonserver/bin/tritonserver")


def run(options: Namespace) -> int:
    """Serve until Ctrl-C. Return the exit status: 0, or 1 if the server cannot start or ended by itself."""
    options.or_cpu = True
    try:
        options.tritonserver = find_tritonserver(options.tritonserver, _ask)
        if options.demo:
            data = demo.DATA if options.dry_run else options.directory
            options.bundles = [data / demo.BUNDLES]
            options.config = options.config or data / demo.SETTINGS
        if options.dry_run:
            return node.run(options)
        path = options.directory / LOG_FILE
        with _open_log(path) as file:
            if options.demo:
                demo.copy_to(options.directory)
            handler = logging.StreamHandler()
            handler.setLevel(logging.WARNING)
            node.log.addHandler(handler)
            request = options.directory / demo.REQUEST if options.demo else None
            return node.run(options, _output(path, file.write, options.verbose, request))
    except (NodeError, InstallError, OSError) as error:
        print(f"rsrv serve: {os_error(error) if isinstance(error, OSError) else error}", file=sys.stderr)
        return 1


def _open_log(path: Path) -> FileIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab", buffering=0)
    except OSError as error:
        raise NodeError(
            f"--directory: {path.parent} cannot take the log and the generated repository: {error}. Name another folder"
        ) from None


def _output(
    path: Path, write: Callable[[bytes], int | None], verbose: bool, request: Path | None
) -> node.Output:
    """Return an output that writes the log to a file, and lines for operators to the terminal.

    If there is a `request` for the demo's model, the terminal shows the commands that send it and list the models, too.
    """

    def put(lines: bytes) -> None:
        write(lines)
        if verbose:
            sys.stdout.buffer.write(lines)
            sys.stdout.flush()

    async def follow(worker: NodeWorker, pid: int, serving: node.Serving) -> None:
        say = functools.partial(print, flush=True)
        await view.follow(worker, pid, serving, path, say, _commands(serving, request) if request else "")

    return node.Output(put, follow, lambda line: print(line, flush=True))


def _commands(serving: node.Serving, request: Path) -> str:
    """Return commands for a newcomer to copy."""
    commands = ["rsrv status" if shutil.which("rsrv") else f"{sys.argv[0]} status"]
    if http := serving.settings.gateway.http:
        commands.insert(0, f"curl -s http://{view.local(http)}/v2/models/{demo.MODEL}/infer -d @{request}")
    return "".join(f"{line}\n" for line in ("Try:", *(f"  {command}" for command in commands)))


def find_tritonserver(named: str | None, ask: Callable[[str], bool]) -> str:
    """Return the path of the tritonserver to start.

    In order of precedence: the named one, PATH, NVIDIA's container, and the user's own installation, which is made if
    `ask` agrees.

    Raises:
        NodeError: there is none; the message says what to do.
        InstallError: the installation failed.
    """
    if named is not None:
        found = shutil.which(named)
        if found is None:
            raise NodeError(f"--tritonserver: there is no program {named}")
        return os.path.abspath(found)
    for candidate in ("tritonserver", str(CONTAINER)):
        if found := shutil.which(candidate):
            return os.path.abspath(found)
    installation = Installation.at(default_folder())
    if not installation.is_installed():
        if not ask("No tritonserver was found. Install release 24.10 for this user (100 MB)?"):
            raise NodeError(
                "no tritonserver was found on PATH: install one with `rsrv triton install`, name one with "
                "--tritonserver, or run this in NVIDIA's container"
            )
        installation.install(lambda line: print(line, flush=True))
    return str(installation.launcher)


def _ask(question: str) -> bool:
    """Return whether the user agrees; without a terminal the answer is no."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    return input(f"{question} [Y/n] ").strip().lower() in ("", "y", "yes")
