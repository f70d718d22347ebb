"""Executables next to a model repository: the file, its owner, and when its executables are loaded."""

import json
import logging
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rsrv.runtime.stored_executables import (
    CompileTarget,
    StoredExecutables,
    StoredExecutablesError,
    find_executables,
    write_executables,
)
from tests.logged import logged_here

HERE = CompileTarget(card="NVIDIA L4", capability="8.9", versions="jax 0.10.2", flags="")
MODULE, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Write a file with one executable for `HERE`, and return its path."""
    path = tmp_path / "l4.executables"
    write_executables(path, HERE, False, {MODULE: b"machine code"})
    return path


def replace_entry(path: Path, name: str, content: bytes) -> None:
    """Rewrite the archive with other content for one entry. The checksum of the entry fits the new content."""
    with zipfile.ZipFile(path) as archive:
        entries = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for each, entry in {**entries, name: content}.items():
            archive.writestr(each, entry)


def change_index(path: Path, **changes: Any) -> None:
    with zipfile.ZipFile(path) as archive:
        index = json.loads(archive.read("index.json"))
    replace_entry(path, "index.json", json.dumps({**index, **changes}).encode())


def test_an_executable_is_found_by_the_digest_of_its_module(stored: Path) -> None:
    """An executable is found by the digest of its module. Other modules have none."""
    executables = find_executables(stored.parent, HERE)
    assert executables is not None
    with executables:
        assert executables.get(MODULE) == b"machine code"
        assert executables.get(OTHER) is None


def test_a_new_file_replaces_the_old_one_and_leaves_nothing_beside_it(stored: Path) -> None:
    """A new file replaces the old one atomically, and no other file is left."""
    write_executables(stored, HERE, True, {OTHER: b"other code"})
    with StoredExecutables(stored) as executables:
        assert executables.contents.tuned
        assert list(executables.contents.digests) == [OTHER]
    assert list(stored.parent.iterdir()) == [stored]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"card": "Tesla T4", "capability": "7.5"},
            "card NVIDIA L4 (here: Tesla T4), capability 8.9 (here: 7.5)",
        ),
        ({"versions": "jax 0.11.0"}, "versions jax 0.10.2 (here: jax 0.11.0)"),
        ({"flags": "--xla_gpu_autotune_level=0"}, "flags none (here: --xla_gpu_autotune_level=0)"),
    ],
)
def test_another_target_compiles_and_one_line_says_what_differs(
    stored: Path, caplog: pytest.LogCaptureFixture, change: dict[str, str], why: str
) -> None:
    """If a file is for another card, version or flag, models are compiled. The log has one line with the difference."""
    assert find_executables(stored.parent, replace(HERE, **change)) is None
    (record,) = logged_here(caplog)
    assert (
        record.getMessage() == f"no stored executable is used, and models are compiled: {stored} is for {why}"
    )


def test_files_for_other_cards_lie_beside_the_one_that_is_used(
    stored: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A repository may have files for several kinds of cards. The one for this card is used, without a warning."""
    caplog.set_level(logging.INFO)
    write_executables(stored.with_name("a100.executables"), replace(HERE, card="A100"), False, {})
    executables = find_executables(stored.parent, HERE)
    assert executables is not None
    executables.close()
    assert executables.path == stored
    (record,) = logged_here(caplog)
    assert record.levelname == "INFO"


def test_a_tuned_file_is_preferred_to_another_one_for_the_same_card(stored: Path) -> None:
    """A tuned file is preferred to another file for the same card.

    rsrv-gen --compile-for may have written two files for a card: one has the name of the card, the other the name of a profile.
    """
    tuned = stored.with_name("ours.executables")
    write_executables(tuned, HERE, True, {OTHER: b"tuned code"})

    executables = find_executables(stored.parent, HERE)

    assert executables is not None
    with executables:
        assert executables.path == tuned


def test_a_repository_without_executables_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A repository without executables causes no line in the log."""
    assert find_executables(tmp_path, HERE) is None
    assert not logged_here(caplog)


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_can_write_is_refused(stored: Path, mode: int) -> None:
    """A file that others can write to is refused, because it has machine code."""
    stored.chmod(mode)
    with pytest.raises(StoredExecutablesError, match="be writable by no other user, who could run code"):
        StoredExecutables(stored)
    assert find_executables(stored.parent, HERE) is None


def test_a_file_of_another_user_is_refused(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another user is refused, because its owner could run code in the runtime."""
    status = stored.stat()
    monkeypatch.setattr("os.fstat", lambda _: os.stat_result((*status[:4], 12345, *status[5:])))
    with pytest.raises(StoredExecutablesError, match="must belong to root or to uid"):
        StoredExecutables(stored)


def test_a_changed_byte_of_an_executable_costs_a_compilation(
    stored: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An executable with a changed byte is not loaded, and its module is compiled."""
    replace_entry(stored, MODULE, b"machine c0de")
    with StoredExecutables(stored) as executables:
        assert executables.get(MODULE) is None
    (record,) = logged_here(caplog)
    assert record.getMessage() == f"{stored}: {MODULE} is damaged, so it is compiled"


def test_no_flipped_bit_of_the_file_does_more_than_cost_a_compilation(stored: Path) -> None:
    """For any flipped bit of the file, an executable is either correct or missing, and no error escapes.

    A bit may also change lengths, flags and checksums of the archive.
    """
    whole = stored.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        stored.write_bytes(damaged)
        if (executables := find_executables(stored.parent, HERE)) is not None:
            with executables:
                assert executables.get(MODULE) in (None, b"machine code")


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06 no archive", b"{}"])
def test_a_damaged_file_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    """The error about a damaged file says which command to run."""
    path = tmp_path / "l4.executables"
    path.write_bytes(content)
    with pytest.raises(StoredExecutablesError, match=r"is damaged or .* run rsrv-gen --compile-for again"):
        StoredExecutables(path)


def test_a_file_of_a_later_format_is_refused(stored: Path) -> None:
    """A file of a later format is refused, because its index may have another meaning."""
    change_index(stored, format=3)
    with pytest.raises(StoredExecutablesError, match="its format is 3, not 2"):
        StoredExecutables(stored)


def test_an_index_without_digests_is_refused(stored: Path) -> None:
    """An index without digests is refused at once. An error at the first module would leave the runtime without a device."""
    change_index(stored, digests=[])
    with pytest.raises(StoredExecutablesError, match="digests of its index is not an object"):
        StoredExecutables(stored)


#: Scripts: `_STORE` stores a bundle's executables in a repository. `_LOAD` loads them, and prints how many modules were
#: compiled and how many executables were loaded.
_STORE = """
import sys
from pathlib import Path
from rsrv.runtime.jax_compiler import AheadCompiler
from rsrv.runtime.jax_device import JaxDevice
from rsrv.runtime.stored_executables import write_executables
from rsrv_bundle import read_bundle
from rsrv_bundle.modules import check_signatures, read_module
device, bundle = JaxDevice("cpu"), read_bundle(sys.argv[2])
entries = {}
for key, signature in check_signatures(bundle).items():
    compiled = device.compile(read_module(bundle, key, signature), signature)
    entries[signature.digest] = AheadCompiler.entry(compiled, 0.0)
write_executables(Path(sys.argv[1]) / "cpu.executables", device.target, False, entries)
"""
_LOAD = """
import json, sys
from pathlib import Path
import numpy as np
from rsrv.runtime.device import run
from rsrv.runtime.device_executables import ExecutableSources
from rsrv.runtime.jax_device import JaxDevice
from tests.unit.runtime.conftest import build_here
device = JaxDevice("cpu", ExecutableSources(repository=Path(sys.argv[1])))
model = build_here(sys.argv[2], device)
for (_, size), executable in model.executables.items():
    x = np.arange(3 * size, dtype=np.float32).reshape(size, 3)
    (y,), _ = run(device, executable, model.weights, [x])
    np.testing.assert_array_equal(y, 2 * x + 1)
print(json.dumps([device.cache_counts.compiled, device.cache_counts.from_cache]))
"""


def test_a_stored_executable_is_loaded_and_answers_right(tmp_path: Path, doubling: Path) -> None:
    """The real jax device loads three stored executables without a compilation cache, and compiles nothing."""
    for script in (_STORE, _LOAD):
        # Storing and loading have processes of their own, because jax shares executables within a process.
        command = [sys.executable, "-c", script, str(tmp_path), str(doubling)]
        out = subprocess.run(command, capture_output=True, text=True, check=False)
        assert out.returncode == 0, out.stderr

    assert json.loads(out.stdout.splitlines()[-1]) == [0, 3]
