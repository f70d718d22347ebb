"""Write native/rules.h: the constants, statuses and texts that the native front shares with Python. `make pages` runs this.

Modules of rsrv define the values. This file only lists these modules and the names of the values.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from types import ModuleType

from rsrv import histogram, logs, throttle
from rsrv.front import rules, states
from rsrv.placement import device_choice
from rsrv.wire import blackbox, frames, layout, memory, paths, placement_table, traces

HEADER = Path(__file__).resolve().parent.parent / "triton_backend" / "rsrv" / "native" / "rules.h"

#: Shared names of each module. None stands for all public constants. The value of a name is its name in C, or the prefix of the
#: members' names if it ends in "_". If the value is empty, the name in C is the Python name.
SHARED: Mapping[ModuleType, Mapping[str, str] | None] = {
    frames: {
        "MAGIC": "",
        "PROTOCOL_VERSION": "",
        "FOREIGN_PEER": "",
        "MAX_FRAME": "",
        "MAX_PROGRESS": "",
        "HEADER": "HEADER_BYTES",
        "SUBMISSION": "SUBMISSION_BYTES",
        "COMPLETION": "COMPLETION_BYTES",
        "ALONE": "",
        "WAITED": "",
        "Kind": "FRAME_",
        "Status": "",
    },
    layout: {"FLAT_MAGIC": "", "ALIGNMENT": ""},
    memory: {"BOARD_BYTES": "", "SILENT_S": "", "FIRST_BYTES": "", "KEEP_BYTES": ""},
    traces: {"MARK": "MARK_BYTES", "MAX_SPANS": "", "MAX_TEXT": "MAX_SPAN_TEXT"},
    blackbox: {
        "SLOT_BYTES": "",
        "BYTES": "BOX_BYTES",
        "KEY_AT": "",
        "ASLEEP_AT": "",
        "ALONE_BIT": "",
        "Phase": "PHASE_",
    },
    paths: {"NOT_PRIVATE": "", "FAILURE": "FAILURE_FILE"},
    placement_table: {
        "MAGIC": "TABLE_MAGIC",
        "HEADER_BYTES": "TABLE_HEADER_BYTES",
        "RETRY_S": "TABLE_RETRY_S",
    },
    device_choice: {"SOONER": "", "ELSEWHERE": "", "PINNED": ""},
    histogram: {"SECONDS": "HISTOGRAM_S"},
    logs: {"NAMELESS": ""},
    throttle: {"MORE": ""},
    rules: None,
}


def lines() -> Iterator[str]:
    """Yield the lines of rules.h."""
    yield "// Constants, statuses and texts that both fronts share. tools/native_rules.py writes this file: change the Python modules."
    yield "#pragma once"
    for module, names in SHARED.items():
        yield f"\n// {module.__name__}"
        for name in vars(module) if names is None else names:
            if name[0] != "_" and (name.isupper() or names is not None):
                yield from _define((names or {}).get(name) or name, getattr(module, name))
    yield "\n// rsrv.front.states: the states of a model on one device, the events that change them, and the table"
    for prefix, members in (("STATE_", states.ServingState), ("EVENT_", states.ServingEvent)):
        yield f"enum model_{prefix.lower().strip('_')} {{ {', '.join(prefix + member.name for member in members)} }};"
        yield f"#define {prefix}COUNT {len(members)}"
    yield "// 0 where the table has no change, and otherwise the next state plus 1."
    changes = states.TRANSITIONS.items()
    rows = (f"[STATE_{a.name}][EVENT_{event.name}] = STATE_{b.name} + 1" for (a, event), b in changes)
    yield "#define TRANSITIONS \\\n    {" + ", \\\n     ".join(rows) + "}"
    yield "\n// The name of each status, its code in Triton, and whether a tag names it before the message."
    rows = (f"[{status.name}] = {{{_literal(status.name)}, {_code(status)}}}" for status in frames.Status)
    yield f"#define STATUSES {len(frames.Status)}"
    yield "#define STATUS_ROWS \\\n    " + ", \\\n    ".join(rows)


def _code(status: frames.Status) -> str:
    code = "0" if status is frames.Status.OK else f"CODE_{rules.CODES.get(status, 'UNAVAILABLE')}"
    return f"{code}, {str(status in rules.TAGGED).lower()}"


def _define(name: str, value: object) -> Iterator[str]:
    """Yield the definition of a value if C has a matching type."""
    match value:
        case type() if issubclass(value, IntEnum):
            prefix, tag = (name, "") if name.endswith("_") else ("", f"{name.lower()} ")
            yield f"enum {tag}{{ {', '.join(f'{prefix}{member.name} = {member.value}' for member in value)} }};"
        case struct.Struct():
            yield f"#define {name} {value.size}"
        case str() | bytes():
            yield f"#define {name} {_literal(value if isinstance(value, str) else value.decode())}"
        case float() | tuple() if name.endswith("_S"):
            times = [
                f"{round(1e9 * seconds)}ll" for seconds in (value if isinstance(value, tuple) else [value])
            ]
            yield f"#define {name[:-1]}NS {times[0] if isinstance(value, float) else '{' + ', '.join(times) + '}'}"
        case float():
            yield f"#define {name} {value}"
        case int():
            yield f"#define {name} {value if value < 1 << 31 else f'{value:#x}ull'}"


def _literal(text: str) -> str:
    assert text.isascii(), text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def rendered() -> str:
    return "".join(f"{line}\n" for line in lines())


if __name__ == "__main__":
    HEADER.write_text(rendered())
