"""The tritonserver for tests and tools, and its ports."""

from itertools import islice
from pathlib import Path

import pytest

import local_triton
from local_triton import ServerFailed, TritonServer, free_ports, reserve_ports
from rsrv.triton_install import InstallError


def test_no_port_is_given_twice_by_this_process_or_the_kernel() -> None:
    """A process never gets the same port twice, because the server for the first request may listen there only later.

    All ports are below 32768, so the kernel does not use them for outgoing connections.
    """
    ports = free_ports(3) + free_ports(3)

    assert len(set(ports)) == 6
    assert max(ports) < 32_768


def test_no_port_is_given_to_two_processes(tmp_path: Path) -> None:
    """Two processes never get the same port, even while nothing listens there.

    If no port is left, the process gets an error.
    """
    ours = reserve_ports(tmp_path)
    first = list(islice(ours, 200))
    theirs: list[int] = []

    with pytest.raises(ServerFailed, match="reserved all ports"):
        theirs.extend(reserve_ports(tmp_path))

    assert len(theirs) > 20_000
    assert not {*theirs}.intersection(first)


def test_another_tritonserver_keeps_its_libraries_and_its_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests may use another tritonserver, which RSRV_TEST_TRITONSERVER names.

    It gets the tests' flags, but no path of the installation that `make` has made.
    """
    monkeypatch.setattr(local_triton, "OTHER", tmp_path / "tritonserver")
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    server = TritonServer(tmp_path / "gen", env={"EXTRA": "1"})

    program, repository, *flags = server.command()
    environment = server.environment()

    assert (program, repository) == (str(tmp_path / "tritonserver"), f"--model-repository={tmp_path}/gen")
    assert f"--http-port={server.http_port}" in flags
    assert not any("backend-directory" in flag for flag in flags)
    assert (environment["PATH"], environment["EXTRA"]) == ("/usr/bin", "1")
    assert "LD_LIBRARY_PATH" not in environment
    with pytest.raises(InstallError, match="must name a program called tritonserver"):
        server.start()
