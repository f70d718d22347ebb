"""Compiling a repository for a card: the file is complete, even if the command is interrupted or fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rsrv.cards import CARDS
from rsrv.runtime import card_profile, compile_for
from rsrv.runtime.device import Hardware
from rsrv.runtime.stored_executables import CompileTarget, StoredExecutables
from rsrv_bundle.modules import Signature

KIND = CARDS["l4"].kind


class FakeCompiler:
    """`AheadCompiler` without jax's plugin. An executable is its module, and its work cannot be estimated."""

    hardware = Hardware("cuda", (8, 9))

    def __init__(self, target: str) -> None:
        assert KIND in target

    def target(self) -> CompileTarget:
        return CompileTarget(KIND, "8.9", "jax 0.10.2", "")

    def compile(self, module: bytes, signature: Signature, options: object) -> bytes:
        return module

    def entry(self, compiled: bytes, seconds: float) -> bytes:
        return compiled

    def lacks_engine(self, compiled: bytes) -> bool:
        return compiled == b"convolve"

    def work(self, module: bytes, signature: Signature, compiled: bytes) -> tuple[float, float, int]:
        raise AttributeError("module 'jaxlib._jax' has no attribute 'hlo_module_cost_analysis'")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository that is compiled with the fake compiler."""
    monkeypatch.setattr(compile_for, "AheadCompiler", FakeCompiler)
    (tmp_path / "rsrv.yaml").write_text("")
    return tmp_path


def have(
    monkeypatch: pytest.MonkeyPatch, modules: dict[str, bytes], then: BaseException | None = None
) -> None:
    """Let the repository have these models of one module each. `then` is raised after the last one."""

    def models_of(*_: object) -> Iterator[tuple[str, Iterator[compile_for.Module]]]:
        for name, module in modules.items():
            yield name, iter([((0, 1), module, Signature((), ()))])
        if then is not None:
            raise then

    monkeypatch.setattr(compile_for, "models_of", models_of)


def stored(repository: Path) -> dict[str, bytes | None]:
    with StoredExecutables(repository / "l4.executables") as executables:
        return {model: executables.get(sizes["0/1"]) for model, sizes in executables.contents.models.items()}


def test_an_executable_without_an_estimate_is_written(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executable is written without an estimate of its time if jaxlib lacks the analysis, which is a private function."""
    have(monkeypatch, {"cats": b"miaow"})

    assert compile_for.main([str(repository), "l4"]) == 0

    assert stored(repository) == {"cats": b"miaow"}
    with StoredExecutables(repository / "l4.executables") as executables:
        assert executables.contents.seconds == {}


def test_a_convolution_that_only_a_card_can_tune_is_left_to_the_server(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An executable that cuDNN refuses on a real card is not written: the server must compile its module on the card.

    The next run of the command remembers this, and compiles nothing.
    """
    have(monkeypatch, {"cats": b"miaow", "dogs": b"convolve"})

    assert compile_for.main([str(repository), "l4"]) == 0

    output = capsys.readouterr().out
    assert "1 left to the server" in output
    assert "Run `rsrv gpu profile` on such a card" in output
    assert stored(repository) == {"cats": b"miaow", "dogs": None}
    monkeypatch.setattr(FakeCompiler, "compile", None)
    assert compile_for.main([str(repository), "l4"]) == 0
    assert stored(repository) == {"cats": b"miaow", "dogs": None}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("a bundle is gone")])
def test_an_interrupted_run_loses_no_executable(
    repository: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """An interrupted run writes the executables that it has compiled, and keeps those of an earlier run that it did not reach."""
    have(monkeypatch, {"cats": b"miaow", "dogs": b"woof", "bats": b"convolve"})
    assert compile_for.main([str(repository), "l4"]) == 0
    have(monkeypatch, {"birds": b"tweet", "cats": b"miaow"}, error)

    if isinstance(error, KeyboardInterrupt):
        assert compile_for.main([str(repository), "l4"]) == 130
    else:
        with pytest.raises(OSError, match="gone"):
            compile_for.main([str(repository), "l4"])

    assert stored(repository) == {"birds": b"tweet", "cats": b"miaow", "dogs": b"woof", "bats": None}
    with StoredExecutables(repository / "l4.executables") as executables:
        assert len(executables.contents.left) == 1


def test_a_folder_that_is_no_repository_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the folder is not a repository, both commands name it and say what to do."""
    for command in (compile_for.main, card_profile.main):
        assert command([str(tmp_path / "nowhere"), "l4"]) == 1
        assert (
            "nowhere/rsrv.yaml cannot be read: No such file or directory. Name a" in capsys.readouterr().err
        )


def test_a_profile_that_cannot_be_written_is_refused_before_the_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the profile's file cannot be written, the command fails before the tuning, which would occupy a card for minutes."""
    (tmp_path / "rsrv.yaml").write_text("")
    monkeypatch.setattr(card_profile, "JaxDevice", None)
    for file in (tmp_path, tmp_path / "nowhere" / "l4.profile"):
        assert card_profile.main([str(tmp_path), str(file)]) == 1
        assert f"{file} cannot be written" in capsys.readouterr().err
