"""The placement table: readers see only complete tables, the last table stays valid, and a larger file replaces a full one."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrv.wire import placement_table
from rsrv.wire.placement_table import PlacementReader, PlacementWriter

LARGE = {f"model{number}": number for number in range(1, 2001)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "placement"


@pytest.fixture
def writer(path: Path) -> Iterator[PlacementWriter]:
    made = PlacementWriter(path)
    yield made
    made.close()


def test_file_may_come_later(path: Path, writer: PlacementWriter) -> None:
    """A reader that finds no file looks again after a second."""
    reader = PlacementReader(path, "cats")

    assert reader.mask(10.0) == 0
    writer.write({"cats": 3})

    assert reader.mask(10.5) == 0
    assert reader.mask(11.0) == 3


def test_threads_share_a_reader(path: Path, writer: PlacementWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread reads the old file, another thread finds the larger file that has replaced it.

    Both threads get the latest mask.
    """
    writer.write({"model7": 1})
    reader = PlacementReader(path, "model7")
    assert reader.mask(0) == 1
    writer.write(LARGE)
    table = placement_table._MappedTable
    generation, others = table.generation, iter([reader])

    def read_generation(file: placement_table._MappedTable) -> int:
        for other in others:
            assert other.mask(0) == 7
        value: int = generation.__get__(file)
        return value

    monkeypatch.setattr(table, "generation", property(read_generation))

    assert reader.mask(0) == 7


def test_table_outgrows_its_file(path: Path, writer: PlacementWriter) -> None:
    """A table that is too large for its file is written to a larger one, and readers find the new file.

    A smaller table is later written to the same, larger file.
    """
    writer.write({"model7": 1})
    reader = PlacementReader(path, "model7")
    assert reader.mask(0) == 1
    before = path.stat().st_ino

    assert writer.write(LARGE) == 2
    assert reader.mask(0) == 7
    larger = path.stat().st_ino
    writer.write({"model7": 5})

    assert reader.mask(0) == 5
    assert path.stat().st_ino == larger != before


def test_next_writer_continues(path: Path, writer: PlacementWriter) -> None:
    """After the end of a writer, its last table stays valid. The next writer continues to count the generations."""
    writer.write({"cats": 1})
    writer.write({"cats": 2})
    reader = PlacementReader(path, "cats")
    writer.close()
    assert reader.mask(0) == 2

    next_writer = PlacementWriter(path)
    assert reader.mask(0) == 2
    assert next_writer.write({"cats": 3}) == 3
    assert reader.mask(0) == 3
    next_writer.close()


def test_writer_dies_before_the_larger_file_is_in_place(
    path: Path, writer: PlacementWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a writer dies before its larger file has replaced the old one, readers still use the last table.

    Later, they find the table of the next writer.
    """
    writer.write({"model7": 1})
    reader = PlacementReader(path, "model7")
    assert reader.mask(0) == 1

    def die(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            writer.write(LARGE)
    assert reader.mask(0) == 1

    next_writer = PlacementWriter(path)
    assert next_writer.write(LARGE) == 2
    assert reader.mask(1.0) == 7
    next_writer.close()


def test_torn_half_changes_nothing(path: Path, writer: PlacementWriter) -> None:
    """If one half of the file is damaged, a reader still returns its last mask, until the next complete table is written."""
    writer.write({"cats": 1})
    reader = PlacementReader(path, "cats")
    assert reader.mask(0) == 1
    writer.write({"cats": 2})
    content = path.read_bytes()
    # Overwrite the mask in half 0, which has generation 2.
    with path.open("r+b") as file:
        file.seek(64 + 16 + 16)
        file.write(b"\4")
    assert content != path.read_bytes()

    assert reader.mask(0) == 1
    assert PlacementReader(path, "cats").mask(0) == 0
    writer.write({"cats": 5})
    assert reader.mask(1.0) == 5


@pytest.mark.parametrize("content", [b"", b"rsrvpt01", bytes(64), b"rsrvpt01\xff\xff\0\0" + bytes(1000)])
def test_foreign_file(path: Path, content: bytes) -> None:
    """If the file has another format, a reader finds no table in it. A writer replaces such a file."""
    path.write_bytes(content)
    reader = PlacementReader(path, "cats")
    assert reader.mask(0) == 0

    writer = PlacementWriter(path)
    writer.write({"cats": 1})

    assert reader.mask(1.0) == 1
    writer.close()


@settings(deadline=None, max_examples=20)
@given(tables=st.lists(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2**64 - 1)), max_size=8))
def test_every_model_reads_its_own_mask(
    tables: list[dict[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """For any tables, each reader returns the mask of its model in the latest table."""
    path = tmp_path_factory.mktemp("any") / "placement"
    writer = PlacementWriter(path)
    readers = {name: PlacementReader(path, name) for name in "abcdef"}
    for now, table in enumerate(tables):
        writer.write(table)
        assert {name: reader.mask(now) for name, reader in readers.items()} == {
            name: table.get(name, 0) for name in "abcdef"
        }


_WRITER = """
import sys
from pathlib import Path
from rsrv.wire.placement_table import PlacementWriter
writer, mask = PlacementWriter(Path(sys.argv[1])), 0
while True:
    mask += 1
    writer.write({f"model{number}": mask for number in range(200)})
    if mask == 1:
        print(flush=True)
"""


def test_readers_beside_a_busy_writer_that_is_killed(path: Path) -> None:
    """Another process writes tables with rising masks as fast as it can. A reader never gets an older mask than before.

    After the writing process was killed, the table is complete.
    """
    generation = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", _WRITER, path], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        readers = [PlacementReader(path, f"model{number}") for number in (0, 199)]
        masks = [0, 0]
        while min(masks) < 50:
            before, masks = masks, [reader.mask(0) for reader in readers]
            assert all(mask >= max(last, 1) for mask, last in zip(masks, before, strict=True))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()

        read_masks = {PlacementReader(path, f"model{number}").mask(0) for number in range(200)}
        assert len(read_masks) == 1
        assert read_masks.pop() >= max(masks)
        writer = PlacementWriter(path)
        assert writer.write({}) > generation
        generation = writer.write({})
        writer.close()


def test_a_reader_of_a_meta_model_knows_its_callees(tmp_path: Path) -> None:
    """A reader of a meta model returns the masks of its callees from the same table as the model's own mask."""
    path = tmp_path / "placement"
    reader = PlacementReader(path, "pets", ("cats", "dogs"))
    assert (reader.mask(0), reader.callees) == (0, {"cats": 0, "dogs": 0})
    writer = PlacementWriter(path)
    writer.write({"pets": 1, "cats": 2})
    assert (reader.mask(9), reader.callees) == (1, {"cats": 2, "dogs": 0})
    writer.close()
    reader.close()
