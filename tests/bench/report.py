"""The results as text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from tests.bench.figures import Rounds, Sample, Spread, Swapping, Target, summed_sizes
from tests.bench.processes import CLIENT, RUNTIME, SERVER, STUB

ROLES = (SERVER, STUB, RUNTIME, CLIENT)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a text with columns that are as wide as needed. The first column is aligned left, the others are aligned right."""
    widths = [max(len(line[i]) for line in (headers, *rows)) for i in range(len(headers))]
    lines = []
    for line in (headers, *rows):
        first, *others = (
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join((first, *others)).rstrip())
    return "\n".join(lines)


def spread_text(spread: Spread, digits: int = 2) -> str:
    """Return "median (low-high)"."""
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}-{spread.high:.{digits}f})"


def sizes_text(sizes: Mapping[int, int]) -> str:
    """Return the share of each compiled size in the executions."""
    total = sum(sizes.values())
    return ", ".join(f"{size}: {count / total:.0%}" for size, count in sizes.items() if count) or "-"


def load_table(rounds: Rounds, cases: Sequence[tuple[str, int]]) -> str:
    """Return a table with a line for each pair of side and clients. Figures are medians over the rounds."""
    headers = ["", "clients", "infer/s", "p50 us", "p99 us", *(f"{role} us" for role in ROLES)]
    headers += ["server total us", "per execute()", "per execution"]
    return table(headers, [_load_row(rounds, side, clients) for side, clients in cases])


def _load_row(rounds: Rounds, side: str, clients: int) -> list[str]:
    def middle(value: Sequence[float]) -> str:
        return f"{Spread.of(value).median:.0f}"

    samples = rounds.of_side(side, clients)
    row = [side, str(clients), middle([s.infer_per_s for s in samples])]
    row += [middle([s.p50_us for s in samples]), middle([s.p99_us for s in samples])]
    for role in ROLES:
        row.append(middle([s.cpu_us[role] for s in samples]) if role in samples[0].cpu_us else "-")
    row.append(middle([server_cpu(s) for s in samples]))
    row.append(f"{Spread.of(s.triton_batch for s in samples).median:.1f}")
    batches = [s.device_batch for s in samples if s.device_batch is not None]
    row.append(f"{Spread.of(batches).median:.1f}" if batches else "-")
    return row


def server_cpu(sample: Sample) -> float:
    """Return the CPU microseconds per request of all processes except the client."""
    return sum(value for role, value in sample.cpu_us.items() if role != CLIENT)


def sizes_lines(rounds: Rounds, cases: Sequence[tuple[str, int]]) -> str:
    """Return the compiled sizes that the runtime used. Each case with a runtime has a line."""
    lines = []
    for side, clients in cases:
        if sizes := summed_sizes(rounds.of_side(side, clients)):
            lines.append(f"sizes of {side} at {clients} clients: {sizes_text(sizes)}")
    return "\n".join(lines)


def busy_table(rounds: Rounds, sides: Sequence[str], clients: int) -> str:
    """Return a table with a line for each setting of the stub, and for the native front."""
    headers = ["in_place_ms", "busy share", "infer/s", "p50 ms", "p99 ms", *(f"{r} us" for r in ROLES)]
    headers.append("per execution")
    rows = []
    for side in sides:
        samples = rounds.of_side(side, clients)
        share = Spread.of(100 * (s.busy or 0) for s in samples)
        row = [side, f"{spread_text(share, 0)} %", f"{Spread.of(s.infer_per_s for s in samples).median:.0f}"]
        row += [f"{Spread.of(s.p50_us / 1e3 for s in samples).median:.1f}"]
        row += [f"{Spread.of(s.p99_us / 1e3 for s in samples).median:.1f}"]
        row += [f"{Spread.of(s.cpu_us.get(role, 0) for s in samples).median:.0f}" for role in ROLES]
        row += [f"{Spread.of(s.device_batch or 0 for s in samples).median:.1f}"]
        rows.append(row)
    return table(headers, rows)


def swapping_table(sides: Mapping[str, Sequence[Swapping]]) -> str:
    """Return a table of loads and evictions of weights. Each side has a line with medians over the rounds."""
    headers = ["", "loads/s", "evictions/s", "requests per load", "hit rate", "device busy"]
    rows = []
    for name, samples in sides.items():
        loads = Spread.of(s.loads / s.seconds for s in samples).median
        evictions = Spread.of(s.evictions / s.seconds for s in samples).median
        per_load = Spread.of(s.answered / s.loads if s.loads else inf for s in samples).median
        hits = Spread.of(100 * s.hit_rate for s in samples)
        busy = Spread.of(100 * (s.busy or 0) for s in samples).median
        row = [name, f"{loads:.0f}", f"{evictions:.0f}", f"{per_load:.1f}"]
        rows.append([*row, f"{spread_text(hits, 0)} %", f"{busy:.0f} %"])
    return table(headers, rows)


def targets_table(targets: Sequence[Target]) -> str:
    """Return a table that shows each target, and whether it was reached."""
    rows = [
        [t.name, f"{t.value:.2f}", f"{'>=' if t.at_least else '<='} {t.limit:.2f}", t.verdict()]
        for t in targets
    ]
    return table(["target", "measured", "wanted", ""], rows)


def rounds_line(rounds: Rounds) -> str:
    """Return a line with the number of valid rounds, and how quiet the machine was."""
    steal = Spread.of(sample.steal_cpus for sample in rounds.samples)
    other = Spread.of(sample.other_cpus for sample in rounds.samples)
    text = f"{rounds.kept} rounds, {rounds.dropped} dropped for steal"
    if rounds.noisy:
        text += "; ALL rounds had too much steal, so none was dropped"
    return (
        f"{text}; CPUs stolen: median {steal.median:.2f}, most {steal.high:.2f};"
        f" CPUs used by others: median {other.median:.2f}, most {other.high:.2f}"
    )
