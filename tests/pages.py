"""The commands in the documentation, and their treatment in the tests.

A command begins at the left edge of a block that is fenced as `sh`, and indented lines continue it. The first words of a command
decide about it: a test runs it against a server (RUN), or no test runs it, for a stated reason (NOT_RUN).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "bundles" / "examples").rglob("README.md")),
]

#: Programs whose commands a test runs. The commands are unchanged except for `PLACEHOLDERS`, and must succeed.
RUN = {"rsrv", "rsrv-bundle", "rsrv-gen", "rsrv-sim", "curl", "python"}

#: Commands that no test of the pages runs, with the reason. For some of these commands, tests check the flags.
NOT_RUN = {
    "make": "calls what the tests and CI call; target and flags are checked",
    "python3.12": "needs a GPU, and the folder of `make gpu-folder`",
    "python3": "would make an environment, which the tests have",
    ".venv/bin/python": "runs tests, as the tests' own run does",
    "pip": "would fetch packages; the extras are checked, and `make test-wheel` installs the package",
    "tritonserver": "the server that the other commands ask is started with the first page's; flags are checked",
    "rsrv-gateway": "its own tests run it, and one serves the commands `rsrv gateway`; flags are checked",
    "rsrv gpu": "needs a GPU to itself; its own tests run it on a fake one",
    **dict.fromkeys(
        ("rsrv record", "rsrv replay", "rsrv plan"),
        "takes the time of a record; tests of the control service run it",
    ),
    **dict.fromkeys(("cp", "mv", "rm"), "changes a bundle; a test of the lifecycle runs it"),
    "rsrv triton": "would fetch 100 MB; make does the same for the tests",
    "rsrv openai": "serves until Ctrl-C; its own tests run it; flags are checked",
    "rsrv serve": "its own tests run it; flags are checked",
    "KEY=$(openssl rand -hex 16)": "is for the tritonserver below it",
    "~/.cache/rsrv/triton-24.10/perf/perf_analyzer": "would measure for seconds; `make bench` runs it",
    "awk": "reads a public trace of gigabytes; a test gives it a few rows",
    "/opt/rsrv/bin/rsrv": "is rsrv in NVIDIA's container; a long test runs the command",
    "docker": "needs a container engine",
    "envoy": "the picker's tests run it with this configuration",
    "helm": "needs a cluster",
    "kubectl": "needs a cluster",
}

#: Placeholders in commands, and the tests' values for them.
PLACEHOLDERS = {
    "MODEL": "classify",
    "'team-*'": "'digi*'",
    "v7=95 v8=5": "digits",
    "SCENARIO.yaml": "docs/scenarios/bursts.yaml",
    "FLEET.yaml": "docs/scenarios/together.yaml",
}

#: Languages whose blocks contain no commands.
_OTHER = {"python", "yaml", "dockerfile", "json"}


@dataclass(frozen=True)
class Command:
    page: str
    #: Number of the command's first line.
    line: int
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def program(self) -> str:
        """Return the first word of the command, or its first line if this begins with an assignment."""
        line = self.text.partition("\n")[0]
        word = line.split()[0]
        return line if "=" in word else word

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text.replace("\\\n", " "), comments=True)


def commands() -> list[Command]:
    """Return the commands of all pages."""
    return [command for page in PAGES for command in commands_of(page.read_text(encoding="utf-8"), page.name)]


def commands_of(text: str, page: str) -> Iterator[Command]:
    """Return the commands of one page, in order."""
    for language, first, lines in blocks(text):
        if language != "sh":
            continue
        start = 0
        for index in range(1, len(lines) + 1):
            if index == len(lines) or not _continues(lines[index]):
                yield Command(page, first + start, "\n".join(lines[start:index]).rstrip())
                start = index


def strays(text: str) -> list[int]:
    """Return the numbers of lines that begin like a command, in blocks of no language or an unknown one.

    No test would run these commands.
    """
    return [
        first + index
        for language, first, lines in blocks(text)
        if language not in {"sh", *_OTHER}
        for index, line in enumerate(lines)
        if any(word in RUN | NOT_RUN.keys() for word in line.removeprefix("$ ").split()[:1])
    ]


def mentions(text: str) -> list[str]:
    """Return the words between single backticks in running text."""
    lines = text.splitlines()
    for _, first, inside in blocks(text):
        lines[first - 1 : first - 1 + len(inside)] = [""] * len(inside)
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", "\n".join(lines))


def blocks(text: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yield each block of code: its language ("" if none or indented), the number of its first line, and its lines."""
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        if fence := re.fullmatch(r"( *)```+ *(\w*).*", lines[index]):
            first = index = index + 1
            while index < len(lines) and not lines[index].lstrip().startswith("```"):
                index += 1
            # A block in a tab is indented as a whole.
            yield fence[2], first + 1, [line.removeprefix(fence[1]) for line in lines[first:index]]
        elif lines[index].startswith("    ") and (not index or not lines[index - 1].strip()):
            first = index
            while index < len(lines) and lines[index].startswith("    "):
                index += 1
            yield "", first + 1, [line[4:] for line in lines[first:index]]
            continue
        index += 1


def _continues(line: str) -> bool:
    return not line.strip() or line[0] in " #" or line.startswith("done")
