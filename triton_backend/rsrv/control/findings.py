"""The data of a diagnosis: a finding, and the case that rules judge."""

from dataclasses import dataclass
from typing import Literal

from rsrv.control.figures import DeviceWindow, ServerFigures

Severity = Literal["note", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "note")

#: Rules ignore shares of fewer requests or executions than this, because such shares are not significant.
FEW = 20


@dataclass(frozen=True, slots=True)
class ServerFinding:
    """Something that an operator can improve."""

    #: Name in snake_case. It is a label of the metric `rsrv_findings`.
    name: str
    severity: Severity
    #: The facts in numbers.
    evidence: str
    #: Cause of the finding.
    cause: str
    #: What to do, and what that costs.
    cure: str


@dataclass(frozen=True, slots=True)
class Case:
    """Two snapshots of the server's figures, and the windows of the devices between them."""

    before: ServerFigures
    now: ServerFigures
    windows: list[DeviceWindow]
