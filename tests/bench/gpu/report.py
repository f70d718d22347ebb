"""The results as text for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench.gpu.numerics import Product
from tests.bench.gpu.serving import Cold, Traffic, Turns
from tests.bench.gpu.transfer import LIMIT, Rate
from tests.bench.report import table


def rates_table(rates: Sequence[Rate]) -> str:
    """Return one line for each way; the share is of the limit for the same tensors, both as medians."""
    limits = {rate.tensors: rate.median for rate in rates if rate.way == LIMIT}
    rows = [
        [
            rate.way,
            str(rate.tensors),
            f"{rate.nbytes / 1e9:g}",
            f"{rate.median / 1e9:.2f}",
            f"{rate.best / 1e9:.2f}",
            f"{rate.median / limits[rate.tensors]:.0%}",
        ]
        for rate in rates
    ]
    return table(["host to device", "tensors", "GB", "GB/s median", "best", "of the limit"], rows)


def products_table(products: Sequence[Product]) -> str:
    rows = [[one.module, one.treatment, one.precision, one.computes] for one in products]
    return table(["512 x 512 of f32", "treatment", "what is in it then", "computed in"], rows)


def cold_table(results: Sequence[Cold]) -> str:
    rows = [
        [
            f"{c.nbytes / 1e6:g}",
            f"{c.cold_s * 1e3:.2f}",
            f"{c.warm_s * 1e3:.2f}",
            f"{c.floor_s * 1e3:.2f}",
            f"{c.efficiency:.0%}",
        ]
        for c in results
    ]
    return table(["evicted to answered, MB", "cold ms", "warm ms", "floor ms", "floor / added"], rows)


def turns_table(results: Sequence[Turns]) -> str:
    rows = [
        [
            f"{t.models} models, {t.fit} fit",
            f"{t.nbytes / 1e6:g}",
            f"{t.compute_s * 1e3:.1f}",
            f"{t.transfer_s * 1e3:.1f}",
            f"{t.calls_per_s:.1f}",
            f"{t.loads_per_s:.1f}",
            f"{t.serial:.1f}",
            f"{t.overlapped:.1f}",
        ]
        for t in results
    ]
    headers = ["in turns", "MB each", "call ms", "transfer ms", "calls/s", "loads/s", "serial", "overlapped"]
    return table(headers, rows)


def traffic_table(t: Traffic) -> str:
    rows = [
        ["models", f"{t.models} x {t.nbytes / 1e6:g} MB, {t.budget / 1e6:g} MB fit"],
        ["registered in s", f"{t.register_s:.1f}"],
        ["answered/s, all right", f"{t.answered_per_s:.0f}"],
        ["hit rate", f"{t.hit_rate:.1%}"],
        ["loaded GB/s", f"{t.loaded_bytes_per_s / 1e9:.2f}"],
        ["p50, p99 ms", f"{t.p50_s * 1e3:.1f}, {t.p99_s * 1e3:.1f}"],
    ]
    return table([f"Zipf traffic, {t.clients} at a time", ""], rows)
