"""What `python tools/local_triton.py install` does: tritonserver, its Python backend and perf_analyzer, in one folder.

Everything comes as wheels, for their binaries; nothing is installed outside the folder. Standard library only.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PYTRITON = "nvidia-pytriton==0.7.0"
#: The last tritonclient whose Linux wheel carries the perf_analyzer binary.
PERF_CLIENT = "tritonclient==2.46.0"
PYTHON_TAG = f"{sys.version_info.major}.{sys.version_info.minor}"
NUMPY_2 = "numpy>=2.1,<3"
#: The stub of 24.10 was built before numpy 2 existed: with numpy 2 it hands over wrong inputs without any error.
#: Python 3.13 has no numpy 1.26; there `rsrv.stub` must read its inputs through DLPack.
STUB_NUMPY = NUMPY_2 if sys.version_info >= (3, 13) else "numpy==1.26.4"


def say(text: str) -> None:
    """One line of progress, at once."""
    print(f"local_triton: {text}", flush=True)


class InstallError(Exception):
    """A step of the installation failed; the text says what to do."""


@dataclass(frozen=True)
class Installation:
    """Where everything lies under one folder (`.triton` by default)."""

    folder: Path = ROOT / ".triton"

    @property
    def site(self) -> Path:
        """Holds the unpacked wheel."""
        return self.folder / "site"

    @property
    def libs(self) -> Path:
        """The wheel's shared libraries, under the hashed names its binaries ask for."""
        return self.site / "nvidia_pytriton.libs"

    @property
    def tritonserver(self) -> Path:
        return self.site / "pytriton" / "tritonserver" / "bin" / "tritonserver"

    @property
    def backends(self) -> Path:
        """For --backend-directory: the Python backend with the stub of this Python beside it."""
        return self.folder / "backends"

    @property
    def python_lib(self) -> Path:
        """Holds a link to this Python's own shared library, and nothing else."""
        return self.folder / "lib"

    @property
    def stub_bin(self) -> Path:
        """`bin` of the environment that the stubs run in; Triton takes the first python3 on its PATH."""
        return self.folder / "stub" / "bin"

    @property
    def launcher(self) -> Path:
        """tritonserver with its libraries and its environment, as an installed one would be."""
        return self.folder / "bin" / "tritonserver"

    @property
    def perf_analyzer(self) -> Path:
        return self.folder / "perf" / "perf_analyzer"

    @property
    def library_path(self) -> str:
        return f"{self.libs}:{self.python_lib}"

    def steps(self) -> list[Step]:
        """What to install, in order; a step whose key changed is done again."""
        python = _this_python()
        return [
            Step(
                "stub",
                f"{python}, {STUB_NUMPY}, {_hook_packages()}, {ROOT}",
                "environment of Triton's stub processes",
                self._stub,
            ),
            Step("server", PYTRITON, "tritonserver (60 MB to download)", self._server),
            Step(
                "backend", f"{PYTRITON}, {python}", f"Python backend for Python {PYTHON_TAG}", self._backend
            ),
            Step("launcher", f"{python}, {ROOT}, {sys.prefix}", "command tritonserver", self._launcher),
            Step("perf", f"{PERF_CLIENT}, {PYTRITON}", "perf_analyzer", self._perf),
        ]

    def missing(self) -> list[Step]:
        """The steps that are not done, or were done for other versions."""
        done = self._stamp()
        return [step for step in self.steps() if done.get(step.name) != step.key]

    def install(self) -> None:
        """Brings everything into place. Quick when it already is; safe to interrupt and to run twice at once."""
        if sys.version_info < (3, 11) or sys.version_info >= (3, 14):
            raise InstallError(
                f"needs Python 3.11, 3.12 or 3.13, this is {PYTHON_TAG}; run me with another Python"
            )
        self._bring(self.steps())

    def numpy2_bin(self) -> Path:
        """As `stub_bin`, of an environment with numpy 2 on any Python; it is made when it is first asked for."""
        folder = self.folder / "stub-numpy2"
        key = f"{_this_python()}, {NUMPY_2}, {_hook_packages()}, {ROOT}"
        self._bring(
            [Step("stub-numpy2", key, "environment with numpy 2", lambda: self._environment(folder, NUMPY_2))]
        )
        return folder / "bin"

    def _bring(self, steps: Sequence[Step]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for number, step in enumerate(steps, start=1):
                if self._stamp().get(step.name) == step.key:
                    continue
                say(f"[{number}/{len(steps)}] {step.title} ...")
                started = time.monotonic()
                step.build()
                self._write_stamp({**self._stamp(), step.name: step.key})
                say(f"[{number}/{len(steps)}] {step.title}: done in {time.monotonic() - started:.0f} s")

    def _stamp(self) -> dict[str, str]:
        try:
            stamp = json.loads((self.folder / "stamp.json").read_text())
        except (OSError, ValueError):
            return {}
        return {str(name): str(key) for name, key in stamp.items()}

    def _write_stamp(self, stamp: Mapping[str, str]) -> None:
        aside = self.folder / "stamp.json.new"
        aside.write_text(json.dumps(stamp, indent=2) + "\n")
        aside.replace(self.folder / "stamp.json")

    def _pip(self, *arguments: str, bin_folder: Path | None = None) -> None:
        """The stub environment's pip, so that the Python that runs this needs none."""
        quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
        python = (bin_folder or self.stub_bin) / "python3"
        _must_run([str(python), "-m", "pip", *arguments[:1], *quiet, *arguments[1:]])

    def _stub(self) -> None:
        self._environment(self.stub_bin.parent, STUB_NUMPY)

    def _environment(self, folder: Path, numpy: str) -> None:
        """What a stub needs, in `folder`."""
        _must_run([sys.executable, "-m", "venv", str(_emptied(folder))])
        self._pip("install", "--only-binary=:all:", numpy, bin_folder=folder / "bin")
        # Without the hub's client that tokenizers asks for, which only downloads.
        self._pip("install", "--no-deps", "--only-binary=:all:", *_hook_packages(), bin_folder=folder / "bin")
        # A path file is all that it takes: the stub's side of rsrv is pure Python.
        site = folder / "lib" / f"python{PYTHON_TAG}" / "site-packages"
        (site / "rsrv.pth").write_text(f"{ROOT / 'triton_backend'}\n")

    def _server(self) -> None:
        folder = _emptied(self.site)
        self._pip(
            "install", "--no-deps", "--only-binary=:all:", "--no-compile", f"--target={folder}", PYTRITON
        )

    def _backend(self) -> None:
        source = self.site / "pytriton" / "tritonserver"
        name = "triton_python_backend_stub"
        folder = _emptied(self.backends)
        shutil.copytree(source / "backends" / "python", folder / "python")
        stub = folder / "python" / name
        shutil.copy2(source / "python_backend_stubs" / PYTHON_TAG / name, stub)
        stub.chmod(0o755)
        # Only the one library: a whole lib folder on LD_LIBRARY_PATH would shadow the system's libraries.
        lib = _emptied(self.python_lib)
        library = str(sysconfig.get_config_var("INSTSONAME") or f"libpython{PYTHON_TAG}.so.1.0")
        own = Path(str(sysconfig.get_config_var("LIBDIR"))) / library
        if own.is_file():
            (lib / library).symlink_to(own)
        # Without arguments the stub only complains about them, unless the loader stops it before.
        trial = _run([str(stub)], {"LD_LIBRARY_PATH": self.library_path})
        if trial.returncode == 127:
            raise InstallError(
                f"Triton's stub for Python {PYTHON_TAG} can't start: {trial.stderr.strip()}\n"
                f"This Python was built without a shared library. Use one that has it "
                f"(Debian and Ubuntu: apt-get install libpython{PYTHON_TAG})."
            )

    def _launcher(self) -> None:
        _emptied(self.launcher.parent)
        self.launcher.write_text(
            "#!/bin/sh\n"
            f'export LD_LIBRARY_PATH="{self.library_path}" PATH="{self.stub_bin}:$PATH"\n'
            f'export RSRV_RUNTIME_PYTHON="${{RSRV_RUNTIME_PYTHON:-{sys.prefix}/bin/python3}}"\n'
            f'exec "{self.tritonserver}" --backend-directory="{self.backends}" "$@"\n'
        )
        self.launcher.chmod(0o755)

    def _perf(self) -> None:
        folder = _emptied(self.folder / "perf")
        with tempfile.TemporaryDirectory(dir=self.folder) as download:
            platform = ["--platform=manylinux1_x86_64", "--only-binary=:all:", "--no-deps"]
            self._pip("download", *platform, f"--dest={download}", PERF_CLIENT)
            (wheel,) = Path(download).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (name for name in archive.namelist() if name.endswith("/bin/perf_analyzer"))
                binary = folder / "bin" / "perf_analyzer"
                binary.parent.mkdir()
                with archive.open(member) as source, binary.open("wb") as target:
                    shutil.copyfileobj(source, target)
        binary.chmod(0o755)
        lib = folder / "lib"
        lib.mkdir()
        for plain, hashed in {
            "libb64.so.0d": "libb64-*.so.0d",
            "libcudart.so.12": "libcudart-*.so.12*",
        }.items():
            (library,) = self.libs.glob(hashed)
            (lib / plain).symlink_to(library)
        launcher = self.perf_analyzer
        launcher.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{lib}:{self.libs}" exec "{binary}" "$@"\n')
        launcher.chmod(0o755)
        # perf_analyzer leaves with a usage error's status even for -h: what counts is that it gets to print it.
        trial = _run([str(launcher), "-h"])
        if "concurrency-range" not in trial.stdout + trial.stderr:
            raise InstallError(f"perf_analyzer does not run: {(trial.stderr or trial.stdout).strip()[-500:]}")


@dataclass(frozen=True)
class Step:
    """One part of the installation."""

    name: str
    #: All that decides the outcome; kept in the stamp.
    key: str
    title: str
    build: Callable[[], None]


def _hook_packages() -> list[str]:
    """What `rsrv.hooks` needs beside numpy."""
    import tomllib  # older Pythons have none, and come as far as `install`, which says so

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages: list[str] = project["optional-dependencies"]["hooks"]
    return packages


def _this_python() -> str:
    """What an environment made by this Python depends on."""
    return f"Python {sys.version.split()[0]} in {sys.base_prefix}"


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _run(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=env and {**os.environ, **env}, text=True, capture_output=True, check=False
    )


def _must_run(command: Sequence[str]) -> None:
    done = _run(command)
    if done.returncode != 0:
        raise InstallError(
            f"{' '.join(command)}\nfailed with status {done.returncode}:\n{done.stdout}{done.stderr}"
        )
