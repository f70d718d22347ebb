"""Models with narrow weights on a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rsrv_bundle.export import export_bundle
from tests.e2e.calls import caller
from tests.e2e.harness import StartTriton, make_repository
from tests.status import read_status
from tests.waiting import wait_until

#: Other tests serve narrow weights in every suite, in the models of compositions.py.
pytestmark = pytest.mark.long


def test_narrow_models_answer_as_their_sources(start_triton: StartTriton, tmp_path: Path) -> None:
    """With each type of weights, and with half-precision computation, errors are below a bound. Narrow fine-tunes share their table."""
    rng = np.random.default_rng(0)
    table, base, tuned = (
        rng.standard_normal(shape, np.float32) / 8 for shape in ((512, 64), (64, 96), (64, 96))
    )

    def answer(p: Any, ids: Any) -> Any:
        return {"y": jnp.tanh(p["table"][ids].mean(1) @ p["head"])}

    kinds = {
        "f16": (base, {"weights": "f16"}, 0.01),
        "bf16": (base, {"weights": "bf16", "compute": "bf16"}, 0.1),
        "f8": (base, {"weights": "f8_e4m3"}, 0.2),
        "i8": (base, {"weights": "i8"}, 0.1),
        "tuned": (tuned, {"weights": "i8"}, 0.1),
    }
    example = {"ids": rng.integers(0, 512, (4, 8)).astype(np.int32)}
    for name, (head, options, _) in kinds.items():
        export_bundle(
            answer,
            {"table": table, "head": head},
            example,
            batch_sizes=(1, 4),
            out_dir=tmp_path / "bundles" / name,
            **options,  # type: ignore[arg-type]
        )
    server = start_triton(make_repository(tmp_path))
    with caller(server, "grpc") as call:
        for rows in (1, 3):
            ids = rng.integers(0, 512, (rows, 8)).astype(np.int32)
            for name, (head, _, bound) in kinds.items():
                want = np.tanh(table[ids].mean(1) @ head)
                error = np.abs(call(name, {"ids": ids})["y"] - want).max() / np.abs(want).max()
                assert 0 < error < bound, name
    # The models `i8` and `tuned` share the table and its scales.

    def shared() -> int:
        host = read_status(server.pid)["host"]
        return int(host["logical_bytes"] - host["physical_bytes"])

    wait_until(lambda: shared() == 512 * 64 + 512 * 4, what="the host's copies")
