"""Built bundles that execute in this process. Tests of meta models call them instead of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from rsrv_bundle import load_weights, read_bundle
from rsrv_bundle.dtypes import token_of
from rsrv_bundle.modules import as_exported, check_signatures, module_file

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


def restored(folder: Path, like: Any) -> Any:
    """Return the weights of a built bundle as a tree with the structure of `like`. The bundle was made from such a tree."""
    bundle = read_bundle(folder, digest=False)
    leaves, tree = jax.tree.flatten(like)
    stored = load_weights(bundle)
    assert [leaf.shape for leaf in leaves] == [array.shape for array in stored]
    return jax.tree.unflatten(tree, stored)


class Model:
    """A built bundle that jax executes as the runtime does. Names and dtypes must be exact, and rows are padded to a compiled size."""

    def __init__(self, folder: Path) -> None:
        self.bundle = read_bundle(folder, digest=False)
        with jax.enable_x64(True):
            self.weights = [jax.numpy.asarray(array) for array in load_weights(self.bundle)]
        self.signatures = check_signatures(self.bundle)
        self.compiled: dict[tuple[int, int], Any] = {}

    def __call__(self, inputs: Arrays) -> Arrays:
        specs = self.bundle.manifest.inputs
        assert {spec.name: spec.dtype for spec in specs} == {
            name: token_of(array.dtype) for name, array in inputs.items()
        }
        arrays = [inputs[spec.name] for spec in specs]
        (rows,) = {len(array) for array in arrays}
        key = next(
            key
            for key in sorted(self.signatures)
            if key[1] >= rows
            and all(
                array.shape[1:] == self.bundle.input_shape(index, *key)[1:]
                for index, array in enumerate(arrays)
            )
        )
        # The rows that pad a batch may have any values.
        padded = [np.concatenate([a, np.full((key[1] - rows, *a.shape[1:]), 7, a.dtype)]) for a in arrays]
        if key not in self.compiled:
            module = module_file(self.bundle, key).read_bytes()
            self.compiled[key] = jax.jit(as_exported(module, self.signatures[key]).call)
        with jax.enable_x64(True):
            outputs = self.compiled[key](*padded, *self.weights)
        return {
            spec.name: np.asarray(value)[:rows]
            for spec, value in zip(self.bundle.manifest.outputs, outputs, strict=True)
        }
