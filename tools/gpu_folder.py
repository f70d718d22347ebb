"""Make a folder with everything that `rsrv gpu check` needs on a machine without a network.

    python tools/gpu_folder.py OUT                 # 3 GB; jax for CUDA 13 is most of it
    python tools/gpu_folder.py OUT --without-jax   # 300 MB, for a machine whose Python 3.12 has jax for CUDA

The machine needs Linux on x86-64, NVIDIA's driver and Python 3.12. On that machine, `python3.12 OUT/run.py --minutes 10` installs
everything into OUT, and runs the check.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import example_bundles
import native_front
from rsrv import triton_install

ROOT = Path(__file__).resolve().parent.parent
#: File with the pinned packages of the container, for Python 3.12.
PINS = ROOT / "docker" / "requirements.txt"
PYTHON = "3.12"
MODELS = ("resnet18", "vit_tiny", "minilm_encoder")
#: Matches the pinned packages of `jax[cuda13]`. They are left out with --without-jax.
_JAX = re.compile(r"(jax|jaxlib|jax-.*|nvidia-(?!ml-py).*|numpy|scipy|ml-dtypes|opt-einsum)==")
_PLATFORMS = (
    "any",
    "manylinux1",
    "manylinux2010",
    "manylinux2014",
    *(f"manylinux_2_{n}" for n in range(5, 36)),
)


def main() -> int:
    """Make the folder."""
    parser = argparse.ArgumentParser(description="Make a folder for `rsrv gpu check` without a network.")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--without-jax", action="store_true", help="for a Python that has jax for CUDA")
    options = parser.parse_args()
    out: Path = options.out
    shutil.rmtree(out, ignore_errors=True)
    wheels, triton = out / "wheels", out / "triton-wheels"
    triton.mkdir(parents=True)
    native_front.ensure()
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(ROOT)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    _download(out, wheels, (pin for pin in _pins() if not (options.without_jax and _JAX.match(pin))))
    for requirements in (triton_install.SERVER, triton_install.PERF_ANALYZER, triton_install.STUB):
        _download(out, triton, [requirements])
    bundles = example_bundles.ensure(MODELS)
    for name in MODELS:
        shutil.copytree(bundles / name, out / "bundles" / name)
    if (library := _libpython()) is not None:
        (out / "lib").mkdir()
        shutil.copy2(library, out / "lib")
    shutil.copy2(ROOT / "tools" / "gpu_folder_run.py", out / "run.py")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / 1e6:.0f} MB. There: python{PYTHON} {out.name}/run.py --minutes 10")
    return 0


def _pins() -> list[str]:
    """Return the pinned requirements, each with its hashes."""
    return re.findall(r"^[a-z].*?(?=^[a-z#]|\Z)", PINS.read_text(), re.MULTILINE | re.DOTALL)


def _download(out: Path, folder: Path, requirements: Iterable[str]) -> None:
    """Download wheels for the other machine. Their dependencies are also pinned."""
    file = out / "requirements.txt"
    file.write_text("".join(requirements))
    platforms = [f"--platform={name if name == 'any' else f'{name}_x86_64'}" for name in _PLATFORMS]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    target = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    subprocess.run([*pip, *target, f"--dest={folder}", "-r", str(file)], check=True)
    file.unlink()


def _libpython() -> Path | None:
    """Return the shared library libpython of this machine's Python 3.12, or None if it has none.

    Triton's stub needs this library, and some installations of Python lack it.
    """
    script = (
        "import sysconfig as s; print(s.get_config_var('LIBDIR'), s.get_config_var('INSTSONAME'), sep='/')"
    )
    try:
        done = subprocess.run([f"python{PYTHON}", "-c", script], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    path = Path(done.stdout.strip())
    return path if path.suffix != ".a" and path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
