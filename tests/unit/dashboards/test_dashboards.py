"""Grafana's dashboards: their queries ask for metrics and labels that rsrv serves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.dashboards.promql import labels
from tests.unit.deploy.manifests import ROOT

FILES = sorted((ROOT / "deploy" / "helm" / "rsrv" / "files" / "dashboards").glob("*.json"))
BOARDS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}
#: Values that Grafana puts in place of its variables.
STANDS_FOR = {"$__rate_interval": "5m", "$quantile": "0.99"}


def targets() -> Iterator[Any]:
    """Return all queries of all dashboards, with the names of dashboard and panel."""
    for name, board in BOARDS.items():
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield pytest.param(board, target, id=f"{name}: {panel['title']}: {target['legendFormat']}")


def variables(board: Any) -> dict[str, Any]:
    return {each["name"]: each for each in board["templating"]["list"]}


@pytest.mark.parametrize(("board", "target"), list(targets()))
def test_a_query_asks_for_what_is_there(board: Any, target: Any) -> None:
    """All metrics, labels and variables of a query exist. Its legend uses only labels of the result."""
    query = target["expr"]
    for variable, value in STANDS_FOR.items():
        query = query.replace(variable, value)
    names = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    assert names <= labels(query)
    assert set(re.findall(r"\$(\w+)", query)) <= variables(board).keys()


@pytest.mark.parametrize("board", list(BOARDS.values()), ids=list(BOARDS))
def test_choices_ask_for_what_is_there(board: Any) -> None:
    """The values of a variable are those of an existing label. At first, all servers are chosen."""
    for variable in variables(board).values():
        if variable["type"] == "query":
            query = variable["query"]
            selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()  # type: ignore[union-attr]
            assert label in labels(selector)
        if variable["name"] in ("instance", "worker"):
            # Only a gateway adds the label `worker`.
            assert re.fullmatch(variable["allValue"], "")
            assert variable["current"] == {"text": ["All"], "value": ["$__all"]}
