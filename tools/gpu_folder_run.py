"""Install rsrv from this folder, without a network, and run `rsrv gpu check` with the arguments of this command.

    python3.12 run.py --minutes 10

The script installs all packages into the folder `installed` next to this file. If there is no wheel of jax next to this file, the
check also uses the packages of the Python that runs the script. The check compares rsrv with the PyTorch of that Python, if it has
PyTorch with CUDA. The script imports only the standard library.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
INSTALLED = HERE / "installed"
BIN = INSTALLED / "bin"


def main() -> None:
    """Install missing packages, and replace this process by the check."""
    if not sys.version.startswith("3.12."):
        sys.exit(f"run.py: the wheels are for Python 3.12, and this is {sys.version.split()[0]}")
    if not (BIN / "rsrv").exists():
        _install()
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(INSTALLED / "cache"),
        "RSRV_TORCH_PYTHON": sys.executable,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(HERE / "triton-wheels"),
    }
    library = {"LD_LIBRARY_PATH": f"{HERE / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    if subprocess.run(
        [BIN / "rsrv", "triton", "install"], env={**environment, **library}, check=False
    ).returncode:
        print("run.py: tritonserver is not installed; the check continues without it", file=sys.stderr)
    arguments = [f"--models={HERE / 'bundles'}", f"--json={HERE / 'figures.json'}", *sys.argv[1:]]
    os.execve(BIN / "rsrv", ["rsrv", "gpu", "check", *arguments], environment)


def _install() -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", INSTALLED], check=True)
    wheels = sorted((HERE / "wheels").glob("*.whl"))
    if not any(wheel.name.startswith("jax-") for wheel in wheels):
        (site,) = INSTALLED.glob("lib/python3.12/site-packages")
        folders = [path for path in sys.path if path.endswith("-packages")]
        # Add the packages of this Python. The installed packages of the folder take precedence.
        (site / "others.pth").write_text("".join(f"{path}\n" for path in folders))
    pip = [sys.executable, "-m", "pip", "--python", str(BIN / "python"), "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--disable-pip-version-check", *map(str, wheels)], check=True)


if __name__ == "__main__":
    main()
