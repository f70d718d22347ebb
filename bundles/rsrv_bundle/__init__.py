"""The bundle format: a directory with compiled modules, weights, a manifest and optional Python hooks.

Importing this package loads numpy and nothing heavier. `rsrv_bundle.modules` looks into compiled modules and needs
jaxlib; `rsrv_bundle.export` writes bundles and needs jax.
"""

from rsrv_bundle.errors import BundleError
from rsrv_bundle.reader import find_bundles, read_bundle
from rsrv_bundle.spec import Bundle, Kind, Manifest, TensorSpec, WeightSpec
from rsrv_bundle.weights import load_weights

__all__ = [
    "Bundle",
    "BundleError",
    "Kind",
    "Manifest",
    "TensorSpec",
    "WeightSpec",
    "find_bundles",
    "load_weights",
    "read_bundle",
]
