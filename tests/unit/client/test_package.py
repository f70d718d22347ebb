"""The client in an installation with nothing but its extra."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]

#: A script that hides the modules named in its argument, and imports all modules of the client.
_SCRIPT = """
import sys
hidden = set(sys.argv[1].split(","))

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"{name} is not of the extra", name=name)

sys.meta_path.insert(0, Hidden())
import importlib, pkgutil, rsrv.client
for module in pkgutil.walk_packages(rsrv.client.__path__, "rsrv.client."):
    importlib.import_module(module.name)
from rsrv.client import Client
for url in ("localhost:1", "http://localhost:1"):
    Client(url).close()
"""


def brought(requirement: Requirement, seen: set[tuple[str, str]]) -> set[str]:
    """Return the names of the distributions that a requirement installs, including their own requirements.

    `seen` has the distributions and extras that were already followed.
    """
    names: set[str] = {canonicalize_name(requirement.name)}
    for extra in ("", *requirement.extras):
        if (requirement.name, extra) in seen:
            continue
        seen.add((requirement.name, extra))
        for text in requires(requirement.name) or ():
            further = Requirement(text)
            if further.marker is None or further.marker.evaluate({"extra": extra}):
                names |= brought(further, seen)
    return names


def test_the_client_needs_only_its_extra() -> None:
    """Every module of the client can be imported without the packages that the extra does not install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = [*project["dependencies"], *project["optional-dependencies"]["client"]]
    seen: set[tuple[str, str]] = set()
    allowed = {"rsrv", *chain.from_iterable(brought(Requirement(text), seen) for text in extra)}
    hidden = [
        module
        for module, distributions in packages_distributions().items()
        if not allowed & set(map(canonicalize_name, distributions))
    ]
    assert {"jax", "rich", "yaml", "pandas"} <= set(hidden)
    subprocess.run([sys.executable, "-c", _SCRIPT, ",".join(hidden)], check=True)
