"""Reading tritonserver's command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rsrv.control.triton import Triton, TritonEndpoint, _reason, read_endpoint
from tests.waiting import looped


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tritonserver --model-repository=gen", TritonEndpoint()),
        (
            "tritonserver --grpc-port=7 --model-control-mode=explicit",
            TritonEndpoint("127.0.0.1:7", "explicit"),
        ),
        (
            "tritonserver --grpc-port 7 --model-control-mode POLL --load-model *",
            TritonEndpoint("127.0.0.1:7", "poll"),
        ),
        ("tritonserver --grpc-address 10.0.0.1 --grpc-port=7 --grpc-port=8", TritonEndpoint("10.0.0.1:8")),
        ("tritonserver --grpc-address=::", TritonEndpoint("[::1]:8001")),
        ("tritonserver --log-verbose --grpc-port=7", TritonEndpoint("127.0.0.1:7")),
        ("tritonserver --grpc-use-ssl=false --allow-grpc true", TritonEndpoint()),
        ("tritonserver --model-control-mode=explicit -- --grpc-port=7", TritonEndpoint(mode="explicit")),
        ("tritonserver --exit-on-error=false", TritonEndpoint(exits_on_error=False)),
        ("tritonserver --exit-on-error true", TritonEndpoint()),
        ("tritonserver --model-load-thread-count=32", TritonEndpoint(load_threads=32)),
        ("tritonserver --model-load-thread-count=many", TritonEndpoint()),
        ("", TritonEndpoint()),
    ],
)
def test_the_address_and_the_mode_are_found(line: str, expected: TritonEndpoint) -> None:
    """Both spellings of a flag are read. If a flag is repeated, the last one is used."""
    assert read_endpoint(line.split()) == expected


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        ("--grpc-use-ssl=true", "TLS"),
        ("--grpc-use-ssl-mutual=1", "TLS"),
        ("--allow-grpc=false", "--allow-grpc"),
    ],
)
def test_what_cannot_be_spoken_to_is_said(flag: str, word: str) -> None:
    """If a flag prevents the connection, the error says what to do."""
    assert word in read_endpoint([flag]).trouble


@looped
async def test_the_program_of_a_running_server_is_found() -> None:
    """The program is that of the running server, and not the one in PATH."""
    triton = Triton.of(os.getpid())
    assert triton.program is not None
    assert Path(triton.program).samefile(sys.executable)
    await triton.close()


def test_a_restricted_repository_is_opened_with_its_key() -> None:
    """The key of the repository protocol's restriction is found among other restrictions."""
    flags = [
        "--grpc-restricted-protocol=inference,health:other=7",
        "--grpc-restricted-protocol",
        "shm-memory,model-repository:Admin-Key=secret=word",
    ]
    assert read_endpoint(flags).metadata == (("triton-grpc-protocol-admin-key", "secret=word"),)


def test_the_stubs_own_message_is_the_reason() -> None:
    """The reason of a failed load is the stub's message without the prefixes of Triton and Python."""
    stub = "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: TritonModelException: m: no module"
    assert _reason("m", f"{stub}\n\nAt:\n  /somewhere/model.py(49): initialize\n;\n") == "no module"
    hook = "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: ValueError: no words\n\nAt:\n  /a(1): b\n;\n"
    assert _reason("m", hook) == "ValueError: no words"
    assert _reason("m", "failed to poll from model repository") == "failed to poll from model repository"
