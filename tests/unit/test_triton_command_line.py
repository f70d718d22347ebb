"""Options of a running tritonserver: its command line is read as the server reads it."""

import os

import pytest

from rsrv.triton_command_line import Options, read_command_line


@pytest.mark.parametrize(
    ("words", "on"),
    [
        ("", True),
        ("--allow-grpc=false", False),
        ("--allow-grpc false --grpc-port 7", False),
        ("--allow-grpc=0 --allow-grpc=1", True),
        ("--allow-grpc --grpc-port=7", True),
        ("--allow-metrics=false", True),
        ("model -- --allow-grpc=false", True),
    ],
)
def test_a_switch_has_its_last_value_in_any_form(words: str, on: bool) -> None:
    """`--name=value`, `--name value`, and `--name` alone for true; other options and operands do not count."""
    assert Options(["tritonserver", *words.split()]).is_on("allow-grpc", default=True) is on


def test_a_name_may_be_cut_short_while_it_is_unambiguous() -> None:
    """--backend-directory begins in the same way, and is another option."""
    options = Options(["--backend-conf=a", "--backend-config=b", "--backend-c=c", "--backend-directory=d"])

    assert options.values("backend-config", shortest="backend-c") == ["a", "b", "c"]
    assert options.values("backend-config") == ["b"]


def test_a_process_that_has_ended_has_no_command_line() -> None:
    """A live one has its words."""
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)

    assert read_command_line(pid) == []
    assert read_command_line(os.getpid())
