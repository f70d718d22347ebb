"""One picture of a simulation of several devices: modes.png. Colours are those of `plots`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rsrv.scheduler.events import Outcome
from rsrv.sim.record import FleetRecord

_COLOURS = {"round_robin": "#CC79A7", "least_outstanding": "#E69F00", "lpt_packing": "#0072B2"}
#: steps of a curve, more than a picture shows.
_STEPS = 10_000


def write_fleet_plots(
    records: Mapping[str, FleetRecord], summaries: Mapping[str, Mapping[str, Any]], out: Path
) -> None:
    """Write the picture of these runs, by mode, into `out`."""
    save(picture(records, summaries), out / "modes.png")


def save(figure: Figure, path: Path) -> None:
    """Save without matplotlib's version, so that equal simulations give equal files."""
    figure.savefig(path, dpi=100, metadata={"Software": None})


def picture(records: Mapping[str, FleetRecord], summaries: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw the latency of requests, and how busy each device is."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for mode, record in records.items():
        _latency(left, mode, record)
        _devices(right, mode, summaries[mode])
    _finish(left, "Latency of all requests", "latency in ms", "answered within this, %")
    _finish(right, "Devices, the busiest first", "share of the devices, %", "busy, % of the time")
    left.set_xscale("log")
    left.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure


def _latency(axes: Axes, mode: str, record: FleetRecord) -> None:
    """Draw the distribution of latencies; with unanswered requests the curve ends below 100 %."""
    latencies = np.sort(
        [1e3 * (sent.ended - sent.arrived) for sent in record.requests if sent.outcome is Outcome.ANSWERED]
    )
    keep = np.unique(np.linspace(0, max(len(latencies) - 1, 0), _STEPS).astype(int))[: len(latencies)]
    shares = 100 * (keep + 1) / max(len(record.requests), 1)
    axes.plot(latencies[keep], shares, label=mode, color=_COLOURS[mode], linewidth=1.8)


def _devices(axes: Axes, mode: str, summary: Mapping[str, Any]) -> None:
    busy = sorted((100 * (one["utilisation"] or 0.0) for one in summary["devices"].values()), reverse=True)
    edges = np.linspace(0.0, 100.0, len(busy) + 1)
    axes.plot(np.repeat(edges, 2)[1:-1], np.repeat(busy, 2), color=_COLOURS[mode], linewidth=1.8)


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(0.0, 102.0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#E5E5E5")
    axes.set_axisbelow(True)
