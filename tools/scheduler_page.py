"""Make the tables and the picture of docs/scheduler.md. They compare the scheduler's disciplines with the simulator.

    python tools/scheduler_page.py     # rewrites the tables in the page, and docs/images/scheduler-hog.png

A table is in the page between `<!-- NAME -->` and `<!-- end NAME -->`. The tables depend only on the code, and a test compares
them with the page. The picture depends only on the code and on the version of matplotlib.
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

from rsrv.scheduler.disciplines import DISCIPLINES
from rsrv.scheduler.events import Outcome
from rsrv.sim.metrics import summarize
from rsrv.sim.plots import save
from rsrv.sim.record import Record, RequestRecord
from rsrv.sim.scenario import Scenario, load_scenario
from rsrv.sim.simulate import simulate
from rsrv.sim.tally import percentile

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "scheduler.md"
IMAGES = DOCS / "images"
IMAGE = IMAGES / "scheduler-hog.png"

#: Style of each scheduler's line. The colours are M. Okabe and K. Ito's, which colour-blind readers can distinguish. The line of
#: fifo is wider, so that it stays visible behind the line of edf: without deadlines, both lines are the same.
STYLES: Mapping[str, Mapping[str, Any]] = {
    "fair": {"color": "#0072B2", "linewidth": 1.8},
    "fifo": {"color": "#E69F00", "linewidth": 3.6},
    "edf": {"color": "#009E73", "linewidth": 1.5},
    "round_robin": {"color": "#CC79A7", "linewidth": 1.8, "linestyle": (0, (5, 2))},
    "static_priority": {"color": "#333333", "linewidth": 1.8, "linestyle": (0, (1, 1.5))},
}
#: Greys of the picture, from dark to light: the hog first, then the small models.
GREYS = ("#333333", "#777777", "#AAAAAA", "#DDDDDD")


class Run:
    """Result of one scenario under one scheduler."""

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
        """Seconds of the window in which device and link are measured."""
        window: float = self.total["window_s"]
        return window

    def sent(self, group: str = "", dated: bool | None = None) -> list[RequestRecord]:
        """Return the requests to a group of models ("" for all models), with a deadline or without one (None for both)."""
        return [
            request
            for request in self.record.requests
            if group in ("", _group(request.request.model))
            and dated in (None, request.request.deadline is not None)
        ]

    def in_time(self, group: str) -> float:
        """Return the share of requests with a deadline that were answered in time."""
        sent = self.sent(group, dated=True)
        return sum(map(_in_time, sent)) / len(sent)

    def latency(self, share: float, group: str = "", dated: bool | None = None) -> float:
        return percentile(_latencies(self.sent(group, dated)), share) or 0.0

    def busy(self, group: str) -> float:
        """Return the share of the window in which the group had the device."""
        models = self.metrics["models"].items()
        seconds: float = sum(figures["device_seconds"] for name, figures in models if _group(name) == group)
        return seconds / self.window


def _group(model: str) -> str:
    return model.partition("-")[0]


def _in_time(sent: RequestRecord) -> bool:
    return sent.outcome is Outcome.ANSWERED and sent.ended <= (sent.request.deadline or float("inf"))


def _latencies(sent: Sequence[RequestRecord]) -> list[float]:
    return sorted(request.ended - request.arrived for request in sent if request.outcome is Outcome.ANSWERED)


# --- tables --------------------------------------------------------------------------------------------------


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _ms(value: float) -> str:
    return f"{1e3 * value:.0f} ms"


@dataclass(frozen=True, slots=True)
class Column:
    """Figure of a run. `better` is 1 if higher is better, and -1 if lower is better."""

    title: str
    better: int
    format: Callable[[float], str]
    value: Callable[[Run], float]


#: Columns of the table of each scenario.
COLUMNS: Mapping[str, Sequence[Column]] = {
    "zipf": (
        Column("in time: `vision`", 1, _percent, lambda run: run.in_time("vision")),
        Column("`encoder`", 1, _percent, lambda run: run.in_time("encoder")),
        Column("`large`", 1, _percent, lambda run: run.in_time("large")),
        Column("latency p50", -1, _ms, lambda run: run.latency(0.5, dated=True)),
        Column("crawler p50", -1, _ms, lambda run: run.latency(0.5, dated=False)),
        Column("crawler p99", -1, _ms, lambda run: run.latency(0.99, dated=False)),
    ),
    "bursts": (
        Column("in time: `chat`", 1, _percent, lambda run: run.in_time("chat")),
        Column("`search`", 1, _percent, lambda run: run.in_time("search")),
        Column("`report` p50", -1, _ms, lambda run: run.latency(0.5, "report")),
        Column("`report` p99", -1, _ms, lambda run: run.latency(0.99, "report")),
        Column("ended unanswered", -1, str, lambda run: run.total["shed"] + run.total["expired"]),
    ),
}


def scenario(name: str) -> Scenario:
    return load_scenario(DOCS / "scenarios" / f"{name}.yaml")


def runs(name: str) -> dict[str, Run]:
    """Simulate a scenario under each scheduler."""
    return {discipline: Run(scenario(name), discipline) for discipline in STYLES}


def tables(compared: Mapping[str, Mapping[str, Run]]) -> dict[str, str]:
    """Return the page's tables by name. `compared` is scenario -> scheduler -> run."""
    return {name: table(_comparison(name, by_scheduler)) for name, by_scheduler in compared.items()}


def table(rows: Iterator[Sequence[str]]) -> str:
    first, *lines = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([first, "|---" * (first.count(" | ") + 1) + "|", *lines])


def _comparison(name: str, by_scheduler: Mapping[str, Run]) -> Iterator[Sequence[str]]:
    """Yield a row for each of the runtime's disciplines. In each column, the best is bold and the worst is in italics."""
    columns = COLUMNS[name]
    yield ("discipline", *(column.title for column in columns))
    values = {key: [column.value(by_scheduler[key]) for column in columns] for key in DISCIPLINES}
    for key, own in values.items():
        cells = []
        for index, column in enumerate(columns):
            cell = column.format(own[index])
            every = sorted((cells[index] for cells in values.values()), reverse=column.better > 0)
            if cell == column.format(every[0]):
                cell = f"**{cell}**"
            elif cell == column.format(every[-1]):
                cell = f"*{cell}*"
            cells.append(cell)
        yield (f"`{key}`", *cells)


def rewrite(page: str, made: Mapping[str, str]) -> str:
    """Return the page with these tables in place of its old ones.

    Raises:
        ValueError: the page lacks the comments before and after a table, or has them twice.
    """
    for name, table in made.items():
        before, mark, following = page.partition(f"<!-- {name} -->\n")
        _, end, after = following.partition(f"\n<!-- end {name} -->")
        if not end or mark in after:
            raise ValueError(f"the page must have exactly one pair of marks for the table {name!r}")
        page = f"{before}{mark}\n{table}\n{end}{after}"
    return page


# --- pictures ------------------------------------------------------------------------------------------------


def picture(by_scheduler: Mapping[str, Run]) -> Figure:
    figure, (left, right) = _figure()
    for key, run in by_scheduler.items():
        _cdf(left, key, [request for request in run.sent() if request.request.model != "hog"])
    start = np.zeros(len(by_scheduler))
    for grey, group in zip(GREYS, ("hog", "slow", "middle", "quick"), strict=True):
        shares = [100 * run.busy(group) for run in by_scheduler.values()]
        right.barh([*by_scheduler], shares, left=start, color=grey, label=group, height=0.7)
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


def _cdf(axes: Axes, key: str, sent: Sequence[RequestRecord]) -> None:
    """Draw the times of answers. Refused requests have no time, so the curve ends below 100 %."""
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
    """Rewrite the page and its picture."""
    compared = {name: runs(name) for name in COLUMNS}
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8"), tables(compared)), encoding="utf-8")
    IMAGES.mkdir(exist_ok=True)
    save(picture(runs("hog")), IMAGE)


if __name__ == "__main__":
    main()
