"""`stub.front: auto` on a real server: a plain model gets the native front, and a model with hooks gets the Python front."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from local_triton import INSTALLATION, OTHER
from rsrv_gen import fronts
from tests.e2e import bundles
from tests.e2e.calls import PROTOCOLS, assert_same, caller
from tests.e2e.harness import EXPLICIT, StartTriton, make_repository


def test_each_model_gets_the_front_that_it_can_have(
    start_triton: StartTriton,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both models answer, and only the model with hooks has a process. `rsrv status` shows each front with its reason."""
    monkeypatch.delenv("RSRV_STUB__FRONT", raising=False)
    made = bundles.ensure()
    repository = make_repository(tmp_path, made / "exact", made / "hooked", settings="stub: {front: auto}")
    triton = start_triton(repository, extra_args=EXPLICIT)
    x = np.arange(64, dtype=np.float32).reshape(1, 64)
    for protocol in PROTOCOLS:
        with caller(triton, protocol) as call:
            assert_same(call("exact", {"x": x}), {"y": x @ bundles.exact_kernel()})
            # The hooks read their action from the first element. 0 is no action.
            assert_same(call("hooked", {"x": x[:, :4]}), {"y": 2 * x[:, :4]})
    assert not triton.stub_pids("exact")
    assert len(triton.stub_pids("hooked")) == 1

    expected = {"exact": "native front: it needs no Python", "hooked": "Python front: it has hooks"}
    for model, front in expected.items():
        capsys.readouterr()
        triton.operate("status", model)
        assert front in capsys.readouterr().out


@pytest.mark.skipif(OTHER is not None, reason="the library of another tritonserver may be anywhere")
def test_the_installed_triton_has_a_tested_backend_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API version of a tritonserver is found if its library is in `lib`, as in NVIDIA's images."""
    for folder in ("bin", "lib"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bin/tritonserver").write_text("#!/bin/sh\n")
    (library,) = INSTALLATION.libs.glob("libtritonserver-*.so")
    (tmp_path / "lib/libtritonserver.so").symlink_to(library)
    monkeypatch.setenv("LD_LIBRARY_PATH", INSTALLATION.library_path)
    assert fronts.backend_api(str(tmp_path / "bin/tritonserver")) in fronts.TESTED_API
