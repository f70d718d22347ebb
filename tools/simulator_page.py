"""Make the tables and the pictures of docs/simulator.md. They are about idle limits, narrow weights and several devices.

python tools/simulator_page.py     # rewrites the tables in the page, docs/images/idle.png and simulator-fleet.png
"""

from collections.abc import Sequence
from math import inf

from rsrv.sim.fleet import MODES, rows, summarize_fleet, with_mode
from rsrv.sim.plots import fleet_figure, save, write_sweep_plot
from rsrv.sim.record import FleetRecord
from rsrv.sim.scenario import load_scenario
from rsrv.sim.simulate import simulate_fleet
from rsrv.sim.sweep import WEIGHTS, IdleSweep, run_sweep, run_weights, sweep_rows
from scheduler_page import DOCS, IMAGES, rewrite, table

PAGE = DOCS / "simulator.md"
PICTURE = IMAGES / "simulator-fleet.png"
#: Columns of `rsrv-sim`'s table that the page leaves out.
_OMITTED = ("missed", "loads", "rows", "fill", "max / mean")
_OMITTED_IDLE = ("in time", "waited for one", "cold answer", "device memory")
_OMITTED_WEIGHTS = ("in time", "starts", "waited for one", "its peak")


class Comparison:
    """A scenario of several devices, simulated in each mode of the gateway."""

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
        columns = [column for column, title in enumerate(every[0]) if title not in _OMITTED]
        head, *further = ([row[column] for column in columns] for row in every)
        return table(iter([head, *((f"`{mode}`", *cells) for mode, *cells in further)]))


class Idleness:
    """A scenario, simulated with several idle limits for host copies."""

    sweep = IdleSweep("host", {"1m": 60.0, "10m": 600.0, "30m": 1800.0, "1h": 3600.0, "never": inf})

    def __init__(self, name: str) -> None:
        self.runs = run_sweep(load_scenario(DOCS / "scenarios" / f"{name}.yaml"), self.sweep)

    @property
    def table(self) -> str:
        return _without(_OMITTED_IDLE, sweep_rows(f"idle.{self.sweep.tier}", self.runs))


def weights_table(name: str) -> str:
    """Simulate a scenario with each type of weights. Return the table of the results."""
    runs = run_weights(load_scenario(DOCS / "scenarios" / f"{name}.yaml"), list(WEIGHTS))
    return _without(_OMITTED_WEIGHTS, sweep_rows("weights", runs))


def _without(omitted: Sequence[str], every: Sequence[Sequence[str]]) -> str:
    """Return a table without some of its columns."""
    columns = [column for column, title in enumerate(every[0]) if title not in omitted]
    return table(iter([[row[column] for column in columns] for row in every]))


def rewritten(page: str, fleet: Comparison, idle: Idleness, weights: str) -> str:
    """Return the page with its tables."""
    return rewrite(page, {"fleet": fleet.table, "idle": idle.table, "weights": weights})


def main() -> None:
    """Rewrite the page and its pictures."""
    fleet, idle = Comparison("fleet"), Idleness("catalogue")
    text = rewritten(PAGE.read_text(encoding="utf-8"), fleet, idle, weights_table("catalogue"))
    PAGE.write_text(text, encoding="utf-8")
    write_sweep_plot(idle.sweep, idle.runs, IMAGES)
    save(fleet_figure(fleet.records, fleet.summaries), PICTURE)


if __name__ == "__main__":
    main()
