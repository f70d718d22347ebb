"""The faults: what each does to a server under load, which models it may harm, and how its end is checked.

`prepare` runs before the load, and `strike` when the load is steady. `relieve` removes the cause if it does not end by itself.
`check` runs afterwards, and finds faults that the clients' answers do not show.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from math import inf
from typing import ClassVar

import numpy as np
import psutil

from rsrv.wire.paths import DEATHS
from tests.chaos.figures import Expected
from tests.chaos.health import watched
from tests.chaos.house import HOOK_TIMEOUT, WATCHDOG, House, Kind, NotPossible, fill
from tests.chaos.load import Client, Load, clients
from tests.chaos.questions import breaking, bulky, endless, mood
from tests.e2e.harness import ROOT, is_alive
from tests.waiting import wait_until

#: What Triton 24.10 does with requests in a stub that dies.
NO_ANSWER = "Triton 24.10 never answers requests that a stub had taken when it died, unless the stub was inside execute()"
#: What Triton 24.10 does when it has given up a stub, and the stub continues and still answers.
LATE_ANSWERS = (
    "Triton 24.10 sends the answer to a request that it has given up as the answer to the next request"
)

#: Clients of the models that are asked during every fault. A fault may name some of these models as its victims.
BYSTANDERS = (
    *clients("exact", grpc=2, http=1, pause=0.03),
    *clients("only_rows", grpc=1, http=1, pause=0.03),
    *clients("chain", grpc=1, pause=0.05),
)
WORK = (*clients("elastic", grpc=2, http=1, pause=0.02),)


class Fault:
    """One kind of fault."""

    name: ClassVar[str]
    #: Clients in addition to the bystanders.
    load: ClassVar[Sequence[Client]] = WORK
    expected: ClassVar[Expected] = Expected(None)
    #: Seconds within which all models that should recover must answer.
    patience: ClassVar[float] = 20.0
    #: The service that must be reported as not serving within a second: a model, or "" for the server. None: no service.
    unhealthy: ClassVar[str | None] = None
    #: The kind of server that the fault needs.
    house: ClassVar[Kind] = "plain"

    @classmethod
    def planned(cls, minutes: float, seed: int) -> Fault:
        """Return a fault for a run of this many minutes. With 0, the fault is as short as possible."""
        return cls()

    def prepare(self, house: House) -> None:
        """Prepare the server before the load begins. Raises NotPossible."""

    def strike(self, house: House, load: Load) -> float:
        """Cause the fault. Return when the cause may be removed. The result is the time of the fault, by `time.monotonic`."""
        raise NotImplementedError

    def relieve(self, house: House, load: Load) -> None:
        """Remove the cause of the fault if it does not end by itself."""

    def check(self, house: House) -> Iterable[str]:
        """Return the violations, after the fault."""
        return ()

    def notes(self) -> Iterable[str]:
        """Return remarks, after the fault."""
        return ()

    def tidy(self, house: House) -> None:
        """Restore the server for the next fault."""


def kill(pid: int, number: int) -> float:
    """Send a signal to a process, and return the time."""
    at = time.monotonic()
    os.kill(pid, number)
    return at


# --- the runtime --------------------------------------------------------------------------------------------------


class _RuntimeDies(Fault):
    """The runtime dies. Requests wait for another runtime, and none fails."""

    expected = Expected(())
    unhealthy: ClassVar[str | None] = ""

    def __init__(self) -> None:
        self._killed = 0

    def kill_runtime(self) -> float:
        return kill(self._killed, signal.SIGKILL)

    def prepare(self, house: House) -> None:
        self._killed = house.runtime_pid()

    def check(self, house: House) -> Iterable[str]:
        if house.runtime_pid() == self._killed:
            yield "the runtime is still the one that was killed"


class KillExecuting(_RuntimeDies):
    name = "kill -9 the runtime while it executes"

    def strike(self, house: House, load: Load) -> float:
        wait_until(lambda: house.model("elastic").get("executing"), what="an execution")
        return self.kill_runtime()


class KillLoading(_RuntimeDies):
    name = "kill -9 the runtime while it loads weights"
    #: The device has room for one of these models. So each request for the other model needs a load.
    load = (*clients("heavy_a", grpc=1, pause=0.1), *clients("heavy_b", http=1, pause=0.1))

    def strike(self, house: House, load: Load) -> float:
        def loading() -> bool:
            return any(house.model(name).get("weights") == "loading" for name in ("heavy_a", "heavy_b"))

        wait_until(loading, what="a load of weights")
        return self.kill_runtime()


class KillCompiling(_RuntimeDies):
    name = "kill -9 the runtime while it compiles"

    def __init__(self) -> None:
        super().__init__()
        self._loading = _Loading("compiling")

    def prepare(self, house: House) -> None:
        self._loading.prepare(house)
        super().prepare(house)

    def strike(self, house: House, load: Load) -> float:
        self._loading.begin(house)
        return self.kill_runtime()

    def check(self, house: House) -> Iterable[str]:
        yield from super().check(house)
        yield from self._loading.check(house)

    def notes(self) -> Iterable[str]:
        yield f"the load: {self._loading.error or 'succeeded'}"

    def tidy(self, house: House) -> None:
        self._loading.tidy(house)


class _OneOfTwoDevices(Fault):
    """A fault of one device's runtime. The other device still serves."""

    expected = Expected((), in_flight=True)
    patience = 5.0
    unhealthy: ClassVar[str | None] = None
    house = "devices"


class KillDevice(_OneOfTwoDevices, _RuntimeDies):
    name = "kill -9 one of two devices' runtimes"

    def strike(self, house: House, load: Load) -> float:
        return self.kill_runtime()


class Freeze(Fault):
    name = "SIGSTOP the runtime for 5 s"
    unhealthy: ClassVar[str | None] = ""
    #: Index of the device.
    device: ClassVar[int] = 0
    seconds: ClassVar[float] = 5.0

    def strike(self, house: House, load: Load) -> float:
        self._frozen = house.runtime_pid(self.device)
        struck = kill(self._frozen, signal.SIGSTOP)
        time.sleep(self.seconds)
        return struck

    def relieve(self, house: House, load: Load) -> None:
        os.kill(self._frozen, signal.SIGCONT)

    def check(self, house: House) -> Iterable[str]:
        if house.runtime_pid(self.device) != self._frozen:
            yield "the runtime was only frozen, but was replaced by another one"


class FreezeDevice(_OneOfTwoDevices, Freeze):
    name = "SIGSTOP one of two devices' runtimes for 4 s"
    device = 1
    seconds = 4.0


# --- stubs --------------------------------------------------------------------------------------------------------


def _stub_pid(model: str, house: House) -> int:
    """Return the pid of a model's stub. Raises NotPossible if the model has none."""
    pids = house.server.stub_pids(model)
    if not pids:
        raise NotPossible(f"the native front serves {model} inside tritonserver, so the model has no stub")
    (pid,) = pids
    return pid


class KillStub(Fault):
    name = "kill -9 a stub"
    expected = Expected({"elastic"}, excuse=NO_ANSWER)
    unhealthy = "elastic"

    def prepare(self, house: House) -> None:
        self._stub = _stub_pid("elastic", house)

    def strike(self, house: House, load: Load) -> float:
        return kill(self._stub, signal.SIGKILL)

    def tidy(self, house: House) -> None:
        _revive("elastic", house)


class StopStub(Fault):
    """A stub is stopped. In four of five cases, this ends Triton 24.10, with any model. `rsrv serve` then starts it again."""

    name = "SIGSTOP a stub for 3 s, under rsrv serve"
    load = clients("elastic", grpc=6, http=2, pause=0)
    expected = Expected(None, excuse=NO_ANSWER, mixes_up={"elastic": LATE_ANSWERS})
    patience = 60
    house = "serve"

    def prepare(self, house: House) -> None:
        self._server = house.server.pid
        self._stub = psutil.Process(_stub_pid("elastic", house))

    def strike(self, house: House, load: Load) -> float:
        wait_until(lambda: house.model("elastic").get("executing"), what="an execution")
        struck = kill(self._stub.pid, signal.SIGSTOP)
        time.sleep(3)
        return struck

    def relieve(self, house: House, load: Load) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._stub.resume()

    def check(self, house: House) -> Iterable[str]:
        self._survived = house.server.pid == self._server
        return ()

    def notes(self) -> Iterable[str]:
        yield "tritonserver survived" if self._survived else "rsrv serve started tritonserver again"


class _MoodyHook(Fault):
    load = (*clients("moody", grpc=2, http=1, pause=0.05), *WORK)
    expected = Expected({"moody"}, excuse=NO_ANSWER)
    mood: ClassVar[str]

    def strike(self, house: House, load: Load) -> float:
        return house.strike(load, "moody", mood(self.mood))

    def tidy(self, house: House) -> None:
        _revive("moody", house)


class HookExits(_MoodyHook):
    name = "a hook that calls os._exit"
    mood = "exit"
    unhealthy = "moody"


class HookHangs(_MoodyHook):
    name = f"a hook that hangs (limit {HOOK_TIMEOUT:.0f} s)"
    mood = "hang"
    patience = HOOK_TIMEOUT + 20


class HookHoards(_MoodyHook):
    name = "a hook that allocates without bound"
    mood = "hoard"

    def strike(self, house: House, load: Load) -> float:
        self._mark = house.log_mark()
        return super().strike(house, load)

    def check(self, house: House) -> Iterable[str]:
        if "nobody minds" in house.log_from(self._mark):
            yield "the hook got all that it wanted"


def _revive(model: str, house: House) -> None:
    """If the control process has not loaded the model again, load it as an operator would."""
    if house.alive and (not house.server.stub_pids(model) or not house.model(model)):
        house.reload(model)


# --- the control process ------------------------------------------------------------------------------------------


class KillControl(Fault):
    name = "kill -9 the control process"
    expected = Expected(())
    unhealthy = ""

    def prepare(self, house: House) -> None:
        pid = house.control_pid()
        if pid is None:
            raise NotPossible("this server has no control process")
        self._killed = pid

    def strike(self, house: House, load: Load) -> float:
        struck = kill(self._killed, signal.SIGKILL)
        with watched(house.control_socket(), "") as reports:
            wait_until(
                lambda: reports.seconds_until(serving=True, since=struck) < inf, 10, what="its successor"
            )
            self._seconds = reports.seconds_until(serving=True, since=struck)
        return struck

    def notes(self) -> Iterable[str]:
        yield f"another control process answered after {self._seconds:.1f} s"


# --- shortages of the machine -------------------------------------------------------------------------------------


class FullSharedMemory(Fault):
    name = "full /dev/shm for 3 s"
    load = (*clients("bulky", grpc=1, http=1, pause=0.2), *WORK)
    expected = Expected({"bulky"})

    def __init__(self) -> None:
        #: Triton's error when another model was loaded during the fault, or empty.
        self._said = ""

    def prepare(self, house: House) -> None:
        house.shm  # noqa: B018 - whether it can be filled at all
        # A model's shared memory in Triton grows with the largest request, and never shrinks. A reload makes it small.
        house.reload("bulky")

    def strike(self, house: House, load: Load) -> float:
        struck = time.monotonic()
        self._give_back = fill(house.shm)
        until = time.monotonic() + 3
        for number in range(3):
            house.strike(load, "bulky", bulky(np.random.default_rng(number), 4), wait=True)
        house.add("compiling")
        self._said = house.load_model("compiling")
        time.sleep(max(0.0, until - time.monotonic()))
        return struck

    def relieve(self, house: House, load: Load) -> None:
        self._give_back()

    def check(self, house: House) -> Iterable[str]:
        if self._said and (again := house.load_model("compiling")):
            yield f"a model cannot be loaded afterwards: {again}"

    def notes(self) -> Iterable[str]:
        yield f"a model that was to be loaded meanwhile: {self._said or 'loaded'}"

    def tidy(self, house: House) -> None:
        house.remove("compiling")


class FullDisk(Fault):
    name = "full disk for compiled models while one is loaded"
    expected = Expected(())

    def __init__(self) -> None:
        self._loading = _Loading("compiling")

    def prepare(self, house: House) -> None:
        house.small_disk  # noqa: B018 - as above
        self._loading.prepare(house)

    def strike(self, house: House, load: Load) -> float:
        struck = time.monotonic()
        self._give_back = fill(house.small_disk)
        self._loading.begin(house)
        self._loading.wait()
        return struck

    def relieve(self, house: House, load: Load) -> None:
        self._give_back()

    def check(self, house: House) -> Iterable[str]:
        if self._loading.error:
            yield f"a model could not be loaded: {self._loading.error}"
        yield from self._loading.check(house)

    def tidy(self, house: House) -> None:
        self._loading.tidy(house)


class CorruptCache(_RuntimeDies):
    name = "corrupt compilation cache, then kill -9 the runtime"
    #: All modules are compiled again, which may take longer than requests wait.
    expected = Expected(None)

    def strike(self, house: House, load: Load) -> float:
        entries = sorted(path for path in house.disk.iterdir() if path.is_file())
        assert entries, "there is no cache"
        for number, entry in enumerate(entries):
            content = bytearray(entry.read_bytes())
            match number % 4:
                case 0:
                    content[len(content) // 2] ^= 0x10
                case 1:
                    del content[len(content) // 2 :]
                case 2:
                    content.clear()
                case _:
                    content[:] = os.urandom(len(content))
            entry.write_bytes(content)
        self._mark, self._entries = house.log_mark(), len(entries)
        return self.kill_runtime()

    def check(self, house: House) -> Iterable[str]:
        yield from super().check(house)
        # A damaged entry may be reported twice: the runtime reads it before it has read the module, and again afterwards.
        lines = house.log_from(self._mark).splitlines()
        parts = (line.partition(" is damaged, so it is compiled again") for line in lines)
        self._damaged = len({path.rpartition(" ")[2] for path, separator, _ in parts if separator})

    def notes(self) -> Iterable[str]:
        yield f"of {self._entries} entries, all damaged, {self._damaged} were read, detected, and compiled again"


# --- models -------------------------------------------------------------------------------------------------------


class BundleVanishes(Fault):
    name = "a bundle deleted while it loads"
    expected = Expected(())

    def __init__(self) -> None:
        self._loading = _Loading("compiling")

    def prepare(self, house: House) -> None:
        self._loading.prepare(house)

    def strike(self, house: House, load: Load) -> float:
        self._loading.begin(house)
        struck = time.monotonic()
        shutil.rmtree(house.bundles / "compiling")
        self._loading.wait()
        return struck

    def relieve(self, house: House, load: Load) -> None:
        house.add("compiling")

    def check(self, house: House) -> Iterable[str]:
        yield from self._loading.check(house)

    def notes(self) -> Iterable[str]:
        yield f"the load: {self._loading.error or 'succeeded'}"

    def tidy(self, house: House) -> None:
        self._loading.tidy(house)


class DeviceFails(Fault):
    name = "a device error"
    load = (*clients("fragile", grpc=2, http=1, pause=0.02), *WORK)
    expected = Expected({"fragile"})

    def strike(self, house: House, load: Load) -> float:
        struck = time.monotonic()
        for _ in range(20):
            house.strike(load, "fragile", breaking(), wait=True)
        return struck


class ExecutionHangs(_RuntimeDies):
    name = f"an execution that hangs (watchdog {WATCHDOG:.0f} s)"
    load = (*clients("sudden", grpc=1, http=1, pause=0.05), *WORK)
    unhealthy = None  # The watchdog ends the runtime later than after a second.
    expected = Expected(None)
    patience = 2 * WATCHDOG + 20  # The request executes twice before it is refused.

    def strike(self, house: House, load: Load) -> float:
        return house.strike(load, "sudden", endless())

    def tidy(self, house: House) -> None:
        if not house.alive:
            return
        if house.runtime_pid() == self._killed:
            kill(self._killed, signal.SIGKILL)
            wait_until(lambda: not is_alive(self._killed))
        (house.runtime_folder() / DEATHS).unlink(missing_ok=True)
        house.reload("sudden")


# --- clients and clocks -------------------------------------------------------------------------------------------


class ClockJumps(Fault):
    name = "the runtime's clock jumps a day ahead, two days back"
    expected = Expected(())
    house = "clock"

    def strike(self, house: House, load: Load) -> float:
        struck = time.monotonic()
        for day in (1, -1):
            house.set_clock(day * 86400)
            time.sleep(2.5)
        return struck

    def relieve(self, house: House, load: Load) -> None:
        house.set_clock(0)
        time.sleep(1.5)

    def check(self, house: House) -> Iterable[str]:
        if not house.saw_days():
            yield "the processes' clocks never jumped"


class Crowd(Fault):
    name = "10,000 clients that connect and cancel"
    expected = Expected(())
    patience = 60
    #: Number of clients of each protocol.
    count: ClassVar[int] = 5000
    #: Number of clients of each protocol that connect in a second.
    rate: ClassVar[int] = 200

    def prepare(self, house: House) -> None:
        self._cancelled = self._cancellations(house)

    def strike(self, house: House, load: Load) -> float:
        struck = time.monotonic()
        server = house.server.server
        kinds = {"grpc": server.grpc_url, "http": server.http_url}
        command = [sys.executable, "-m", "tests.chaos.crowd"]
        processes = [
            subprocess.Popen([*command, kind, url, str(self.count), str(self.rate)], cwd=ROOT)
            for kind, url in kinds.items()
        ]
        for process in processes:
            process.wait()
            assert process.returncode == 0, "the crowd failed"
        return struck

    def check(self, house: House) -> Iterable[str]:
        self._cancelled = self._cancellations(house) - self._cancelled
        return ()

    def notes(self) -> Iterable[str]:
        yield f"{self._cancelled} requests still waited in the runtime when their cancellation was noticed"

    @staticmethod
    def _cancellations(house: House) -> int:
        return sum(model["outcomes"].get("cancelled", 0) for model in house.status()["models"].values())


# --- a model that is being loaded ---------------------------------------------------------------------------------


class _Loading:
    """A model that is being loaded. Each load compiles for some seconds."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._thread: threading.Thread | None = None
        #: Triton's error about the load, or empty.
        self.error = ""

    def prepare(self, house: House) -> None:
        self._known = set(house.disk.iterdir())

    def begin(self, house: House) -> None:
        """Begin the load. Return when the first of the model's modules is compiled, and the others are not compiled yet."""
        mark = house.log_mark()
        house.add(self._model)

        def run() -> None:
            self.error = house.load_model(self._model)

        self._thread = threading.Thread(target=run)
        self._thread.start()
        house.wait_log(f"{self._model}: compiled 1/", mark)

    def wait(self) -> None:
        assert self._thread is not None
        self._thread.join()

    def check(self, house: House) -> Iterable[str]:
        """Check that Triton has answered the load, and that the model can be loaded afterwards."""
        assert self._thread is not None
        self._thread.join(60)
        if self._thread.is_alive():
            yield "Triton never answered the load"
        if self.error and (again := house.load_model(self._model)):
            yield f"cannot be loaded afterwards: {again}"

    def tidy(self, house: House) -> None:
        house.remove(self._model)
        for entry in set(house.disk.iterdir()) - self._known:
            entry.unlink(missing_ok=True)


FAULTS: Sequence[type[Fault]] = (
    KillLoading,
    KillCompiling,
    KillExecuting,
    KillStub,
    StopStub,
    KillControl,
    Freeze,
    KillDevice,
    FreezeDevice,
    FullSharedMemory,
    FullDisk,
    CorruptCache,
    BundleVanishes,
    HookHangs,
    HookHoards,
    HookExits,
    DeviceFails,
    ExecutionHangs,
    ClockJumps,
    Crowd,
)
