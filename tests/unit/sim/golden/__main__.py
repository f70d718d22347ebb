"""Reviewed decisions: one .txt beside each scenario.

`python -m tests.unit.sim.golden` writes them again; read the difference before committing it.
"""

from __future__ import annotations

from pathlib import Path

from rsrv.sim.decisions import decision_lines
from rsrv.sim.scenario import load_scenario
from rsrv.sim.simulate import simulate

SCENARIOS = sorted(Path(__file__).parent.glob("*.yaml"))


def decide(scenario: Path) -> str:
    """Return the text that belongs beside a scenario."""
    return "".join(f"{line}\n" for line in decision_lines(simulate(load_scenario(scenario))))


def main() -> None:
    for scenario in SCENARIOS:
        scenario.with_suffix(".txt").write_text(decide(scenario), encoding="utf-8")
        print(scenario.with_suffix(".txt"))


if __name__ == "__main__":
    main()
