"""Make the tables and the picture of docs/tuning.md about several devices.

python tools/simulator_page.py     # rewrites the tables in the page, and docs/images/simulator-fleet.png
"""

from collections.abc import Mapping
from dataclasses import replace

from rsrv.placement.routing import Mode
from rsrv.sim.fleet import MODES, rows, summarize_fleet, with_mode
from rsrv.sim.fleet_plots import picture, save
from rsrv.sim.record import FleetRecord
from rsrv.sim.scenario import Scenario, load_scenario
from rsrv.sim.simulate import simulate_fleet
from scheduler_page import DOCS, IMAGES, rewrite, table

PAGE = DOCS / "tuning.md"
PICTURE = IMAGES / "simulator-fleet.png"
#: rows of the table about one machine: servers and mode
_TOPOLOGIES: Mapping[str, tuple[int, Mode]] = {
    "8 servers, `least_outstanding`": (8, "least_outstanding"),
    "8 servers, `lpt_packing`": (8, "lpt_packing"),
    "1 server, `least_outstanding`": (1, "least_outstanding"),
    "1 server, `lpt_packing`": (1, "lpt_packing"),
}
#: columns of `rsrv-sim`'s table that the page leaves out
_OMITTED = ("missed", "loads", "rows", "fill", "max / mean")


class Comparison:
    """Play scenarios of several devices beside each other."""

    def __init__(self, scenarios: Mapping[str, Scenario]) -> None:
        self.records: dict[str, FleetRecord] = {name: simulate_fleet(one) for name, one in scenarios.items()}
        self.summaries: dict[str, dict[str, object]] = {
            name: summarize_fleet(record) for name, record in self.records.items()
        }

    @property
    def table(self) -> str:
        every = rows(self.summaries)
        shown = [column for column, title in enumerate(every[0]) if title not in _OMITTED]
        head, *rest = ([row[column] for column in shown] for row in every)
        return table(iter([head, *((name if " " in name else f"`{name}`", *cells) for name, *cells in rest)]))


def compare() -> dict[str, Comparison]:
    """Return the comparisons of the page by the names of their tables, which are those of the scenarios."""
    fleet, machine = (load_scenario(DOCS / "scenarios" / f"{name}.yaml") for name in ("fleet", "machine"))
    return {
        "fleet": Comparison({mode: with_mode(fleet, mode) for mode in MODES}),
        "machine": Comparison(
            {
                name: replace(with_mode(machine, mode), servers=servers)
                for name, (servers, mode) in _TOPOLOGIES.items()
            }
        ),
    }


def main() -> None:
    """Rewrite the page and its picture."""
    compared = compare()
    made = {name: one.table for name, one in compared.items()}
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    fleet = compared["fleet"]
    save(picture(fleet.records, fleet.summaries), PICTURE)


if __name__ == "__main__":
    main()
