"""Output of the command `rsrv`: tables for people, JSON for programs."""

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message


def to_json(message: Message) -> dict[str, Any]:
    """Return the message as protobuf's JSON, with all fields except absent optional ones and messages.

    Integers of 64 bits are numbers, not strings: no value here is too large for programs that only have doubles.
    """
    out: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if _is_map(field):
            out[field.json_name] = {str(key): _value(_map_value(field), one) for key, one in value.items()}
        elif field.is_repeated:
            out[field.json_name] = [_value(field, one) for one in value]
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
        found = field.enum_type.values_by_number.get(value)
        return value if found is None else found.name
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def print_json(message: Message, *, line: bool = False) -> None:
    """Print the message indented, or on one line without delay."""
    print(json.dumps(to_json(message), indent=None if line else 2), flush=line)


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with numbers to the right: with rich on a terminal, else as plain text."""
    cells = [list(row) for row in rows]
    numeric = [
        bool(cells) and all(row[column][:1].isdigit() or row[column] in ("", "-") for row in cells)
        for column in range(len(head))
    ]
    if is_terminal():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for name, right in zip(head, numeric, strict=True):
            table.add_column(name, justify="right" if right else "left", overflow="fold")
        for row in cells:
            table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
        Console().print(table)
        return
    widths = [max(len(row[column]) for row in (list(head), *cells)) for column in range(len(head))]
    for row in (list(head), *cells):
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        print("  ".join(padded).rstrip())


def is_terminal() -> bool:
    return sys.stdout.isatty()


#: Styles of the words that should catch the eye.
_STYLES = {"ready": "green", "failed": "bold red", "loading": "yellow", "hold": "magenta", "drain": "magenta"}
