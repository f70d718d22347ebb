"""Grafana's dashboards: they equal what the code makes, and their queries use existing metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

import dashboards as tool
from panels import MIRRORED
from tests.unit.dashboards.promql import labels, mirrored, served
from tests.unit.deploy.manifests import ROOT, read

BOARDS = {name: json.loads(text) for name, text in tool.boards().items()}
#: Values that Grafana puts in place of its variables.
STANDS_FOR = {"$__rate_interval": "5m", "$quantile": "0.99"}


def panels(board: Any) -> list[Any]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def targets() -> Iterator[Any]:
    """Return all queries of all dashboards, with the names of dashboard and panel."""
    for name, board in BOARDS.items():
        for panel in panels(board):
            for target in panel["targets"]:
                yield pytest.param(board, target, id=f"{name}: {panel['title']}: {target['legendFormat']}")


def variables(board: Any) -> dict[str, Any]:
    return {each["name"]: each for each in board["templating"]["list"]}


def test_what_triton_shows_as_well_is_known() -> None:
    """Exactly the metrics that a stub mirrors on Triton's page, with a version, are known as mirrored."""
    assert mirrored().keys() == MIRRORED
    assert all("version" in there for there in mirrored().values())
    assert mirrored().keys() <= served().keys()


def test_the_files_are_what_the_code_makes() -> None:
    """The dashboards on disk equal those that `make pages` writes, and there are no others."""
    there = {path.name: path.read_text(encoding="utf-8") for path in tool.BOARDS.iterdir()}
    assert there == tool.boards()


@pytest.mark.parametrize(("board", "target"), list(targets()))
def test_a_query_asks_for_what_is_there(board: Any, target: Any) -> None:
    """The metrics and labels of a query, its legend's labels and its variables exist."""
    query = target["expr"]
    for variable, value in STANDS_FOR.items():
        query = query.replace(variable, value)
    shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    assert shown <= labels(query)
    assert set(re.findall(r"\$(\w+)", query)) <= variables(board).keys()


@pytest.mark.parametrize("board", list(BOARDS.values()), ids=list(BOARDS))
def test_a_panel_says_what_it_is_about(board: Any) -> None:
    """Each panel has a unique title, a place, a unit, a description and the chosen data source."""
    shown = panels(board)
    assert len({panel["title"] for panel in shown}) == len(shown)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in shown}) == len(shown)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in shown:
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["description"].endswith(".")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        names = [target["refId"] for target in panel["targets"]]
        assert len({*names}) == len(names)


@pytest.mark.parametrize("board", list(BOARDS.values()), ids=list(BOARDS))
def test_one_server_alone_is_found_too(board: Any) -> None:
    """An unset choice matches every server, also without the label `worker`, which only a gateway adds."""
    for name in ("instance", "worker"):
        variable = variables(board)[name]
        assert variable["includeAll"]
        assert variable["current"] == {"text": ["All"], "value": ["$__all"]}
        assert re.fullmatch(variable["allValue"], "")


@pytest.mark.parametrize("board", list(BOARDS.values()), ids=list(BOARDS))
def test_choices_ask_for_what_is_there(board: Any) -> None:
    """The values of a variable come from an existing label of the chosen source."""
    for variable in variables(board).values():
        if variable["type"] == "query":
            query = variable["query"]
            selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()  # type: ignore[union-attr]
            assert label in labels(selector)
            assert variable["datasource"]["uid"] == "${datasource}"


def test_composes_prometheus_is_chosen_at_first() -> None:
    """Each dashboard starts with Compose's data source, and any other can be chosen."""
    (sources,) = read((ROOT / "docker/grafana/provisioning/datasources/prometheus.yaml").read_text())
    (source,) = sources["datasources"]
    for board in BOARDS.values():
        variable = variables(board)["datasource"]
        assert (variable["type"], variable["query"]) == ("datasource", source["type"])
        assert variable["current"] == {"text": source["name"], "value": source["uid"]}


def test_a_model_leads_to_its_dashboard() -> None:
    """The legend of a model links to the model's dashboard by existing variables."""
    (board,) = [board for board in BOARDS.values() if "model" in variables(board)]
    links = [
        link["url"]
        for each in BOARDS.values()
        for panel in panels(each)
        for link in panel["fieldConfig"]["defaults"].get("links", [])
    ]
    assert links
    assert set(links) == {
        f"/d/{board['uid']}?var-model=${{__field.labels.model}}&${{__url_time_range}}",
    }
