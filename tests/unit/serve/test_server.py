"""The checks of `rsrv serve` before it starts a server, and the files that it reads."""

from __future__ import annotations

import os
import re
import socket
import stat
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

from local_triton import free_ports
from rsrv.address import Address
from rsrv.cli.main import main
from rsrv.serve import repositories, server
from rsrv.serve.operator_key import operator_key
from rsrv.serve.plan import ServeError
from rsrv.settings import SettingsError, read_settings
from rsrv.settings_changes import refusal_file
from rsrv_gen import fronts, plan
from rsrv_gen.write import front_of
from tests.unit.gen.bundles_for_tests import write_bundle
from tests.unit.serve.test_plan import planned


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "bundles" / "one")
    return tmp_path / "bundles"


def run(folder: Path, *arguments: str | Path) -> int:
    words = ["serve", folder / "bundles", "--directory", folder / "here", *arguments]
    return main([str(word) for word in words])


def read(**options: Any) -> Any:
    return server.read(Namespace(**{"config": None, "devices": None, "bundles": [], **options}))


def test_a_link_to_the_folder_lasts_as_long_as_the_server(tmp_path: Path) -> None:
    """The link to the server's folder exists while the server runs. A link of an earlier, killed server is replaced."""
    server_plan = planned(directory=str(tmp_path / "a b"), links=tmp_path / "links")
    assert server_plan.link is not None
    server_plan.link.parent.mkdir(mode=0o700)
    server_plan.link.symlink_to("/gone")

    with server.linked(server_plan):
        assert server_plan.link.readlink() == tmp_path / "a b"
    assert [*server_plan.link.parent.iterdir()] == []


def test_a_dry_run_says_what_it_would_run(
    bundles: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A dry run prints the command with the operator's own flags, and makes no directory."""
    options = ("--tritonserver", "/bin/true", "--devices", "cpu,cpu", "--grpc-port", "9001", "--dry-run")
    assert run(tmp_path, *options, "--", "--log-verbose=1") == 0

    output = capfd.readouterr().out
    environment = f"""RSRV_RUNTIME_PYTHON={sys.executable} 'RSRV_RUNTIME__DEVICES=["cpu", "cpu"]'"""
    assert output.startswith(f"env {environment} /bin/true --model-repository=")
    assert "--log-verbose=1\naddresses: http 127.0.0.1:8000, grpc 127.0.0.1:9001" in output
    assert not (tmp_path / "here").exists()


def test_bundles_and_hugging_face_directories_are_served_together(
    bundles: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundles that --hf exports are served in addition to the named bundles. Without any source, the command is refused."""
    served: list[Path] = []
    exported = tmp_path / "here" / "hf" / "two"
    write_bundle(exported)

    def check(paths: list[Path], *_: object) -> NoReturn:
        served.extend(paths)
        raise ServeError("stop here")

    monkeypatch.setattr("rsrv.serve.hub.export_all", lambda *_: None)
    monkeypatch.setattr("rsrv.serve.command.repositories.check", check)

    assert run(tmp_path, "--hf", tmp_path / "two") == 1
    assert served == [bundles, exported]
    assert run(tmp_path, "--hf", tmp_path / "one") == 1
    assert "one would both become the model one; rename one of them" in capfd.readouterr().err
    assert main(["serve", "--tritonserver", "/bin/true"]) == 2
    assert "there is nothing to serve: name BUNDLES, --hf MODEL or --demo" in capfd.readouterr().err


def test_the_key_is_made_once_and_only_its_user_reads_it(tmp_path: Path) -> None:
    """The key is made once and stays the same after a restart, so programs may keep it. Only the user can read its file."""
    path = tmp_path / "operator-key"
    key = operator_key(path)

    assert re.fullmatch("[0-9a-f]{32}", key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert operator_key(path) == key


def test_a_full_disk_leaves_no_key_without_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a start cannot write the key, it fails and leaves no empty file. The next start makes the key."""

    def fails(_: int) -> str:
        raise OSError(28, "No space left on device")

    path = tmp_path / "operator-key"
    with monkeypatch.context() as patch:
        patch.setattr("rsrv.serve.operator_key.secrets.token_hex", fails)
        with pytest.raises(OSError, match="No space left"):
            operator_key(path)
    assert not list(tmp_path.iterdir())
    assert operator_key(path)


@pytest.mark.parametrize(("content", "mode"), [("key\n", 0o644), ("", 0o600), ("two words", 0o600)])
def test_a_key_that_is_no_secret_is_refused(
    bundles: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str, mode: int
) -> None:
    """A key file that everybody can read, or that is empty, is refused, because the server would be open."""
    (tmp_path / "here").mkdir()
    path = tmp_path / "here" / "operator-key"
    path.write_text(content)
    path.chmod(mode)
    ports = [
        f"--{kind}-port={port}" for kind, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)
    ]

    assert run(tmp_path, "--tritonserver", "/bin/true", *ports) == 1
    assert "rsrv serve: the key of Triton's operator APIs: " in capfd.readouterr().err


def test_auto_asks_the_tritonserver_that_is_started(
    bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stub: {front: auto}` chooses a front that the program of --tritonserver supports, whatever tritonserver is in PATH."""
    library, config = tmp_path / "libtriton_rsrv.so", tmp_path / "rsrv.yaml"
    library.write_bytes(b"\x7fELF")
    config.write_text("stub: {front: auto}")
    monkeypatch.setattr(plan, "LIBRARY", library)
    monkeypatch.setattr(plan, "load_obstacle", lambda library: "")
    monkeypatch.setattr(fronts, "backend_api", lambda program: "1.99" if program == "/bin/true" else "1.19")
    monkeypatch.setattr(repositories, "compile_for", Mock(side_effect=ServeError("enough")))
    ports = [
        f"--{kind}-port={port}" for kind, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)
    ]

    options = ("--tritonserver", "/bin/true", "--config", config, "--compile-for", "h100")
    assert run(tmp_path, *options, *ports) == 1
    front = front_of(tmp_path / "here" / "models" / "one")
    assert front.startswith("Python front: Triton's backend API 1.99 is not tested")


@pytest.mark.parametrize(("knows", "flags"), [(True, ["--allow-client-shm=true"]), (False, [])])
def test_clients_may_share_memory_on_each_release(tmp_path: Path, *, knows: bool, flags: list[str]) -> None:
    """Only a tritonserver that knows the flag --allow-client-shm gets it. Other releases would refuse to start with it."""
    program = tmp_path / "tritonserver"
    program.write_text(
        f"#!/bin/sh\necho '  --model-repository <string>\n  --{'allow-client-shm' if knows else 'allow-http'} <boolean>'\n"
    )
    program.chmod(0o755)
    options = Namespace(client_shm=True, tritonserver=str(program))

    assert server._client_shm_flags(options) == flags
    options.client_shm = False
    assert server._client_shm_flags(options) == []


def test_a_folder_of_bundles_whose_name_is_not_utf_8_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder whose name is not UTF-8 is refused, because the name must be written to the settings file, which is text."""
    folder = tmp_path / os.fsdecode(b"latin \xe9")
    write_bundle(folder / "bundles" / "one")

    assert run(folder, "--tritonserver", "/bin/true", "--dry-run") == 0
    assert r"latin \udce9" in capsys.readouterr().out
    assert run(folder, "--tritonserver", "/bin/true") == 1
    assert r"latin \udce9/bundles' cannot be watched for bundles" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tritonserver", "/no/such"), "--tritonserver: there is no program /no/such"),
        (("--devices", "x"), "--devices: 'x' is not a device"),
        (("--devices", "0,0"), "--devices: 0 is listed twice"),
        (("--config", "/no/such"), "/no/such cannot be read: No such file or directory. Name a file"),
    ],
)
def test_a_wrong_option_is_refused(
    bundles: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    """A wrong option is refused in a line that names it."""
    assert run(tmp_path, "--tritonserver", "/bin/true", *arguments) == 1

    errors = capfd.readouterr().err
    assert errors.startswith("rsrv serve: ")
    assert message in errors


def test_bundles_that_will_never_be_there_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A missing folder is refused. An empty folder is refused if no process watches for its first bundle."""
    options = ("--tritonserver", "/bin/true")
    assert run(tmp_path, *options) == 2
    assert capfd.readouterr().err.endswith(f"{tmp_path}/bundles: there is no such file or directory\n")

    (tmp_path / "bundles").mkdir()
    config = tmp_path / "rsrv.yaml"
    config.write_text("lifecycle: {mode: static}")
    assert run(tmp_path, *options, "--config", config) == 1
    assert (
        "with these settings (lifecycle.mode, control.enabled) no process watches" in capfd.readouterr().err
    )


def test_two_servers_do_not_share_a_directory(
    bundles: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A second server in a directory is refused, because each would write the other's repository."""
    with server.alone(tmp_path / "here"):
        assert run(tmp_path, "--tritonserver", "/bin/true") == 1
    assert (
        f"another server uses {tmp_path}/here: end that server, or name another folder"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize("content", [None, b"\xff"], ids=["missing", "not text"])
def test_settings_that_cannot_be_read_are_named(tmp_path: Path, content: bytes | None) -> None:
    """If the file of --config is wrong, the command ends with one line and no traceback."""
    config = tmp_path / "rsrv.yaml"
    if content is not None:
        config.write_bytes(content)
    with pytest.raises(SettingsError, match=r"rsrv.yaml cannot be read"):
        read(config=config)


def test_settings_of_a_gateway_are_refused(tmp_path: Path) -> None:
    """Settings with a gateway's TLS or token are refused: `rsrv serve` starts no gateway, so the server would be open."""
    config = tmp_path / "rsrv.yaml"
    config.write_text("gateway: {token_file: secret}")
    with pytest.raises(ServeError, match=r"gateway\.token_file: `rsrv serve` starts no gateway"):
        read(config=config)
    config.write_text("gateway: {drain_s: 30}")
    assert read(config=config).gateway.drain_s == 30  # without TLS or token, the section is allowed


def test_a_live_page_of_another_process_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    """If another process listens at the live page's address, a warning says so. The address is then not shown to the user."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        page = Address("127.0.0.1", taken.getsockname()[1])
        text = server.live_page(page)
    assert text == f"none: another program uses http://{page}/"
    setting = "metrics.listen in rsrv.yaml (--config), or RSRV_METRICS__LISTEN, to a free port, or to null"
    assert f"http://{page}/ is not served: Address already in use. Set {setting}" in caplog.text
    assert server.live_page(page) == f"http://{page}/"
    assert server.live_page(None) is None


def test_a_port_is_checked_before_anything_is_loaded() -> None:
    """A taken port is noticed before any load. The error names the port, its use, and the option for another port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server_plan = replace(planned(), ports={"http": Address("127.0.0.1", port)})
        with pytest.raises(ServeError, match=rf"{port} cannot be used for http: .*rsrv serve --http-port"):
            server.check_free(server_plan)
    server.check_free(server_plan)


def test_a_taken_port_is_all_that_a_second_server_says(
    bundles: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Triton's port and the live page's port are both taken, the command prints only the error about Triton's port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("RSRV_METRICS__LISTEN", f"127.0.0.1:{port}")
        assert run(tmp_path, "--tritonserver", "/bin/true", "--http-port", str(port)) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"rsrv serve: 127.0.0.1:{port} cannot be used for http: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "99900000 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_cpu_limit_of_a_container_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], limit: int | None
) -> None:
    """The CPU limit is read from control groups of either version. A limit above the number of cores is ignored."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    assert server.cpu_limit(tmp_path) == limit


def test_a_changed_config_becomes_the_servers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a change of the file of --config, the server gets the new settings, with the devices of the command line.

    If the changed file has an error, the settings stay. The log reports the error, and a file has it for the status.
    """
    mine, config = tmp_path / "mine.yaml", tmp_path / "rsrv.yaml"
    options = Namespace(config=mine, devices=["cpu"], bundles=[tmp_path / "bundles"])
    mine.write_text("models: {one: {weight: 3}}")

    server.take_settings(options, tmp_path)

    settings = read_settings(config)
    assert (settings.for_model("one").weight, settings.runtime.devices) == (3, ["cpu"])
    mine.write_text("models: {one: {weight: heavy}}")
    server.take_settings(options, tmp_path)
    assert read_settings(config) == settings
    assert "mine.yaml has changed, but the new file is not used: " in caplog.text
    assert "heavy" in refusal_file(config).read_text()
    mine.write_text("models: {one: {weight: 4}}")
    server.take_settings(options, tmp_path)
    assert not refusal_file(config).exists()


def test_the_last_error_of_a_log_is_kept() -> None:
    """The last error line of Triton or rsrv is kept. rsrv's lines may be text or JSON.

    Lines that a model prints, and an error that Triton always logs without a GPU, are ignored.
    """
    lines: list[bytes] = []
    log = server.ErrorLines(lines.append)
    assert log.last == ""
    for line in (
        b"E1128 15:43:43.085000 33 model_lifecycle.cc:642] failed to load\nI1128 15:43:44.0 33 x.cc:1] fine\n",
        b"2026-11-28 15:43:43,078 C rsrv.stub opens: this process ends\n2026-11-28 15:43:43,085 I rsrv: unloaded\n",
        b'{"time": "2026-11-28T15:43:43.000Z", "level": "error", "logger": "rsrv", "message": "no"}\nEvery day\n',
    ):
        log.put(line)
        assert log.last == line.split(b"\n")[0].decode()
    log.put(b'E1129 12:02:08.083795 12 server.cc:241] "CudaDriverHelper has not been initialized."\n')
    assert log.last == line.split(b"\n")[0].decode()
    assert b"".join(lines).count(b"\n") == 7
