"""Reference for users: the keys of a scenario, from the classes that read them, and the figures in metrics.json.

`python -m rsrv.sim.reference` prints it. A test compares the figures with the figures that a run writes.
"""

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rsrv.sim.schema import (
    Arrivals,
    Bursts,
    ClosedLoop,
    DeviceKeys,
    File,
    GatewayKeys,
    ModelKeys,
    Poisson,
    RequestKeys,
    RuntimeKeys,
    TraceKeys,
    Zipf,
)

#: The title of each table, and the mapping whose keys it lists.
_TABLES: tuple[tuple[str, type[BaseModel]], ...] = (
    ("The file", File),
    ("`device`", DeviceKeys),
    ("`gateway`", GatewayKeys),
    ("`runtime`", RuntimeKeys),
    ("`models.NAME`", ModelKeys),
    ("`arrivals`", Arrivals),
    ("`arrivals.requests[]`", RequestKeys),
    ("`arrivals.poisson`", Poisson),
    ("`arrivals.zipf`", Zipf),
    ("`arrivals.bursts`", Bursts),
    ("`arrivals.closed`", ClosedLoop),
    ("`arrivals.trace`", TraceKeys),
)

#: Figures of metrics.json: their keys, their places, and their meaning.
FIGURES: tuple[tuple[str, str, str], ...] = (
    ("`arrived`", "both", "requests; each attempt of a closed-loop client counts"),
    ("`served`, `shed`, `expired`, `refused`, `cancelled`, `failed`", "both", "requests by outcome"),
    ("`device_seconds`", "both", "device time of executions"),
    ("`share`", "models", "share of all models' device time"),
    (
        "`wait_p50_s`, `wait_p99_s`",
        "both",
        "percentiles, over served requests, of the time from the arrival to the start on the device",
    ),
    (
        "`latency_p50_s`, `latency_p99_s`",
        "both",
        "percentiles, over served requests, of the time from the arrival to the answer",
    ),
    ("`dispatches`", "both", "executions"),
    ("`useful_rows`, `padded_rows`", "both", "executed rows of requests, and executed rows of padding"),
    ("`hit_ratio`", "both", "share of requests that found their weights on the device when they arrived"),
    ("`loads`, `evictions`, `loaded_bytes`", "both", "loads and evictions of weights, and loaded bytes"),
    ("`starts`, `cold`", "both", "cold starts, and requests that waited for one"),
    (
        "`cold_p50_s`",
        "both",
        "median of the time from the arrival to the answer, over served requests that waited for a start",
    ),
    ("`read_bytes`", "both", "weights read from the disk, by starts and loads"),
    (
        "`window_s`, `makespan_s`",
        "total",
        "the window (`duration`, or the makespan if there is none), and the time until the last request ended",
    ),
    ("`utilisation`", "total", "`device_seconds` / `window_s`"),
    ("`goodput`", "total", "requests answered in time and within the window, per second of the window"),
    ("`goodput_ratio`", "total", "requests answered in time, as a share of `arrived`"),
    (
        "`padding_ratio`",
        "total",
        "share of padding in the executed rows; with a padded axis, in the products of rows and lengths",
    ),
    ("`load_seconds`, `link_utilisation`", "total", "link time, and its share of the window"),
    (
        "`host_bytes_mean`, `host_bytes_peak`, `device_bytes_mean`",
        "total",
        "bytes of weights in host memory and on the device",
    ),
    (
        "`jain`, `jain_models`, `jain_seconds`",
        "total",
        "Jain's fairness index of device time by weight, while models compete; the number of counted models, and the seconds",
    ),
)


def reference() -> str:
    """Return Markdown: one table for each mapping of a scenario, and one for metrics.json."""
    return "\n".join([*(line for title, model in _TABLES for line in _table(title, model)), *_figures()])


def _figures() -> Iterator[str]:
    yield "### metrics.json\n"
    yield (
        "Figures of each model, of all (`total`), or of both. Times are in seconds; null means no value. The figures of the device "
        "and the link cover the `duration`. All requests are counted, until their ends.\n"
    )
    yield "| key | in | meaning |"
    yield "|---|---|---|"
    for row in FIGURES:
        yield f"| {' | '.join(row)} |"
    yield ""


def _table(title: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"### {title}\n"
    yield f"{' '.join((model.__doc__ or '').split())}\n"
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    for key, field in model.model_fields.items():
        meaning = " ".join((field.description or "").replace("|", "\\|").split())
        yield f"| `{key}` | {_default(field)} | {meaning} |"
    yield ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory or field.default in (None, [], {}) or isinstance(field.default, BaseModel):
        return ""
    if isinstance(field.default, bool | str):
        return str(field.default).lower()
    return f"{field.default:g}"


if __name__ == "__main__":
    print(reference())
