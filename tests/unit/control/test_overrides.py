"""`Overrides`: the operators' settings, kept for the next runtime."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.control.overrides import Overrides

_NAMES = st.sampled_from(["a", "b", None])
_MODES = st.sampled_from(["drain", "hold", "reject"])
_PAUSES = st.lists(
    st.one_of(
        st.builds(lambda model, mode: {"command": "pause", "model": model, "mode": mode}, _NAMES, _MODES),
        st.builds(lambda model: {"command": "continue", "model": model}, _NAMES),
    )
)


def _paused(commands: list[dict[str, Any]]) -> dict[str, str | None]:
    """Return the paused state of a runtime with the models a, b and c after these commands."""
    paused: dict[str, str | None] = dict.fromkeys("abc")
    for command in commands:
        for name in paused if command["model"] is None else [command["model"]]:
            paused[name] = command.get("mode")
    return paused


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one file for all examples."""
    return tmp_path_factory.mktemp("kept") / "overrides.json"


@given(_PAUSES)
def test_a_new_runtime_ends_up_paused_as_the_old_one(kept: Path, commands: list[dict[str, Any]]) -> None:
    """After any pauses and resumes, a new runtime is paused as the old one was."""
    kept.unlink(missing_ok=True)
    overrides = Overrides(kept)
    for command in commands:
        overrides.commanded(command, 0)

    again = [*overrides.for_all(), *(told for name in "abc" for told in overrides.for_model(name, 0))]

    assert _paused(again) == _paused(commands)


def test_what_was_kept_is_read_back(tmp_path: Path) -> None:
    """Every setting is read back from the file."""
    path = tmp_path / "overrides.json"
    first = Overrides(path)
    first.configured({"discipline": "edf", "depth": None})
    for command in (
        {"command": "residency", "model": "a", "residency": "device"},
        {"command": "policy", "model": "a", "weight": 2.0},
        {"command": "pause", "model": "b", "mode": "hold"},
        {"command": "prefetch", "model": "c"},
    ):
        first.commanded(command, 0)

    second = Overrides(path)

    assert second.scheduler == {"discipline": "edf", "depth": None}
    assert second.models == {"a", "b", "c"}
    for name in "abc":
        assert second.for_model(name, 0) == first.for_model(name, 0)


@pytest.mark.parametrize(
    ("then", "remain"),
    [
        ({"command": "evict", "model": "a"}, "b"),
        ({"command": "evict", "model": None}, ""),
        ({"command": "residency", "model": "a", "residency": "system"}, "b"),
        ({"command": "residency", "model": "a", "residency": "device"}, "ab"),
        ({"command": "compact"}, "ab"),
    ],
)
def test_what_was_prefetched_is_until_it_is_evicted(
    tmp_path: Path, then: dict[str, Any], remain: str
) -> None:
    """A prefetch is kept until a command for its model, or for all, ends it."""
    overrides = Overrides(tmp_path / "overrides.json")
    prefetches = {name: {"command": "prefetch", "model": name} for name in "ab"}
    for command in (*prefetches.values(), then):
        overrides.commanded(command, 0)

    again = "".join(name for name in "ab" if prefetches[name] in overrides.for_model(name, 0))

    assert again == remain


@pytest.mark.parametrize(
    "text", ["", "[]", '{"scheduler": 3}', '{"scheduler": {}}', "\x00", '{"scheduler": []}']
)
def test_a_file_that_cannot_be_read_is_as_none(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An unreadable file counts as empty, and the log says so."""
    path = tmp_path / "overrides.json"
    path.write_text(text)

    overrides = Overrides(path)

    assert not overrides.models
    assert "cannot be read" in caplog.text


def test_a_full_disk_does_not_fail_what_was_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the file cannot be written, the command still succeeds, and the log says so."""
    overrides = Overrides(tmp_path / "missing" / "overrides.json")

    overrides.commanded({"command": "residency", "model": "a", "residency": "device"}, 0)

    assert overrides.models == {"a"}
    assert "will not have the settings" in caplog.text
