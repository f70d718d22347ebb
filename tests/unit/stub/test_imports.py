"""What a stub process loads: one of them runs for every model, so its import must stay light."""

import json
import subprocess
import sys

_SCRIPT = """
import sys, types
sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
import rsrv.stub.model
import json; print(json.dumps(sorted(sys.modules)))
"""


def test_the_stub_loads_neither_jax_nor_the_runtime() -> None:
    """In a clean interpreter: numpy is the only package beside our own."""
    out = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    loaded = set(json.loads(out.stdout))

    heavy = {
        "jax",
        "jaxlib",
        "ml_dtypes",
        "pydantic",
        "ruamel",
        "safetensors",
        "google",
        "grpc",
        "rsrv_bundle",
        "rsrv_gen",
    }
    assert not {name.split(".")[0] for name in loaded} & heavy
    assert not [name for name in loaded if name.startswith(("rsrv.runtime", "rsrv.settings"))]
    assert "numpy" in loaded
