"""The stub imports little, because every model has a process. Only two files of rsrv import jax."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "triton_backend" / "rsrv"

_SCRIPT = """
import sys, types
sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
import rsrv.stub.model
import json; print(json.dumps(sorted(sys.modules)))
"""


def test_the_stub_loads_neither_jax_nor_the_runtime() -> None:
    """In a new interpreter, the stub imports numpy, and neither jax, nor the runtime, nor other heavy packages."""
    out = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    loaded = set(json.loads(out.stdout))

    heavy = {
        "jax",
        "jaxlib",
        "ml_dtypes",
        "pydantic",
        "yaml",
        "safetensors",
        "google",
        "grpc",
        "opentelemetry",
        "rsrv_bundle",
        "rsrv_gen",
    }
    assert not {name.split(".")[0] for name in loaded} & heavy
    assert not [name for name in loaded if name.startswith(("rsrv.runtime", "rsrv.settings"))]
    assert "numpy" in loaded


def imported(source: str) -> Iterator[str]:
    """Yield the top-level packages that a source text imports, even inside functions."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]


def test_two_files_import_jax() -> None:
    """Only these two files import jax, so another version of jax changes only them."""
    importing = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "jax" in (source := path.read_text()) and {"jax", "jaxlib"} & set(imported(source))
    }

    assert importing == {"runtime/jax_compiler.py", "runtime/jax_device.py"}
