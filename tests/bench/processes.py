"""The processes of one server, their CPU time, and their own memory."""

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
    """Return process id -> role of the server, its stubs and the runtime, which is not a child and is asked."""
    found = {server_pid: SERVER}
    for child in psutil.Process(server_pid).children(recursive=True):
        if any(part.endswith("triton_python_backend_stub") for part in child.cmdline()[:1]):
            found[child.pid] = STUB
    if has_runtime:
        found[int(read_status(server_pid)["pid"])] = RUNTIME
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads, ended ones too.

    This is utime + stime of /proc/PID/stat, but in nanoseconds where that counts 10 ms (the kernel's CPU clock of
    another process: its number is made of the process id, as clock_getcpuclockid does).
    """
    return time.clock_gettime((~pid << 3) | 2)


@dataclass(frozen=True)
class Machine:
    """CPU seconds of the whole machine since its start: used by anyone, and stolen by the hypervisor."""

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
    """Megabytes (10^6 bytes) of a process, or of several together."""

    pss: float = 0.0
    uss: float = 0.0
    #: Not backed by a file: a lone first process of a kind would count shared pages as its own.
    anonymous: float = 0.0

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.pss + other.pss, self.uss + other.uss, self.anonymous + other.anonymous)


def memory(pid: int) -> Memory:
    """Return a process's memory: its share of everything (PSS), and its unique part (USS)."""
    rollup = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        rollup[name] = int(value.split()[0]) * 1024 / 1e6
    private = rollup["Private_Clean"] + rollup["Private_Dirty"]
    return Memory(rollup["Pss"], private, rollup["Pss_Anon"])


def shared_memory(pids: Iterator[int]) -> float:
    """Megabytes of the shared memory regions that these processes hold open, each counted once, touched or not.

    The Python backend's regions are files under /dev/shm, rsrv's are memfds.
    """
    regions: dict[tuple[int, int], int] = {}
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
                if target.startswith(("/dev/shm/", "/memfd:")):
                    stat = link.stat()
                    regions[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
            except FileNotFoundError:  # It was closed in between.
                continue
    return sum(regions.values()) / 1e6


@dataclass(frozen=True)
class ThreadTime:
    """One thread since its start: seconds on a CPU, seconds ready but waiting for one, and how often it slept."""

    name: str
    running: float
    waiting: float
    sleeps: int


def threads(pid: int) -> dict[int, ThreadTime]:
    """Thread id -> its times."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            running, waiting, _ = (int(field) for field in (task / "schedstat").read_text().split())
            status = (task / "status").read_text()
            name = (task / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):  # It ended in between.
            continue
        sleeps = int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        found[int(task.name)] = ThreadTime(name, running / 1e9, waiting / 1e9, sleeps)
    return found
