"""Modules that earlier runtimes parsed and compiled are not parsed or lowered again. A damaged file only costs time."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rsrv.runtime.known_modules import KnownModules
from rsrv_bundle import inspection, read_bundle
from rsrv_bundle.export import export_bundle
from rsrv_bundle.inspection import Inspector
from rsrv_bundle.modules import check_signatures
from tests.builders import export_sums
from tests.logged import logged_here

#: Script that makes three devices, one after another, which use the same files. The second lowers no module. The third
#: finds damaged entries. A loaded executable also updates a model's state in place.
_THREE_DEVICES = """
import hashlib, sys
from pathlib import Path
import numpy as np
from jax._src import compilation_cache
from rsrv.runtime.device import run
from rsrv.runtime import device_executables
from rsrv.runtime.device_executables import ExecutableSources
from rsrv.runtime.jax_device import JaxDevice
from rsrv.runtime.known_modules import KnownModules
from rsrv.runtime.state_pool import SequenceTensors, SlotRow
from rsrv_bundle import modules
from tests.unit.runtime.conftest import build_here

cache, doubling, tripling, sums = map(Path, sys.argv[1:])

def counts():
    compilation_cache.reset_cache()
    sources = ExecutableSources(cache, known=KnownModules(cache / "known"))
    if modules.as_exported is None:
        # Leave what a load leaves that fails after XLA has loaded the executable.
        drop, device_executables.drop_traces = device_executables.drop_traces, lambda: None
        signature = modules.Signature((("f32", (1, 3)), ("f32", (3,))), (("f32", (1, 3)),))
        JaxDevice("cpu", sources).compile((doubling / "model.b1.mlir").read_bytes(), signature)
        device_executables.drop_traces = drop
        compilation_cache.reset_cache()
    device = JaxDevice("cpu", sources)
    models = [(3, build_here(tripling, device)), (2, build_here(doubling, device))]
    for factor, model in models:
        for (_, size), executable in model.executables.items():
            x = np.arange(3 * size, dtype=np.float32).reshape(size, 3)
            (y,), _ = run(device, executable, model.weights, [x])
            np.testing.assert_array_equal(y, factor * x + 1)
    model, tensors = build_here(sums, device), SequenceTensors()
    addresses = [array.unsafe_buffer_pointer() for array in model.pool._pools.arrays]
    for step in (1, 2):
        row, before = SlotRow(2, tensors, step == 1), model.pool._pools.arrays
        x = np.ones((1, 3), np.float32)
        launched, _ = model.pool.launch(device, model.executables[0, 1], model.weights, [x], 1, [row])
        y, steps = device.read(launched)[0]
        assert (y[0, 0], steps[0], before[0].is_deleted()) == (1 + step, step, True)
        assert [array.unsafe_buffer_pointer() for array in model.pool._pools.arrays] == addresses
    return device.cache_counts.compiled, device.cache_counts.from_cache

print(counts())
as_exported, modules.as_exported = modules.as_exported, None
print(counts())
modules.as_exported = as_exported
for entry in cache.glob("*-checked"):
    entry.write_bytes(hashlib.sha256(b"no executable").digest() + b"no executable")
print(counts()[0])
"""


@pytest.mark.long
def test_known_executables_are_loaded_without_lowering_their_modules(tmp_path: Path, doubling: Path) -> None:
    """Executables in the cache are loaded without lowering their modules.

    If an entry of the cache cannot be loaded, its module is compiled again. The answers are right in all cases.
    """
    (tmp_path / "cache").mkdir(mode=0o700)
    # The modules of `tripling` have the signatures of `doubling`, so both models share a placeholder.
    tripling = tmp_path / "tripling"
    export_bundle(
        lambda params, x: {"y": 3 * x + params["w"]},
        {"w": np.ones(3, np.float32)},
        {"x": np.zeros((1, 3), np.float32)},
        batch_sizes=[1, 4, 8],
        out_dir=tripling,
    )
    sums = export_sums(tmp_path / "sums", batch_sizes=[1])
    command = [
        sys.executable,
        "-c",
        _THREE_DEVICES,
        *map(str, (tmp_path / "cache", doubling, tripling, sums)),
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == ["(7, 0)", "(0, 7)", "7"]


def test_known_modules_are_not_parsed(
    tmp_path: Path, doubling: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next runtime starts no process to parse known modules, and gets the same signatures as the first runtime."""
    bundle = read_bundle(doubling)
    with closing(Inspector(KnownModules(tmp_path / "known"))) as inspector:
        first = check_signatures(bundle, inspector)
    monkeypatch.setattr(inspection, "_spawn", None)

    with closing(Inspector(KnownModules(tmp_path / "known"))) as inspector:
        inspector.start()
        again = check_signatures(bundle, inspector)

    assert again == first
    assert [(entry.digest, entry.precision) for entry in again.values()] == [
        (entry.digest, entry.precision) for entry in first.values()
    ]


def test_the_shortest_start_of_a_model_is_kept(tmp_path: Path) -> None:
    """The shortest start of a model on a device is kept. A start that is not much shorter adds no line to the file."""
    known = KnownModules(tmp_path / "known")
    for seconds in (9.0, 0.5, 8.0, 0.4, 0.3):
        known.add_start("m@1", "cpu", seconds)
    again = KnownModules(tmp_path / "known")
    assert (again.start_seconds("m@1", "cpu"), again.start_seconds("m@1", "gpu")) == (0.3, None)
    assert (tmp_path / "known").read_text().count("start_s") == 3


def test_measured_costs_are_kept_for_the_same_model_and_device(tmp_path: Path) -> None:
    """The next runtime knows the costs of the same model on the same device. Costs that are not durations are ignored."""
    path = tmp_path / "known"
    known = KnownModules(path)
    known.add_costs("a@1", "here", {(0, 1): 0.25, (0, 4): 0.5})
    known.add_costs("a@1", "here", {(0, 1): 0.125, (0, 4): 0.5})
    written = path.read_text()
    path.write_text(written + written.replace("0.25", "NaN") + written.replace("0.25", "-1"))

    modules = KnownModules(path)

    assert modules.costs("a@1", "here") == {(0, 1): 0.25, (0, 4): 0.5}
    assert modules.costs("a@1", "elsewhere") is None
    assert modules.costs("a@2", "here") is None


def test_damaged_lines_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Damaged lines, such as one that a killed runtime left incomplete, are ignored. Their modules are parsed again.

    The log has one line with their number, and the other lines of the file stay valid.
    """
    path = tmp_path / "known"
    known = KnownModules(path)
    known.add_entry("a", "here", "key")
    known.add_entry("a", "here", "key")
    deep = b"[" * 100_000
    with path.open("ab") as file:
        file.write(b'\n{"inputs": 3}\n[]\n%s\n{"module": "b", "entr' % deep)
    known.add_entry("c", "here", "other")

    modules = KnownModules(path)

    assert modules.entry("a", "here") == "key"
    assert modules.entry("a", "elsewhere") is None
    assert modules.entry("c", "here") == "other"
    assert [record.getMessage() for record in logged_here(caplog)] == [
        f"{path} has 4 damaged lines; their modules are parsed again"
    ]
    assert not modules
    assert path.read_text().count("key") == 1


def test_a_file_that_cannot_be_written_costs_only_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the file cannot be written, the log has one line, and the process uses what it knows."""
    known = KnownModules(tmp_path / "missing" / "known")
    known.add_entry("a", "here", "key")
    known.add_entry("b", "here", "key")
    assert known.entry("b", "here") == "key"
    assert len(logged_here(caplog)) == 1
