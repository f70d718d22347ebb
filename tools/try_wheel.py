"""Build the distributions and run tests on the wheel's files, with the source folders out of reach.

    python tools/try_wheel.py         # `make test-wheel`

First the commands answer `--help` in an environment that has the wheel and nothing else. Then this environment sees the
packages of the one that runs this, all but rsrv, and tests run in a copy of their folder that lies elsewhere: some of
those that need no server, and one with a server whose stubs and runtime come from the wheel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: packages that the tests need beside rsrv
NEEDED = ("tests", "tools", "docs", "bundles/examples", "README.md", "CONTRIBUTING.md", "pyproject.toml")
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
#: the only page whose commands are run: its reader starts with nothing installed
PAGE = "index.md"


def main() -> int:
    """Run the tests, or others that the command line names for pytest. Returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="wheel-") as made:
        folder = Path(made)
        site = _environment(folder / "venv", _build(folder / "dist"))
        if missing := _missing(site):
            print(f"try_wheel: not in the wheel: {', '.join(missing)}", file=sys.stderr)
            return 1
        for command in sorted((folder / "venv" / "bin").glob("rsrv*")):
            print(f"{command.name} --help: {_help(command):.2f} s in an empty environment", flush=True)
        # Python reads no path file in a folder that a path file names, so the editable rsrv's has no effect.
        (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        tree = _tree(folder / "tree", site)
        python = str(folder / "venv" / "bin" / "python")
        # The scripts of the examples, which are in no wheel.
        env = {**os.environ, "PYTHONPATH": str(tree / "bundles")}
        _run([python, "tools/local_triton.py"], cwd=tree, env=env)
        tests = sys.argv[1:] or [*TESTS, "-k", f"not test_docs or {PAGE}"]
        done = subprocess.run([python, "-m", "pytest", "-q", *tests], cwd=tree, env=env, check=False)
        return done.returncode


def _build(folder: Path) -> Path:
    """Build the wheel from the sdist, which shows that both are complete."""
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)])
    (wheel,) = folder.glob("*.whl")
    return wheel


def _environment(folder: Path, wheel: Path) -> Path:
    """Make an environment with the wheel alone; return the folder of its packages."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    _run([*pip, "install", "--no-deps", "--no-index", str(wheel)])
    (site,) = (folder / "lib").glob("python*/site-packages")
    return site


def _missing(site: Path) -> list[str]:
    """Return the files of a source folder that the wheel lacks."""
    found = []
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*")):
            name = file.relative_to(ROOT / folder).parent.name
            inside = Path(folder).name / file.relative_to(ROOT / folder)
            if file.is_file() and name != "__pycache__" and not (site / inside).is_file():
                found.append(str(inside))
    return found


def _help(command: Path) -> float:
    """Run a command; return its seconds. Raises CalledProcessError if it fails."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    start = time.perf_counter()
    subprocess.run([str(command), "--help"], check=True, stdout=subprocess.DEVNULL, env=clean)
    return time.perf_counter() - start


def _tree(folder: Path, site: Path) -> Path:
    """Lay out the tests without sources, with the files that `make` has fetched and built."""
    for name in NEEDED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    (folder / "build").symlink_to(ROOT / "build")
    # All of tritonserver except the stubs' environment and the command, which have absolute paths inside.
    (folder / ".triton").mkdir()
    shutil.copy2(ROOT / ".triton" / "stamp.json", folder / ".triton")
    for name in ("backends", "lib", "perf", "site"):
        (folder / ".triton" / name).symlink_to(ROOT / ".triton" / name)
    # Tools and stubs look for parts of the package in the folders of the sources.
    for name in ("bundles/rsrv_bundle", "triton_backend/rsrv"):
        link = folder / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(site / link.name)
    return folder


def _run(command: list[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd, env=env)


if __name__ == "__main__":
    sys.exit(main())
