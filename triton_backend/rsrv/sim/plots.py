"""Pictures of simulations and replays.

A simulation of one device has latency.png, shares.png and timeline.png, in which each model has the same colour. A simulation of
several devices has modes.png. A comparison of idle limits has idle.png. A replay has latency.png, real and simulated.

The figures are drawn without pyplot, so nothing is global and no display is needed. The colours are those of M. Okabe and K. Ito
(Color Universal Design, 2008), which colour-blind people can distinguish.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rsrv.scheduler.events import Outcome
from rsrv.sim.record import FleetRecord, Record, RequestRecord
from rsrv.sim.sweep import IdleSweep

_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_OTHERS = "#BBBBBB"
#: Colours on which dark digits are legible.
_LIGHT = ("#E69F00", "#56B4E9", "#F0E442", _OTHERS)
_ALL = "#333333"
_MODES = {"round_robin": "#CC79A7", "least_outstanding": "#E69F00", "lpt_packing": "#0072B2"}
#: Number of windows in shares.png.
_WINDOWS = 60
#: Number of executions and loads in the timeline if no window is given. A reader can distinguish about this many.
_BARS = 60
#: Maximum number of bars in a row of the timeline. If a window has more, the first ones are drawn.
_MOST_BARS = 20_000
#: Maximum number of steps of a curve. This is more than a picture can show.
_STEPS = 10_000
#: Maximum number of characters of a model's name in a legend.
_NAME = 24


def write_plots(record: Record, out: Path, window: tuple[float, float] | None = None) -> list[Path]:
    """Write the pictures into `out`, and return their paths. timeline.png shows `window`, in seconds."""
    colours = _colours(record)
    figures = {
        "latency.png": _latency(record, colours),
        "shares.png": _shares(record, colours),
        "timeline.png": _timeline(record, colours, window),
    }
    paths = []
    for name, figure in figures.items():
        paths.append(save(figure, out / name, dpi=150))
    return paths


def write_sweep_plot(sweep: IdleSweep, runs: Mapping[str, Mapping[str, Any]], out: Path) -> Path:
    """Write idle.png: latency and memory by idle limit, in the order given."""
    figure, axes = _figure(5, f"Latency and memory by idle.{sweep.tier}")
    totals = [run["total"] for run in runs.values()]
    for key, colour in (("latency_p99_s", _PALETTE[0]), ("latency_p50_s", _PALETTE[4])):
        times = [1e3 * (total[key] or np.nan) for total in totals]
        axes.plot(list(runs), times, marker="o", color=colour, label=key.split("_")[1])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel("latency in ms")
    axes.set_xlabel(f"idle.{sweep.tier}")
    memory = axes.twinx()
    memory.spines["top"].set_visible(False)
    for key, colour in (("host_bytes_mean", _PALETTE[1]), ("device_bytes_mean", _PALETTE[2])):
        gigabytes = [(total[key] or 0) / 1e9 for total in totals]
        memory.plot(
            list(runs),
            gigabytes,
            marker="s",
            linestyle="--",
            color=colour,
            label=f"{key.split('_')[0]} memory",
        )
    memory.set_ylabel("mean weights in memory, GB")
    memory.set_ylim(bottom=0.0)
    figure.legend(loc="outside upper right", ncols=4, frameon=False)
    return save(figure, out / "idle.png", dpi=150)


def write_replay_plot(
    real: Sequence[RequestRecord], simulated: Sequence[RequestRecord] | None, out: Path
) -> Path:
    """Write latency.png of a replay: the answers of a server, and the simulator's answers as dashed lines if there are any."""
    figure, axes = _figure(5, "Latency of answered requests")
    counts = Counter(request.request.model for request in real)
    colours = dict(zip((name for name, _ in counts.most_common(len(_PALETTE))), _PALETTE, strict=False))
    drawn = _draw_latencies(axes, real, colours, len(counts))
    drawn |= _draw_latencies(axes, simulated or (), colours, len(counts), "simulated", "--")
    _label_latencies(axes, drawn)
    return save(figure, out / "latency.png", dpi=150)


def write_fleet_plots(
    records: Mapping[str, FleetRecord], summaries: Mapping[str, Mapping[str, Any]], out: Path
) -> Path:
    """Write modes.png, which compares the runs of several modes."""
    return save(fleet_figure(records, summaries), out / "modes.png")


def save(figure: Figure, path: Path, dpi: int = 100) -> Path:
    """Write the figure to the path, and return the path. Without matplotlib's version, equal figures give equal files."""
    figure.savefig(path, dpi=dpi, metadata={"Software": None})
    return path


def _colours(record: Record) -> dict[str, str]:
    """Return a colour for each of the models that took the most device time, in listing order."""
    seconds = dict.fromkeys(record.scenario.programs, 0.0)
    for execution in record.executions:
        seconds[execution.execute.model] += execution.ended - execution.started
    most = sorted(seconds, key=lambda name: -seconds[name])[: len(_PALETTE)]
    shown = [name for name in record.scenario.programs if name in set(most)]
    return dict(zip(shown, _PALETTE, strict=False))


def _figure(rows: int, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(10, rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _latency(record: Record, colours: Mapping[str, str]) -> Figure:
    figure, axes = _figure(5, f"Latency of answered requests ({record.scenario.discipline})")
    drawn = _draw_latencies(axes, record.requests, colours, len(record.scenario.programs))
    _label_latencies(axes, drawn)
    return figure


def _draw_latencies(
    axes: Axes,
    requests: Sequence[RequestRecord],
    colours: Mapping[str, str],
    models: int,
    how: str = "",
    style: str = "-",
) -> bool:
    """Draw a line for each model with a colour, and a line for all models if there are several.

    Return whether any request was answered.
    """
    by_model: dict[str, list[float]] = {name: [] for name in colours}
    everyone: list[float] = []
    for sent in requests:
        if sent.outcome is Outcome.ANSWERED:
            everyone.append(sent.ended - sent.arrived)
            if sent.request.model in by_model:
                by_model[sent.request.model].append(sent.ended - sent.arrived)
    lines = [(_short(name), latencies, colours[name], 1.6) for name, latencies in by_model.items()]
    if models > 1:
        lines.append((f"all {models} models", everyone, _ALL, 2.4))
    for label, latencies, colour, width in lines:
        _cdf(axes, latencies, f"{label}, {how}" if how else label, colour, width, style)
    return bool(everyone)


def _label_latencies(axes: Axes, drawn: bool) -> None:
    if drawn:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _legend(axes)
    else:
        _remark(axes, "no request was answered")
    axes.set_ylim(0.0, 1.02)
    axes.set_xlabel("latency in ms, from arrival to answer")
    axes.set_ylabel("share of requests that took at most this")
    axes.grid(visible=True, which="major", color="#E5E5E5")
    axes.set_axisbelow(True)


def _cdf(axes: Axes, latencies: Sequence[float], label: str, colour: str, width: float, style: str) -> None:
    if not latencies:
        return
    values, counts = np.unique(1e3 * np.array(latencies), return_counts=True)
    shares = np.cumsum(counts) / counts.sum()
    # The curve has a step at each value, and starts at 0.
    keep = np.unique(np.linspace(0, len(values) - 1, _STEPS).astype(int))
    steps = np.concatenate([values[:1], values[keep]]), np.concatenate([[0.0], shares[keep]])
    axes.plot(*steps, drawstyle="steps-post", label=label, color=colour, linewidth=width, linestyle=style)


def _shares(record: Record, colours: Mapping[str, str]) -> Figure:
    figure, axes = _figure(5, f"Share of device time ({record.scenario.discipline})")
    end = max((execution.ended for execution in record.executions), default=0.0)
    if end:
        edges = np.linspace(0.0, end, _WINDOWS + 1)
        centres = (edges[:-1] + edges[1:]) / 2
        labels = [*colours, None] if len(record.scenario.programs) > len(colours) else [*colours]
        shares = [_busy(record, name, colours, edges) for name in labels]
        names = [
            f"{len(record.scenario.programs) - len(colours)} others" if n is None else _short(n)
            for n in labels
        ]
        axes.stackplot(
            # Draw each window as a step from its left edge to its right edge.
            np.repeat(edges, 2)[1:-1],
            [np.repeat(share, 2) for share in shares],
            labels=names,
            colors=[_OTHERS if name is None else colours[name] for name in labels],
            linewidth=0,
        )
        axes.set_xlim(0.0, end)
        axes.set_xlabel(f"time in s, in {len(centres)} windows of {end / _WINDOWS:.3g} s")
        _legend(axes)
    else:
        _remark(axes, "nothing was executed")
    axes.set_ylim(0.0, 1.0)
    axes.set_ylabel("share of each window")
    return figure


def _busy(record: Record, name: str | None, colours: Mapping[str, str], edges: np.ndarray) -> np.ndarray:
    """Return for each window the share of time in which the device executed a model, or the models without a colour (None)."""
    mine = [
        (execution.started, execution.ended)
        for execution in record.executions
        if execution.execute.model == name or (name is None and execution.execute.model not in colours)
    ]
    if not mine:
        return np.zeros(len(edges) - 1)
    # The device time up to t grows from the start to the end of each execution, and is constant between executions.
    times = np.array(mine).ravel()
    used = np.concatenate([[0.0], np.cumsum(np.diff(times)[::2])])
    until = np.column_stack([used[:-1], used[1:]]).ravel()
    busy: np.ndarray = np.diff(np.interp(edges, times, until)) / np.diff(edges)
    return busy


def _timeline(record: Record, colours: Mapping[str, str], window: tuple[float, float] | None) -> Figure:
    figure, axes = _figure(3, f"Device and link ({record.scenario.discipline})")
    start, end = window or _first(record)
    executions = [
        (execution.execute.model, execution.started, execution.ended, str(execution.execute.rows))
        for execution in record.executions
    ]
    loads = [(load.model, load.started, load.ended, "") for load in record.loads]
    shown: dict[str, str] = {}
    for row, bars in ((1.0, executions), (0.0, loads)):
        inside = [bar for bar in bars if bar[1] < end and bar[2] > start][:_MOST_BARS]
        axes.broken_barh(
            [(bar[1], bar[2] - bar[1]) for bar in inside],
            (row - 0.36, 0.72),
            facecolors=[colours.get(bar[0], _OTHERS) for bar in inside],
            edgecolors="white",
            linewidth=0.6 if len(inside) <= 2 * _BARS else 0.0,
        )
        for name, began, ended, rows in inside:
            colour = colours.get(name, _OTHERS)
            shown[name if name in colours else ""] = colour
            left, right = max(began, start), min(ended, end)
            # Write the rows of the execution if there is room for the digits.
            if (right - left) > 0.013 * len(rows) * (end - start):
                axes.text(
                    (left + right) / 2,
                    row,
                    rows,
                    ha="center",
                    va="center",
                    fontsize=8,
                    color=_ALL if colour in _LIGHT else "white",
                )
    axes.set_xlim(start, end)
    axes.set_ylim(-0.6, 1.6)
    axes.set_yticks([1.0, 0.0], ["executions", "loads"])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time in s; the number on an execution is its useful rows")
    if shown:
        order = [name for name in colours if name in shown] + ([""] if "" in shown else [])
        handles = [Patch(color=shown[name], label=_short(name) or "others") for name in order]
        _legend(axes, handles)
    else:
        _remark(axes, "nothing happened in this window")
    return figure


def _first(record: Record) -> tuple[float, float]:
    """Return the window from 0 to the end of the execution or load with the number `_BARS`."""
    ends = sorted(
        [execution.ended for execution in record.executions] + [load.ended for load in record.loads]
    )
    return (0.0, ends[min(len(ends), _BARS) - 1] or 1.0) if ends else (0.0, 1.0)


def _legend(axes: Axes, handles: Sequence[Patch] | None = None) -> None:
    options = {} if handles is None else {"handles": handles}
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, **options)


def _remark(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=_ALL)


def _short(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."


# --- several devices --------------------------------------------------------------------------------------


def fleet_figure(records: Mapping[str, FleetRecord], summaries: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw the latency of requests, and how busy each device is."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for mode, record in records.items():
        _latency_of_mode(left, mode, record)
        _busy_devices(right, mode, summaries[mode])
    _finish(left, "Latency of all requests", "latency in ms", "answered within this, %")
    _finish(right, "Devices, the busiest first", "share of the devices, %", "busy, % of the time")
    left.set_xscale("log")
    left.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure


def _latency_of_mode(axes: Axes, mode: str, record: FleetRecord) -> None:
    """Draw the distribution of latencies. If there are unanswered requests, the curve ends below 100 %."""
    latencies = np.sort(
        [1e3 * (sent.ended - sent.arrived) for sent in record.requests if sent.outcome is Outcome.ANSWERED]
    )
    keep = np.unique(np.linspace(0, max(len(latencies) - 1, 0), _STEPS).astype(int))[: len(latencies)]
    shares = 100 * (keep + 1) / max(len(record.requests), 1)
    axes.plot(latencies[keep], shares, label=mode, color=_MODES[mode], linewidth=1.8)


def _busy_devices(axes: Axes, mode: str, summary: Mapping[str, Any]) -> None:
    busy = sorted(
        (100 * (device["utilisation"] or 0.0) for device in summary["devices"].values()), reverse=True
    )
    edges = np.linspace(0.0, 100.0, len(busy) + 1)
    axes.plot(np.repeat(edges, 2)[1:-1], np.repeat(busy, 2), color=_MODES[mode], linewidth=1.8)


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(0.0, 102.0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#E5E5E5")
    axes.set_axisbelow(True)
