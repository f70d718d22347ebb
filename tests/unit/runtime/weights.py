"""Large and small tensors, and bundles that have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rsrv.runtime.allocation import LARGE
from rsrv.runtime.host_weights import HostStore
from rsrv_bundle import Bundle, read_bundle, writer
from rsrv_bundle.weights import content_digest
from tests.unit.bundle.forge import GOOD, changed, make_bundle

Array = np.ndarray[Any, Any]


def large(value: int) -> Array:
    return np.full((4, LARGE // 16), value, np.float32)


def small(value: int) -> Array:
    return np.full(3, value, np.float32)


def bundle_of(
    parent: Path, arrays: Mapping[str, Array], name: str, version: Literal["2.0", "3"] = "3"
) -> Bundle:
    """Write a bundle whose modules take these arrays, in this order."""
    stored = [(key, array.T.copy() if version == "2.0" else array) for key, array in arrays.items()]
    writer.write_weights(parent / "weights", stored)
    content = (parent / "weights").read_bytes()
    manifest = changed(GOOD, format_version=3 if version == "3" else version)
    return read_bundle(make_bundle(parent, manifest, name=name, weights=content))


def check_counts(store: HostStore) -> None:
    """Check the counts of a store and all bytes of its tensors. No other thread may use the store."""
    assert store._kept <= store._open
    references = Counter(t.key.digest for weights in store._kept for t in weights.tensors)
    counts = {digest: held.count for digest, held in store._held.items()}
    assert counts == references, "the count of a tensor is its number of references"
    assert store._physical == sum(held.block.bytes.nbytes for held in store._held.values())
    for digest, held in store._held.items():
        assert content_digest(held.block.bytes) == digest, "a tensor's bytes never change"
