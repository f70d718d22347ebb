"""Page about a bundle, as plain text, for `rsrv-bundle show`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rsrv.text import amount, one_line

#: Text that explains the figures about a module's work, by the value of `describing.Costs`.
_COUNTED = {
    "stablehlo": "FLOPs and bytes moved: XLA's count for one execution, over the module as it is stored, before"
    " optimisation.\nA loop of unknown length counts once.",
    "compiled": "FLOPs, bytes moved and scratch memory: the compiler's own account of one execution, for this machine's"
    " device.\nA loop of unknown length counts once.",
    "none": "FLOPs and bytes moved are not counted; with jax they are.",
}


def page(description: Mapping[str, Any]) -> str:
    """Return the page of a description from `describing.describe`. Text from the bundle cannot control a terminal."""
    return "\n".join(_lines(description)).rstrip() + "\n"


def as_json(description: Mapping[str, Any]) -> str:
    return json.dumps(description, indent=2, default=str) + "\n"


def _lines(description: Mapping[str, Any]) -> Iterator[str]:
    more = ", internal" if description["internal"] else ""
    if description.get("meta", {}).get("restartable"):
        more += ", restartable"
    yield f"{description['name']}: {description['kind']}, format {description['format_version']}{more}"
    if description["description"]:
        yield one_line(description["description"])
    yield f"sha256 {description['sha256']}"
    yield from _section("Clients send", _tensors(description["client_inputs"]))
    yield from _section("Clients get", _tensors(description["client_outputs"]))
    if "meta" in description:
        yield from _section("Calls", [(name,) for name in description["meta"]["calls"]])
        yield from _section("Calls outside of rsrv", [(name,) for name in description["meta"]["external"]])
    else:
        if description["executable_inputs"] != description["client_inputs"]:
            yield from _section("Modules take", _tensors(description["executable_inputs"]))
        if description["executable_outputs"] != description["client_outputs"]:
            yield from _section("Modules return", _tensors(description["executable_outputs"]))
        yield from _section("Variants", _variants(description["variants"]))
        yield from _section("Padded axis", list(_flat(description.get("pad", {}))))
        yield from _section("Modules", _modules(description["modules"]), head=True)
        yield from (f"  {line}" for line in _COUNTED[description["costs"]].splitlines())
        yield from _weights(description["weights"])
        if state := description.get("state"):
            yield from _state(state)
        yield from _section("Generates", list(_flat(description.get("generate", {}))))
    yield from _section("Task", list(_flat(description.get("task", {}))))
    yield from _section("Hooks", [(name,) for name in description["hooks"]])
    yield from _section("Other files", [(name, amount(size)) for name, size in description["files"].items()])
    yield from _section("Numerics", list(_flat(description["numerics"])))
    yield from _section("Provenance", list(_flat(description["provenance"])))


def _section(title: str, rows: Sequence[Sequence[str]], *, head: bool = False) -> Iterator[str]:
    """Yield a title and its rows with aligned columns. Without rows, yield nothing."""
    if not rows:
        return
    yield ""
    yield title
    yield from (f"  {line}" for line in table(rows, head=head))


def table(rows: Sequence[Sequence[str]], *, head: bool = False) -> Iterator[str]:
    """Yield lines of aligned columns. Columns of numbers are aligned to the right. With `head`, the first row is a heading."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    body = rows[1:] if head else rows
    numbers = [all(row[i][:1].isdigit() or row[i] in ("", "-") for row in body) for i in range(len(widths))]
    for row in rows:
        cells = [
            cell.rjust(width) if right and head else cell.ljust(width)
            for cell, width, right in zip(row, widths, numbers, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _tensors(specs: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [(spec["name"], spec["dtype"], shape(spec)) for spec in specs]


def shape(spec: Mapping[str, Any]) -> str:
    """Return a shape such as `[n, h=28, w=any]`, with the letter of the batch axis, and the sizes of all other axes."""
    axes = [
        letter if axis == spec["batch_axis"] else f"{letter}={'any' if size == -1 else size}"
        for axis, (letter, size) in enumerate(zip(spec["shape"], spec["dims"], strict=True))
    ]
    return f"[{', '.join(axes)}]"


def _variants(variants: Iterable[Mapping[str, int]]) -> list[tuple[str, ...]]:
    return [
        (f"v{number}", ", ".join(f"{letter}={size}" for letter, size in sizes.items()))
        for number, sizes in enumerate(variants)
    ]


def _modules(modules: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each module, with a column for each figure that at least one module has."""
    columns: dict[str, tuple[str, Callable[[Any], str]]] = {
        "batch_size": ("rows", str),
        "bytes": ("size", amount),
        "stablehlo": ("StableHLO", str),
        "input_bytes": ("inputs", amount),
        "output_bytes": ("outputs", amount),
        "flops": ("FLOPs", lambda count: amount(count, "")),
        "bytes_accessed": ("moved", amount),
        "scratch_bytes": ("scratch", amount),
    }
    shown = [key for key in columns if any(module.get(key) is not None for module in modules)]
    rows = [("file", *(columns[key][0] for key in shown))]
    for module in modules:
        cells = ("-" if module.get(key) is None else columns[key][1](module[key]) for key in shown)
        rows.append((module["file"], *cells))
    return rows


def _weights(weights: Mapping[str, Any]) -> Iterator[str]:
    by_dtype = ", ".join(
        f"{figures['count']} {dtype} ({amount(figures['bytes'])})"
        for dtype, figures in weights["dtypes"].items()
    )
    yield ""
    before = f", {amount(weights['bytes_before'])} before narrowing" if "bytes_before" in weights else ""
    yield f"Weights: {weights['count']}, {amount(weights['bytes'])}{before}" + (
        f": {by_dtype}" if by_dtype else ""
    )
    largest = weights["largest"]
    if largest and weights["count"] > len(largest):
        yield f"  the {len(largest)} largest:"
    rows = [
        (weight["name"], weight["dtype"], str(weight["dims"]), amount(weight["bytes"])) for weight in largest
    ]
    yield from (f"  {line}" for line in table(rows)) if rows else ()


def _state(state: Mapping[str, Any]) -> Iterator[str]:
    slots = f"{state['slots']} slots of {amount(state['slot_bytes'])}, {amount(state['pool_bytes'])}"
    when = f"idle sequences end after {state['idle_timeout_s']:g} s; if all slots are taken: {state['when_full']}"
    rows = [(tensor["name"], tensor["dtype"], str(tensor["dims"])) for tensor in state["tensors"]]
    yield from _section(f"State: {slots}; {when}", rows)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", f"{value:.3g}" if isinstance(value, float) else str(value)
