"""Installs tritonserver without a container: `rsrv triton install`.

Everything comes from wheels whose checksums are fixed below: the server with its Python backend from `nvidia-pytriton`,
perf_analyzer from `tritonclient`, and the packages of a small environment for Triton's stub processes. Everything is installed
in one folder. This module imports only the standard library.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
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

import rsrv
from rsrv.triton_command_line import unusable_characters

#: Wheel with tritonserver 2.51 (release 24.10) and its Python backend.
SERVER = """\
nvidia-pytriton==0.7.0 --hash=sha256:21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df
"""
#: The last version of tritonclient whose Linux wheel has the binary perf_analyzer.
PERF_ANALYZER = """\
tritonclient==2.46.0 --hash=sha256:10d2cda89b72599757ef5aeab160c39c6dead64a97871c6156cdf25043f2f655
"""
#: Packages that stubs import: numpy, and the imports of `rsrv.hooks`. The stub of 24.10 was built before numpy 2, and passes
#: wrong inputs with numpy 2. There is no numpy 1.26 for Python 3.13, so `rsrv.stub` reads inputs through DLPack on 3.13.
STUB = """\
numpy==1.26.4 ; python_version < "3.13" \
--hash=sha256:666dbfb6ec68962c033a450943ded891bed2d54e6755e35e5835d63f4f6931d5 \
--hash=sha256:675d61ffbfa78604709862923189bad94014bef562cc35cf61d3a07bba02a7ed
numpy==2.2.6 ; python_version >= "3.13" \
--hash=sha256:1bc23a79bfabc5d056d106f9befb8d50c31ced2fbc70eedb8155aec74a45798f
pillow==13.0.0 \
--hash=sha256:a625df9a2a5597fa5e5266e01aefc82604bb85d291e3547981e863560d75da6c \
--hash=sha256:42d63be3af4f9b951b199b0a9d23365d37ab14687e6d77b74940432c8515c4ca \
--hash=sha256:5f56499c1a74d2b862beb0c33b8016f99d095858455df9d21583bbbc1c15b582
tokenizers==0.23.3 \
--hash=sha256:376851d22bcf9d650a5c3090bb83e6cf9e895fbf0595369fa4cd43c1f69b5f87
"""
PYTHON_TAG = f"{sys.version_info.major}.{sys.version_info.minor}"
PACKAGE = Path(rsrv.__file__).resolve().parent


class InstallError(Exception):
    """A step of the installation failed. The text says what to do."""


def default_folder() -> Path:
    """Return the folder in the user's cache where `rsrv serve` looks for an installation."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rsrv" / "triton-24.10"


@dataclass(frozen=True)
class Installation:
    """Paths of one installation.

    `folder` has the parts that all Python environments share. `own` has the parts of this environment. By default, it is
    `folder/env-<hash of the environment's path>`.
    """

    folder: Path
    own: Path

    @classmethod
    def at(cls, folder: Path, own: Path | None = None) -> Installation:
        name = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
        return cls(folder, own or folder / f"env-{name}")

    @property
    def site(self) -> Path:
        """The unpacked wheel of the server."""
        return self.folder / "site"

    @property
    def libs(self) -> Path:
        """The wheel's shared libraries. They have the hashed names that its binaries need."""
        return self.site / "nvidia_pytriton.libs"

    @property
    def tritonserver(self) -> Path:
        """The server's binary. It needs `library_path` and `backends`, which `launcher` sets."""
        return self.site / "pytriton" / "tritonserver" / "bin" / "tritonserver"

    @property
    def perf_analyzer(self) -> Path:
        return self.folder / "perf" / "perf_analyzer"

    @property
    def backends(self) -> Path:
        """The value of --backend-directory. It has the Python backend with the stub for this Python."""
        return self.own / "backends"

    @property
    def python_lib(self) -> Path:
        """A folder with nothing but a link to this Python's shared library."""
        return self.own / "lib"

    @property
    def stub_bin(self) -> Path:
        """The folder `bin` of the stubs' environment. Triton uses the first python3 on its PATH."""
        return self.own / "stub" / "bin"

    @property
    def stub_python(self) -> Path:
        """The Python of the stubs, which runs hooks."""
        return self.stub_bin / "python3"

    @property
    def launcher(self) -> Path:
        """A script that starts tritonserver with its libraries, backends and environment."""
        return self.own / "bin" / "tritonserver"

    @property
    def library_path(self) -> str:
        return f"{self.libs}:{self.python_lib}"

    def is_installed(self) -> bool:
        """Return True if every step was done for the current versions."""
        return all(self._stamp(step) == step.key for step in self._steps())

    def install(self, say: Callable[[str], None]) -> None:
        """Do the steps that are missing or out of date. `say` gets a line before and after each step.

        This may be interrupted, and may run twice at the same time.

        Raises:
            InstallError: The machine is not supported, or a step failed.
        """
        if not ((3, 11) <= sys.version_info < (3, 14)):
            raise InstallError(f"tritonserver 24.10 needs Python 3.11 to 3.13, found {PYTHON_TAG}")
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            raise InstallError(
                "only Linux on x86-64 is supported here; elsewhere run rsrv in NVIDIA's container, or name a "
                "tritonserver with --tritonserver"
            )
        if characters := unusable_characters(self.own):
            raise InstallError(
                f"tritonserver 24.10 cannot start models if it is installed in {self.own}, because of the characters {characters}. "
                "Name a folder without them in XDG_CACHE_HOME or with --dir, or move the clone of rsrv"
            )
        steps = self._steps()
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for number, step in enumerate(steps, start=1):
                if self._stamp(step) == step.key:
                    continue
                say(f"[{number}/{len(steps)}] {step.title} ...")
                started = time.monotonic()
                step.build()
                self._write_stamp(step)
                say(f"[{number}/{len(steps)}] {step.title}: done in {time.monotonic() - started:.0f} s")

    def _steps(self) -> list[_Step]:
        python = f"Python {sys.version.split()[0]} in {sys.base_prefix}"
        own, shared = self.own, self.folder
        title = "environment of Triton's stub processes (30 MB)"
        return [
            _Step("stub", own, f"{python}, {STUB}, {PACKAGE}", title, self._stub),
            _Step("server", shared, SERVER, "tritonserver 24.10 (55 MB)", self._server),
            _Step(
                "backend",
                own,
                f"{SERVER}, {python}",
                f"Python backend for Python {PYTHON_TAG}",
                self._backend,
            ),
            _Step(
                "launcher", own, f"{python}, {PACKAGE}, {sys.prefix}", "command tritonserver", self._launcher
            ),
            _Step("perf", shared, f"{PERF_ANALYZER}, {SERVER}", "perf_analyzer (13 MB)", self._perf),
        ]

    def _stamp(self, step: _Step) -> str | None:
        """Return the key that a step had when it was last done, or None if it was not done."""
        try:
            key = json.loads((step.folder / "stamp.json").read_text()).get(step.name)
        except (OSError, ValueError, AttributeError):
            return None
        return key if isinstance(key, str) else None

    def _write_stamp(self, done: _Step) -> None:
        keys = {step.name: self._stamp(step) for step in self._steps() if step.folder == done.folder}
        done.folder.mkdir(parents=True, exist_ok=True)
        aside = done.folder / "stamp.json.new"
        aside.write_text(json.dumps({**keys, done.name: done.key}, indent=2) + "\n")
        aside.replace(done.folder / "stamp.json")

    def _stub(self) -> None:
        make_stub_environment(self.stub_bin.parent, STUB)

    def _server(self) -> None:
        folder = _emptied(self.site)
        _pip(self.stub_bin, "install", "--no-compile", f"--target={folder}", requirements=SERVER)

    def _backend(self) -> None:
        source = self.site / "pytriton" / "tritonserver"
        name = "triton_python_backend_stub"
        folder = _emptied(self.backends)
        shutil.copytree(source / "backends" / "python", folder / "python")
        stub = folder / "python" / name
        shutil.copy2(source / "python_backend_stubs" / PYTHON_TAG / name, stub)
        stub.chmod(0o755)
        # Link only this library, because a whole lib folder on LD_LIBRARY_PATH would shadow the system's libraries.
        lib = _emptied(self.python_lib)
        library = str(sysconfig.get_config_var("INSTSONAME") or f"libpython{PYTHON_TAG}.so.1.0")
        folders = [str(sysconfig.get_config_var("LIBDIR")), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
        if own := next((path for folder in folders if (path := Path(folder, library)).is_file()), None):
            (lib / library).symlink_to(own.absolute())
        # Try the stub without arguments. It reports that they are missing, unless the loader cannot start it (status 127).
        trial = _run([str(stub)], {"LD_LIBRARY_PATH": self.library_path})
        if trial.returncode == 127:
            raise InstallError(
                f"Triton's stub for Python {PYTHON_TAG} cannot start: {trial.stderr.strip()}\n"
                "This Python was built without a shared library. Use one that has it "
                f"(Debian and Ubuntu: apt-get install libpython{PYTHON_TAG}), or name the library's folder in LD_LIBRARY_PATH."
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
            options = ("--platform=manylinux1_x86_64", f"--dest={download}")
            _pip(self.stub_bin, "download", *options, requirements=PERF_ANALYZER)
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
        # perf_analyzer ends with the status of an error even for -h. It works if it prints its usage.
        trial = _run([str(launcher), "-h"])
        if "concurrency-range" not in trial.stdout + trial.stderr:
            raise InstallError(f"perf_analyzer does not run: {(trial.stderr or trial.stdout).strip()[-500:]}")


@dataclass(frozen=True)
class _Step:
    """One part of the installation."""

    name: str
    #: Folder of the stamp, the file that records which steps were done.
    folder: Path
    #: Text with everything that the result of the step depends on. The stamp stores it.
    key: str
    title: str
    build: Callable[[], None]


def make_stub_environment(folder: Path, requirements: str) -> None:
    """Make a Python environment for stubs in `folder`, with these pip requirements and this installation of rsrv.

    Raises:
        InstallError: Making the environment failed, or pip failed.
    """
    _must_run([sys.executable, "-m", "venv", str(_emptied(folder))])
    # Do not install dependencies: tokenizers requires huggingface-hub, which is needed only for downloads.
    _pip(folder / "bin", "install", requirements=requirements)
    # Link only rsrv, whose part for stubs is pure Python. So stubs cannot import other packages of the environment that runs
    # this code.
    (folder / "lib" / f"python{PYTHON_TAG}" / "site-packages" / "rsrv").symlink_to(PACKAGE)


def _pip(bin_folder: Path, verb: str, *options: str, requirements: str) -> None:
    """Run the pip of an environment, so that the Python that runs this code needs no pip."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(requirements)
        file.flush()
        # On a terminal, do not hide pip's output, which has a bar for downloads.
        common = ["--disable-pip-version-check", "--no-input", "--no-deps", "--only-binary=:all:"]
        quiet = [] if sys.stdout.isatty() else ["--quiet"]
        command = [str(bin_folder / "python3"), "-m", "pip", verb, *quiet, *common, *options, "-r", file.name]
        if quiet:
            _must_run(command)
        elif subprocess.run(command, check=False).returncode != 0:
            raise InstallError(f"pip failed, see above: {' '.join(command)}")


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
