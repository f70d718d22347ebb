"""The note in which a runtime lists its models for the next runtime.

The listed models return first, the latest used one first.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rsrv.runtime.handover import HandedModel, Handover
from rsrv.settings import load_settings
from rsrv_bundle.inspection import Inspector
from tests.fakes import Gate
from tests.unit.runtime.conftest import Runtime, StartRuntime
from tests.unit.runtime.engines import answered, make_engine, send_one
from tests.unit.runtime.watchers import Operator, Watcher
from tests.waiting import wait_until

SETTINGS = load_settings("stub: {in_place_ms: 0}")
CATS = HandedModel("cats@1", "cats", "/repository/cats/1/bundle", resident=True)
DOGS = HandedModel("dogs@1", "dogs", "/repository/dogs/1/bundle", resident=False)


def test_a_note_is_read_by_the_next_runtime(tmp_path: Path) -> None:
    """The next runtime reads the order of the models from the note. Models that are not in the note come last.

    Only weights that were on the device return to it.
    """
    first = Handover(tmp_path / "note")
    assert first.returns("dogs@1"), "without a note, all return"
    first.write([CATS, DOGS], wait=True)

    second = Handover(tmp_path / "note")

    assert second.before == [CATS, DOGS]
    assert [second.place(key) for key in ("cats@1", "dogs@1", "owls@1")] == [0, 1, 2]
    assert [second.returns(key) for key in ("cats@1", "dogs@1", "owls@1")] == [True, False, False]


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '[["cats@1", "cats"]]', '[["cats@1", "cats", "/", 1]]', "7"]
)
def test_a_damaged_note_costs_only_the_order(tmp_path: Path, text: str) -> None:
    """If the note is damaged, all models return, in any order. The next note can be written and read."""
    (tmp_path / "note").write_text(text)
    handover = Handover(tmp_path / "note")
    assert handover.before is None
    assert handover.returns("cats@1")
    handover.write([CATS], wait=True)
    assert Handover(tmp_path / "note").before == [CATS]


def test_a_note_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    """If the note cannot be written, as when the directory is gone with its server, the runtime continues."""
    Handover(tmp_path / "gone" / "note").write([CATS], wait=True)
    assert not (tmp_path / "gone").exists()


def put_to_sleep(runtime: Runtime) -> None:
    """Let a runtime sleep, and close its stubs' connections."""
    with Operator(runtime) as operator:
        assert operator.do("sleep", drain_s=30, force=True) == {}
    wait_until(lambda: not runtime.alive)
    runtime.users.close()


def test_after_a_sleep_models_return_without_a_stub(
    start_runtime: StartRuntime, tmp_path: Path, doublings: dict[str, Path]
) -> None:
    """After a sleep, models return without a stub, except a model whose bundle is gone.

    In the note, the latest used model is first. When a stub has registered for a returned model and leaves, the model is
    unloaded.
    """
    note = tmp_path / "note"
    first = start_runtime(SETTINGS, handover=Handover(note))
    engines = [make_engine(first, doublings[name], name=name) for name in "abc"]
    for engine in engines[::-1]:
        answered(send_one(engine))
    put_to_sleep(first)
    rows = json.loads(note.read_text())
    assert [name for _, name, _, _ in rows] == ["a", "b", "c"]
    rows[2][2] = str(tmp_path / "removed")
    note.write_text(json.dumps(rows))

    second = start_runtime(SETTINGS, handover=Handover(note), slept=True)

    with Watcher(second) as watcher:
        watcher.until(lambda: all(watcher.is_(name, state="ready", stubs=[]) for name in "ab"))
        assert watcher.of("c") is None
        engine = make_engine(second, doublings["a"], name="a")
        assert answered(send_one(engine)) == 1
        engine.close()
        watcher.until(lambda: watcher.of("a") is None)
        assert watcher.is_("b", state="ready")


class Busy(Inspector):
    """Keeps the build thread waiting until the gate opens."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.start = gate.enter  # type: ignore[method-assign]


def test_models_that_have_not_returned_before_the_next_sleep_return_after_it(
    start_runtime: StartRuntime, tmp_path: Path, doublings: dict[str, Path]
) -> None:
    """If a sleep is forced while models have not returned from the last one, they stay in the note for the next runtime."""
    note, gate = tmp_path / "note", Gate()
    first = start_runtime(SETTINGS, handover=Handover(note))
    for name in "ab":
        make_engine(first, doublings[name], name=name)
    put_to_sleep(first)
    text = note.read_text()
    gate.clear()
    second = start_runtime(SETTINGS, handover=Handover(note), slept=True, inspector=Busy(gate))
    with Operator(second) as operator:
        assert operator.do("sleep", drain_s=0, force=True) == {}
    wait_until(lambda: not second.alive)
    gate.set()

    assert note.read_text() == text


def test_another_version_takes_the_place_of_one_that_returned(
    start_runtime: StartRuntime, tmp_path: Path, doublings: dict[str, Path]
) -> None:
    """A bundle changes during a sleep.

    The old version returns, until a stub registers the new version, which replaces it.
    """
    note = tmp_path / "note"
    first = start_runtime(SETTINGS, handover=Handover(note))
    make_engine(first, doublings["a"], name="a")
    put_to_sleep(first)
    second = start_runtime(SETTINGS, handover=Handover(note), slept=True)
    with Watcher(second) as watcher:
        watcher.until(lambda: watcher.is_("a", state="ready"))
        engine = make_engine(second, doublings["b"], name="a")
        watcher.until(lambda: len(watcher.entries) == 1)
        assert answered(send_one(engine)) == 2
