"""Draw the diagrams of docs/states.md from the state tables of the code.

    python tools/state_diagrams.py     # rewrites docs/states.md between its markers

To add a table, define these constants in a module, and add a line with the module's name to `TABLES`:

    TRANSITIONS: Mapping[tuple[State, Event], State]    # State and Event are StrEnums; the first key has the initial state
    EFFECTS: Mapping[Event, str]                        # optional: the method or instruction that carries out an event

Then put `<!-- NAME -->` and `<!-- end NAME -->` on separate lines of the page, and run the command.
"""

from collections.abc import Mapping
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "states.md"

#: Modules with state tables. The key is the NAME in the page's markers.
TABLES: Mapping[str, str] = {
    "weights": "rsrv.scheduler.weight_states",
    "models": "rsrv.runtime.model_states",
    "fronts": "rsrv.front.states",
}


def mermaid(transitions: Mapping[tuple[Any, Any], StrEnum], effects: Mapping[Any, str]) -> str:
    """Draw a table as a Mermaid state diagram: one arrow for each pair of states, with all of its events."""
    arrows: dict[tuple[StrEnum, StrEnum], list[str]] = {}
    for (state, event), following in transitions.items():
        effect = effects.get(event)
        arrows.setdefault((state, following), []).append(f"{event} / {effect}" if effect else f"{event}")
    lines = [f"    {_id(before)} --> {_id(after)}: {', '.join(on)}" for (before, after), on in arrows.items()]
    first = next(iter(transitions))[0]
    return "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {_id(first)}", *lines, "```"])


def _id(state: StrEnum) -> str:
    # Mermaid takes no blanks in the name of a state.
    return state.value.replace(" ", "_").replace("-", "_")


def rewrite(page: str) -> str:
    """Return the page with the current diagrams between its markers.

    Raises:
        ValueError: the page lacks the markers of a table, or has them twice.
    """
    for name, module in TABLES.items():
        source = import_module(module)
        transitions, effects = source.TRANSITIONS, getattr(source, "EFFECTS", {})
        before, mark, following = page.partition(f"<!-- {name} -->\n")
        _, end, after = following.partition(f"\n<!-- end {name} -->")
        if not end or mark in after:
            raise ValueError(f"docs/states.md needs <!-- {name} --> and <!-- end {name} --> once each")
        page = f"{before}{mark}\n{mermaid(transitions, effects)}\n{end}{after}"
    return page


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
