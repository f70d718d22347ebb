"""Make the tables of docs/benchmark.md from measurements. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

#: Rows per second of each round, by the number of rows in a request. A number of rows that is impossible is missing.
Rates = Mapping[int, Sequence[float]]


@dataclass(frozen=True)
class Line:
    """The measurements of a model."""

    title: str
    source: str
    unit: str
    export_seconds: float
    bundle_bytes: int
    #: Largest error of all outputs and variants, relative to the output's largest magnitude, by compiled size.
    errors: Mapping[int, float]
    served: Rates
    eager: Rates
    compiled: Rates


def exported(lines: Sequence[Line]) -> Iterator[Sequence[str]]:
    """Yield the rows of the table of export time and exactness."""
    yield ("model", "written in", "export, s", "bundle, MB", "largest error")
    for line in lines:
        yield (
            f"`{line.title}`",
            line.source,
            f"{line.export_seconds:.1f}",
            f"{line.bundle_bytes / 1e6:.2f}",
            _error(max(line.errors.values())) if line.errors else "—",
        )


def served(lines: Sequence[Line]) -> Iterator[Sequence[str]]:
    """Yield the rows of the table of rows per second. Each model has a row for each number of rows in a request."""
    yield (
        "model",
        "in a request",
        "Triton, /s",
        "eager PyTorch, /s",
        "ratio",
        "compiled, no server, /s",
        "ratio",
    )
    for line in lines:
        for rows, rates in sorted(line.served.items()):
            eager, compiled = line.eager.get(rows, ()), line.compiled.get(rows, ())
            yield (
                f"`{line.title.partition(' ')[0]}`",
                f"{rows} {line.unit if rows > 1 else line.unit.removesuffix('s')}",
                _rate(rates),
                _rate(eager),
                _ratio(rates, eager),
                _rate(compiled),
                _ratio(rates, compiled),
            )


def _error(value: float) -> str:
    return f"{value:.1g}" if value else "0"


def _rate(rates: Sequence[float]) -> str:
    """Return the median as text."""
    if not rates:
        return "—"
    value = median(rates)
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _ratio(over: Sequence[float], under: Sequence[float]) -> str:
    """Return the ratio of the two rates as text: the median of the rounds, the lowest and the highest ratio."""
    if not under:
        return "—"
    ratios = [above / below for above, below in zip(over, under, strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
