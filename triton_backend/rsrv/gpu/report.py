"""Findings of the first hour, what they are measured with, and the table of them. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rsrv.text import one_line

Verdict = Literal["PASS", "FAIL", "MEASURED", "SKIPPED"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table: PASS and FAIL have a criterion, which `reason` names; MEASURED has none."""

    what: str
    verdict: Verdict
    value: str = ""
    reason: str = ""
    #: numbers behind `value`: seconds, bytes, and rates of these
    figures: Mapping[str, float] = field(default_factory=dict)


#: adds a finding; what was found before a failure stays
Tell = Callable[[Finding], None]


def check(
    what: str, passed: bool, value: str, reason: str, figures: Mapping[str, float] | None = None
) -> Finding:
    """Return a finding that passed or failed."""
    return Finding(what, "PASS" if passed else "FAIL", value, reason, figures or {})


@dataclass(frozen=True, slots=True)
class Amounts:
    """Sizes in bytes, times in seconds."""

    transfer: int = 1_000_000_000
    rounds: int = 5
    #: rows and columns of the matrices of a long execution
    side: int = 8192
    latency: Sequence[int] = (10_000_000, 100_000_000, 1_000_000_000, 5_000_000_000)
    eviction_models: int = 20
    eviction_each: int = 250_000_000
    eviction_s: float = 20.0
    clients: int = 8
    many: int = 200
    many_each: int = 1_000_000
    #: before and after each interruption
    pause_s: float = 8.0
    comparison_s: float = 10.0


#: to see that each part works: the figures mean nothing
QUICK = Amounts(
    transfer=8 << 20,
    rounds=2,
    side=256,
    latency=(1 << 20,),
    eviction_models=4,
    eviction_each=1 << 20,
    eviction_s=0.5,
    clients=2,
    many=4,
    many_each=1 << 16,
    pause_s=4.0,
    comparison_s=0.5,
)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The device as jax and rsrv see it."""

    name: str
    platform: str
    tf32: bool
    #: bytes that jax's allocator may take; None: unknown, as on a CPU
    memory: int | None
    #: versions of jax and its plugins
    versions: str


@dataclass(frozen=True, slots=True)
class PartInput:
    """Device, amounts and folder that a part works with."""

    device: DeviceFacts
    amounts: Amounts
    bundles: Sequence[Path]
    #: for the files of this part alone
    folder: Path
    #: environment of the command, for the runtimes and servers that a part starts
    environment: Mapping[str, str]

    @property
    def on_cpu(self) -> bool:
        return self.device.platform == "cpu"


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A function `(given, tell)` of a module of this package."""

    module: str
    function: str
    #: seconds after which it is killed
    limit_s: float
    #: it uses the device in its own process; otherwise it starts runtimes that do
    on_device: bool = False


#: under an hour in all
PARTS: Mapping[str, PlannedPart] = {
    "correctness": PlannedPart("answers", "correctness", 600),
    "numerics": PlannedPart("answers", "numerics", 240),
    "bandwidth": PlannedPart("transfers", "bandwidth", 180, on_device=True),
    "overlap": PlannedPart("transfers", "overlap", 180, on_device=True),
    "budget": PlannedPart("memory", "budget", 180, on_device=True),
    "out-of-memory": PlannedPart("memory", "out_of_memory", 240, on_device=True),
    "latency": PlannedPart("serving", "latency", 420),
    "eviction": PlannedPart("serving", "eviction", 300),
    "many": PlannedPart("serving", "many", 420),
    "interruptions": PlannedPart("interruptions", "interruptions", 240),
    "comparison": PlannedPart("comparison", "comparison", 420),
}


def table_line(part: str, finding: Finding) -> str:
    """Return a finding as a line of the table."""
    columns = (f"{part:<13}", f"{finding.verdict:<8}", f"{finding.what:<44}", f"{finding.value:<44}")
    return f"{'  '.join(columns)}  {one_line(finding.reason)}".rstrip()


def document(
    device: DeviceFacts, findings: Mapping[str, Sequence[Finding]], seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Return everything as JSON; `seconds`: of each part."""
    return {
        "device": asdict(device),
        "parts": {
            part: {"seconds": seconds[part], "findings": [asdict(one) for one in found]}
            for part, found in findings.items()
        },
    }
