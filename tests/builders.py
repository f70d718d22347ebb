"""Bundles and hypothesis settings that tests of several packages share."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

from hypothesis import settings

from tests.unit.bundle.forge import seal

_default = settings.default
assert _default is not None
#: For properties whose every example is slow; `make test-long` takes ten times as many.
FEW_EXAMPLES = settings(max_examples=_default.max_examples // 3)

#: Tensors of a meta model: x and y, rows of three f32.
CLIENT = """
client_inputs: [{name: x, dtype: f32, shape: na, dims: {a: 3}}]
client_outputs: [{name: y, dtype: f32, shape: na, dims: {a: 3}}]
"""


def write_meta(
    path: Path, body: str, calls: Sequence[str], external: Sequence[str] = (), client: str = CLIENT
) -> Path:
    """Write a bundle of kind meta whose model.py is `body`, and whose tensors are `client`."""
    path.mkdir(parents=True)
    (path / "manifest.yaml").write_text(
        'format_version: "3.0"\n'
        "kind: meta\n"
        f"meta: {{calls: [{', '.join(calls)}], external: [{', '.join(external)}]}}\n" + client
    )
    (path / "model.py").write_text(dedent(body))
    return path


def broken_bundle(path: Path, good: Path) -> Path:
    """Copy a bundle so that it can be read and not compiled."""
    shutil.copytree(good, path)
    for module in path.glob("*.mlir"):
        module.write_bytes(b"nonsense")
    return seal(path)
