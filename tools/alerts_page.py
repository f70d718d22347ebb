"""Make the table of docs/monitoring.md: every alert of deploy/helm/rsrv/files/rules/rsrv.yml.

    python tools/alerts_page.py     # rewrites it in the page

A test compares the page with the rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from rsrv_bundle import yaml12
from scheduler_page import DOCS, rewrite, table

#: File with the rules. It is inside the chart, because Helm reads no other files. docker/compose.yaml mounts it from there.
RULES = DOCS.parent / "deploy" / "helm" / "rsrv" / "files" / "rules" / "rsrv.yml"
PAGE = DOCS / "monitoring.md"


def rules() -> list[dict[str, Any]]:
    """Return all alerts, in order."""
    groups = yaml12.parse(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> str:
    """Return the table, with critical alerts in bold and labels of an alert in italics."""
    return table(_rows())


def _rows() -> Iterator[Sequence[str]]:
    yield ("alert", "when", "for")
    for rule in rules():
        says = rule["annotations"]
        name = f"**{rule['alert']}**" if rule["labels"]["severity"] == "critical" else rule["alert"]
        when = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"*\1*", says["summary"])
        yield (name, when, rule["for"])


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8"), {"alerts": alerts()}), encoding="utf-8")


if __name__ == "__main__":
    main()
