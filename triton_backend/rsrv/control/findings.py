"""The parts of a diagnosis: a finding, the case that rules judge, and the words that they share."""

from dataclasses import dataclass
from typing import Literal

from rsrv.control.figures import DeviceWindow, ModelActivity, ServerFigures

Severity = Literal["note", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "note")

#: Requests, and executions, below which a share says nothing.
FEW = 20
#: Models that a finding names.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class ServerFinding:
    """Something that an operator can improve."""

    #: In snake_case, the label of `rsrv_findings`.
    name: str
    severity: Severity
    #: What is the case, in numbers; why; and what to do, with what that costs.
    evidence: str
    cause: str
    cure: str


@dataclass(frozen=True, slots=True)
class Case:
    """The figures of a look, and the window that ends with it."""

    before: ServerFigures
    now: ServerFigures
    windows: list[DeviceWindow]

    def weight_bytes(self, one: ModelActivity) -> int:
        """Return the bytes that a model's weights take on a device."""
        facts = self.now.facts.get(one.name)
        return one.weight_bytes if facts is None else facts.device_bytes


def named(names: list[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
