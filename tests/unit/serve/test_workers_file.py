"""The list of workers as they start and end."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rsrv.explain import parse_yaml
from rsrv.serve.plan import ChildSpec
from rsrv.serve.workers_file import WorkersFile
from tests.unit.serve.test_plan import planned


def names(file: Path) -> list[str]:
    entries = parse_yaml(file.read_text())
    assert isinstance(entries, list)
    return [entry["name"] for entry in entries]


def test_a_worker_leaves_the_list_before_it_is_told_to_end(tmp_path: Path) -> None:
    """A worker leaves the list before its end and returns with its start; the gateway is in no list."""
    plan, file = planned(), tmp_path / "workers.yaml"
    roll = WorkersFile(plan, file, controls=True, elsewhere=False)
    first, second = (worker.child for worker in plan.workers)
    roll.started(first, 17)
    roll.started(ChildSpec("gateway", (), {}), 18)
    assert names(file) == ["worker0", "worker1"]

    asyncio.run(roll.leaves(first))
    assert names(file) == ["worker1"]

    asyncio.run(roll.leaves(second))
    assert names(file) == []

    roll.started(first, 19)
    assert names(file) == ["worker0"]
    assert "/19-" in file.read_text()
