"""Serve small bundles of the zoo with Triton, and compare the answers with PyTorch's.

This runs in the environment of the tests, not in that of `make zoo`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

from tests.e2e.calls import caller
from tests.e2e.harness import make_repository, running_triton
from tests.zoo.__main__ import SERVED, SMALL_BUNDLES


def main(count: int = 24) -> None:
    """Serve the first `count` bundles in the order of their names. Write the largest error of each to `SERVED`."""
    files = sorted(SMALL_BUNDLES.glob("*.npz"))[:count]
    errors = {}
    with tempfile.TemporaryDirectory() as folder:
        repository = make_repository(Path(folder), *(file.with_suffix("") for file in files))
        with (
            running_triton(repository, Path(folder, "server.log"), timeout=600) as server,
            caller(server) as call,
        ):
            for file in files:
                errors[file.stem] = max(_errors(call, file))
                print(f"{file.stem}: {errors[file.stem]:.1e}", flush=True)
    SERVED.write_text(json.dumps(errors))
    assert max(errors.values()) < 1e-4


def _errors(call: object, file: Path) -> list[float]:
    assert callable(call)
    with np.load(file) as arrays:
        inputs = {key[3:]: arrays[key] for key in arrays.files if key.startswith("in/")}
        expected = {key[4:]: arrays[key] for key in arrays.files if key.startswith("out/")}
    # Triton refuses inputs that have only a batch axis, so add an axis.
    answers = call(
        file.stem, {key: value[:, None] if value.ndim == 1 else value for key, value in inputs.items()}
    )
    errors = []
    for name, value in expected.items():
        got = answers[name].reshape(value.shape).astype(np.float64)
        scale = float(np.abs(value.astype(np.float64)).max(initial=0.0)) or 1.0
        errors.append(float(np.abs(got - value).max(initial=0.0)) / scale)
    return errors


if __name__ == "__main__":
    main()
