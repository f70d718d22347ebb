"""The reviewed decisions of each scenario, in a .txt file with the scenario's name.

`python -m tests.unit.sim.golden` writes all .txt files again. Review the differences before you commit them.
"""

from __future__ import annotations

from pathlib import Path

from rsrv.sim.decisions import decision_lines
from rsrv.sim.scenario import load_scenario
from rsrv.sim.simulate import simulate

SCENARIOS = sorted(Path(__file__).parent.glob("*.yaml"))


def decide(scenario: Path) -> str:
    """Return the decisions of a scenario in the form of its .txt file."""
    return "".join(f"{line}\n" for line in decision_lines(simulate(load_scenario(scenario))))


def main() -> None:
    for scenario in SCENARIOS:
        scenario.with_suffix(".txt").write_text(decide(scenario), encoding="utf-8")
        print(scenario.with_suffix(".txt"))


if __name__ == "__main__":
    main()
