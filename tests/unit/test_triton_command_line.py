"""Options of a running tritonserver. They are read from its command line in the same way as the server reads them."""

import os

import pytest

from rsrv.triton_command_line import (
    DEFAULT_PORTS,
    Options,
    address_flag,
    listening,
    open_apis_warning,
    read_command_line,
    restrictions,
)


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
    """A switch may be written as `--name=value`, `--name value`, or `--name` for true. If it is repeated, the last one counts.

    Words that are no switches are ignored.
    """
    assert Options(["tritonserver", *words.split()]).is_on("allow-grpc", default=True) is on


def test_a_name_may_be_cut_short_while_it_is_unambiguous() -> None:
    """The name of an option may be abbreviated if no other option begins like this.

    For example, --backend-c means --backend-config, but --backend- could also mean --backend-directory.
    """
    options = Options(["--backend-conf=a", "--backend-config=b", "--backend-c=c", "--backend-directory=d"])

    assert options.values("backend-config", shortest="backend-c") == ["a", "b", "c"]
    assert options.values("backend-config") == ["b"]


def test_a_process_that_has_ended_has_no_command_line() -> None:
    """A living process has the words of its command line. A process that has ended has none."""
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)

    assert read_command_line(pid) == []
    assert read_command_line(os.getpid())


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "::1", "fd00::7"])
@pytest.mark.parametrize("front", DEFAULT_PORTS)
def test_an_address_is_read_as_it_is_written(host: str, front: str) -> None:
    """Each front end spells IPv6 addresses in its own way. All spellings are read."""
    address = listening(Options([address_flag(front, host), f"--{front}-port=7"]), front)

    assert (address.host, address.port) == (host, 7)


def test_each_restricted_api_has_its_key() -> None:
    """The restrictions of a protocol are read as the key and its value for each API. A value may contain an equals sign.

    The other protocol is not affected.
    """
    options = Options(
        ["--grpc-restricted-protocol=trace,logging:k=a=b", "--grpc-restricted-protocol", "health:l=c"]
    )

    assert restrictions(options, "grpc") == {
        "trace": ("k", "a=b"),
        "logging": ("k", "a=b"),
        "health": ("l", "c"),
    }
    assert restrictions(options, "http") == {}


CLOSED = "model-repository,logging,trace,shared-memory:k=v"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--model-control-mode=explicit", ["0.0.0.0:8000 or 0.0.0.0:8001 can load models", "register shared memory"]),
        ("--model-control-mode=explicit --allow-grpc=false", ["reaches 0.0.0.0:8000 can load models"]),
        ("", ["reaches 0.0.0.0:8000 or 0.0.0.0:8001 can choose the file"]),
        (f"--http-restricted-api={CLOSED}", ["reaches 0.0.0.0:8001 can"]),
        (f"--http-address=127.0.0.1 --grpc-address ::1 --http-restricted-api={CLOSED}", []),
        ("--http-address=127.0.0.1 --grpc-address=[::1] --model-control-mode=explicit", []),
        (f"--http-restricted-api={CLOSED} --grpc-restricted-protocol={CLOSED} --model-control-mode=explicit", []),
        ("--http-restricted-api=trace,logging:k=v --allow-grpc=false --allow-client-shm=false", []),
    ],
)  # fmt: skip
def test_a_server_says_what_other_machines_can_do_with_it(line: str, words: list[str]) -> None:
    """The warning names only APIs that other machines reach without a key.

    If the server's mode allows no loads, the warning does not say that others can load models.
    """
    warning = open_apis_warning(Options(["tritonserver", *line.split()]))

    assert bool(warning) is bool(words)
    assert all(word in warning for word in words), warning
