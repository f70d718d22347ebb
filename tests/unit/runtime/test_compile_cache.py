"""The compilation cache and shared executables, with the real jax device on the CPU."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.runtime.compile_cache import CompileCache, NotCached, open_cache
from rsrv.runtime.device import CacheCounts, run
from rsrv.runtime.jax_device import JaxDevice
from rsrv_bundle import read_bundle
from rsrv_bundle.modules import check_signatures, module_file
from rsrv_bundle.writer import write_weights
from tests.unit.bundle.forge import seal
from tests.unit.runtime.conftest import build_here, export_doubling

#: Script that builds a bundle, checks its answers, and prints how many of its three executables were compiled, read and
#: shared.
_BUILD = """
import json, logging, sys
from pathlib import Path
import numpy as np
from rsrv.runtime.device import run
from rsrv.runtime.device_executables import ExecutableSources
from rsrv.runtime.jax_device import JaxDevice
from tests.unit.runtime.conftest import build_here
from tests.unit.bundle.forge import seal
logging.basicConfig(level=logging.WARNING)
device = JaxDevice("cpu", ExecutableSources(Path(sys.argv[1])))
model = build_here(sys.argv[2], device)
for (_, size), executable in model.executables.items():
    x = np.arange(3 * size, dtype=np.float32).reshape(size, 3)
    (y,), _ = run(device, executable, model.weights, [x])
    np.testing.assert_array_equal(y, 2 * x + 1)
counts = device.cache_counts
print(json.dumps([counts.compiled, counts.from_cache, counts.shared]))
"""


def started(cache: Path, bundle: Path) -> tuple[list[int], str]:
    """Build a bundle in a new process. Return how many executables it compiled, read and shared, and its log."""
    command = [sys.executable, "-c", _BUILD, str(cache), str(bundle)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1]), process.stderr


# --- shared executables -------------------------------------------------------------------------------------------


def test_other_weights_beside_the_old_ones_compile_nothing(tmp_path: Path, doubling: Path) -> None:
    """A bundle with other weights and another name shares the executables of the loaded model."""
    device = JaxDevice("cpu")
    old = build_here(doubling, device)
    new_path = tmp_path / "renamed"
    export_doubling(new_path, w=[1, 1, 1])
    write_weights(new_path / "weights.safetensors", [("w", np.full(3, 7, np.float32))])
    seal(new_path)

    new = build_here(new_path, device)

    assert device.cache_counts == CacheCounts(shared=3)
    assert new.executables == old.executables
    assert new.weights is not None
    x = np.ones((4, 3), np.float32)
    (y,), _ = run(device, new.executables[0, 4], new.weights, [x])
    np.testing.assert_array_equal(y, 2 * x + 7)


def test_unused_executables_are_freed(doubling: Path) -> None:
    """An executable is freed with the last model that uses it. A model that is built later compiles it again."""
    device = JaxDevice("cpu")
    model = build_here(doubling, device)
    del model

    again = build_here(doubling, device)

    assert device.cache_counts.shared == 0
    assert len(again.executables) == 3


def test_another_signature_is_another_executable(doubling: Path) -> None:
    """Equal modules share an executable. A module with another signature does not."""
    device = JaxDevice("cpu")
    bundle = read_bundle(doubling)
    signatures = check_signatures(bundle)
    single, batched = (module_file(bundle, (0, size)).read_bytes() for size in (1, 4))

    held = [device.compile(single, signatures[0, 1]), device.compile(batched, signatures[0, 4])]
    again = device.compile(single, signatures[0, 1])

    assert again is held[0]
    assert held[0] is not held[1]


# --- the cache on disk --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, doubling: Path) -> Path:
    """Return a cache with the three executables of `doubling`; tests copy it."""
    cache = tmp_path_factory.mktemp("filled") / "cache"
    assert started(cache, doubling) == ([3, 0, 0], "")
    return cache


def test_a_second_start_compiles_nothing(filled: Path, doubling: Path) -> None:
    """A second start reads the executables of the first from a private directory."""
    assert started(filled, doubling) == ([0, 3, 0], "")
    assert filled.stat().st_mode & 0o777 == 0o700


@pytest.mark.long
def test_a_damaged_entry_costs_a_compilation_once(filled: Path, tmp_path: Path, doubling: Path) -> None:
    """Three damaged entries are compiled again and replaced: one has a flipped bit, one is truncated, one is not an executable."""
    cache = Path(shutil.copytree(filled, tmp_path / "cache"))
    first, second, third = cache.iterdir()
    flipped = bytearray(first.read_bytes())
    flipped[len(flipped) // 2] ^= 4
    first.write_bytes(flipped)
    os.truncate(second, 1000)
    CompileCache(cache).put(third.name.removesuffix("-checked"), b"no executable at all")

    counts, log = started(cache, doubling)

    assert counts == [3, 0, 0]
    for entry in (first, second):
        assert f"{entry} is damaged" in log
    replaced = [CompileCache(cache).get(entry.name.removesuffix("-checked")) for entry in cache.iterdir()]
    assert [len(value or b"") > 1000 for value in replaced] == [True] * 3


def test_a_folder_that_cannot_be_made_is_replaced_by_the_servers_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the cache folder cannot be made, entries go to the server's own folder, which is private.

    The server's next runtime finds them there, and the log has the reason.
    """
    (tmp_path / "home").touch()
    folder, own = tmp_path / "home/xla", tmp_path / "own"

    cache = open_cache(folder, own)
    cache.put("k", b"code")

    assert "Not a directory" in cache.obstacle
    assert "executables are kept until the server ends" in caplog.text
    assert own.stat().st_mode & 0o777 == 0o700
    assert open_cache(folder, own).get("k") == b"code"
    assert not open_cache(None, own).keeps


def test_a_folder_on_a_read_only_file_system_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executables in a read-only folder, such as that of an image, are used. New ones are kept only until the server ends.

    The obstacle is known at once, before an entry is written.
    """
    folder = tmp_path / "cache"
    open_cache(folder).put("k", b"code")
    monkeypatch.setattr(os, "access", lambda *_: False)

    cache = open_cache(folder, tmp_path / "own")

    assert "allows only reading" in cache.obstacle
    assert cache.get("k") == b"code"


def test_what_the_configured_folder_does_not_take_is_kept_in_the_servers_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the configured folder refuses entries, they go to the server's own folder. The reason is logged once.

    When the folder accepts entries again, the obstacle is gone, and all entries are found.
    """
    folder = tmp_path / "cache"
    cache = open_cache(folder, tmp_path / "own")
    cache.put("before", b"1")
    folder.rename(tmp_path / "away")
    for key in ("a", "b"):
        cache.put(key, b"2")

    assert "No such file or directory" in cache.obstacle
    assert (cache.get("a"), cache.get("b"), cache.get("before")) == (b"2", b"2", None)
    assert caplog.text.count("cannot be written") == 1
    (tmp_path / "away").rename(folder)
    assert cache.get("before") == b"1"
    cache.put("c", b"3")
    assert (cache.obstacle, cache.get("a"), (folder / "c-checked").exists()) == ("", b"2", True)


def test_others_cannot_write_to_the_servers_own_folder(tmp_path: Path) -> None:
    """The server's own folder is not used if others can write to it, because the runtime runs its executables."""
    own = tmp_path / "own"
    own.mkdir()
    own.chmod(0o777)
    cache = CompileCache(None, own)
    cache.put("k", b"code")
    assert cache.get("k") is None


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 120)), max_size=30))
def test_the_servers_own_folder_has_a_bound(puts: list[tuple[str, int]]) -> None:
    """The files of the server's own folder never exceed its limit.

    The latest entry is always in it, unless it alone exceeds the limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "own"
        cache = CompileCache(None, own, own_bytes=300)
        for number, (key, size) in enumerate(puts):
            cache.put(key, value := bytes([number]) * size)
            assert sum(entry.stat().st_size for entry in own.iterdir()) <= 300
            assert cache.get(key) == value
        cache.put("large", bytes(301))
        assert cache.get("large") is None


def test_the_servers_own_folder_loses_the_least_recently_used_entry(tmp_path: Path) -> None:
    """If the server's own folder is full, the least recently used entry is removed. Reading an entry is a use as well."""
    cache = CompileCache(None, tmp_path, own_bytes=250)
    cache.put("read", b"x" * 50)
    cache.put("unread", b"x" * 50)
    for age, name in ((200, "read"), (100, "unread")):
        (path,) = tmp_path.glob(f"{name}*")
        os.utime(path, (path.stat().st_mtime - age,) * 2)

    assert cache.get("read") is not None
    cache.put("new", b"x" * 100)

    assert [cache.get(name) is not None for name in ("read", "unread", "new")] == [True, False, True]


def test_no_damage_goes_unnoticed(tmp_path: Path) -> None:
    """A change of any byte of an entry, and any truncation, is noticed."""
    value = random.Random(0).randbytes(500)
    cache = CompileCache(tmp_path)
    cache.put("k", value)
    (entry,) = tmp_path.iterdir()
    good = entry.read_bytes()
    assert cache.get("k") == value

    for at in range(len(good)):
        entry.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert cache.get("k") is None
        entry.write_bytes(good[:at])
        assert cache.get("k") is None

    cache.put("k", value)
    assert cache.get("k") == value


def test_a_full_disk_keeps_no_partial_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk leaves no partial entry, and the log has the reason once."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    cache = CompileCache(tmp_path)
    for key in "ab":
        cache.put(key, b"code")

    assert caplog.text.count("cannot be written: No space left on device") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    """Partial files of killed processes are removed if they are older than an hour."""
    for name, age in (("old", 7200), ("new", 60)):
        path = tmp_path / f".unfinished-{name}"
        path.write_bytes(b"half")
        os.utime(path, (path.stat().st_mtime - age,) * 2)

    CompileCache(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == [".unfinished-new"]


def test_a_thread_may_require_entries_or_do_without_them(tmp_path: Path) -> None:
    """A thread may require that entries exist, and then a missing one is an error.

    It may also bypass the cache for a while.
    """
    cache = CompileCache(tmp_path)
    cache.put("there", b"code")

    with cache.requiring():
        assert cache.get("there") == b"code"
        with pytest.raises(NotCached, match="missing"):
            cache.get("missing")
    with cache.bypassing():
        assert cache.get("there") is None
        cache.put("other", b"code")

    assert (cache.get("there"), cache.get("missing"), cache.get("other")) == (b"code", None, None)
