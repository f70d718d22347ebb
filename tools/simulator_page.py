"""Make the table and the picture of docs/tuning.md about several devices.

python tools/simulator_page.py     # rewrites the table in the page, and docs/images/simulator-fleet.png
"""

from rsrv.sim.fleet import MODES, rows, summarize_fleet, with_mode
from rsrv.sim.fleet_plots import picture, save
from rsrv.sim.record import FleetRecord
from rsrv.sim.scenario import load_scenario
from rsrv.sim.simulate import simulate_fleet
from scheduler_page import DOCS, IMAGES, rewrite, table

PAGE = DOCS / "tuning.md"
PICTURE = IMAGES / "simulator-fleet.png"
SCENARIO = "fleet"


class Comparison:
    """Play a scenario of docs/scenarios in all modes of the gateway."""

    def __init__(self, name: str) -> None:
        scenario = load_scenario(DOCS / "scenarios" / f"{name}.yaml")
        self.records: dict[str, FleetRecord] = {
            mode: simulate_fleet(with_mode(scenario, mode)) for mode in MODES
        }
        self.summaries: dict[str, dict[str, object]] = {
            mode: summarize_fleet(record) for mode, record in self.records.items()
        }

    @property
    def table(self) -> str:
        head, *rest = rows(self.summaries)
        return table(iter([head, *((f"`{mode}`", *cells) for mode, *cells in rest)]))


def main() -> None:
    """Rewrite the page and its picture."""
    compared = Comparison(SCENARIO)
    made = {SCENARIO: compared.table}
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    save(picture(compared.records, compared.summaries), PICTURE)


if __name__ == "__main__":
    main()
