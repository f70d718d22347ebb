"""Output of the command `rsrv`: tables for people, JSON for programs."""

import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from rsrv.terminal import STYLES
from rsrv.text import amount, one_line, percent

#: The object that a row of a table describes.
Row = TypeVar("Row")


def to_json(message: Message) -> dict[str, Any]:
    """Return the message as protobuf's JSON, with all fields except absent optional fields and absent messages.

    Integers of 64 bits are numbers and not strings, because no value is too large for programs that have only doubles.
    """
    out: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if _is_map(field):
            out[field.json_name] = {
                str(key): _value(_map_value(field), entry) for key, entry in value.items()
            }
        elif field.is_repeated:
            out[field.json_name] = [_value(field, entry) for entry in value]
        elif not field.has_presence or message.HasField(field.name):
            out[field.json_name] = _value(field, value)
    return out


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _map_value(field: FieldDescriptor) -> FieldDescriptor:
    return field.message_type.fields_by_name["value"]


def _value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return to_json(value)
    if field.enum_type is not None:
        name = field.enum_type.values_by_number.get(value)
        return value if name is None else name.name
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def print_json(message: Message, *, line: bool = False) -> None:
    """Print the message indented. If `line` is True, print it on one line at once, without a buffer."""
    print(json.dumps(to_json(message), indent=None if line else 2), flush=line)


def saved(physical: int, logical: int) -> str:
    """Return the text about the memory that shared tensors save: ` (138 MB without sharing, 73.3% saved)`.

    It is empty if they save at most 1 %.
    """
    if physical >= 0.99 * logical:
        return ""
    return f" ({amount(logical)} without sharing, {percent(1 - physical / logical)} saved)"


def headline(findings: Sequence[tuple[str, str]], more: str) -> str:
    """Return a line with the severest finding, which may be a note. Empty without findings.

    Args:
        findings: Severity and evidence of each finding, the severest first.
        more: The command that prints the cause, the cure and the other findings.
    """
    if not findings:
        return ""
    urgent = sum(severity != "note" for severity, _ in findings) or len(findings)
    remedy = f"{urgent - 1} more, and what to do" if urgent > 1 else "what to do"
    severity, evidence = findings[0]
    return f"{severity}: {one_line(evidence)} ({more}: {remedy})"


def print_table(rows: Iterable[Row], columns: Mapping[str, Callable[[Row], str]]) -> None:
    """Print a table, with rich on a terminal and otherwise as plain text. Numbers are aligned to the right.

    `columns` has the functions that make the cell of a row, by the heads of the columns.
    """
    head, cells = list(columns), [[cell(row) for cell in columns.values()] for row in rows]
    numeric = [
        bool(cells) and all(row[column][:1].isdigit() or row[column] in ("", "-") for row in cells)
        for column in range(len(head))
    ]
    widths = [max(len(row[column]) for row in (head, *cells)) for column in range(len(head))]
    if is_terminal():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console()
        shown = _fitting(widths, cells, console.width)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        for column in shown:
            right, wraps = numeric[column], column == len(head) - 1
            table.add_column(
                head[column], justify="right" if right else "left", no_wrap=not wraps, overflow="fold"
            )
        for row in cells:
            table.add_row(*(Text(row[column], STYLES.get(row[column], "")) for column in shown))
        console.print(table)
        if hidden := [
            name for at, name in enumerate(head) if at not in shown and any(row[at] for row in cells)
        ]:
            print(f"Too wide for this terminal: {', '.join(hidden)}")
        return
    for row in (head, *cells):
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        print("  ".join(padded).rstrip())


def print_section(rows: Collection[Row], columns: Mapping[str, Callable[[Row], str]]) -> None:
    """Print an empty line and a table. Print nothing if there are no rows."""
    if rows:
        print()
        print_table(rows, columns)


def _fitting(widths: Sequence[int], cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the numbers of the columns to show in a terminal of this width.

    If not all columns fit, leave out columns without any value, and then the last columns. But if the last column has long texts,
    keep it, because its texts can be wrapped.
    """
    least = [*widths[:-1], min(widths[-1], _WRAPPED)]
    shown = list(range(len(widths)))

    def fits() -> bool:
        return sum(least[column] + 2 for column in shown) - 2 <= width

    if cells and not fits():
        shown = [column for column in shown if any(row[column] for row in cells)]
    while len(shown) > 1 and not fits():
        keeps_text = len(shown) > 2 and widths[-1] > _WRAPPED and shown[-1] == len(widths) - 1
        shown.pop(-2 if keeps_text else -1)
    return shown


def is_terminal() -> bool:
    return sys.stdout.isatty()


#: Minimum width of a column of texts that wraps, in characters.
_WRAPPED = 24


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Print a line for each pair. The second parts of all pairs are aligned."""
    width = max(len(name) for name, _ in pairs)
    for name, text in pairs:
        print(f"{name.ljust(width)}  {text}")
