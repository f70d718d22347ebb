"""The alerts: each can fire, and each says what to do."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rsrv.control import model_findings, server_findings
from rsrv.control.metric_catalog import FAMILIES
from tests.unit.dashboards.promql import labels
from tests.unit.deploy.manifests import CHART, ROOT, read, render

RULES: list[dict[str, Any]] = [
    rule
    for document in read((CHART / "files" / "rules" / "rsrv.yml").read_text(encoding="utf-8"))
    for group in document["groups"]
    for rule in group["rules"]
]
#: Alerts that watch the figures of a finding directly, by finding. An operator can change their thresholds.
OWN_ALERTS = {
    "bundle_refused": "RsrvReloadFailed",
    "deadlines_arrival": "RsrvDeadlinesMissed",
    "deadlines_execute": "RsrvDeadlinesMissed",
    "deadlines_gate": "RsrvDeadlinesMissed",
    "deadlines_load": "RsrvDeadlinesMissed",
    "deadlines_queue": "RsrvDeadlinesMissed",
    "no_memory": "RsrvRefusing",
    "not_resident": "RsrvRefusing",
    "queue_full": "RsrvRefusing",
    "requests_fail": "RsrvFailing",
    "runtime_down": "RsrvServerDown",
    "runtime_restarts": "RsrvRuntimeRestarts",
}
#: Findings that follow from an operator's own command.
WITHOUT_ALERT = {"paused"}
each_rule = pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])


@each_rule
def test_an_alert_asks_for_what_is_there(rule: dict[str, Any]) -> None:
    """The metrics and labels of an alert exist, and its text uses only labels of its result."""
    names = {name for text in rule["annotations"].values() for name in re.findall(r"\$labels\.(\w+)", text)}
    assert names <= labels(rule["expr"])


@each_rule
def test_an_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    """An alert has a waiting time, a severity, a sentence, advice, and an existing section of the docs."""
    assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"[1-9]\d*m", rule["for"])
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    says = rule["annotations"]
    assert says.keys() - {"value"} == {"summary", "description", "runbook"}
    assert says["description"].endswith(".")
    page, _, section = says["runbook"].partition("#")
    text = (ROOT / page).read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert not section or section in [re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles]


def test_names_are_the_servers_and_each_ones_own() -> None:
    """Names of alerts are unique and begin with Rsrv."""
    names = [rule["alert"] for rule in RULES]
    assert len({*names}) == len(names)
    assert all(name.startswith("Rsrv") for name in names)


def test_each_urgent_finding_has_an_alert() -> None:
    """Each finding that can be a warning or critical has its own alert or is in RsrvFinding. Other findings have no alert."""
    catalogue = next(family.help for family in FAMILIES if family.name == "rsrv_findings")
    known = {*re.findall(r"\w+", catalogue.partition("and name:")[2])}
    urgent = known - only_notes()
    (rule,) = (rule for rule in RULES if rule["alert"] == "RsrvFinding")
    named = re.search(r'name=~"([\w|]+)"', rule["expr"])
    assert named is not None
    assert sorted([*named[1].split("|"), *OWN_ALERTS, *WITHOUT_ALERT]) == sorted(urgent)
    assert {*OWN_ALERTS.values()} <= {rule["alert"] for rule in RULES}


def only_notes() -> set[str]:
    """Return the names of findings that no rule calls a warning or critical."""
    severities: dict[str, set[str]] = {}
    for name, levels in _raised():
        severities.setdefault(name, set()).update(levels)
    return {name for name, all_levels in severities.items() if all_levels == {"note"}}


def _raised() -> Iterator[tuple[str, set[str]]]:
    """Yield the name and the severities of each finding that the source code creates with a constant name."""
    for module in (model_findings, server_findings):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            match node:
                case ast.Call(func=ast.Name("ServerFinding"), args=[ast.Constant(str(name)), severity, *_]):
                    strings = (part.value for part in ast.walk(severity) if isinstance(part, ast.Constant))
                    yield name, {text for text in strings if isinstance(text, str)}


def test_promtool_is_told_when_each_fires() -> None:
    """alerts.yml, the input of `promtool test rules`, has a test for every alert."""
    text = Path(__file__).with_name("alerts.yml").read_text(encoding="utf-8")
    assert {*re.findall(r'alertname="(\w+)"', text)} == {rule["alert"] for rule in RULES}


@pytest.mark.parametrize("kind", ["keda", "hpa"])
def test_what_pods_are_scaled_by_is_there(kind: str) -> None:
    """The metrics in the queries of KEDA and prometheus-adapter exist."""
    if kind == "keda":
        (scaler,) = [m for m in render({"autoscaling": {"kind": kind}}) if m["kind"] == "ScaledObject"]
        queries = [trigger["metadata"]["query"] for trigger in scaler["spec"]["triggers"]]
    else:
        (values,) = read((ROOT / "deploy" / "prometheus-adapter.yaml").read_text())
        (rule,) = values["rules"]["external"]
        queries = [rule["seriesQuery"], rule["metricsQuery"].replace("<<.LabelMatchers>>", 'namespace="n"')]
    assert queries
    for query in queries:
        labels(query)
