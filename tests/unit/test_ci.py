"""Files for other services: GitHub's workflow, the hooks of pre-commit, and the package's description."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import jsonschema
from check_jsonschema.builtin_schemas import get_builtin_schema

from rsrv_bundle import yaml12

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> Any:
    return yaml12.parse((ROOT / name).read_text())


def test_the_workflow_fits_its_schema_and_runs_each_supported_python() -> None:
    """The workflow is valid for GitHub's schema, and runs the tests with each Python version that the package supports."""
    workflow = read(".github/workflows/ci.yaml")
    jsonschema.validate(workflow, get_builtin_schema("vendor.github-workflows"))
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    promised = [
        classifier.rpartition(" ")[2] for classifier in classifiers if re.search(r":: 3\.\d+$", classifier)
    ]
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == promised


def test_a_commit_is_checked_by_the_tools_of_make_lint() -> None:
    """The hooks of pre-commit call the same tools in .venv as `make lint`, so they have the versions of the lock file."""
    (local,) = read(".pre-commit-config.yaml")["repos"]
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2]
    for hook in local["hooks"]:
        assert hook["entry"].startswith(f".venv/bin/{hook['name']}")
        assert f"$(BIN)/{hook['name']}" in recipe


def test_the_description_of_the_package_links_to_nothing_beside_it() -> None:
    """README.md has no relative links, because a package index shows it without the repository's other files."""
    text = distribution("rsrv").metadata["Description"]
    assert "# rsrv" in text
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("http")] == []
