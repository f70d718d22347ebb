"""A spare runtime compiles known modules before it takes over."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from rsrv.runtime.known_modules import KnownModules
from rsrv.runtime.preparation import prepare
from rsrv.settings import load_settings
from rsrv.wire.paths import MODULES
from rsrv_bundle import read_bundle
from rsrv_bundle.modules import Signature, check_signatures, read_module, signature_of

SETTINGS = load_settings("runtime: {compilation_cache_dir: null}\nmodels: {b: {max_batch_size: 1}}")


@pytest.fixture
def repository(tmp_path: Path, doubling: Path) -> Path:
    """Return a repository of two good models and of one whose bundle is broken."""
    for name in "abc":
        shutil.copytree(doubling, tmp_path / "gen" / name / "1" / "bundle")
    (tmp_path / "gen" / "c" / "1" / "bundle" / "manifest.yaml").write_text("no manifest")
    return tmp_path / "gen"


def remember(directory: Path, bundle: Path) -> dict[tuple[int, int], Signature]:
    """Store the signatures of a bundle's modules in the file of known modules, as a runtime that serves the bundle does."""
    known = KnownModules(directory / MODULES)

    def read_signature(blob: bytes, file: str) -> Signature:
        known[hashlib.sha256(blob).hexdigest()] = signature = signature_of(blob, file)
        return signature

    return check_signatures(read_bundle(bundle), read_signature)


def test_models_that_were_served_are_compiled(tmp_path: Path, repository: Path, doubling: Path) -> None:
    """The modules of models that were served before are compiled. A broken bundle does not prevent this.

    If the runtime compiles such a module again, it gets the same executable.
    """
    signatures = remember(tmp_path, doubling)

    made = prepare(SETTINGS, repository, tmp_path, ["cpu"], 0)

    assert made is not None
    # `a` has three sizes, and the settings of `b` allow one.
    assert len(made.executables) == 4
    before = made.device.cache_counts.shared
    for key, signature in signatures.items():
        made.device.compile(read_module(read_bundle(doubling), key, signature), signature)
    assert made.device.cache_counts.shared == before + len(signatures)


def test_modules_that_no_runtime_has_seen_are_left_to_the_runtime(tmp_path: Path, repository: Path) -> None:
    """A module that no runtime has parsed is not prepared, because it might crash the parser and thus the spare."""
    made = prepare(SETTINGS, repository, tmp_path, ["cpu"], 0)
    assert made is not None
    assert made.executables == []


def test_nothing_is_prepared_on_a_cpu_instead_of_a_gpu(tmp_path: Path) -> None:
    """Nothing is prepared if the settings require a GPU but the server has only the CPU. A runtime would not start then."""
    settings = load_settings("runtime: {platform: cuda}")
    assert prepare(settings, tmp_path, tmp_path, ["cpu"], 0) is None
