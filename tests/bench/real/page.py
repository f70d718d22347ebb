"""From measurements to the tables of docs/benchmark.md. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

#: rows of a request -> rows per second, of each round; nothing where there is no such thing
Rates = Mapping[int, Sequence[float]]


@dataclass(frozen=True)
class Line:
    """What was measured of a model."""

    title: str
    source: str
    unit: str
    export_seconds: float
    bundle_bytes: int
    #: compiled size -> the largest error of any output and variant, relative to the output's largest magnitude
    errors: Mapping[int, float]
    served: Rates
    eager: Rates
    compiled: Rates


def exported(lines: Sequence[Line]) -> Iterator[Sequence[str]]:
    """What exporting costs, and how exact it is."""
    yield ("model", "written in", "export, s", "bundle, MB", "largest error, by batch size")
    for line in lines:
        errors = ", ".join(f"{size}: {_error(value)}" for size, value in sorted(line.errors.items()))
        yield (
            f"`{line.title}`",
            line.source,
            f"{line.export_seconds:.1f}",
            f"{line.bundle_bytes / 1e6:.2f}",
            errors or "—",
        )


def served(lines: Sequence[Line]) -> Iterator[Sequence[str]]:
    """Rows per second, at both sizes of requests: one line for each."""
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
    """The median."""
    if not rates:
        return "—"
    value = median(rates)
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _ratio(over: Sequence[float], under: Sequence[float]) -> str:
    """Of the two in each round: the median, the lowest and the highest."""
    if not under:
        return "—"
    ratios = [one / other for one, other in zip(over, under, strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
