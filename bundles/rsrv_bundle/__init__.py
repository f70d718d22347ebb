"""The bundle format: a directory with compiled modules, weights, a manifest and optional Python hooks.

Importing this package loads no other module. Its names are imported when they are first used, and need at most numpy.
`rsrv_bundle.modules` reads compiled modules and needs jaxlib. `rsrv_bundle.export` writes bundles and needs jax.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rsrv_bundle.errors import BundleError
    from rsrv_bundle.reader import find_bundles, read_bundle
    from rsrv_bundle.spec import (
        Bundle,
        GenerateSpec,
        Kind,
        Manifest,
        StateSpec,
        TaskSpec,
        TensorSpec,
        WeightSpec,
    )
    from rsrv_bundle.weights import load_weights
else:

    def __getattr__(name: str) -> object:
        from importlib import import_module

        for module, names in _HOMES.items():
            if name in names:
                return getattr(import_module(f"rsrv_bundle.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


#: Names that each module defines.
_HOMES = {
    "errors": ("BundleError",),
    "reader": ("find_bundles", "read_bundle"),
    "spec": (
        "Bundle",
        "GenerateSpec",
        "Kind",
        "Manifest",
        "StateSpec",
        "TaskSpec",
        "TensorSpec",
        "WeightSpec",
    ),
    "weights": ("load_weights",),
}

__all__ = [
    "Bundle",
    "BundleError",
    "GenerateSpec",
    "Kind",
    "Manifest",
    "StateSpec",
    "TaskSpec",
    "TensorSpec",
    "WeightSpec",
    "find_bundles",
    "load_weights",
    "read_bundle",
]
