"""Memory that threads freed goes back to the system."""

import subprocess
import sys
from pathlib import Path

_THREADS = """
import threading
from rsrv.runtime.allocation import give_back, use_one_arena
from pathlib import Path

MIB = 2**20
use_one_arena()

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def work(ready):
    # A large block that is freed makes the C library keep smaller ones from then on.
    bytearray(31 * MIB)
    blocks = [bytearray(b"x") * MIB for _ in range(20)]
    survivors.append(bytearray(5000))
    ready.set()
    end.wait()

survivors, threads, end = [], [], threading.Event()
before = resident()
for _ in range(4):
    ready = threading.Event()
    threads.append(threading.Thread(target=work, args=(ready,)))
    threads[-1].start()
    ready.wait()
end.set()
for thread in threads:
    thread.join()
give_back()
print((resident() - before) // MIB)
"""


def test_what_threads_freed_goes_back() -> None:
    """After four threads have freed 80 MiB between small live objects, the system has nearly all of it."""
    done = subprocess.run([sys.executable, "-c", _THREADS], capture_output=True, text=True, check=True)

    assert int(done.stdout) < 4


_PREPARED = """
import resource
from rsrv.runtime.allocation import prepare_heap, restore_heap, use_one_arena

MIB = 2**20
use_one_arena()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

begun = resident()
prepare_heap(128 * MIB)
with open("/proc/self/smaps") as file:
    huge = sum(" hg" in line for line in file)  # of a line with the flags of a mapping
before = faults()
block = bytearray(120 * MIB)
taken = faults() - before
restore_heap()
del block
restore_heap()
print(taken, (resident() - begun) // MIB, huge)
"""


def test_an_allocation_from_a_prepared_heap_needs_no_new_pages() -> None:
    """A thread whose heap was prepared allocates 120 MiB, which are 30,720 small pages, and causes few page faults.

    After `restore_heap`, the memory returns to the system. The pages are huge if the kernel has huge pages, because a
    process with gigabytes of small pages takes long to end.
    """
    done = subprocess.run([sys.executable, "-c", _PREPARED], capture_output=True, text=True, check=True)

    faults, remaining_mib, huge = map(int, done.stdout.split())
    assert faults < 1000
    assert remaining_mib < 10
    assert bool(huge) == Path("/sys/kernel/mm/transparent_hugepage").exists()
