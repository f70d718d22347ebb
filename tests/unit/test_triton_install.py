"""The installation of tritonserver for a user: what is refused, and which pinned packages fit."""

import platform
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rsrv import triton_install
from rsrv.cli.main import main
from rsrv.triton_install import Installation, InstallError, default_folder

ROOT = Path(__file__).resolve().parents[2]


def test_another_machine_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On aarch64, the command makes no folder. The error names other ways to get a tritonserver, such as NVIDIA's container."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert main(["triton", "install", "--dir", str(tmp_path / "triton")]) == 1
    assert "NVIDIA's container" in capsys.readouterr().err
    assert not (tmp_path / "triton").exists()


def test_a_folder_from_which_triton_starts_no_stub_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder is refused if Triton could not start stubs from it. The server would hang without a message at its first load."""
    assert main(["triton", "install", "--dir", str(tmp_path / "my triton")]) == 1
    assert "because of the characters [' ']" in capsys.readouterr().err
    assert not (tmp_path / "my triton").exists()


@pytest.mark.long
def test_a_wheel_with_another_checksum_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a wheel has another hash than the pinned one, pip refuses the wheel, and the step of the installation is not done."""
    with zipfile.ZipFile(tmp_path / "pillow-13.0.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            "pillow-13.0.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pillow\nVersion: 13.0.0\n"
        )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(triton_install, "STUB", f"pillow==13.0.0 --hash=sha256:{'0' * 64}\n")
    installation = Installation.at(tmp_path, tmp_path)
    with pytest.raises(InstallError, match="THESE PACKAGES DO NOT MATCH THE HASHES"):
        installation.install(lambda line: None)
    assert not installation.is_installed()


def test_environments_share_the_server_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two Python environments share one server in the user's cache. Each has its own stubs and its own command."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = Installation.at(default_folder())
    monkeypatch.setattr("sys.prefix", "/another/environment")
    second = Installation.at(default_folder())
    assert first.tritonserver == second.tritonserver
    assert first.launcher != second.launcher
    assert default_folder().is_relative_to(tmp_path)


def test_the_stubs_packages_are_those_that_the_package_asks_for() -> None:
    """Each requirement of the extra `hooks` has a pinned version in the stubs' environment, and this version fits."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = [Requirement(line.partition(" --hash")[0]) for line in triton_install.STUB.splitlines()]
    versions = {pin.name: str(pin.specifier).removeprefix("==") for pin in pinned}
    for text in project["optional-dependencies"]["hooks"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(versions[requirement.name]), text
