"""The common part of rsrv's commands. It imports only modules that `--help` needs."""

import argparse
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any, NoReturn, TextIO

from rsrv.extras import install_command
from rsrv.text import nearest

#: All commands of the package, for the shell's completion.
COMMANDS = ("rsrv", "rsrv-bundle", "rsrv-gateway", "rsrv-gen", "rsrv-sim")
#: Exit statuses of every command.
EXIT_STATUS = (
    "Exit status: 0 done; 1 it failed, or a check found something; 2 wrong command line; 3 doctor found something "
    "critical; 130 Ctrl-C; 143 SIGTERM."
)


class CommandParser(argparse.ArgumentParser):
    """A parser with --version, short usage lines, the shell's completion, and a hint about every unknown word."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": _Formatter, **options})
        # `options.parser` becomes the parser of the innermost subcommand. It prints errors that the command finds after parsing.
        self.set_defaults(parser=self)
        #: The commands under each headline of the help. If this is empty, all commands are under one headline.
        self.command_groups: Mapping[str, Sequence[str]] = {}

    def add_version(self) -> None:
        """Add --version."""
        self.add_argument(
            "-V",
            "--version",
            action=_ShowVersion,
            nargs=0,
            dest=argparse.SUPPRESS,
            help="show rsrv's version and exit",
        )

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse the command line. A wrong command line ends the process with status 2."""
        if "_ARGCOMPLETE" in os.environ:
            with suppress(ImportError):
                import argcomplete

                # Include options whose help is in another command's page.
                argcomplete.autocomplete(self, print_suppressed=True)
        options, unknown = self.parse_known_args(argv)
        if unknown:
            parser: CommandParser = options.parser
            known = parser._option_string_actions if unknown[0].startswith("-") else ()
            parser.error(f"unknown argument {unknown[0]!r}{nearest(unknown[0], known)}")
        return options

    def format_help(self) -> str:
        """Return the help, with the commands in their groups."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            for title, actions in self._sections(group):
                formatter.start_section(title)
                formatter.add_text(group.description)
                formatter.add_arguments(actions)
                formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _sections(
        self, group: argparse._ArgumentGroup
    ) -> Iterator[tuple[str | None, Iterable[argparse.Action]]]:
        """Yield the headlines of a group of arguments, each with its actions. Commands in groups have several headlines."""
        for action in group._group_actions:
            if isinstance(action, argparse._SubParsersAction) and self.command_groups:
                commands = {choice.dest: choice for choice in action._choices_actions}
                for title, names in self.command_groups.items():
                    yield title, [commands[name] for name in names]
                return
        yield group.title, group._group_actions

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and end with status 2."""
        self.exit(2, self.explain(message))

    def explain(self, message: str) -> str:
        """Return the lines that an error of the command line prints."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and message.endswith(f": {action.metavar}"):
                # List the commands without their aliases, which argparse's own message contains.
                message = f"name a command: {', '.join(choice.dest for choice in action._choices_actions)}"
        return f"{self.prog}: {message}\n{self.format_usage()}`{self.prog} --help` has more.\n"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            is_command = isinstance(action, argparse._SubParsersAction)
            raise argparse.ArgumentError(
                None if is_command else action,
                f"unknown {'command' if is_command else 'value'} {value!r}{nearest(value, action.choices)}",
            )


class _Formatter(argparse.HelpFormatter):
    """Formats usage lines without the options, because the sections below list them, and keeps line breaks in texts."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        import textwrap

        # Do not break at hyphens, so that flags in a text can be copied.
        lines = (textwrap.fill(line, width, break_on_hyphens=False) for line in text.splitlines())
        return "\n".join(lines)

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Iterable[Any], prefix: Any = None
    ) -> None:
        actions = list(actions)
        if usage is None and prefix is None:
            choices = [group._group_actions for group in groups if group.required]
            words = ["%(prog)s", *(["[OPTIONS]"] if any(action.option_strings for action in actions) else [])]
            words += [
                f"({' | '.join(self._word(action).strip('[]') for action in several)})" for several in choices
            ]
            chosen = {id(action) for several in choices for action in several}
            others = [action for action in actions if id(action) not in chosen]
            words += [self._word(action) for action in others if action.option_strings and action.required]
            words += [self._word(action) for action in others if not action.option_strings]
            usage = " ".join(words)
        super().add_usage(usage, actions, groups, prefix)

    def _word(self, action: argparse.Action) -> str:
        name = str(action.metavar or action.dest.upper())
        if not action.option_strings:
            return self._format_args(action, name)
        return action.option_strings[0] if action.nargs == 0 else f"{action.option_strings[0]} {name}"


class _ShowVersion(argparse.Action):
    """Shows the version. argparse's own action needs the version in advance, and looking it up is slow."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        import rsrv

        print(f"rsrv {rsrv.__version__}")
        parser.exit()


Main = Callable[[Sequence[str] | None], int]


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM. A command that finishes its work after Ctrl-C does the same after SIGTERM."""


def command(program: str, *, extra: str) -> Callable[[Main], Callable[..., int]]:
    """Return a decorator for a command's main function.

    The decorated command ends without a traceback after Ctrl-C or SIGTERM, if the reader of stdout ends, and if a package of
    `extra` is not installed. The command can also print file names that are not UTF-8.
    """

    def wrap(main: Main) -> Callable[..., int]:
        @functools.wraps(main)
        def run(argv: Sequence[str] | None = None) -> int:
            try:
                if isinstance(sys.stdout, TextIOWrapper):
                    # Escape names that are not UTF-8, which would otherwise end the command. stderr does this by default.
                    sys.stdout.reconfigure(errors="backslashreplace")
                with _sigterm_raises():
                    return main(argv)
            except Terminated:
                return 128 + signal.SIGTERM
            except KeyboardInterrupt:
                return 130
            except BrokenPipeError:
                if not _is_closed(sys.stdout):
                    raise
                _discard(sys.stdout)
                return 0
            except ModuleNotFoundError as error:
                missing = (error.name or "rsrv").partition(".")[0]
                if missing.startswith("rsrv"):
                    raise
                print(
                    f"{program}: {missing} is not installed for {sys.executable}; run {install_command(extra)}",
                    file=sys.stderr,
                )
                return 1

        return run

    return wrap


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Make SIGTERM raise Terminated in the main thread. At the end, restore the handlers of SIGTERM and SIGINT.

    In any other thread, this does nothing, because only the main thread can set handlers.
    """

    def end(number: int, frame: object) -> NoReturn:
        raise Terminated

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        signal.signal(signal.SIGTERM, end)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_in_order() -> None:
    """Make SIGTERM and SIGINT end a starting server with status 0, as they end a serving server.

    Without a handler, process 1 of a container would ignore SIGTERM. The server's event loop later replaces these handlers.
    """

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def put(line: str, stream: TextIO | None = None) -> None:
    """Print a line at once, on `stream` or stdout. If the stream's reader has closed it, drop this line and all later lines.

    Use this function in commands that continue without a reader, and in processes that such commands start.
    """
    stream = stream or sys.stdout
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        _discard(stream)


def _is_closed(stream: TextIO) -> bool:
    """Return True if the reader of a pipe has closed it."""
    import select

    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
    except (AttributeError, OSError, ValueError):
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _discard(stream: TextIO) -> None:
    """Drop all further output and the buffered output. Otherwise, Python would log an error when it flushes the stream."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())
