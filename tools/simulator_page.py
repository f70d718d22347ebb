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
#: columns of `rsrv-sim`'s table that the page leaves out
_OMITTED = ("missed", "loads", "rows", "fill", "max / mean")


class Comparison:
    """Play a scenario of several devices in each mode."""

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
        every = rows(self.summaries)
        shown = [column for column, title in enumerate(every[0]) if title not in _OMITTED]
        head, *rest = ([row[column] for column in shown] for row in every)
        return table(iter([head, *((f"`{mode}`", *cells) for mode, *cells in rest)]))


def rewritten(page: str, fleet: Comparison) -> str:
    """Return the page with its table."""
    return rewrite(page, {"fleet": fleet.table})


def main() -> None:
    """Rewrite the page and its picture."""
    fleet = Comparison("fleet")
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), fleet), encoding="utf-8")
    save(picture(fleet.records, fleet.summaries), PICTURE)


if __name__ == "__main__":
    main()
