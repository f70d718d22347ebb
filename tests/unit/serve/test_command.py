"""The tritonserver that `rsrv serve` starts."""

import os
import socket
from argparse import Namespace
from pathlib import Path

import pytest

from rsrv.serve import command, node
from rsrv.serve.command import find_tritonserver
from rsrv.serve.errors import NodeError
from rsrv.serve.plan import ChildSpec, NodePlan
from rsrv.serve.triton_install import Installation, default_folder
from rsrv.settings import SettingsError, load_settings


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "CONTAINER", tmp_path / "opt" / "tritonserver")


def put_program(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def never(question: str) -> bool:
    raise AssertionError(question)


def test_a_named_server_wins_and_then_the_path_and_then_the_container(tmp_path: Path) -> None:
    """The order is the documented one, and no question is asked while there is a server."""
    container = put_program(tmp_path / "opt" / "tritonserver")
    assert find_tritonserver(None, never) == container
    on_path = put_program(tmp_path / "bin" / "tritonserver")
    assert find_tritonserver(None, never) == on_path
    named = put_program(tmp_path / "mine")
    assert find_tritonserver(named, never) == named
    with pytest.raises(NodeError, match="no program /no/such"):
        find_tritonserver("/no/such", never)


def test_without_a_server_the_user_is_asked_and_no_ends_it() -> None:
    """The message names the three ways that are left."""
    with pytest.raises(NodeError, match=r"rsrv triton install.*--tritonserver.*container"):
        find_tritonserver(None, lambda question: False)
    assert not default_folder().exists()


def test_an_installation_of_the_user_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `rsrv triton install` made is used without a question; a yes makes it."""
    installed: list[Path] = []
    monkeypatch.setattr(Installation, "install", lambda self, say: installed.append(self.folder))
    launcher = find_tritonserver(None, lambda question: True)
    assert installed == [default_folder()]
    monkeypatch.setattr(Installation, "is_installed", lambda self: True)
    assert find_tritonserver(None, never) == launcher
    assert os.path.basename(launcher) == "tritonserver"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the option and the folder, not only an error of the system."""
    (tmp_path / "taken").touch()
    options = Namespace(
        tritonserver=put_program(tmp_path / "mine"),
        dry_run=False,
        verbose=False,
        directory=tmp_path / "taken",
        demo=False,
    )
    assert command.run(options) == 1
    assert f"rsrv serve: --directory: {tmp_path / 'taken'} cannot take the log" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"\xff"], ids=["missing", "not text"])
def test_settings_that_cannot_be_read_are_named(tmp_path: Path, content: bytes | None) -> None:
    """A wrong file behind --config ends the command with a line, not with a traceback."""
    config = tmp_path / "rsrv.yaml"
    if content is not None:
        config.write_bytes(content)
    with pytest.raises(SettingsError, match=r"rsrv.yaml cannot be read"):
        node._settings(Namespace(config=config))


def test_a_live_page_of_another_process_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    """A second server on the machine says which address is taken, and does not send its user to the first one's page."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        page = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        assert node._free_pages([page])[0].startswith(
            f"none: {page} is another program's; set metrics.listen"
        )
    assert f"{page} is not served: Address already in use. Set metrics.listen" in caplog.text
    assert node._free_pages([page]) == (page,)


def test_a_port_of_the_gateway_is_checked_before_anything_is_loaded() -> None:
    """The error names the port, its use and the options, if the command has them, and settings that choose another; a worker's own ports are checked, too."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        planned = NodePlan((), ChildSpec("gateway", (), {}), {}, ())
        settings = load_settings(f"gateway: {{grpc: null, admin: null, http: '127.0.0.1:{port}'}}")
        said = rf"127.0.0.1:{port} cannot be taken for http: .* another port "
        with pytest.raises(NodeError, match=said + r"\(rsrv serve --http-port; rsrv.yaml: gateway"):
            node._check_free(planned, settings, "rsrv serve")
        with pytest.raises(NodeError, match=said + r"\(rsrv.yaml: gateway"):
            node._check_free(planned, settings, "rsrv-node")
    node._check_free(planned, settings, "rsrv-node")
