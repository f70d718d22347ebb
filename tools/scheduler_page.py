"""Makes the tables and plots of docs/scheduler.md: the simulator's scenarios under every discipline.

    python tools/scheduler_page.py     # rewrites the tables in the page and docs/images/scheduler-*.png

A table stands in the page between `<!-- NAME -->` and `<!-- end NAME -->`. Equal code gives equal tables, which a test
holds the page to; equal code and equal versions of matplotlib give equal pictures, byte for byte.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pydantic import BaseModel

from rsrv.scheduler.batching import plan_batch
from rsrv.scheduler.events import Outcome
from rsrv.settings import CHANGEABLE, ModelSection, RuntimeSection, SchedulerSection
from rsrv.sim.metrics import summarize
from rsrv.sim.record import Execution, Record, Sent
from rsrv.sim.scenario import Scenario, load_scenario
from rsrv.sim.simulate import simulate
from rsrv.sim.tally import percentile

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "scheduler.md"
IMAGES = DOCS / "images"

#: scheduler -> how it is drawn. The colours are M. Okabe and K. Ito's, which colour-blind people tell apart; fifo's
#: wider line shows from behind edf's, which is the same where nobody has a deadline.
STYLES: Mapping[str, Mapping[str, Any]] = {
    "fair": {"color": "#0072B2", "linewidth": 1.8},
    "fifo": {"color": "#E69F00", "linewidth": 3.6},
    "edf": {"color": "#009E73", "linewidth": 1.5},
    "round_robin": {"color": "#CC79A7", "linewidth": 1.8, "linestyle": (0, (5, 2))},
    "static_priority": {"color": "#333333", "linewidth": 1.8, "linestyle": (0, (1, 1.5))},
}
#: of the hog's picture: the hog and the small ones, dark to light.
GREYS = ("#333333", "#777777", "#AAAAAA", "#DDDDDD")
#: compiled size -> ms, and requests of one row: the example of coalescing.
COALESCING = {1: 2.0, 8: 4.0, 16: 6.0, 32: 14.0}
SINGLES = 31


class Run:
    """One scenario under one scheduler."""

    def __init__(self, scenario: Scenario, discipline: str) -> None:
        settings = replace(scenario.settings, discipline=discipline)
        self.record: Record = simulate(replace(scenario, discipline=discipline, settings=settings))

    @cached_property
    def metrics(self) -> dict[str, Any]:
        return summarize(self.record)

    @property
    def total(self) -> dict[str, Any]:
        total: dict[str, Any] = self.metrics["total"]
        return total

    @property
    def window(self) -> float:
        """Seconds that the figures of the device and the link are about."""
        window: float = self.total["window_s"]
        return window

    def sent(self, group: str = "", dated: bool | None = None) -> list[Sent]:
        """The requests to a group of models ("": all), with a deadline or without (None: both)."""
        return [
            one
            for one in self.record.requests
            if group in ("", _group(one.request.model)) and dated in (None, one.request.deadline is not None)
        ]

    def executions(self, group: str) -> list[Execution]:
        return [one for one in self.record.executions if _group(one.execute.model) == group]

    def in_time(self, group: str) -> float:
        """Of its requests with a deadline, the share that was answered by then."""
        sent = self.sent(group, dated=True)
        return sum(map(_in_time, sent)) / len(sent)

    def latency(self, share: float, group: str = "", dated: bool | None = None) -> float:
        return percentile(_latencies(self.sent(group, dated)), share) or 0.0

    def busy(self, group: str) -> float:
        """The share of the window in which it had the device."""
        models = self.metrics["models"].items()
        seconds: float = sum(one["device_seconds"] for name, one in models if _group(name) == group)
        return seconds / self.window

    def throughput(self, group: str) -> float:
        """Requests answered within the window, per second."""
        window = self.window
        ended = [one for one in self.sent(group) if one.outcome is Outcome.ANSWERED and one.ended <= window]
        return len(ended) / window

    def rows(self, *groups: str) -> float:
        """Rows of an execution, on average."""
        rows = [one.execute.rows for group in groups for one in self.executions(group)]
        return sum(rows) / len(rows)


def _group(model: str) -> str:
    return model.partition("-")[0]


def _in_time(sent: Sent) -> bool:
    return sent.outcome is Outcome.ANSWERED and sent.ended <= (sent.request.deadline or float("inf"))


def _latencies(sent: Sequence[Sent]) -> list[float]:
    return sorted(one.ended - one.arrived for one in sent if one.outcome is Outcome.ANSWERED)


# --- tables --------------------------------------------------------------------------------------------------


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _ms(value: float) -> str:
    return f"{1e3 * value:.0f} ms"


def _per_second(value: float) -> str:
    return f"{value:.0f} /s"


def _rows(value: float) -> str:
    return f"{value:.2f}"


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of a run; `better` is 1 if more of it is better, -1 if less is, 0 if neither."""

    title: str
    better: int
    format: Callable[[float], str]
    value: Callable[[Run], float]


#: scenario -> the columns of its table.
COLUMNS: Mapping[str, Sequence[Column]] = {
    "zipf": (
        Column("in time: `vision`", 1, _percent, lambda run: run.in_time("vision")),
        Column("`encoder`", 1, _percent, lambda run: run.in_time("encoder")),
        Column("`large`", 1, _percent, lambda run: run.in_time("large")),
        Column("latency p50", -1, _ms, lambda run: run.latency(0.5, dated=True)),
        Column("crawler p50", -1, _ms, lambda run: run.latency(0.5, dated=False)),
        Column("crawler p99", -1, _ms, lambda run: run.latency(0.99, dated=False)),
        Column("loads", 0, _per_second, lambda run: run.total["loads"] / run.window),
        Column("link busy", 0, _percent, lambda run: run.total["link_utilisation"]),
    ),
    "bursts": (
        Column("in time: `chat`", 1, _percent, lambda run: run.in_time("chat")),
        Column("`search`", 1, _percent, lambda run: run.in_time("search")),
        Column("`report` p50", -1, _ms, lambda run: run.latency(0.5, "report")),
        Column("`report` p99", -1, _ms, lambda run: run.latency(0.99, "report")),
        Column("ended unanswered", -1, str, lambda run: run.total["shed"] + run.total["expired"]),
        Column("rows an execution: `search`", 0, _rows, lambda run: run.rows("search")),
        Column("`report`", 0, _rows, lambda run: run.rows("report")),
        Column("device busy", 0, _percent, lambda run: run.total["utilisation"]),
    ),
    "hog": (
        Column("`quick` p50", -1, _ms, lambda run: run.latency(0.5, "quick")),
        Column("p99", -1, _ms, lambda run: run.latency(0.99, "quick")),
        Column("`middle` p99", -1, _ms, lambda run: run.latency(0.99, "middle")),
        Column("`slow` p50", -1, _ms, lambda run: run.latency(0.5, "slow")),
        Column("p99", -1, _ms, lambda run: run.latency(0.99, "slow")),
        Column("`hog` served", 1, _per_second, lambda run: run.throughput("hog")),
        Column("rows an execution, small ones", 0, _rows, lambda run: run.rows("quick", "middle", "slow")),
    ),
}

#: scenario -> rates of its first source, and the columns of its table.
SWEEPS: Mapping[str, tuple[Sequence[int], Sequence[Column]]] = {
    "equals": (
        (200, 300, 500, 800),
        (
            Column("rows an execution", 0, _rows, lambda run: run.rows("model")),
            Column("latency p50", -1, _ms, lambda run: run.latency(0.5)),
            Column("latency p99", -1, _ms, lambda run: run.latency(0.99)),
            Column("device busy", 0, _percent, lambda run: run.total["utilisation"]),
        ),
    ),
    "dear": (
        (60, 80),
        (
            Column("`dear` p50", -1, _ms, lambda run: run.latency(0.5, "dear")),
            Column("`dear` p99", -1, _ms, lambda run: run.latency(0.99, "dear")),
            Column("`cheap` p99", -1, _ms, lambda run: run.latency(0.99, "cheap")),
            Column("device busy", 0, _percent, lambda run: run.total["utilisation"]),
            Column("link busy", 0, _percent, lambda run: run.total["link_utilisation"]),
        ),
    ),
}


def scenario(name: str) -> Scenario:
    return load_scenario(DOCS / "scenarios" / f"{name}.yaml")


def runs(name: str) -> dict[str, Run]:
    """A scenario under each scheduler."""
    return {discipline: Run(scenario(name), discipline) for discipline in STYLES}


def tables(compared: Mapping[str, Mapping[str, Run]]) -> dict[str, str]:
    """All of the page's, by name. `compared` is scenario -> scheduler -> run."""
    return {
        "coalescing": table(_coalescing()),
        "settings": table(_settings()),
        **{name: table(_comparison(name, those)) for name, those in compared.items()},
        **{name: table(_sweep(name)) for name in SWEEPS},
    }


def table(rows: Iterator[Sequence[str]]) -> str:
    first, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([first, "|---" * (first.count(" | ") + 1) + "|", *rest])


def _comparison(name: str, those: Mapping[str, Run]) -> Iterator[Sequence[str]]:
    """The best of each column in bold, the worst in italics."""
    columns = COLUMNS[name]
    yield ("scheduler", *(column.title for column in columns))
    values = {key: [column.value(run) for column in columns] for key, run in those.items()}
    for key, own in values.items():
        cells = []
        for index, column in enumerate(columns):
            cell = column.format(own[index])
            every = sorted((one[index] for one in values.values()), reverse=column.better > 0)
            if column.better and cell == column.format(every[0]):
                cell = f"**{cell}**"
            elif column.better and cell == column.format(every[-1]):
                cell = f"*{cell}*"
            cells.append(cell)
        yield (f"`{key}`", *cells)


def _sweep(name: str) -> Iterator[Sequence[str]]:
    """Without edf and static priority, which are fifo where there are neither deadlines nor weights."""
    base, (rates, columns) = scenario(name), SWEEPS[name]
    yield ("requests /s", "scheduler", *(column.title for column in columns))
    for rate in rates:
        first, *others = base.poisson
        at = replace(base, poisson=[first.model_copy(update={"rate": rate}), *others])
        for key in ("fair", "fifo", "round_robin"):
            run = Run(at, key)
            cells = (column.format(column.value(run)) for column in columns)
            yield (str(rate), f"`{key}`", *cells)


def _coalescing() -> Iterator[Sequence[str]]:
    """The plans for SINGLES waiting requests, and for what each leaves."""
    yield ("waiting", *(f"size {size}, {ms:g} ms" for size, ms in COALESCING.items()), "taken")
    waiting, total = SINGLES, 0.0
    while waiting:
        batch = plan_batch([1] * waiting, [*COALESCING], [*COALESCING.values()])
        each = (
            f"{ms:g} / {min(size, waiting)} = {ms / min(size, waiting):.2f}"
            for size, ms in COALESCING.items()
        )
        cells = [
            f"**{cell}**" if size == batch.size else cell for size, cell in zip(COALESCING, each, strict=True)
        ]
        total += batch.seconds
        yield (str(waiting), *cells, f"{batch.rows} at size {batch.size}; {total:g} ms so far")
        waiting -= batch.rows


def _settings() -> Iterator[Sequence[str]]:
    yield ("key", "default", "while it runs", "meaning")
    sections: tuple[tuple[str, type[BaseModel], Sequence[str]], ...] = (
        ("scheduler", SchedulerSection, tuple(SchedulerSection.model_fields)),
        ("runtime", RuntimeSection, ("weight_budget_bytes",)),
        ("models.NAME", ModelSection, tuple(ModelSection.model_fields)),
    )
    for section, model, keys in sections:
        for key in keys:
            field = model.model_fields[key]
            default = "null" if field.default is None else str(field.default)
            yes = "yes" if section == "scheduler" and key in CHANGEABLE else ""
            yield (f"`{section}.{key}`", default, yes, field.description or "")


def rewrite(page: str, made: Mapping[str, str]) -> str:
    """The page with these tables in place of those it has.

    Raises:
        ValueError: the page has no place for one of them, or several.
    """
    for name, table in made.items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"\n<!-- end {name} -->")
        if not end or mark in after:
            raise ValueError(f"the page takes the table {name!r} between one pair of marks, not none or two")
        page = f"{before}{mark}\n{table}\n{end}{after}"
    return page


# --- pictures ------------------------------------------------------------------------------------------------


def image(name: str) -> Path:
    """Where the picture of a scenario lies."""
    return IMAGES / f"scheduler-{name}.png"


def picture(name: str, those: Mapping[str, Run]) -> Figure:
    """Of a scenario under each scheduler."""
    match name:
        case "zipf":
            return _deadlines(those, "People: requests with a deadline", "The crawler: requests without one")
        case "bursts":
            return _deadlines(
                those, "Chat and search: requests with a deadline", "Reports: requests without one"
            )
        case _:
            return _hog(those)


def save(figure: Figure, path: Path) -> None:
    """Without matplotlib's version in it."""
    figure.savefig(path, dpi=100, metadata={"Software": None})


def _deadlines(those: Mapping[str, Run], dated: str, others: str) -> Figure:
    figure, (left, right) = _figure()
    for key, run in those.items():
        _cdf(left, key, run.sent(dated=True))
        _cdf(right, key, run.sent(dated=False))
    _title(left, dated)
    _title(right, others)
    return _finish(figure, left)


def _hog(those: Mapping[str, Run]) -> Figure:
    figure, (left, right) = _figure()
    for key, run in those.items():
        _cdf(left, key, [one for one in run.sent() if one.request.model != "hog"])
    start = np.zeros(len(those))
    for grey, group in zip(GREYS, ("hog", "slow", "middle", "quick"), strict=True):
        shares = [100 * run.busy(group) for run in those.values()]
        right.barh([*those], shares, left=start, color=grey, label=group, height=0.7)
        start = start + np.array(shares)
    right.invert_yaxis()
    right.legend(loc="lower center", bbox_to_anchor=(0.5, -0.3), ncols=4, frameon=False)
    _title(left, "Requests to the 30 small models")
    _title(right, "Who has the device", "share of the time, %", "")
    right.grid(visible=False, axis="y")
    return _finish(figure, left)


def _figure() -> tuple[Figure, tuple[Axes, Axes]]:
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, color="#E5E5E5")
        axes.set_axisbelow(True)
    return figure, (left, right)


def _title(axes: Axes, title: str, x: str = "latency, ms", y: str = "answered within this, %") -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _cdf(axes: Axes, key: str, sent: Sequence[Sent]) -> None:
    """Requests that were not answered are answered never: the curve ends below 100 %."""
    latencies = _latencies(sent)
    shares = 100 * np.arange(1, len(latencies) + 1) / len(sent)
    axes.plot(1e3 * np.array(latencies), shares, label=key, **STYLES[key])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(0.0, 102.0)


def _finish(figure: Figure, labelled: Axes) -> Figure:
    handles, labels = labelled.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure


def main() -> None:
    """Makes everything anew."""
    compared = {name: runs(name) for name in COLUMNS}
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8"), tables(compared)), encoding="utf-8")
    IMAGES.mkdir(exist_ok=True)
    for name, those in compared.items():
        save(picture(name, those), image(name))


if __name__ == "__main__":
    main()
