"""The alerts: each can fire, says what to do, and is documented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import alerts_page as tool
from scheduler_page import rewrite
from tests.unit.dashboards.promql import labels
from tests.unit.deploy.manifests import ROOT, read, render

RULES = tool.rules()
each_rule = pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])


@each_rule
def test_an_alert_asks_for_what_is_there(rule: dict[str, Any]) -> None:
    """The metrics and labels of an alert exist, and its text uses labels of its result."""
    shown = {name for text in rule["annotations"].values() for name in re.findall(r"\$labels\.(\w+)", text)}
    assert shown <= labels(rule["expr"])


@each_rule
def test_an_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    """An alert waits, has a severity, and has a sentence, advice and an existing section of the docs."""
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


def test_promtool_is_told_when_each_fires() -> None:
    """alerts.yml, the input of `promtool test rules`, has every alert."""
    text = Path(__file__).with_name("alerts.yml").read_text(encoding="utf-8")
    assert {*re.findall(r'alertname="(\w+)"', text)} == {rule["alert"] for rule in RULES}


def test_the_page_has_every_alert() -> None:
    """The page's table has every alert; `make pages` writes it."""
    text = tool.PAGE.read_text(encoding="utf-8")
    assert rewrite(text, {"alerts": tool.alerts()}) == text


@pytest.mark.parametrize("kind", ["keda", "hpa"])
def test_what_pods_are_scaled_by_is_there(kind: str) -> None:
    """The metrics in KEDA's queries and those of prometheus-adapter exist."""
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
