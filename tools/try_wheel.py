"""Build the distributions and run tests on the wheel's files, with the source folders out of reach.

    python tools/try_wheel.py                           # `make test-wheel`
    python tools/try_wheel.py --python python3.13       # `make test-wheel PYTHONS=python3.13`

The script installs only the wheel into an empty environment, and runs each command with `--help`. Then it adds all packages of its
own environment except rsrv, and runs tests in a copy of the folder `tests` elsewhere: some tests that need no server, and one with
a server whose stubs and runtime come from the wheel.

With --python, the script uses the wheel as a user does, without the lock, for each interpreter: `pip install WHEEL[serve,export]`
into an empty environment, `rsrv triton install`, the export of a JAX function, `rsrv-gen`, `rsrv serve`, and one request over HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import urllib.request
from pathlib import Path

from local_triton import EXEC_BOUND, LOOPBACK, free_ports

ROOT = Path(__file__).resolve().parent.parent
#: Files and folders that the tests need in addition to the wheel.
NEEDED = (
    "tests", "tools", "docs", "bundles/examples", "README.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml", "hatch_build.py",
)  # fmt: skip
SOURCES: tuple[str, ...] = tuple(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
        "packages"
    ]
)
TESTS = (
    "tests/unit/test_commands.py",
    "tests/unit/test_settings.py",
    "tests/unit/bundle/test_cli.py",
    "tests/unit/bundle/test_export.py",
    "tests/unit/bundle/test_reader.py",
    "tests/unit/control/test_cli.py",
    "tests/unit/placement/test_planner.py",
    "tests/unit/gen/test_cli.py",
    "tests/unit/serve/test_plan.py",
    "tests/unit/sim/test_cli.py",
    "tests/unit/stub/test_session.py",
    "tests/unit/wire",
    "tests/e2e/test_docs.py",
)
#: The only page whose commands are run, because its reader starts with nothing installed.
PAGE = "index.md"
#: Program with which a user exports a model.
EXPORT = """\
import numpy as np
from rsrv_bundle.export import export_bundle

example = {"x": np.ones((1, 2), np.float32)}
export_bundle(lambda w, x: {"y": x @ w["a"]}, {"a": np.eye(2, 3, dtype=np.float32)}, example, batch_sizes=[1, 4],
              out_dir="bundles/model")
"""
#: Answer of the exported model to [1, 2].
ANSWER = [1, 2, 0]
#: Last line of the start-up view of `rsrv serve`.
SERVES = "Stop with Ctrl-C"


def main() -> int:
    """Run tests on the wheel, or use it with the interpreters of --python. Return the exit status."""
    parser = argparse.ArgumentParser(
        description="Run tests on the wheel, or try it with other interpreters.",
        epilog="All other arguments are passed to pytest, in place of the tests that this script chooses.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--python", action="append", help="an interpreter to install the wheel with, and serve"
    )
    arguments, tests = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="wheel-") as made:
        folder = Path(made)
        wheel = _build(folder / "dist")
        if arguments.python:
            for number, python in enumerate(arguments.python):
                _try_as_a_user(python, wheel, folder / str(number), folder / "cache")
            return 0
        site = _environment(folder / "venv", wheel)
        if missing := _missing(site):
            print(f"try_wheel: not in the wheel: {', '.join(missing)}", file=sys.stderr)
            return 1
        for command in sorted((folder / "venv" / "bin").glob("rsrv*")):
            print(f"{command.name} --help: {_help(command):.2f} s in an empty environment", flush=True)
        # Add this environment's packages with a path file. Python ignores further path files in the added folder, so the path
        # file of an editable rsrv has no effect.
        (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        tree = _tree(folder / "tree", site)
        python = str(folder / "venv" / "bin" / "python")
        # The wheel does not contain the scripts of the examples.
        env = {**os.environ, "PYTHONPATH": str(tree / "bundles")}
        _run([python, "tools/local_triton.py"], cwd=tree, env=env)
        tests = tests or [*TESTS, "-k", f"not test_docs or {PAGE}"]
        done = subprocess.run([python, "-m", "pytest", "-q", *tests], cwd=tree, env=env, check=False)
        return done.returncode


def _try_as_a_user(python: str, wheel: Path, folder: Path, cache: Path) -> None:
    """Install, export, serve and send a request, and print the seconds of each step. Raises CalledProcessError, SystemExit."""
    folder.mkdir()
    scripts = folder / "venv" / "bin"
    pip_cache = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], check=True, capture_output=True)
    # tritonserver is installed into a separate cache. pip uses the cache of the user.
    env = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "XDG_CACHE_HOME": str(cache),
        "PIP_CACHE_DIR": pip_cache.stdout.decode().strip(),
    }
    (folder / "export.py").write_text(EXPORT)
    for title, command in {
        "an empty environment": [python, "-m", "venv", str(folder / "venv")],
        "pip install": [
            *(str(scripts / "pip"), "install", "--quiet", "--disable-pip-version-check"),
            f"{wheel}[serve,export]",
        ],
        "rsrv triton install": [str(scripts / "rsrv"), "triton", "install"],
        "export": [str(scripts / "python"), "export.py"],
        "rsrv-gen": [str(scripts / "rsrv-gen"), "bundles", "-o", "gen"],
    }.items():
        started = time.perf_counter()
        _run(command, cwd=folder, env=env)
        print(f"{python}: {title}: {time.perf_counter() - started:.1f} s", flush=True)
    started = time.perf_counter()
    _serve_and_ask(scripts, folder, env)
    versions = "import platform, jax, numpy; print(platform.python_version(), 'jax', jax.__version__, 'numpy', numpy.__version__)"
    _run([str(scripts / "python"), "-c", versions], cwd=folder)
    print(
        f"{python}: rsrv serve, to the answer and the end: {time.perf_counter() - started:.1f} s", flush=True
    )


def _serve_and_ask(scripts: Path, folder: Path, env: dict[str, str]) -> None:
    """Serve the model in `folder`, and send it one request over HTTP.

    Raises SystemExit if the model is not served, if its answer is wrong, or if the server fails at its end.
    """
    http, grpc, metrics, page = free_ports(4)
    flags = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}", "--devices=cpu"]
    with subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", str(EXEC_BOUND), str(os.getpid())),
            *(str(scripts / "rsrv"), "serve", "bundles", *flags),
        ],
        cwd=folder,
        env={**env, "RSRV_METRICS__LISTEN": f"{LOOPBACK}:{page}"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        serves = any(line.startswith(SERVES) for line in map(_shown, process.stdout))
        if serves:
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
            body = json.dumps({"inputs": [tensor]}).encode()
            url = f"http://{LOOPBACK}:{http}/v2/models/model/infer"
            with urllib.request.urlopen(url, body, timeout=60) as response:
                (output,) = json.load(response)["outputs"]
            print(f"   answer: {output['data']}", flush=True)
            process.send_signal(signal.SIGINT)
        process.communicate()
    if not serves or output["data"] != ANSWER or process.returncode:
        sys.exit(f"try_wheel: rsrv serve failed: status {process.returncode}; see above")


def _shown(line: str) -> str:
    print(f"   {line}", end="", flush=True)
    return line


def _build(folder: Path) -> Path:
    """Build the wheel from the sdist, which shows that both are complete."""
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)])
    (wheel,) = folder.glob("*.whl")
    return wheel


def _environment(folder: Path, wheel: Path) -> Path:
    """Make an environment with only the wheel. Return the folder of its packages."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    _run([*pip, "install", "--no-deps", "--no-index", str(wheel)])
    (site,) = (folder / "lib").glob("python*/site-packages")
    return site


def _missing(site: Path) -> list[str]:
    """Return the files of the source folders that the wheel lacks."""
    missing = []
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*")):
            name = file.relative_to(ROOT / folder).parent.name
            inside = Path(folder).name / file.relative_to(ROOT / folder)
            if file.is_file() and name != "__pycache__" and not (site / inside).is_file():
                missing.append(str(inside))
    return missing


def _help(command: Path) -> float:
    """Run a command with --help, and return its seconds. Raises CalledProcessError if it fails."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    start = time.perf_counter()
    subprocess.run([str(command), "--help"], check=True, stdout=subprocess.DEVNULL, env=clean)
    return time.perf_counter() - start


def _tree(folder: Path, site: Path) -> Path:
    """Copy the tests without the sources into `folder`, with links to the files that `make` has fetched and built."""
    for name in NEEDED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    (folder / "build").symlink_to(ROOT / "build")
    # Link all of tritonserver except the stubs' environment and the command, which contain absolute paths.
    (folder / ".triton").mkdir()
    shutil.copy2(ROOT / ".triton" / "stamp.json", folder / ".triton")
    for name in ("backends", "lib", "perf", "site"):
        (folder / ".triton" / name).symlink_to(ROOT / ".triton" / name)
    # Tools and stubs look for parts of the packages in the folders of the sources.
    for name in ("bundles/rsrv_bundle", "triton_backend/rsrv"):
        link = folder / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(site / link.name)
    return folder


def _run(command: list[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd, env=env)


if __name__ == "__main__":
    sys.exit(main())
