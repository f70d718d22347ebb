"""`rsrv serve`: one command from bundles to a running server that follows their changes."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import rsrv
from rsrv import logs
from rsrv.extras import install_command
from rsrv.progress import Steps, steps
from rsrv.serve import demo, hub, repositories, server, view
from rsrv.serve.operator_key import operator_key
from rsrv.serve.plan import NoBundlesError, ServeError, ServerPlan
from rsrv.settings import SettingsError
from rsrv.terminal import obeys_codes, styled
from rsrv.text import os_error
from rsrv.tokens import TokenError
from rsrv.triton_install import Installation, InstallError, default_folder
from rsrv_gen.known import Known
from rsrv_gen.sources import find_places

log = logging.getLogger(__name__)
#: The parent of the loggers of this package's modules. Its handlers also get the lines of these loggers.
_package_log = logging.getLogger("rsrv.serve")

LOG_FILE = "serve.log"
#: Value of --log for the standard output.
STDOUT = Path("-")
#: Path of tritonserver in NVIDIA's container.
CONTAINER = Path("/opt/tritonserver/bin/tritonserver")


def run(options: Namespace) -> int:
    """Serve until Ctrl-C. Return the exit status: 0, 1 if the server cannot start or ended by itself, or 2 for wrong paths."""
    try:
        if options.demo:
            data = demo.DATA if options.dry_run else options.directory
            options.bundles = [data / demo.BUNDLES]
            options.config = options.config or data / demo.SETTINGS
            if not options.dry_run:
                _copy_demo(options.directory)
        if options.hf:
            named, _ = find_places(options.bundles)
            exports = hub.plan_exports(options.hf, options.directory / hub.FOLDER, named)
            if not options.dry_run:
                hub.export_all(exports, lambda line: print(line, flush=True))
            options.bundles = [*options.bundles, *exports]
        if not options.bundles:
            raise NoBundlesError("there is nothing to serve: name BUNDLES, --hf MODEL or --demo")
        settings = server.read(options)
        known = Known(server.repository(options), linked=settings.lifecycle.link == "hard")
        sources = repositories.check(options.bundles, settings, known)
        if "RSRV_RUNTIME_PYTHON" not in os.environ and find_spec("jax") is None:
            raise ServeError(
                f"jax, which executes the models, is not installed for {sys.executable}. Run "
                f"{install_command('serve')}, or name a Python that has it in RSRV_RUNTIME_PYTHON"
            )
        options.tritonserver = find_tritonserver(options.tritonserver, _ask)
        planned = server.make_plan(options, settings, sources)
        if options.dry_run:
            sys.stdout.write(planned.describe())
            return 0
        log = options.log or options.directory / LOG_FILE
        with (
            _log_lines(log) as put,
            server.alone(planned.repository.parent),
            server.linked(planned),
            ExitStack() as closed_later,
        ):
            server.check_free(planned)
            planned = planned.with_key(operator_key(planned.key_file))
            _set_up_log(settings.logs.format, put, on_terminal=options.log != STDOUT)
            output = server.Output(put, _show_in_log)
            if options.log != STDOUT:
                terminal = closed_later.enter_context(_Terminal(planned, options, len(sources.good)))
                output = server.Output(put, terminal.show)
                print(f"rsrv {rsrv.__version__}: starting {options.tritonserver}", flush=True)
                if planned.warning:
                    # Print the warning only here: the control process of every tritonserver writes it to the log.
                    print(f"{styled('warning', sys.stderr)}: {planned.warning}", file=sys.stderr, flush=True)
            return server.run(options, settings, planned, known, output)
    except (ServeError, SettingsError, InstallError, TokenError, OSError) as error:
        print(f"rsrv serve: {os_error(error) if isinstance(error, OSError) else error}", file=sys.stderr)
        return error.status if isinstance(error, ServeError) else 1


def _copy_demo(directory: Path) -> None:
    try:
        demo.copy_to(directory)
    except OSError as error:
        raise ServeError(
            f"the demo cannot be written to {directory}: {os_error(error)}. Name a folder that you can write with --directory"
        ) from None


@contextmanager
def _log_lines(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that writes whole lines to the log."""
    with ExitStack() as stack:
        # At the end, the file is closed, so remove the handlers that write to it.
        stack.callback(_package_log.handlers.clear)
        if path == STDOUT:
            yield _put
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("ab", buffering=0))
        except OSError as error:
            raise ServeError(
                f"the log {path} cannot be opened: {error}. Name another file with --log, or another folder with --directory"
            ) from None

        failed: set[int | None] = set()

        def put(lines: bytes) -> None:
            try:
                file.write(lines)
            except OSError as error:
                # The server continues without its log. Report each kind of error once.
                if error.errno not in failed:
                    failed.add(error.errno)
                    lost = f"{path} cannot be written: {error.strerror}. Lines of the log are lost until it can be written again"
                    print(f"rsrv serve: {lost}", file=sys.stderr, flush=True)

        yield put


def _put(lines: bytes) -> None:
    """Write to standard output. Do nothing if its reader has closed it."""
    with suppress(OSError):
        logs.write(sys.stdout.fileno(), lines)


class _LogHandler(logging.Handler):
    """Writes the lines of `rsrv serve` itself among the lines of the server."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        super().__init__()
        self._put = put

    def emit(self, record: logging.LogRecord) -> None:
        # The name of a folder in the record may not be UTF-8.
        self._put(f"{self.format(record)}\n".encode(errors="backslashreplace"))


def _set_up_log(format: logs.Format, put: Callable[[bytes], None], *, on_terminal: bool) -> None:
    """Send the log lines of `rsrv serve` to `put`. If `on_terminal`, also send its warnings to standard error."""
    handlers: list[logging.Handler] = [_LogHandler(put)]
    handlers[0].setFormatter(logs.formatter(format))
    if on_terminal:
        handlers.append(logging.StreamHandler())
        handlers[1].setLevel(logging.WARNING)
    _package_log.handlers[:] = handlers
    _package_log.setLevel(logging.INFO)


def _show_in_log(line: view.Line) -> None:
    log.info("%s", line.text)


class _Terminal:
    """Prints a line for each change with its time, and the endpoints once the server serves.

    Until the server serves, a terminal also shows a progress bar, because the first start compiles and takes long.
    """

    def __init__(self, planned: ServerPlan, options: Namespace, models: int) -> None:
        """Make the output. `models` is the number of models that start."""
        page = server.live_page(planned.page)
        log = options.log or options.directory / LOG_FILE
        self._endpoints = view.endpoints(planned, page, log)
        self._commands = ""
        if options.demo:
            url = f"http://{view.local(planned.ports['http'])}/v2/models/{demo.MODEL}/infer"
            curl = f"curl -s {url} -d @{options.directory / demo.REQUEST}"
            status = "rsrv status" if shutil.which("rsrv") else f"{sys.argv[0]} status"
            self._commands = f"Try:\n  {curl}\n  {status}\n"
        self._began = time.monotonic()
        self._serves = False
        self._bar = ExitStack()
        self._steps: Steps | None = None
        if obeys_codes(sys.stdout) and obeys_codes(sys.stderr):
            self._steps = self._bar.enter_context(steps("starting", models or None))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, line: view.Line) -> None:
        """Print a line."""
        text = line.text
        if line.kind == "serves":
            self._serves = True
            self._bar.close()
            text = f"\n{text}:\n{self._endpoints}\n{self._commands}Stop with Ctrl-C.\n"
        elif line.kind in ("change", "waits"):
            passed = f"{time.monotonic() - self._began:6.1f} s"
            text = f"{time.strftime('%H:%M:%S') if self._serves else passed}  {line.text}"
            if self._steps is not None and not self._serves and line.kind == "change":
                self._steps.step(line.text)
        print(text, flush=True)


def find_tritonserver(named: str | None, ask: Callable[[str], bool]) -> str:
    """Return the path of the tritonserver to start.

    In order of precedence, this is the `named` program, the one on PATH, the one in NVIDIA's container, or the user's own
    installation. If no program is named, and there is none in these places, tritonserver is installed if `ask` returns True.

    Raises:
        ServeError: There is no tritonserver. The message says what to do.
        InstallError: The installation failed.
    """
    if named is not None:
        path = shutil.which(named)
        if path is None:
            raise ServeError(f"--tritonserver: there is no program {named}")
        return os.path.abspath(path)
    for candidate in ("tritonserver", str(CONTAINER)):
        if path := shutil.which(candidate):
            return os.path.abspath(path)
    installation = Installation.at(default_folder())
    if not installation.is_installed():
        if not ask("No tritonserver was found. Install release 24.10 for this user (100 MB)?"):
            raise ServeError(
                "no tritonserver was found on PATH: install one with `rsrv triton install`, name one with "
                "--tritonserver, or run this in NVIDIA's container"
            )
        installation.install(lambda line: print(line, flush=True))
    return str(installation.launcher)


def _ask(question: str) -> bool:
    """Return True if the user agrees. Return False if there is no terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    return input(f"{question} [Y/n] ").strip().lower() in ("", "y", "yes")
