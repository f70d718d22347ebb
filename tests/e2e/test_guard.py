"""Deaths of the runtime while it compiles models."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from rsrv.wire import paths
from rsrv.wire.blackbox import Phase, read_slots
from rsrv.wire.socket import Closed
from tests.e2e import bundles
from tests.e2e.calls import Refused, caller, check_exact, outcome
from tests.e2e.harness import StartTriton, make_repository
from tests.status import read_status
from tests.waiting import wait_until

pytestmark = pytest.mark.long


def test_a_runtime_killed_while_it_compiles_comes_back(start_triton: StartTriton, tmp_path: Path) -> None:
    """The runtime is killed twice during the first load, and again later. It then serves all models, and refuses none of them."""
    made = bundles.ensure()
    repository = make_repository(tmp_path, *(made / name for name in ("exact", "hooked", "elastic")))
    cache = {"RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    server = start_triton(repository, env=cache, spare=True, wait_ready=False)
    directory = paths.runtime_directory(server.pid, "0")
    killed: set[int] = set()

    def kill_while_compiling() -> None:
        def kill() -> bool:
            try:
                slots = read_slots((directory / paths.BLACKBOX).read_bytes())
                pid = int(read_status(server.pid)["pid"])
            except (OSError, Closed):
                return False
            if pid in killed or all(slot.phase is not Phase.BUILDING for slot in slots):
                return False
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
            return True

        wait_until(kill, 60, what="a compilation")

    kill_while_compiling()
    kill_while_compiling()
    server.server.wait_ready(60)
    with caller(server) as call:
        check_exact(call)
        shutil.rmtree(tmp_path / "cache")
        pid = int(read_status(server.pid)["pid"])
        killed.add(pid)
        os.kill(pid, signal.SIGKILL)
        kill_while_compiling()
        wait_until(
            lambda: not isinstance(outcome(lambda: check_exact(call)), Refused), 60, what="the model's return"
        )
    wait_until(lambda: len(read_status(server.pid)["models"]) == 3, 60, what="all models to come back")
    wait_until(lambda: json.loads((directory / paths.DEATHS).read_text()) == {}, what="no model to be blamed")
