"""Makes the tables and the plot of docs/eviction.md: the policies of eviction, beside what could be had at best.

    python tools/eviction_page.py      # rewrites the tables in the page and docs/images/eviction.png

As `scheduler_page`, whose marks the page has; about a minute.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from random import Random
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rsrv.scheduler.settings import Eviction
from rsrv.sim.belady import most_hits
from rsrv.sim.metrics import summarize
from rsrv.sim.record import Record
from rsrv.sim.scenario import Scenario, parse_scenario
from rsrv.sim.schema import Request
from rsrv.sim.simulate import simulate
from scheduler_page import DOCS, IMAGES, rewrite, save, table

PAGE = DOCS / "eviction.md"
IMAGE = IMAGES / "eviction.png"

POLICIES: tuple[Eviction, ...] = ("lru", "cost")
EXPONENTS = (0.8, 1.1)
#: room for weights, of those of all models.
ROOMS = (0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)

MODELS = 200
#: of each model, unless a case says otherwise.
BYTES = 250_000_000
#: of the link: 10 ms for such a model.
RATE = 25e9
#: requests per second, of all models together, and for how many seconds.
REQUESTS = 120.0
LONG, SHORT = 100.0, 60.0

#: as in `scheduler_page`.
STYLES: Mapping[str, Mapping[str, Any]] = {
    "lru": {"color": "#E69F00", "marker": "o"},
    "cost": {"color": "#0072B2", "marker": "s"},
    "popular": {"color": "#009E73", "linestyle": (0, (1, 1.5))},
    "Belady": {"color": "#333333", "linestyle": (0, (5, 2))},
}

#: when, and for which model.
Asked = tuple[float, int]


class Run:
    """One scenario under one policy."""

    def __init__(self, scenario: Scenario, policy: Eviction) -> None:
        settings = replace(scenario.settings, eviction=policy)
        self.record: Record = simulate(replace(scenario, settings=settings))

    @cached_property
    def total(self) -> dict[str, Any]:
        total: dict[str, Any] = summarize(self.record)["total"]
        return total

    @property
    def loads(self) -> float:
        """Per second."""
        loads: float = self.total["loads"] / self.total["window_s"]
        return loads

    @property
    def mean(self) -> float:
        """Seconds from arrival to answer."""
        every = [one.ended - one.arrived for one in self.record.requests]
        return sum(every) / len(every)

    def hits(self, models: Sequence[str]) -> float:
        """Of the requests for these models, those that found their weights."""
        hits = [one.hit for one in self.record.requests if one.request.model in models]
        return sum(hits) / len(hits)


# --- traffic -------------------------------------------------------------------------------------------------


def scenario(asked: Sequence[Asked], room: float, sizes: Sequence[int] = (BYTES,) * MODELS) -> Scenario:
    """These requests, one by one, for models of these sizes. Nothing is on the device at first."""
    models = (
        f"  {_name(k)}: {{cost: {{1: 0.003, 8: 0.006}}, weight_bytes: {sizes[k]}}}" for k in range(MODELS)
    )
    base = parse_scenario(
        "\n".join(
            (
                f"duration: {asked[-1][0]}",
                f"device: {{weight_budget_bytes: {int(room * sum(sizes))}, h2d_bytes_per_s: {RATE}}}",
                "arrivals: []",
                "models:",
                *models,
            )
        )
    )
    return replace(base, requests=[Request(t=t, model=_name(k)) for t, k in asked])


def _name(model: int) -> str:
    return f"model-{model}"


def zipf(
    exponent: float, start: float, end: float, *, rate: float = REQUESTS, shuffle: bool = True
) -> list[Asked]:
    """Independent requests; in a random order of the models, or with the first the most popular."""
    random = Random(f"{exponent}/{start}")
    models = list(range(MODELS))
    if shuffle:
        random.shuffle(models)
    weights = list(accumulate((k + 1) ** -exponent for k in range(MODELS)))
    asked = []
    t = start
    while (t := t + random.expovariate(rate)) < end:
        asked.append((t, random.choices(models, cum_weights=weights)[0]))
    return asked


def shifting(every: float) -> list[Asked]:
    """Another random order of popularity each time."""
    return [one for turn in range(int(SHORT / every)) for one in zipf(1.0, turn * every, (turn + 1) * every)]


def scan() -> list[Asked]:
    """Six in ten requests for 20 models alike, the others for all others in turn."""
    random = Random(1)
    asked, t, turn = [], 0.0, 0
    while (t := t + random.expovariate(REQUESTS)) < SHORT:
        if random.random() < 0.6:
            asked.append((t, random.randrange(20)))
        else:
            asked.append((t, 20 + turn % (MODELS - 20)))
            turn += 1
    return asked


def visits() -> list[Asked]:
    """Somebody asks for one model eight times on average, 50 ms apart, and leaves; any model is as likely."""
    random = Random(1)
    asked = []
    for start, model in zipf(0.0, 0.0, SHORT, rate=REQUESTS / 8):
        t = start
        while t < SHORT:
            asked.append((t, model))
            if random.random() < 1 / 8:
                break
            t += random.expovariate(20.0)
    return sorted(asked)


def mixed_sizes(room: float) -> Scenario:
    """10 MB to 5 GB, every order of magnitude as likely."""
    random = Random(2)
    sizes = [int(10e6 * 500 ** random.random()) for _ in range(MODELS)]
    return scenario(zipf(1.0, 0.0, SHORT, rate=REQUESTS / 3), room, sizes)


def mixed_loads(room: float) -> Scenario:
    """Every fourth takes four times as long."""
    base = scenario(zipf(1.0, 0.0, SHORT), room)
    programs = {
        name: replace(one, load_seconds=one.load_seconds * (1 if number % 4 else 4))
        for number, (name, one) in enumerate(base.programs.items())
    }
    return replace(base, programs=programs)


@dataclass(frozen=True, slots=True)
class Case:
    """One that is not as usual."""

    title: str
    room: float
    scenario: Callable[[float], Scenario]


CASES: Mapping[str, Case] = {
    "shift-20": Case("popularity changes every 20 s", 0.2, lambda room: scenario(shifting(20.0), room)),
    "shift-2": Case("popularity changes every 2 s", 0.2, lambda room: scenario(shifting(2.0), room)),
    "scan": Case("a scan of 180 models beside 20 hot ones", 0.15, lambda room: scenario(scan(), room)),
    "visits": Case("visits: 8 requests each, then gone", 0.05, lambda room: scenario(visits(), room)),
    "visits-more": Case("the same", 0.2, lambda room: scenario(visits(), room)),
    "sizes": Case("sizes of 10 MB to 5 GB", 0.2, mixed_sizes),
    "loads": Case("every fourth load takes 40 ms", 0.2, mixed_loads),
}


# --- tables --------------------------------------------------------------------------------------------------

#: by room, then by policy.
Curves = Mapping[float, Mapping[str, Run]]


def runs(of: Scenario) -> dict[str, Run]:
    return {policy: Run(of, policy) for policy in POLICIES}


def at(exponent: float, room: float) -> dict[str, Run]:
    """The usual case: equal models, independent requests, the first models the most popular."""
    return runs(scenario(zipf(exponent, 0.0, LONG, shuffle=False), room))


def belady(exponent: float, room: float) -> float:
    """The highest hit rate for these requests."""
    asked = [_name(k) for _, k in zipf(exponent, 0.0, LONG, shuffle=False)]
    return most_hits(asked, int(room * MODELS)) / len(asked)


def popular(exponent: float, room: float) -> float:
    """The hit rate of who knows how popular each model is, but not what comes: all room but one place is for the most
    popular, and the last place for whoever else is asked for (A0, the best that can then be done: A. Aho, P. Denning,
    J. Ullman: Principles of Optimal Page Replacement, Journal of the ACM 18, 1971).
    """
    asked = [k for _, k in zipf(exponent, 0.0, LONG, shuffle=False)]
    kept = int(room * MODELS) - 1
    there: set[int] = set()
    hits, last = 0, -1
    for model in asked:
        hits += model == last or model in there
        if model < kept:
            there.add(model)
        else:
            last = model
    return hits / len(asked)


def row(exponent: float, room: float, those: Mapping[str, Run]) -> Sequence[str]:
    rarer = [_name(k) for k in range(MODELS // 2, MODELS)]
    return (
        f"{100 * room:g} %",
        *(_percent(run.total["hit_ratio"]) for run in those.values()),
        _percent(popular(exponent, room)),
        _percent(belady(exponent, room)),
        *(_percent(run.hits(rarer)) for run in those.values()),
        *(f"{run.loads:.0f}" for run in those.values()),
        *(_ms(run.total["latency_p99_s"]) for run in those.values()),
    )


def curve(exponent: float, curves: Curves) -> Iterator[Sequence[str]]:
    yield (
        "room",
        *("hit rate: `lru`", "`cost`", "popularity known", "Belady"),
        *("rarer half: `lru`", "`cost`"),
        *("loads /s: `lru`", "`cost`"),
        *("p99: `lru`", "`cost`"),
    )
    for room, those in curves.items():
        yield row(exponent, room, those)


def case(name: str) -> Iterator[Sequence[str]]:
    """The rows of a case."""
    one = CASES[name]
    for policy, run in runs(one.scenario(one.room)).items():
        total = run.total
        yield (
            one.title,
            f"{100 * one.room:g} %",
            f"`{policy}`",
            _percent(total["hit_ratio"]),
            f"{run.loads:.1f}",
            f"{total['loaded_bytes'] / total['window_s'] / 1e9:.1f} GB",
            _percent(total["link_utilisation"]),
            _ms(run.mean),
            _ms(total["latency_p99_s"]),
        )


def cases() -> Iterator[Sequence[str]]:
    yield ("case", "room", "policy", "hit rate", "loads /s", "bytes /s", "link busy", "mean latency", "p99")
    for name in CASES:
        yield from case(name)


def line(cells: Sequence[str]) -> str:
    """As in the page."""
    return f"| {' | '.join(cells)} |"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _ms(value: float) -> str:
    return f"{1e3 * value:.0f} ms"


# --- picture -------------------------------------------------------------------------------------------------


def picture(curves: Mapping[float, Curves]) -> Figure:
    """Hit rates above, latencies below; an exponent in each column."""
    figure = Figure(figsize=(11, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(curves), sharex=True, sharey="row")
    for column, (exponent, those) in enumerate(curves.items()):
        hits, latency = axes[0][column], axes[1][column]
        rooms = [100 * room for room in those]
        for policy in POLICIES:
            totals = [one[policy].total for one in those.values()]
            hits.plot(rooms, [100 * one["hit_ratio"] for one in totals], label=policy, **STYLES[policy])
            latency.plot(rooms, [1e3 * one["latency_p99_s"] for one in totals], **STYLES[policy])
        known = [100 * popular(exponent, room) for room in those]
        hits.plot(rooms, known, label="popularity known", **STYLES["popular"])
        best = [100 * belady(exponent, room) for room in those]
        hits.plot(rooms, best, label="Belady", **STYLES["Belady"])
        _dress(hits, f"Zipf exponent {exponent:g}", "hit rate, %")
        _dress(latency, "", "latency p99, ms")
        latency.set_yscale("log")
        latency.set_yticks([20, 50, 100, 200], labels=["20", "50", "100", "200"])
        latency.minorticks_off()
        latency.set_xlabel("room for weights, % of all")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure


def _dress(axes: Axes, title: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#E5E5E5")
    axes.set_axisbelow(True)


def main() -> None:
    """Makes everything anew."""
    curves = {exponent: {room: at(exponent, room) for room in ROOMS} for exponent in EXPONENTS}
    made = {f"zipf-{exponent:g}": table(curve(exponent, those)) for exponent, those in curves.items()}
    made["cases"] = table(cases())
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    IMAGES.mkdir(exist_ok=True)
    save(picture(curves), IMAGE)


if __name__ == "__main__":
    main()
