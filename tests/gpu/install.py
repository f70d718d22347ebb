"""Make the folder .gpu with jax's CUDA plugin, and with a fake CUDA driver in the places of NVIDIA's libraries.

Tests put the folder `site` in front of .venv's packages with PYTHONPATH. This folder has the wheels that XLA needs to compile for
a GPU. They are a tenth of what `jax[cuda13]` installs. The driver of tests/gpu/driver replaces the other libraries of CUDA, which
XLA and rsrv load by name.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PINS = ROOT / "docker" / "requirements.txt"

#: Packages of jax's plugin. Their version is that of .venv's jax.
PLUGIN = ("jax-cuda13-pjrt", "jax-cuda13-plugin")
#: Packages with ptxas, libnvvm, libdevice, and the headers that the driver needs.
COMPILER = ("nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-nvvm")

#: Path of the driver. Processes find it and NVML by LD_LIBRARY_PATH.
DRIVER = "driver/libcuda.so.1"
#: Paths of the other libraries. In `site`, they are where NVIDIA's wheels have them.
LIBRARIES = (
    "driver/libnvidia-ml.so.1",
    "site/nvidia/cu13/lib/libcudart.so.13",
    "site/nvidia/cu13/lib/libcublas.so.13",
    "site/nvidia/cu13/lib/libcublasLt.so.13",
    "site/nvidia/cudnn/lib/libcudnn.so.9",
)

#: A module of `jax_plugins`. Only root can make a GPU's device node. jax calls this module's `initialize` before it looks for
#: such a node, so the module can replace this check.
NODE = '''
"""Make jax believe that this machine has the device node of a GPU."""


def initialize():
    from jax._src import hardware_utils

    hardware_utils.has_visible_nvidia_gpu = lambda: True
'''


#: File with the digest of the sources from which the installed driver was built.
DIGEST = "driver/sources.sha256"


def digest() -> str:
    """Return the digest of the driver's sources.

    If an installed driver was built from sources with another digest, it may expect another layout of the settings than
    tests/gpu/fake_gpu.py writes.
    """
    hasher = sha256()
    for source in sorted((HERE / "driver").iterdir()):
        hasher.update(source.read_bytes())
    return hasher.hexdigest()


def main(target: Path) -> None:
    site = target / "site"
    if not (site / "jax_plugins").exists():
        shutil.rmtree(site, ignore_errors=True)
        _install(site, *(f"{name}=={version('jax')}" for name in PLUGIN), *map(_pinned, COMPILER))
        node = site / "jax_plugins" / "fake_gpu.py"
        node.write_text(NODE.lstrip())
    driver = target / DRIVER
    driver.parent.mkdir(exist_ok=True)
    options = [
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pthread",
    ]
    headers, sources = site / "nvidia" / "cu13" / "include", sorted((HERE / "driver").glob("*.cpp"))
    subprocess.run([*_compiler(target), *options, "-I", headers, "-o", driver, *sources], check=True)
    for name in LIBRARIES:
        library = target / name
        library.parent.mkdir(parents=True, exist_ok=True)
        library.unlink(missing_ok=True)
        # All names are one file. The loader maps it only once, so the libraries share their state.
        library.hardlink_to(driver)
    (target / DIGEST).write_text(digest())


def install_newest(target: Path) -> str:
    """Make an environment of Python 3.12 with the newest jax that pyproject.toml allows. Return its interpreter.

    The first call installs 1 GB. Raises CalledProcessError after uv has printed the reason.
    """
    folder, python = target / "newest", target / "newest" / "bin" / "python"
    uv = str(Path(sys.executable).with_name("uv"))
    install = [uv, "pip", "install", "--quiet", "--no-config", "--upgrade", "--python", str(python)]
    if not python.exists():
        # jax 0.11 and later need a newer Python than development uses.
        subprocess.run(
            [uv, "venv", "--quiet", "--no-python-downloads", "--python=3.12", str(folder)], check=True
        )
    subprocess.run([*install, "-r", str(ROOT / "pyproject.toml"), "--extra", "export", "pytest"], check=True)
    (site,) = folder.glob("lib/*/site-packages")
    (metadata,) = site.glob("jax-*.dist-info")
    release = metadata.name.removeprefix("jax-").removesuffix(".dist-info")
    subprocess.run([*install, "--no-deps", *(f"{name}=={release}" for name in PLUGIN)], check=True)
    (site / "jax_plugins" / "fake_gpu.py").write_text(NODE.lstrip())
    if not (site / "nvidia").exists():
        (site / "nvidia").symlink_to(target / "site" / "nvidia")
    return str(python)


def _pinned(name: str) -> str:
    """Return a requirement with the container's version, because these versions belong together."""
    match = re.search(rf"^{re.escape(name)}==\S+", PINS.read_text(), re.MULTILINE)
    assert match is not None, f"{PINS} has no {name}"
    return match[0]


def _compiler(target: Path) -> list[str]:
    """Return the system's C++ compiler, or one from PyPI."""
    if compiler := shutil.which("c++"):
        return [compiler]
    zig = target / "zig"
    if not zig.exists():
        _install(zig, "ziglang")
    return [sys.executable, str(zig / "ziglang" / "__main__.py"), "c++"]


def _install(folder: Path, *requirements: str) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), *requirements], check=True)


if __name__ == "__main__":
    main(ROOT / ".gpu")
