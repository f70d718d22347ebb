"""The processes of one server, with their CPU time and their memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.status import read_status

#: Roles of processes, in the order in which a request passes them.
SERVER, STUB, RUNTIME, CLIENT = "tritonserver", "stub", "runtime", "client"


def server_processes(server_pid: int, *, has_runtime: bool) -> dict[int, str]:
    """Return the roles of the server, its stubs and its runtime, by pid.

    The runtime is not a child of the server, so its pid is read from the runtime's status.
    """
    roles = {server_pid: SERVER}
    for child in psutil.Process(server_pid).children(recursive=True):
        if any(part.endswith("triton_python_backend_stub") for part in child.cmdline()[:1]):
            roles[child.pid] = STUB
    if has_runtime:
        roles[int(read_status(server_pid)["pid"])] = RUNTIME
    return roles


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process with all its threads, including the ended ones.

    The value is utime + stime of /proc/PID/stat, but with a resolution of nanoseconds and not of 10 ms. It is read from the
    process's CPU clock. The clock's number is computed from the process id, as in clock_getcpuclockid.
    """
    return time.clock_gettime((~pid << 3) | 2)


@dataclass(frozen=True)
class Machine:
    """CPU seconds of the whole machine since its start: time that processes used, and time that the hypervisor stole."""

    used: float
    stolen: float

    @classmethod
    def now(cls) -> Machine:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
        ticks = os.sysconf("SC_CLK_TCK")
        return cls((user + nice + system + irq + softirq) / ticks, steal / ticks)


@dataclass(frozen=True)
class Memory:
    """Memory of one or several processes, in units of 10^6 bytes."""

    pss: float = 0.0
    uss: float = 0.0
    #: Memory that no file backs. Unlike USS, it does not count pages of files, which are unique in the only process of a kind.
    anonymous: float = 0.0

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.pss + other.pss, self.uss + other.uss, self.anonymous + other.anonymous)


def memory(pid: int) -> Memory:
    """Return the memory of a process: with its share of common pages (PSS), and its unique pages (USS)."""
    rollup = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        rollup[name] = int(value.split()[0]) * 1024 / 1e6
    private = rollup["Private_Clean"] + rollup["Private_Dirty"]
    return Memory(rollup["Pss"], private, rollup["Pss_Anon"])


def shared_memory(pids: Iterator[int]) -> float:
    """Return the megabytes of the shared memory regions that these processes have open.

    Each region is counted once. Its allocated pages count even if these processes have not touched them. The Python backend's
    regions are files in /dev/shm, and rsrv's regions are memfds.
    """
    regions: dict[tuple[int, int], int] = {}
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
                if target.startswith(("/dev/shm/", "/memfd:")):
                    stat = link.stat()
                    regions[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
            except FileNotFoundError:  # The descriptor was closed during the loop.
                continue
    return sum(regions.values()) / 1e6


@dataclass(frozen=True)
class ThreadTime:
    """Times of a thread since its start: seconds on a CPU, seconds of waiting for a CPU, and number of sleeps."""

    name: str
    running: float
    waiting: float
    sleeps: int


def threads(pid: int) -> dict[int, ThreadTime]:
    """Return the times of a process's threads, by thread id."""
    times = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            running, waiting, _ = (int(field) for field in (task / "schedstat").read_text().split())
            status = (task / "status").read_text()
            name = (task / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):  # The thread ended during the loop.
            continue
        sleeps = int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        times[int(task.name)] = ThreadTime(name, running / 1e9, waiting / 1e9, sleeps)
    return times
