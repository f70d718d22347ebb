"""Helpers that run a scenario from its text."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

from rsrv.sim.decisions import decision_lines
from rsrv.sim.metrics import summarize
from rsrv.sim.record import Record
from rsrv.sim.scenario import parse_scenario
from rsrv.sim.simulate import simulate


def run(text: str, folder: Path = Path()) -> Record:
    return simulate(parse_scenario(dedent(text), folder=folder))


def metrics(text: str, folder: Path = Path()) -> dict[str, Any]:
    return summarize(run(text, folder))


def decisions(text: str) -> list[str]:
    return list(decision_lines(run(text)))
