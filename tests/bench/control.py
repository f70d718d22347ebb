"""The cost of the control process with a thousand models: while they are idle, and while all of them change.

    python -m tests.bench.control                 # 1,000 models
    python -m tests.bench.control --models 5000

This process acts as a fake runtime. During the second measurement, it reports a thousand changes per second: a model answers a
request, and its weights are loaded or evicted. In every fourth change, the model is removed and built again instead. If a busy
machine gives the control process too little CPU time for these changes, the fake runtime waits for it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rsrv.control.v1 import control_pb2 as pb
from rsrv.wire.paths import make_private
from tests.bench.phases import say
from tests.bench.processes import cpu_seconds
from tests.bench.report import table
from tests.unit.control.peers import FakeRuntime, add_model, entry, model_record

#: Seconds before each measurement, and seconds of each measurement.
_WARM_UP_S, _WINDOW_S = 10.0, 20.0
#: Number of changes per second, and number of bursts per second in which the changes happen.
_CHANGES, _BURSTS = 1000, 50


class Runtime(FakeRuntime):
    """A fake runtime that reports the changed records."""

    def __init__(self, path: Path, names: list[str]) -> None:
        super().__init__(path)
        self.names, self._next = names, 1
        self._changed: dict[str, int] = {}
        for name in names:
            self.entries[f"{name}@1"] = entry(name)
            self.models[name] = model_record(name)

    def status(self, since: int = 0) -> pb.DeviceRecord:
        record = super().status(since)
        record.since, record.next = since, self._next
        if since:
            del record.models[:]
            record.models.extend(self.models[name] for name, at in self._changed.items() if at >= since)
        self._next += 1
        return record

    async def work(self) -> None:
        """Change the models in turn, and wait if the control process does not read the changes. Never return."""
        number = 0
        while True:
            for watcher in self._watchers:
                watcher.setblocking(True)
            for _ in range(_CHANGES // _BURSTS):
                name = self.names[number % len(self.names)]
                number += 1
                record = self.models[name]
                record.outcomes["answered"] += 1
                record.answered += 1
                self._changed[name] = self._next
                resident = self.entries[f"{name}@1"]["weights"] == "resident"
                if number % 4 == 0:
                    for differs in (None, {"state": "loading", "weights": "absent"}, {"weights": "absent"}):
                        self.change(f"{name}@1", None if differs is None else entry(name, **differs))
                else:
                    self.change(f"{name}@1", entry(name, weights="absent" if resident else "resident"))
            await asyncio.sleep(1 / _BURSTS)


async def measured(folder: Path, count: int) -> list[list[str]]:
    names = [f"m{number:05d}" for number in range(count)]
    repository, directory = folder / "repository", folder / "private"
    make_private(directory)
    for name in names:
        add_model(repository, name)
    (repository / "rsrv.yaml").write_text("")
    runtime = Runtime(directory / "runtime.sock", names)
    server = await asyncio.create_subprocess_exec("sleep", "infinity")
    control = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rsrv.control", "--directory", str(directory)),
        *("--server-pid", str(server.pid), "--settings", str(repository / "rsrv.yaml")),
        stderr=asyncio.subprocess.DEVNULL,
    )

    async def cost(what: str) -> list[str]:
        before, revision = cpu_seconds(control.pid), runtime.revision
        await asyncio.sleep(_WINDOW_S)
        spent, changes = cpu_seconds(control.pid) - before, runtime.revision - revision
        each = f"{spent / changes * 1e6:.0f}" if changes else ""
        return [what, f"{changes / _WINDOW_S:.0f}", f"{spent / _WINDOW_S:.3f}", each]

    try:
        while not (directory / "control.sock").exists():
            await asyncio.sleep(0.1)
        async with grpc.aio.insecure_channel(f"unix:{directory}/control.sock") as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            await asyncio.sleep(_WARM_UP_S)
            rows = [await cost(f"{count} models idle")]
            working = asyncio.create_task(runtime.work())
            await asyncio.sleep(_WARM_UP_S)
            rows.append(await cost(f"{count} models change"))
            if working.done():
                working.result()  # Raise the error of the changes. After an error, the models were idle and the figure is wrong.
            working.cancel()
            return rows
    finally:
        server.kill()
        await server.wait()
        await control.wait()
        runtime.die()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.control", description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measured(Path(folder), options.models))
    say(table(["the control process", "changes per s", "CPU s per s", "µs per change"], rows))


if __name__ == "__main__":
    main()
