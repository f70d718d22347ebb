"""Makes the tables and the picture of docs/simulator.md about several devices.

    python tools/simulator_page.py     # rewrites the tables in the page and docs/images/simulator-fleet.png

A table stands in the page between `<!-- NAME -->` and `<!-- end NAME -->`, as in docs/scheduler.md; a test holds the page
to it.
"""

from dataclasses import dataclass
from functools import cached_property

from rsrv.sim.fleet import MODES, rows, summarize_fleet, with_mode
from rsrv.sim.fleet_plots import picture, save
from rsrv.sim.record import FleetRecord
from rsrv.sim.scenario import load_scenario
from rsrv.sim.simulate import simulate_fleet
from scheduler_page import DOCS, IMAGES, rewrite, table

PAGE = DOCS / "simulator.md"
PICTURE = IMAGES / "simulator-fleet.png"
SCENARIOS = ("fleet", "together")


@dataclass
class Comparison:
    """A scenario of docs/scenarios in all modes."""

    name: str

    @cached_property
    def records(self) -> dict[str, FleetRecord]:
        scenario = load_scenario(DOCS / "scenarios" / f"{self.name}.yaml")
        return {mode: simulate_fleet(with_mode(scenario, mode)) for mode in MODES}

    @cached_property
    def summaries(self) -> dict[str, dict[str, object]]:
        return {mode: summarize_fleet(record) for mode, record in self.records.items()}

    @property
    def table(self) -> str:
        head, *rest = rows(self.summaries)
        return table(iter([head, *((f"`{mode}`", *cells) for mode, *cells in rest)]))


def main() -> None:
    """Makes everything anew."""
    compared = {name: Comparison(name) for name in SCENARIOS}
    made = {name: one.table for name, one in compared.items()}
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    save(picture(compared["fleet"].records, compared["fleet"].summaries), PICTURE)


if __name__ == "__main__":
    main()
