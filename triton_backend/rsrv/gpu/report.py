"""Findings of `rsrv gpu check`, the order and the time of its parts, and its table. Pure, except for `PartInput.left`."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rsrv.text import amount, duration, one_line

Verdict = Literal["PASS", "FAIL", "MEASURED", "NOT RUN"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table.

    `reason` has the criterion of a PASS, the criterion or the error of a FAIL, the obstacle of a NOT RUN, or a note about the
    value of a MEASURED.
    """

    what: str
    verdict: Verdict
    value: str = ""
    reason: str = ""
    #: The numbers in `value`: seconds, bytes, and rates.
    figures: Mapping[str, float] = field(default_factory=dict)


#: Adds a finding to the table at once. It replaces an earlier finding of the same part with the same `what`.
Tell = Callable[[Finding], None]


def check(
    title: str, passed: bool, value: str, reason: str, figures: Mapping[str, float] | None = None
) -> Finding:
    """Return a finding that passed or failed."""
    return Finding(title, "PASS" if passed else "FAIL", value, reason, figures or {})


@dataclass(frozen=True, slots=True)
class Amounts:
    """Amounts of work of the parts: sizes in bytes, and times in seconds."""

    transfer: int = 1_000_000_000
    rounds: int = 5
    #: Number of rows, and of columns, of the matrices of a long execution.
    side: int = 8192
    latency: Sequence[int] = (10_000_000, 100_000_000, 1_000_000_000, 5_000_000_000)
    #: Number of models in the part `eviction`. A quarter of their weights fits on the device.
    eviction_models: int = 40
    eviction_each: int = 250_000_000
    eviction_s: float = 20.0
    clients: int = 8
    many: int = 200
    many_each: int = 1_000_000
    #: Bytes of the weights of each model in the part `interruptions`.
    interrupted_each: int = 25_000_000
    #: Seconds before and after each interruption.
    pause_s: float = 6.0
    front_s: float = 8.0
    #: Sizes of outputs. Each model of the part `outputs` has one of them.
    outputs: Sequence[int] = (1_000, 600_000, 60_000_000)
    #: Duration of the requests for outputs of all sizes together.
    output_s: float = 3.0


#: Small amounts, which only show that each part works. The figures mean nothing.
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
    interrupted_each=1 << 17,
    pause_s=4.0,
    front_s=0.6,
    outputs=(1_000, 600_000),
    output_s=0.3,
)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The device as jax, rsrv and the driver see it."""

    name: str
    platform: str
    tf32: bool
    #: Bytes that jax's allocator may take, or None if they are unknown, as on a CPU.
    memory: int | None
    #: Versions of the driver, Python, rsrv, jax and its plugins.
    versions: str


@dataclass(frozen=True, slots=True)
class PartInput:
    """Everything that a part works with."""

    device: DeviceFacts
    amounts: Amounts
    bundles: Sequence[Path]
    #: Folder with the bundles of part `models`, if there is one.
    models: Path | None
    #: Folder that only this part uses for its files.
    folder: Path
    #: Environment of the command, for the runtimes and servers that a part starts.
    environment: Mapping[str, str]
    #: `time.monotonic` at which the part is killed. It has the same value in every process.
    ends_at: float

    @property
    def on_cpu(self) -> bool:
        return self.device.platform == "cpu"

    def left(self) -> float:
        """Return the seconds that the part has left."""
        return self.ends_at - time.monotonic()

    def window(self, most: float, share: float) -> float:
        """Return for how many seconds to measure: `most`, or this share of the time left if that is less."""
        return max(0.1, min(most, share * self.left()))


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A part of the check: a function `(part_input, tell)` of a module in this package."""

    module: str
    function: str
    #: Approximate seconds of the part on a card. They determine the part's share of the time.
    seconds: float
    #: True if the part uses the device in its own process. Otherwise it starts runtimes that use the device.
    on_device: bool = False


#: All parts. The most important parts come first, because a run may be cut off.
PARTS: Mapping[str, PlannedPart] = {
    "correctness": PlannedPart("answers", "correctness", 100),
    "contexts": PlannedPart("contexts", "contexts", 100),
    "eviction": PlannedPart("serving", "eviction", 80),
    "outputs": PlannedPart("serving", "outputs", 30),
    "interruptions": PlannedPart("interruptions", "interruptions", 80),
    "fronts": PlannedPart("fronts", "fronts", 80),
    "models": PlannedPart("models", "models", 90, on_device=True),
    "numerics": PlannedPart("answers", "numerics", 20),
    "bandwidth": PlannedPart("transfers", "bandwidth", 20, on_device=True),
    "overlap": PlannedPart("transfers", "overlap", 20, on_device=True),
    "budget": PlannedPart("memory", "budget", 15, on_device=True),
    "out-of-memory": PlannedPart("memory", "out_of_memory", 25, on_device=True),
    "latency": PlannedPart("serving", "latency", 50),
    "many": PlannedPart("serving", "many", 25),
}
#: Maximum number of characters of a cell of the table.
_CELL = 300
#: A part is not started if less than this share of its `seconds` is left.
_LEAST_SHARE = 0.25


def ends_of(names: Sequence[str], seconds: float) -> Mapping[str, float]:
    """Return for each part the second at which it must end.

    Each part gets a share in proportion to its `seconds`. If a part needs less time than its share, later parts can use the rest.
    """
    total, ends, end = sum(PARTS[name].seconds for name in names), {}, 0.0
    for name in names:
        end += seconds * PARTS[name].seconds / total
        ends[name] = end
    return ends


def too_late(part: PlannedPart, left_s: float) -> Finding | None:
    """Return None if enough seconds are left to start the part, and otherwise a finding that they do not suffice."""
    least = _LEAST_SHARE * part.seconds
    if left_s >= least:
        return None
    reason = f"{duration(max(0.0, left_s))} are left, and it takes {duration(least)} or more: raise --minutes"
    return Finding("the part", "NOT RUN", reason=reason)


def heading(device: DeviceFacts) -> str:
    """Return the lines above the table, and the first two lines of the table."""
    memory = f", {amount(device.memory)} for jax" if device.memory else ""
    return (
        f"**{device.name}**{memory}; {device.versions}\n\n| part | figure | result | how |\n|---|---|---|---|"
    )


def table_row(part: str, finding: Finding) -> str:
    """Return a finding as a row of the table. A long text is cut. The file of figures has the whole text."""
    words = (finding.verdict if finding.verdict != "MEASURED" else "", finding.value)
    cells = (f"`{part}`", finding.what, ": ".join(filter(None, words)), finding.reason)
    texts = [one_line(cell).replace("|", "/") for cell in cells]
    cut = [f"{text[:_CELL]} ..." if len(text) > _CELL else text for text in texts]
    return f"| {' | '.join(cut)} |".replace("|  |", "| |")


def summary(findings: Iterable[Finding], seconds: float) -> str:
    """Return the number of findings with each verdict, and the time of the run."""
    verdicts = [finding.verdict for finding in findings]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in sorted(set(verdicts)))
    return f"{counts}; {duration(seconds)}"


def document(
    device: DeviceFacts, findings: Mapping[str, Sequence[Finding]], seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Return everything as JSON. `seconds` has the duration of each part that has ended."""
    return {
        "device": asdict(device),
        "parts": {
            part: {"seconds": seconds.get(part), "findings": [asdict(finding) for finding in of_part]}
            for part, of_part in findings.items()
        },
    }
