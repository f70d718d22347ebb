"""Builds the distributions and runs tests on what is in the wheel, with the source folders out of reach.

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
#: what the tests need beside the package
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
#: of the pages with commands only this one, whose reader starts with nothing
PAGE = "index.md"


def main() -> int:
    """Returns the exit status. The command line may name other tests, as pytest takes them."""
    with tempfile.TemporaryDirectory(prefix="wheel-") as made:
        folder = Path(made)
        site = _environment(folder / "venv", _build(folder / "dist"))
        if missing := _missing(site):
            print(f"try_wheel: not in the wheel: {', '.join(missing)}", file=sys.stderr)
            return 1
        for command in sorted((folder / "venv" / "bin").glob("rsrv*")):
            print(f"{command.name} --help: {_help(command):.2f} s in an empty environment", flush=True)
        # A path file in a folder that such a file names is not read, and so not the one of an editable rsrv.
        (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        tree = _tree(folder / "tree", site)
        python = str(folder / "venv" / "bin" / "python")
        # The makers of the examples, which are in no wheel.
        env = {**os.environ, "PYTHONPATH": str(tree / "bundles")}
        _run([python, "tools/local_triton.py", "install"], cwd=tree, env=env)
        tests = sys.argv[1:] or [*TESTS, "-k", f"not test_docs or {PAGE}"]
        done = subprocess.run([python, "-m", "pytest", "-q", *tests], cwd=tree, env=env, check=False)
        return done.returncode


def _build(folder: Path) -> Path:
    """The wheel. It is built from the sdist, so both are whole."""
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)])
    (wheel,) = folder.glob("*.whl")
    return wheel


def _environment(folder: Path, wheel: Path) -> Path:
    """An environment with the wheel and nothing else; returns where its packages are."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    _run([*pip, "install", "--no-deps", "--no-index", str(wheel)])
    (site,) = (folder / "lib").glob("python*/site-packages")
    return site


def _missing(site: Path) -> list[str]:
    """What is in a source folder and is no package data of the wheel's."""
    found = []
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*")):
            name = file.relative_to(ROOT / folder).parent.name
            inside = Path(folder).name / file.relative_to(ROOT / folder)
            if file.is_file() and name != "__pycache__" and not (site / inside).is_file():
                found.append(str(inside))
    return found


def _help(command: Path) -> float:
    """Seconds that it takes. Raises CalledProcessError when it does not end well."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    start = time.perf_counter()
    subprocess.run([str(command), "--help"], check=True, stdout=subprocess.DEVNULL, env=clean)
    return time.perf_counter() - start


def _tree(folder: Path, site: Path) -> Path:
    """The tests where no source is, with what `make` has fetched and built."""
    for name in NEEDED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    (folder / "build").symlink_to(ROOT / "build")
    # All of tritonserver but the stubs' environment and the command, which know where they are.
    (folder / ".triton").mkdir()
    shutil.copy2(ROOT / ".triton" / "stamp.json", folder / ".triton")
    for name in ("backends", "lib", "perf", "site"):
        (folder / ".triton" / name).symlink_to(ROOT / ".triton" / name)
    # The tools look for parts of the package where the sources have them, and so do stubs.
    for name in ("bundles/rsrv_bundle", "triton_backend/rsrv"):
        link = folder / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(site / link.name)
    return folder


def _run(command: list[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd, env=env)


if __name__ == "__main__":
    sys.exit(main())
