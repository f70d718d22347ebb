"""The lock file from which make installs."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
#: Extras for a GPU. They are not installed for development.
NOT_LOCKED = {"cuda12", "cuda13"}


def wanted(project: dict[str, Any]) -> Iterator[Requirement]:
    """Yield the requirements of extras and dependency groups, except those of rsrv itself."""
    extras = project["project"]["optional-dependencies"]
    for name, texts in (extras | project["dependency-groups"]).items():
        if name not in NOT_LOCKED:
            yield from (Requirement(text) for text in texts if not text.startswith("rsrv["))


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_lock_has_one_fitting_version_of_each_requirement(python: str) -> None:
    """The lock has one fitting version of each requirement.

    After a change of requirements in pyproject.toml, run `make lock`.
    """
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = [Requirement(line) for line in lines if not line.lstrip().startswith("#")]
    here = {"python_version": python, "python_full_version": f"{python}.9"}
    for requirement in wanted(tomllib.loads((ROOT / "pyproject.toml").read_text())):
        (pinned,) = [
            candidate
            for candidate in locked
            if canonicalize_name(candidate.name) == canonicalize_name(requirement.name)
            and (candidate.marker is None or candidate.marker.evaluate(here))
        ]
        (pin,) = pinned.specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version, prereleases=True), requirement
