"""Figures of a fault, computed from the clients' records. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import NamedTuple

from rsrv.wire.memory import SILENT_S

#: Outcomes of requests. Other outcomes are errors, which have the names of their codes.
RIGHT, WRONG, UNANSWERED = "right", "wrong", "unanswered"
#: The protocol of requests that cause a fault or are part of it.
STRIKE = "strike"
#: Seconds within which the health service must report the fault.
TELLS_WITHIN = 1.0
#: A request that a fault should not affect is late after this many seconds.
LATE_S = 1.0
#: Least number of answers for a 99th percentile.
_ENOUGH = 50
#: A bystander's slowdown above this factor gets a remark.
_SLOW = 2.0


class Record(NamedTuple):
    """A client's record of one request. Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share."""

    model: str
    protocol: str
    sent: float
    ended: float
    outcome: str
    #: Beginning of an error's text.
    said: str = ""


class Stretch(NamedTuple):
    """Times of the beginning of the steady load, of the fault, of the removal of its cause, and of the end."""

    begin: float
    strike: float
    relief: float
    end: float


@dataclass(frozen=True)
class Expected:
    """The harm that a fault may do."""

    #: Models whose answers may be errors or late. None: all models.
    victims: Collection[str] | None
    #: Reason why a request to a victim may stay unanswered. If it is empty, each request must be answered.
    excuse: str = ""
    #: Models whose requests may get each other's answers, with the reasons.
    mixes_up: Mapping[str, str] = field(default_factory=dict)
    #: If true, only requests in flight, and one further request of each model, may fail. A request may take longer than LATE_S
    #: only if it is sent before the fronts notice that the runtime is silent.
    in_flight: bool = False

    def harms(self, model: str) -> bool:
        return self.victims is None or model in self.victims


@dataclass(frozen=True)
class Row:
    """The result of a fault that was caused once or several times."""

    fault: str
    strikes: int
    #: Number of requests in flight at the fault.
    in_flight: int
    #: Number of right answers. This and the next three values count the requests that ended after the fault and were sent before the
    #: end.
    right: int
    errors: Counter[str]
    wrong: int
    unanswered: int
    #: Seconds that the bystanders' right answers took before the fault.
    before: Sequence[float]
    #: Seconds that the bystanders' right answers took after the fault.
    during: Sequence[float]
    #: Longest time in seconds until an answer or an error. It starts at the fault, or at the request if that was sent later.
    slowest: float
    #: Seconds from the removal of the cause until the victims answered right and had no later error, or inf.
    victims_back: float
    #: The same time for the bystanders.
    bystanders_back: float
    #: Seconds from the fault until the health service reported it, or None for a fault that it need not report.
    told: float | None
    #: Violations.
    problems: Sequence[str]
    #: Remarks about allowed harm.
    notes: Sequence[str]

    @property
    def slower(self) -> float | None:
        """The bystanders' p99 after the fault as a multiple of the p99 before it. None: there were too few answers."""
        if min(len(self.before), len(self.during)) < _ENOUGH:
            return None
        return p99(self.during) / p99(self.before)


def p99(seconds: Sequence[float]) -> float:
    """Return the 99th percentile of at least one value."""
    return sorted(seconds)[ceil(0.99 * len(seconds)) - 1]


def judge(
    fault: str,
    records: Sequence[Record],
    stretch: Stretch,
    expected: Expected,
    *,
    unhealthy_s: float | None = None,
    problems: Iterable[str] = (),
    notes: Iterable[str] = (),
) -> Row:
    """Judge a fault that was caused once. `unhealthy_s`, `problems` and `notes` are results that are not in the records."""
    touched = [r for r in records if r.ended > stretch.strike and r.sent < stretch.end]
    ends = Counter(r.outcome for r in touched)
    errors = Counter({end: n for end, n in ends.items() if end not in (RIGHT, WRONG, UNANSWERED)})

    def latencies(since: float, until: float) -> list[float]:
        mine = (r for r in records if not expected.harms(r.model) and r.outcome == RIGHT)
        return [r.ended - r.sent for r in mine if since < r.ended <= until]

    def back(harmed: bool) -> float:
        # Requests that cause the fault are meant to fail. The requests of the load show whether the model is back.
        sent = (r for r in records if r.protocol != STRIKE)
        return _back([r for r in sent if expected.harms(r.model) is harmed], stretch)

    waits = [r.ended - max(r.sent, stretch.strike) for r in touched if r.outcome != UNANSWERED]
    row = Row(
        fault,
        1,
        sum(r.sent <= stretch.strike < r.ended for r in records),
        ends[RIGHT],
        errors,
        ends[WRONG],
        ends[UNANSWERED],
        latencies(stretch.begin, stretch.strike),
        latencies(stretch.strike, stretch.end),
        max(waits, default=0.0),
        back(True),
        back(False),
        unhealthy_s,
        (),
        tuple(notes),
    )
    return replace(row, problems=(*problems, *_problems(row, touched, stretch, expected)))


def _back(records: Sequence[Record], stretch: Stretch) -> float:
    """Return the seconds from the removal of the cause until the last model answers right and has no later error.

    Return 0 if there are no models, and inf if a model does not answer.
    """
    return max((_one_back(own, stretch) for own in _by_model(records).values()), default=0.0)


def _one_back(records: Sequence[Record], stretch: Stretch) -> float:
    failed = [r.ended for r in records if r.outcome != RIGHT and stretch.strike < r.ended < stretch.end]
    since = max([stretch.relief, *failed])
    return (
        min((r.ended for r in records if r.outcome == RIGHT and r.ended > since), default=inf)
        - stretch.relief
    )


def _by_model(records: Iterable[Record]) -> dict[str, list[Record]]:
    models: dict[str, list[Record]] = {}
    for record in records:
        models.setdefault(record.model, []).append(record)
    return models


def _problems(row: Row, touched: Sequence[Record], stretch: Stretch, expected: Expected) -> Iterable[str]:
    wrong = Counter(r.model for r in touched if r.outcome == WRONG and r.model not in expected.mixes_up)
    if wrong:
        yield f"wrong answers: {_counts(wrong)}"
    lost = [r for r in touched if r.outcome == UNANSWERED]
    unexcused = Counter(r.model for r in lost if not (expected.excuse and expected.harms(r.model)))
    if unexcused:
        yield f"never answered: {_counts(unexcused)}"
    failed = [
        r for r in touched if not expected.harms(r.model) and r.outcome not in (RIGHT, WRONG, UNANSWERED)
    ]
    if failed:
        kinds = _counts(Counter(f"{r.model} {r.outcome}" for r in failed))
        yield f"errors of models that the fault should not touch: {kinds}"
    if expected.in_flight:
        harmed = [r for r in touched if r.outcome != RIGHT]
        if len(harmed) > row.in_flight + len({r.model for r in touched}):
            yield f"{len(harmed)} requests failed, but only {row.in_flight} were in flight"
        late = [r for r in touched if r.ended - r.sent > LATE_S and r.sent > stretch.strike + SILENT_S + 0.2]
        if late:
            yield f"{len(late)} requests were late that were sent {late[0].sent - stretch.strike:.1f} s after the fault"
    if row.victims_back == inf:
        yield "the victims did not answer again"
    if row.bystanders_back == inf:
        yield "bystanders did not answer again"
    if row.told is not None and row.told > TELLS_WITHIN:
        yield "the health service did not report the fault" + (
            "" if row.told == inf else f" before {row.told:.1f} s"
        )


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.most_common())


def together(rows: Sequence[Row]) -> Row:
    """Combine several results of one fault. Counts are added up. For other values, the worst one is kept."""
    return Row(
        rows[0].fault,
        sum(row.strikes for row in rows),
        sum(row.in_flight for row in rows),
        sum(row.right for row in rows),
        sum((row.errors for row in rows), Counter()),
        sum(row.wrong for row in rows),
        sum(row.unanswered for row in rows),
        [seconds for row in rows for seconds in row.before],
        [seconds for row in rows for seconds in row.during],
        max(row.slowest for row in rows),
        max(row.victims_back for row in rows),
        max(row.bystanders_back for row in rows),
        max((row.told for row in rows if row.told is not None), default=None),
        _once(row.problems for row in rows),
        _once(row.notes for row in rows),
    )


def _once(texts: Iterable[Iterable[str]]) -> list[str]:
    """Return each text once. A text that occurs several times has its count."""
    counts = Counter(text for some in texts for text in some)
    return [text if count == 1 else f"{text} ({count} times)" for text, count in counts.items()]


# --- for people ---------------------------------------------------------------------------------------------------

HEADERS = (
    "fault", "strikes", "in flight", "right", "error", "wrong", "unanswered", "p99 before ms", "during ms", "x",
    "slowest s", "back after s", "others s", "told s", "",
)  # fmt: skip


def cells(row: Row, expected: Expected) -> list[str]:
    """Return a line of the table with the columns HEADERS."""
    everybody = expected.victims is None
    return [
        row.fault,
        str(row.strikes),
        str(row.in_flight),
        str(row.right),
        str(row.errors.total()),
        str(row.wrong),
        f"{row.unanswered}*" if row.unanswered and expected.excuse else str(row.unanswered),
        "-" if not row.before else f"{p99(row.before) * 1e3:.1f}",
        "-" if not row.during else f"{p99(row.during) * 1e3:.1f}",
        "-" if row.slower is None else f"{row.slower:.1f}",
        f"{row.slowest:.2f}",
        _back_text(row.victims_back),
        "-" if everybody else _back_text(row.bystanders_back),
        "-" if row.told is None else _back_text(row.told),
        _verdict(row),
    ]


def _verdict(row: Row) -> str:
    verdict = "FAILED" if row.problems else "ok"
    # A slowdown is not a failure, because other processes may use the machine.
    return verdict if row.slower is None or row.slower <= _SLOW else f"{verdict}, p99 x {row.slower:.1f}"


def _back_text(seconds: float) -> str:
    return "never" if seconds == inf else f"{seconds:.2f}"


def remarks(row: Row, expected: Expected) -> list[str]:
    """Return remarks that do not fit into a line of the table."""
    errors = [f"{count} x {name}" for name, count in row.errors.most_common()]
    return [
        *(f"FAILED: {text}" for text in row.problems),
        *([f"errors: {', '.join(errors)}"] if errors else []),
        *([f"* {expected.excuse}"] if row.unanswered and expected.excuse else []),
        *(f"wrong answers of {model}: {why}" for model, why in expected.mixes_up.items() if row.wrong),
        *row.notes,
    ]
