"""Memory that threads freed goes back to the system."""

import subprocess
import sys

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
