"""The commands in the documentation. tests/e2e/test_docs.py runs each of them, unless tests/pages.py has a reason against it."""

import argparse
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path

import pytest

from rsrv.sim.scenario import read_trace
from rsrv.sim.schema import TraceKeys
from rsrv.wire.frames import Status
from tests.pages import NOT_RUN, PAGES, ROOT, RUN, Command, blocks, commands, mentions, strays

COMMANDS = commands()
#: Public traces for which the pages have a converter, by the name of the file. Each has some rows in the file's format, and
#: the times and models of the requests to which they are converted.
PUBLIC_TRACES = {
    "invocations_per_function_md.anon.d01.csv": (
        f"""\
HashOwner,HashApp,HashFunction,Trigger,1,2,3,...,1440
o,a,one,http,2,0,1{1437 * ",0"}
o,a,two,timer{1439 * ",0"},4
""",
        [(0, "f-0"), (30, "f-0"), (120, "f-0"), *((60 * 1439 + at, "f-1") for at in (0, 15, 30, 45))],
    ),
    "AzureLLMInferenceTrace_code.csv": (
        """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,110,27
2023-11-16 19:00:00.0000000,1,1""",
        [(0, "llm"), (0.052, "llm"), (2576.02, "llm")],
    ),
}
#: Modules that parse the command lines of our programs, by program.
OURS = {
    entry_point.name: entry_point.module
    for entry_point in distribution("rsrv").entry_points
    if entry_point.group == "console_scripts"
}


def of(*programs: str) -> pytest.MarkDecorator:
    """Parametrize a test with all commands of these programs."""
    selected = [command for command in COMMANDS if command.program in programs]
    assert selected
    return pytest.mark.parametrize("command", selected, ids=[command.where for command in selected])


@pytest.mark.parametrize("command", COMMANDS, ids=[command.where for command in COMMANDS])
def test_every_command_is_run_or_there_is_a_reason(command: Command) -> None:
    """Every command of the pages is listed as run or as not run with a reason."""
    assert command.program in RUN | NOT_RUN.keys(), (
        f"{command.where}: add {command.program} to tests/pages.py"
    )


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_no_command_hides_in_a_block_of_another_kind(page: Path) -> None:
    """Commands are only in blocks that are fenced as sh. Other blocks contain no commands."""
    text = page.read_text(encoding="utf-8")
    assert strays(text) == [], "put these commands into a block that is fenced as sh"


@of(*OURS)
def test_the_flags_of_our_programs_exist(command: Command) -> None:
    """The parser of the program accepts the flags of each command on the pages, even if the command is not run."""
    parser_of(command.program).parse_args(command.words[1:])


@cache
def parser_of(program: str) -> argparse.ArgumentParser:
    """Return the parser of one of our programs."""
    parser: argparse.ArgumentParser = import_module(OURS[program]).parser()
    return parser


@of("make")
def test_the_targets_and_variables_of_make_exist(command: Command) -> None:
    """Targets and variables of make exist. If a variable has flags, the program that gets them knows them."""
    _, target, *variables = command.words
    recipe = recipe_of(target)
    assert recipe, f"no target {target}"
    for variable in variables:
        name, _, value = variable.partition("=")
        use = re.search(rf"-m ([\w.]+) \$\({name}\)", recipe)
        assert use is not None, f"{target} does not use {name}"
        known = helped(use[1])
        assert [flag for flag in re.findall(r"--[\w-]+", value) if flag not in known] == []


@cache
def recipe_of(target: str) -> str:
    """Return the commands of a target of make, or "" if there is no such target.

    For a target of a pattern rule, `$*` is replaced by the stem.
    """
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for pattern in (target, re.sub("-.*", "-%", target)):
        if recipe := re.search(rf"^{re.escape(pattern)}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE):
            return recipe[1].replace("$*", target.partition("-")[2])
    return ""


@cache
def helped(module: str) -> str:
    """Return the output of `python -m MODULE --help`."""
    return subprocess.run(
        [sys.executable, "-m", module, "--help"], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout


@of("awk")
def test_a_public_trace_becomes_one_of_ours(command: Command, tmp_path: Path) -> None:
    """The converter on the page makes a trace that `rsrv-sim` and `rsrv replay` can read."""
    *_, public, _, made = command.words
    rows, expected = PUBLIC_TRACES[public]
    (tmp_path / public).write_text(rows)
    subprocess.run(["bash", "-euc", command.text], check=True, cwd=tmp_path)
    problems: list[str] = []
    requests = [
        (request.t, request.model) for request in read_trace(TraceKeys(path=made), tmp_path, problems)
    ]
    assert problems == []
    assert requests == expected


@of("pip")
def test_the_extras_that_are_installed_exist(command: Command) -> None:
    """`pip install '.[...]'` names extras of pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in command.words[2:]:
        if named := re.fullmatch(r"(?:rsrv|\.)\[(.*)\]", word):
            assert set(named[1].split(",")) <= set(extras)


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_commands_that_are_mentioned_exist(page: Path) -> None:
    """The subcommands and flags of commands that are mentioned in running text exist. These commands may be incomplete."""
    for mention in mentions(page.read_text(encoding="utf-8")):
        # Words after -- are flags of tritonserver.
        program, *words = mention.partition(" -- ")[0].split()
        if program in OURS:
            assert unknown(parser_of(program), words) == [], mention
        elif program == "make" and words:
            assert recipe_of(words[0]), mention


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_examples_are_not_made_where_their_sources_are(page: Path) -> None:
    """No example on the pages writes a bundle below the folder `bundles`, where the sources of examples are."""
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"""\bmake\([^)]*["']bundles/[^)]*\)""", text) == []


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_no_page_of_prose_is_longer_than_a_reader_reads(page: Path) -> None:
    """A page has at most 1,500 words outside of code and tables, unless its first paragraph says that it is a reference."""
    text = page.read_text(encoding="utf-8")
    opening = text.partition("\n\n")[2].partition("\n\n")[0]
    if "reference" not in opening:
        assert words_of_prose(text) <= 1500


def words_of_prose(text: str) -> int:
    """Return the number of words outside of code and tables."""
    lines = text.splitlines()
    for _, first, inside in blocks(text):
        lines[first - 1 : first - 1 + len(inside)] = [""] * len(inside)
    return sum(len(line.split()) for line in lines if not line.startswith("|"))


def test_the_hook_on_the_page_is_that_of_the_example() -> None:
    """The page about hooks has the example's file without a change."""
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    assert (ROOT / "bundles" / "examples" / "digits_hooks.py").read_text(encoding="utf-8") in page


def test_every_error_tag_has_its_row() -> None:
    """The table on the page has a row for every error tag, with its cause and what to do."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    section = page.partition("## Error tags")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \| .+ \|$", section, re.MULTILINE)
    assert rows == [status.name for status in Status if status is not Status.OK]


def unknown(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Return the words that look like flags or subcommands, but are unknown to the parser."""
    (choices,) = [
        action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ] or [{}]
    if words and words[0] in choices:
        return unknown(choices[words[0]], words[1:])
    flags = parser.format_help()
    first = [words[0]] if choices and words and re.fullmatch(r"[a-z]+", words[0]) else []
    return first + [word for word in words if word.startswith("--") and word.partition("=")[0] not in flags]
