"""Bundles and hypothesis settings that tests of several packages share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import jax
import numpy as np
from hypothesis import settings
from jax._src import compilation_cache

from rsrv.runtime.compile_cache import CompileCache
from rsrv.runtime.jax_compiler import use_cache
from rsrv_bundle.spec import WhenFull
from rsrv_bundle.stateful import export_stateful
from tests.unit.bundle.forge import seal

_default = settings.default
assert _default is not None
#: Settings for properties with slow examples. `make test-long` tries ten times as many examples.
FEW_EXAMPLES = settings(max_examples=_default.max_examples // 3)

#: Tensors of a meta model: x and y, rows of three f32.
CLIENT = """
client_inputs: [{name: x, dtype: f32, shape: na, dims: {a: 3}}]
client_outputs: [{name: y, dtype: f32, shape: na, dims: {a: 3}}]
"""


#: Folder for executables of the modules that tests export. It is kept between test runs.
_COMPILED = Path(__file__).parents[1] / ".cache" / "tests"
_CACHE_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_enable_xla_caches",
)


@contextmanager
def compiled_before() -> Iterator[None]:
    """Let jax reuse compiled executables of earlier test runs. Compiling modules takes most of the time of exporters' tests."""
    before = {name: getattr(jax.config, name) for name in _CACHE_SETTINGS}
    store = compilation_cache.get_file_cache
    _COMPILED.mkdir(parents=True, exist_ok=True)
    compilation_cache.reset_cache()
    use_cache(CompileCache(_COMPILED))
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.get_file_cache = store
        compilation_cache.reset_cache()


def write_meta(
    path: Path, body: str, calls: Sequence[str], external: Sequence[str] = (), client: str = CLIENT
) -> Path:
    """Write a bundle of kind meta whose model.py is `body`, and whose tensors are `client`."""
    path.mkdir(parents=True)
    (path / "manifest.yaml").write_text(
        "format_version: 3\n"
        "kind: meta\n"
        f"meta: {{calls: [{', '.join(calls)}], external: [{', '.join(external)}]}}\n" + client
    )
    (path / "model.py").write_text(dedent(body))
    return path


def broken_bundle(path: Path, good: Path) -> Path:
    """Copy a bundle and break its modules. The copy can be read but not compiled."""
    shutil.copytree(good, path)
    for module in path.glob("*.mlir"):
        module.write_bytes(b"nonsense")
    return seal(path)


@compiled_before()
def export_sums(
    path: Path,
    *,
    slots: int = 3,
    batch_sizes: Sequence[int] = (1, 3),
    when_full: WhenFull = "wait",
    idle_timeout_s: float = 60.0,
) -> Path:
    """Write a bundle with state. y [n, 3] is the sum of a sequence's x so far plus w = 1, and steps [n] is the number of its steps."""

    def step(params: Any, state: Any, x: Any) -> Any:
        new = {"sum": state["sum"] + x, "steps": state["steps"] + 1}
        return {"y": new["sum"] + params["w"], "steps": new["steps"]}, new

    struct: Any = jax.ShapeDtypeStruct  # jax has no types for it
    export_stateful(
        step,
        {"sum": struct((3,), np.float32), "steps": struct((), np.int32)},
        {"w": np.ones(3, np.float32)},
        {"x": np.zeros((1, 3), np.float32)},
        slots=slots,
        when_full=when_full,
        idle_timeout_s=idle_timeout_s,
        batch_sizes=batch_sizes,
        out_dir=path,
    )
    return path


def add_to_sums(inputs: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
    """Compute what the modules of `export_sums` do, for a `FakeDevice`."""
    (x, slots), (w, steps, sums) = inputs, weights
    taken, totals = np.zeros(len(x), np.int32), np.zeros_like(x)
    steps, sums = steps.copy(), sums.copy()
    for row, slot in enumerate(slots):
        if slot == len(sums):
            continue
        at, begins = (~slot, True) if slot < 0 else (slot, False)
        totals[row] = sums[at] = x[row] + (0 if begins else sums[at])
        taken[row] = steps[at] = 1 + (0 if begins else steps[at])
    return [totals + w, taken, steps, sums]
