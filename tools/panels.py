"""Builder of Grafana's dashboards from short descriptions: a panel's question, queries, unit and advice.

Every query of servers has `worker=~"$worker"`, which is true as well where no gateway adds that label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    GraphThresholdsStyleMode,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)

#: matcher against Triton's metrics of the same name, which have a label `version`: a sum over both would count twice
MIRRORED = {"rsrv_requests_total", "rsrv_device_seconds_total", "rsrv_queue_depth", "rsrv_runtime_up"}
#: labels that identify a server, and their form in a legend
SERVER, SERVER_LEGEND = "instance, worker", "{{worker}} {{instance}}"
#: the same of a device of a server
DEVICE, DEVICE_LEGEND = f"{SERVER}, device", f"{SERVER_LEGEND} {{{{device}}}}"
MODEL_LEGEND = "{{model}}"

_CHOSEN = ('instance=~"$instance"', 'worker=~"$worker"')
_SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
_TAG = "rsrv"


@dataclass(frozen=True)
class Panel:
    """Panel: a question, and its answer over time."""

    title: str
    #: meaning of the figure, and advice
    about: str
    #: Grafana's name of the unit
    unit: str
    #: legend -> query
    queries: Mapping[str, str]
    stacked: bool = False
    #: threshold from which the value is bad
    limit: float | None = None


@dataclass(frozen=True)
class Board:
    uid: str
    title: str
    about: str
    #: title of a row -> its panels
    rows: Mapping[str, Sequence[Panel]]
    #: figures that should be 0: legend -> query
    faults: Mapping[str, str] = field(default_factory=dict)
    #: further variables: name -> query of its values, or the values, the first as default
    choices: Mapping[str, str | Sequence[str]] = field(default_factory=dict)


def series(name: str, *matchers: str) -> str:
    """Restrict a metric to the chosen servers."""
    version = ('version=""',) if name in MIRRORED else ()
    return f"{name}{{{','.join((*matchers, *version, *_CHOSEN))}}}"


def rate(name: str, *matchers: str) -> str:
    return f"rate({series(name, *matchers)}[$__rate_interval])"


def increase(name: str, over: str = "$__rate_interval") -> str:
    return f"increase({series(name)}[{over}])"


def total(expression: str, by: str = "") -> str:
    return f"sum by ({by}) ({expression})" if by else f"sum({expression})"


def top(expression: str) -> str:
    """Return the query of the ten largest."""
    return f"topk(10, {expression})"


def quantile(share: str, name: str, *matchers: str, by: str = "") -> str:
    """Return the query of a histogram's quantile: NaN, which is not drawn, without observations."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {total(rate(f'{name}_bucket', *matchers), labels)})"


def gateway(name: str, *matchers: str) -> str:
    """Return a gateway's own metric; its instance differs from its servers'."""
    return f"{name}{{{','.join((*matchers, _CHOSEN[1]))}}}"


def gateway_rate(name: str, *matchers: str) -> str:
    return f"rate({gateway(name, *matchers)}[$__rate_interval])"


def or_zero(expression: str) -> str:
    return f"{expression} or vector(0)"


def grafana(board: Board) -> str:
    """Return the dashboard as Grafana's JSON."""
    made = (
        build.Dashboard(board.title)
        .uid(board.uid)
        .description(board.about)
        .tags([_TAG])
        .readonly()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(
            build.DashboardLink("rsrv")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([_TAG])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(
            build.DatasourceVariable("datasource")
            .label("source")
            .type("prometheus")
            .current(model.VariableOption(text="Prometheus", value="prometheus"))
        )
    )
    for name, values in board.choices.items():
        made = made.with_variable(
            _query(name, values)
            if isinstance(values, str)
            else build.CustomVariable(name).values(",".join(values))
        )
    for label in ("instance", "worker"):
        made = made.with_variable(
            _query(label, f"label_values(rsrv_build_info, {label})")
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(model.VariableOption(text=["All"], value=["$__all"]))
        )
    numbers = count(1)
    if board.faults:
        made = made.with_panel(_faults(board.faults).id(next(numbers)))
    for title, panels in board.rows.items():
        made = made.with_row(build.Row(title).id(next(numbers)))
        for panel in panels:
            made = made.with_panel(_panel(panel).id(next(numbers)))
    return str(JSONEncoder(sort_keys=True, indent=2).encode(made.build())) + "\n"


def _query(name: str, query: str) -> build.QueryVariable:
    return (
        build.QueryVariable(name)
        .datasource(_SOURCE)
        .query(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_CASE_INSENSITIVE_ASC)
    )


def _panel(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.about)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .min(0)
        .height(8)
        .span(8)
        .fill_opacity(25 if panel.stacked else 0)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if panel.stacked:
        made = made.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    if panel.limit is not None:
        made = made.thresholds(_thresholds(panel.limit)).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)
        )
    if MODEL_LEGEND in panel.queries:
        link = build.DashboardLink("the model's dashboard").url(
            "/d/rsrv-model?var-model=${__field.labels.model}&${__url_time_range}"
        )
        made = made.data_links([link])
    return made.targets([one.range() for one in _targets(panel.queries)])


def _faults(faults: Mapping[str, str]) -> stat.Panel:
    return (
        stat.Panel()
        .title("Wrong now")
        .description(
            "All are 0 when all is well. The alerts name the servers and models, and say what to do."
        )
        .datasource(_SOURCE)
        .unit("short")
        .decimals(0)
        .height(4)
        .span(24)
        .color_mode(BigValueColorMode.BACKGROUND)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(BigValueGraphMode.NONE)
        .thresholds(_thresholds(0.5))
        .targets([one.instant() for one in _targets(faults)])
    )


def _targets(queries: Mapping[str, str]) -> list[Dataquery]:
    return [
        Dataquery().expr(query).legend_format(legend).ref_id(letter)
        for letter, (legend, query) in zip(ascii_uppercase, queries.items(), strict=False)
    ]


def _thresholds(limit: float) -> build.ThresholdsConfig:
    return (
        build.ThresholdsConfig()
        .mode(model.ThresholdsMode.ABSOLUTE)
        .steps([model.Threshold(value=None, color="green"), model.Threshold(value=limit, color="red")])
    )
