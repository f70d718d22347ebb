"""The metrics as text for people."""

from collections.abc import Sequence
from typing import Any

from rsrv.text import amount, duration, percent, rate

#: Maximum number of models with a separate line.
_SHOWN = 20


def table(metrics: dict[str, Any]) -> str:
    """Return a summary, and a table of the models that took the most device time."""
    total = metrics["total"]
    ends = ("served", "shed", "expired", "refused", "cancelled", "failed")
    ended = ", ".join(f"{total[end]} {end}" for end in ends if total[end] or end == "served")
    echo = f"{metrics['discipline']}, seed {metrics['seed']}"
    good = f"{rate(total['goodput'])} ({percent(total['goodput_ratio'])})"
    over = f"{total['jain_models']} models, {duration(total['jain_seconds'])}"
    loads = f"{total['loads']} loads ({duration(total['load_seconds'])}, {amount(total['loaded_bytes'])})"
    hits = f"{percent(total['hit_ratio'])} of requests found their weights"
    lines = [
        f"{echo}: {total['arrived']} requests in {duration(total['makespan_s'])}, {ended}",
        f"device busy {percent(total['utilisation'])}, goodput {good}, Jain {_number(total['jain'])} ({over})",
        f"{total['dispatches']} executions, padding {percent(total['padding_ratio'])}, {loads}, "
        + f"{total['evictions']} evictions, {hits}",
    ]
    if total["starts"] or total["read_bytes"]:
        lines.append(
            f"{total['starts']} cold starts, {total['cold']} requests waited for one; "
            f"{amount(total['read_bytes'])} read from the disk; weights in host memory: "
            f"mean {amount(total['host_bytes_mean'])}, peak {amount(total['host_bytes_peak'])}"
        )
    lines.append("")
    head = (
        "model",
        "served",
        "shed",
        "expired",
        "refused",
        "share",
        "wait p50",
        "p99",
        "latency p50",
        "p99",
        "loads",
    )
    models = sorted(metrics["models"].items(), key=lambda item: -item[1]["device_seconds"])
    rows = [_row(name, model) for name, model in models[:_SHOWN]]
    lines.append(aligned([head, *rows, _row("all", total | {"share": None})]))
    if len(models) > _SHOWN:
        lines.append(f"(and {len(models) - _SHOWN} models that took less device time)")
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as lines of text. The first column is aligned to the left, the other columns to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *further = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *further]))
    return "\n".join(lines)


def _row(name: str, of: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        *(str(of[end]) for end in ("served", "shed", "expired", "refused")),
        percent(of["share"]),
        *(duration(of[key]) for key in ("wait_p50_s", "wait_p99_s", "latency_p50_s", "latency_p99_s")),
        str(of["loads"]),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
